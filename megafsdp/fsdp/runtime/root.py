"""Which modules are units, and how the units under one root come to share a context.

A unit is attached to its modules; the outermost one adopts those below it when it first runs. This
file knows of units only what that takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import nn

from megafsdp.device.memory import ByteLedger
from megafsdp.errors import expected
from megafsdp.fsdp.params.meta import require_initialized
from megafsdp.fsdp.runtime.consistency import check_agreement
from megafsdp.fsdp.runtime.process_groups import make_neighbours
from megafsdp.fsdp.runtime.schedule import FSDPContext, ScheduledUnit

_UNIT_ATTRIBUTE = "_megafsdp_unit"


class AttachedUnit(ScheduledUnit, Protocol):
    """What must be known of a unit to adopt it."""

    name: str
    ledger: ByteLedger
    host_ledger: ByteLedger
    context: FSDPContext | None

    @property
    def modules(self) -> list[nn.Module]:
        """Return the unit's modules."""

    @property
    def is_resting(self) -> bool:
        """Tell whether the unit is outside its forward and backward."""

    def rename(self, name: str) -> None:
        """Set the FQN within the root."""


def attach(module: nn.Module, unit: AttachedUnit) -> None:
    """Make a module one of a unit's."""
    setattr(module, _UNIT_ATTRIBUTE, unit)


def attached_unit(module: nn.Module) -> AttachedUnit | None:
    """Return the unit of a module; None if it is of none."""
    return getattr(module, _UNIT_ATTRIBUTE, None)


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

    Units that another root, which is alive, has in common with it stay under that one.

    Raises:
        RuntimeError: A unit below is at work, or something below has no values.
        ValueError: Units are divided over different ranks, or ranks differ in their layouts.
    """
    where = f"the first forward of '{root.name}'"
    found = attached_units(root.modules)
    units = {name: unit for name, unit in found.items() if not _has_root_beside(unit, found)}
    require_initialized(root.modules, where=where)
    for name, unit in units.items():
        unit.rename(name)
        if not unit.is_resting:
            raise RuntimeError(
                expected(
                    "all units at rest",
                    f"unit '{name}' at work",
                    where=where,
                    mend="Call the outermost module first",
                )
            )
    check_agreement({name: unit.groups for name, unit in units.items()})
    context = FSDPContext(root, units.values())
    for unit in units.values():
        make_neighbours(unit.groups, unit.reshard_after_forward, context.extra_groups)
    if any(group.device.type == "cuda" for unit in units.values() for group in unit.groups):
        context.separate_reductions(True)
    for unit in units.values():
        unit.context = context
        unit.ledger.merge_into(root.ledger)
        unit.host_ledger.merge_into(root.host_ledger)


def _has_root_beside(unit: AttachedUnit, found: dict[str, AttachedUnit]) -> bool:
    """Tell whether a unit is under a root that is none of these units."""
    context = unit.context
    roots = [] if context is None else [u for u in context.units if context.is_root(u)]
    return any(all(root is not other for other in found.values()) for root in roots)
