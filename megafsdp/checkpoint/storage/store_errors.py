"""Convert errors of stores to ours: what failed, at which URL, and what to do about it.

Drivers pass on errors of their libraries, which have no common class and seldom name the URL.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from megafsdp.errors import CheckpointError

# The verb for a read, in the messages below.
READ = "can be read"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def store_errors(url: str, verb: str, *, is_missing_wrong: bool = False) -> Iterator[None]:
    """Raise a store's errors as ours.

    Args:
        url: What was accessed.
        verb: What the store should have done, such as ``"can be read"``.
        is_missing_wrong: Whether a FileNotFoundError is converted too.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not is_missing_wrong:
            raise
        raise as_checkpoint_error(error, url, verb) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise as_checkpoint_error(error, url, verb) from error


def as_checkpoint_error(error: Exception, url: str, verb: str) -> CheckpointError:
    """Return a driver's error as ours.

    Args:
        error: What was raised.
        url: What was accessed.
        verb: What the store should have done, such as ``"can be read"``.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, PermissionError) or "credential" in text.lower():
        hint = "Give this user the rights to list, read, write and remove objects there"
    elif number in _FULL or "quota" in text.lower():
        hint = "Make room in the store or raise its quota; what was published before stays"
    elif isinstance(error, FileNotFoundError) and verb == READ:
        hint = "A save that retires or replaces this checkpoint has removed it since it was opened"
    elif isinstance(error, FileNotFoundError):
        hint = "Make the bucket first, or correct the URL"
    else:
        hint = "Try again when the store answers; what was published before stays"
    return CheckpointError.expected(f"a store that {verb}", text[:400], where=f"'{url}'", hint=hint)
