"""The progress bar of the tools: bytes done of bytes to do, on standard error."""

from __future__ import annotations

import sys

from tqdm import tqdm


def bytes_bar(description: str, total_nbytes: int, *, is_wanted: bool) -> tqdm:
    """Return a bar, a context manager whose ``update`` takes bytes.

    Args:
        description: One word before the bar.
        total_nbytes: Bytes to be done in all.
        is_wanted: False draws none; True draws one on a terminal only.
    """
    return tqdm(
        total=total_nbytes,
        desc=description,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        # None draws the bar only on a terminal.
        disable=None if is_wanted else True,
    )
