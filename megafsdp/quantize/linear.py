"""Linears on quantized weights: what is quantized for which product, and what backward reads.

With Q for a quantization along features, and Qc for one along tokens:

    output         y  = Q(x) w^T + bias
    input grad     gx = Q(g) w
    weight grad    gw = Qc(g)^T Qc(x)         saved: the codes of Qc(x), a byte an element or half
    bias grad      gb = the sum of g, which is not quantized

Formats with one scale per tensor have one quantization for both. A recipe that quantizes only
weights decodes them in forward and again in backward, and saves x as it is. In both cases autograd
keeps the weight object itself, whose codes may be gathered anew before backward: no decoded copy
outlives its product. If the codes were changed by anything but a gather, backward raises.

NVFP4 transforms both operands of the weight gradient (hadamard.py) and rounds both quantizations of
g stochastically (rounding.py). The last tokens may form a shorter block; for the transform they are
padded with zeros.

A graph of ``torch.compile`` contains operators for the formats, which give the same bits. Recipes
that keep state from step to step, histories or a generator's, end the graph at each linear.

The products themselves are in products.py. Experts, whose products are grouped by rows, decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from megafsdp.device.autograd import check_no_second_backward
from megafsdp.device.torch_private import is_tracing, refuse_graphs, version_of, without_dynamo
from megafsdp.errors import expected
from megafsdp.quantize.delayed import GRAD, INPUT, DelayedState
from megafsdp.quantize.hadamard import transform_tokens
from megafsdp.quantize.input_formats import (
    ALONG_FEATURES,
    ALONG_TOKENS,
    InputFormat,
    QuantizedInput,
    add_maximum,
)
from megafsdp.quantize.products import (
    CodedMatrix,
    input_grad,
    output,
    takes_transposed,
    weight_grad,
)
from megafsdp.quantize.rounding import Noise, draw_seed


class LinearWeight(CodedMatrix, Protocol):
    """A coded matrix, and what else a linear needs: histories, the gradient's dtype, a name."""

    state: DelayedState | None
    value_dtype: torch.dtype
    fqn: str


@without_dynamo
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """Return ``x w^T + bias`` by the recipe of the weight, differentiable once.

    Under autocast x and bias are cast as for torch's own linear.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``; its gradient is dense and of its dtype.
        bias: ``(outputs,)`` or None.
    """
    dtype = weight.value_dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, bias = _autocast(x, dtype), None if bias is None else _autocast(bias, dtype)
    if x.dtype != dtype:
        # torch raises its own error for operands of two dtypes.
        return F.linear(x, weight.decode(), bias)
    is_quantized = weight.recipe.input is not None and x.numel() > 0
    if is_quantized and (weight.recipe.history or weight.recipe.has_stochastic_rounding):
        # A graph can have neither histories nor a new seed in each step.
        reason = f"a linear of the recipe '{weight.recipe.name}', whose histories or random numbers"
        refuse_graphs(x, f"{reason} a graph cannot have; leave out fullgraph=True")
    if not torch.is_grad_enabled():
        if is_quantized:
            return _quantized_output(x, weight, bias)
        return F.linear(x, weight.decode(x.dtype), bias)
    function = _Quantized if is_quantized else _Decoded
    result: Tensor = function.apply(x, weight, bias)
    return result


def _autocast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in a dtype, except those that torch's autocast leaves as they are."""
    is_cast = values.is_floating_point() and values.dtype != torch.float64
    return values.to(dtype) if is_cast else values


