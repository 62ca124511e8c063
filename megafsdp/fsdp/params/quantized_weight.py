"""A compute weight of codes, and the scales that every rank derives for itself.

Only codes are gathered. A scale is a function of the largest magnitude in its tile of the whole
matrix. So each rank computes the maxima of its own rows, one collective takes the maximum over
ranks for all groups of a model (:mod:`megafsdp.fsdp.runtime.agreement`), and each rank fills the
whole tables of scales and encodes its own rows. Two ranks, a matrix of 80 rows, tiles of 32::

    rank 0   rows  0..39   maxima 0 1   |  MAX   |  tables 0 1 2   codes of rows  0..39
    rank 1   rows 40..79   maxima   1 2 |  of 1  |  tables 0 1 2   codes of rows 40..79

So a cut through a tile costs nothing, and the codes are those of the whole matrix, bit for bit.
Formats are in :mod:`megafsdp.quantize.formats`, the gather of the codes in
:mod:`~megafsdp.fsdp.params.gathered_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from megafsdp.fsdp.params.gather_sources import (
    GatherSource,
    PersistentSource,
    TemporarySource,
)
from megafsdp.fsdp.params.gathered_weight import GatheredWeight, WeightBuffers, joined
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.policy import Quantization
from megafsdp.mesh.placement import Residence
from megafsdp.quantize.delayed import NUM_PENDING, DelayedState, roll_together
from megafsdp.quantize.tensor import QuantizedTensor
from megafsdp.quantize.tiles import Fragment


class WeightScales:
    """The tables of scales of one group's weights, with their maxima and histories; local.

    Args:
        quantization: The recipe and its options.
        main_weight: The group's main weight, a shard or the whole.
        shapes: Shapes of the weights, of this rank's parts on a model axis.
        device: Where the tables live.
        ledger: Counts their bytes.

    Attributes:
        states: The histories of the weights, in order; empty if the recipe has none.
        num_maxima: How many numbers ranks combine for this group.
    """

    def __init__(
        self,
        quantization: Quantization,
        main_weight: DBuffer,
        shapes: Sequence[tuple[int, ...]],
        *,
        device: torch.device,
        ledger: ByteLedger,
    ) -> None:
        recipe = quantization.recipe
        self._format, self._through = recipe.weight, quantization.through
        self._shapes = list(shapes)
        # Made once: the main weight of a quantized group never moves.
        self._fragments = _fragments_of(main_weight, shapes)
        # A rank without rows of a weight gets its maxima from the other ranks.
        self._owned = [i for i, f in enumerate(self._fragments) if f.values.numel()]
        self._sizes = [self._format.num_maxima(shape) for shape in shapes]
        self.states = _new_states(recipe.history, shapes, device)
        self.has_pending = quantization.has_recorded_maxima
        num_pending = NUM_PENDING * len(self.states) if self.has_pending else 0
        self.num_maxima = sum(self._sizes) + num_pending
        # Multiples of 16 bytes, so each table is aligned for kernels.
        sizes = [self._format.table_nbytes(shape) for shape in shapes]
        self._storage = FlatStorage(
            sum(sizes), torch.uint8, device=device, ledger=ledger, category=Category.SCALES
        )
        self.tables = list(self._storage.tensor.split(sizes))
        self._ledger = ledger
        self._state_nbytes = sum(_history_nbytes(state) for state in self.states)
        ledger.debit(Category.SCALES, self._state_nbytes)
        # The combined maxima, kept from the collective to the encoding.
        self._maxima: list[torch.Tensor] = []

    def __del__(self) -> None:
        """Count the histories as freed."""
        # If the constructor failed early, nothing was counted.
        if hasattr(self, "_state_nbytes"):
            self._ledger.credit(Category.SCALES, self._state_nbytes)

    def add_maxima(self, combined: torch.Tensor, *, is_stale: bool) -> None:
        """Write this rank's maxima: first those of its rows of weights, then layers' recorded ones.

        Args:
            combined: ``(num_maxima,)`` int32 bits of magnitudes, all zero.
            is_stale: Whether the weights have changed; if not, their maxima stay zero.
        """
        *of_weights, pending = self._split(combined)
        # Layers of a frozen group still record maxima, though its weights do not change.
        if is_stale:
            fragments = [self._fragments[i] for i in self._owned]
            maxima = [of_weights[i] for i in self._owned]
            self._format.add_maxima(fragments, maxima, through=self._through)
        if self.has_pending:
            pending.copy_(torch.cat([state.pending() for state in self.states]))

    def take_maxima(self, combined: torch.Tensor, *, is_stale: bool, is_step: bool = True) -> None:
        """Roll the histories, and fill the tables of weights that have changed.

        Args:
            combined: The maximum over ranks of what :meth:`add_maxima` wrote.
            is_stale: As for :meth:`add_maxima`.
            is_step: Whether it was a step that changed the weights.
        """
        *maxima, pending = self._split(combined)
        if self.states:
            if not self.has_pending:
                pending = pending.new_zeros(NUM_PENDING * len(self.states))
            # Weights that have not changed have zeros here, which leave their history alone.
            roll_together(self.states, maxima, pending.split(NUM_PENDING), is_step=is_step)
            maxima = [state.weight_maximum() for state in self.states]
        if is_stale:
            self._maxima = maxima
            self._format.fill_tables(self._shapes, maxima, self.tables)

    def forget_maxima(self) -> None:
        """Drop the maxima after the encoding."""
        self._maxima = []

    def encode(self, target: DBuffer) -> None:
        """Fill a buffer of codes that is cut like the main weight."""
        assert self._maxima, "maxima are combined before weights are encoded"
        self._format.encode(
            [self._fragments[i] for i in self._owned],
            [self._maxima[i] for i in self._owned],
            [target.tensor(i) for i in self._owned],
            through=self._through,
        )

    def _split(self, combined: torch.Tensor) -> list[torch.Tensor]:
        """Return the maxima of each weight, then the recorded ones, which may be empty."""
        return list(combined.split([*self._sizes, self.num_maxima - sum(self._sizes)]))


class QuantizedWeight(GatheredWeight):
    """Codes and tables of one group's compute weight.

    Args:
        quantization: The recipe and its options.
        main_weight: The group's main weight, a shard or the whole.
        shapes: Shapes of the weights, of this rank's parts on a model axis.
        dtype: The dtype that codes are decoded to.
        axes: Ranks that divide or replicate the group.
        stays_gathered: Whether the strategy keeps the full codes between uses.
        device: Where the buffers live.
        ledger: Counts their bytes.

    Attributes:
        scales: Tables, maxima and histories.
    """

    def __init__(
        self,
        quantization: Quantization,
        main_weight: DBuffer,
        shapes: Sequence[tuple[int, ...]],
        *,
        dtype: torch.dtype,
        axes: DataParallelAxes,
        stays_gathered: bool,
        device: torch.device,
        ledger: ByteLedger,
    ) -> None:
        self._quantization, self._dtype = quantization, dtype
        self.scales = WeightScales(quantization, main_weight, shapes, device=device, ledger=ledger)
        is_persistent = stays_gathered or not axes.is_sharded
        buffers = WeightBuffers(
            main_weight,
            axes,
            torch.uint8,
            numel_per_element=quantization.recipe.weight.codes_per_byte,
            device=device,
            ledger=ledger,
        )
        category = Category.COMPUTE_WEIGHT if is_persistent else Category.UNSHARDED
        full = buffers.new_full(category)
        # A method of the scales: one of this object would be a cycle and delay freeing memory.
        encode = self.scales.encode
        source: GatherSource
        if not axes.is_sharded:
            source = PersistentSource(full, encode)
        elif axes.is_divided:
            # Only the join reads it, once a step.
            source = TemporarySource(buffers.new_piece, encode)
        else:
            # Encoded once a step but gathered in every microbatch: keep this rank's 1/N of codes.
            source = PersistentSource(buffers.new_piece(), encode)
        super().__init__(
            full,
            joined(source, buffers, axes),
            buffers,
            axes=axes,
            stays_gathered=stays_gathered,
            is_gathered=axes.is_sharded,
        )

    @property
    def quantization(self) -> Quantization:
        """Return how the weight is quantized."""
        return self._quantization

    @property
    def needs_maxima(self) -> bool:
        """Return whether the next encoding must first agree with other ranks."""
        return self.is_stale

    @property
    def joins_refresh(self) -> bool:
        """Return whether the group takes part when maxima of the model are combined."""
        return self.is_stale or self.scales.has_pending

    def add_maxima(self, combined: torch.Tensor) -> None:
        """Write this rank's maxima into ``(scales.num_maxima,)`` int32 zeros; local."""
        self.scales.add_maxima(combined, is_stale=self.is_stale)

    def refresh_from(self, combined: torch.Tensor) -> None:
        """Encode changed weights by maxima over all ranks; issues the same as :meth:`refresh`."""
        # Read the flag first: the refresh clears it.
        is_stale = self.is_stale
        self.scales.take_maxima(combined, is_stale=is_stale, is_step=not self.is_set)
        if is_stale:
            self.refresh()
            self.scales.forget_maxima()

    def assemble(
        self, index: int, shape: torch.Size, name: str, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return tensor ``index``: its codes and its table, which are refilled in place."""
        states = self.scales.states
        return QuantizedTensor(
            self._full.tensor(index).data,
            self.scales.tables[index].data,
            recipe=self._quantization.recipe,
            shape=shape,
            dtype=self._dtype,
            state=states[index] if states else None,
            fqn=name,
        )


def _fragments_of(main_weight: DBuffer, shapes: Sequence[tuple[int, ...]]) -> list[Fragment]:
    """Return this rank's rows of each weight."""
    fragments = []
    for index, shape in enumerate(shapes):
        start = 0
        if main_weight.residence is Residence.SHARD:
            start, _ = main_weight.layout.owned_range(index, main_weight.shard)
        fragments.append(Fragment(main_weight.tensor(index), shape, start // shape[-1]))
    return fragments


def _new_states(
    history: int, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> list[DelayedState]:
    if not history:
        return []
    # Each expert has its own scale, hence its own history.
    counts = [shape[0] if len(shape) == 3 else 1 for shape in shapes]
    return [DelayedState(history, num_matrices=count, device=device) for count in counts]


def _history_nbytes(state: DelayedState) -> int:
    histories = (state.weight_history, state.input_history, state.grad_history)
    return sum(history.nbytes for history in histories)
