"""How a loss scale follows from which steps were finite: pure arithmetic.

The rule is that of Megatron-LM's DynamicGradScaler. With growth_window 3 and hysteresis 2 (``!`` is
a step that is not finite; the scale is the one in use at that step)::

    step    .  .  .  !  !  !  .  .  .  !
    scale   8  8  8  16 16 8  4  4  4  8

This file touches no tensor; :mod:`megafsdp.optimizer.loss_scaler` does.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from megafsdp.errors import expected


@dataclass(frozen=True, slots=True)
class ScaleState:
    """A scale and what its next change depends on.

    Attributes:
        scale: Factor on the loss.
        num_finite: Finite steps in a row since the last growth or non-finite step.
        hysteresis_left: Non-finite steps until the scale backs off; at most 0 means each does.
    """

    scale: float
    num_finite: int
    hysteresis_left: int


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How a scale starts and moves.

    Attributes:
        initial_scale: The first scale.
        min_scale: Backing off stops here.
        growth_factor: Factor after ``growth_window`` finite steps in a row.
        backoff_factor: Factor after a non-finite step, once hysteresis is used up.
        growth_window: Finite steps in a row before the scale grows.
        hysteresis: Non-finite steps since the scale last grew before it backs off.
        is_dynamic: False keeps the first scale for good.
    """

    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_window: int = 1000
    hysteresis: int = 2
    is_dynamic: bool = True

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ValueError: They cannot work.
        """
        has_scales = 0 < self.min_scale <= self.initial_scale < math.inf
        has_factors = self.growth_factor > 1 > self.backoff_factor > 0
        if not (has_scales and has_factors and min(self.growth_window, self.hysteresis) > 0):
            raise ValueError(
                expected(
                    "0 < min_scale <= initial_scale, growth_factor > 1 > backoff_factor > 0, "
                    "growth_window > 0 and hysteresis > 0",
                    asdict(self),
                    where="ScaleRule",
                    mend="Leave out the values that you do not want to change",
                )
            )

    @classmethod
    def constant(cls, scale: float) -> ScaleRule:
        """Return the rule of a scale that never changes; overflowing steps are still skipped."""
        return cls(scale, min_scale=scale, is_dynamic=False)

    def start(self) -> ScaleState:
        """Return the state before the first step."""
        return ScaleState(self.initial_scale, 0, self.hysteresis)

    def after(self, state: ScaleState, *, is_finite: bool) -> ScaleState:
        """Return the state after one more step."""
        if not self.is_dynamic:
            return state
        if not is_finite:
            left = state.hysteresis_left - 1
            backed_off = max(state.scale * self.backoff_factor, self.min_scale)
            return ScaleState(state.scale if left > 0 else backed_off, 0, left)
        if state.num_finite + 1 == self.growth_window:
            return ScaleState(state.scale * self.growth_factor, 0, self.hysteresis)
        return ScaleState(state.scale, state.num_finite + 1, state.hysteresis_left)
