"""Which parameters a recipe leaves as they are, in few words."""

from __future__ import annotations

from collections.abc import Iterable

from megafsdp.errors import listed


def describe_kept(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason, with the names that have it.

    Numbers in names become ``*``, so that the layers of a model are named once.

    Args:
        reasons: FQN and reason of each parameter.
    """
    names: dict[str, dict[str, None]] = {}
    for fqn, reason in reasons:
        parts = ["*" if part.isdecimal() else part for part in fqn.split(".")]
        names.setdefault(reason, {})[".".join(parts)] = None
    return [f"{reason}: {listed(list(found))}" for reason, found in names.items()]
