"""What an offloaded optimizer owes its users, by requirement: checkpoints and state dicts.

Each test is named after the requirement that it holds. Those about the step itself are in the tests
of the optimizer.
"""

from __future__ import annotations

import ast
import functools
import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp import FusedAdam, HybridDeviceOptimizer, MixedPrecisionPolicy
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.checkpoint import async_save, load, save
from megafsdp.checkpoint.background.staging import Staging
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.format.regions import local_regions
from megafsdp.checkpoint.state.canonical import model_state, optimizer_state, parameter_names
from megafsdp.optimizer.offload.bucket_step import BucketStep
from tests.fsdp.toy import Net
from tests.optimizer.offload.hybrid_runs import (
    KINDS,
    Case,
    assert_same,
    bits,
    go_on,
    make_kind,
    make_net,
    make_optimizer,
)
from tests.ranks import Ranks
from tests.training.runs import stored_tensors

_FRACTIONS = (0.0, 0.5, 1.0)
_Pairs = tuple[tuple[float, float], ...]
_ROOT = Path(__file__).parents[2]


def _trained(fraction: float | None, num_steps: int = 2) -> tuple[Net, FusedAdam]:
    case = Case(fraction, max_grad_norm=0.5)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    go_on(net, optimizer, range(num_steps))
    return net, optimizer


def _save_at_each_fraction(root: Path, pairs: _Pairs) -> list[Any]:
    listed = []
    for fraction in _FRACTIONS:
        net, optimizer = _trained(fraction)
        # The worker may still be at it: saving waits.
        save(root / str(fraction), model=net, optimizer=optimizer, step=2)
        state = optimizer_state(optimizer, parameter_names(net))
        kinds = {key: (type(t).__name__, tuple(t.shape)) for key, t in state.tensors.items()}
        listed.append((kinds, state.objects))
    wanted = bits(net, optimizer)
    wanted_losses = go_on(net, optimizer, range(2, 3))
    wanted_after = bits(net, optimizer)
    for saved, fraction in pairs:
        net, optimizer = _trained(fraction, num_steps=1)
        load(root / str(saved), model=net, optimizer=optimizer)
        assert_same(bits(net, optimizer), wanted)
        assert go_on(net, optimizer, range(2, 3)) == wanted_losses, (saved, fraction)
        assert_same(bits(net, optimizer), wanted_after)
    return listed


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(((0.0, 0.5), (0.5, 1.0), (1.0, 0.0)), id="next"),
        pytest.param(
            tuple(itertools.product(_FRACTIONS, _FRACTIONS)),
            id="each",
            marks=pytest.mark.matrix("offload"),
        ),
    ],
)
def test_states_are_stored_alike_whatever_is_offloaded(
    ranks: Ranks, tmp_path: Path, pairs: _Pairs
) -> None:
    """The same keys, shapes and bits at each fraction, on all ranks; each loads others'."""
    found = ranks(2).run(_save_at_each_fraction, tmp_path, pairs)
    assert all(own == found[0][0] for listed in found for own in listed)
    kinds, _ = found[0][0]
    assert ("UnevenDTensor", (60, 12)) in kinds.values()
    stored = [stored_tensors(tmp_path / str(fraction), 2) for fraction in _FRACTIONS]
    for other in stored[1:]:
        assert_same(other, stored[0])
    manifests = [read_manifest(tmp_path / str(f) / "iter_0000002") for f in _FRACTIONS]
    assert all(m.tensors.keys() == manifests[0].tensors.keys() for m in manifests)
    assert all(m.objects == manifests[0].objects for m in manifests)


def _save_with(root: Path, kind: str) -> None:
    net = make_net(Case())
    optimizer = make_kind(net, kind)
    go_on(net, optimizer, range(2))
    save(root, model=net, optimizer=optimizer, step=2)


@pytest.mark.parametrize("kind", KINDS)
def test_main_weights_are_stored_once(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """As the model's weights, in fp32; no state repeats them under another name."""
    ranks(2).run(_save_with, tmp_path, kind)
    stored = stored_tensors(tmp_path, 2)
    weights = {k: t for k, t in stored.items() if k.startswith("model.")}
    states = {k: t for k, t in stored.items() if k.startswith("optimizer.state.")}
    assert {key.rpartition(".")[2] for key in states} == {"step", "exp_avg", "exp_avg_sq"}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for key, weight in weights.items():
        assert any((weight.bfloat16().float() != weight).flatten()), "more than a compute weight"
        assert not any(torch.equal(weight, state) for state in states.values()), key


def _describe(root: Path, fraction: float) -> tuple[Counter[str], Counter[str]]:
    net, optimizer = _trained(fraction, num_steps=1)
    with record_collectives() as record:
        found = model_state(net)
        found.update(optimizer_state(optimizer, parameter_names(net)))
        num_regions = 0
        for key, stored in found.tensors.items():
            num_regions += len(local_regions(key, stored))
            if isinstance(stored, UnevenDTensor):
                stored.__create_chunk_list__()
                stored.__create_write_items__(key, stored)
    assert num_regions > len(list(net.parameters()))
    assert not record.calls
    with record_collectives() as saving:
        save(root / str(fraction), model=net, optimizer=optimizer, step=2)
    with record_collectives() as loading:
        load(root / str(fraction), model=net, optimizer=optimizer)
    return saving.calls, loading.calls


def test_chunks_are_described_without_a_collective(ranks: Ranks, tmp_path: Path) -> None:
    """By arithmetic on each rank; saves and loads cost as many as without offload, a few."""
    with_offload = ranks(2).run(_describe, tmp_path, 1.0)
    assert with_offload == ranks(2).run(_describe, tmp_path, 0.0)
    for saving, loading in with_offload:
        assert 0 < sum(saving.values()) <= 3
        assert 0 < sum(loading.values()) <= 2


@functools.cache
def _texts() -> dict[str, str]:
    paths = sorted((_ROOT / "megafsdp").rglob("*.py"))
    return {path.relative_to(_ROOT).as_posix(): path.read_text() for path in paths}


@functools.cache
def _nodes(path: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(_texts()[path])))


