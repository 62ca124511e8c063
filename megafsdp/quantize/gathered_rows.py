"""The hooks by which torch's FSDP2 gathers a quantized parameter.

torch asks the local tensor of each parameter before a gather what to gather, and afterwards what to
make of it. Here that is codes and, where rows have scales of their own, these scales:

    rank 0    codes of rows   0..127    scales of tile row 0
    rank 1    codes of rows 128..255    scales of tile row 1
    gathered  codes of rows   0..255    scales of tile rows 0, 1     the compute weight

In later gathers torch fills the same memory again, so nothing is left to do, unless a table has
more than the scales of tiles. The parameter itself is in shard.py.
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
        source: What is copied there.
        index: In place of a source, which of the gathered tensors is copied.
    """

    target: Tensor
    source: Tensor | None = None
    index: int = -1


@dataclass(slots=True)
class Gather:
    """What is found in the first gather of a parameter and used in each.

    Attributes:
        inputs: Views of codes, and of scales that rows have of their own.
        num_missing: Rows that this rank has less than others; they are filled up.
        copies: What is copied after a gather; None before the first.
    """

    inputs: tuple[Tensor, ...] = ()
    num_missing: int = 0
    copies: tuple[_Copy, ...] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Gather:
        """Return another one that has found nothing."""
        return Gather()


class GatheredRows(QuantizedTensor):
    """Rows of a weight, which torch gathers to the whole."""

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

        The last ranks may have fewer rows, whose place is filled up, where rows have no scales.
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
        """Make the compute weight over what was gathered, once; later fill what is not gathered.

        A scale of a whole matrix is read where this rank keeps it. torch frees what is gathered,
        and the table if it has been made beside.
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
        # One rank is given the codes alone, and has all scales itself.
        if len(outputs) > 1:
            nbytes, scales = form.table_nbytes(shape), self.scales()
            is_table = len(outputs) == 2 and not scales.shared and outputs[1].numel() == nbytes
            table = outputs[1].view(-1) if is_table else table.new_zeros(nbytes)
        return make(
            QuantizedTensor,
            Fields(codes, table, self.recipe, shape, dtype, self.state, self.fqn),
        )

    def _find_copies(self, made: QuantizedTensor, outputs: tuple[Tensor, ...]) -> tuple[_Copy, ...]:
        """Keep views of what each gather fills; nothing else is made after the first."""
        self._gather.copies = tuple(self._copies(made, outputs))
        return self._gather.copies

    def _copies(self, made: QuantizedTensor, outputs: tuple[Tensor, ...]) -> Iterator[_Copy]:
        if len(outputs) == 1:
            # Another tensor may have come into the place of the one that the table was taken from.
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
