"""Values for a model that was built and sharded on the meta device, one unit at a time.

:func:`materialize` walks the modules as ``nn.Module.apply`` does, children first, and lets the
initialiser write full plain parameters: those of one unit exist at a time. When the walk leaves a
unit, each rank copies its rows and the full tensors are freed; when it comes back to a module whose
subtree was written before, its parameters are gathered, so that a parent may edit what its
children drew. With three units, root, ``a`` and ``b``:

    call            a.up  a.down  a  |  b.up  b.down  b  |  embedding  root
    full tensors    a     a       a  |  b     b       b  |  embedding  the root's own

Every rank draws all numbers, hence the values do not depend on the number of ranks. How a parameter
is cut is decided elsewhere; which ones have values is recorded by :mod:`megafsdp.fsdp.params.meta`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megafsdp.buffer.comm.agreement import raise_together
from megafsdp.buffer.comm.collectives import require_equal
from megafsdp.buffer.dtensor.op_rules import refusing_random_numbers
from megafsdp.buffer.dtensor.random_values import random_state_digest
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from megafsdp.buffer.dtensor.unwritten import mark_unwritten
from megafsdp.device.memory import Category, FlatStorage, poison
from megafsdp.errors import expected
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import (
    PlainTensor,
    copy_attributes,
    find_plain_tensors,
    is_filled,
    mark_initialized,
    quote,
)
from megafsdp.fsdp.params.parameter_group import ManagedParameter, ParameterGroup, group_of
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below

T = TypeVar("T")

_WHERE = "megafsdp.materialize()"


def materialize(
    model: nn.Module, initialize: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """Create and initialise everything below a model that is on the meta device.

    The result is, bit for bit and for any number of ranks, that of ``model.to_empty(device=...)``
    with ties kept, followed by ``model.apply(initialize)``, on an unsharded model with the same
    random state. Beyond the shards there exist at most the full parameters of one unit and what
    gathers one of them. Collective: called by all ranks alike, with equal random states.

    ``initialize`` is called under ``no_grad`` on every module, except on those whose part of their
    unit had values throughout before the call. What had values, because it was not on the meta
    device or was loaded, keeps them, whatever is written to it meanwhile. A module sees its unit's
    parameters in full; those of units below it are sharded, and are not to be drawn from there.
    Either everything is initialised, or the call raises and can be made again.

    Writes to tensors on the meta device store nothing: where a model's ``__init__`` sets values, as
    by ``self.apply(self._init_weights)``, give that function here too.

    Args:
        model: A module with units below it that are all of its model's.
        initialize: Fills parameters and buffers of one module in place; None calls the module's
            ``reset_parameters()`` if there is one, or else, where it has tensors of its own, its
            ``_reset_parameters()``.

    Returns:
        ``model``. Units' parameters stay the objects that they are; parameters outside of units,
        and buffers, are new ones where they were on the meta device.

    Raises:
        ValueError: The ranks' random states or models differ, or ``model`` is a part of a unit.
        RuntimeError: A parameter or buffer was not filled.
        Exception: What ``initialize`` raises; all ranks raise.
    """
    walk = _Walk(model, initialize or _reset_parameters)
    if not walk.fresh_modules:
        return model
    # Ranks that differ would gather apart within the walk, and hang: they raise before it.
    for group in walk.process_groups:
        require_equal(
            walk.fingerprint(),
            what="parameters, shapes and dtypes",
            group=group,
            where=_WHERE,
            hint="Build the same model and wrap the same modules on all ranks",
        )
        require_equal(
            random_state_digest(walk.device),
            what="random state",
            group=group,
            where=_WHERE,
            hint="Call torch.manual_seed() with the same seed on all ranks just before",
        )
    # A parent that draws into parameters of an inner unit would draw equal rows on all ranks.
    with refusing_random_numbers():
        error = walk.run()
    try:
        for group in walk.process_groups:
            raise_together(error, group)
    except Exception:
        walk.undo()
        raise
    walk.mark_initialized()
    return model


def _reset_parameters(module: nn.Module) -> None:
    reset = _initializer_of(module)
    if reset is not None:
        reset()


def _initializer_of(module: nn.Module) -> Callable[[], object] | None:
    reset = getattr(module, "reset_parameters", None)
    own = (*module._parameters.values(), *module._buffers.values())
    # As torch's MultiheadAttention has it. Its Transformer, without tensors of its own, would draw
    # those of all layers anew.
    if reset is None and any(tensor is not None for tensor in own):
        reset = getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


@dataclass(eq=False)
class _Managed:
    """A unit's parameter during the walk.

    Attributes:
        name: FQN within the model.
        record: The parameter.
        group: Its group.
        had_values: Whether it had values before the walk, which it keeps.
        has_rows: Whether the main weight has values, if only of a first visit.
        storage: Memory of the full tensor while it is shown.
        full: The parameter over it.
        is_filled: Whether it had values before the walk, or the last visit left no NaN.
    """

    name: str
    record: ManagedParameter
    group: ParameterGroup
    had_values: bool
    has_rows: bool
    storage: FlatStorage | None = None
    full: nn.Parameter | None = None
    is_filled: bool = False

    def open(self) -> None:
        """Show a full tensor: the rows of all ranks, or NaN (local) where there are none."""
        # In the dtype that the user gave, in which an unsharded model would draw.
        record, sharded = self.record, self.record.sharded
        self.storage = FlatStorage(
            record.shape.numel(),
            record.dtype,
            device=self.group.device,
            ledger=self.group.buffers.ledger,
            category=Category.UNSHARDED,
        )
        full = self.storage.tensor.view(record.shape)
        if self.has_rows:
            full.copy_(full_tensor(sharded.detach()))
        else:
            # What an initialiser leaves out is found by the NaN in it.
            poison(full)
        # Initialisers may read what users wrote on the parameter.
        self.full = nn.Parameter(full, requires_grad=sharded.requires_grad)
        copy_attributes(sharded, self.full)
        record.put(self.full)

    def take_replacement(self) -> None:
        """Take over the values of a new object that an initialiser put in the place of ours."""
        assert self.full is not None, "open() comes first"
        for reference, attribute in self.record.owners:
            module = reference()
            shown = None if module is None else module._parameters.get(attribute)
            if shown is not None and shown is not self.full:
                self.full.copy_(shown)
                self.record.put(self.full)
                return

    def close(self) -> None:
        """Copy this rank's rows, free the full tensor, show the sharded parameter; local.

        A parameter that had values before the walk has the same after it, whatever was written.
        """
        assert self.full is not None, "open() comes first"
        if not self.had_values:
            sharded = self.record.sharded
            if isinstance(sharded, UnevenDTensor):
                sharded.copy_from_full_(self.full)
            else:
                local_tensor(sharded).copy_(self.full)
            self.is_filled = is_filled(self.full)
            self.has_rows = True
            self.group.mark_stale()
        self.discard()

    def discard(self) -> None:
        """Free the full tensor, whatever is in it, and show the sharded parameter."""
        self.record.put(self.record.sharded)
        self.full = self.storage = None


class _Walk:
    """One visit of all modules below a model; see :func:`materialize`."""

    def __init__(self, model: nn.Module, initialize: Callable[[nn.Module], object]) -> None:
        self.model = model
        self.initialize = initialize
        self.units = units_below([model])
        self.managed = self._find_managed()
        self.plain = find_plain_tensors(model, is_meta=True)
        self.plain_with_values = find_plain_tensors(model, is_meta=False)
        self.device = device_below(model)
        self.fresh_modules = self._find_fresh_modules()
        self._made: dict[int, torch.Tensor] = {}
        # Copies of plain tensors that had values before the walk.
        self._saved: dict[PlainTensor, torch.Tensor] = {}
        # Parameters in full: those of the unit that the walk is in.
        self._open: list[_Managed] = []
        self._unit: FSDPUnit | None = None
        self._error: Exception | None = None

    def _find_managed(self) -> dict[int, list[_Managed]]:
        """Return the units' parameters by the id of each owner."""
        # A unit of several modules may own parameters outside of the model.
        names = {id(p): name for name, p in self.model.named_parameters()}
        found: dict[int, list[_Managed]] = {}
        known: set[int] = set()
        for unit in self.units.values():
            for group in unit.groups:
                for record in group.parameters:
                    known.add(id(record.sharded))
                    name = names.get(id(record.sharded), record.name)
                    has_values = record.is_initialized
                    managed = _Managed(
                        name, record, group, has_values, has_values, is_filled=has_values
                    )
                    for reference, _ in record.owners:
                        found.setdefault(id(reference()), []).append(managed)
        named = self.model.named_parameters()
        foreign = [name for name, p in named if group_of(p) is not None and id(p) not in known]
        if foreign or not self.units:
            got = f"a part of one, which owns {quote(foreign)}" if foreign else "none"
            raise ValueError(
                expected(
                    "a module with units below it",
                    got,
                    where=_WHERE,
                    hint="Call it on the outermost module given to fully_shard(), after that",
                )
            )
        return found

    def _find_fresh_modules(self) -> set[int]:
        """Return the ids of modules that have a tensor of their own without values."""
        managed = self.managed.items()
        fresh = {owner for owner, items in managed if not all(m.has_rows for m in items)}
        return fresh | set(self.plain)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return the ranks of each mesh below the model, with those of its model axis."""
        groups = [group for unit in self.units.values() for group in unit.groups]
        return list(dict.fromkeys(group.axes.everyone for group in groups))

    def fingerprint(self) -> str:
        """Return what ranks must have in common for the walk to be the same."""
        # With which parameters have values: that decides what is visited and gathered.
        parameters = [
            (name, group.fingerprint(), [p.is_initialized for p in group.parameters])
            for name, unit in self.units.items()
            for group in unit.groups
        ]
        return repr((parameters, [item.name for item in _flat(self.plain)]))

    def run(self) -> Exception | None:
        """Visit all modules; return the error of this rank instead of raising it."""
        with torch.no_grad():
            try:
                self._visit(self.model, unit_of(self.model))
                self._close_all()
            finally:
                for managed in self._open:
                    managed.discard()
                # An initialiser may have drawn anew what had values.
                for item, values in self._saved.items():
                    item.restore(values)
        return self._error or self._unfilled()

    def _visit(self, module: nn.Module, unit: FSDPUnit | None) -> None:
        for child in module.children():
            self._visit(child, unit_of(child) or unit)
        if self.initialize is _reset_parameters and _initializer_of(module) is None:
            return
        part = list(_part_of_unit(module, unit))
        tensors = (t for m in part for t in [*m._parameters.values(), *m._buffers.values()])
        has_tensors = any(tensor is not None for tensor in tensors)
        # A part with values throughout is not drawn again, and takes no random numbers.
        if has_tensors and not any(id(m) in self.fresh_modules for m in part):
            return
        # One unit in full at a time: that bounds the memory.
        if unit is not self._unit:
            self._close_all()
            self._unit = unit
        self._prepare(module, part)
        # A rank that has failed goes on walking: the others gather with it.
        if self._error is None:
            try:
                self.initialize(module)
                for managed in self._open:
                    managed.take_replacement()
            except Exception as error:
                self._error = error

    def _prepare(self, module: nn.Module, part: list[nn.Module]) -> None:
        """Show a module's part of its unit in full; give the module's own plain tensors memory."""
        for managed in (item for m in part for item in self.managed.get(id(m), ())):
            if managed.full is None:
                managed.open()
                self._open.append(managed)
        for item in (item for m in part for item in self.plain_with_values.get(id(m), ())):
            if item not in self._saved:
                self._saved[item] = item.original.detach().clone()
        for item in self.plain.get(id(module), ()):
            item.give_memory(self._made, self.device)

    def _close_all(self) -> None:
        # Popped after: if closing raises, run() discards what is left.
        while self._open:
            self._open[-1].close()
            self._open.pop()

    def _unfilled(self) -> RuntimeError | None:
        # A dict, for a tied parameter is listed under each of its owners.
        names = [m.name for m in dict.fromkeys(_flat(self.managed)) if not m.is_filled]
        names += [item.name for item in _flat(self.plain) if not item.is_filled()]
        if not names:
            return None
        return RuntimeError(
            expected(
                "an initialiser that fills everything",
                f"{quote(names)} left as they were, or with NaN in them",
                where=_WHERE,
                hint="Give initialize=, a function that fills the parameters and buffers of one "
                "module, or the modules a reset_parameters()",
            )
        )

    def mark_initialized(self) -> None:
        """Mark all of the units' parameters as initialised."""
        for unit in self.units.values():
            mark_initialized(unit.groups)

    def undo(self) -> None:
        """Return what the walk made to the meta device, so that another walk begins afresh."""
        # Rows in main weights may stay: their parameters are not marked as initialised. A parent's
        # edit of a sharded one in the walk counts as a write, and must not.
        for managed in dict.fromkeys(_flat(self.managed)):
            if not managed.had_values:
                mark_unwritten(managed.record.sharded, is_meta=True)
        for item in _flat(self.plain):
            item.restore()


def _flat(lists: dict[int, list[T]]) -> Iterator[T]:
    return itertools.chain.from_iterable(lists.values())


def _part_of_unit(module: nn.Module, unit: FSDPUnit | None) -> Iterator[nn.Module]:
    """Yield a module and those below it, without other units below it."""
    yield module
    for child in module.children():
        if unit_of(child) in (None, unit):
            yield from _part_of_unit(child, unit)
