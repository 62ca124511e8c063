"""The methods that a module gains when it becomes a unit.

:class:`FSDPModule` is mixed into the class of every module given to ``fully_shard``; the names and
meanings are those of ``torch.distributed.fsdp.FSDPModule``, so code written for it keeps working.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from megafsdp.device.memory import outside_inference_mode
from megafsdp.device.torch_private import is_backward_running
from megafsdp.errors import expected
from megafsdp.fsdp.collective_methods import CollectiveMethods, not_built
from megafsdp.fsdp.handles import GradientReductionHandle, UnshardHandle
from megafsdp.fsdp.runtime.guards import refuse_changes, refuse_copy, refuse_replaced
from megafsdp.fsdp.runtime.schedule import FSDPContext, ScheduledUnit, references
from megafsdp.fsdp.runtime.unit import hidden_parameters, units_below
from megafsdp.fsdp.torch_state import (
    TorchState,
    mark_managed,
    refuse_lost_gradients,
    show_weights_to_split_backward,
)
from megafsdp.mesh.torch_private import (
    check_before_torch_shards,
    register_as_fully_sharded,
    run_split_backwards_within,
    set_fully_shard_state,
)

_PREFIX = "FSDP"


class FSDPModule(CollectiveMethods):
    """Mixin of modules given to ``fully_shard``.

    It is a subclass of torch's class of the same name, so that ``isinstance`` checks elsewhere
    hold, and overrides all of its methods. The other state of a unit that torch's own code reads is
    in :mod:`megafsdp.fsdp.torch_state`.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Make a module of the class without this mixin.

        torch makes a slice of an ``nn.Sequential`` with the class of the whole; a slice is no unit.
        """
        plain = next(c for c in cls.__mro__[1:] if issubclass(c, nn.Module))
        return plain(*args, **kwargs)

    def _get_name(self) -> str:
        """Return the name that the class had before, which transformers looks up in its tables."""
        return type(self).__name__.removeprefix(_PREFIX)

    def __repr__(self) -> str:
        """Show that the module is a unit, as torch's do."""
        return _PREFIX + super().__repr__()

    def _get_fsdp_state(self) -> Any:
        """Return the state of this module's unit in the form that torch's own code reads."""
        return TorchState(self)

    def _root_context(self, where: str, reason: str) -> FSDPContext:
        """Return the context of the root, which this module has to be.

        Args:
            where: The call, for the message.
            reason: What is done to the root and all units under it.

        Raises:
            RuntimeError: The module is not the root.
        """
        unit = self._fsdp_unit()
        context = unit.require_context()
        if not context.is_root(unit):
            raise RuntimeError(
                expected(
                    f"the root, {reason}",
                    f"unit '{unit.name}' under it",
                    where=where,
                    hint="Call it on the outermost module given to fully_shard()",
                )
            )
        return context

    @overload
    def unshard(self, async_op: Literal[False] = False) -> None: ...

    @overload
    def unshard(self, async_op: Literal[True]) -> UnshardHandle: ...

    @overload
    def unshard(self, async_op: bool = ...) -> UnshardHandle | None: ...

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and show them; collective over its ranks.

        Args:
            async_op: Return a handle at once; its ``wait()`` shows the parameters.
        """
        unit = self._fsdp_unit()
        # A call before the first forward comes before the root was found: find it now.
        context = unit.require_context()
        refuse_replaced(unit.groups)
        context.start_unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show this unit's sharded parameters and free its unsharded storage; local."""
        unit = self._fsdp_unit()
        unit.show_sharded()
        unit.release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, in full size, while the context is open; local."""
        # Each unit's own choice is restored at the end: contexts may be nested.
        units = self._fsdp_units(recurse=True)
        before = [unit.options.requires_gradient_sync for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.options = replace(unit.options, requires_gradient_sync=value)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients or accumulates them locally in full size."""
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, requires_gradient_sync=requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the step's last; if not, some reductions wait.

        Without effect on when a step's backwards end if :meth:`finalize_backward` ends them.
        """
        self._fsdp_unit().require_context().iteration.is_last_microbatch = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether :meth:`finalize_backward` ends a step's backwards, not the last of them.

        Called on the root by all ranks, before the first backward of a step; local.

        Raises:
            RuntimeError: The module is not the root, or a backward has begun.
        """
        where = "set_manual_backward_finalization()"
        iteration = self._root_context(where, "whose backwards end together").iteration
        if enabled != iteration.is_ended_by_user and iteration.is_unfinished:
            raise RuntimeError(
                expected(
                    "no backward since the optimizer's step",
                    "one that has not been ended",
                    where=where,
                    hint="Call it before the first backward, or after finalize_backward() or "
                    "reset_iter_state()",
                )
            )
        iteration.is_ended_by_user = enabled

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what waits for the end of a step's backwards, and free storage; collective.

        Called on the root by all ranks, after :meth:`set_manual_backward_finalization` and all
        backwards of the step. Units that synchronize gradients reduce those that earlier backwards
        added up locally, and units that reshard after backward free their storage. Before the first
        forward nothing happens.

        Args:
            async_op: Return a handle once reductions are issued; its ``wait()`` finishes them.
                Until then no forward or backward of these units may run, and gradients may not be
                used.

        Raises:
            RuntimeError: The module is not the root, the last backward ends by itself, a backward
                is running, a handle has not been waited for, or a backward that torch's pipelining
                split has left no gradients.
        """
        where = "finalize_backward()"
        unit = self._fsdp_unit()
        if unit.context is None:
            return GradientReductionHandle(None) if async_op else None
        context = self._root_context(where, "whose backwards end together")
        context.iteration.refuse_within_end()
        got = hint = ""
        if is_backward_running():
            got, hint = "a call within a backward", "Call it after the last backward returns"
        elif not context.iteration.is_ended_by_user:
            got = "ones that end by themselves"
            hint = "Call set_manual_backward_finalization(True) before the first forward"
        if got:
            wanted = "backwards that have returned, and that the caller ends"
            where += f" of unit '{unit.name}'"
            raise RuntimeError(expected(wanted, got, where=where, hint=hint))
        refuse_lost_gradients(unit)
        handle = GradientReductionHandle(context)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether shards are summed over the outer axis, if there is one, from here on."""
        for unit in self._fsdp_units(recurse=recurse):
            # Without an outer axis the reduction over the inner one is all there is.
            has_outer_axis = any(group.axes.outer_group is not None for group in unit.groups)
            is_required = requires_all_reduce or not has_outer_axis
            unit.options = replace(unit.options, requires_all_reduce=is_required)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether memory of gathered parameters stays theirs when they are resharded; local.

        They are gathered anew all the same. Their addresses then stay the same, as a CUDA graph
        needs, and all units' full parameters take memory at once.
        """
        for unit in self._fsdp_units(recurse=recurse):
            for group in unit.groups:
                group.compute_weight.keep_storage(keep)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether storage is freed between forward and backward.

        Raises:
            ValueError: It is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                expected(
                    "True or False",
                    repr(reshard_after_forward),
                    where="set_reshard_after_forward()",
                    hint="Give a number of ranks to fully_shard(), which makes their groups",
                )
            )
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether storage is freed when the unit's backward ends, or the whole backward."""
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this one's forward begins, instead of the recorded next.

        Raises:
            ValueError: One of them is no unit.
        """
        # An empty list is a choice too: nothing is gathered ahead.
        units = _references(modules, "set_modules_to_forward_prefetch()")
        self._fsdp_unit().options = replace(self._fsdp_unit().options, forward_prefetch=units)

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Gather these units when this one's backward begins, instead of the recorded next.

        Raises:
            ValueError: One of them is no unit.
        """
        units = _references(modules, "set_modules_to_backward_prefetch()")
        self._fsdp_unit().options = replace(self._fsdp_unit().options, backward_prefetch=units)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward gathers this unit; False is right only if it needs no weights."""
        unit = self._fsdp_unit()
        unit.options = replace(unit.options, unshard_in_backward=unshard_in_backward)

    def join_hook(self, **kwargs: object) -> None:
        """Refuse ``torch.distributed.algorithms.Join``, for ranks with fewer batches than others.

        Raises:
            NotImplementedError: Always.
        """
        raise not_built(
            "collectives for ranks whose batches have ended",
            where="torch.distributed.algorithms.Join",
            hint="Drop the incomplete batches, or give these ranks batches without rows: see "
            "docs/troubleshooting.md, 'It hangs'",
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next forward's first gather wait for an event of the optimizer's stream.

        Raises:
            NotImplementedError: The unit is not on CUDA; other devices have no streams.
        """
        # A root may own no parameter itself.
        groups = (group for unit in self._fsdp_units(recurse=True) for group in unit.groups)
        if not any(group.device.type == "cuda" for group in groups):
            raise not_built(
                "an event on the CPU, where a step has ended when it returns",
                where="set_post_optim_event()",
                hint="Leave out the call",
            )
        self._fsdp_unit().post_optim_event = event

    def reset_iter_state(self) -> None:
        """Drop everything that is not in ``.grad`` yet; called on the root by all ranks.

        This ends a forward or backward that an exception cut short, and drops the sums of
        microbatches whose last one never comes; an optimizer's ``zero_grad`` does not reach these.

        Raises:
            RuntimeError: The module is not the root.
        """
        # An exception leaves all units of a pass unfinished, not one.
        unit = self._fsdp_unit()
        context = self._root_context("reset_iter_state()", "whose iteration is dropped as a whole")
        context.reset_after_error()
        context.iteration.is_unfinished = False
        # The reset keeps sums of earlier microbatches where only a forward was cut short.
        for each in units_below(unit.modules).values():
            each.discard_unreduced_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, including those of microbatches that wait for the last one."""
        # Inside a backward (in a hook that steps), other units still need their sums.
        if not is_backward_running():
            self._discard_unreduced_grads()
        # The method of a user's class may have no parameter.
        super().zero_grad(*(() if set_to_none else (False,)))
        for parameter in hidden_parameters(self).values():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def _discard_unreduced_grads(self) -> None:
        below = set(self.modules())
        for unit in self._fsdp_units(recurse=True):
            # No backward runs on this thread, so an exception cut short the one that had begun.
            if unit.context is not None and unit.context.has_backward_begun:
                unit.context.reset_after_error()
            if below.issuperset(unit.modules):
                unit.discard_unreduced_grads()
                continue
            # One module of a list: the sums of the others stay.
            for group in unit.groups:
                owners = [{owner for owner, _ in p.living_owners()} for p in group.parameters]
                group.gradients.discard([i for i, own in enumerate(owners) if own & below])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as any module does, also in inference mode."""
        # In inference mode torch cannot detach a DTensor.
        with outside_inference_mode():
            return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Accept ``to_empty()``; accept ``.to()`` and similar calls if they change nothing."""
        # torch's own _apply() would replace the parameters even where nothing changes.
        refuse_changes(self, fn, recurse)
        return self

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse to copy: a copy would not be tied to the flat buffers."""
        refuse_copy("copy.deepcopy()")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle: process groups cannot be pickled."""
        refuse_copy("pickle")


def _references(
    modules: Sequence[TorchFSDPModule], where: str
) -> tuple[weakref.ref[ScheduledUnit], ...]:
    """Return weak references to the units of modules.

    Raises:
        ValueError: A module is not a unit.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                expected(
                    "modules given to fully_shard()",
                    f"{type(module).__name__}, which is no unit",
                    where=where,
                    hint="Name the units themselves",
                )
            )
    return references(module._fsdp_unit() for module in modules if isinstance(module, FSDPModule))


def mix_in(module: nn.Module) -> None:
    """Give a module the methods of :class:`FSDPModule` by changing its class."""
    register_as_fully_sharded(module)
    # mypy mistakes the hash of the class for that of its instances.
    module.__class__ = _unit_class(type(module))  # type: ignore[arg-type]
    set_fully_shard_state(module, TorchState(module))
    mark_managed([module])
    check_before_torch_shards(_refuse_torch_around_units)
    run_split_backwards_within(show_weights_to_split_backward)


@functools.cache
def _unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the unit class of a module class; cached, since torch compiles each class anew."""
    return type(f"{_PREFIX}{cls.__name__}", (FSDPModule, cls), {"__doc__": cls.__doc__})


def _refuse_torch_around_units(module: nn.Module) -> None:
    """Raise if torch is to shard or replicate a module that has a unit of ours."""
    units = units_below([module])
    if units:
        raise RuntimeError(
            expected(
                "modules of which megafsdp shards no part",
                f"a unit of megafsdp at '{next(iter(units))}' of {type(module).__name__}",
                where="torch's fully_shard() or replicate()",
                hint="Give the outer module to megafsdp.fully_shard() too",
            )
        )
