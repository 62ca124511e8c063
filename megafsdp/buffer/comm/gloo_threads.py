"""Let the threads of gloo come to rest before the interpreter ends.

A thread that ran a collective lets go of its tensors a little after it has woken the thread that
waited for it, and letting go of a tensor that Python knows takes Python's lock. Where the
interpreter is at its end by then, the lock takes the thread down, and C++ answers ``terminate
called without an active exception``: a run that has done all its work ends by SIGABRT. Joining the
threads would mend it, but they end only with the last reference to their process group, which
models and optimizers keep.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "(pt_gloo_runloop)"
_INTERVAL_S = 0.001


def wait_for_rest(patience_s: float = 2.0) -> None:
    """Return when no thread of gloo has anything left to run, or patience is at its end.

    Local; registered to run when the interpreter exits. Threads that sleep, waiting for ranks that
    never come, say, are at rest. Does nothing where the system has no ``/proc``.

    Args:
        patience_s: How long to wait at most, in seconds.
    """
    deadline_s = time.monotonic() + patience_s
    # Sleeping gives Python's lock away, so a thread that waits for it in the first look has run or
    # can run in the second.
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline_s:
        num_quiet = 0 if _is_any_running() else num_quiet + 1
        time.sleep(_INTERVAL_S)


def _is_any_running() -> bool:
    for stat in _TASKS.glob("*/stat"):
        # A thread may end between the listing and the look at it.
        with contextlib.suppress(OSError):
            name, state = stat.read_text().split()[1:3]
            if name == _NAME and state == "R":
                return True
    return False
