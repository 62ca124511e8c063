"""A collective under way: what is waited for, and what is done then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist


class Pending:
    """A collective that was issued and may not be complete.

    Args:
        works: Handles to wait for.
        finish: What to do once they are complete, on the thread that waits.
    """

    __slots__ = ("_finish", "_works")

    def __init__(
        self, works: Sequence[dist.Work | None] = (), finish: Callable[[], None] | None = None
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = finish

    def wait(self) -> None:
        """Wait for completion and run the finishing step; later calls return at once.

        Raises:
            RuntimeError: A collective failed. Those beside it have ended too: they use memory that
                the caller may free now.
        """
        works, self._works = self._works, []
        finish, self._finish = self._finish, None
        for index, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError:
                Pending(works[index + 1 :]).wait()
                raise
        if finish is not None:
            finish()

    def discard(self) -> None:
        """Wait for completion and drop the result: the finishing step never runs."""
        self._finish = None
        self.wait()
