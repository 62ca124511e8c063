"""Recipes: which formats the weights, inputs and gradients of linears have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megafsdp.errors import expected
from megafsdp.quantize import formats, input_formats
from megafsdp.quantize.elements import E2M1
from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.input_formats import InputFormat

_DELAYED_HISTORY = 1024


@dataclass(frozen=True, slots=True)
class QuantizationRecipe:
    """What is quantized, and how; a frozen value without state.

    Attributes:
        name: One of ``RECIPE_NAMES``.
        weight: The format of weights.
        input: The format of inputs; None: they stay as they are, and weights are decoded.
        grad: The format of output gradients; None exactly if ``input`` is None.
        has_hadamard: Transform both operands of the weight gradient before they are quantized.
        has_stochastic_rounding: Round gradients stochastically.
        history: Number of earlier steps whose maxima scales are made from, one scale per matrix; 0
            means scales are made from the values themselves.
    """

    name: str
    weight: WeightFormat
    input: InputFormat | None
    grad: InputFormat | None
    has_hadamard: bool = False
    has_stochastic_rounding: bool = False
    history: int = 0

    def __post_init__(self) -> None:
        """Check that the parts go together.

        Raises:
            ValueError: They do not.
        """
        has_products = self.input is not None and self.grad is not None
        if (self.input is None) != (self.grad is None):
            what = "formats of both inputs and gradients, or of neither"
            got = f"input={self.input}, grad={self.grad}"
            hint = "Give both, or none to quantize weights alone"
        elif self.has_hadamard and not has_products:
            what, got = "has_hadamard beside formats of inputs and gradients", "none of these"
            hint = "Leave has_hadamard out: it transforms what is quantized"
        elif self.has_stochastic_rounding and (self.grad is None or self.grad.element != E2M1):
            what = f"has_stochastic_rounding beside gradients in {E2M1.name}"
            got = "none" if self.grad is None else self.grad.element.name
            hint = "Leave it out: 8-bit codes are rounded to nearest"
        elif self.history < 0 or (self.history and not self.weight.is_per_tensor):
            what = "a history of 0, or of several steps beside one scale a matrix"
            got = f"{self.history} with tiles {self.weight.tile}"
            hint = "Leave history out: scales of tiles are made from their own values"
        else:
            return
        raise ValueError(expected(what, got, where=f"the recipe '{self.name}'", hint=hint))


_RECIPES = {
    recipe.name: recipe
    for recipe in (
        QuantizationRecipe(
            "fp8_current",
            formats.FP8_CURRENT,
            input_formats.TENSOR_E4M3,
            input_formats.TENSOR_E5M2,
        ),
        QuantizationRecipe(
            "fp8_delayed",
            formats.FP8_DELAYED,
            input_formats.TENSOR_E4M3,
            input_formats.TENSOR_E5M2,
            history=_DELAYED_HISTORY,
        ),
        QuantizationRecipe(
            "fp8_block", formats.FP8_BLOCK, input_formats.BLOCK_E4M3, input_formats.BLOCK_E4M3
        ),
        QuantizationRecipe("mxfp8", formats.MXFP8, input_formats.MX_E4M3, input_formats.MX_E4M3),
        QuantizationRecipe(
            "nvfp4",
            formats.NVFP4,
            input_formats.NV_E2M1,
            input_formats.NV_E2M1,
            has_hadamard=True,
            has_stochastic_rounding=True,
        ),
    )
}
RECIPE_NAMES = tuple(_RECIPES)


def recipe_of(
    recipe: str | QuantizationRecipe, *, quantize_activations: bool = True
) -> QuantizationRecipe:
    """Return a recipe by name, or the one given.

    Args:
        recipe: A name of ``RECIPE_NAMES``, or a recipe.
        quantize_activations: False quantizes only weights, whatever the recipe says about inputs
            and gradients.

    Raises:
        ValueError: There is no recipe of this name; the message lists the recipes.
    """
    if not isinstance(recipe, QuantizationRecipe):
        if recipe not in _RECIPES:
            raise ValueError(
                expected(
                    f"one of the recipes {', '.join(RECIPE_NAMES)}",
                    repr(recipe),
                    where="the recipe of quantized weights",
                    hint="Name one of these, or give a QuantizationRecipe",
                )
            )
        recipe = _RECIPES[recipe]
    if quantize_activations:
        return recipe
    return dataclasses.replace(
        recipe, input=None, grad=None, has_hadamard=False, has_stochastic_rounding=False
    )
