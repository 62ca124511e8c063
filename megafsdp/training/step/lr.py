"""Learning rates as pure functions of consumed samples, and the object that applies them.

Samples are counted, not steps, so a schedule stays in place when a run resumes with another batch
size::

    wsd, peak 3e-4, minimum 3e-5, 1,000 samples, warm-up 100, decay 200

    samples     0     100           800     1,000
    rate        0    3e-4          3e-4      3e-5
                 rises     stays       falls
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, fields

import torch

from megafsdp.training.config.sections import Config
from megafsdp.training.step.optimizers import LR_MULTIPLIER

_LOGGER = logging.getLogger("megafsdp.training")
_DEFAULT_WSD_SHARE = 5
# Fields that the rate of a constant schedule depends on.
_OF_CONSTANT = ("kind", "peak", "warmup_samples")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate over samples.

    Attributes:
        kind: ``cosine``, ``wsd`` or ``constant``.
        peak: Highest rate.
        minimum: Rate at the end of the decay and after it.
        warmup_samples: Length of the linear rise from 0 to the peak.
        decay_start: Sample at which the decay begins.
        decay_samples: Length of the decay.
        decay_shape: Shape of wsd's decay.
    """

    kind: str
    peak: float
    minimum: float
    warmup_samples: int
    decay_start: int
    decay_samples: int
    decay_shape: str

    @classmethod
    def of(cls, config: Config, *, num_samples: int | None = None) -> Schedule:
        """Return the schedule of a configuration, its defaults filled in.

        Args:
            config: The run.
            num_samples: Its length; None for that of a run of one batch size.
        """
        section = config.schedule
        total = config.num_samples if num_samples is None else num_samples
        decay = section.decay_samples
        if section.kind == "wsd":
            left = max(total - section.warmup_samples, 0)
            decay = min(total // _DEFAULT_WSD_SHARE, left) if decay is None else decay
            start = total - decay
        else:
            start = section.warmup_samples
            decay = max(total - start, 0) if decay is None else decay
        return cls(
            kind=section.kind,
            peak=config.optimizer.lr,
            minimum=config.optimizer.lr * section.min_lr_ratio,
            warmup_samples=section.warmup_samples,
            decay_start=start,
            decay_samples=decay,
            decay_shape="cosine" if section.kind == "cosine" else section.decay_shape,
        )

    def at(self, num_samples: int) -> float:
        """Return the rate of the step that completes ``num_samples`` samples."""
        if num_samples < self.warmup_samples:
            return self.peak * num_samples / self.warmup_samples
        if self.kind == "constant" or num_samples <= self.decay_start:
            return self.peak
        if num_samples >= self.decay_start + self.decay_samples:
            return self.minimum
        progress = (num_samples - self.decay_start) / self.decay_samples
        return self.minimum + (self.peak - self.minimum) * _remaining(self.decay_shape, progress)


def _remaining(shape: str, progress: float) -> float:
    """Return what is left of the way down, from 1 to 0, after a share of a decay."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    assert shape == "exponential", f"unknown decay shape {shape!r}"
    # Halves from 2 to 1 and subtracts 1, so that it ends at 0 as the others do.
    return 2.0 * 0.5**progress - 1.0


class LearningRate:
    """Set an optimizer's learning rate from consumed samples; checkpoints save its schedule.

    Args:
        optimizer: All its parameter groups get the rate, times their ``lr_multiplier`` if they have
            one.
        schedule: The rate over samples.
        follows_checkpoint: Use the schedule of a loaded checkpoint where it differs, instead of the
            configured one. Either way the differences are logged.

    Attributes:
        schedule: The rate over samples.
        rate: The one that was set last.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, *, follows_checkpoint: bool
    ) -> None:
        self.schedule = schedule
        self.rate = 0.0
        self._optimizer = optimizer
        self._follows_checkpoint = follows_checkpoint

    def set_for(self, num_samples: int) -> None:
        """Set the rate of the step that completes ``num_samples`` samples.

        Steps that were skipped do not count, as in Megatron-LM: the schedule waits for them.
        """
        self.rate = self.schedule.at(num_samples)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * group.get(LR_MULTIPLIER, 1.0)

    def state_dict(self) -> dict[str, object]:
        """Return the schedule as plain values."""
        return asdict(self.schedule)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Use the stored schedule if ``follows_checkpoint`` is set; log what differs."""
        own = asdict(self.schedule)
        is_constant = own["kind"] == state_dict.get("kind") == "constant"
        names = _OF_CONSTANT if is_constant else [field.name for field in fields(Schedule)]
        differing = [name for name in names if state_dict.get(name) != own[name]]
        if not differing:
            return
        _LOGGER.warning(
            "the checkpoint's learning rate schedule differs; the %s one is used: %s",
            "checkpoint's" if self._follows_checkpoint else "configured",
            ", ".join(f"{n} {state_dict.get(n)} (checkpoint) {own[n]} (config)" for n in differing),
        )
        if self._follows_checkpoint:
            stored = {f.name: state_dict.get(f.name, own[f.name]) for f in fields(Schedule)}
            self.schedule = Schedule(**stored)  # type: ignore[arg-type]
