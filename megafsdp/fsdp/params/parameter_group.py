"""The parameters of a unit that share a dtype and one collective, and their flat buffers.

A group owns the two faces of each of its parameters. The *sharded* parameter is a DTensor over the
main weight buffer, which the optimizer sees; the *unsharded* parameter is a plain full tensor, a
view of the buffer that the all-gather fills, which forward and backward see. Both objects are made
once.

=============  ==========================  ==================  =============================
buffer         sharded group (ZeRO-1..3)   divided (HFSDP)     replicated group (no_shard)
=============  ==========================  ==================  =============================
main weight    1/N, main dtype, or on      1/(N M)             full, main dtype
               the host
compute shard  none, or the recipe's       1/N                 -
unsharded      full, compute dtype;        full; released      full, compute dtype, kept; the
               ZeRO-3: released between    between uses        main weight itself if equal
               uses; ZeRO-1, 2: kept
main grad      1/N; ZeRO-1: after the      1/(N M); 1/N while  full
               last microbatch             microbatches add
=============  ==========================  ==================  =============================

Where the policy keeps parameters on the host, main weight and main grad are there, in the same
lengths, and the replicated group's main weight is never the unsharded one.

The compute weight's buffers are the business of :mod:`megafsdp.fsdp.params.compute_weight`,
gradients that of :mod:`megafsdp.fsdp.params.gradient_reducer`; when to gather is the schedule's.


What is known of one parameter, and of the dtypes that those of one group share.

Records alone; where their bytes lie is the business of :mod:`megafsdp.fsdp.params.parameter_group`.


Views of all parameters in any buffer that lies like the main weight, in one call.

What a parameter group must know of an optimizer that works beside the calling thread.

Only what the group asks for; who does the work, and how, is the optimizer's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import (
    ReplicatedParameter,
    UnevenDTensor,
    local_object,
    make_replicated,
)
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.buffer.layout import FlatLayout, TensorSpec
from megafsdp.buffer.planner import plan_layout
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.device.streams import device_handle
from megafsdp.device.torch_private import split_as, sum_of_versions
from megafsdp.fsdp.params.compute_weight import ComputeWeight
from megafsdp.fsdp.params.host_params import HostWeight
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.policy import Strategy
from megafsdp.fsdp.params.unit_ledger import HostMemory, UnitMemory
from megafsdp.mesh.placement import Residence
from megafsdp.quantize.recipe import CastRecipe, Recipe


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one group: compute weight, main weight, main gradient, and the sum over ranks."""

    compute: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    reduce: torch.dtype


@dataclass(eq=False)
class ManagedParameter:
    """One parameter and its two faces.

    Attributes:
        name: FQN within the unit, for messages.
        owners: Modules that hold it, with the attribute names; several if it is tied.
        shape: Its full shape.
        dtype: The dtype in which it is initialised.
        is_initialized: False if it came without values and none were given since.
        sharded: The optimizer's face.
        unsharded: The face of forward and backward.
    """

    name: str
    owners: list[tuple[weakref.ref[nn.Module], str]]
    shape: torch.Size
    dtype: torch.dtype = field(init=False)
    is_initialized: bool = field(init=False, default=True)
    sharded: nn.Parameter = field(init=False)
    unsharded: nn.Parameter = field(init=False)

    def show(self, parameter: nn.Parameter) -> None:
        """Make the owners hold one of the two faces."""
        for reference, attribute in self.owners:
            module = reference()
            if module is not None:
                module._parameters[attribute] = parameter