def _nodes_with(name: str) -> list[tuple[str, ast.AST]]:
    paths = [path for path, text in _texts().items() if name in text]
    return [(path, node) for path in paths for node in _nodes(path)]


def _definitions(name: str) -> list[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = _nodes_with(name)
    return [path for path, node in nodes if isinstance(node, kinds) and node.name == name]


def _callers(name: str) -> list[str]:
    calls = [(path, node.func) for path, node in _nodes_with(name) if isinstance(node, ast.Call)]
    named = [
        (p, f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")) for p, f in calls
    ]
    return sorted({path for path, called in named if called == name})


def test_uneven_chunks_are_made_in_one_place() -> None:
    """Cuts in uneven_layout.py, chunk lists in uneven.py, which all others read."""
    assert _definitions("regions_of_range") == ["megafsdp/buffer/dtensor/uneven_layout.py"]
    for name in ("__create_chunk_list__", "__create_write_items__", "__get_tensor_shard__"):
        assert _definitions(name) == ["megafsdp/buffer/dtensor/uneven.py"], name
    # A layout cuts the own rows of a whole tensor.
    readers = ["megafsdp/buffer/dtensor/uneven.py", "megafsdp/buffer/dtensor/uneven_layout.py"]
    assert _callers("regions") == readers
    assert _callers("__create_chunk_list__") == ["megafsdp/checkpoint/format/regions.py"]
    # The manifest's are of regions, which are read from chunk lists.
    makers = ["megafsdp/buffer/dtensor/uneven.py", "megafsdp/checkpoint/format/manifest.py"]
    assert _callers("ChunkStorageMetadata") == makers


def _one_description() -> list[dict[str, Any]]:
    net, optimizer = _trained(1.0, num_steps=1)
    found = optimizer_state(optimizer, parameter_names(net)).tensors
    chunks = {}
    for key, stored in found.items():
        assert isinstance(stored, torch.Tensor)
        if isinstance(stored, UnevenDTensor):
            own = [(*c.offsets, *c.sizes) for c in stored.__create_chunk_list__()]
            assert own == [(*r.offsets, *r.sizes) for r in local_regions(key, stored)]
            chunks[key] = own
    return [chunks, {key: tuple(stored.shape) for key, stored in found.items()}]


def test_chunks_of_offloaded_states_cover_each_element_once(ranks: Ranks) -> None:
    """What ranks list by themselves fits together, rank after rank."""
    found = ranks(3).run(_one_description)
    shapes = found[0][1]
    assert found[0][0]
    for key in found[0][0]:
        count = torch.zeros(shapes[key])
        for chunks, _ in found:
            for own in chunks[key]:
                offsets, sizes = own[: len(own) // 2], own[len(own) // 2 :]
                count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        assert bool((count == 1).all()), key


_NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16)


def _narrow_run(kind: str) -> tuple[Net, FusedAdam]:
    net = make_net(Case(policy=_NARROW))
    return net, make_kind(net, kind, 0.5)


def _saved_twice(root: Path, kind: str) -> None:
    net, optimizer = _narrow_run(kind)
    with pytest.MonkeyPatch.context() as patch:
        inner = BucketStep.run

        def late(step: BucketStep) -> None:
            time.sleep(2e-3)
            inner(step)

        copies = Staging.copy

        def late_copies(staging: Staging) -> None:
            time.sleep(5e-2)
            copies(staging)

        patch.setattr(BucketStep, "run", late)
        patch.setattr(Staging, "copy", late_copies)
        losses = go_on(net, optimizer, range(3))
        pending = async_save(root, model=net, optimizer=optimizer, step=3)
        losses += go_on(net, optimizer, range(3, 5))
        pending.result()
        save(root, model=net, optimizer=optimizer, step=5)
        losses += go_on(net, optimizer, range(5, 6))
    wanted = bits(net, optimizer)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert (optimizer.offload_counts.committed > 0) == (kind == "ahead")
    for step in (3, 5):
        other, restored = _narrow_run(kind)
        load(root, model=other, optimizer=restored, step=step)
        assert go_on(other, restored, range(step, 6)) == losses[step:]
        assert_same(bits(other, restored), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_saved_twice_resume_bit_for_bit(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Bf16 copies to and from a late worker; in the background at step 3, again at 5."""
    ranks(2).run(_saved_twice, tmp_path, kind)


def _weights_alone(root: Path) -> None:
    net, optimizer = _trained(1.0)
    save(root, model=net, optimizer=optimizer, step=2)
    found = []
    for fraction in (None, *_FRACTIONS):
        other, _ = _trained(None, num_steps=0)
        fresh = make_optimizer(other, Case(fraction))
        load(root, model=other)
        assert not fresh.state, "no step was needed to make states"
        losses = go_on(other, fresh, range(2))
        found.append(bits(other, fresh) | {"losses": losses})
    for own in found[1:]:
        assert_same(own, found[0])
    by_hand = make_net(Case())
    by_hand.load_state_dict(net.state_dict())
    wanted = go_on(by_hand, make_optimizer(by_hand, Case()), range(2))
    assert found[0]["losses"] == wanted


def test_a_load_of_weights_alone_begins_alike_at_each_fraction(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Both of the first two steps are those of a fresh optimizer over the loaded weights."""
    ranks(2).run(_weights_alone, tmp_path)
