"""Row layouts: a text that says what the rows of a tensor hold, and the matching of two layouts.

A layout names blocks of rows in their order; a repetition encloses blocks that repeat. Two groups
of two query heads each, with the key and value of their group, are::

    groups(heads(q) k v)    q00 q01 k0 v0 | q10 q11 k1 v1
    groups(heads(q))        q00 q01 q10 q11

Blocks of two layouts match if their names and their indices in each repetition are equal. So the
layout of one of our tensors, and those of the Hugging Face tensors with the same blocks, give the
place of each row on both sides. Tensor names and the layouts of each model are in mapping.py;
nothing here touches a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megafsdp.errors import CheckpointError

# The name of a block and its index in each repetition around it, the outermost first.
_Block = tuple[str, tuple[int, ...]]
# A block, or a repetition: its name and the items that it repeats.
_Item = str | tuple[str, "tuple[_Item, ...]"]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows that are consecutive on both sides.

    Attributes:
        part: Index of the Hugging Face tensor.
        their_start: First row in that tensor; first column if it is stored transposed.
        our_start: First row in our tensor.
        num_rows: Number of rows.
    """

    part: int
    their_start: int
    our_start: int
    num_rows: int

    @property
    def theirs(self) -> slice:
        """Return the rows in the Hugging Face tensor."""
        return slice(self.their_start, self.their_start + self.num_rows)

    @property
    def ours(self) -> slice:
        """Return the rows in our tensor."""
        return slice(self.our_start, self.our_start + self.num_rows)


@dataclass(frozen=True, slots=True)
class Part:
    """The layout of one Hugging Face tensor.

    Attributes:
        layout: Its blocks, in the form of the module's docstring.
        index: Index in the repetitions around the whole tensor, i.e. of the expert it belongs to.
    """

    layout: str
    index: tuple[int, ...] = ()


def match_rows(
    ours: str, parts: Sequence[Part], sizes: Mapping[str, int], num_rows: int
) -> tuple[tuple[int, ...], tuple[RowRun, ...]]:
    """Find the rows of one of our tensors in the Hugging Face tensors.

    Args:
        ours: Layout of our tensor.
        parts: Layouts of the Hugging Face tensors. Blocks of ours in none of them are padding.
        sizes: Count of each repetition, and rows of each block, by name. Blocks without a size
            divide the remaining rows equally.
        num_rows: Rows of our tensor.

    Returns:
        The number of rows of each part, and the runs in the order of our rows.

    Raises:
        CheckpointError: The layout does not add up to ``num_rows``.
    """
    blocks = list(_blocks(_parse(ours), sizes, ()))
    sizes = _with_free_blocks(blocks, sizes, num_rows)
    if sum(sizes[name] for name, _ in blocks) != num_rows:
        raise CheckpointError.expected(
            f"{sum(sizes[name] for name, _ in blocks)} rows for '{ours}'",
            num_rows,
            where="a tensor to be mapped between Hugging Face's layout and ours",
            hint="Take the sizes from the config of the model that the weights belong to",
        )
    places: dict[_Block, tuple[int, int]] = {}
    part_rows = []
    for index, part in enumerate(parts):
        start = 0
        for block in _blocks(_parse(part.layout), sizes, part.index):
            places[block] = (index, start)
            start += sizes[block[0]]
        part_rows.append(start)
    runs: list[RowRun] = []
    our_start = 0
    for block in blocks:
        rows = sizes[block[0]]
        if block in places:
            _append(runs, RowRun(*places[block], our_start, rows))
        our_start += rows
    return tuple(part_rows), tuple(runs)


def _append(runs: list[RowRun], run: RowRun) -> None:
    """Add a run; if it continues the last run on both sides, merge them."""
    last = runs[-1] if runs else None
    if last is not None and (last.part, last.theirs.stop, last.ours.stop) == (
        run.part,
        run.their_start,
        run.our_start,
    ):
        run = RowRun(last.part, last.their_start, last.our_start, last.num_rows + run.num_rows)
        runs.pop()
    runs.append(run)


def _with_free_blocks(
    blocks: Sequence[_Block], sizes: Mapping[str, int], num_rows: int
) -> Mapping[str, int]:
    free = [name for name, _ in blocks if name not in sizes]
    taken = sum(sizes.get(name, 0) for name, _ in blocks)
    return {**sizes, **dict.fromkeys(free, (num_rows - taken) // max(1, len(free)))}


def _parse(layout: str) -> tuple[_Item, ...]:
    return _items(iter(re.findall(r"\w+\(?|\)", layout)))


def _items(tokens: Iterator[str]) -> tuple[_Item, ...]:
    found: list[_Item] = []
    for token in tokens:
        if token == ")":
            break
        found.append((token[:-1], _items(tokens)) if token.endswith("(") else token)
    return tuple(found)


def _blocks(
    items: Sequence[_Item], sizes: Mapping[str, int], index: tuple[int, ...]
) -> Iterator[_Block]:
    for item in items:
        if isinstance(item, str):
            yield item, index
        else:
            name, body = item
            for i in range(sizes[name]):
                yield from _blocks(body, sizes, (*index, i))
