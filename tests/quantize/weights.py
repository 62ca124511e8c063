"""Quantized weights for tests, made from plain ones by the formats themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megafsdp.quantize.delayed import DelayedState
from megafsdp.quantize.recipes import QuantizationRecipe, recipe_of
from megafsdp.quantize.tensor import QuantizedTensor
from megafsdp.quantize.tiles import Fragment


def quantized(
    weight: Tensor,
    recipe: str | QuantizationRecipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    quantize_activations: bool = True,
) -> nn.Parameter:
    """Return a Parameter over the codes of a weight, rounded to a dtype first."""
    recipe = recipe_of(recipe, quantize_activations=quantize_activations)
    shape, form = tuple(weight.shape), recipe.weight
    made = QuantizedTensor(
        torch.empty(math.prod(shape) // form.codes_per_byte, dtype=torch.uint8),
        torch.empty(form.table_nbytes(shape), dtype=torch.uint8),
        recipe=recipe,
        shape=shape,
        dtype=dtype,
        state=new_state(recipe, shape) if recipe.history else None,
        fqn="layer.weight",
    )
    refill(made, weight)
    return nn.Parameter(made)


def new_state(recipe: QuantizationRecipe, shape: tuple[int, ...]) -> DelayedState:
    """Return empty histories for a weight of a shape."""
    return DelayedState(recipe.history, num_matrices=math.prod(shape[:-2]))


def refill(tensor: QuantizedTensor, weight: Tensor) -> None:
    """Encode another weight into the buffers of a quantized one, in place."""
    shape, form = tensor.stored_shape, tensor.recipe.weight
    fragment = Fragment(weight.detach().float().reshape(-1), shape, 0)
    maxima = torch.zeros(form.num_maxima(shape), dtype=torch.int32)
    form.add_maxima([fragment], [maxima], through=tensor.value_dtype)
    form.fill_tables([shape], [maxima], [tensor.table])
    form.encode([fragment], [maxima], [tensor.codes], through=tensor.value_dtype)
