"""The methods of a unit that choose how its collectives run.

They choose who gathers and sums, over which communicators, in which memory, and by what sums are
divided. :class:`~megafsdp.fsdp.fsdp_module.FSDPModule` inherits them. Names and meanings are those
of ``torch.distributed.fsdp.FSDPModule``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from megafsdp.buffer.comm.custom import AllGather, ReduceScatter
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.reduced_hook import ReducedHook
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below

if TYPE_CHECKING:

    class _Mixin(TorchFSDPModule, nn.Module):  # type: ignore[misc]
        """The base classes that type checkers see: every instance is also an ``nn.Module``."""

else:
    _Mixin = TorchFSDPModule


class CollectiveMethods(_Mixin):
    """The part of :class:`~megafsdp.fsdp.fsdp_module.FSDPModule` for its collectives."""

    def _fsdp_unit(self) -> FSDPUnit:
        unit = unit_of(self)
        assert unit is not None, "fully_shard() made this module a unit"
        return unit

    def _fsdp_units(self, *, recurse: bool) -> list[FSDPUnit]:
        if not recurse:
            return [self._fsdp_unit()]
        return list(units_below([self]).values())

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
            raise not_built(
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
        raise not_built(
            "buffers in symmetric memory",
            where="set_symm_mem_for_comm()",
            hint="Give nccl_user_buffers=True to fully_shard(), which registers memory with NCCL, "
            "or set_custom_all_gather() an object whose allocate() returns such memory",
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
        """Choose whether units take part in each backward whose outputs a rank may not use; local.

        Set it for units whose output is used on some ranks only, such as the image encoder of a
        model whose batches may be without images. All ranks still have to run the unit's forward.
        A unit of which some *parameters* are unused on some ranks needs nothing.

        ``.grad`` of trainable parameters that no rank used is then zeros, in units whose forward
        has run before. Otherwise it stays None, and the optimizer leaves such parameters alone.
        """
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, reduces_unused=reduce_scatter_unused_params)

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


def not_built(got: str, *, where: str, hint: str) -> NotImplementedError:
    """Return the error for a valid request that torch supports and megafsdp does not."""
    return NotImplementedError(expected("collectives of our own", got, where=where, hint=hint))
