"""The few exception classes of megafsdp and the one form of its messages.

A message has three sentences: what was expected and what was found, where, and how to mend it.
A wrong value raises ``ValueError`` or ``TypeError``, a call at a wrong time ``RuntimeError``, and a
valid request that is not built ``NotImplementedError``. The classes below are for callers that
catch the errors of one subsystem.
"""

from __future__ import annotations

from collections.abc import Sequence

# An error names at most this many keys, and counts the others.
MAX_NAMED = 20
# The same limit for ranks, whose texts are long.
MAX_RANKS = 4


class ConfigError(ValueError):
    """Report a training configuration that cannot be run as written."""


class DataError(ValueError):
    """Report a data file that is missing, truncated, or not what its header says."""


class RankError(RuntimeError):
    """Report ranks that do not come, or that leave the others waiting."""


class NonFiniteError(RuntimeError):
    """Report a step that cannot be taken because a loss or gradient norm is not finite."""


class CheckpointError(RuntimeError):
    """Report a checkpoint that cannot be written, found, trusted, or matched to the model."""

    @classmethod
    def expected(cls, what: object, got: object, *, where: str, hint: str) -> CheckpointError:
        """Return an error with the message of :func:`expected`, which has the same arguments."""
        return cls(expected(what, got, where=where, hint=hint))


def expected(what: object, got: object, *, where: str, hint: str) -> str:
    """Format the standard three-sentence error message.

    Args:
        what: What the code needs, as a noun phrase.
        got: What it found instead; give the value.
        where: FQN, tensor, mesh axis, rank or file, as a sentence fragment.
        hint: What the caller can do, as a sentence without its final full stop.

    Returns:
        ``"Expected <what>, got <got>. In <where>. <hint>."``
    """
    return f"Expected {what}, got {got}. In {where}. {hint}."


def listed(names: Sequence[str], *, separator: str = ", ", limit: int = MAX_NAMED) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more
