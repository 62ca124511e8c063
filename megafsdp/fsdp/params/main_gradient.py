"""The main gradient of a parameter group: the sum over ranks, and the ``.grad`` that show it.

The sum lies in one flat buffer, cut as the main weight is. ``.grad`` of each sharded parameter is a
:class:`FlatGradient`, a DTensor over the parameter's rows in that buffer. The published gradients
own the buffer: it is freed with the last of them, so ``zero_grad()`` frees it, and a gradient that
the user keeps stays valid. The sums are made in :mod:`megafsdp.fsdp.params.gradient_reducer`.

``.grad`` of a parameter that no rank used stays None, as in a single process. If any rank used it,
all ranks get ``.grad``. A rank that used it publishes at once. The other ranks learn of the use
from one small exchange at the end of the backward; until then the state of their sum is UNDECIDED.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.op_rules import ReplicatedDTensor
from megafsdp.buffer.dtensor.traced import plain_spec, spec_of_rows
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor, wrap_like
from megafsdp.device.torch_private import post_accumulate_hooks
from megafsdp.fsdp.params.group_buffers import LocalRows
from megafsdp.fsdp.params.reduced_hook import ReducedHook
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.torch_private import make_dtensor, set_local, spec_of


class FlatGradient:
    """A gradient whose rows lie in a flat main gradient: a DTensor with three more attributes.

    Only the published object is of this class, and stays so after in-place changes. Operations,
    copies and pickles give tensors that lie elsewhere, of the class without the attributes.

    Attributes:
        buffer: The flat main gradient. It is cut as the main weight is, and its gaps are zero.
        index: The parameter's index in the buffer's layout.
        shares: The number of sets of ranks that have other experts' gradients under this name; 1
            if it is the name of one gradient.
    """

    __slots__ = ()
    buffer: DBuffer
    index: int
    shares: int = 1

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        """Copy only the rows, not the buffer."""
        assert isinstance(self, torch.Tensor), "a mixin of tensors"
        copied: torch.Tensor = copy.deepcopy(_without_buffer(self), memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle only the rows, as a tensor of the class without the buffer."""
        assert isinstance(self, torch.Tensor), "a mixin of tensors"
        return _itself, (_without_buffer(self),)


class _UnevenFlatGradient(FlatGradient, UnevenDTensor):  # type: ignore[misc]
    @classmethod
    def wrap(cls, *args: Any) -> UnevenDTensor:  # type: ignore[override]
        """Make a tensor of the base class: results of operations lie elsewhere."""
        return UnevenDTensor.wrap(*args)


class _ReplicatedFlatGradient(FlatGradient, ReplicatedDTensor):  # type: ignore[misc, metaclass]
    @classmethod
    def __tensor_unflatten__(cls, *parts: Any) -> DTensor:  # type: ignore[override]
        """Make one without a buffer, for graphs of ``torch.compile``."""
        plain = DTensor.__tensor_unflatten__(*parts)
        return make_dtensor(cls, local_tensor(plain), spec_of(plain))


_ARE_FLAT = frozenset({_UnevenFlatGradient, _ReplicatedFlatGradient})


def _without_buffer(grad: torch.Tensor) -> torch.Tensor:
    return wrap_like(grad, local_tensor(grad))


def _itself(grad: torch.Tensor) -> torch.Tensor:
    return grad


def wrapper_as(
    cls: type[DTensor], tensor: DTensor, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor], DTensor]:
    """Return a function that wraps rows of one dtype and device.

    Everything that does not depend on the rows is made once, here: every backward wraps gradients
    one by one.

    Args:
        cls: Class of the results; sharded like the tensor, or a plain DTensor.
        tensor: The tensor that the results are wrapped like.
        dtype: Dtype of the rows.
        device: Device of the rows.
    """
    empty = torch.empty(0, dtype=dtype, device=device)
    layout = tensor.uneven_layout if isinstance(tensor, UnevenDTensor) else None
    spec = spec_of(tensor)
    spec = plain_spec(spec, dtype) if layout is None else spec_of_rows(spec, dtype, layout)

    def wrapper(rows: torch.Tensor) -> DTensor:
        result = make_dtensor(cls, rows, spec, empty)
        if layout is not None:
            result._uneven_layout = layout  # type: ignore[attr-defined]
        return result

    return wrapper


