"""Hyperparameters of Adam, and the constants of one step that follow from them.

Both are plain numbers, checked here; no tensors and no optimizers.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megafsdp.errors import expected


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyperparameters of Adam, as the user sets them.

    Attributes:
        lr: Learning rate.
        betas: Decay of both moments, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Strength of the decay.
        adam_w_mode: Decoupled decay (AdamW); else L2 regularisation (Adam).
        bias_correction: Correct for moments that began at zero.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adam_w_mode: bool = True
    bias_correction: bool = True

    @classmethod
    def of(cls, group: Mapping[str, Any], *, adam_w_mode: bool) -> AdamHyper:
        """Read a parameter group of an optimizer; the host reads tensors."""
        # float() waits for a tensor on a device; a captured step passes a number instead.
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            adam_w_mode=adam_w_mode,
            bias_correction=group.get("bias_correction", True),
        )

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: The learning rate is not finite, another is negative or NaN, or a beta is 1
                or more.
        """
        # abs(): schedulers that end at 0 may end slightly below it by rounding.
        _check_range("lr", abs(self.lr), math.inf)
        for name in ("eps", "weight_decay"):
            _check_range(name, getattr(self, name), math.inf)
        for i, beta in enumerate(self.betas):
            _check_range(f"betas[{i}]", beta, 1.0)


class AdamConstants(NamedTuple):
    """The numbers that one update needs, computed in fp64 and rounded to fp32 once.

    They are in the order in which the kernels take them.

    Attributes:
        decay: Factor of the weight, ``1 - lr * weight_decay``; 1 with L2 regularisation.
        l2: ``weight_decay`` if L2 regularisation adds it times the weight to the gradient; else 0.
        lerp: ``1 - beta1`` if that is below a half; else ``-beta1``, and the moment is interpolated
            from the gradient instead of from its old value.
        beta2: As given.
        square: ``1 - beta2``.
        root: Square root of the bias correction of ``exp_avg_sq``.
        eps: As given.
        step_size: ``lr`` divided by the bias correction of ``exp_avg``.
    """

    decay: float
    l2: float
    lerp: float
    beta2: float
    square: float
    root: float
    eps: float
    step_size: float

    def flushed(self) -> AdamConstants:
        """Return the constants with subnormal ones as zero, as a flushing processor reads them."""
        return AdamConstants(*(n if abs(n) >= 2.0**-126 else 0.0 for n in self))

    @classmethod
    # A model has thousands of segments and few sets of hyperparameters in a step.
    @functools.lru_cache(maxsize=64)
    def rounded(cls, hyper: AdamHyper, step: int) -> AdamConstants:
        """Compute the constants of a step, counted from 1."""
        lr, decay, (beta1, beta2) = hyper.lr, hyper.weight_decay, hyper.betas
        # beta ** inf is 0, so that both corrections are exactly 1.
        power = step if hyper.bias_correction else math.inf
        lerp = round_to_fp32(1 - beta1)
        exact = (
            1 - lr * decay if hyper.adam_w_mode else 1.0,
            0.0 if hyper.adam_w_mode else decay,
            # torch.lerp interpolates from the nearer end, and rounds accordingly.
            lerp if lerp < 0.5 else lerp - 1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**power),
            hyper.eps,
            lr / (1 - beta1**power),
        )
        return cls(*(round_to_fp32(value) for value in exact))


def round_to_fp32(value: float) -> float:
    """Return the nearest fp32 value; too large a value becomes infinite."""
    # A tensor would take many times as long; struct rounds to nearest even too.
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        # Infinity, as from a cast in torch; struct raises.
        return value * float("inf")


def _check_range(name: str, value: float, end: float) -> None:
    if not 0 <= value < end:
        raise ValueError(
            expected(
                f"a number from 0 to below {end}",
                value,
                where=f"{name} of AdamHyper",
                hint="Correct the optimizer's arguments",
            )
        )
