"""Attach units to modules, and let the units under one root share a context.

When the outermost unit first runs, it adopts the units below it after one check. All must be
divided over the same ranks, which each rank checks by itself; and all ranks must have made the same
units, which takes one small collective. This file does not run units.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn

from megafsdp.buffer.comm.agreement import rank_and_world_size
from megafsdp.buffer.comm.collectives import require_equal
from megafsdp.errors import expected
from megafsdp.fsdp.params.kept_weights import check_any_is_quantized, describe_kept
from megafsdp.fsdp.params.meta import require_initialized
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.runtime.guards import refuse_added, refuse_replaced, registrations
from megafsdp.fsdp.runtime.process_groups import make_neighbours
from megafsdp.fsdp.runtime.schedule import FSDPContext, ScheduledUnit
from megafsdp.fsdp.runtime.slabs import share_slabs
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.parallel_dims import is_default

_LOGGER = logging.getLogger("megafsdp.fsdp")
_UNIT_ATTRIBUTE = "_megafsdp_unit"


class AttachedUnit(ScheduledUnit, Protocol):
    """The part of a unit that its adoption reads and calls."""

    memory: UnitMemory
    policy: MixedPrecisionPolicy

    @property
    def modules(self) -> list[nn.Module]:
        """Return the unit's modules."""

    @property
    def is_resting(self) -> bool:
        """Return whether the unit is outside its forward and backward."""

    def rename(self, name: str) -> None:
        """Set the FQN within the root."""


def attach(module: nn.Module, unit: AttachedUnit) -> None:
    """Attach a unit to one of its modules."""
    setattr(module, _UNIT_ATTRIBUTE, unit)


def attached_unit(module: nn.Module) -> AttachedUnit | None:
    """Return the unit of a module; None if it has none."""
    # Not by getattr(): a wrapper may forward unknown attributes to a unit inside it.
    unit: AttachedUnit | None = module.__dict__.get(_UNIT_ATTRIBUTE)
    return unit


def attached_units(modules: Iterable[nn.Module]) -> dict[str, AttachedUnit]:
    """Return the units of the modules and their submodules by FQN, outer ones first."""
    found: dict[str, AttachedUnit] = {}
    seen: set[int] = set()
    for module in modules:
        for name, submodule in module.named_modules():
            unit = attached_unit(submodule)
            if unit is not None and id(unit) not in seen:
                seen.add(id(unit))
                found[name if name not in found else f"{name}#{len(found)}"] = unit
    return found


def adopt_units_below(root: AttachedUnit) -> None:
    """Make ``root`` the outermost unit of all units below it; one small collective.

    Units that are already under another living root stay under that root.

    Raises:
        RuntimeError: A unit below is at work, or a parameter below has no values or no unit.
        ValueError: Units are divided over different ranks, ranks differ in their layouts, dtypes or
            recipes, or recipes quantize nothing.
    """
    where = f"the first forward of '{root.name}'"
    num_registrations = registrations().count
    found = attached_units(root.modules)
    # Leave out units of another root: it gathers them while this one would take them for released.
    units = {name: unit for name, unit in found.items() if not _has_root_beside(unit, found)}
    refuse_replaced(group for unit in units.values() for group in unit.groups)
    refuse_added(root.modules, [g for unit in found.values() for g in unit.groups], where=where)
    require_initialized(root.modules, where=where)
    for name, unit in units.items():
        unit.rename(name)
        if not unit.is_resting:
            raise RuntimeError(
                expected(
                    "all units at rest",
                    f"unit '{name}' at work",
                    where=where,
                    hint="Call the outermost module first",
                )
            )
    # Check before the first gather: ranks that differ would hang in it, or mix their parameters.
    check_agreement({name: unit.groups for name, unit in units.items()})
    _report_quantization(root, units, where)
    context = FSDPContext(root, units.values())
    context.num_registrations = num_registrations
    for unit in units.values():
        make_neighbours(unit.groups, unit.options.reshard_after_forward, context.extra_groups)
    # One NCCL communicator runs one collective at a time: a gather would wait for an earlier
    # reduction. gloo runs them concurrently.
    is_on_cuda = any(g.device.type == "cuda" for unit in units.values() for g in unit.groups)
    choices = [unit.options.separates_reductions for unit in units.values()]
    if any(choices) or (is_on_cuda and False not in choices):
        context.separate_reductions(True)
    for unit in units.values():
        unit.context = context
        # The root's ledger finds the peak of the whole model: units peak at different times, so
        # their peaks do not add up.
        unit.memory.ledger.merge_into(root.memory.ledger)
        unit.memory.host_ledger.merge_into(root.memory.host_ledger)
    share_slabs(list(units.values()), root.memory.ledger)


def refuse_changed_modules(unit: AttachedUnit, context: FSDPContext) -> None:
    """Raise if parameters of modules below a root have changed since the last check; local.

    It costs one comparison as long as no module of the process registers anything.

    Raises:
        RuntimeError: A parameter was replaced, or a trainable one belongs to no unit.
    """
    count = registrations().count
    if count == context.num_registrations or not context.is_root(unit):
        return
    refuse_replaced(context.groups)
    # fully_shard() may have been called on modules below meanwhile.
    groups = [g for u in attached_units(unit.modules).values() for g in u.groups]
    refuse_added(unit.modules, groups, where=f"a forward of '{unit.name}'")
    context.num_registrations = count


