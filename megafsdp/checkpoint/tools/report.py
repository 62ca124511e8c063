"""What ``verify``, ``diff`` and ``inspect`` return: a report, as text for people or as JSON."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint.

    Attributes:
        file: Name of the file inside the checkpoint; empty if no file is at fault.
        key: Key of the tensor or object; empty if the whole file is at fault.
        problem: What is wrong.
    """

    file: str
    key: str
    problem: str

    def describe(self) -> str:
        """Return the fault as one line."""
        return ": ".join(filter(None, (self.file, self.key, self.problem)))


@dataclass(frozen=True, slots=True)
class Report(ABC):
    """The findings of a tool; a subclass has the facts as fields."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the report line by line."""

    def verdict(self) -> dict[str, bool]:
        """Return the entries of the JSON report beside the fields."""
        return {}

    def describe(self) -> str:
        """Return the report as text."""
        return "\n".join(self.lines())

    def to_json(self) -> str:
        """Return the report as one JSON object; numbers that JSON lacks become strings."""
        return json.dumps(_for_json(asdict(self) | self.verdict()), indent=2)


def _for_json(value: object) -> object:
    """Replace the numbers that JSON lacks by strings."""
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
