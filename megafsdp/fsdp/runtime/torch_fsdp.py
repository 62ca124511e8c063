"""Codes of quantized parameters under torch's FSDP2, made from fp32 main weights.

The parameter of a rank is quantized (:mod:`megafsdp.quantize.shard`), and torch gathers its codes.
A scale may cover rows on several ranks: one scale for the whole matrix, or in nvfp4 the maximum of
all tiles. Then maxima are combined first, for all parameters at once, as in the engine. Scales of
tiles, or of matrices of a stack, belong to one rank, because cuts go between them. The parts into
which tensor parallelism cuts a matrix share the scale of the matrix too, so that checkpoints do not
depend on the degree:

    rows 256 on 2 ranks     tiles of 128: rank 0 has tiles 0, rank 1 tiles 1; nothing is exchanged
                            one scale:    maxima 3 and 5, the largest of which scales both

:mod:`megafsdp.fsdp.quantized_model` chooses the parameters and quantizes them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.errors import expected
from megafsdp.fsdp.runtime.agreement import take_largest, take_largest_together
from megafsdp.quantize.delayed import NUM_PENDING, DelayedState, roll_together
from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.kernels import clear_maxima
from megafsdp.quantize.main_weight import Layout, MainWeight
from megafsdp.quantize.shard import QuantizedShard
from megafsdp.quantize.tensor import QuantizedTensor
from megafsdp.quantize.tiles import Fragment

_LOGGER = logging.getLogger("megafsdp.fsdp")


def shard_of(parameter: torch.Tensor) -> QuantizedShard | None:
    """Return the quantized tensor that a parameter is or wraps; None for other parameters."""
    local = local_object(parameter)
    return local if isinstance(local, QuantizedShard) else None


def require_main_weight(shard: QuantizedShard) -> MainWeight:
    """Return the main weight of a parameter that ``quantize_`` has made.

    Raises:
        RuntimeError: The parameter is a copy, which has no main weight.
    """
    if shard.main is None:
        raise RuntimeError(
            expected(
                "a parameter that megafsdp.quantize_() has made",
                "a copy or a pickle of one, which has no main weight",
                where=f"the quantized parameter '{shard.fqn}'",
                hint="Copy or move the model before quantize_(), and load the state dict without "
                "assign=True",
            )
        )
    return shard.main


@torch.no_grad()
def adopt_loaded_codes(shards: Iterable[QuantizedShard]) -> None:
    """Decode codes that were loaded without main weights into the main weights; local."""
    overtaken = []
    for shard in shards:
        main = require_main_weight(shard)
        if main.is_overtaken:
            main.values.copy_(shard.decode(torch.float32))
            main.note_encoded()
            overtaken.append(shard.fqn)
    if overtaken:
        _LOGGER.warning(
            "Main weights of %d quantized parameters begin from loaded codes, '%s' among them: "
            "what the codes lack of fp32 is lost. Load the optimizer's states too.",
            len(overtaken),
            overtaken[0],
        )


def _layout_of(shard: QuantizedShard, weight: MainWeight) -> Layout:
    # A load may have given the main weight other memory, but never another shape.
    layout, values = weight.layout, weight.values
    if layout is None or layout.values is not values:
        form, shape = shard.recipe.weight, weight.shape
        rows = 1 if len(shape) == 2 else shape[1]
        # The format computes the scales of a whole grid; those of nvfp4 are relative to its
        # maximum.
        is_whole = not shard.scales().own or shape == shard.stored_shape
        layout = weight.layout = Layout(
            values,
            # The values are contiguous: quantize_() or a load has copied them.
            Fragment(values.view(-1), shape, weight.first * rows),
            form.num_maxima(shape),
            0 if is_whole else form.table_nbytes(shape),
        )
    return layout


@torch.no_grad()
def write_full_values(tensor: DTensor, full: torch.Tensor) -> bool:
    """Set the values of a quantized parameter from a full tensor, and make its codes.

    Collective as :func:`encode_main_weights`. A full tensor that is quantized itself is copied with
    its histories on a mesh of one rank, and decoded on others. Returns False, and does nothing, if
    the parameter is not quantized or the shapes differ.
    """
    shard, mesh = shard_of(tensor), tensor.device_mesh
    if shard is None or full.shape != tensor.shape:
        return False
    if isinstance(full, QuantizedTensor):
        if mesh.size() == 1:
            shard.copy_(full)
            return True
        full = full.decode()
    main = require_main_weight(shard)
    # Every rank has the full tensor: nothing is sent.
    rows = distribute_tensor(full.to(main.values), mesh, tensor.placements, src_data_rank=None)
    main.values.copy_(local_object(rows))
    encode_main_weights([shard])
    return True


class _Encoding:
    """One weight within one encoding of many."""

    # One object is made for each parameter and step: without slots its attributes would cost as
    # much as the rest of the work on it.
    __slots__ = ("format", "layout", "maxima", "num_pending", "pending", "shard", "weight")

    def __init__(self, shard: QuantizedShard) -> None:
        self.shard, self.weight = shard, require_main_weight(shard)
        self.format: WeightFormat = shard.recipe.weight
        self.layout = _layout_of(shard, self.weight)
        # The recipe fixes it, so that ranks agree on sizes whatever their layers have recorded.
        self.num_pending = 0 if shard.state is None else NUM_PENDING
        self.maxima = self.pending = self.layout.values

    @property
    def num_combined(self) -> int:
        """Return how many of the combined numbers are those of this weight."""
        return self.layout.num_maxima + self.num_pending

    def new_table(self) -> torch.Tensor:
        """Return memory for the scales of the whole grid: the parameter's own table if it fits."""
        table, nbytes = self.shard.table, self.layout.table_nbytes
        return table.new_empty(nbytes) if nbytes else table

    def take_table(self, table: torch.Tensor) -> None:
        """Keep the scales of this rank's rows from a table of :meth:`new_table`."""
        if table is not self.shard.table:
            first = self.weight.first
            end = first + self.shard.stored_shape[0]
            found = self.format.scales_of_rows(table, self.weight.shape, first, end)
            self.shard.scales().copy_(found)


