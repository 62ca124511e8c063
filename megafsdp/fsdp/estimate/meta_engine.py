"""A model's real units on a mesh of meta devices: the engine runs without its memory.

This process is rank 0 of a ``fake`` process group, whose collectives return at once and whose other
ranks do not exist. Units, layouts, schedule, reducers and ledgers are those of a training run; only
the buffers are on the meta device. The model's own operators do not run, since they may depend on
data: one autograd function replaces each unit's forward; it reads the unsharded parameters in
forward and returns a gradient for each in backward. :mod:`megafsdp.fsdp.estimate.footprint` counts
the bytes and collectives of a step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.host_memory import HostArena
from megafsdp.device.memory import ByteLedger
from megafsdp.errors import expected
from megafsdp.fsdp.estimate.step_recorder import BACKWARD, FORWARD, StepRecorder
from megafsdp.fsdp.fully_shard import fully_shard_model, microbatch
from megafsdp.fsdp.params.kept_weights import describe_kept
from megafsdp.fsdp.params.parameter_group import GroupDtypes, ParameterGroup
from megafsdp.fsdp.params.unit_ledger import HostMemory
from megafsdp.fsdp.runtime.root import reasons_to_keep
from megafsdp.fsdp.runtime.unit import FSDPUnit, units_below
from megafsdp.mesh.dtensor import are_rows_cut, joined_mesh
from megafsdp.mesh.parallel_dims import TP, Meshes, flat_group
from megafsdp.mesh.torch_private import forget_dtensor_meshes, meta_devices_counted
from megafsdp.quantize.tensor import QuantizedTensor

_META = "meta"
_TIMES = " x "


@dataclass(frozen=True)
class PlannedGroup:
    """The data of one parameter group for a report.

    Attributes:
        layout: Its layout; one shard if it is replicated.
        dtypes: Dtypes of its buffers.
        is_sharded: Whether it is gathered and reduce-scattered.
        is_trainable: Whether its parameters require gradients.
        is_offloaded: Whether the optimizer keeps its main weight and states on the host.
        is_expert: Whether it is divided over the mesh of experts.
        recipe: Name of the recipe that quantizes it; None for none.
        num_pieces: How many ranks of the outer axis divide a shard of the inner one.
        have_cut_rows: For each tensor of the layout, whether a model axis cuts its rows.
    """

    layout: FlatLayout
    dtypes: GroupDtypes
    is_sharded: bool
    is_trainable: bool
    is_offloaded: bool = False
    is_expert: bool = False
    recipe: str | None = None
    num_pieces: int = 1
    have_cut_rows: tuple[bool, ...] = ()


@dataclass(frozen=True)
class PlannedUnit:
    """The data of one unit for a report.

    Attributes:
        name: Its FQN; the class's name for the root.
        groups: Its parameter groups, perhaps none.
    """

    name: str
    groups: tuple[PlannedGroup, ...]


@dataclass(frozen=True)
class AxisNames:
    """Names for the ranks over which collectives run.

    Attributes:
        names: Name of a mesh axis, or of several joined, by the name of the process group.
        data: Name of the data axes together.
        tp: Name of the tensor-parallel axis; None without one.
        sizes: Number of ranks of each axis.
    """

    names: dict[str, str]
    data: str
    tp: str | None
    sizes: dict[str, int]

    @classmethod
    def of(cls, meshes: Meshes) -> AxisNames:
        """Name the process groups of meshes."""
        names: dict[str, str] = {}
        sizes: dict[str, int] = {}
        data = _name_groups(meshes.data, meshes.tp, names, sizes)
        if meshes.experts is not None:
            _name_groups(meshes.experts, meshes.ep, names, sizes)
        named = cls(names, data, None if meshes.tp is None else TP, sizes)
        # A collective without a group runs over all ranks.
        names[""] = named.with_tp(data)
        return named

    def with_tp(self, axes: str) -> str:
        """Return the name of data axes joined with the tensor-parallel axis, if there is one."""
        return axes if self.tp is None else axes + _TIMES + self.tp

    def num_ranks(self, axes: str) -> int:
        """Return the number of ranks of the axes with a name."""
        return math.prod(self.sizes[axis] for axis in axes.split(_TIMES))


def _name_groups(
    data: DeviceMesh, model: DeviceMesh | None, names: dict[str, str], sizes: dict[str, int]
) -> str:
    """Add the groups of data axes and a model axis, and their sizes; return the data axes' name."""
    meshes = [data] if model is None else [data, model, joined_mesh(data, model)]
    for mesh in meshes:
        axes = mesh.mesh_dim_names or ()
        sizes.update(zip(axes, mesh.shape, strict=True))
        for axis in axes:
            names.setdefault(mesh.get_group(axis).group_name, axis)
        names.setdefault(flat_group(mesh).group_name, _TIMES.join(axes))
    return _TIMES.join(data.mesh_dim_names or ())


@contextlib.contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Act as rank 0 of a process group whose other ranks do not exist; local.

    Raises:
        RuntimeError: There is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            expected(
                "no process group",
                f"one of {dist.get_world_size()} rank(s)",
                where="an estimate for ranks that do not exist",
                hint="Make the estimate in a process of its own, or before init_process_group()",
            )
        )
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    try:
        with meta_devices_counted():
            yield
    finally:
        dist.destroy_process_group()
        # The next estimate may have equal meshes over other process groups.
        forget_dtensor_meshes()


