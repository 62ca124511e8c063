"""How far the backwards under one root have come: one of them, and those before a step."""

from __future__ import annotations

from dataclasses import dataclass

from megafsdp.errors import expected


@dataclass(slots=True, eq=False)
class WholeBackward:
    """One backward, of all units that take part in it.

    Attributes:
        is_running: Whether it has begun, and its end has not.
        is_complete: Whether its end is complete; an exception may have cut it short.
        is_order_begun: Whether a unit that is in the recorded order has begun its backward.
    """

    is_running: bool = True
    is_complete: bool = False
    is_order_begun: bool = False


@dataclass(slots=True, eq=False)
class Iteration:
    """All backwards before one step of the optimizer.

    Attributes:
        is_last_microbatch: Whether no other microbatch comes before the step.
        optimizer_may_start: Whether the user declared this the last microbatch: a step may begin.
        is_unfinished: Whether a backward has begun, and the iteration has not ended.
        is_ended_by_user: Whether ``finalize_backward()`` ends it, instead of the last backward.
        end: Stands for an end that the user has begun and not waited for.
    """

    is_last_microbatch: bool = True
    optimizer_may_start: bool = False
    is_unfinished: bool = False
    is_ended_by_user: bool = False
    end: object | None = None

    @property
    def ends_with_backward(self) -> bool:
        """Return whether the backward under way is the last, and ends the iteration."""
        return self.is_last_microbatch and not self.is_ended_by_user

    def refuse_within_end(self) -> None:
        """Raise RuntimeError if the user has begun to end the iteration, and not waited."""
        if self.end is not None:
            raise RuntimeError(
                expected(
                    "wait() of the handle of finalize_backward() first",
                    "a forward or backward while gradients are being reduced",
                    where="a root of fully_shard()",
                    hint="Keep the handle, and wait before gradients are used",
                )
            )

    def end_with(self, end: object) -> None:
        """Forget the end that the user has begun.

        Raises:
            RuntimeError: It is not ``end``: that one was dropped.
        """
        if self.end is not end:
            raise RuntimeError(
                expected(
                    "gradients that are being reduced",
                    "none: zero_grad(), reset_iter_state() or an exception has dropped them",
                    where="wait() of the handle of finalize_backward()",
                    hint="Wait first; clear gradients after the optimizer's step",
                )
            )
        self.end = None
