"""Histories of maxima against a list that is written down step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megafsdp.quantize.delayed import GRAD, INPUT, DelayedState, roll_together


def _bits(*values: float) -> Tensor:
    return torch.tensor(values).view(torch.int32)


def _values(bits: Tensor) -> list[float]:
    return bits.view(torch.float32).tolist()


def _used(state: DelayedState, operand: int) -> list[float]:
    """Return what a small input or gradient is scaled by; 0 where the history has nothing."""
    return _values(state.maximum_for(operand, _bits(0.0)))


class _Written:
    """One history as a list, the newest last."""

    def __init__(self, length: int, is_weight: bool) -> None:
        self.steps, self.is_weight = [0.0] * length, is_weight

    def roll(self, value: float) -> None:
        is_again = self.is_weight and value == self.steps[-1]
        if value > 0 and math.isfinite(value) and not is_again:
            self.steps = [*self.steps[1:], value]

    def used(self) -> float:
        steps = self.steps[:-1] if self.is_weight else self.steps
        return max(steps, default=0.0) or self.steps[-1]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_histories_equal_lists_of_steps(length: int) -> None:
    """Twenty steps with zeros, repeated maxima and maxima that are not finite."""
    state = DelayedState(length, num_matrices=2)
    weights = [_Written(length, True) for _ in range(2)]
    operands = [_Written(length, False) for _ in range(2)]
    generator = torch.Generator().manual_seed(length)
    for step in range(20):
        values = (torch.randint(0, 6, (4,), generator=generator) / 2).tolist()
        if step in (7, 8):
            values = [math.inf, math.nan, math.nan, math.inf]
        state.roll(_bits(*values[:2]), _bits(*values[2:]))
        for written, value in zip([*weights, *operands], values, strict=True):
            written.roll(value)
        assert state.weight_history.tolist() == [w.steps for w in weights]
        assert [state.input_history.tolist(), state.grad_history.tolist()] == [
            o.steps for o in operands
        ]
        found = _values(state.weight_maximum())
        for used, written, value in zip(found, weights, values[:2], strict=True):
            assert used == written.used() if math.isfinite(value) else math.isnan(used)
        assert _used(state, INPUT) == [operands[0].used()]
        assert _used(state, GRAD) == [operands[1].used()]


def test_the_first_maximum_is_used_at_once_and_the_next_a_step_later() -> None:
    """A weight is encoded by the steps before its newest, an input by all that were rolled in."""
    state = DelayedState(4)
    state.roll(_bits(3.0), _bits(0.0, 0.0))
    assert _values(state.weight_maximum()) == [3.0]
    state.roll(_bits(5.0), _bits(2.0, 0.0))
    assert _values(state.weight_maximum()) == [3.0] and _used(state, INPUT) == [2.0]
    state.roll(_bits(4.0), _bits(7.0, 0.0))
    assert _values(state.weight_maximum()) == [5.0] and _used(state, INPUT) == [7.0]
    assert _used(state, GRAD) == [0.0], "nothing has been recorded"


def test_unchanged_weights_are_recorded_once() -> None:
    """Encoding them again, as after a load, changes neither the history nor the scale."""
    state = DelayedState(4)
    for maximum in (3.0, 5.0):
        state.roll(_bits(maximum), _bits(1.0, 1.0))
    before = state.weight_history.clone(), state.weight_maximum().clone()
    state.roll(_bits(5.0), _bits(0.0, 0.0))
    assert torch.equal(state.weight_history, before[0])
    assert torch.equal(state.weight_maximum(), before[1])
    assert state.input_history.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_weights_that_no_step_has_made_begin_a_new_history(wrong: float) -> None:
    """Each matrix by itself, at once; one whose maximum is the newest keeps its history."""
    state = DelayedState(3, num_matrices=3)
    for maxima in ((3.0, 3.0, 3.0), (4.0, 5.0, 4.0)):
        state.roll(_bits(*maxima), _bits(1.0, 1.0))
    roll_together([state], [_bits(90.0, 5.0, wrong)], [_bits(0.0, 0.0)], is_step=False)
    assert state.weight_history.tolist() == [[0.0, 0.0, 90.0], [0.0, 3.0, 5.0], [0.0] * 3]
    assert _values(state.weight_maximum())[:2] == [90.0, 3.0]
    assert math.isnan(_values(state.weight_maximum())[2])
    assert state.input_history.tolist() == [0.0, 1.0, 1.0]
    state.roll(_bits(91.0, 6.0, 2.0), _bits(0.0, 0.0))
    assert _values(state.weight_maximum()) == [90.0, 5.0, 2.0]


def test_recorded_maxima_wait_for_the_roll() -> None:
    """The largest of all is pending, scales do not move before, and a roll forgets it."""
    state = DelayedState(4)
    for value in (2.0, 5.0, 3.0):
        state.record(INPUT, _bits(value))
    state.record(GRAD, _bits(0.5))
    assert _values(state.pending()) == [5.0, 0.5]
    assert _used(state, INPUT) == [0.0]
    state.roll(_bits(1.0), state.pending().clone())
    assert _values(state.pending()) == [0.0, 0.0]
    assert _used(state, INPUT) == [5.0] and _used(state, GRAD) == [0.5]


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_maximum_that_is_not_finite_hides_no_other(wrong: float) -> None:
    """Neither what was recorded before it nor what comes after: only it is left out."""
    state = DelayedState(4)
    for value in (2.0, wrong, 3.0, wrong):
        state.record(INPUT, _bits(value))
        state.record(GRAD, _bits(wrong))
    assert _values(state.pending()) == [3.0, 0.0]
    state.roll(_bits(1.0), state.pending().clone())
    assert state.input_history.tolist() == [0.0, 0.0, 0.0, 3.0]
    assert state.grad_history.tolist() == [0.0] * 4


def test_an_own_maximum_is_used_only_where_the_historys_cannot_be() -> None:
    """Before there is a history, and where it is not finite: then everything becomes NaN."""
    state = DelayedState(4)
    assert _values(state.maximum_for(INPUT, _bits(3.0))) == [3.0]
    state.roll(_bits(1.0), _bits(2.0, 0.0))
    assert _values(state.maximum_for(INPUT, _bits(3.0))) == [2.0]
    assert _values(state.maximum_for(INPUT, _bits(0.0))) == [2.0]
    assert _values(state.maximum_for(INPUT, _bits(math.inf))) == [math.inf]
    assert math.isnan(_values(state.maximum_for(INPUT, _bits(math.nan)))[0])
    assert _values(state.maximum_for(GRAD, _bits(3.0))) == [3.0], "gradients have none yet"


def test_a_load_needs_the_histories_alone() -> None:
    """A state that is loaded goes on as the one that was saved, after the same weights."""
    saved, loaded = DelayedState(4), DelayedState(4)
    for step in range(6):
        saved.roll(_bits(1.0 + step % 3), _bits(2.0 + step, 0.25))
    loaded.load(saved.weight_history[0], saved.input_history, saved.grad_history)
    last = _bits(1.0 + 5 % 3)
    for state in (saved, loaded):
        state.roll(last, _bits(0.0, 0.0))
    for _ in range(3):
        for name in ("weight_history", "input_history", "grad_history"):
            assert torch.equal(getattr(loaded, name), getattr(saved, name))
        assert torch.equal(loaded.weight_maximum(), saved.weight_maximum())
        assert _used(loaded, INPUT) == _used(saved, INPUT)
        for state in (saved, loaded):
            state.roll(_bits(9.0), _bits(0.5, 4.0))


@pytest.mark.parametrize(
    ("length", "wanted"), [(2, [3.0, 4.0]), (6, [0.0, 0.0, 1.0, 2.0, 3.0, 4.0])]
)
def test_a_load_of_another_length_keeps_the_newest(length: int, wanted: list[float]) -> None:
    """A longer history is cut at its old end, a shorter one filled with steps that were not."""
    state = DelayedState(length)
    history = torch.tensor([1.0, 2.0, 3.0, 4.0])
    state.record(INPUT, _bits(9.0))
    state.load(history, history, history)
    assert not state.pending().any(), "what was recorded before belongs to other weights"
    assert state.weight_history.tolist() == [wanted] and state.input_history.tolist() == wanted
    assert _used(state, GRAD) == [4.0]


def test_histories_stay_the_same_tensors() -> None:
    """They are written in place, so checkpoints and engines may keep them."""
    state = DelayedState(3)
    kept = [state.weight_history, state.input_history, state.pending(), state.weight_maximum()]
    addresses = [tensor.data_ptr() for tensor in kept]
    state.record(INPUT, _bits(2.0))
    state.roll(_bits(1.0), state.pending().clone())
    now = [state.weight_history, state.input_history, state.pending(), state.weight_maximum()]
    assert [tensor.data_ptr() for tensor in now] == addresses
    assert kept[1].tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("history", [0, -1])
def test_a_history_without_steps_is_refused(history: int) -> None:
    """Weights would have no maximum to be encoded by."""
    with pytest.raises(ValueError, match="a history of at least 1 step"):
        DelayedState(history)


def _states() -> list[DelayedState]:
    """Return states of two lengths and of stacks."""
    return [DelayedState(7), DelayedState(7, num_matrices=3), DelayedState(1), DelayedState(300)]


def test_the_kernel_equals_the_formula(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen steps of several states at once: histories, scales and limits, by bits."""
    compiled, plain = _states(), _states()
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([0.0, 1e-40, 0.5, 0.5, 2.0, 3e38, math.inf, math.nan])
    for _ in range(15):
        drawn = [
            [
                choices[torch.randint(0, 8, (rows,), generator=generator)].view(torch.int32)
                for rows in (state.weight_history.shape[0], 2)
            ]
            for state in plain
        ]
        weights, recorded = (list(bits) for bits in zip(*drawn, strict=True))
        # Any strides will do.
        recorded[0] = recorded[0][:1].expand(2)
        for state in (*compiled, *plain):
            state.record(INPUT, _bits(7.0))
        roll_together(compiled, weights, recorded)
        with monkeypatch.context() as patch:
            patch.setenv("MEGAFSDP_NATIVE", "0")
            roll_together(plain, weights, recorded)
        for found, wanted in zip(compiled, plain, strict=True):
            # Bits, since a NaN equals nothing.
            for name, value in vars(wanted).items():
                other = getattr(found, name)
                assert torch.equal(other.view(torch.int32), value.view(torch.int32)), name


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3), torch.zeros(2, dtype=torch.int32)],
    ids=["dtype", "shape"],
)
def test_maxima_that_are_no_bits_are_refused(wrong: Tensor) -> None:
    """Nothing is rolled, also of the states before."""
    states = [DelayedState(3), DelayedState(3, num_matrices=3)]
    with pytest.raises(ValueError, match=r"maxima of shape \(3,\) and dtype"):
        roll_together(states, [_bits(2.0), wrong], [_bits(1.0, 1.0)] * 2)
    assert not states[0].weight_history.any()
