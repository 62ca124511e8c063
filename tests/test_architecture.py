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


EMPTY = [Module.parse(module.path, "") for module in MODULES]


def _snippet(path: str, source: str) -> list[Module]:
    """Return a package in which one file has the given text and all others are empty."""
    return [m for m in EMPTY if m.path != path] + [Module.parse(path, source)]


def _assert_none(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(breaches)


def test_imports_point_down() -> None:
    """A folder imports only what the table of folders allows."""
    _assert_none(architecture.breaches_of_layers(MODULES))


def test_sub_packages_import_as_the_table_says() -> None:
    """Within a folder a sub-package imports only from those below it."""
    _assert_none(architecture.breaches_of_sub_packages(MODULES))


def test_sub_packages_have_signboards() -> None:
    """A folder's __init__ says what to read first; only public rooms export names."""
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


def test_private_names_of_torch_stand_in_two_files() -> None:
    """What torch keeps to itself is wrapped in device/ and mesh/, with its public alternative."""
    _assert_none(architecture.breaches_of_private_names(MODULES))
    _assert_none(architecture.breaches_of_wrappers(MODULES))


def test_placements_are_asked_what_they_cut() -> None:
    """A strided shard cuts its tensor too, which torch's own question denies."""
    _assert_none(architecture.breaches_of_placement_questions(MODULES))
    snippet = [Module.parse("megafsdp/x.py", "any(p.is_shard() for p in placements)")]
    assert len(architecture.breaches_of_placement_questions(snippet)) == 1


def test_classes_are_small() -> None:
    """A class has at most 16 attributes; configurations and parts of a network are excepted."""
    _assert_none(architecture.breaches_of_attributes(MODULES))


@pytest.mark.parametrize("room", architecture.COMMENTED_ROOMS)
def test_rooms_say_why(room: str) -> None:
    """The rooms where order and lifetimes matter have a comment for about fourteen lines."""
    _assert_none(architecture.breaches_of_comments(MODULES, room))


def test_validation_stays_in_training() -> None:
    """What stands below training/ does not depend on the library that reads configurations."""
    _assert_none(architecture.breaches_of_validation(MODULES))


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
    """A folder without the sentence is a breach, and one with an import unless it is public."""
    path = "megafsdp/fsdp/params/__init__.py"
    mute = Module.parse(path, "import math")
    assert len(architecture.breaches_of_signboards([mute])) == 2
    public = Module.parse("megafsdp/fsdp/__init__.py", "import math")
    assert len(architecture.breaches_of_signboards([public])) == 1
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


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._disable_dynamo(f)",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist._coalescing_manager()",
        "from torch.utils._pytree import tree_map",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "import torch._dynamo",
        "local = parameter._local_tensor",
        "hooks = getattr(parameter, '_backward_hooks')",
    ],
)
def test_private_name_is_found(source: str) -> None:
    """A private name is found under any alias, as an attribute and in getattr; once."""
    found = architecture.breaches_of_private_names
    assert len(found([Module.parse("megafsdp/fsdp/runtime/unit.py", source)])) == 1
    assert found([Module.parse("megafsdp/device/torch_private.py", source)]) == []


def test_wrapper_without_public_twin_is_found() -> None:
    """A wrapper of a private name says what is public instead, and for which versions it holds."""
    path = "megafsdp/mesh/torch_private.py"
    mute, told = (
        'def f():\n    """Do."""',
        'def f():\n    """Do.\n\n    Public: g(). 2.11 to 2.15."""',
    )
    assert len(architecture.breaches_of_wrappers([Module.parse(path, mute)])) == 1
    assert architecture.breaches_of_wrappers([Module.parse(path, told)]) == []


def test_lists_of_tensors_and_operators_are_no_private_names() -> None:
    """Operators on lists have no public twin, operators' own names are what they are."""
    source = "import torch\ntorch._foreach_add_(x, y)\ntorch.ops.aten._scaled_mm\nself._buffers"
    assert architecture.breaches_of_private_names([Module.parse("megafsdp/x.py", source)]) == []


def test_class_of_many_attributes_is_found() -> None:
    """Fields and assignments to self count once each, wherever they are made."""
    fields = "".join(f"    a{i}: int\n" for i in range(8))
    method = "    def f(self):\n        self.a0 = 1\n"
    method += "".join(f"        self.b{i} = {i}\n" for i in range(8))
    late = "    def g(self):\n        (self.c, other.d), self.b0 = x\n"
    small, large = f"class A:\n{fields}{method}", f"class A:\n{fields}{method}{late}"
    path = "megafsdp/fsdp/runtime/unit.py"
    assert architecture.breaches_of_attributes([Module.parse(path, small)]) == []
    (breach,) = architecture.breaches_of_attributes([Module.parse(path, large)])
    assert "class A has 17 attributes, cap 16" in breach
    sections = Module.parse("megafsdp/training/config/sections.py", large)
    assert architecture.breaches_of_attributes([sections]) == []


def test_room_without_comments_is_found() -> None:
    """Comments on lines of their own count; docstrings, blank lines and trailing ones do not."""
    code = '"""A file.\n\n# No comment.\n"""\n\n' + "x = 1  # Trailing.\n" * 14
    path = "megafsdp/buffer/layout.py"
    (breach,) = architecture.breaches_of_comments([Module.parse(path, code)], "buffer")
    assert "0 comments to 14 lines of code" in breach
    commented = Module.parse(path, f"{code}# Because.\n")
    assert architecture.breaches_of_comments([commented], "buffer") == []


@pytest.mark.parametrize("source", ["import pydantic", "from jsonargparse import CLI"])
def test_validation_below_training_is_found(source: str) -> None:
    """The validation library is for training/ alone."""
    found = architecture.breaches_of_validation
    assert found([Module.parse("megafsdp/fsdp/params/policy.py", source)])
    assert found([Module.parse("megafsdp/training/config/sections.py", source)]) == []
