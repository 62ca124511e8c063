"""Count forwards that may still have a backward, by the pass that each is a part of.

A *pass* is one forward of the root with all units in it, or of a unit that runs without the root.
In autograd's graph a :class:`ForwardToken` stands for a unit's forward. From these counts the
schedule decides when a unit's backward is over.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from megafsdp.device.torch_private import base_of

_numbers = itertools.count()


class ForwardPass:
    """One forward of the root with all units in it, or of a unit without the root."""

    __slots__ = ("__weakref__",)


class ForwardToken:
    """One forward of a unit, alive as long as the graph that it built.

    Args:
        inputs: The inputs that need a gradient, before they pass through the identity.
        forward_pass: The pass that it is a part of; None for a pass of its own.
        is_in_order: Whether its backward has a place in the recorded order. The backward of a head
            on one chunk has none: the recorded order is that of the root's backward.

    Attributes:
        trainable: Whether each of the unit's parameters required a gradient; None if not recorded.
    """

    __slots__ = ("__weakref__", "forward_pass", "is_in_order", "number", "outer_ids", "trainable")

    def __init__(
        self,
        inputs: Sequence[torch.Tensor] = (),
        forward_pass: ForwardPass | None = None,
        *,
        is_in_order: bool = True,
    ) -> None:
        self.forward_pass = forward_pass or ForwardPass()
        self.is_in_order = is_in_order
        self.trainable: list[bool] | None = None
        self.number = next(_numbers)
        # The ids stay valid: the graph that owns this token owns the inputs too.
        self.outer_ids = frozenset(id(t if base_of(t) is None else base_of(t)) for t in inputs)


class PendingForwards:
    """Forwards of a unit whose backward may come.

    A forward counts as long as any graph of its pass is alive, even if its own graph is gone: that
    may differ between ranks, which would then end the unit's backward at different times. A pass
    without any graph left on a rank has no backward there, and is no longer counted.

    Attributes:
        had_any: Whether a forward has ever begun, with a graph or without.
    """

    def __init__(self) -> None:
        self.had_any = False
        # Weak keys: the tokens in the graph own the pass, and its count must not outlive them.
        self._by_pass: weakref.WeakKeyDictionary[ForwardPass, set[int]]
        self._by_pass = weakref.WeakKeyDictionary()
        self._begun: set[int] = set()

    def add(self, token: ForwardToken) -> None:
        """Count a forward, once."""
        self._by_pass.setdefault(token.forward_pass, set()).add(token.number)

    def begin(self, token: ForwardToken) -> None:
        """Note that the backward of a forward has begun; count the forward."""
        self.add(token)
        self._begun.add(token.number)

    def discard(self, token: ForwardToken) -> None:
        """Remove a forward, if it is counted."""
        self._by_pass.get(token.forward_pass, set()).discard(token.number)

    def clear(self) -> None:
        """Remove all forwards."""
        # It is empty for most units; clearing an empty one takes longer than this check.
        if self._by_pass or self._begun:
            self._by_pass.clear()
            self._begun.clear()

    def has_any_of(self, passes: Collection[ForwardPass]) -> bool:
        """Return whether a forward of one of these passes is counted."""
        return any(self._by_pass.get(each) for each in passes)

    def are_over_before(self, token: ForwardToken, passes: Collection[ForwardPass]) -> bool:
        """Return whether none of these passes' forwards waits once a forward's backward begins.

        They began after it, and their backward before: not as one of a unit within that unit.
        """
        return all(
            number > token.number and number in self._begun
            for each in passes
            for number in self._by_pass.get(each, ())
        )


class ModuleRun:
    """One forward through a unit's modules: records which of them have yet to end.

    Args:
        modules: The unit's modules.

    Attributes:
        token: The forward in autograd's graph; None without a graph.
        num_nested: How many calls of a module within its own forward have begun and not ended.
    """

    __slots__ = ("_begun", "_to_end", "num_nested", "token")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._to_end = {id(module) for module in modules}
        self._begun: set[int] = set()
        self.token: ForwardToken | None = None
        self.num_nested = 0

    def begin(self, module: nn.Module) -> None:
        """Note that a module's forward begins."""
        self._begun.add(id(module))

    def end(self, module: nn.Module) -> bool:
        """Note that a module's forward has ended; return whether all have."""
        self._to_end.discard(id(module))
        return not self._to_end

    def has_to_end(self, module: nn.Module) -> bool:
        """Return whether a module's forward has not ended."""
        return id(module) in self._to_end

    def is_running(self, module: nn.Module) -> bool:
        """Return whether a module's forward has begun and not ended."""
        return id(module) in self._begun and self.has_to_end(module)

    @property
    def is_open(self) -> bool:
        """Return whether a module has begun and not ended."""
        return not self._begun.isdisjoint(self._to_end)

    def goes_on_with(self, module: nn.Module, *, is_interrupted: bool) -> bool:
        """Return whether a module that begins now is a part of this run.

        Args:
            module: The module.
            is_interrupted: Whether the unit rests meanwhile.
        """
        if not self.has_to_end(module):
            # A second call of the module continues this run unless the unit rests: a unit at rest
            # does not wait for the modules that ran before.
            return not is_interrupted
        # A forward that began and never ended was cut short by an exception.
        return id(module) not in self._begun
