"""The tree keeps to the layout of the design; each rule also finds a snippet that breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import architecture
from tests.architecture import Module

ROOT = Path(__file__).parents[1]
MODULES = architecture.read_modules(ROOT, "megafsdp")
EXAMPLES = architecture.read_modules(ROOT, "examples")
BENCHMARKS = architecture.read_modules(ROOT, "benchmarks")


def _snippet(path: str, source: str) -> list[Module]:
    """Return a package in which one file has the given text and all others are empty."""
    paths = {module.path for module in MODULES} | {path}
    return [Module.parse(p, source if p == path else "") for p in sorted(paths)]


def _assert_none(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(breaches)


def test_imports_point_down() -> None:
    """A folder imports only what the table of folders allows."""
    _assert_none(architecture.breaches_of_layers(MODULES))


def test_sub_packages_import_as_the_table_says() -> None:
    """Within a folder a sub-package imports only from those below it."""
    _assert_none(architecture.breaches_of_sub_packages(MODULES))


def test_sub_packages_have_signboards() -> None:
    """A sub-package's __init__ says what to read first; only public rooms export names."""
    _assert_none(architecture.breaches_of_signboards(MODULES))


def test_imports_have_no_cycle() -> None:
    """No module names, through others, itself."""
    _assert_none(architecture.breaches_of_acyclicity(MODULES))


def test_imports_are_absolute_and_at_the_top() -> None:
    """Only numba and optional packages are imported inside functions."""
    _assert_none(architecture.breaches_of_import_style(MODULES))


def test_collectives_have_one_door() -> None:
    """Nothing but buffer/comm/collectives.py calls a collective of torch.distributed."""
    _assert_none(architecture.breaches_of_the_collectives_door(MODULES + EXAMPLES))


def test_files_functions_and_signatures_are_small() -> None:
    """Files, functions and parameter lists keep to their caps."""
    _assert_none(architecture.breaches_of_sizes(MODULES + EXAMPLES + BENCHMARKS))


def test_axis_names_are_spelt_in_mesh_alone() -> None:
    """Other folders get axis names from mesh/."""
    _assert_none(architecture.breaches_of_axis_spelling(MODULES))


def test_examples_use_public_names() -> None:
    """An example imports what a user may import."""
    _assert_none(architecture.breaches_of_public_names(EXAMPLES, MODULES))


def test_tree_is_not_empty() -> None:
    """The rules have something to hold."""
    assert {"errors", "buffer", "fsdp"} <= {module.room for module in MODULES}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megafsdp/mesh/placement.py", "from megafsdp.buffer.layout import plan_layout"),
        ("megafsdp/errors.py", "import megafsdp.mesh.annotation"),
        ("megafsdp/models/gpt.py", "from megafsdp import fsdp"),
        ("megafsdp/parallel/linear.py", "from megafsdp.buffer import layout"),
        ("megafsdp/device/memory.py", "from megafsdp import _native"),
        ("megafsdp/buffer/layout.py", "from megafsdp import fully_shard"),
        ("megafsdp/utils.py", ""),
    ],
)
def test_upward_import_is_found(path: str, source: str) -> None:
    """An import that the table does not allow is a breach, however it is written."""
    assert len(architecture.breaches_of_layers(_snippet(path, source))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megafsdp/buffer/layout.py", "from megafsdp.errors import expected"),
        ("megafsdp/parallel/linear.py", "from megafsdp.buffer.comm import collectives"),
        ("megafsdp/training/step/train_step.py", "from megafsdp.checkpoint import save"),
        ("megafsdp/__init__.py", "from megafsdp.training import cli"),
    ],
)
def test_downward_import_is_no_breach(path: str, source: str) -> None:
    """What the table allows is left alone."""
    assert architecture.breaches_of_layers(_snippet(path, source)) == []


def test_import_of_a_higher_sub_package_is_found() -> None:
    """What a unit owns may not know when it runs; a folder of no name is a breach."""
    source = "from megafsdp.fsdp.runtime.unit import FSDPUnit"
    package = _snippet("megafsdp/fsdp/params/policy.py", source)
    (breach,) = architecture.breaches_of_sub_packages(package)
    assert "fsdp.params may not import fsdp.runtime" in breach
    (breach,) = architecture.breaches_of_sub_packages(_snippet("megafsdp/fsdp/misc/x.py", ""))
    assert "'fsdp.misc' is no sub-package" in breach


