"""Compare two checkpoints: names, shapes, dtypes, values and objects, one tensor at a time.

By default values are compared bit by bit, so that NaNs of equal bits are equal and 0.0 differs from
-0.0; with a tolerance they are compared as ``torch.isclose`` does, NaNs being equal. It does not
matter how tensors are cut into chunks and files, or whether a fused parameter is stored whole or in
parts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from megafsdp.checkpoint.format.manifest import dtype_name
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.report import Report

# Elements compared at a time; a comparison needs a few arrays of this size.
_PIECE_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs.

    Attributes:
        key: Its key.
        shapes: Its shape in A and in B.
        dtypes: Its dtype in A and in B.
        num_different: Number of elements that differ; 0 if only the dtypes differ, None if the
            shapes do.
        numel: Number of elements.
        max_abs_difference: The largest difference; NaN if only one side is NaN somewhere.
        first_index: Index of the first element that differs.
        first_values: That element in A and in B.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    num_different: int | None = None
    numel: int = 0
    max_abs_difference: float | None = None
    first_index: tuple[int, ...] | None = None
    first_values: tuple[float | complex, float | complex] | None = None

    def describe(self) -> str:
        """Return the difference as one line."""
        facts = []
        if self.shapes[0] != self.shapes[1]:
            facts.append(f"shape {list(self.shapes[0])} and {list(self.shapes[1])}")
        if self.dtypes[0] != self.dtypes[1]:
            facts.append(f"{self.dtypes[0]} and {self.dtypes[1]}")
        if self.first_index is not None and self.first_values is not None:
            left, right = self.first_values
            facts.append(
                f"{self.num_different:,} of {self.numel:,} elements, by at most "
                f"{self.max_abs_difference:.4g}; first at {list(self.first_index)}: "
                f"{left!r} and {right!r}"
            )
        return f"{self.key}: {', '.join(facts)}"


@dataclass(frozen=True, slots=True)
class DiffReport(Report):
    """All differences between two checkpoints.

    Attributes:
        left: Directory of A.
        right: Directory of B.
        only_left: Keys that only A has.
        only_right: Keys that only B has.
        tensors: Tensors of both that differ.
        objects: Objects of both that differ: key -> where and how.
        num_equal: Number of tensors and objects that are equal.
    """

    left: str
    right: str
    only_left: tuple[str, ...] = ()
    only_right: tuple[str, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    objects: dict[str, str] = field(default_factory=dict)
    num_equal: int = 0

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not (self.only_left or self.only_right or self.tensors or self.objects)

    def verdict(self) -> dict[str, bool]:
        """Return the entries of the JSON report beside the fields."""
        return {"is_equal": self.is_equal}

    def lines(self) -> list[str]:
        """Return one line for each difference, and a summary as the last line."""
        lines = [f"only in A: {key}" for key in self.only_left]
        lines += [f"only in B: {key}" for key in self.only_right]
        lines += [tensor.describe() for tensor in self.tensors]
        lines += [f"{key}: {how}" for key, how in self.objects.items()]
        num = len(lines)
        summary = f"{num} difference{'s' if num > 1 else ''}" if num else "equal"
        equal = "1 key is equal" if self.num_equal == 1 else f"{self.num_equal} keys are equal"
        last = f"A {self.left}, B {self.right}: {summary}; {equal}"
        return [*lines, last]


def diff(
    left: str | os.PathLike[str],
    right: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore: Sequence[str] = (),
    show_progress: bool = False,
) -> DiffReport:
    """Compare two checkpoints; local, with one tensor of each in memory at a time.

    Args:
        left: A: a save root (its latest step is taken), or one checkpoint's own directory.
        right: B, likewise.
        rtol: Tolerance relative to B's elements.
        atol: Absolute tolerance; with both 0 the comparison is bitwise.
        ignore: Patterns (``fnmatch``) of keys to leave out, such as ``"rng.*"``.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    with CheckpointReader(left) as a, CheckpointReader(right) as b:
        in_a, in_b = (_names(side, other, ignore) for side, other in ((a, b), (b, a)))
        tensors, objects = [], {}
        common = [key for key in in_a if key in in_b]
        total_nbytes = sum(_nbytes(a, key) for key in common)
        with bytes_bar("diff", total_nbytes, is_wanted=show_progress) as bar:
            for key in common:
                how = _difference(a, b, key, rtol=rtol, atol=atol)
                if isinstance(how, str):
                    objects[key] = how
                elif how is not None:
                    tensors.append(how)
                bar.update(_nbytes(a, key))
        return DiffReport(
            left=str(a.directory),
            right=str(b.directory),
            only_left=tuple(key for key in in_a if key not in in_b),
            only_right=tuple(key for key in in_b if key not in in_a),
            tensors=tuple(tensors),
            objects=objects,
            num_equal=len(common) - len(tensors) - len(objects),
        )


def _aliases(side: CheckpointReader, other: CheckpointReader) -> dict[str, str]:
    return side.manifest.aliases if side.fused == other.fused else side.whole_aliases()