def common_buffer(grads: Sequence[torch.Tensor | None], indices: list[int]) -> DBuffer | None:
    """Return the main gradient in which the gradients lie at these indices; None if they do not."""
    # Check all at once: an optimizer asks for hundreds of parameters in each step.
    if not _ARE_FLAT.issuperset(map(type, grads)):
        return None
    buffers = [grad.buffer for grad in grads]  # type: ignore[union-attr]
    found = [grad.index for grad in grads]  # type: ignore[union-attr]
    is_common = found == indices and buffers.count(buffers[0]) == len(buffers)
    return buffers[0] if is_common else None


class EarlyStepListener(Protocol):
    """Steps a group's main weight, perhaps before ``step()`` is called on the optimizer."""

    def grads_are_final(self, grads: torch.Tensor) -> None:
        """Begin the step: all gradients are published, and no sum will be added before ``step()``.

        Args:
            grads: The flat main gradient, cut as the main weight is.
        """

    def grads_will_change(self) -> None:
        """Stop reading gradients: another sum is about to be added to them."""

    def cancel(self) -> None:
        """Cancel a step that was begun: the main weight is about to be read or written."""


class _GradState(Enum):
    """The state of one parameter's gradient in the main gradient."""

    EMPTY = "empty"  # Nothing: the next sum overwrites it.
    UNDECIDED = "undecided"  # A sum to which possibly no rank contributed; .grad is None.
    PUBLISHED = "published"  # A sum that .grad shows.