@torch.no_grad()
def encode_main_weights(
    shards: Sequence[QuantizedShard], *, has_recorded: bool = True, is_step: bool = False
) -> None:
    """Make codes and scales of parameters from their main weights.

    Collective over the ranks that have rows under one scale: one all-reduce for all parameters of
    one mesh, and one more over each model axis that cuts a matrix with one scale. The maxima are in
    memory during the call.

    Args:
        shards: The parameters, the same on all ranks in the same order.
        has_recorded: Whether layers may have recorded maxima on some rank.
        is_step: Whether a step has changed the main weights.
    """
    # Before anything reads main weights: otherwise older values would overwrite loaded codes.
    adopt_loaded_codes(shards)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[_Encoding]] = {}
    for shard in shards:
        encoding = _Encoding(shard)
        by_groups.setdefault(encoding.weight.groups, []).append(encoding)
    # Weights whose first process group is the same are combined over it together.
    for first in dict.fromkeys(groups[:1] for groups in by_groups):
        together = {groups: found for groups, found in by_groups.items() if groups[:1] == first}
        _encode_together(first, together, has_recorded, is_step)
    for shard in shards:
        require_main_weight(shard).note_encoded()


def _encode_together(
    first: tuple[dist.ProcessGroup, ...],
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[_Encoding]],
    has_recorded: bool,
    is_step: bool,
) -> None:
    every = [encoding for found in by_groups.values() for encoding in found]
    device = every[0].layout.values.device
    num_combined = sum(each.num_combined for each in every)
    combined = torch.empty(num_combined, dtype=torch.int32, device=device)
    clear_maxima(combined)
    # Split in one call: with calls for each parameter, Python would dominate the step.
    sizes = [size for each in every for size in (each.layout.num_maxima, each.num_pending)]
    parts = iter(combined.split(sizes))
    for each in every:
        each.maxima, each.pending = next(parts), next(parts)
    delayed = _delayed(every)
    if has_recorded and delayed:
        # Copy in one call: each parameter has only two numbers, an operator call costs more.
        recorded = [state.pending() for _, state in delayed]
        torch._foreach_copy_([each.pending for each, _ in delayed], recorded)
    by_format: dict[WeightFormat, list[_Encoding]] = {}
    for each in every:
        by_format.setdefault(each.format, []).append(each)
    # Call the kernel once for each format: with a call per parameter, Python would dominate.
    for form, found in by_format.items():
        form.add_maxima([e.layout.fragment for e in found], [e.maxima for e in found])
    # The numbers of each tuple of process groups are contiguous, in the order of the parameters.
    numels = {groups: sum(e.num_combined for e in found) for groups, found in by_groups.items()}
    take_largest_together(combined, first, numels)
    if has_recorded:
        _combine_recorded([each for each, _ in delayed])
    _roll(delayed, is_step)
    # Write in place: torch gathers these buffers, and flat aliases show them.
    for form, found in by_format.items():
        maxima = [each.maxima for each in found]
        tables = [each.new_table() for each in found]
        form.fill_tables([each.weight.shape for each in found], maxima, tables)
        codes = [each.shard.codes for each in found]
        form.encode([each.layout.fragment for each in found], maxima, codes)
        for each, table in zip(found, tables, strict=True):
            each.take_table(table)


def _delayed(every: Sequence[_Encoding]) -> list[tuple[_Encoding, DelayedState]]:
    found = [(each, each.shard.state) for each in every]
    return [(each, state) for each, state in found if state is not None]


def _roll(delayed: Sequence[tuple[_Encoding, DelayedState]], is_step: bool) -> None:
    """Add combined maxima to the histories, and take from these the maxima that give scales."""
    # All ranks that share a scale roll the same maxima: otherwise their histories would diverge.
    roll_together(
        [state for _, state in delayed],
        [each.maxima for each, _ in delayed],
        [each.pending for each, _ in delayed],
        is_step=is_step,
    )
    # Use the maxima of the histories; only at the first step and after loads are they the newest.
    for each, state in delayed:
        each.maxima = state.weight_maximum()


def _combine_recorded(every: Sequence[_Encoding]) -> None:
    """Combine the recorded maxima over ranks with equal weight maxima, such as replicas."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for each in every:
        if each.weight.recorded_groups:
            by_groups.setdefault(each.weight.recorded_groups, []).append(each.pending)
    for groups, parts in by_groups.items():
        # Separate from the maxima of weights, which these ranks have in common already.
        combined = torch.cat(parts)
        for process_group in groups:
            take_largest(combined, process_group)
        for part, found in zip(parts, combined.split(NUM_PENDING), strict=True):
            part.copy_(found)


def quantized_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the quantized parameters of a model by FQN, in an order that all ranks share."""
    return {name: p for name, p in model.named_parameters() if shard_of(p) is not None}
