"""What an offloaded optimizer keeps on the host, by arithmetic on planned units; for a dry run.

Which parameter groups are offloaded follows from the rule of the optimizer itself
(:mod:`megafsdp.optimizer.offload.placement`); this file brings planned groups into its order. Pages
are not counted: slabs are rounded up to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from megafsdp.fsdp.estimate.blueprint import PlannedGroup, PlannedUnit
from megafsdp.optimizer.offload.placement import first_offloaded
from megafsdp.optimizer.states.store import STATES
from megafsdp.training.config.optimizer_sections import MuonSection, OptimizerSection
from megafsdp.training.step.optimizers import parameter_groups

# A dry run cannot measure: the choice of a run is at most this.
MOST_OF_AUTO = 1.0


@dataclass(frozen=True, slots=True)
class HostFootprint:
    """Bytes on the host of each rank, in the order in which they are shown.

    Attributes:
        main_weight: Main weights.
        optimizer_state: Both moments.
        second_copy: Main weights and moments once more, which a step that begins before the norm is
            known writes; the most that there can be.
        main_grad: Gradients, as they are copied from the device.
        copied_back: Weights in the compute dtype on their way to the device.
    """

    main_weight: int = 0
    optimizer_state: int = 0
    second_copy: int = 0
    main_grad: int = 0
    copied_back: int = 0

    def rows(self) -> dict[str, int]:
        """Return the bytes by name."""
        return {name.replace("_", " "): nbytes for name, nbytes in asdict(self).items()}

    @property
    def total(self) -> int:
        """Return all bytes."""
        return sum(asdict(self).values())


def optimizer_order(
    model: nn.Module, section: OptimizerSection, muon: MuonSection
) -> dict[str, int]:
    """Return the place of each trainable parameter, by name, in the configured optimizer; local."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, section, muon)
    ordered = [names[id(parameter)] for group in groups for parameter in group["params"]]
    return {name: place for place, name in enumerate(ordered)}


def offloaded(
    units: Sequence[PlannedUnit], order: dict[str, int], fraction: float
) -> list[PlannedUnit]:
    """Return the units with those of their groups marked that the optimizer offloads; local.

    Args:
        units: What the model is divided into, the root first.
        order: Of the parameters in the optimizer.
        fraction: The part of a rank's elements to offload.
    """
    places: dict[tuple[int, int], int] = {}
    for number, unit in enumerate(units):
        prefix = "" if number == 0 else f"{unit.name}."
        for index, group in enumerate(unit.groups):
            if group.is_trainable:
                names = [prefix + slot.spec.name for slot in group.layout.slots]
                places[number, index] = min(order[name] for name in names if name in order)
    ordered = sorted(places, key=places.__getitem__)
    planned = {key: units[key[0]].groups[key[1]] for key in ordered}
    movable = [key for key, group in planned.items() if group.dtypes.main == torch.float32]
    numels = [planned[key].layout.shard_numel for key in movable]
    others = sum(group.layout.shard_numel for group in planned.values()) - sum(numels)
    chosen = set(movable[first_offloaded(numels, others, fraction) :])
    return [
        replace(
            unit,
            groups=tuple(
                replace(group, is_offloaded=(number, index) in chosen)
                for index, group in enumerate(unit.groups)
            ),
        )
        for number, unit in enumerate(units)
    ]


def host_footprint(units: Sequence[PlannedUnit], section: OptimizerSection) -> HostFootprint:
    """Return what marked groups keep on the host; local, equal on all ranks."""
    parts = [_of_group(g, section) for unit in units for g in unit.groups if g.is_offloaded]
    columns = zip(*(asdict(part).values() for part in parts), strict=True)
    return HostFootprint(*map(sum, columns))


def _of_group(group: PlannedGroup, section: OptimizerSection) -> HostFootprint:
    numel, dtypes = group.layout.shard_numel, group.dtypes
    main_nbytes, state_nbytes = numel * dtypes.main.itemsize, numel * 4 * len(STATES)
    # What replicated gradients are is known when the step is there, no earlier.
    has_second = section.speculate is not False and section.offload_overlap and group.is_sharded
    is_cast = dtypes.compute != dtypes.main
    return HostFootprint(
        main_weight=main_nbytes,
        optimizer_state=state_nbytes,
        second_copy=main_nbytes + state_nbytes if has_second else 0,
        main_grad=numel * dtypes.grad.itemsize,
        copied_back=numel * dtypes.compute.itemsize if is_cast else 0,
    )
