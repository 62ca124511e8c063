"""Record why a process ends, where its launcher looks: one message, not a traceback.

torchrun names a file for each process, and prints what it finds there under "Root Cause". Nothing
is written for processes without a launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time

_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def describe(error: BaseException) -> str:
    """Return the one message that a user sees of an error."""
    return f"{type(error).__name__}: {error}"


def is_recorded() -> bool:
    """Return whether a launcher looks for the reason of this process's end."""
    return _FILE_VARIABLE in os.environ


def report_failure(message: str) -> None:
    """Print why this process ends to the standard error, and record it for the launcher; local."""
    record_failure(message)
    # The end within the text: ranks without buffers would write it apart, after another's line.
    print(f"megafsdp: {message}\n", end="", file=sys.stderr, flush=True)


def record_failure(message: str) -> None:
    """Write why this process ends to the launcher's file, if it names one; local."""
    if not is_recorded():
        return
    path = os.environ[_FILE_VARIABLE]
    # torchrun prints the call stack where there is one, so the message takes its place.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": message, "extraInfo": extra}})
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        print(f"megafsdp: '{path}' cannot be written: {error}", file=sys.stderr, flush=True)