class LocalRows:
    """Where the rows of each parameter that this rank holds lie in a flat buffer.

    Args:
        rows: The rows of each parameter in one such buffer, in local shapes.
        flat: That buffer, 1-D.
    """

    def __init__(self, rows: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        # What torch cuts leaves no gap: gaps are rows of nobody. Of the shapes only sizes are read.
        self._shapes: list[torch.Tensor] = []
        self._places = [0] * len(rows)
        starts = [int(own.storage_offset() - flat.storage_offset()) for own in rows]
        end = 0
        for index in sorted(range(len(rows)), key=starts.__getitem__):
            own = rows[index]
            if own.numel():
                self._append((starts[index] - end,))
                end = starts[index] + own.numel()
            self._places[index] = len(self._shapes)
            self._append(own.shape)

    def _append(self, shape: Sequence[int]) -> None:
        self._shapes.append(torch.empty((), device="meta").expand(shape))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return what a buffer holds of each parameter, in local shapes; they alias the buffer."""
        views = split_as(flat, self._shapes)
        # torch makes what has no elements elsewhere.
        return [
            view if view.numel() else flat.narrow(0, 0, 0).view(view.shape)
            for view in (views[place] for place in self._places)
        ]


class AsyncStep(Protocol):
    """A step that changes a main weight beside the calling thread."""

    def wait(self) -> None:
        """Return when the main weight and its copy on the device are those after the step.

        Raises:
            RuntimeError: The step failed.
        """


class EarlyStepListener(Protocol):
    """Who steps a group's main weight and may begin before the optimizer is told to step."""

    def grads_are_final(self, grads: torch.Tensor) -> None:
        """Begin: all gradients are shown, and nothing is added to them before the step.

        Args:
            grads: The flat main gradient, like the main weight.
        """

    def grads_will_change(self) -> None:
        """Let go of gradients that are read, since another sum is to be added to them."""

    def cancel(self) -> None:
        """Drop what was begun: the main weight is read or written by others."""


_GROUP_ATTRIBUTE = "_megafsdp_group"


class ParameterGroup:
    """Flat buffers and parameter faces of one group.

    Args:
        originals: The parameters as the user made them; their values are copied. Those on the meta
            device have none: their rows stay undefined and they count as uninitialised.
        parameters: Their records, in the same order.
        axes: Ranks that divide or replicate the group.
        dtypes: Dtypes of its buffers.
        memory: Where its buffers lie.
        strategy: What is kept in full between uses, and which reductions wait.
        gradient_scale: Factor on the sum of gradients over the group's ranks.
        recipe: How compute weights are made; None casts to the compute dtype.

    Construction is local: every rank copies its own rows from its own originals.

    Attributes:
        host_memory: Where main weight and states lie that are on the host; None for the device.
        lives_on_host: Whether they are there from the first, and gradients too, by the policy; not
            because an optimizer has moved them.
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
        recipe: Recipe | None = None,
    ) -> None:
        self.parameters = parameters
        self.gradient_scale = gradient_scale
        self.defers_reduction = strategy.defers_reduction
        self.axes = axes
        self.dtypes = dtypes
        handle = device_handle(axes.mesh.device_type)
        self.device = handle.device
        self.ledger = memory.ledger
        specs = [TensorSpec(p.name, tuple(p.shape)) for p in parameters]
        self.layout: FlatLayout = plan_layout(
            specs,
            axes.num_shards,
            itemsize=dtypes.compute.itemsize,
            merge_classes=recipe is None,
        )
        # The same buffer as the ranks of the inner axis gather and reduce it.
        self.gathered_layout = self.layout.merged(axes.num_pieces)
        self.residence = Residence.SHARD if axes.is_sharded else Residence.REPLICATE
        self.host_memory = memory.host_memory(
            self._local_numel, {dtypes.main, dtypes.compute}, self.device
        )
        self.lives_on_host = self.host_memory is not None
        self.main_weight = self._new_beside_main_weight(
            self.residence, dtypes.main, Category.MAIN_WEIGHT
        )
        host_weight = None
        if self.host_memory is not None:
            assert recipe is None, "no policy has both"
            host_weight = HostWeight(
                self.main_weight, dtypes.compute, memory=self.host_memory, handle=handle
            )
        self.compute_weight = ComputeWeight(
            recipe or CastRecipe(dtypes.compute),
            self.main_weight,
            axes=axes,
            is_persistent=strategy.has_persistent_compute_weight,
            device=self.device,
            ledger=self.ledger,
            host_weight=host_weight,
        )
        with torch.no_grad():
            self.main_weight.zero_gaps()
            for index, original in enumerate(originals):
                self._make_parameters(index, original)
        self.step_in_flight: AsyncStep | None = None
        self.work_ahead: EarlyStepListener | None = None
        self.num_changes = 0  # Of the main weight, as far as this rank was told.
        self._shown = [local_object(p.sharded) for p in parameters]
        self._local_rows = LocalRows(self._shown, self.main_weight.flat)
        # Writes through a parameter or its .data count there, those of loads on its local tensor.
        self._written = [*self._shown, *(p.sharded for p in parameters)]
        self._num_writes = self._count_writes()
        self.rename(parameters[0].name)
        self.release()

    def rename(self, label: str) -> None:
        """Set the unit's FQN, for counters and profilers."""
        self.label = self.compute_weight.label = label

    def new_buffer(self, residence: Residence, dtype: torch.dtype, category: Category) -> DBuffer:
        """Allocate a buffer of this group's layout; its content is undefined."""
        return DBuffer(
            self.layout,
            residence,
            shard=max(self.axes.shard, 0),
            dtype=dtype,
            device=self.device,
            ledger=self.ledger,
            category=category,
        )

    def new_state_buffer(self, residence: Residence, dtype: torch.dtype) -> DBuffer:
        """Allocate a state of the optimizer: where the main weight is; its content is undefined."""
        return self._new_beside_main_weight(residence, dtype, Category.OPTIMIZER_STATE)

    def _new_beside_main_weight(
        self, residence: Residence, dtype: torch.dtype, category: Category
    ) -> DBuffer:
        if self.host_memory is None:
            return self.new_buffer(residence, dtype, category)
        memory = self.host_memory.arena.take(self._local_numel, dtype)
        return self._new_host_buffer(residence, category, self.host_memory.ledger, memory)

    def new_host_gradient(self) -> DBuffer:
        """Allocate a gradient where the main weight lives on the host; its content is undefined."""
        assert self.host_memory is not None, "the main weight lives on the host"
        memory = self.host_memory.take_apart(self._local_numel, self.dtypes.grad)
        ledger = self.host_memory.ledger
        return self._new_host_buffer(self.residence, Category.MAIN_GRAD, ledger, memory)

    def _new_host_buffer(
        self, residence: Residence, category: Category, ledger: ByteLedger, memory: torch.Tensor
    ) -> DBuffer:
        return DBuffer(
            self.layout,
            residence,
            shard=max(self.axes.shard, 0),
            dtype=memory.dtype,
            device=memory.device,
            ledger=ledger,
            category=category,
            memory=memory,
        )

    @property
    def _local_numel(self) -> int:
        """Return the elements of a buffer that lies like the main weight."""
        is_shard = self.residence is Residence.SHARD
        return self.layout.shard_numel if is_shard else self.layout.gathered_numel

    @torch.no_grad()
    def offload_main_weight(self, memory: HostMemory) -> None:
        """Move the main weight, and the states that are made from here on, to the host; local.

        The sharded parameters stay the same objects over other memory. What forward reads stays on
        the device: a copy in the compute dtype.
        """
        before, self.host_memory = self.main_weight, memory
        dtype = self.dtypes.main
        host = self._new_beside_main_weight(before.residence, dtype, Category.MAIN_WEIGHT)
        host.flat.copy_(before.flat)
        self.main_weight = host
        self._show_main_weight()
        self.compute_weight.move_main_weight(host)

    @torch.no_grad()
    def onload_main_weight(self) -> None:
        """Undo :meth:`offload_main_weight`; states that are made from here on are on the device."""
        host, self.host_memory = self.main_weight, None
        self.main_weight = self.compute_weight.return_main_weight()
        self.main_weight.flat.copy_(host.flat)
        self._show_main_weight()

    def _show_main_weight(self) -> None:
        for shown, view in zip(self._shown, self.views_of(self.main_weight), strict=True):
            shown.data = view

    def wait_for_step(self) -> None:
        """Have the main weight to oneself: wait for the step that changes it beside this thread.

        Raises:
            RuntimeError: It failed.
        """
        if self.work_ahead is not None:
            self.work_ahead.cancel()
        if self.step_in_flight is not None:
            self.step_in_flight.wait()

    def exchange_main_weight(self, other: DBuffer, views: Sequence[torch.Tensor]) -> None:
        """Let the main weight and a buffer like it change places; local, copies nothing.

        Args:
            other: The buffer.
            views: What it holds of the parameters, as :meth:`views_of` returns it.
        """
        self.main_weight.exchange(other)
        for shown, view in zip(self._shown, views, strict=True):
            shown.data = view

    def views_of(self, buffer: DBuffer) -> list[torch.Tensor]:
        """Return what a buffer like the main weight holds of each parameter, in local shapes."""
        return self._local_rows.views(buffer.flat)

    def new_gathered_shard(self, dtype: torch.dtype, category: Category) -> DBuffer:
        """Allocate what one rank of the inner axis holds; more than a main weight's if divided."""
        return DBuffer(
            self.gathered_layout,
            Residence.SHARD,
            shard=self.axes.gathered_shard,
            dtype=dtype,
            device=self.device,
            ledger=self.ledger,
            category=category,
        )

    def _make_parameters(self, index: int, original: nn.Parameter) -> None:
        parameter = self.parameters[index]
        parameter.dtype = original.dtype
        parameter.is_initialized = not original.is_meta
        local = self.main_weight.tensor(index)
        if not original.is_meta:
            start, stop = self.layout.owned_range(index, max(self.axes.shard, 0))
            local.copy_(original.detach().reshape(-1)[start:stop])
        sharded = nn.Parameter(self._as_dtensor(index, local), requires_grad=original.requires_grad)
        if not isinstance(sharded, UnevenDTensor):
            sharded.__class__ = ReplicatedParameter  # type: ignore[assignment]
        for name, value in vars(original).items():
            setattr(sharded, name, value)
        tie_to_group(sharded, self)
        if self.dtypes.grad != self.dtypes.main:
            # Any dtype: torch's state dict helpers give a gradient of zeros in the main dtype.
            sharded.grad_dtype = None
        full = self.compute_weight.assemble(index, parameter.shape)
        parameter.sharded = sharded
        parameter.unsharded = nn.Parameter(full, requires_grad=original.requires_grad)

    def _as_dtensor(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """Wrap what this rank holds of tensor ``index`` in the main weight."""
        shape = tuple(self.parameters[index].shape)
        if not self.axes.is_sharded:
            return make_replicated(local.view(shape), self.axes.mesh)
        slot = self.layout.slots[index]
        layout = UnevenLayout(
            shape=shape,
            region_offsets=(0,) * len(shape),
            region_shape=shape,
            row_numel=slot.spec.granule,
            buffer_offset=slot.offset,
            shard_numel=self.layout.sub_buffers[slot.sub_buffer].shard_numel,
            num_shards=self.axes.num_shards,
            shard=self.axes.shard,
        )
        rows = local.view(layout.local_shape())
        return UnevenDTensor.from_local_rows(
            rows, self.axes.mesh, layout, is_divided=self.axes.is_divided
        )

    def as_sharded_dtensor(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Wrap what a buffer that lies like the main weight holds of a tensor, as that is."""
        sharded = self.parameters[index].sharded
        if isinstance(sharded, UnevenDTensor):
            return sharded.like(rows)
        return make_replicated(rows.view(self.parameters[index].shape), self.axes.mesh)

    @property
    def is_moved(self) -> bool:
        """Tell whether an optimizer has moved the main weight to the host."""
        return self.host_memory is not None and not self.lives_on_host

    @property
    def is_trainable(self) -> bool:
        """Tell whether any parameter of the group requires a gradient."""
        return any(p.sharded.requires_grad for p in self.parameters)

    @property
    def is_unsharded(self) -> bool:
        """Tell whether full storage is allocated that is not kept anyway."""
        return self.compute_weight.is_unsharded

    def mark_stale(self) -> None:
        """Note that main weights changed: the next unshard refreshes, once."""
        # A step may write on some ranks only: what it wrote must not be noticed on those again.
        self._num_writes = self._count_writes()
        self.num_changes += 1
        self.compute_weight.mark_stale()

    def mark_stale_if_written(self) -> None:
        """Mark the group stale if tensors of a state dict were written to, as loads do; local."""
        if self._count_writes() != self._num_writes:
            self.mark_stale()

    def _count_writes(self) -> int:
        return sum_of_versions(self._written)

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Make the unsharded parameters current: issue the gather, or refresh the replica.

        Collective over the group's ranks for a sharded group whose storage is not current. The
        unsharded parameters may be read after :meth:`finish_unshard`.
        """
        if self.step_in_flight is not None:
            self.step_in_flight.wait()
        # Here alone: what is gathered ahead depends on it and must be the same on all ranks.
        self.step_in_flight = None
        self.compute_weight.start_unshard(in_backward=in_backward)

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the unsharded parameters may be read."""
        self.compute_weight.finish_unshard()

    def release(self) -> None:
        """Free the full storage of a sharded group; nothing happens for a replicated one."""
        self.compute_weight.release()

    @property
    def has_unsharded_grads(self) -> bool:
        """Tell whether backward has left gradients that nobody has taken yet."""
        return any(p.unsharded.grad is not None for p in self.parameters)

    def show_unsharded(self) -> None:
        """Make the modules hold the unsharded parameters."""
        for p in self.parameters:
            if p.unsharded.requires_grad != p.sharded.requires_grad:
                p.unsharded.requires_grad_(p.sharded.requires_grad)
            p.show(p.unsharded)

    def show_sharded(self) -> None:
        """Make the modules hold the sharded parameters."""
        for p in self.parameters:
            p.show(p.sharded)


def tie_to_group(parameter: torch.Tensor, group: ParameterGroup) -> None:
    """Note whose main weight a parameter is: a step of an optimizer that holds it changes that."""
    setattr(parameter, _GROUP_ATTRIBUTE, weakref.ref(group))


def group_of(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group of a sharded parameter; None for any other tensor."""
    reference = getattr(parameter, _GROUP_ATTRIBUTE, None)
    return None if reference is None else reference()
