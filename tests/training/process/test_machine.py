"""What a run says of its machine."""

from __future__ import annotations

import json
import os
import platform

import numpy as np
import torch

from megafsdp.training.process.machine import describe_machine, versions


def test_a_machine_without_gpus_names_its_processor() -> None:
    """Plain values: they go into a file of JSON lines."""
    machine = describe_machine(torch.device("cpu"))
    assert json.loads(json.dumps(machine)) == machine
    assert (machine["device"], machine["num_cores"]) == ("cpu", os.cpu_count())
    assert machine["processor"]
    assert machine["device_name"] is machine["num_devices"] is None
    memory = machine["memory_nbytes"]
    assert memory is None or (isinstance(memory, int) and memory > 2**28)


def test_versions_are_those_that_are_imported() -> None:
    """Of Python, torch and numpy."""
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["numpy"] == np.__version__
