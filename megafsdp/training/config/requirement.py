"""The check of one value of the configuration, and its error."""

from __future__ import annotations

from megafsdp.errors import ConfigError, expected


def require(is_sound: bool, path: str, what: str, got: object, hint: str) -> None:
    """Check a value of the configuration.

    Args:
        is_sound: Whether the value can be used.
        path: Its ``section.field``.
        what: What it must be.
        got: What it is.
        hint: What the user can do.

    Raises:
        ConfigError: It cannot be used.
    """
    if not is_sound:
        where = f"the training configuration, {path}"
        raise ConfigError(expected(what, got, where=where, hint=hint))
