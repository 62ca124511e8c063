"""What checkpoints owe an offloaded optimizer's states, by requirement: shapes and memory.

Each test is named after the requirement that it holds. Whatever the optimizer on the host keeps,
what is stored and loaded is like the parameter.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, HybridDeviceOptimizer, MixedPrecisionPolicy
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.checkpoint import load, save
from megafsdp.errors import CheckpointError
from megafsdp.optimizer.offload.placement import groups_of
from tests.checkpoint.state import fused_model
from tests.optimizer.offload.hybrid_runs import (
    KINDS,
    Case,
    assert_same,
    backward,
    bits,
    go_on,
    make_host_adamw,
    make_kind,
    make_net,
)
from tests.ranks import Ranks
from tests.training.runs import stored_tensors


def _fused(fraction: float | None, kind: str, salt: int = 0) -> tuple[nn.Module, FusedAdam]:
    model = fused_model.build(salt, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if kind == "torch's" and fraction is not None:
        return model, make_host_adamw(model, fraction)
    options = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
    if fraction is None:
        return model, FusedAdam(model.parameters(), **options)
    return model, HybridDeviceOptimizer(model.parameters(), offload_fraction=fraction, **options)


def _fused_states(root: Path, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = _fused(1.0, kind)
    fused_model.step(model, optimizer)
    save(root, step=2, model=model, optimizer=optimizer)
    wanted = bits(model, optimizer)
    for number, fraction in enumerate((1.0, 0.5, None), start=1):
        other, restored = _fused(fraction, kind, salt=number)
        load(root, model=other, optimizer=restored)
        assert_same(bits(other, restored), wanted)
    return wanted


@pytest.mark.parametrize(("kind", "world_size"), [("ours", 3), ("torch's", 2)])
def test_states_of_fused_parameters_are_stored_in_their_parts(
    ranks: Ranks, tmp_path: Path, kind: str, world_size: int
) -> None:
    """SwiGLU and gated delta nets, by the parameter's shape, though the host's are flat."""
    wanted = ranks(world_size).run(_fused_states, tmp_path, kind)[0]
    stored = stored_tensors(tmp_path, 2)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        whole = {n: wanted[f"{n}.{state}"] for n in wanted if f"{n}.{state}" in wanted}
        assert fused_model.PARTS.keys() <= whole.keys()
        for name, tensor in fused_model.split(whole).items():
            assert torch.equal(stored[f"optimizer.state.{name}.{state}"], tensor), (name, state)


class _RowSums(torch.optim.SGD):
    """Has a state that is not like its parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep three numbers for each parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sums"] = torch.zeros(3)


def _wrong_numels(root: Path) -> None:
    net = make_net(Case())
    optimizer = make_kind(net, "ours")
    go_on(net, optimizer, range(1))
    packed = optimizer.state_dict()
    held = tuple(local_tensor(optimizer.param_groups[0]["params"][1]).shape)
    packed["state"][1]["exp_avg"] = torch.zeros(5, 2)
    with pytest.raises(ValueError, match=r"\(5, 2\)") as error:
        optimizer.load_state_dict(packed)
    assert str(held) in str(error.value)
    net = make_net(Case())
    by_rows = HybridDeviceOptimizer(net.parameters(), lr=1e-2, cpu_optimizer_cls=_RowSums)
    go_on(net, by_rows, range(1))
    with pytest.raises(CheckpointError, match=r"\(3,\)") as error:
        save(root, model=net, optimizer=by_rows, step=1)
    assert str(tuple(net.embedding.weight.shape)) in str(error.value)


def test_a_state_of_another_size_is_refused_by_both_shapes(ranks: Ranks, tmp_path: Path) -> None:
    """That of the state and that of the parameter, before anything is loaded or written."""
    ranks(2).run(_wrong_numels, tmp_path)
    assert not list(tmp_path.glob("iter_*"))


def _shapes_of_loaded_states(kind: str) -> None:
    net = make_net(Case())
    optimizer = make_kind(net, kind)
    go_on(net, optimizer, range(1))
    given = optimizer.state_dict()
    forms = [lambda t: t, local_tensor, lambda t: local_tensor(t).reshape(-1)]
    wanted = bits(net, optimizer)
    losses = []
    for form in forms:
        packed = copy.deepcopy(given)
        for states in packed["state"].values():
            states.update({k: form(t) if t.ndim else t for k, t in states.items()})
        other = make_net(Case())
        other.load_state_dict(net.state_dict())
        restored = make_kind(other, kind)
        restored.load_state_dict(packed)
        assert_same(bits(other, restored), wanted)
        shown = restored.state[other.blocks[0].up.weight]["exp_avg"]
        assert isinstance(shown, UnevenDTensor)
        assert shown.shape == (60, 12)
        losses += go_on(other, restored, range(1, 2))
    assert losses == [backward(net, 1)] * len(forms)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_taken_in_the_parameters_shape_and_flat(ranks: Ranks, kind: str) -> None:
    """Sharded, or what this rank holds, as its rows or as one dimension."""
    ranks(2).run(_shapes_of_loaded_states, kind)


def _addresses(net: nn.Module, optimizer: FusedAdam) -> dict[str, int]:
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = local_tensor(parameter).data_ptr()
        for state_name, value in optimizer.state[parameter].items():
            # A count of steps has no memory of its own in the slab.
            if value.ndim:
                found[f"{name}.{state_name}"] = local_tensor(value).data_ptr()
    return found


def _loaded_in_place(root: Path, kind: str) -> None:
    net = make_net(Case())
    optimizer = make_kind(net, kind)
    go_on(net, optimizer, range(2))
    save(root, model=net, optimizer=optimizer, step=2)
    wanted = bits(net, optimizer)
    packed, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    before = _addresses(net, optimizer)
    go_on(net, optimizer, range(2, 4))
    # The worker may still be at it: loading waits.
    load(root, model=net, optimizer=optimizer)
    assert _addresses(net, optimizer) == before
    assert_same(bits(net, optimizer), wanted)
    go_on(net, optimizer, range(2, 4))
    optimizer.load_state_dict(packed)
    net.load_state_dict(weights)
    assert _addresses(net, optimizer) == before
    assert_same(bits(net, optimizer), wanted)
    fresh = make_net(Case())
    unused = make_kind(fresh, kind)
    slabs = [g.main_weight.flat.untyped_storage().data_ptr() for g in groups_of(fresh.parameters())]
    load(root, model=fresh, optimizer=unused)
    for parameter in fresh.parameters():
        assert local_tensor(parameter).untyped_storage().data_ptr() in slabs
        if kind == "ours":
            moment = local_tensor(unused.state[parameter]["exp_avg"])
            # Empty tensors have no memory.
            assert not moment.numel() or moment.untyped_storage().data_ptr() in slabs
    assert_same(bits(fresh, unused), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_write_into_the_hosts_memory(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """By checkpoints and state dicts, into the tensors that the host steps, used or fresh."""
    ranks(2).run(_loaded_in_place, tmp_path, kind)