def test_mute_or_importing_signboard_is_found() -> None:
    """A sub-package without the sentence, or with an import, is a breach."""
    path = "megafsdp/fsdp/params/__init__.py"
    mute = Module.parse(path, "import math")
    assert len(architecture.breaches_of_signboards([mute])) == 2
    assert not architecture.breaches_of_signboards([Module.parse(path, '"""X. Read first: y."""')])


def test_cycle_is_found() -> None:
    """Two files of one folder that name each other are a cycle; so is a file naming its folder."""
    one = Module.parse("megafsdp/data/one.py", "from megafsdp.data import two")
    two = Module.parse("megafsdp/data/two.py", "from megafsdp.data.one import x")
    folder = Module.parse("megafsdp/data/__init__.py", "from megafsdp.data.three import x")
    three = Module.parse("megafsdp/data/three.py", "from megafsdp.data import y")
    assert "cycle" in architecture.breaches_of_acyclicity([one, two])[0]
    assert "cycle" in architecture.breaches_of_acyclicity([folder, three])[0]
    assert architecture.breaches_of_acyclicity([one, folder]) == []


@pytest.mark.parametrize(
    "source", ["def f():\n    import json", "from . import layout", "def f():\n    import torch.fx"]
)
def test_import_style_is_found(source: str) -> None:
    """Imports inside functions and relative ones are breaches."""
    assert architecture.breaches_of_import_style(_snippet("megafsdp/mesh/x.py", source))


def test_optional_packages_may_be_imported_late() -> None:
    """Numba and optional packages are excepted."""
    source = "def f():\n    import numba\n    from torch.utils.tensorboard import SummaryWriter"
    assert architecture.breaches_of_import_style(_snippet("megafsdp/mesh/x.py", source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch import distributed\ndistributed.barrier()",
        "from torch.distributed import all_gather_into_tensor as gather",
        "from torch.distributed._functional_collectives import all_reduce",
    ],
)
def test_collective_outside_the_door_is_found(source: str) -> None:
    """A collective is found under any alias; the door itself may call it."""
    found = architecture.breaches_of_the_collectives_door
    assert found(_snippet("megafsdp/fsdp/runtime/unit.py", source))
    assert found(_snippet("megafsdp/buffer/comm/collectives.py", source)) == []


def test_rank_queries_are_no_collectives() -> None:
    """Asking for the rank or starting the process group is open to all."""
    source = "import torch.distributed as dist\ndist.get_rank()\ndist.init_process_group()"
    package = _snippet("megafsdp/fsdp/runtime/unit.py", source)
    assert architecture.breaches_of_the_collectives_door(package) == []


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("megafsdp/fsdp/other.py", "x = 1\n" * 601, "cap 600"),
        ("megafsdp/fsdp/runtime/unit.py", "def f():\n" + "    x = 1\n" * 80, "cap 80"),
        ("megafsdp/fsdp/runtime/unit.py", "def f(a, b, c, *, d, e, g, h, i, j): ...", "cap 8"),
    ],
)
def test_excess_size_is_found(path: str, source: str, message: str) -> None:
    """One line, function line or parameter too many is a breach."""
    (breach,) = architecture.breaches_of_sizes(_snippet(path, source))
    assert message in breach


def test_spelt_axis_is_found() -> None:
    """An axis name in a string is a breach outside mesh/."""
    source = 'mesh["dp_shard"]'
    assert architecture.breaches_of_axis_spelling(_snippet("megafsdp/fsdp/runtime/unit.py", source))
    assert not architecture.breaches_of_axis_spelling(_snippet("megafsdp/mesh/x.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "from megafsdp.fsdp.runtime.unit import x",
        "import megafsdp.errors",
        "from megafsdp import _native",
    ],
)
def test_private_import_in_example_is_found(source: str) -> None:
    """Files of a folder and underscored names are not for examples."""
    example = [Module.parse("examples/own.py", source)]
    public = [Module.parse("examples/own.py", "from megafsdp.checkpoint import save")]
    assert architecture.breaches_of_public_names(example, MODULES)
    assert architecture.breaches_of_public_names(public, MODULES) == []
