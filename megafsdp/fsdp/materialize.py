"""Initialise a model that was built and sharded on the meta device, one unit at a time.

:func:`materialize` walks the modules as ``nn.Module.apply`` does, children first, and lets the
initialiser write full plain parameters, of one unit at a time. When the walk leaves a
unit, each rank copies its rows and the full tensors are freed; when it comes back to a module whose
subtree was written before, its parameters are gathered, so that a parent may edit what its
children drew. With three units, root, ``a`` and ``b``:

    call            a.up  a.down  a  |  b.up  b.down  b  |  embedding  root
    full tensors    a     a       a  |  b     b       b  |  embedding  the root's own

Every rank draws all numbers, hence the values do not depend on the number of ranks. How a parameter
is cut is decided elsewhere; :mod:`megafsdp.fsdp.params.meta` records which parameters have values.
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
from megafsdp.fsdp.params.managed_parameter import ManagedParameter
from megafsdp.fsdp.params.meta import (
    PlainTensor,
    copy_attributes,
    find_plain_tensors,
    is_filled,
    mark_initialized,
    quote,
)
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below

T = TypeVar("T")

_WHERE = "megafsdp.materialize()"


def materialize(
    model: nn.Module, initialize: Callable[[nn.Module], object] | None = None
) -> nn.Module:
    """Create and initialise everything below a model that is on the meta device.

    For any number of ranks the result has the same bits as ``model.to_empty(device=...)`` with ties
    kept, followed by ``model.apply(initialize)``, on an unsharded model with the same random state.
    Memory beside the shards holds at most the full parameters of one unit, and the buffers that
    gather one of them. Collective: called by all ranks alike, with equal random states. Only
    torch's layers draw other numbers into DTensors that no unit has, those of torch's DTensors.

    ``initialize`` is called under ``no_grad`` on every module, except where all tensors of the
    module and of those below it in its unit had values before the call. A tensor that had values,
    because it was not on the meta device or was loaded, keeps them, whatever ``initialize`` writes.
    A module sees its unit's parameters in full; parameters of units below it are sharded, and it
    must not draw values for them. Either everything is initialised, or the call raises and can be
    repeated.

    Writes to tensors on the meta device store nothing: if a model's ``__init__`` sets values, for
    example by ``self.apply(self._init_weights)``, give that function here too.

    Args:
        model: A module that contains each of its units completely.
        initialize: Fills parameters and buffers of one module in place. None calls the module's
            ``reset_parameters()`` if there is one, or else the ``_reset_parameters()`` of a module
            that has tensors of its own.

    Returns:
        ``model``. Units' parameters stay the same objects; parameters outside of units, and
        buffers, are new objects if they were on the meta device.

    Raises:
        ValueError: The ranks' random states or models differ, or ``model`` is a part of a unit.
        RuntimeError: A parameter or buffer was not filled.
        Exception: Whatever ``initialize`` raises; all ranks raise.
    """
    walk = _Walk(model, initialize or _reset_parameters)
    if not walk.fresh_modules:
        return model
    # Ranks with different models would issue different gathers in the walk, and hang: raise first.
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
    # torch's MultiheadAttention has this name. Its Transformer has it too, without tensors of its
    # own, and would draw those of all layers anew.
    if reset is None and any(tensor is not None for tensor in own):
        reset = getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


@dataclass(eq=False)
class _Managed:
    """A unit's parameter during the walk.

    Attributes:
        name: FQN within the model.
        record: The parameter.
        group: Its parameter group.
        had_values: Whether it had values before the walk; it keeps them.
        has_rows: Whether the main weight has values, possibly only from an earlier visit.
        storage: Memory of the full tensor while it is shown.
        full: The full parameter over ``storage``.
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
        """Show a full tensor: gather the rows of all ranks, or fill it with NaN without values."""
        # Use the dtype that the user gave: an unsharded model would draw in it.
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
            # NaN left in it shows what an initialiser did not fill.
            poison(full)
        # Initialisers may read attributes that users set on the parameter.
        self.full = nn.Parameter(full, requires_grad=sharded.requires_grad)
        copy_attributes(sharded, self.full)
        record.put(self.full)

    def take_replacement(self) -> None:
        """Copy the values of a new parameter that an initialiser put in place of ours."""
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

        A parameter that had values before the walk keeps them, whatever was written.
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
        """Free the full tensor without copying it, and show the sharded parameter."""
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
        # Parameters that are shown in full, of the unit that the walk is in.
        self._open: list[_Managed] = []
        self._unit: FSDPUnit | None = None
        self._error: Exception | None = None

    def _find_managed(self) -> dict[int, list[_Managed]]:
        """Return the units' parameters by the ids of the modules that own them."""
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
        """Return the ids of modules that own a tensor without values."""
        managed = self.managed.items()
        fresh = {owner for owner, items in managed if not all(m.has_rows for m in items)}
        return fresh | set(self.plain)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return one group for each mesh below the model, including the ranks of its model axis.

        The largest is first: if a rank has an error, all ranks must raise in the same exchange, but
        experts of this rank's own are on fewer ranks.
        """
        groups = [group for unit in self.units.values() for group in unit.groups]
        found = dict.fromkeys(group.axes.everyone for group in groups)
        return sorted(found, key=lambda group: group.size(), reverse=True)

    def fingerprint(self) -> str:
        """Return a text that must be equal on all ranks for their walks to be the same."""
        # It includes which parameters have values: they decide what is visited and gathered.
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
                # An initialiser may have overwritten tensors that had values.
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
        # A part that had all its values is not drawn again, and uses up no random numbers.
        if has_tensors and not any(id(m) in self.fresh_modules for m in part):
            return
        # Only one unit is in full at a time, which bounds the memory.
        if unit is not self._unit:
            self._close_all()
            self._unit = unit
        self._prepare(module, part)
        # A rank that has failed goes on walking, because the others still gather with it.
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
        # Pop after closing: if that raises, run() discards what is left.
        while self._open:
            self._open[-1].close()
            self._open.pop()

    def _unfilled(self) -> RuntimeError | None:
        # A dict drops duplicates: a tied parameter is listed under each of its owners.
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
        """Move what the walk made back to the meta device, so that another walk starts afresh."""
        # Rows in main weights may stay: their parameters are not marked as initialised. But a
        # parent's edit of a sharded parameter in the walk counted as a write, so reset that mark.
        for managed in dict.fromkeys(_flat(self.managed)):
            if not managed.had_values:
                mark_unwritten(managed.record.sharded, is_meta=True)
        for item in _flat(self.plain):
            item.restore()


def _flat(lists: dict[int, list[T]]) -> Iterator[T]:
    return itertools.chain.from_iterable(lists.values())


def _part_of_unit(module: nn.Module, unit: FSDPUnit | None) -> Iterator[nn.Module]:
    """Yield a module and the modules below it that belong to the same unit."""
    yield module
    for child in module.children():
        if unit_of(child) in (None, unit):
            yield from _part_of_unit(child, unit)
