"""FusedAdam steps parts of tensors as one process steps the whole, narrow states too."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from megafsdp.buffer.dtensor.uneven import full_tensor
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.grads.clip import clip_grad_norm_
from tests.buffer.cuts import random
from tests.buffer.parts import joined, part_on
from tests.ranks import Ranks

NARROW = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16}
# Shape, dim that tp cuts, elements of a row of a stack; rows of more than one block of a scale.
CUTS: tuple[tuple[tuple[int, ...], int | None, int | None], ...] = (
    ((9, 150), 0, None),
    ((6, 140), None, None),
    ((3, 4, 130), 0, 130),
    ((3, 4, 130), 1, 130),
    ((7,), 0, None),
    # Its rows are cut, and blocks with them.
    ((5, 280), 1, None),
)
NUM_CUT = 1


def _parameters(shape: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    mesh = joined(*shape)
    plain = [nn.Parameter(random(*whole, seed=i)) for i, (whole, _, _) in enumerate(CUTS)]
    ours = [
        nn.Parameter(part_on(mesh, one, dim, row_numel=row_numel))
        for one, (_, dim, row_numel) in zip(plain, CUTS, strict=True)
    ]
    return plain, ours


def _give_grads(plain: list[nn.Parameter], ours: list[nn.Parameter], step: int) -> None:
    for index, (one, other) in enumerate(zip(plain, ours, strict=True)):
        one.grad = random(*one.shape, seed=100 * step + index)
        grad = torch.zeros_like(other)
        grad.copy_from_full_(one.grad)
        other.grad = grad


def _steps(is_narrow: bool) -> None:
    plain, ours = _parameters((2, 2))
    # One process has no rows that are cut: its states of that parameter are fp32 by choice.
    groups = [plain[:-NUM_CUT], plain[-NUM_CUT:]] if is_narrow else [plain, []]
    options = NARROW if is_narrow else {}
    wanted = [FusedAdam(groups[0], lr=0.1, **options)]
    wanted += [FusedAdam(groups[1], lr=0.1)] if groups[1] else []
    optimizer = FusedAdam(ours, lr=0.1, **options)
    for step in range(2):
        _give_grads(plain, ours, step)
        for each in (*wanted, optimizer):
            each.step()
    for index, (one, other) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(other.full_tensor(), one.detach()), CUTS[index]
        for each in wanted:
            for name, value in each.state[one].items() if one in each.state else ():
                shown = optimizer.state[other][name]
                assert shown.dtype == value.dtype
                assert torch.equal(full_tensor(shown).float(), value.float())


@pytest.mark.parametrize("is_narrow", [False, True])
def test_parts_are_stepped_as_the_whole(ranks: Ranks, is_narrow: bool) -> None:
    """Weights and states equal those of one process, bit by bit; cut rows keep fp32 states."""
    ranks(4).run(_steps, is_narrow)


def _clips() -> None:
    plain, ours = _parameters((2, 2))
    optimizer, wanted = FusedAdam(ours, lr=0.1, max_grad_norm=0.5), FusedAdam(plain, lr=0.1)
    _give_grads(plain, ours, 0)
    clip_grad_norm_(plain, 0.5)
    optimizer.step()
    wanted.step()
    for one, other in zip(plain, ours, strict=True):
        # The norm is a sum in another order, which moves the factor by one bit at most.
        torch.testing.assert_close(other.full_tensor(), one.detach(), rtol=1e-6, atol=1e-6)


def test_a_step_clips_by_the_norm_of_the_whole(ranks: Ranks) -> None:
    """The factor in the kernel is that of all ranks of one copy of the model."""
    ranks(4).run(_clips)


def _messages() -> list[str]:
    _, ours = _parameters((2, 2))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megafsdp.optimizer")
    logger.addHandler(handler)
    FusedAdam(ours, **NARROW)
    FusedAdam(ours)
    logger.removeHandler(handler)
    return messages


def test_wider_states_are_logged(ranks: Ranks) -> None:
    """Whoever asks for narrow states reads which parameters do without."""
    for messages in ranks(4).run(_messages):
        assert len(messages) == 1
        assert messages[0].startswith("exp_avg and exp_avg_sq of 1 parameters stay in fp32")