class _Decoded(torch.autograd.Function):
    """A linear that decodes its weight for each product and quantizes nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.version = weight, _version_of(weight)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return F.linear(x, weight.decode(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_once(ctx.weight)
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if needs_x:
            _check_unchanged(ctx.weight, ctx.version)
            weight = ctx.weight.decode(grad.dtype, in_backward=True)
            grad_x = rows.mm(weight).view(*grad.shape[:-1], weight.shape[1])
        if needs_weight:
            grad_weight = rows.t().mm(x.reshape(-1, x.shape[-1])).to(ctx.weight.value_dtype)
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None


class _Quantized(torch.autograd.Function):
    """A linear that quantizes every operand of every product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        sizes = (rows.shape[0], *weight.stored_shape)
        is_transposed = ctx.needs_input_grad[1] and takes_transposed(
            rows, _format_of(weight, GRAD), sizes
        )
        by_features, saved = _quantize_for_both(
            rows, weight, INPUT, is_recorded=True, is_transposed=is_transposed
        )
        y = output(by_features, weight, bias, x.dtype)
        ctx.weight, ctx.version = weight, _version_of(weight)
        ctx.x_shape, ctx.meaning = x.shape, None
        if ctx.needs_input_grad[1]:
            if saved is None:
                saved = _quantize(rows, weight, INPUT, ALONG_TOKENS, is_transposed=is_transposed)
            ctx.save_for_backward(saved.codes, saved.scales)
            ctx.meaning = saved.format, saved.shape, saved.along, saved.is_transposed
        return _as_output(y, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight: LinearWeight = ctx.weight
        _check_once(weight)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_x = grad_weight = for_weight = None
        # Not in forward: so a recomputed forward finds the same random state as the first one, and
        # an evaluation draws nothing.
        seed = draw_seed() if weight.recipe.has_stochastic_rounding else None
        x = QuantizedInput(*ctx.saved_tensors, *ctx.meaning) if needs_weight else None
        # Transposed exactly if the saved input is, as the product needs both operands alike.
        given: dict[str, Any] = {"is_recorded": True, "seed": seed}
        given["is_transposed"] = x is not None and x.is_transposed
        if needs_x:
            _check_unchanged(weight, ctx.version)
            coded, for_weight = _quantize_for_both(rows, weight, GRAD, **given)
            grad_x = input_grad(coded, weight, grad.dtype).view(ctx.x_shape)
        if x is not None:
            if for_weight is None:
                for_weight = _quantize(rows, weight, GRAD, ALONG_TOKENS, **given)
            grad_weight = weight_grad(for_weight, x, grad.dtype).to(weight.value_dtype)
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None


def _check_once(weight: LinearWeight) -> None:
    check_no_second_backward(
        where=f"backward of a linear on {_describe(weight)}",
        hint="Quantized linears are differentiable once: name the layer in keep_unquantized",
    )


def _describe(weight: LinearWeight) -> str:
    name = f"'{weight.fqn}', " if weight.fqn else ""
    shape = tuple(weight.stored_shape)
    return f"{name}a weight of shape {shape} quantized by '{weight.recipe.name}'"


def _version_of(weight: LinearWeight) -> int | None:
    """Return how often the weight was written; None in a graph, which has its own count.

    Every change of a weight writes its codes, so the table need not be checked. Gathers do not
    count, as the bytes stay the same: a unit gathers codes through another tensor, and torch's
    FSDP2 restores the count.
    """
    if is_tracing():
        return None
    # A copy to the weight itself is counted on the weight: autograd does not count inner writes.
    return version_of(weight.codes) + version_of(cast(Tensor, weight))


def _check_unchanged(weight: LinearWeight, version: int | None) -> None:
    """Raise if backward would read other codes than forward did, as autograd does.

    Raises:
        RuntimeError: The codes were written since, by anything but a gather.
    """
    now = _version_of(weight)
    if now != version and None not in (now, version):
        raise RuntimeError(
            expected(
                f"codes at version {version}, as forward read them",
                f"version {now}",
                where=f"backward of a linear on {_describe(weight)}",
                hint="Run backward before optimizer steps, requantize_() and loads, or forward "
                "again after them",
            )
        )


def _quantized_output(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """Return the output of a quantized linear; saves and records nothing."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    coded = _quantize(rows, weight, INPUT, ALONG_FEATURES)
    y = output(coded, weight, bias, x.dtype)
    return _as_output(y, x)


def _as_output(rows: Tensor, x: Tensor) -> Tensor:
    """Return the rows of an output in the shape of the input; an alias, but not an autograd view.

    torch's own linear does the same: FSDP2 warns of views, on which it loses its backward hooks.
    """
    if x.dim() == 2:
        return rows
    output: Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[1]))
    return output


def _format_of(weight: LinearWeight, operand: int) -> InputFormat:
    form = weight.recipe.input if operand == INPUT else weight.recipe.grad
    assert form is not None, "the recipe quantizes inputs and gradients"
    return form


def _serves_both(weight: LinearWeight, operand: int) -> bool:
    """Return whether one quantization serves the products over features and over tokens."""
    return _format_of(weight, operand).block is None and not weight.recipe.has_hadamard


def _quantize_for_both(
    rows: Tensor,
    weight: LinearWeight,
    operand: int,
    *,
    is_recorded: bool,
    seed: int | None = None,
    is_transposed: bool,
) -> tuple[QuantizedInput, QuantizedInput | None]:
    """Quantize for the product over features, and for that over tokens if one serves both.

    Args:
        rows: As for :func:`_quantize`, like the others.
        weight: Has the recipe.
        operand: ``INPUT`` or ``GRAD``.
        is_recorded: Whether delayed scaling records the maximum.
        seed: Seed of stochastic rounding; None rounds to nearest.
        is_transposed: Whether the product over tokens takes transposed codes.
    """
    serves_both = _serves_both(weight, operand)
    if serves_both and is_transposed:
        assert seed is None, "what is rounded by chance has 4 bits, of which no product takes codes"
        maximum = _maximum_for(rows, weight, operand, is_recorded=is_recorded)
        return _format_of(weight, operand).quantize_both_ways(rows, maximum=maximum)
    coded = _quantize(rows, weight, operand, ALONG_FEATURES, is_recorded=is_recorded, seed=seed)
    return coded, coded if serves_both else None


def _quantize(
    rows: Tensor,
    weight: LinearWeight,
    operand: int,
    along: int,
    *,
    is_recorded: bool = False,
    seed: int | None = None,
    is_transposed: bool = False,
) -> QuantizedInput:
    """Quantize inputs, or gradients of outputs, for one product.

    Args:
        rows: ``(tokens, features)``, contiguous.
        weight: Has the recipe, and the histories of delayed scaling.
        operand: ``INPUT`` or ``GRAD``.
        along: The dimension of blocks, which the product sums over.
        is_recorded: Whether delayed scaling records the maximum.
        seed: Seed of stochastic rounding; None rounds to nearest.
        is_transposed: Whether codes are those of the transpose.
    """
    noise = None
    form = _format_of(weight, operand)
    if along == ALONG_TOKENS and weight.recipe.has_hadamard:
        rows = transform_tokens(rows)
    maximum = _maximum_for(rows, weight, operand, is_recorded=is_recorded)
    # The two quantizations of a gradient are rounded independently. Inputs are rounded to nearest.
    if seed is not None and operand == GRAD:
        noise = Noise(seed, along).uniform(rows.shape, rows.device)
    return form.quantize(
        rows, along=along, maximum=maximum, noise=noise, is_transposed=is_transposed
    )


def _maximum_for(
    rows: Tensor, weight: LinearWeight, operand: int, *, is_recorded: bool
) -> Tensor | None:
    """Return the maximum of delayed scaling, and record the rows' own; None without histories."""
    state = weight.state
    if state is None or _format_of(weight, operand).block is not None:
        return None
    own = torch.zeros(1, dtype=torch.int32, device=rows.device)
    add_maximum(rows, own)
    if is_recorded:
        state.record(operand, own)
    return state.maximum_for(operand, own)


@without_dynamo
def grouped_product(
    multiply: Callable[..., Tensor], x: Tensor, weight: LinearWeight, ends: Tensor
) -> Tensor:
    """Return the product of each expert's rows with its matrix, ``(rows, outputs)``.

    The stack is decoded in forward and again in backward; x and the gradient stay as they are.

    Args:
        multiply: torch's grouped product.
        x: ``(rows, inputs)``, sorted by expert.
        weight: A stack as the product takes it, ``(experts, inputs, outputs)``.
        ends: ``(experts,)`` int32, the end of each expert's rows.
    """
    if not torch.is_grad_enabled():
        return multiply(x, weight.decode(x.dtype), offs=ends)
    result: Tensor = _Grouped.apply(x, weight, ends, multiply)
    return result


class _Grouped(torch.autograd.Function):
    """A grouped product with a stack that is decoded for each product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: LinearWeight, ends: Tensor, multiply: Callable[..., Tensor]
    ) -> Tensor:
        ctx.weight, ctx.version, ctx.multiply = weight, _version_of(weight), multiply
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, ends)
        return multiply(x, weight.decode(x.dtype), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_once(ctx.weight)
        x, ends = ctx.saved_tensors
        # An empty tensor is contiguous to torch with any strides, but not to the kernels.
        grad = grad.contiguous() if grad.numel() else grad.new_empty(grad.shape)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            _check_unchanged(ctx.weight, ctx.version)
            weight = ctx.weight.decode(grad.dtype, in_backward=True)
            grad_x = ctx.multiply(grad, weight.transpose(1, 2), offs=ends)
        if ctx.needs_input_grad[1]:
            # In the layout of the stack, (experts, outputs, inputs).
            grad_weight = ctx.multiply(grad.t(), x, offs=ends).transpose(1, 2)
            grad_weight = grad_weight.to(ctx.weight.value_dtype)
        return grad_x, grad_weight, None, None
