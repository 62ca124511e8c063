"""examples/cluster/ray_train.py on two workers of this machine, one of which is killed."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp import checkpoint, full_state_dict, fully_shard_model
from megafsdp.models import build_model, presets
from tests.end_to_end.launchers import until
from tests.end_to_end.test_readme import ROOT
from tests.ranks import Ranks

pytest.importorskip("ray", reason="ecosystem: ray is not installed")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

PROGRAM = ROOT / "examples/cluster/ray_train.py"
CONFIG = {"preset": "qwen3-toy", "rows": 2, "steps": 60, "save_every": 5}
# Ray writes no token into the home folder and sends nothing.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
_MARK = "RAY_CLUSTER_TEST"


def _unbroken() -> dict[str, torch.Tensor]:
    """Return the weights that the training function leaves if it runs on these ranks at once."""
    names: dict[str, Any] = runpy.run_path(str(PROGRAM))
    models = []

    def report(metrics: dict[str, float], *, model: torch.nn.Module, **_: object) -> None:
        models.append(model)

    train, ray = names["train"], names["ray"]
    train.__globals__.update(report=report, resume=lambda model, optimizer: 0)
    before = ray.train.torch.get_device
    try:
        ray.train.torch.get_device = lambda: torch.device("cpu")
        train(CONFIG)
    finally:
        ray.train.torch.get_device = before
    return full_state_dict(models[-1])


def _loaded(directory: Path) -> dict[str, torch.Tensor]:
    model = fully_shard_model(build_model(presets["qwen3-toy"], seed=1), ["TransformerLayer"])
    checkpoint.load(directory, model=model)
    return full_state_dict(model)


def _workers(mark: str) -> list[int]:
    """Return the workers of the training that has a mark in its environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() not in (folder / "environ").read_bytes():
                continue
            if b"RayTrainWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_killed_worker_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Ray starts the workers anew; the weights are those of a run that nothing interrupts."""
    mark = uuid.uuid4().hex
    options = ["--workers=2", f"--storage={tmp_path}", "--name=run"]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in CONFIG.items()]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT), _MARK: mark}
    log = tmp_path / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, str(PROGRAM), *options],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        root = tmp_path / "run" / "megafsdp"
        until(lambda: job.poll() is not None or (root / "iter_0000010").exists(), "step 10")
        alive = _workers(mark)
        assert alive, log.read_text()[-4000:]
        os.kill(alive[0], signal.SIGKILL)
        assert job.wait(timeout=300) == 0, log.read_text()[-4000:]
    assert checkpoint.latest_step(root) == CONFIG["steps"]
    weights = ranks(2).run(_unbroken)[0]
    for state in ranks(2).run(_loaded, root):
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
