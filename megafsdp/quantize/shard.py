"""A quantized parameter: the codes of this rank's rows of a weight, or of all in a plain model.

Our engine makes compute weights from fp32 parameters; under torch's FSDP2 the parameter itself is
quantized. So here, unlike in tensor.py, the tensor owns its buffers: it can be cut along tiles,
cloned, copied from another one of its format, moved, pickled and gathered.

| call | result |
|---|---|
| ``detach``, ``alias``, ``view`` or ``as_strided`` of the same shape | the same buffers |
| ``view(-1)`` | the same buffers, shown flat |
| ``split``, ``chunk``, ``narrow``, ``w[a:b]`` along dim 0, between tiles | the same codes |
| ``narrow``, ``w[:, a:b]`` of a matrix along dim 1, between tiles | quantized, codes copied |
| ``clone``, ``deepcopy``, ``.cpu()``, ``.to(device)``, ``pin_memory`` | quantized, buffers copied |
| ``deepcopy``, ``.to(device)`` or a pickle of a plain model's parameter | its main weight too |
| ``new_empty``, ``empty_like`` of as long rows | quantized, new buffers |
| ``new_zeros`` of as long rows | likewise, with the same main weight: torch pads rows this way |
| ``copy_`` of a quantized tensor of the format and shape | the bytes are copied |
| ``is_pinned`` | whether the codes are |
| ``zeros_like``; the above with another dtype, or through a tile | plain |
| ``narrow`` through a tile | RuntimeError: torch's loads write to what they narrow |
| any other operator | computes with decoded values |
| ``copy_`` of floats or of another format, any other write | RuntimeError, nothing is changed |

A cut keeps the scales from when it was made. A copy to a cut is also written to the whole weight,
including the scales that rows share, so the source's scale must be for a matrix of the same shape.
All other behavior is in tensor.py, and torch's hooks for gathers are in gathered_rows.py. No tensor
has a process group.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megafsdp.device.torch_private import OpOverload
from megafsdp.errors import expected
from megafsdp.quantize.delayed import DelayedState
from megafsdp.quantize.formats import ScalesOfRows
from megafsdp.quantize.gathered_rows import Gather, GatheredRows
from megafsdp.quantize.main_weight import MainWeight
from megafsdp.quantize.recipes import RECIPE_NAMES, QuantizationRecipe, recipe_of
from megafsdp.quantize.tensor import (
    Fields,
    Part,
    QuantizedTensor,
    check,
    make,
    viewed_shape,
)

_aten = torch.ops.aten
_PAYLOAD_VERSION = 1
_DAMAGED = "The file is damaged: load another copy"


class _Outer(NamedTuple):
    """The place of a cut in the whole weight; copies to the cut are written there too.

    Attributes:
        codes: The cut's codes in the whole, ``(rows, bytes)``; None if the cut aliases them.
        scales: The cut's scales in the whole, own and shared.
    """

    codes: Tensor | None
    scales: ScalesOfRows


class QuantizedShard(GatheredRows):
    """Rows of a weight over buffers of its own; make it with :func:`new_shard`.

    Attributes:
        main: The main weight that the codes are made from; None for copies.
        scale_shape: Shape of the matrix that shares one scale, of which the rows may be a part;
            empty if there is none.
    """

    main: MainWeight | None
    scale_shape: tuple[int, ...]
    _outer: _Outer | None

    def with_part(self, part: Part) -> QuantizedTensor:
        """Make another object over the same buffers; one matrix of a stack is no parameter."""
        if part.matrix is not None or part.is_transposed:
            return super().with_part(part)
        return _over(self, part, self.main, self._outer, self.scale_shape)

    def refusal(self, what: str) -> RuntimeError:
        """Return the error for a write to the parameter, whose values are in the main weight."""
        return RuntimeError(
            expected(
                "values by megafsdp.requantize_(), or steps of megafsdp.FusedAdam",
                f"{what}, on codes that are made from fp32 main weights",
                where=f"the quantized parameter '{self.fqn}' of shape {tuple(self.stored_shape)}",
                hint="Call requantize_(model, values) on all ranks, build FusedAdam over "
                "model.parameters(), and give DistributedDataParallel init_sync=False",
            )
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check a narrow(), to which loads write; run the rest as for any quantized tensor."""
        if func is Tensor.narrow and isinstance(args[0], QuantizedShard):
            _check_narrow(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operators of a parameter on its buffers, the rest as for any quantized tensor."""
        run = _OPERATORS.get(func)
        if run is not None and isinstance(args[0], QuantizedShard):
            result = run(*args, **(kwargs or {}))
            if result is not None:
                return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        """Return what any quantized tensor returns, and the shape of the shared scale."""
        names, rest = super().__tensor_flatten__()
        return names, (*rest, self.scale_shape)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], rest: tuple[Any, ...], size: object, stride: object
    ) -> QuantizedShard:
        """Make a parameter over other buffers, as the compiler does; it has no main weight."""
        recipe, stored_shape, dtype, part, scale_shape = rest
        fields = Fields(inner["codes"], inner["table"], recipe, stored_shape, dtype, None, "")
        return _over(fields, part, None, None, scale_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy buffers, histories, gradient, and, for a plain model, the main weight."""
        made = _clone(self)
        made.main = _copied_main(self, lambda values: copy.deepcopy(values, memo))
        copied: Tensor = nn.Parameter(made) if isinstance(self, nn.Parameter) else made
        copied.requires_grad_(self.requires_grad)
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle buffers and plain values, to be rebuilt by one named function."""
        state = self.state
        histories = None if state is None else tuple(h.clone() for h in state.histories())
        main = _copied_main(self, _compact)
        description = {
            "codes": _compact(self.codes),
            "table": _compact(self.table),
            "recipe": _described(self.recipe),
            "quantizes_activations": self.recipe.input is not None,
            "shape": tuple(self.stored_shape),
            "scale_shape": self.scale_shape,
            "dtype": str(self.value_dtype).removeprefix("torch."),
            "name": self.fqn,
            "is_flat": self._part.is_flat,
            "is_parameter": isinstance(self, nn.Parameter),
            "requires_grad": self.requires_grad,
            "histories": histories,
            "main_weight": None if main is None else main.values,
        }
        return rebuild_quantized, (_PAYLOAD_VERSION, description)


def new_shard(
    shape: Sequence[int],
    recipe: QuantizationRecipe,
    *,
    dtype: torch.dtype,
    device: torch.device,
    state: DelayedState | None = None,
    fqn: str = "",
    main: MainWeight | None = None,
    scale_shape: Sequence[int] | None = None,
) -> QuantizedShard:
    """Make a parameter of zeros; allocates its buffers.

    Args:
        shape: Shape of this rank's rows.
        recipe: What codes mean.
        dtype: The dtype that the tensor shows.
        device: Where the buffers are.
        state: Histories of delayed scaling.
        fqn: FQN of the parameter, for messages.
        main: The main weight that the codes are made from.
        scale_shape: As the attribute; None means that the rows are the whole weight.
    """
    form, shape = recipe.weight, tuple(shape)
    num_codes = torch.Size(shape).numel() // form.codes_per_byte
    codes = torch.zeros(num_codes, dtype=torch.uint8, device=device)
    table = torch.zeros(form.table_nbytes(shape), dtype=torch.uint8, device=device)
    if scale_shape is None:
        scale_shape = shape if form.has_shared_scale(shape) else ()
    fields = Fields(codes, table, recipe, shape, dtype, state, fqn)
    return _over(fields, None, main, None, tuple(scale_shape))


def rebuild_quantized(version: int, description: Mapping[str, Any]) -> Tensor:
    """Make a parameter from what was pickled; ``torch.load`` calls it.

    Raises:
        ValueError: The payload is of a newer version, or is damaged.
    """
    where = "a pickled quantized parameter"
    if version != _PAYLOAD_VERSION:
        raise ValueError(
            expected(
                f"version {_PAYLOAD_VERSION} of the payload",
                version,
                where=where,
                hint="Load it with the release of megafsdp that wrote it, or with a newer one",
            )
        )
    lacking = sorted(_FIELDS - set(description))
    if lacking:
        raise ValueError(
            expected(
                f"the fields {', '.join(sorted(_FIELDS))}",
                f"none named {', '.join(lacking)}",
                where=where,
                hint=_DAMAGED,
            )
        )
    activations = description["quantizes_activations"]
    recipe = recipe_of(description["recipe"], quantize_activations=activations)
    shape, dtype = tuple(description["shape"]), getattr(torch, description["dtype"])
    codes, table = description["codes"], description["table"]
    check(codes, table, recipe, shape, is_cut=True)
    # Only a plain model's parameter is pickled with its main weight.
    values, main = description.get("main_weight"), None
    if values is not None:
        if (values.dtype, tuple(values.shape)) != (torch.float32, shape):
            what, got = f"a main weight of shape {shape} in torch.float32", tuple(values.shape)
            raise ValueError(expected(what, f"{got} in {values.dtype}", where=where, hint=_DAMAGED))
        main = MainWeight.of_whole(values)
    state = None
    if description["histories"] is not None:
        state = DelayedState.of_histories(*description["histories"])
    fields = Fields(codes, table, recipe, shape, dtype, state, description["name"])
    part = Part(is_flat=description["is_flat"])
    made: Tensor = _over(fields, part, main, None, tuple(description["scale_shape"]))
    if description["is_parameter"]:
        made = nn.Parameter(made)
    return made.requires_grad_(description["requires_grad"])


_FIELDS = frozenset(
    {"codes", "table", "recipe", "quantizes_activations", "shape", "dtype", "name"}
    | {"is_flat", "is_parameter", "requires_grad", "histories", "scale_shape"}
)
# The function that torch.load(weights_only=True) may call, and the class that it returns.
torch.serialization.add_safe_globals([rebuild_quantized, QuantizedShard])


def _over(
    source: Fields | QuantizedTensor,
    part: Part | None,
    main: MainWeight | None,
    outer: _Outer | None,
    scale_shape: tuple[int, ...],
) -> QuantizedShard:
    made = make(QuantizedShard, source, part)
    made.main, made._outer, made.scale_shape = main, outer, scale_shape
    made._gather = Gather()
    return made


def _described(recipe: QuantizationRecipe) -> str:
    """Return the name from which the recipe can be restored."""
    named = recipe.name in RECIPE_NAMES
    if not named or recipe != recipe_of(recipe.name, quantize_activations=recipe.input is not None):
        raise ValueError(
            expected(
                f"one of the recipes {', '.join(RECIPE_NAMES)}",
                f"another one, '{recipe.name}'",
                where="pickle of a quantized parameter",
                hint="Save main weights, or quantize by the name of a recipe",
            )
        )
    return recipe.name


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage has nothing else, as whole storages are pickled."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone()


def _range(extent: int, start: int, stop: int) -> tuple[int, int]:
    first = min(start, extent)
    return first, min(max(stop, first), extent)


def _is_between_tiles(shard: QuantizedShard, dim: int, start: int, stop: int) -> bool:
    multiple = shard.recipe.weight.cut_multiple(shard.stored_shape, dim)
    if multiple is None or shard._part.is_flat:
        return False
    return start % multiple == 0 and (stop % multiple == 0 or stop == shard.stored_shape[dim])


def _cut(shard: QuantizedShard, dim: int, start: int, stop: int) -> Tensor | None:
    """Return rows, columns, or matrices of a stack; None if the cut goes through a tile."""
    form, shape, outer = shard.recipe.weight, shard.stored_shape, shard._outer
    start, stop = _range(shape[dim], start, stop)
    if not _is_between_tiles(shard, dim, start, stop):
        return None
    if (start, stop) == (0, shape[dim]):
        return shard.with_part(shard._part)
    has_copy = outer is not None and outer.codes is not None
    codes = outer.codes if has_copy else shard.codes.view(shape[0], -1)  # type: ignore[union-attr]
    assert codes is not None
    per_byte = form.codes_per_byte if dim else 1
    codes = codes.narrow(dim, start // per_byte, (stop - start) // per_byte)
    multiple = 1 if len(shape) == 3 or form.tile is None else form.tile[dim]
    whole = shard.scales() if outer is None else outer.scales
    scales = whole.cut(dim, start // multiple, -(-stop // multiple))
    own_shape = (*shape[:dim], stop - start, *shape[dim + 1 :])
    # With one scale for all rows, the cut shares the table, and sees writes to it at once.
    table = shard.table
    if scales.own or stop == start:
        table = table.new_zeros(form.table_nbytes(own_shape))
        if stop > start:
            form.scales_of_rows(table, own_shape, 0, own_shape[0]).copy_(scales)
    # Not reshape(-1): of a column one byte wide it would make a view with gaps.
    own = codes.contiguous().view(-1)
    fields = Fields(own, table, shard.recipe, own_shape, shard.value_dtype, shard.state, shard.fqn)
    inner = None if codes.is_contiguous() else codes
    # A cut without rows has no outer place: a copy to it must not write shared scales.
    main, outer = (shard.main, _Outer(inner, scales)) if stop > start else (None, None)
    return _over(fields, None, main, outer, shard.scale_shape)


def _check_narrow(shard: QuantizedShard, dim: int, start: Any, length: int) -> None:
    dim, start = dim % shard.dim(), int(start)
    start += shard.shape[dim] if start < 0 else 0
    if _is_between_tiles(shard, dim, start, start + length):
        return
    multiple = shard.recipe.weight.cut_multiple(shard.stored_shape, dim)
    raise RuntimeError(
        expected(
            "no cut along this dimension"
            if multiple is None
            else f"cuts at multiples of {multiple}",
            f"{start} to {start + length} of dimension {dim}",
            where=f"narrow() of the quantized parameter '{shard.fqn}' of shape "
            f"{tuple(shard.shape)} in {shard.recipe.weight.name}",
            hint="Load a checkpoint whose parts have whole tiles, or main weights by "
            "megafsdp.checkpoint; to read values, call decode()",
        )
    )


def _split(shard: QuantizedShard, size: int, dim: int = 0) -> list[Tensor] | None:
    extent = shard.stored_shape[0]
    if dim % shard.dim():
        return None
    starts = range(0, extent, max(size, 1))
    return _all([_cut(shard, 0, start, min(start + size, extent)) for start in starts])


def _split_with_sizes(
    shard: QuantizedShard, sizes: Sequence[int], dim: int = 0
) -> list[Tensor] | None:
    if dim % shard.dim():
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return _all([_cut(shard, 0, a, a + n) for a, n in zip(starts, sizes, strict=True)])


def _all(cuts: Sequence[Tensor | None]) -> list[Tensor] | None:
    found = [cut for cut in cuts if cut is not None]
    return found if len(found) == len(cuts) else None


def _slice(
    shard: QuantizedShard,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor | None:
    dim %= shard.dim()
    if step != 1:
        return None
    first, stop, _ = slice(start, end).indices(shard.shape[dim])
    return _cut(shard, dim, first, stop)


def _view(shard: QuantizedShard, size: Sequence[int]) -> Tensor | None:
    shape = viewed_shape(shard, size)
    if shape == shard.stored_shape:
        return shard.with_part(Part())
    return shard.with_part(Part(is_flat=True)) if shape == (shard.numel(),) else None


def _clone(shard: QuantizedShard, *, memory_format: object = None) -> QuantizedShard:
    return _moved(shard, lambda buffer: buffer.clone())


def _to_copy(
    shard: QuantizedShard,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    pin_memory: bool | None = None,
    **unused: object,
) -> Tensor | None:
    if dtype not in (None, shard.value_dtype):
        return None

    def copied(buffer: Tensor) -> Tensor:
        found = buffer.to(device=device, non_blocking=non_blocking, copy=True)
        return found.pin_memory() if pin_memory else found

    made = _moved(shard, copied)
    made.main = _copied_main(shard, copied)
    if made.main is not None and shard.main is not None:
        # E.g. for module.to(): an optimizer's state may still have the former values.
        made.main.former = (*shard.main.former, weakref.ref(shard.main.values))
    return made


def _pin_memory(shard: QuantizedShard, device: object = None) -> Tensor:
    return _moved(shard, lambda buffer: buffer.pin_memory())


def _is_pinned(shard: QuantizedShard, device: object = None) -> bool:
    return shard.codes.is_pinned()


def _copied_main(shard: QuantizedShard, copied: Callable[[Tensor], Tensor]) -> MainWeight | None:
    """Return the main weight for a copy of a plain parameter; None for any other tensor.

    Local tensors of DTensors, and entries of state dicts, are not ``nn.Parameter`` here.
    """
    main = shard.main
    if main is None or not main.is_of_whole or not isinstance(shard, nn.Parameter):
        return None
    return main.copied(copied, lambda: shard.decode(torch.float32))


# Writes to a parameter's codes must be counted, and tensors made in inference mode count none.
@torch.inference_mode(mode=False)
def _moved(shard: QuantizedShard, copied: Callable[[Tensor], Tensor]) -> QuantizedShard:
    """Return a shard over copies of the buffers, without a main weight."""
    codes, table = copied(shard.codes), copied(shard.table)
    state = None if shard.state is None else shard.state.copy(codes.device)
    fields = Fields(
        codes, table, shard.recipe, shard.stored_shape, shard.value_dtype, state, shard.fqn
    )
    return _over(fields, shard._part, None, None, shard.scale_shape)


def _new(
    shard: QuantizedShard,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    is_same_weight: bool = False,
    **unused: object,
) -> Tensor:
    """Return zeros in the shape of other rows, with shared scales; plain if they do not fit.

    Rows of the same weight get its main weight and histories; others get a copy of the histories.
    """
    shape, form = tuple(size), shard.recipe.weight
    dtype, device = dtype or shard.value_dtype, device or shard.device
    is_alike = len(shape) == len(shard.stored_shape) and shape[1:] == shard.stored_shape[1:]
    # With one scale per matrix, any number of rows fits: they are a part of a valid matrix.
    has_tiles = is_alike and shape[0] > 0 and not form.is_per_tensor
    if dtype != shard.value_dtype or not is_alike or (has_tiles and form.reason_against(shape)):
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=bool(pin_memory))
    is_same_weight = is_same_weight and device == shard.device
    state = shard.state
    made = new_shard(
        shape,
        shard.recipe,
        dtype=dtype,
        device=device,
        state=state if is_same_weight or state is None else state.copy(device),
        fqn=shard.fqn,
        main=shard.main if is_same_weight else None,
        scale_shape=shard.scale_shape,
    )
    if made.scales().shared and shape[0]:
        for target, values in zip(made.scales().shared, shard.scales().shared, strict=True):
            target.copy_(values)
    return _pin_memory(made) if pin_memory else made


def _new_zeros(shard: QuantizedShard, size: Sequence[int], **options: Any) -> Tensor:
    # torch's FSDP2 pads a rank's rows by zeros, and makes the parameter from the padded tensor.
    return _new(shard, size, is_same_weight=True, **options)


def _empty_like(shard: QuantizedShard, *, memory_format: object = None, **options: Any) -> Tensor:
    return _new(shard, shard.shape, **options)


def _zeros_like(
    shard: QuantizedShard,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    **unused: object,
) -> Tensor:
    return torch.zeros(
        shard.shape,
        dtype=dtype or shard.value_dtype,
        device=device or shard.device,
        pin_memory=bool(pin_memory),
    )


def _scale_shape_of(source: QuantizedTensor) -> tuple[int, ...]:
    if isinstance(source, QuantizedShard):
        return source.scale_shape
    shape = source.stored_shape
    return shape if source.recipe.weight.has_shared_scale(shape) else ()


def _check_copy(target: QuantizedShard, source: QuantizedTensor) -> None:
    wanted = (target.recipe.weight.name, tuple(target.shape), target._part)
    given = (source.recipe.weight.name, tuple(source.shape), source._part)
    scaled, given_scaled = target.scale_shape, _scale_shape_of(source)
    if wanted != given:
        what, got = (f"of format {each[0]} and shape {each[1]}" for each in (wanted, given))
        hint = "Quantize both models by one recipe, or load main weights"
    elif scaled != given_scaled:
        # The rest of the matrix, on any rank, would be decoded by the wrong scale.
        both = scaled, given_scaled
        what, got = (f"under one scale of a matrix of shape {each}" for each in both)
        hint = (
            "Load with the weight_mesh and the degree of tp that the codes were saved with, or "
            "load main weights by megafsdp.checkpoint"
        )
    else:
        return
    where = f"copy_() to the quantized parameter '{target.fqn}'"
    raise ValueError(expected(f"a tensor {what}", f"one {got}", where=where, hint=hint))


def _copy(target: QuantizedShard, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(source, QuantizedTensor):
        raise target.refusal(f"copy_() of {source.dtype} values")
    _check_copy(target, source)
    target.codes.copy_(source.codes, non_blocking)
    target.table.copy_(source.table, non_blocking)
    if target._outer is not None:
        codes, scales = target._outer
        if codes is not None:
            codes.copy_(target.codes.view(codes.shape))
        scales.copy_(target.scales())
    both = target.state, source.state
    if both[0] is not None and both[1] is not None and both[0] is not both[1]:
        both[0].load(*both[1].histories())
    other = source.main if isinstance(source, QuantizedShard) else None
    if target.main is not None and target.main is not other:
        target.main.has_other_codes = True
    return target


_OPERATORS: Mapping[OpOverload, Callable[..., Any]] = {
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.slice.Tensor: _slice,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten._pin_memory.default: _pin_memory,
    _aten.is_pinned.default: _is_pinned,
    _aten.new_zeros.default: _new_zeros,
    _aten.new_empty.default: _new,
    _aten.empty_like.default: _empty_like,
    _aten.zeros_like.default: _zeros_like,
    _aten.copy_.default: _copy,
}