class MetaEngine:
    """The units of one model on a mesh of meta devices; use it inside :func:`fake_ranks`.

    Args:
        model: A model on the meta device; it is used up.
        fsdp_unit_modules: As for ``fully_shard_model``.
        meshes: Meshes of meta devices; their model axes have cut the model already.
        sums_in_library: Whether gradients are reduced as on NCCL instead of as on gloo.
        **options: Other keyword arguments of ``fully_shard_model``.

    Attributes:
        units: The units, the root first, then the others in the order of ``modules()``.
        axes: Names of the process groups of the mesh.
        recorder: Notes when a unit is computed; None for nothing.

    Raises:
        Exception: Whatever ``fully_shard_model`` raises.
    """

    def __init__(
        self,
        model: nn.Module,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None,
        meshes: Meshes,
        *,
        sums_in_library: bool = True,
        **options: Any,
    ) -> None:
        self.axes = AxisNames.of(meshes)
        self.recorder: StepRecorder | None = None
        self._model = fully_shard_model(
            model, fsdp_unit_modules, mesh=meshes.data, expert_mesh=meshes.experts, **options
        )
        self.units = list(units_below([model]).values())
        root, *others = self.units
        for unit in others:
            unit.modules[0].forward = self._stand_in(unit)
        model.forward = self._stand_in(root, others)
        for unit in self.units:
            for group in unit.groups:
                group.gradients.summing.in_library = sums_in_library
        # Let the root adopt the units before the first step, so that they get their FQNs in it.
        root.require_context()

    @property
    def ledger(self) -> ByteLedger:
        """Return the ledger of all units' bytes on the device: the root's, which adds up all."""
        return self.units[0].ledger

    def plan(self) -> list[PlannedUnit]:
        """Return the data of the units for a report, in their order."""
        return [PlannedUnit(unit.name, tuple(map(_plan, unit.groups))) for unit in self.units]

    def describe_kept(self) -> list[str]:
        """Return what a recipe leaves unquantized, one line for each reason."""
        return describe_kept(reasons_to_keep(units_below([self._model])))

    def offload(self, chosen: Collection[tuple[int, int]]) -> None:
        """Move main weights to the host, as an offloaded optimizer does.

        Args:
            chosen: Pairs of the index of a unit and the index of a group in it.
        """
        for number, index in chosen:
            memory = HostMemory(HostArena(0, is_pinned=False, is_meta=True), ByteLedger())
            self.units[number].groups[index].offload_main_weight(memory)

    def run_microbatch(self, *, is_last: bool) -> None:
        """Run a forward of the root and its backward."""
        with microbatch(self._model, is_last=is_last):
            # Like token ids, the input needs no gradient: the root ends with the whole backward.
            output = self._model(torch.empty((), device=_META))
            output.backward(torch.empty_like(output))

    def _stand_in(
        self, unit: FSDPUnit, below: Sequence[FSDPUnit] = ()
    ) -> Callable[[torch.Tensor], Any]:
        """Return a forward that uses a unit's trainable parameters, then runs the units below."""

        def note(kind: str) -> None:
            if self.recorder is not None:
                self.recorder.note(kind, unit.name)

        def forward(x: torch.Tensor) -> torch.Tensor:
            unsharded = [p.unsharded for group in unit.groups for p in group.parameters]
            x = _UseParameters.apply(note, x, *(p for p in unsharded if p.requires_grad))
            for each in below:
                x = each.modules[0](x)
            # The root has an operator after its units, like an output layer or a loss: its backward
            # comes before the last unit's, and gathers are issued ahead from there.
            return x.clone() if below else x

        return forward

    def step(self, casts_from: torch.dtype | None) -> None:
        """Change the units as an optimizer's step and ``zero_grad()`` do.

        Args:
            casts_from: Dtype of the main weights that the optimizer casts to the compute dtype as
                it steps; None for none.
        """
        for unit in self.units:
            for group in unit.groups:
                # Frozen groups are in no optimizer.
                if group.is_trainable:
                    group.mark_stale(is_step=True)
                    if group.is_moved:
                        group.start_copy()
                        group.compute_weight.mark_encoded()
                    elif group.dtypes.main == casts_from:
                        is_written = group.compute_weight.start_encoding() is not None
                        if is_written:
                            group.compute_weight.mark_encoded()
        for parameter in self._model.parameters():
            parameter.grad = None


class _UseParameters(torch.autograd.Function):
    """Stand-in for a unit's operators: it reads parameters and returns a gradient for each."""

    @staticmethod
    def forward(
        ctx: Any, note: Callable[[str], None], x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        note(FORWARD)
        ctx.note, ctx.parameters = note, parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.note(BACKWARD)
        return None, grad, *map(_gradient_of, ctx.parameters)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    # On the meta device an alias costs less than a new tensor. An alias of codes would be codes.
    if isinstance(parameter, QuantizedTensor):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=_META)
    return parameter.detach()


def _plan(group: ParameterGroup) -> PlannedGroup:
    return PlannedGroup(
        group.layout,
        group.dtypes,
        is_sharded=group.axes.is_sharded,
        is_trainable=group.is_trainable,
        is_offloaded=group.is_moved,
        is_expert=group.axes.is_expert,
        recipe=None if group.quantization is None else group.quantization.recipe.name,
        num_pieces=group.axes.num_pieces,
        have_cut_rows=tuple(are_rows_cut(parameter.sharded) for parameter in group.parameters),
    )
