"""The parameters of a unit that share a dtype and one collective, and their flat buffers.

A group owns both forms of each of its parameters. The optimizer sees the *sharded* parameter, a
DTensor over the main weight buffer. Forward and backward see the *unsharded* parameter, a view of
the buffer that the all-gather fills: a plain full tensor, or this rank's part of a parameter that a
model axis cuts. Both objects are made once.

=============  ==========================  ==================  =============================
buffer         sharded group (ZeRO-1..3)   divided (HFSDP)     replicated group (no_shard)
=============  ==========================  ==================  =============================
main weight    1/N, main dtype, or on      1/(N M)             full, main dtype
               the host
compute shard  none; codes: 1/N            1/N                 -
unsharded      full, compute dtype or      full; released      full, compute dtype or codes,
               codes; ZeRO-3: released     between uses        persistent; the main weight
               between uses; ZeRO-1, 2:                        itself if equal
               persistent
scale tables   of the whole; none without a recipe
main grad      1/N; ZeRO-1: after the      1/(N M); 1/N while  full
               last microbatch             microbatches add
=============  ==========================  ==================  =============================

If the policy puts parameters on the host, main weight and main grad are there, in the same lengths,
and a replicated group's main weight is never also the unsharded one.

Each group has its own ranks and collectives; a unit only calls its groups together. The compute
weight's buffers are made in :mod:`megafsdp.fsdp.params.gathered_weight`, sums of gradients in
:mod:`megafsdp.fsdp.params.gradient_reducer`. :mod:`megafsdp.fsdp.runtime.schedule` decides when to
gather and to reduce.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.factories import make_replicated
from megafsdp.buffer.dtensor.random_values import set_initial_dtype
from megafsdp.buffer.dtensor.uneven import (
    ReplicatedParameter,
    UnevenDTensor,
    fill_truncated,
    local_object,
    local_tensor,
)
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.buffer.dtensor.unwritten import mark_unwritten
from megafsdp.buffer.layout import FlatLayout
from megafsdp.buffer.planner import plan_layout
from megafsdp.device.memory import Category
from megafsdp.device.streams import device_handle
from megafsdp.device.torch_private import run_truncated_normal, sum_of_versions
from megafsdp.fsdp.params.cast_weight import CastWeight
from megafsdp.fsdp.params.group_buffers import GroupBuffers, GroupDtypes, LocalRows
from megafsdp.fsdp.params.host_grads import make_reducer
from megafsdp.fsdp.params.host_params import HostWeight
from megafsdp.fsdp.params.managed_parameter import ManagedParameter, Places
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.model_gradients import ModelGradients
from megafsdp.fsdp.params.packed import is_packed, keep_class_and_attributes
from megafsdp.fsdp.params.policy import Quantization, Strategy
from megafsdp.fsdp.params.quantized_weight import QuantizedWeight
from megafsdp.fsdp.params.unit_ledger import HostMemory, UnitMemory
from megafsdp.fsdp.params.wrapped import rewrapped, unwrapped
from megafsdp.mesh.dtensor import are_placements_exact
from megafsdp.mesh.torch_private import attributes_of
from megafsdp.quantize.tensor import QuantizedTensor


class AsyncStep(Protocol):
    """A step that changes a main weight in another thread."""

    def wait(self) -> None:
        """Wait until the step has changed the main weight and its copy on the device.

        Raises:
            RuntimeError: The step failed.
        """


_GROUP_ATTRIBUTE = "_megafsdp_group"


class ParameterGroup:
    """Flat buffers, sharded and unsharded parameters of one group.

    Args:
        originals: The parameters as the user made them; their values are copied. Those on the meta
            device have none: their rows stay undefined and they count as uninitialised.
        parameters: The records of these parameters, in the same order.
        axes: Ranks that divide or replicate the group.
        dtypes: Dtypes of its buffers.
        memory: Where its buffers lie.
        strategy: Decides what is persistent in full between uses, and which reductions wait.
        gradient_scale: Factor on the sum of gradients over the group's ranks.
        quantization: How compute weights are quantized; None casts to the compute dtype.

    Construction is local: every rank copies its own rows from its own originals.

    Attributes:
        gradients: Takes, sums and publishes the group's gradients.
        host_memory: Memory of main weight and states on the host; None if they are on the device.
        lives_on_host: Whether the policy put them there from the start, with the gradients; False
            if an optimizer has moved them.
        step_in_flight: The step that changes the main weight in another thread.
        num_marks: How many changes of the main weight (steps, loads) all ranks have marked alike.
    """

    def __init__(
        self,
        originals: Sequence[nn.Parameter],
        parameters: list[ManagedParameter],
        *,
        axes: DataParallelAxes,
        dtypes: GroupDtypes,
        memory: UnitMemory,
        strategy: Strategy = Strategy.OPTIM_GRADS_PARAMS,
        gradient_scale: float = 1.0,
        quantization: Quantization | None = None,
    ) -> None:
        self.parameters = parameters
        self.axes = axes
        handle = device_handle(axes.mesh.device_type)
        self.layout: FlatLayout = plan_layout(
            [p.spec for p in parameters],
            axes.num_shards,
            itemsize=itemsize_of(dtypes, quantization),
        )
        gathered_layout = self.layout.merged(axes.num_pieces)
        self.buffers = GroupBuffers(
            self.layout, gathered_layout, axes, dtypes, handle.device, memory.ledger
        )
        self.host_memory = memory.host_memory(
            self.buffers.local_numel, {dtypes.main, dtypes.compute}, handle.device
        )
        self.lives_on_host = self.host_memory is not None
        self.main_weight = self._new_main_weight()
        self.compute_weight = self._new_compute_weight(
            quantization, stays_gathered=strategy.has_persistent_compute_weight
        )
        with torch.no_grad():
            self.main_weight.zero_gaps()
            for index, original in enumerate(originals):
                self._make_parameters(index, original)
        local_tensors = self._local_tensors()
        self._rows = LocalRows(local_tensors, self.main_weight.flat)
        # The reducer gets no reference to the group: a cycle would delay freeing a deleted model.
        self.gradients = make_reducer(
            [(p.sharded, p.unsharded) for p in parameters],
            self.buffers,
            self._rows,
            self.host_memory,
            scale=gradient_scale,
            defers=strategy.defers_reduction,
            model=self._model_gradients(),
        )
        self.step_in_flight: AsyncStep | None = None
        self.num_marks = 0
        self.places = Places(parameters)
        # Tensors whose versions writes bump: parameters, if written to directly or by .data; local
        # tensors (which may share the buffer's), by loads; the buffer, by local_parameters().
        counted = local_tensors if self.axes.has_whole else []
        self._written = [self.main_weight.flat, *counted, *(p.sharded for p in parameters)]
        self._num_writes = self._count_writes()
        self.rename(parameters[0].name)
        # Free the memory that making the unsharded parameters took, until the first gather.
        self.release()

    def rename(self, label: str) -> None:
        """Set the unit's FQN, for counters and profilers."""
        self.label = self.compute_weight.label = self.gradients.label = label
        for parameter in self.parameters:
            # Its messages name the sharded parameter to write to instead.
            if isinstance(parameter.unsharded, QuantizedTensor):
                parameter.unsharded.fqn = f"{label}.{parameter.name}"

    @property
    def dtypes(self) -> GroupDtypes:
        """Return the dtypes of the group's buffers."""
        return self.buffers.dtypes

    @property
    def quantization(self) -> Quantization | None:
        """Return how the compute weight is quantized; None for a cast."""
        return self.compute_weight.quantization

    @property
    def device(self) -> torch.device:
        """Return the device on which forward and backward run."""
        return self.buffers.device

    def new_state_buffer(self, dtype: torch.dtype) -> DBuffer:
        """Allocate an optimizer state next to the main weight; its content is undefined."""
        return self.buffers.new_beside_main_weight(
            dtype, Category.OPTIMIZER_STATE, self.host_memory
        )

    def _new_compute_weight(
        self, quantization: Quantization | None, *, stays_gathered: bool
    ) -> CastWeight | QuantizedWeight:
        main, dtype, host = self.main_weight, self.dtypes.compute, self.host_memory
        if quantization is not None:
            assert host is None, "quantized weights are refused on the host"
            return QuantizedWeight(
                quantization,
                main,
                [p.spec.shape for p in self.parameters],
                dtype=dtype,
                axes=self.axes,
                stays_gathered=stays_gathered,
                device=self.device,
                ledger=self.buffers.ledger,
            )
        host_weight = None
        if host is not None:
            handle = device_handle(self.device.type)
            host_weight = HostWeight(main, dtype, memory=host, handle=handle)
        return CastWeight(
            dtype,
            main,
            axes=self.axes,
            stays_gathered=stays_gathered,
            device=self.device,
            ledger=self.buffers.ledger,
            host_weight=host_weight,
        )

    def _new_main_weight(self) -> DBuffer:
        return self.buffers.new_beside_main_weight(
            self.dtypes.main, Category.MAIN_WEIGHT, self.host_memory
        )

    @torch.no_grad()
    def offload_main_weight(self, memory: HostMemory) -> None:
        """Move the main weight, and the states that are made from here on, to the host; local.

        The sharded parameters stay the same objects over other memory. Forward reads a copy in the
        compute dtype, which stays on the device.
        """
        # Copy first: move_main_weight() releases the memory on the device.
        weight = self._movable_weight()
        before, self.host_memory = self.main_weight, memory
        self.main_weight = self._new_main_weight()
        self.main_weight.flat.copy_(before.flat)
        self._point_at(self.views_of(self.main_weight))
        weight.move_main_weight(self.main_weight)

    @torch.no_grad()
    def onload_main_weight(self) -> None:
        """Undo :meth:`offload_main_weight`; states made from here on are on the device."""
        host, self.host_memory = self.main_weight, None
        self.main_weight = self._movable_weight().return_main_weight()
        self.main_weight.flat.copy_(host.flat)
        self._point_at(self.views_of(self.main_weight))

    def start_copy(self) -> torch.Tensor:
        """Return the copy on the device of a moved main weight, for a step to write; local."""
        return self._movable_weight().start_copy()

    def _movable_weight(self) -> CastWeight:
        assert isinstance(self.compute_weight, CastWeight), "codes are no copy of the main weight"
        return self.compute_weight

    def _point_at(self, views: Sequence[torch.Tensor]) -> None:
        """Point the sharded parameters at these rows; the parameters stay the same objects."""
        for local, view in zip(self._local_tensors(), views, strict=True):
            local.data = view

    def _local_tensors(self) -> list[torch.Tensor]:
        return [local_object(p.sharded) for p in self.parameters]

    def wait_for_step(self) -> None:
        """Cancel an early step, and wait for the step that another thread makes.

        Afterwards only the caller reads and writes the main weight.

        Raises:
            RuntimeError: The step failed.
        """
        # Cancel first: otherwise an early step may begin while the other one is awaited.
        if self.gradients.main_grad.listener is not None:
            self.gradients.main_grad.listener.cancel()
        if self.step_in_flight is not None:
            self.step_in_flight.wait()

    def exchange_main_weight(self, other: DBuffer, views: Sequence[torch.Tensor]) -> None:
        """Swap the memory of the main weight and of a buffer cut like it; local, copies nothing.

        Args:
            other: The buffer.
            views: The parameters' rows in it, as :meth:`views_of` returns them.
        """
        self.main_weight.exchange(other)
        self._point_at(views)

    def views_of(self, buffer: DBuffer) -> list[torch.Tensor]:
        """Return each parameter's rows in a buffer cut as the main weight is, in local shapes."""
        # Empty rows are views of the buffer too: their storage shows whether a step is at work on
        # them.
        nothing = buffer.flat.narrow(0, 0, 0)
        views = self._rows.views(buffer.flat)
        return [view if view.numel() else nothing.view(view.shape) for view in views]

    def _make_parameters(self, index: int, original: nn.Parameter) -> None:
        parameter, given = self.parameters[index], local_tensor(original)
        parameter.dtype = original.dtype
        local = self.main_weight.tensor(index)
        if self.axes.has_whole:
            # Views of the buffer share one count of writes; .data gives this parameter its own.
            local = local.data
        # Every rank copies its own rows of its own original: no collective.
        if not original.is_meta:
            start, stop = self.layout.owned_range(index, max(self.axes.shard, 0))
            local.copy_(unwrapped(given).reshape(-1)[start:stop])
        sharded = nn.Parameter(self._as_dtensor(index, local), requires_grad=original.requires_grad)
        # torch.nn's initialisers must find our rule, however they were imported.
        run_truncated_normal(fill_truncated)
        set_initial_dtype(sharded, original.dtype)
        if not isinstance(sharded, UnevenDTensor):
            # Like UnevenDTensor, it refuses assignments to .data: they would leave the buffer.
            sharded.__class__ = ReplicatedParameter  # type: ignore[assignment]
        # Users and models set attributes on parameters, for example for weight decay. Those of
        # packed ones, such as scales, describe the whole: layers would add them to state dicts.
        if not is_packed(original):
            vars(sharded).update(attributes_of(original))
        tie_to_group(sharded, self)
        if original.is_meta:
            mark_unwritten(sharded, is_meta=True)
        if self.dtypes.grad != self.dtypes.main:
            # Allow any dtype: torch's state dict helpers assign zero gradients in the main dtype.
            sharded.grad_dtype = None
        # The view's memory is freed and allocated again, but the object stays: autograd may save it
        # in forward and read it in backward, after the storage was gathered anew.
        shape = torch.Size(parameter.spec.shape)
        full = rewrapped(given, self.compute_weight.assemble(index, shape, parameter.name, local))
        parameter.sharded = sharded
        parameter.unsharded = parameter.model.unsharded(full, requires_grad=original.requires_grad)
        keep_class_and_attributes(original, parameter.unsharded)

    def _as_dtensor(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Wrap this rank's rows of the main weight as the sharded parameter ``index``."""
        parameter, axes = self.parameters[index], self.axes
        if self._is_whole(index):
            return make_replicated(local.view(parameter.shape), axes.dtensor_mesh)
        slot = self.layout.slots[index]
        layout = UnevenLayout(
            part=parameter.model.part,
            row_numel=slot.spec.granule,
            buffer_offset=slot.offset,
            shard_numel=self.layout.sub_buffers[slot.sub_buffer].shard_numel,
            num_shards=axes.num_shards,
            # A replicated group has no shard; its whole buffer counts as the first.
            shard=max(axes.shard, 0),
            num_model_axes=axes.num_model_axes,
            is_even=parameter.is_cut_evenly
            and are_placements_exact(parameter.model.part, axes.num_shards),
        )
        rows = local.view(layout.local_shape())
        return UnevenDTensor.from_local_rows(
            rows, axes.dtensor_mesh, layout, num_shard_axes=axes.num_shard_axes
        )

    def _is_whole(self, index: int) -> bool:
        """Return whether every rank has the whole parameter."""
        return not self.axes.is_sharded and self.parameters[index].model.part.is_whole

    def as_sharded_dtensor(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Wrap rows, cut like those of the main weight, as a DTensor like parameter ``index``."""
        sharded = self.parameters[index].sharded
        if isinstance(sharded, UnevenDTensor):
            return sharded.like(rows)
        return make_replicated(rows.view(self.parameters[index].shape), self.axes.dtensor_mesh)

    def _model_gradients(self) -> ModelGradients | None:
        """Return what makes addends of gradients that are DTensors or sums; None if none is."""
        placements = [parameter.model for parameter in self.parameters]
        if self.axes.model_mesh is None and all(each.form is None for each in placements):
            return None
        return ModelGradients(self.axes.model_mesh, placements)

    @property
    def maxima_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups over which a recipe's maxima are combined, one after the other.

        Replicas of a weight have the same maxima, and are left out. But their layers record
        different maxima: if these are combined too, all ranks are in one group.
        """
        axes, quantization = self.axes, self.quantization
        assert quantization is not None, "asked of quantized groups"
        if quantization.has_recorded_maxima:
            return (axes.everyone if quantization.spans_model_axis else axes.all_ranks,)
        if axes.maxima_group is not None:
            return (axes.maxima_group,)
        groups = [axes.shard_group] if axes.is_sharded else []
        if axes.model_group is not None and quantization.spans_model_axis:
            groups.append(axes.model_group)
        return tuple(groups)

    def fingerprint(self) -> str:
        """Return a text that must be equal on all ranks of the group."""
        # Ranks of a model axis may have parts of unequal sizes, hence layouts of their own.
        wholes = [(p.name, tuple(p.shape), p.model.part.dim) for p in self.parameters]
        layout = self.layout.fingerprint() if self.axes.model_mesh is None else repr(wholes)
        return f"{layout} {self.dtypes} {self.quantization}"

    @property
    def is_moved(self) -> bool:
        """Return whether an optimizer has moved the main weight to the host."""
        return self.host_memory is not None and not self.lives_on_host

    @property
    def has_history(self) -> bool:
        """Return whether the scales of its weights are made from maxima of earlier steps."""
        return self.quantization is not None and self.quantization.recipe.history > 0

    @property
    def is_trainable(self) -> bool:
        """Return whether any parameter of the group requires a gradient."""
        return any(p.sharded.requires_grad for p in self.parameters)

    @property
    def is_unsharded(self) -> bool:
        """Return whether full storage that is not persistent is allocated."""
        return self.compute_weight.is_unsharded

    def mark_stale(self, *, is_step: bool = False) -> None:
        """Note that a step, or something else, changed main weights: the next unshard refreshes."""
        self.num_marks += 1
        self._mark_changed(is_step)

    @property
    def num_changes(self) -> int:
        """Return a count that rises with each change that this rank has marked or found."""
        return self.num_marks + self._num_writes

    def _mark_changed(self, is_step: bool = False) -> None:
        # A step may write on some ranks only. mark_stale_if_written() must not find these writes
        # again there, or ranks would not gather alike.
        self._num_writes = self._count_writes()
        self.compute_weight.is_set |= not is_step
        self.compute_weight.mark_stale()

    def mark_stale_if_written(self) -> None:
        """Mark the group stale if its tensors were written to, for example by a load; local."""
        if self._count_writes() != self._num_writes:
            self._mark_changed()

    def _count_writes(self) -> int:
        return sum_of_versions(self._written)

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Make the unsharded parameters current: issue the gather, or refresh the replica.

        Collective over the group's ranks if the group is sharded and its storage is not current.
        The unsharded parameters may be read after :meth:`finish_unshard`.
        """
        if self.step_in_flight is not None:
            self.step_in_flight.wait()
        # Cleared only here: the schedule does not gather ahead while a step is in flight, and all
        # ranks must decide this alike, however far the step has come on each.
        self.step_in_flight = None
        self.compute_weight.start_unshard(in_backward=in_backward)

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the unsharded parameters may be read."""
        self.compute_weight.finish_unshard()

    def release(self) -> None:
        """Free the full storage of a sharded group; do nothing for a replicated one."""
        self.compute_weight.release()


def itemsize_of(dtypes: GroupDtypes, quantization: Quantization | None) -> float:
    """Return the bytes per element that a gather moves."""
    if quantization is None:
        return dtypes.compute.itemsize
    return 1 / quantization.recipe.weight.codes_per_byte


def tie_to_group(parameter: torch.Tensor, group: ParameterGroup) -> None:
    """Record the group of a parameter: a step on the parameter changes its main weight."""
    setattr(parameter, _GROUP_ATTRIBUTE, weakref.ref(group))


def group_of(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group of a sharded parameter; None for any other tensor."""
    reference = getattr(parameter, _GROUP_ATTRIBUTE, None)
    return None if reference is None else reference()
