"""torch's optimizers, norm clipping and loss scaling on uneven DTensors, against plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from megafsdp.buffer.dtensor.factories import make_replicated
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from tests.buffer.cuts import cut, random, whole_mesh
from tests.buffer.dtensor.emulation import torch_2_11
from tests.ranks import Ranks

# Shapes with cuts for 3 ranks: each rank has an empty shard somewhere.
CUTS: list[tuple[tuple[int, ...], int, int]] = [
    ((10, 4), 4, 10),
    ((10, 4), 22, 14),
    ((17,), 3, 9),
    ((1, 5), 12, 6),
    ((4, 2, 3), 0, 8),
]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD for-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
}


def _pair() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return plain parameters and the same ones cut."""
    mesh = whole_mesh()
    plain = [nn.Parameter(random(*shape, seed=k)) for k, (shape, _, _) in enumerate(CUTS)]
    sharded = [
        nn.Parameter(cut(full, mesh, skipped=skipped, shard_rows=shard_rows))
        for full, (_, skipped, shard_rows) in zip(plain, CUTS, strict=True)
    ]
    return plain, sharded


def _give_grads(plain: list[nn.Parameter], sharded: list[nn.Parameter], salt: int) -> None:
    for k, (p, s) in enumerate(zip(plain, sharded, strict=True)):
        p.grad = random(*p.shape, seed=1000 * salt + k)
        s.grad = torch.empty_like(s, requires_grad=False)
        s.grad.copy_from_full_(p.grad)


def _rows(full: torch.Tensor, like: UnevenDTensor) -> torch.Tensor:
    start, stop = like.uneven_layout.element_range()
    return full.detach().reshape(-1)[start:stop].view(like.local.shape)


def _assert_same(actual: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Compare bit by bit; torch's fused kernels round vector bodies and tails differently."""
    tolerance = 1e-6 if "fused" in name else 0
    torch.testing.assert_close(
        actual, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )


def _steps(name: str, is_bypassed: bool) -> int:
    with ExitStack() as stack:
        if is_bypassed:
            stack.enter_context(torch_2_11())
        plain, sharded = _pair()
        start = [s.local.clone() for s in sharded]
        reference, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](sharded)
        for step in range(4):
            _give_grads(plain, sharded, salt=step)
            reference.step()
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        for p, s in zip(plain, sharded, strict=True):
            _assert_same(s.local, _rows(p, s), name)
            for key, value in reference.state[p].items():
                own: Any = optimizer.state[s][key]
                if isinstance(own, UnevenDTensor):
                    assert own.uneven_layout == s.uneven_layout
                    _assert_same(own.local, _rows(value, own), f"{name} {key}")
                else:
                    assert own == value
    return sum(not torch.equal(s.local, before) for s, before in zip(sharded, start, strict=True))


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_on_plain_tensors(ranks: Ranks, name: str, is_bypassed: bool) -> None:
    """Parameters and states equal the rows of the unsharded ones; they did move."""
    moved = ranks(3).run(_steps, name, is_bypassed)
    assert min(moved) > 0


def _mixed_kinds(name: str) -> None:
    values, grads = random(3), random(3, seed=1)
    plain, sharded = _pair()
    _give_grads(plain, sharded, salt=1)
    whole, replicated = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    as_dtensor = nn.Parameter(make_replicated(values.clone(), whole_mesh()))
    whole.grad, replicated.grad = grads.clone(), grads.clone()
    as_dtensor.grad = make_replicated(grads.clone(), whole_mesh())
    reference = OPTIMIZERS[name]([replicated, *plain])
    optimizer = OPTIMIZERS[name]([whole, sharded[0], as_dtensor, *sharded[1:]])
    for _ in range(3):
        reference.step()
        optimizer.step()
    _assert_same(whole, replicated, name)
    _assert_same(as_dtensor.full_tensor(), replicated, name)
    for p, s in zip(plain, sharded, strict=True):
        _assert_same(s.local, _rows(p, s), name)


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW for-loop", "AdamW fused", "SGD"])
def test_one_optimizer_steps_plain_replicated_and_uneven_parameters(
    ranks: Ranks, name: str
) -> None:
    """Lists may mix parameters that fully_shard left alone, kept whole, and cut."""
    ranks(3).run(_mixed_kinds, name)


def _other_cuts_of_a_gradient() -> str:
    parameter = nn.Parameter(cut(random(10, 4), whole_mesh()))
    parameter.grad = cut(random(10, 4), whole_mesh(), skipped=0, shard_rows=4)
    try:
        torch.optim.AdamW([parameter], foreach=True).step()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_gradient_with_other_cuts_is_refused(ranks: Ranks) -> None:
    """Also where the local shapes happen to agree, as on the rank with 4 rows of each."""
    messages = ranks(3).run(_other_cuts_of_a_gradient)
    assert all("operands cut like the first" in message for message in messages)


def _clipped(norm_type: float, foreach: bool | None) -> None:
    plain, sharded = _pair()
    _give_grads(plain, sharded, salt=1)
    wanted = nn.utils.clip_grad_norm_(plain, 0.5, norm_type=norm_type, foreach=foreach)
    norm = nn.utils.clip_grad_norm_(sharded, 0.5, norm_type=norm_type, foreach=foreach)
    # Norms are summed over ranks in another order than in one process.
    torch.testing.assert_close(norm.full_tensor(), wanted)
    assert float(norm) == norm.full_tensor().item()
    for p, s in zip(plain, sharded, strict=True):
        torch.testing.assert_close(s.grad.local, _rows(p.grad, s.grad))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_torch_clips_by_the_norm_of_the_whole(
    ranks: Ranks, norm_type: float, foreach: bool | None
) -> None:
    """torch.nn.utils.clip_grad_norm_ counts every element once and scales every row."""
    ranks(3).run(_clipped, norm_type, foreach)


def _scaled_steps() -> tuple[float, list[bool]]:
    plain, sharded = _pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(sharded, lr=1.0)
    scaler.scale(torch.ones(1))
    _give_grads(plain, sharded, salt=2)
    scaler.unscale_(optimizer)
    for p, s in zip(plain, sharded, strict=True):
        assert torch.equal(s.grad.local * 4, _rows(p.grad, s))
    scaler.step(optimizer)
    scaler.update()
    for p, s in zip(plain, sharded, strict=True):
        assert torch.equal(s.local, _rows(p - p.grad / 4, s))
    before = [s.local.clone() for s in sharded]
    _give_grads(plain, sharded, salt=3)
    # The only row of this parameter is one rank's.
    if sharded[3].local.numel():
        sharded[3].grad.local.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    stayed = [torch.equal(s.local, b) for s, b in zip(sharded, before, strict=True)]
    return scaler.get_scale(), stayed


def test_loss_scaler_skips_a_step_on_all_ranks(ranks: Ranks) -> None:
    """An infinite gradient on one rank stops every rank's step and halves every scale."""
    for scale, stayed in ranks(3).run(_scaled_steps):
        assert scale == 2.0
        assert all(stayed)
