"""Profiler ranges: what the engine does, for which unit.

``torch.profiler`` shows them, and so do NVIDIA's tools under
``torch.autograd.profiler.emit_nvtx()``. Without a profiler they cost a quarter of a microsecond.
Every range is a context, so it ends even if the code inside raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from megafsdp.device.torch_private import fast_profiler_range


class Named(Protocol):
    """An object with a readable name, such as the FQN of a unit."""

    name: str


P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N", bound=Named)


def profiler_range(what: str, name: str) -> AbstractContextManager[object]:
    """Return a context that profilers show as ``megafsdp::<what> <name>``."""
    return fast_profiler_range(f"megafsdp::{what} {name}")


def in_profiler_range(
    what: str,
) -> Callable[[Callable[Concatenate[N, P], R]], Callable[Concatenate[N, P], R]]:
    """Make a method run in a range that is named after its object."""

    def decorate(method: Callable[Concatenate[N, P], R]) -> Callable[Concatenate[N, P], R]:
        @functools.wraps(method)
        def run(self: N, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with profiler_range(what, self.name):
                return method(self, *args, **kwargs)

        return run

    return decorate
