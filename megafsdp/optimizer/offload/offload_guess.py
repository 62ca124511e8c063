"""What is guessed before a step: the factor on its gradients, and whether it is worth guessing.

A step ahead takes the gradients as they are, which is right unless the norm of all of them, known
only when the last is there, asks for clipping. A wrong guess costs time, never bits.
"""

from __future__ import annotations

import math
import threading
from typing import Literal

import torch

from megafsdp.device.host_copies import CopyLink, Transfer
from megafsdp.errors import expected

Speculate = bool | Literal["auto"]

# Of the norms of steps before: the mean that "auto" compares, and how far below the limit it is.
_DECAY = 0.9
_MARGIN = 0.8
# Sums of squares are rounded differently here and in the norm.
_ROUNDING = 1e-3


def check_speculate(speculate: object) -> None:
    """Check a choice of guessing.

    Raises:
        ValueError: It is none.
    """
    if not (isinstance(speculate, bool) or speculate == "auto"):
        raise ValueError(
            expected(
                "True, False or 'auto'",
                repr(speculate),
                where="speculate of HybridDeviceOptimizer",
                hint="Leave it at 'auto' to guess while few steps are clipped",
            )
        )


class DeferredScalar:
    """A number of which the host asks before the device may have it.

    Args:
        value: A number, or a 0-dim floating-point tensor.
        link: Of the tensor's device.
    """

    def __init__(self, value: float | torch.Tensor, link: CopyLink) -> None:
        self._transfer: Transfer | None = None
        self._kept = value
        if isinstance(value, torch.Tensor):
            is_pinned = value.device.type == "cuda"
            self._kept = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=is_pinned)
            self._source = value.detach().to(torch.float64, copy=True)
            link.fence()
            self._transfer = link.to_host([(self._kept, self._source)])

    @property
    def is_there(self) -> bool:
        """Tell whether :meth:`value` returns at once."""
        return self._transfer is None or self._transfer.is_done

    def value(self) -> float:
        """Return the number; waits for it; from any thread."""
        if self._transfer is not None:
            self._transfer.wait()
        return float(self._kept)


class ClippingForecast:
    """The guess for one step, which the gradients that arrive may prove wrong.

    Args:
        scale: The guessed factor on the gradients.
        max_norm: The norm from which the step clips.
    """

    def __init__(self, scale: float, max_norm: float) -> None:
        self.scale = scale
        self._limit = max_norm * (1.0 + _ROUNDING)
        self._square_sum = 0.0
        self._lock = threading.Lock()
        self.is_hopeless = False

    def see(self, norm: float) -> None:
        """Learn the norm of some of this rank's gradients: all of them have no smaller one."""
        with self._lock:
            self._square_sum += (norm * self.scale) ** 2
            # Written so that NaN is hopeless too.
            if not (math.isfinite(norm) and math.sqrt(self._square_sum) <= self._limit):
                self.is_hopeless = True


class Guesser:
    """Makes the outlook of each step from the steps before.

    Args:
        speculate: Whether to guess; ``"auto"`` while the norm stays well below the limit.
    """

    def __init__(self, speculate: Speculate) -> None:
        self.speculate = speculate
        self._mean_norm: float | None = None
        self._loss_scale = 1.0
        self._last: tuple[DeferredScalar | None, DeferredScalar] | None = None

    def note_step(
        self, norm: torch.Tensor | None, loss_scale: torch.Tensor | None, link: CopyLink
    ) -> None:
        """Take note of a step's norm and loss scale."""
        self._settle()
        self._last = (
            None if norm is None else DeferredScalar(norm, link),
            DeferredScalar(1.0 if loss_scale is None else loss_scale, link),
        )

    def _settle(self) -> None:
        if self._last is None:
            return
        (norm, loss_scale), self._last = self._last, None
        self._loss_scale = loss_scale.value()
        if norm is not None and math.isfinite(value := norm.value()):
            before = value if self._mean_norm is None else self._mean_norm
            self._mean_norm = _DECAY * before + (1.0 - _DECAY) * value

    def outlook(self, max_norm: float) -> ClippingForecast | None:
        """Return the guess for the step that is coming; None not to guess."""
        self._settle()
        if self.speculate == "auto":
            # Early steps clip nearly always: until a norm is known the guess is that they do.
            mean = math.inf if self._mean_norm is None else self._mean_norm
            is_likely = mean < _MARGIN * max_norm or math.isinf(max_norm)
        else:
            is_likely = self.speculate
        return ClippingForecast(1.0 / self._loss_scale, max_norm) if is_likely else None
