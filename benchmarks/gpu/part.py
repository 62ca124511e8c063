"""What a part is given: its size, and where to report. Imports only the standard library."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Packages of training, its command line and its trackers that a GPU machine need not have.
ABSENT = ("docstring_parser", "jsonargparse", "pydantic", "wandb")


@dataclass(frozen=True)
class Size:
    """How large a part is.

    Attributes:
        is_rehearsal: Whether it runs on a CPU with tiny sizes.
        out: Folder for the part's own files, few and small.
    """

    is_rehearsal: bool
    out: Path

    @property
    def device_type(self) -> str:
        """Return ``cuda``, or ``cpu`` in a rehearsal."""
        return "cpu" if self.is_rehearsal else "cuda"

    def either(self, full: T, tiny: T) -> T:
        """Return the first, or the second in a rehearsal."""
        return tiny if self.is_rehearsal else full


class Report:
    """Figures and checks, each written as soon as it is known, by any process of the part.

    Checks have the seconds since this object was made as ``at_s``, to show where time goes.

    Args:
        path: A file of JSON lines that is appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Wall-clock time, which processes share.
        self._begin_s = time.time()

    def figure(self, name: str, value: object) -> None:
        """Report a figure, or a table of them; the last of a name counts."""
        self._write({"figure": name, "value": value})

    def check(self, name: str, is_met: bool, detail: object = "") -> None:
        """Report whether something is right."""
        self._write_check(name, is_met, is_speed=False, detail=str(detail))

    def mark(
        self, name: str, got: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Report whether a figure of speed is as wanted; a NaN never is."""
        is_met = (at_least is None or got >= at_least) and (at_most is None or got <= at_most)
        wanted = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
        detail = f"{got:.3f}, wanted {wanted}"
        self._write_check(name, is_met, is_speed=True, detail=detail)

    def _write_check(self, name: str, is_met: bool, *, is_speed: bool, detail: str) -> None:
        entry = {"check": name, "is_met": bool(is_met), "is_speed": is_speed, "detail": detail}
        self._write(entry | {"at_s": round(time.time() - self._begin_s, 1)})

    def _write(self, entry: dict[str, object]) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
