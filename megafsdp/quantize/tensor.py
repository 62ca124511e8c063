"""A quantized weight as a tensor: linears read its codes, all other operators decoded values.

A :class:`QuantizedTensor` has no memory of its own. It refers to two buffers of bytes, the codes
and the table of scales. Their owner fills them anew in place whenever the weight changes; the
object is made once. No layer is converted: the tensor intercepts the operators on it.

| call | result |
|---|---|
| ``F.linear(x, w, bias)`` with a matrix | the linear of the recipe |
| ``F.grouped_mm(x, w.transpose(1, 2), offs=...)`` with a stack | decodes in forward and backward |
| ``detach``, ``alias``, a view of the same shape | another object over the same buffers |
| of a stack: ``transpose(1, 2)``, ``w[i]``, ``unbind(0)`` | the same; linears on ``w[i]`` decode |
| ``record_stream`` | that of the buffers |
| ``torch.autograd.grad``, ``backward(inputs=)`` | checkpointed linears run again as in forward |
| any other operator | computes with decoded values; its gradient is dense |
| an operator that writes, ``w[...] = x``, ``w.data = x`` | RuntimeError, nothing is changed |

Gradients are dense, of the shape and dtype that the tensor shows. Decoded values are a copy: a
write to a slice of them is lost. This file does no arithmetic, and knows nothing of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from megafsdp.device.torch_private import (
    OpOverload,
    empty_wrapper,
    grouped_product,
    schema_of,
    without_torch_function,
)
from megafsdp.errors import expected
from megafsdp.quantize import linear as linears
from megafsdp.quantize.delayed import DelayedState
from megafsdp.quantize.recipes import QuantizationRecipe

_aten = torch.ops.aten


class Part(NamedTuple):
    """The part of the stored weight that a tensor shows.

    Attributes:
        matrix: One matrix of a stack; None for all.
        is_transposed: Whether the last two dimensions are exchanged.
        is_flat: Whether all elements are shown in one dimension.
    """

    matrix: int | None = None
    is_transposed: bool = False
    is_flat: bool = False


class QuantizedTensor(Tensor):
    """A weight over buffers of codes and scales.

    Args:
        codes: 1-D uint8 of the whole weight; aliased.
        table: The format's table of scales, uint8; aliased.
        recipe: What the codes mean, and what else linears quantize.
        shape: ``(rows, cols)``, or ``(experts, rows, cols)``.
        dtype: The dtype that the tensor shows: of its decoded values and its gradient.
        state: Histories of delayed scaling, which linears read and record to.
        fqn: FQN of the parameter, for messages.

    Attributes:
        codes: The argument.
        table: The argument.
        recipe: The argument.
        stored_shape: The shape of the whole weight.
        value_dtype: The dtype.
        state: The argument.
        fqn: The argument.
    """

    # Plain attributes for all that a linear reads: reading shape, dtype or device of a subclass
    # calls __torch_function__.
    codes: Tensor
    table: Tensor
    recipe: QuantizationRecipe
    stored_shape: tuple[int, ...]
    value_dtype: torch.dtype
    state: DelayedState | None
    fqn: str
    _part: Part

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        codes: Tensor,
        table: Tensor,
        *,
        recipe: QuantizationRecipe,
        shape: Sequence[int],
        dtype: torch.dtype,
        state: DelayedState | None = None,
        fqn: str = "",
    ) -> QuantizedTensor:
        """Make a tensor without memory over the buffers."""
        check(codes, table, recipe, tuple(shape))
        source = Fields(codes, table, recipe, tuple(shape), dtype, state, fqn)
        return make(cls, source, Part())

    def decode(self, dtype: torch.dtype | None = None, *, in_backward: bool = False) -> Tensor:
        """Return the values as a plain tensor without autograd history; allocates.

        Args:
            dtype: fp32, bf16 or fp16; None means the tensor's own.
            in_backward: As for :meth:`WeightFormat.decode`.
        """
        form, (matrix, is_transposed, is_flat) = self.recipe.weight, self._part
        dtype = self.value_dtype if dtype is None else dtype
        if matrix is None:
            own, shape = (self.codes, self.table), self.stored_shape
        else:
            own = form.matrix_of(self.codes, self.table, self.stored_shape, matrix)
            shape = self.stored_shape[1:]
        values = form.decode(*own, shape, dtype, in_backward=in_backward)
        if is_flat:
            return values.view(-1)
        return values.transpose(-2, -1) if is_transposed else values

    def with_part(self, part: Part) -> QuantizedTensor:
        """Make another object over the same buffers that shows a part of the weight."""
        return make(QuantizedTensor, self, part)

    def refusal(self, what: str) -> RuntimeError:
        """Return the error for a write to the weight, whose codes its owner makes anew."""
        name = f"'{self.fqn}', " if self.fqn else ""
        return RuntimeError(
            expected(
                "a change of the sharded parameter, or of an optimizer's main weight",
                f"{what} on the quantized weight that is made from it",
                where=f"{name}a weight of shape {tuple(self.stored_shape)} quantized by "
                f"'{self.recipe.name}'",
                hint="Make the optimizer, FusedAdam or another one, over model.parameters() "
                "outside of forward and backward, and write to these parameters under "
                "torch.no_grad()",
            )
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe shape, dtype and recipe; reading the values would decode them."""
        return (
            f"QuantizedTensor({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.value_dtype}, "
            f"recipe={self.recipe.name!r})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        """Return the names of the buffers, and what a compiled graph depends on.

        Histories and the name are left out, as they differ between layers: linears that read them
        run outside of graphs.
        """
        return ["codes", "table"], (self.recipe, self.stored_shape, self.value_dtype, self._part)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], rest: tuple[Any, ...], size: object, stride: object
    ) -> QuantizedTensor:
        """Make a tensor over other buffers, as the compiler does."""
        recipe, stored_shape, dtype, part = rest
        fields = Fields(inner["codes"], inner["table"], recipe, stored_shape, dtype, None, "")
        return make(QuantizedTensor, fields, part)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a linear by the recipe, refuse assignments, and leave the rest to dispatch."""
        override = _OVERRIDES.get(func)
        if override is not None:
            return override(*args, **(kwargs or {}))
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keep quantized what can be, refuse writes, and compute the rest with decoded values."""
        kwargs = kwargs or {}
        if func is _aten.record_stream.default:
            # A write by its schema, but it only delays the reuse of memory: that of the buffers.
            tensor, stream = args
            for buffer in (tensor.codes, tensor.table):
                buffer.record_stream(stream)
            return None
        keep = _KEPT.get(func)
        if keep is not None:
            kept = keep(*args, **kwargs)
            if kept is not None:
                return kept
        for position, name in _written_arguments(func):
            written = args[position] if position < len(args) else kwargs.get(name)
            for tensor in written if isinstance(written, list | tuple) else (written,):
                if isinstance(tensor, QuantizedTensor) and not _sends_alone(func, args):
                    raise tensor.refusal(str(func))
        if torch.is_inference_mode_enabled():
            return _run_in_inference_mode(func, args, kwargs)
        return _run_decoded(func, args, kwargs)


class Fields(NamedTuple):
    """The contents of a tensor; see the attributes of :class:`QuantizedTensor`."""

    codes: Tensor
    table: Tensor
    recipe: QuantizationRecipe
    stored_shape: tuple[int, ...]
    value_dtype: torch.dtype
    state: DelayedState | None
    fqn: str


T = TypeVar("T", bound=QuantizedTensor)


def make(cls: type[T], source: Fields | QuantizedTensor, part: Part | None = None) -> T:
    """Make a tensor of a class over given buffers, without checks.

    Args:
        cls: The class; attributes that it adds are not set.
        source: Has the buffers and what they mean.
        part: The part to show; None means all.
    """
    if torch.is_inference_mode_enabled():
        # torch makes views and gathered parameters from this tensor, and counts writes to them.
        with torch.inference_mode(False):
            return make(cls, source, part)
    stored_shape, part = source.stored_shape, part or Part()
    shape = stored_shape if part.matrix is None else stored_shape[1:]
    if part.is_flat:
        shape = (math.prod(shape),)
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    if part.is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
        stride = (*stride[:-2], stride[-1], stride[-2])
    dtype, device = source.value_dtype, source.codes.device
    made = empty_wrapper(cls, shape, stride, dtype=dtype, device=device)
    made.codes, made.table, made.recipe = source.codes, source.table, source.recipe
    made.stored_shape, made.value_dtype = stored_shape, dtype
    made.state, made.fqn, made._part = source.state, source.fqn, part
    return made


def check(
    codes: Tensor,
    table: Tensor,
    recipe: QuantizationRecipe,
    shape: tuple[int, ...],
    *,
    is_cut: bool = False,
) -> None:
    """Check that buffers have the sizes that a recipe's format requires.

    Args:
        codes: Codes of all elements.
        table: Table of their scales.
        recipe: Has the format.
        shape: Shape of the tensor.
        is_cut: Whether the tensor may be some rows of a larger one of a valid shape.

    Raises:
        ValueError: They do not, or the format does not support the shape.
    """
    form = recipe.weight
    reason = None if is_cut else form.reason_against(shape)
    if reason is not None:
        what, got = "a shape that the format takes", f"{shape}: {reason}"
    elif (codes.dtype, codes.numel()) != (
        torch.uint8,
        math.prod(shape) // form.codes_per_byte,
    ):
        what = f"{math.prod(shape) // form.codes_per_byte} codes in uint8"
        got = f"{codes.numel()} in {codes.dtype}"
    elif (table.dtype, table.numel()) != (torch.uint8, form.table_nbytes(shape)):
        what = f"a table of {form.table_nbytes(shape)} bytes in uint8"
        got = f"{table.numel()} in {table.dtype}"
    else:
        return
    raise ValueError(
        expected(
            what,
            got,
            where=f"QuantizedTensor of shape {shape}, recipe '{recipe.name}'",
            hint="Make buffers of the sizes that the recipe's weight format says",
        )
    )


def _decoded(value: Any) -> Any:
    """Return an operator's argument with quantized tensors replaced by their values."""
    if isinstance(value, list | tuple):
        return [_decoded(each) for each in value]
    return value.decode() if isinstance(value, QuantizedTensor) else value


def _run_decoded(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    plain = {name: _decoded(value) for name, value in kwargs.items()}
    return func(*map(_decoded, args), **plain)


def _run_in_inference_mode(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator in inference mode."""
    # Composite operators, such as narrow(), arrive whole: decompose them, as parts may be kept.
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    # As in make(), but only for views: other operators may write to an inference tensor.
    with torch.inference_mode(not func.is_view):
        return _run_decoded(func, args, kwargs)


def _alias(tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor.with_part(tensor._part)


def viewed_shape(tensor: QuantizedTensor, size: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that ``view`` was called with, with -1 resolved."""
    sizes = list(size)
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = math.prod(tensor.shape) // max(known, 1)
    return tuple(sizes)


def _view(tensor: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor | None:
    return _alias(tensor) if viewed_shape(tensor, size) == tuple(tensor.shape) else None


def _as_strided(
    tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedTensor | None:
    is_same = tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride()
    return _alias(tensor) if is_same and not offset else None


def _is_stack(tensor: Tensor) -> bool:
    if not isinstance(tensor, QuantizedTensor) or len(tensor.stored_shape) != 3:
        return False
    return tensor._part.matrix is None and not tensor._part.is_flat


def _transpose(tensor: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor | None:
    if not _is_stack(tensor) or {dim0 % 3, dim1 % 3} != {1, 2}:
        return None
    return tensor.with_part(Part(is_transposed=not tensor._part.is_transposed))


def _select(tensor: QuantizedTensor, dim: int, index: int) -> QuantizedTensor | None:
    if not _is_stack(tensor) or dim % 3 != 0:
        return None
    part = tensor._part
    made = tensor.with_part(Part(index % tensor.stored_shape[0], part.is_transposed))
    # Rows per expert are few and uneven, so products with a stack or its matrices always decode.
    made.recipe = _of_weights_alone(tensor.recipe)
    return made


def _unbind(tensor: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor] | None:
    if not _is_stack(tensor) or dim % 3 != 0:
        return None
    matrices = [_select(tensor, 0, index) for index in range(tensor.stored_shape[0])]
    return [matrix for matrix in matrices if matrix is not None]


@functools.cache
def _of_weights_alone(recipe: QuantizationRecipe) -> QuantizationRecipe:
    return dataclasses.replace(
        recipe, input=None, grad=None, has_hadamard=False, has_stochastic_rounding=False
    )


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operator writes."""
    if func.namespace == "c10d":
        # Schemas of collectives mark no writes. All but send write their first argument.
        is_send = func.overloadpacket.__name__ == "send"
        return () if is_send else ((0, schema_of(func).arguments[0].name),)
    arguments = enumerate(schema_of(func).arguments)
    return tuple(
        (position, argument.name)
        for position, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _sends_alone(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an operator is a broadcast from this rank, which only reads its tensors."""
    if func.namespace != "c10d" or func.overloadpacket.__name__ != "broadcast_":
        return False
    _, group, root, *_ = args
    return dist.ProcessGroup.unbox(group).rank() == root


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    is_own = isinstance(weight, QuantizedTensor) and len(weight.shape) == 2
    if is_own and not isinstance(input, QuantizedTensor) and not isinstance(bias, QuantizedTensor):
        return linears.linear(input, weight, bias)
    with without_torch_function():
        return F.linear(input, weight, bias)


def _grouped(
    mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    assert grouped_product is not None, "torch calls it"
    has_rows = type(mat_a) is Tensor and mat_a.dim() == 2 and offs is not None
    if has_rows and _is_stack(mat_b) and bias is None and out_dtype is None:
        return linears.grouped_product(grouped_product, mat_a, mat_b, offs)
    with without_torch_function():
        return grouped_product(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)


def _set_data(tensor: QuantizedTensor, value: Tensor) -> None:
    if value.dtype != tensor.dtype:
        # As module.half() and module.to(dtype) do.
        raise RuntimeError(
            expected(
                f"a quantized weight that stays in {tensor.dtype}",
                f"a cast to {value.dtype}",
                where=f"'{tensor.fqn}' of shape {tuple(tensor.shape)}",
                hint="Cast the model before quantize_() or fully_shard(). Parameters before this "
                "one are cast already: build the model anew",
            )
        )
    raise tensor.refusal("an assignment to .data")


def _set_item(tensor: Any, index: Any, value: Any) -> None:
    if isinstance(tensor, QuantizedTensor):
        raise tensor.refusal("an assignment to elements")
    with without_torch_function():
        tensor[index] = value


def _backward(tensors: Any, *, inputs: Any, **options: Any) -> None:
    if inputs is None:
        with without_torch_function():
            return torch.autograd.backward(tensors, **options)
    edges, context = _as_edges(tensors, inputs)
    for tensor in _as_tuple(inputs):
        if isinstance(tensor, QuantizedTensor):
            # torch does so for tensors, not for edges. Nothing changes for parameters.
            tensor.retain_grad()
    with context:
        return torch.autograd.backward(tensors, inputs=edges, **options)


def _grad(
    outputs: Any, inputs: Any, *, allow_unused: bool, materialize_grads: bool, **options: Any
) -> tuple[Tensor | None, ...]:
    edges, context = _as_edges(outputs, inputs)
    with context:
        # torch makes no zeros for edges.
        allows_none = allow_unused or materialize_grads
        grads = torch.autograd.grad(outputs, edges, allow_unused=allows_none, **options)
    if not materialize_grads:
        return grads
    return tuple(
        torch.zeros_like(tensor) if grad is None else grad
        for grad, tensor in zip(grads, _as_tuple(inputs), strict=True)
    )


def _as_edges(outputs: Any, inputs: Any) -> tuple[tuple[Any, ...], AbstractContextManager[None]]:
    """Return what to differentiate by, and the context to do it in.

    Backward runs checkpointed layers again, which must find the linears that forward ran. So these
    overrides stay in place, and quantized inputs become edges of the graph: as tensors they would
    bring the call back here.
    """
    inputs = _as_tuple(inputs)
    if any(isinstance(t, QuantizedTensor) for t in _as_tuple(outputs)):
        return inputs, without_torch_function()
    edges = (get_gradient_edge(t) if isinstance(t, QuantizedTensor) else t for t in inputs)
    return tuple(edges), nullcontext()


def _as_tuple(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)


_OVERRIDES: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    grouped_product: _grouped,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__setitem__: _set_item,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
}
_KEPT: Mapping[OpOverload, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.as_strided.default: _as_strided,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.transpose.int: _transpose,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
}
