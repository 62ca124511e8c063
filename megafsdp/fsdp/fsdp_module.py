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
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from megafsdp.buffer.comm.custom import AllGather, ReduceScatter
from megafsdp.device.memory import outside_inference_mode
from megafsdp.device.torch_private import is_backward_running
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.reduced_hook import ReducedHook
from megafsdp.fsdp.runtime.guards import refuse_changes, refuse_copy, refuse_replaced
from megafsdp.fsdp.runtime.schedule import ScheduledUnit, references
from megafsdp.fsdp.runtime.unit import FSDPUnit, hidden_parameters, unit_of, units_below
from megafsdp.fsdp.torch_state import TorchState, mark_managed, show_weights_to_split_backward
from megafsdp.fsdp.unshard_handle import UnshardHandle
from megafsdp.mesh.torch_private import (
    check_before_torch_shards,
    register_as_fully_sharded,
    run_split_backwards_within,
    set_fully_shard_state,
)

_PREFIX = "FSDP"


if TYPE_CHECKING:

    class _Mixin(TorchFSDPModule, nn.Module):  # type: ignore[misc]
        """The base classes that type checkers see: every instance is also an ``nn.Module``."""

else:
    _Mixin = TorchFSDPModule


class FSDPModule(_Mixin):
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

    def _fsdp_unit(self) -> FSDPUnit:
        unit = unit_of(self)
        assert unit is not None, "fully_shard() made this module a unit"
        return unit

    def _fsdp_units(self, *, recurse: bool) -> list[FSDPUnit]:
        if not recurse:
            return [self._fsdp_unit()]
        return list(units_below([self]).values())

    def _get_fsdp_state(self) -> Any:
        """Return the state of this module's unit in the form that torch's own code reads."""
        return TorchState(self)

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
        """Choose whether the next backward is the step's last; if not, some reductions wait."""
        self._fsdp_unit().require_context().is_last_microbatch = is_last_backward

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether shards are summed over the outer axis, if there is one, from here on."""
        for unit in self._fsdp_units(recurse=recurse):
            # Without an outer axis the reduction over the inner one is all there is.
            has_outer_axis = any(group.axes.outer_group is not None for group in unit.groups)
            is_required = requires_all_reduce or not has_outer_axis
            unit.options = replace(unit.options, requires_all_reduce=is_required)

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

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if factor <= 0:
            raise ValueError(
                expected(
                    "a positive factor",
                    factor,
                    where="set_gradient_divide_factor()",
                    hint="Give the number that the sum over ranks is divided by",
                )
            )
        for group in self._fsdp_unit().groups:
            group.gradients.scale = 1.0 / factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, torch's newer name of the same."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call ``hook`` on each new sum of this unit's gradients, before it becomes ``.grad``.

        For sums over ranks that no mesh names, such as replicas that come and go. It is called once
        a parameter group (parameters that share dtypes and ranks), in the same order on all ranks,
        when the sum over the mesh is complete: for each microbatch that is reduced, without the
        sums of earlier ones; with parameters on the host once for all of them.

        Args:
            hook: Changes a tensor in place: 1-D, this rank's range of the group's flat buffer, of
                the main gradients' dtype, already divided. Gaps in it are zero and must stay so.
                None calls nothing any more.
            stream: The CUDA stream that the hook's work is queued on; None for a stream that all
                hooks share. Ignored on CPU.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: A stream is given, and the mesh has two axes.
        """
        groups = self._fsdp_unit().groups
        where = "set_all_reduce_hook()"
        if hook is not None and not callable(hook):
            raise TypeError(
                expected("a function of a tensor", repr(hook), where=where, hint="Give a function")
            )
        if stream is not None and any(group.axes.outer_group is not None for group in groups):
            raise ValueError(
                expected(
                    "no stream on a mesh of two axes, as in torch",
                    stream,
                    where=where,
                    hint="Leave it out: the hook runs after the sum over the outer axis",
                )
            )
        for group in groups:
            group.gradients.call_on_sums(
                None if hook is None else ReducedHook(hook, group.device, stream)
            )

    def set_custom_all_gather(self, comm: AllGather | None) -> None:
        """Let an object of yours gather this unit's weights over the ranks that divide them.

        It is called once a parameter group (parameters that share dtypes and ranks) and gather, in
        the same order on all ranks, in place of the default, which writes into the unsharded
        parameters without a copy. Joins over an outer axis and groups of one rank go without it.

        Args:
            comm: torch's ``AllGather`` or anything like it: ``allocate(size, dtype=, device=)``
                returns memory, and ``comm(output_tensor=, input_tensor=, group=, async_op=False)``
                fills it. Both are 1-D, in the compute dtype (uint8 for quantized weights), and the
                input is this rank's part of the output. On CUDA both are called on a stream of
                their own. None restores the default.

        Raises:
            TypeError: ``comm`` cannot be called, or allocates nothing; in a gather, it returned
                memory of another size, dtype or device than was asked for.
            ValueError: The unit's weights are replicated (``no_shard``).
        """
        for group in self._groups_for(comm, where="set_custom_all_gather()"):
            group.compute_weight.all_gather_comm = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter | None) -> None:
        """Let an object of yours sum this unit's gradients over the ranks that divide them.

        It is called once a parameter group and reduction, in the same order on all ranks. Sums over
        an outer axis and groups of one rank go without it.

        Args:
            comm: torch's ``ReduceScatter`` or anything like it: ``allocate()`` as for
                :meth:`set_custom_all_gather`, for input and output, and ``comm(output_tensor=,
                input_tensor=, group=, op=ReduceOp.SUM)``. Both are 1-D and of the reduce dtype.
                None restores the default.

        Raises:
            TypeError: As for :meth:`set_custom_all_gather`.
            ValueError: As there.
        """
        for group in self._groups_for(comm, where="set_custom_reduce_scatter()"):
            group.gradients.summing.reduce_scatter_comm = comm

    def _groups_for(self, comm: object, *, where: str) -> list[ParameterGroup]:
        """Return the groups whose collectives an object of the user's may make."""
        if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
            raise TypeError(
                expected(
                    "an object with allocate() that can be called, such as one of a subclass of "
                    "torch's AllGather or ReduceScatter",
                    repr(comm),
                    where=where,
                    hint="Give one, or None for the default",
                )
            )
        groups = self._fsdp_unit().groups
        sharded = [group for group in groups if group.axes.is_sharded]
        if groups and not sharded and comm is not None:
            raise ValueError(
                expected(
                    "a unit whose weights are divided",
                    "one of strategy 'no_shard'",
                    where=where,
                    hint="Nothing is gathered or scattered there; choose another strategy, or "
                    "set_all_reduce_hook() to change sums of gradients",
                )
            )
        return sharded

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose ``nccl_user_buffers`` of ``fully_shard`` for this unit, before its first forward.

        Raises:
            NotImplementedError: ``enable`` is True, and the unit's weights stay gathered.
            RuntimeError: The unit has run and cannot change any more.
        """
        unit = self._fsdp_unit()
        where = "set_allocate_memory_from_process_group_for_comm()"
        # A root may own no parameter, or some that are replicated.
        kept = [group.compute_weight.stays_gathered for group in unit.groups]
        if enable and kept and all(kept):
            raise _not_built(
                "registered memory for weights that are gathered at most once a step",
                where=where,
                hint="Leave out the call, or use strategy 'optim_grads_params'",
            )
        # Slabs are made for all units at once: their sizes and number depend on every unit.
        if unit.context is not None and enable != unit.options.nccl_user_buffers:
            raise RuntimeError(
                expected(
                    "a unit that has not run",
                    f"unit '{unit.name}', whose memory is shared with other units",
                    where=where,
                    hint="Call it before the first forward",
                )
            )
        unit.options = replace(unit.options, nccl_user_buffers=enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Refuse torch's symmetric memory, which takes a collective for each allocation.

        Raises:
            NotImplementedError: Always.
        """
        raise _not_built(
            "buffers in symmetric memory",
            where="set_symm_mem_for_comm()",
            hint="Give nccl_user_buffers=True to fully_shard(), which registers memory with NCCL, "
            "or set_custom_all_gather() an object whose allocate() returns such memory",
        )

    def join_hook(self, **kwargs: object) -> None:
        """Refuse ``torch.distributed.algorithms.Join``, for ranks with fewer batches than others.

        Raises:
            NotImplementedError: Always.
        """
        raise _not_built(
            "collectives for ranks whose batches have ended",
            where="torch.distributed.algorithms.Join",
            hint="Drop the incomplete batches, or give these ranks batches without rows: see "
            "docs/troubleshooting.md, 'It hangs'",
        )

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether NCCL only sums gradients, without multiplying them by the scale.

        Zero-copy collectives need that. Scaling is then a separate pass over each rank's shard.
        Other backends are never asked to scale.
        """
        for group in self._fsdp_unit().groups:
            group.gradients.summing.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept torch's switch; whole buffers are always reduced, whichever ranks used them."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Choose whether reductions have communicators of their own; collective, on all ranks.

        The default is True on CUDA, where one communicator runs one collective at a time, and False
        on CPU. The choice applies to all units under one root.
        """
        # An outer root may run for the first time later. It then reads its units' options, because
        # it replaces the context that is changed here.
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, separates_reductions=enable)
        self._fsdp_unit().require_context().separate_reductions(enable)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose how many reductions may be under way; each holds one unit's full gradients.

        The largest value among the units under one root counts, from the next backward on.

        Raises:
            TypeError: It is no int.
            ValueError: The number is not positive.
        """
        # True would mean one buffer, and half a buffer none.
        if type(max_input_buffers) is not int:
            raise TypeError(
                expected(
                    "an int",
                    repr(max_input_buffers),
                    where="set_reduce_scatter_max_input_buffers()",
                    hint="Give the number of buffers, for example 2",
                )
            )
        if max_input_buffers < 1:
            raise ValueError(
                expected(
                    "1 or more buffers",
                    max_input_buffers,
                    where="set_reduce_scatter_max_input_buffers()",
                    hint="Use 1, which lets a reduction overlap with the next unit's backward",
                )
            )
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, max_reductions=max_input_buffers)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next forward's first gather wait for an event of the optimizer's stream.

        Raises:
            NotImplementedError: The unit is not on CUDA; other devices have no streams.
        """
        # A root may own no parameter itself.
        groups = (group for unit in self._fsdp_units(recurse=True) for group in unit.groups)
        if not any(group.device.type == "cuda" for group in groups):
            raise _not_built(
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
        context = unit.require_context()
        if not context.is_root(unit):
            raise RuntimeError(
                expected(
                    "the root, whose iteration has to be dropped as a whole",
                    f"unit '{unit.name}' under it",
                    where="reset_iter_state()",
                    hint="Call it on the outermost module given to fully_shard()",
                )
            )
        context.reset_after_error()
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


def _not_built(got: str, *, where: str, hint: str) -> NotImplementedError:
    """Return the error for a valid request that torch supports and megafsdp does not."""
    return NotImplementedError(expected("collectives of our own", got, where=where, hint=hint))


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
