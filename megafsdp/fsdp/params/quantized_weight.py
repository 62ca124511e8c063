"""A compute weight of codes, and the scales that every rank derives for itself.

Only codes are gathered. A scale is a function of the largest magnitude in its tile of the whole
matrix, so each rank computes the maxima of the rows that it has, the maximum over ranks is taken
for all groups of a model at once (:mod:`megafsdp.fsdp.runtime.agreement`), and each rank fills the
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
    """The tables of scales of one group's weights, and what they are made of; local.

    Args:
        quantization: The recipe, and what is quantized.
        main_weight: The group's main weight, a shard or the whole.
        shapes: Of the weights, as this rank of a model axis has them.
        device: Where the tables live.
        ledger: Counts their bytes.

    Attributes:
        states: The histories of the weights, in order; none unless the recipe has some.
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
        # Ranks without rows of a weight have its maxima from the others.
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
        # What weights are encoded by, between the collective and the encoding.
        self._maxima: list[torch.Tensor] = []

    def __del__(self) -> None:
        """Count the histories as freed."""
        # A constructor that failed has counted nothing.
        if hasattr(self, "_state_nbytes"):
            self._ledger.credit(Category.SCALES, self._state_nbytes)

    def add_maxima(self, combined: torch.Tensor, *, is_stale: bool) -> None:
        """Write this rank's maxima: of its rows of the weights, then what layers have recorded.

        Args:
            combined: ``(num_maxima,)`` int32 bits of magnitudes, zero.
            is_stale: Whether weights have changed; the maxima of others stay zero.
        """
        *of_weights, pending = self._split(combined)
        # A frozen group has what its layers record, though its weights do not change.
        if is_stale:
            fragments = [self._fragments[i] for i in self._owned]
            maxima = [of_weights[i] for i in self._owned]
            self._format.add_maxima(fragments, maxima, through=self._through)
        if self.has_pending:
            pending.copy_(torch.cat([state.pending() for state in self.states]))

    def take_maxima(self, combined: torch.Tensor, *, is_stale: bool, is_step: bool = True) -> None:
        """Roll the histories, and fill the tables of weights that have changed.

        Args:
            combined: What :meth:`add_maxima` wrote, its maximum over ranks.
            is_stale: As there.
            is_step: Whether a step has changed the weights, if they have changed.
        """
        *maxima, pending = self._split(combined)
        if self.states:
            if not self.has_pending:
                pending = pending.new_zeros(NUM_PENDING * len(self.states))
            # Zeros of weights that have not changed leave their history alone.
            roll_together(self.states, maxima, pending.split(NUM_PENDING), is_step=is_step)
            maxima = [state.weight_maximum() for state in self.states]
        if is_stale:
            self._maxima = maxima
            self._format.fill_tables(self._shapes, maxima, self.tables)

    def forget_maxima(self) -> None:
        """Drop the maxima: what they were for is encoded."""
        self._maxima = []

    def encode(self, target: DBuffer) -> None:
        """Fill a buffer of codes that lies like the main weight."""
        assert self._maxima, "maxima are combined before weights are encoded"
        self._format.encode(
            [self._fragments[i] for i in self._owned],
            [self._maxima[i] for i in self._owned],
            [target.tensor(i) for i in self._owned],
            through=self._through,
        )

    def _split(self, combined: torch.Tensor) -> list[torch.Tensor]:
        """Return the maxima of each weight, and what was recorded, perhaps nothing."""
        return list(combined.split([*self._sizes, self.num_maxima - sum(self._sizes)]))


class QuantizedWeight(GatheredWeight):
    """Codes and tables of one group's compute weight.

    Args:
        quantization: The recipe, and what is quantized.
        main_weight: The group's main weight, a shard or the whole.
        shapes: Of the weights, as this rank of a model axis has them.
        dtype: What codes are decoded to.
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
        # Of the scales and not of this object: a cycle would delay the release of memory.
        encode = self.scales.encode
        source: GatherSource
        if not axes.is_sharded:
            source = PersistentSource(full, encode)
        elif axes.is_divided:
            # Needed for the join alone, once a step.
            source = TemporarySource(buffers.new_piece, encode)
        else:
            # Encoded once a step and gathered in every microbatch: 1/N of the codes are kept.
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
        """Return whether the group has maxima to combine when any group of the model has."""
        return self.is_stale or self.scales.has_pending

    def add_maxima(self, combined: torch.Tensor) -> None:
        """Write this rank's maxima, ``(scales.num_maxima,)`` int32 that are zero; local."""
        self.scales.add_maxima(combined, is_stale=self.is_stale)

    def refresh_from(self, combined: torch.Tensor) -> None:
        """Encode the weights if they have changed, by maxima over all ranks; as :meth:`refresh`."""
        # Read first: the refresh clears it.
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
    # An expert has a scale of its own, hence a history.
    counts = [shape[0] if len(shape) == 3 else 1 for shape in shapes]
    return [DelayedState(history, num_matrices=count, device=device) for count in counts]


def _history_nbytes(state: DelayedState) -> int:
    histories = (state.weight_history, state.input_history, state.grad_history)
    return sum(history.nbytes for history in histories)