class MainGradient:
    """The main gradient of one group, and ``.grad`` of its sharded parameters.

    Each sum goes through :meth:`prepare`, :meth:`publish` and, at the end of the backward,
    :meth:`resolve_usage`.

    Args:
        parameters: The sharded parameters.
        rows: Finds their rows in a buffer.
        new_buffer: Allocates a main gradient.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rows: LocalRows,
        new_buffer: Callable[[], DBuffer],
    ) -> None:
        self.parameters = parameters
        self._rows = rows
        self._new_buffer = new_buffer
        self.listener: EarlyStepListener | None = None
        self.hook: ReducedHook | None = None
        # Published gradients own the buffer: a strong reference would outlive zero_grad().
        self._buffer: weakref.ref[DBuffer] | None = None
        self._published: list[weakref.ref[torch.Tensor] | None] = [None] * len(parameters)
        self._states = [_GradState.EMPTY] * len(parameters)
        # Those of a group are shared out alike: their mesh leaves room for as many sets of ranks.
        experts = annotation_of(parameters[0]).experts if parameters else None
        self._shares = 1 if experts is None else experts.total // experts.count
        # Set from prepare() until nothing is undecided: no published gradient owns the buffer yet.
        self._unpublished: DBuffer | None = None
        self._views: list[torch.Tensor] = []  # Views of the unpublished buffer.
        self._wrappers: list[Callable[[torch.Tensor], DTensor]] = []  # Made with the first views.
        self._before: list[torch.Tensor | None] = []  # .grad as prepare() found it.
        # With a hook: a sum that is added to the buffer once the hook has changed it.
        self._addend: DBuffer | None = None
        self._optimizer_may_start = False

    @property
    def buffer(self) -> DBuffer | None:
        """Return the buffer; None if no gradient of it is alive."""
        return None if self._buffer is None else self._buffer()

    @property
    def has_undecided(self) -> bool:
        """Return whether some parameter waits for the other ranks' usage."""
        return _GradState.UNDECIDED in self._states

    def usage(self) -> list[bool]:
        """Return for each parameter whether this rank has published its ``.grad``."""
        return [state is _GradState.PUBLISHED for state in self._states]

    def prepare(self) -> tuple[DBuffer, bool]:
        """Return the buffer, ready for a sum, and whether the sum adds to it; local.

        If the user has cleared every ``.grad``, a fresh buffer is made, so that references to the
        old gradients stay valid.
        """
        buffer, is_accumulating = self._prepared()
        if self.hook is None or not is_accumulating:
            return buffer, is_accumulating
        # The hook must not see the sums of earlier microbatches.
        self._addend = self._new_buffer()
        return self._addend, False

    def start_hook(self) -> bool:
        """Call the hook, if there is one, on the sum; return whether it runs on until publish."""
        buffer = self._addend or self._unpublished
        if self.hook is None or buffer is None:
            return False
        self.hook.start(buffer.flat)
        return self.hook.runs_beside

    def _prepared(self) -> tuple[DBuffer, bool]:
        grads = [p.grad for p in self.parameters]
        self._follow_user(grads)
        is_empty = self._states.count(_GradState.EMPTY) == len(grads) and not [
            g for g in grads if g is not None
        ]
        buffer = self.buffer
        if buffer is None or is_empty:
            buffer = self._new_buffer()
            self._buffer = weakref.ref(buffer)
            self._published = [None] * len(grads)
        self._unpublished, self._views, self._before = buffer, [], grads
        if is_empty:
            # The sum overwrites the whole buffer, gaps included.
            return buffer, False
        if self.listener is not None:
            self.listener.grads_will_change()
        # Kernels write the sums by address, and torch does not count such writes.
        torch.autograd.graph.increment_version(buffer.flat)
        with torch.no_grad():
            for i, grad in enumerate(grads):
                if grad is not None and not self._is_published(i, grad):
                    # The user assigned a gradient of their own: the sum adds to it.
                    self._leave_to_user(i)
                    buffer.tensor(i).copy_(local_tensor(grad).reshape(-1))
                    self._states[i] = _GradState.PUBLISHED
                elif self._states[i] is _GradState.EMPTY:
                    # The sum adds to all rows: those of a cleared gradient must start from zero.
                    self._leave_to_user(i)
                    buffer.tensor(i).zero_()
            buffer.zero_gaps()
        return buffer, True

    def adopt_grads(self) -> DBuffer | None:
        """Return the buffer with every ``.grad`` in it; None if there is no ``.grad``; local.

        Gradients that the user assigned are moved there, so that they change with the buffer. Rows
        of a parameter without a gradient are zero.
        """
        grads = [p.grad for p in self.parameters]
        found = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if not found:
            return None
        moved = [i for i, grad in found if not self._is_published(i, grad)]
        if moved:
            # This makes a buffer if no backward has, and copies these gradients into it.
            self._prepared()
            for i in moved:
                self._show(i)
            self._end_if_decided()
        buffer = self.buffer
        assert buffer is not None, "the gradients own it"
        with torch.no_grad():
            for i, grad in enumerate(grads):
                if grad is None:
                    # The whole buffer is stepped: remove what a cleared gradient left in it.
                    self._leave_to_user(i)
                    buffer.tensor(i).zero_()
        return buffer

    def publish(self, used: Sequence[bool], *, optimizer_may_start: bool) -> None:
        """Show the sum as ``.grad`` of the parameters that this rank used; local.

        Args:
            used: Whether this rank contributed a gradient, for each parameter.
            optimizer_may_start: Whether the user said that the optimizer's step comes next.
        """
        self._optimizer_may_start = optimizer_may_start
        if self.hook is not None:
            self.hook.finish()
        if self._addend is not None and self._unpublished is not None:
            with torch.no_grad():
                self._unpublished.flat.add_(self._addend.flat)
        self._addend = None
        for i, parameter in enumerate(self.parameters):
            if not (parameter.requires_grad or used[i]):
                continue  # Frozen: a gradient from before stays shown.
            if used[i] or self._states[i] is _GradState.PUBLISHED:
                self._publish(i)
            else:
                self._states[i] = _GradState.UNDECIDED
        self._end_if_decided()

    def resolve_usage(self, is_used_anywhere: Sequence[bool]) -> None:
        """Publish the undecided sums to which another rank contributed, drop the rest; local."""
        for i, state in enumerate(self._states):
            if state is _GradState.UNDECIDED:
                if is_used_anywhere[i]:
                    self._publish(i)
                else:
                    self._states[i] = _GradState.EMPTY
        self._end_if_decided()

    def abort(self) -> None:
        """Drop the sums that are not published."""
        self._unpublished, self._views, self._before = None, [], []
        self._addend = None
        published = _GradState.PUBLISHED
        self._states = [s if s is published else _GradState.EMPTY for s in self._states]

    def discard(self, indices: Sequence[int]) -> None:
        """Drop some parameters' sums that are not published."""
        for i in indices:
            if self._states[i] is _GradState.UNDECIDED:
                self._states[i] = _GradState.EMPTY
        self._end_if_decided()

    def _follow_user(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Find which ``.grad`` the user has cleared, and set their states to EMPTY."""
        shown = [i for i, state in enumerate(self._states) if state is _GradState.PUBLISHED]
        cleared = [i for i in shown if grads[i] is None]
        for i in cleared:
            self._states[i] = _GradState.EMPTY
        # If the user cleared all that was shown, drop undecided sums of the same step too.
        if cleared and len(cleared) == len(shown):
            self._states = [_GradState.EMPTY] * len(self._states)

    def _is_published(self, index: int, grad: torch.Tensor) -> bool:
        reference = self._published[index]
        return reference is not None and reference() is grad

    def _leave_to_user(self, index: int) -> None:
        """Give a gradient that is no longer ``.grad``, but still referenced, memory of its own."""
        reference, self._published[index] = self._published[index], None
        kept: Any = None if reference is None else reference()
        if kept is not None:
            set_local(kept, local_tensor(kept).clone())
            # An optimizer that gets it back must not look for it in the buffer.
            kept.__class__ = type(_without_buffer(kept))
            del kept.buffer, kept.index, kept.shares

    def _publish(self, index: int) -> None:
        self._show(index)
        self._states[index] = _GradState.PUBLISHED
        parameter = self.parameters[index]
        # Autograd, which would call these hooks, never reaches sharded parameters.
        for hook in post_accumulate_hooks(parameter):
            hook(parameter)

    def _show(self, index: int) -> None:
        """Make ``.grad`` of a parameter show its rows of the buffer."""
        parameter = self.parameters[index]
        shown = parameter.grad
        if shown is None or not self._is_published(index, shown):
            buffer = self._unpublished
            assert buffer is not None, "the sum was made"
            # Make all views at once, and only if a gradient object must be made.
            if not self._views:
                self._views = self._rows.views(buffer.flat)
                self._wrappers = self._wrappers or self._new_wrappers(buffer.flat)
            if shown is not None and shown is not self._before[index]:
                # Autograd made it while the sum was under way: a loss reads the parameter itself.
                self._views[index].view(-1).add_(local_tensor(shown).reshape(-1))
            grad: Any = self._wrappers[index](self._views[index])
            grad.buffer, grad.index, grad.shares = buffer, index, self._shares
            # A weak reference: a gradient that the user clears must be freed, and be seen as gone.
            self._published[index] = weakref.ref(grad)
            parameter.grad = grad

    def _new_wrappers(self, flat: torch.Tensor) -> list[Callable[[torch.Tensor], DTensor]]:
        """Return for each parameter a function that wraps its rows of a buffer as its gradient."""
        wrappers = []
        for parameter in self.parameters:
            assert isinstance(parameter, DTensor), "parameters are sharded or replicated"
            is_uneven = isinstance(parameter, UnevenDTensor)
            cls = _UnevenFlatGradient if is_uneven else _ReplicatedFlatGradient
            wrappers.append(wrapper_as(cls, parameter, flat.dtype, flat.device))
        return wrappers

    def _end_if_decided(self) -> None:
        """Leave the buffer to the published gradients, unless a sum is undecided."""
        if self.has_undecided:
            return
        buffer, self._unpublished, self._views, self._before = self._unpublished, None, [], []
        # This comes last: the listener may start on another thread and read the sum at once.
        if self._optimizer_may_start and self.listener is not None and buffer is not None:
            self.listener.grads_are_final(buffer.flat)
