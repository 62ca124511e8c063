"""How often a run should save, from what its saves have cost and how often its machines fail.

Young's formula: if a save stalls the training for C seconds and failures are M seconds apart in
the mean, an interval of ``sqrt(2 * C * M)`` loses least. Saves then cost ``C / interval`` of the
time, and repeated steps cost ``interval / (2 * M)``, the same share.

Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17, 1974.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megafsdp.errors import DataError, expected


@dataclass(frozen=True, slots=True)
class Cadence:
    """An interval between saves, and what it rests on.

    Attributes:
        num_saves: Saves that were measured.
        stall_s: Median time that the training waits for a save.
        save_s: Median time from a save's begin to its publication.
        step_s: Median time of a step.
        mtbf_s: Mean time between failures of the whole job.
        interval_s: Time between saves.
        interval_steps: The same in steps, for ``checkpoint.interval_steps``.
        lost_share: Share of the time that saves and repeated steps take together.
    """

    num_saves: int
    stall_s: float
    save_s: float
    step_s: float
    mtbf_s: float
    interval_s: float
    interval_steps: int
    lost_share: float

    def describe(self) -> str:
        """Return three lines for a person."""
        return (
            f"{self.num_saves} saves: the training waits {self.stall_s:.3g} s for one, which is"
            f" published after {self.save_s:.3g} s; a step takes {self.step_s:.3g} s (medians)\n"
            f"with a failure every {self.mtbf_s / 3600:g} h: save every {self.interval_s:.3g} s,"
            f" --checkpoint.interval_steps {self.interval_steps}\n"
            f"saves and steps taken again then cost {100 * self.lost_share:.2g} % of the time"
        )

    def to_json(self) -> str:
        """Return the fields as one JSON object."""
        return json.dumps(asdict(self))


def cadence(
    steps: Sequence[Mapping[str, Any]], saves: Sequence[Mapping[str, Any]], *, mtbf_s: float
) -> Cadence:
    """Return the best interval between saves by Young's formula.

    Args:
        steps: Rows of steps, of which ``step_s`` is read.
        saves: Events of saves, of which ``stall_s`` and ``save_s`` are read.
        mtbf_s: Mean time between failures of the whole job: that of a machine divided by their
            number.

    Raises:
        DataError: No save or no step was measured.
    """
    times = [(save["stall_s"], save["save_s"]) for save in saves if "stall_s" in save]
    step_times = [row["step_s"] for row in steps if row.get("step_s")]
    if not times or not step_times:
        raise DataError(
            expected(
                "a run with a step and a save that were measured",
                f"{len(step_times)} steps and {len(times)} saves",
                where="metrics.jsonl and events.jsonl of the run",
                hint="Let it save once, for example with --checkpoint.interval_steps 10",
            )
        )
    stall_s, save_s = (statistics.median(column) for column in zip(*times, strict=True))
    step_s = statistics.median(step_times)
    # Only one background save runs at a time, so the interval cannot be shorter than a save.
    interval_s = max(math.sqrt(2 * stall_s * mtbf_s), save_s, step_s)
    interval_steps = max(1, round(interval_s / step_s))
    return Cadence(
        num_saves=len(times),
        stall_s=stall_s,
        save_s=save_s,
        step_s=step_s,
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        interval_steps=interval_steps,
        lost_share=stall_s / interval_s + interval_s / (2 * mtbf_s),
    )