def reasons_to_keep(units: Mapping[str, AttachedUnit]) -> dict[str, str]:
    """Return why recipes leave parameters unquantized, by FQN; empty texts for quantized ones."""
    return {
        f"{prefix}.{p.name}".lstrip("."): p.kept_because
        for prefix, unit in units.items()
        if unit.policy.recipe is not None
        for group in unit.groups
        for p in group.parameters
    }


def _report_quantization(root: AttachedUnit, units: Mapping[str, AttachedUnit], where: str) -> None:
    """Log once which parameters recipes leave unquantized.

    Raises:
        ValueError: They leave all; raised on all ranks, which have the same units.
    """
    recipes = {q for unit in units.values() if (q := unit.policy.quantization) is not None}
    if not recipes:
        return
    # Call this after check_agreement(): ranks without a recipe would wait there for ranks that
    # raise here.
    reasons = reasons_to_keep(units)
    check_any_is_quantized(recipes, reasons, where=where)
    if rank_and_world_size()[0] == 0:
        _LOGGER.info(
            "'%s' computes with %d weights in codes of %s; others stay as they are: %s",
            root.name,
            sum(not reason for reason in reasons.values()),
            " and ".join(sorted(recipe.name for recipe in recipes)),
            "; ".join(describe_kept(reasons)) or "none",
        )


def _has_root_beside(unit: AttachedUnit, found: dict[str, AttachedUnit]) -> bool:
    """Return whether a unit is under a root that is not among these units."""
    context = unit.context
    roots = [] if context is None else [u for u in context.units if context.is_root(u)]
    return any(all(root is not other for other in found.values()) for root in roots)


def check_agreement(groups_of_units: Mapping[str, Sequence[ParameterGroup]]) -> None:
    """Check the groups of all units under one root, by FQN; one small collective.

    Raises:
        ValueError: Units are divided over different ranks, or the ranks do not agree on layouts,
            dtypes or recipes.
    """
    _check_ranks(groups_of_units)
    groups = [(name, g) for name, members in groups_of_units.items() for g in members]
    # One exchange for each set of ranks: experts may have other ranks than the rest of a unit.
    for everyone in dict.fromkeys(group.axes.everyone for _, group in groups):
        layouts = [(n, g.fingerprint()) for n, g in groups if g.axes.everyone == everyone]
        require_equal(
            repr(layouts),
            what="parameters, shapes, dtypes and recipes",
            group=everyone,
            hint="Build the same model and wrap the same modules on all ranks",
        )


def _check_ranks(groups_of_units: Mapping[str, Sequence[ParameterGroup]]) -> None:
    # Experts may have their own mesh: compare experts and other parameters separately.
    for is_expert in (False, True):
        found = {}
        for name, members in groups_of_units.items():
            # Groups of one unit may have different ranks: compare the union.
            axes = [group.axes for group in members if group.axes.is_expert is is_expert]
            if axes:
                ranks = {r for a in axes for r in dist.get_process_group_ranks(a.all_ranks)}
                found[name] = ranks, is_default(axes[0].mesh)
        # The root comes first. If it has no parameters, the unit on the most ranks stands for it.
        root = next(iter(groups_of_units), "")
        first = root if root in found else max(found, key=lambda n: len(found[n][0]), default="")
        for name, (ranks, _) in found.items():
            whole, is_without_mesh = found[first]
            # Plain parameters on fewer ranks are parts that each set of ranks has of its own, as in
            # torch; but the root's mesh may have been forgotten, and its units' not. On other ranks
            # they would wait for some that do not run the root.
            is_part = ranks < whole and not (is_expert or is_without_mesh)
            if ranks != whole and not is_part:
                raise ValueError(
                    expected(
                        f"one mesh under one root: ranks {sorted(whole)} as of unit '{first}'",
                        f"ranks {sorted(ranks)} of unit '{name}'",
                        where="the first forward",
                        hint="Give fully_shard() the same mesh and expert_mesh for all units. Only "
                        "plain parameters that differ between ranks may be on a part of the "
                        "root's ranks, if the root was given a mesh",
                    )
                )


def refuse_parts_of_ranks(model: nn.Module, where: str) -> None:
    """Raise if ranks have different parameters under one name, in a unit on fewer than others.

    Only their user knows how such parts make up a whole, since the parameters are plain tensors.

    Raises:
        ValueError: A unit is on some of another unit's ranks; on all ranks.
    """
    groups = [(name, g) for name, unit in attached_units([model]).items() for g in unit.groups]
    # With the ranks of a model axis, which says what part each has.
    ranks = [set(dist.get_process_group_ranks(group.axes.everyone)) for _, group in groups]
    whole = max(ranks, key=len, default=set())
    for (name, group), few in zip(groups, ranks, strict=True):
        # What experts other ranks have is known if a layer has declared it.
        declared = [annotation_of(p.sharded).experts for p in group.parameters]
        if few < whole and not group.axes.is_expert and None in declared:
            raise ValueError(
                expected(
                    f"parameters that ranks {sorted(whole)} have in common",
                    f"those of unit '{name}' on ranks {sorted(few)}, which differ elsewhere",
                    where=where,
                    hint="Make them DTensors over the axis that tells them apart, before "
                    "fully_shard(), as distribute_tensor() or megafsdp.parallel does; or "
                    "save and gather that unit's parameters yourself",
                )
            )