def _names(side: CheckpointReader, other: CheckpointReader, ignore: Sequence[str]) -> list[str]:
    # If only one side has parts, the two can only be compared as wholes.
    keys = side.keys() if side.fused == other.fused else side.whole_keys()
    names = dict.fromkeys([*keys, *_aliases(side, other), *side.manifest.objects])
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignore)]


def _nbytes(reader: CheckpointReader, key: str) -> int:
    record = reader.manifest.objects.get(key)
    return reader.nbytes(key) if record is None else record.nbytes


def _difference(
    a: CheckpointReader, b: CheckpointReader, key: str, *, rtol: float, atol: float
) -> TensorDifference | str | None:
    """Return the difference of one tensor or object; None if there is none."""
    are_objects = [key in side.manifest.objects for side in (a, b)]
    if are_objects == [True, True]:
        return _object_difference(a.object(key), b.object(key), key)
    if any(are_objects):
        kinds = ["an object" if is_object else "a tensor" for is_object in are_objects]
        return f"{kinds[0]} in A and {kinds[1]} in B"
    tied_to = _aliases(a, b).get(key)
    if tied_to is not None and tied_to == _aliases(b, a).get(key):
        # The tensor that it is tied to is compared.
        return None
    if a.shape(key) != b.shape(key):
        dtypes = dtype_name(a.dtype(key)), dtype_name(b.dtype(key))
        return TensorDifference(key, (a.shape(key), b.shape(key)), dtypes)
    return compare(key, a.tensor(key), b.tensor(key), rtol=rtol, atol=atol)


def compare(
    key: str, a: torch.Tensor, b: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> TensorDifference | None:
    """Compare two CPU tensors of one shape piece by piece; None if they are equal.

    Args:
        key: Their name.
        a: The tensor of A.
        b: The tensor of B; if its dtype differs, elements are compared by value.
        rtol: Tolerance relative to B's elements.
        atol: Absolute tolerance; with both 0, equal dtypes are compared bit by bit.
    """
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    num_different, largest, first = 0, 0.0, None
    for start in range(0, a.numel(), _PIECE_NUMEL):
        x, y = flat_a[start : start + _PIECE_NUMEL], flat_b[start : start + _PIECE_NUMEL]
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        is_bitwise = x.dtype == y.dtype and not rtol and not atol
        wide_x, wide_y = _wide(x), _wide(y)
        if is_bitwise:
            odd = (_bits(x) != _bits(y)).any(dim=1)
        else:
            odd = ~torch.isclose(wide_x, wide_y, rtol=rtol, atol=atol, equal_nan=True)
        if not odd.any():
            continue
        if first is None:
            first = start + int(odd.nonzero()[0])
        num_different += int(odd.sum())
        piece_largest = (wide_x[odd] - wide_y[odd]).abs().max().item()
        largest = math.nan if math.isnan(piece_largest + largest) else max(largest, piece_largest)
    if first is None and a.dtype == b.dtype:
        return None
    shape = tuple(a.shape)
    return TensorDifference(
        key,
        shapes=(shape, shape),
        dtypes=(dtype_name(a.dtype), dtype_name(b.dtype)),
        num_different=num_different,
        numel=a.numel(),
        max_abs_difference=largest,
        first_index=None if first is None else _index(first, shape),
        first_values=None if first is None else (_value(flat_a[first]), _value(flat_b[first])),
    )


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def _wide(flat: torch.Tensor) -> torch.Tensor:
    return flat.to(torch.complex128 if flat.is_complex() else torch.float64)


def _index(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        offset, i = divmod(offset, extent)
        index.append(i)
    return tuple(reversed(index))


def _value(element: torch.Tensor) -> float | complex:
    return element.item() if not element.is_floating_point() else element.double().item()


def _object_difference(a: object, b: object, path: str) -> str | None:
    """Return where two structures of plain values first differ, and how."""
    if type(a) is not type(b):
        return f"at {path}: {_short(a)} and {_short(b)}"
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), "of one type"
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"at {path}: {_short(a)} and {_short(b)}"
        tensor = compare(path, a, b)
        return None if tensor is None else tensor.describe()
    if isinstance(a, dict):
        assert isinstance(b, dict), "of one type"
        for side, own, other in (("A", a, b), ("B", b, a)):
            if alone := [key for key in own if key not in other]:
                return f"at {path}: {alone[:20]} only in {side}"
        return _first(_object_difference(a[key], b[key], f"{path}[{key!r}]") for key in a)
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple), "of one type"
        if len(a) != len(b):
            return f"at {path}: {len(a)} and {len(b)} items"
        pairs = enumerate(zip(a, b, strict=True))
        return _first(_object_difference(x, y, f"{path}[{i}]") for i, (x, y) in pairs)
    # As with tensors, NaN equals itself and 0.0 is not -0.0; the text of a float is exact.
    return None if repr(a) == repr(b) else f"at {path}: {_short(a)} and {_short(b)}"


def _first(differences: Iterator[str | None]) -> str | None:
    return next((how for how in differences if how is not None), None)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {dtype_name(value.dtype)} tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
