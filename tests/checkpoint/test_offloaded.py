"""Checkpoints and state dicts do not show what was offloaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafsdp import FusedAdam, full_tensor
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.checkpoint import load, save
from megafsdp.optimizer.offload.bucket_step import BucketStep
from tests.fsdp.toy import Net
from tests.optimizer.offload.hybrid_runs import (
    Case,
    assert_same,
    backward,
    bits,
    make_net,
    make_optimizer,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _addresses(optimizer: FusedAdam, net: Net) -> dict[str, int]:
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = local_tensor(parameter).data_ptr()
        for state_name in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{state_name}"] = local_tensor(
                optimizer.state[parameter][state_name]
            ).data_ptr()
    return found


def _round_trip(path: str, saved: float | None, loaded: float | None, is_used: bool) -> None:
    """Save at one fraction, load at another, go on: as if nothing had been."""
    case = Case(saved, max_grad_norm=0.5)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    for seed in range(2):
        backward(net, seed)
        optimizer.step()
        optimizer.zero_grad()
    # The worker may still be at it: saving waits.
    save(path, model=net, optimizer=optimizer, step=2)
    other = make_net(case)
    with torch.no_grad():
        for parameter in other.parameters():
            local_tensor(parameter).zero_()
    restored = make_optimizer(other, replace(case, fraction=loaded))
    if is_used:
        backward(other, 7)
        restored.step()
        restored.zero_grad()
    before = _addresses(restored, other) if is_used else {}
    load(path, model=other, optimizer=restored)
    found = [bits(other, restored), bits(net, optimizer)]
    assert_same(*found)
    after = _addresses(restored, other)
    assert before == {name: after[name] for name in before}, "loaded in place"
    losses = []
    for seed in range(2, 3):
        losses.append([backward(net, seed), backward(other, seed)])
        for stepped in (optimizer, restored):
            stepped.step()
            stepped.zero_grad()
    assert all(a == b for a, b in losses)
    assert_same(bits(other, restored), bits(net, optimizer))


@pytest.mark.parametrize(
    ("saved", "loaded", "is_used"),
    [(1.0, 0.0, False), (1.0, 0.5, True), (0.5, 1.0, True), (None, 1.0, False), (1.0, None, True)],
)
def test_a_checkpoint_at_one_fraction_loads_at_another(
    ranks: Ranks, tmp_path: Path, saved: float | None, loaded: float | None, is_used: bool
) -> None:
    """Read into the memory that is there, by optimizers that were used or not."""
    ranks(2).run(_round_trip, str(tmp_path / "saved"), saved, loaded, is_used)


def _weights_only(path: str) -> None:
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(1.0))
    backward(net, 0)
    inner = BucketStep._update

    def late(step: BucketStep, scale: float) -> None:
        time.sleep(0.1)
        inner(step, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketStep, "_update", late)
        optimizer.step()
        optimizer.zero_grad()
        save(path, model=net, step=1)
    wanted = [backward(net, 5)]
    other = make_net(Case())
    restored = make_optimizer(other, Case(1.0))
    backward(other, 3)
    restored.step()
    restored.zero_grad()
    load(path, model=other)
    assert [backward(other, 5)] == wanted
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(full_tensor(a.detach()), full_tensor(b.detach())), name


def test_a_load_of_weights_alone_refreshes_host_and_device(ranks: Ranks, tmp_path: Path) -> None:
    """The optimizer is not called; the next forward reads the loaded weights."""
    ranks(2).run(_weights_only, str(tmp_path / "saved"))


def _state_dicts() -> None:
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(0.5))
    plain_net = make_net(Case())
    plain = make_optimizer(plain_net, Case())
    for model, stepped in ((net, optimizer), (plain_net, plain)):
        backward(model, 0)
        stepped.step()
        stepped.zero_grad()
    restored_net = make_net(Case())
    with torch.no_grad():
        for p, q in zip(restored_net.parameters(), plain_net.parameters(), strict=True):
            local_tensor(p).copy_(local_tensor(q))
    restored = make_optimizer(restored_net, Case(1.0))
    restored.load_state_dict(plain.state_dict())
    restored_net.load_state_dict(plain_net.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    for model, stepped in ((net, optimizer), (plain_net, plain), (restored_net, restored)):
        backward(model, 1)
        stepped.step()
    wanted = bits(plain_net, plain)
    assert_same(bits(net, optimizer), wanted)
    assert_same(bits(restored_net, restored), wanted)


def test_state_dicts_pass_between_fractions(ranks: Ranks) -> None:
    """Also from and to FusedAdam."""
    ranks(2).run(_state_dicts)
