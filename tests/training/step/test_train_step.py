"""One step: the global batch's mean gradient, clipping, and numbers that are not finite."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import full_state_dict
from megafsdp.models import LanguageModel
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.train_step import StepResult, TrainStep
from tests.ranks import Ranks, RanksError
from tests.training.step.steps import (
    NUM_MICROBATCHES,
    batches_of,
    rows_of,
    sharded_model,
    tiny_model,
)

CPU = torch.device("cpu")


def _step(
    model: nn.Module, *, max_skips: int | None = None, scaler: LossScaler | None = None
) -> TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, fused=True)
    return TrainStep(
        model,
        optimizer,
        device=CPU,
        clip_norm=0.5,
        skips_nonfinite=max_skips is not None,
        max_skips=max_skips or 0,
        stop=StopRequest(CPU),
        scaler=scaler,
    )


def _train(num_steps: int) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    model = sharded_model()
    step = _step(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    results = [step(batches_of(k, rank, size)) for k in range(num_steps)]
    return results, full_state_dict(model)


def _reference(num_steps: int, num_ranks: int) -> tuple[list[tuple[float, float]], LanguageModel]:
    """Train in plain torch on the concatenated global batch."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, fused=True)
    figures = []
    for k in range(num_steps):
        rows = rows_of(k, num_ranks).flatten(0, 2)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures.append((float(loss.detach()), float(norm)))
    return figures, model


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_step_equals_plain_torch_on_the_whole_batch(ranks: Ranks, num_ranks: int) -> None:
    """Losses, norms and every parameter, with accumulation and a norm that is clipped.

    The tolerance is that of fp32 sums in another order over three steps of Adam.
    """
    figures, model = _reference(3, num_ranks)
    assert all(norm > 0.5 for _, norm in figures)
    for results, state in ranks(num_ranks).run(_train, 3):
        for result, (loss, norm) in zip(results, figures, strict=True):
            assert result.loss == pytest.approx(loss, rel=1e-6)
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
            assert not result.is_skipped
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-5)


def test_ranks_read_their_own_samples(ranks: Ranks) -> None:
    """Sample ids are this rank's, microbatch by microbatch."""
    ids = [results[0].sample_ids for results, _ in ranks(2).run(_train, 1)]
    assert ids == [(0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)]


class _Records(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _break_second_microbatch(model: nn.Module, data_rank: int) -> None:
    """Make the loss of the second microbatch NaN, on the second data-parallel rank only."""
    calls = [0]

    def spoil(module: nn.Module, inputs: object, loss: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        is_spoilt = calls[0] % NUM_MICROBATCHES == 0 and data_rank == 1
        return loss * math.nan if is_spoilt else loss

    model.register_forward_hook(spoil)


def _train_broken(
    max_skips: int | None, num_steps: int, num_copies: int = 1
) -> tuple[list[StepResult], list[str], bool]:
    model = sharded_model()
    records = _Records()
    logging.getLogger("megafsdp.training").addHandler(records)
    step = _step(model, max_skips=max_skips)
    rank, size = dist.get_rank() // num_copies, dist.get_world_size() // num_copies
    _break_second_microbatch(model, rank)
    before = full_state_dict(model)
    try:
        results = [step(batches_of(k, rank, size)) for k in range(num_steps)]
    finally:
        logging.getLogger("megafsdp.training").removeHandler(records)
        after = full_state_dict(model)
    is_unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return results, records.lines, is_unchanged


def test_broken_step_is_skipped_by_all_ranks(ranks: Ranks) -> None:
    """No weight moves on any rank, and the log names the samples of the one microbatch."""
    for results, lines, is_unchanged in ranks(2).run(_train_broken, 2, 2):
        assert [r.is_skipped for r in results] == [True, True]
        assert is_unchanged
        assert all("samples [9, 10, 11]" in line for line in lines)
        assert len(lines) == 2


def test_a_broken_sample_is_named_once(ranks: Ranks) -> None:
    """Though two ranks, which share the layers out, have read it."""
    for _, lines, _ in ranks(4).run(_train_broken, 2, 1, 2):
        assert len(lines) == 1
        assert "samples [9, 10, 11]" in lines[0]


def test_too_many_skips_in_a_row_end_the_run(ranks: Ranks) -> None:
    """The step after the last one allowed raises on every rank."""
    with pytest.raises(RanksError, match="for 3 steps in a row") as failure:
        ranks(2).run(_train_broken, 2, 3)
    assert "checkpoint in latest_checkpointed_iteration.txt" in str(failure.value)
    assert set(failure.value.failures) == {0, 1}


def test_broken_step_raises_on_all_ranks(ranks: Ranks) -> None:
    """The policy raise names the samples on the rank that is well too."""
    with pytest.raises(RanksError) as failure:
        ranks(2).run(_train_broken, None, 1)
    texts = failure.value.failures
    assert set(texts) == {0, 1}
    assert all("samples [9, 10, 11]" in text for text in texts.values())


def _skip_then_train() -> tuple[list[int], bool]:
    model = sharded_model()
    step = _step(model, max_skips=1)
    calls = [0]

    def spoil(module: nn.Module, inputs: object, loss: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return loss * math.nan if calls[0] in (1, 5) else loss

    model.register_forward_hook(spoil)
    before = full_state_dict(model)
    counts = []
    for k in range(3):
        step(batches_of(k, dist.get_rank(), dist.get_world_size()))
        counts.append(step.num_skips_in_a_row)
    after = full_state_dict(model)
    return counts, any(not torch.equal(before[name], after[name]) for name in before)


def test_good_step_ends_a_row_of_skips(ranks: Ranks) -> None:
    """Skips are counted in a row, and no broken gradient is left for the next step."""
    assert ranks(2).run(_skip_then_train) == [([1, 0, 1], True)] * 2


def _skips_with_scaler(bad: str, scale: float) -> list[int]:
    model = sharded_model()
    rule = ScaleRule(initial_scale=scale, min_scale=1.0, hysteresis=1)
    step = _step(model, max_skips=9, scaler=LossScaler(rule))
    if bad == "loss":
        model.register_forward_hook(lambda module, inputs, loss: loss * math.nan)
    else:
        next(iter(model.parameters())).register_post_accumulate_grad_hook(
            lambda parameter: parameter.grad.fill_(math.inf)
        )
    counts = []
    for k in range(2):
        step(batches_of(k, dist.get_rank(), dist.get_world_size()))
        counts.append(step.num_skips_in_a_row)
    return counts


@pytest.mark.parametrize(
    ("bad", "scale", "counts"),
    [("gradient", 4.0, [0, 0]), ("gradient", 2.0, [0, 1]), ("loss", 4.0, [1, 2])],
)
def test_a_step_counts_as_skipped_unless_a_smaller_scale_may_help(
    ranks: Ranks, bad: str, scale: float, counts: list[int]
) -> None:
    """It helps neither a loss that is not finite, nor gradients that overflow at the smallest."""
    assert ranks(1).run(_skips_with_scaler, bad, scale) == [counts]


def _step_with_request() -> bool:
    model = sharded_model()
    step = _step(model)
    if dist.get_rank() == 1:
        step._stop.request()
    step(batches_of(0, dist.get_rank(), dist.get_world_size()))
    return step._stop.is_agreed


def test_request_travels_with_the_loss(ranks: Ranks) -> None:
    """A step tells every rank that one is asked to stop."""
    assert ranks(2).run(_step_with_request) == [True, True]
