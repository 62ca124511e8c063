"""The hooks by which torch's FSDP2 gathers a quantized parameter.

Before an all-gather, torch asks the local tensor of each parameter what to gather, and afterwards
what to make of it. Here that is codes and, if rows have scales of their own, these scales:

    rank 0    codes of rows   0..127    scales of tile row 0
    rank 1    codes of rows 128..255    scales of tile row 1
    gathered  codes of rows   0..255    scales of tile rows 0, 1     the compute weight

In later gathers torch fills the same memory again, so nothing is left to do, unless the table also
has scales that are not gathered. The parameter itself is in shard.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafsdp.quantize.formats import ScalesOfRows
from megafsdp.quantize.tensor import Fields, QuantizedTensor, make


@dataclass(slots=True)
class _Copy:
    """A part of the compute weight's table that each gather fills.

    Attributes:
        target: The part; aliases the table.
        source: The tensor to copy, or None.
        index: If there is no source: the index of the gathered tensor to copy.
    """

    target: Tensor
    source: Tensor | None = None
    index: int = -1


@dataclass(slots=True)
class Gather:
    """Facts that the first gather of a parameter finds and each one uses.

    Attributes:
        inputs: Views of codes, and of scales that rows have of their own.
        num_missing: Number of rows that this rank lacks compared to others; they are padded.
        copies: Copies to make after a gather; None before the first.
    """

    inputs: tuple[Tensor, ...] = ()
    num_missing: int = 0
    copies: tuple[_Copy, ...] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Gather:
        """Return a new, empty one."""
        return Gather()


class GatheredRows(QuantizedTensor):
    """Rows of a weight, which torch all-gathers to the whole weight."""

    _gather: Gather

    def scales(self) -> ScalesOfRows:
        """Return the scales in the table; aliases."""
        form, shape = self.recipe.weight, self.stored_shape
        return form.scales_of_rows(self.table, shape, 0, shape[0])

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor, ...], torch.Size]:
        """Return what torch gathers, uint8 of this rank's rows; local, called in each unshard.

        If rows have no scales of their own, the last ranks may have fewer rows, which are padded.
        """
        gather = self._gather
        if not gather.inputs:
            gather.inputs = self._find_inputs()
            gather.num_missing = -(-outer_size[0] // mesh.size()) - self.stored_shape[0]
        if gather.num_missing:
            padding = (0, 0, 0, gather.num_missing)
            return tuple(F.pad(each, padding) for each in gather.inputs), outer_size
        return gather.inputs, outer_size

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        outer_size: torch.Size,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the compute weight over the gathered memory, once; later fill what is not gathered.

        A scale of a whole matrix is read from this rank's own table. torch frees the gathered
        memory, and also the table if it was allocated separately.
        """
        copies, made = self._gather.copies, None
        if out is None:
            made = self._new_gathered(outputs, tuple(outer_size), param_dtype)
            copies = self._find_copies(made, outputs)
        elif copies is None:
            face = out if isinstance(out, QuantizedTensor) else out.to_local()  # type: ignore[attr-defined]
            copies = self._find_copies(face, outputs)
        for each in copies or ():
            each.target.copy_(outputs[each.index] if each.source is None else each.source)
        if made is None:
            return None
        is_beside = bool(copies) and made.table is not self.table
        return made, (made.table,) if is_beside else ()

    def _find_inputs(self) -> tuple[Tensor, ...]:
        own = [each.view(torch.uint8).view(each.shape[0], -1) for each in self.scales().own]
        return self.codes.view(self.stored_shape[0], -1), *own

    def _new_gathered(
        self, outputs: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> QuantizedTensor:
        form, table = self.recipe.weight, self.table
        codes = outputs[0].view(-1)[: torch.Size(shape).numel() // form.codes_per_byte]
        # A single rank gets only the codes from torch; then its own table has all scales.
        if len(outputs) > 1:
            nbytes, scales = form.table_nbytes(shape), self.scales()
            is_table = len(outputs) == 2 and not scales.shared and outputs[1].numel() == nbytes
            table = outputs[1].view(-1) if is_table else table.new_zeros(nbytes)
        return make(
            QuantizedTensor,
            Fields(codes, table, self.recipe, shape, dtype, self.state, self.fqn),
        )

    def _find_copies(self, made: QuantizedTensor, outputs: tuple[Tensor, ...]) -> tuple[_Copy, ...]:
        """Find, once, the copies that each gather makes, and keep them."""
        self._gather.copies = tuple(self._copies(made, outputs))
        return self._gather.copies

    def _copies(self, made: QuantizedTensor, outputs: tuple[Tensor, ...]) -> Iterator[_Copy]:
        if len(outputs) == 1:
            # The parameter may have been replaced since, and with it the table.
            if made.table is not self.table:
                yield _Copy(made.table, self.table)
            return
        if made.table.data_ptr() == outputs[1].data_ptr():
            return
        shape = made.stored_shape
        found = self.recipe.weight.scales_of_rows(made.table, shape, 0, shape[0])
        for index, each in enumerate(found.own, start=1):
            yield _Copy(each.view(torch.uint8).view(outputs[index].shape), index=index)
        for target, source in zip(found.shared, self.scales().shared, strict=True):
            yield _Copy(target, source)
