"""Recipes by name."""

from __future__ import annotations

import dataclasses

import pytest

from megafsdp.quantize import RECIPE_NAMES, QuantizationRecipe, recipe_of


def test_there_are_five_recipes() -> None:
    """Each has the weight format of its name; values that compare, without state."""
    assert RECIPE_NAMES == ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
    for name in RECIPE_NAMES:
        recipe = recipe_of(name)
        assert recipe.name == recipe.weight.name == name
        assert recipe_of(recipe) is recipe
        assert recipe == dataclasses.replace(recipe)
        assert recipe.input is not None and recipe.grad is not None
        assert (recipe.history > 0) == (name == "fp8_delayed")
        assert recipe.has_hadamard == recipe.has_stochastic_rounding == (name == "nvfp4")
        assert recipe.weight.is_per_tensor == (name in ("fp8_current", "fp8_delayed"))
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.name = "other"  # type: ignore[misc]


def test_a_recipe_may_quantize_weights_alone() -> None:
    """Inputs and gradients then stay as they are, whether it was named or given."""
    for given in ("nvfp4", recipe_of("nvfp4")):
        recipe = recipe_of(given, quantize_activations=False)
        assert recipe.weight == recipe_of("nvfp4").weight
        assert recipe.input is None and recipe.grad is None
        assert not recipe.has_hadamard and not recipe.has_stochastic_rounding


def test_an_unknown_recipe_is_refused_by_a_list_of_those_there_are() -> None:
    """The message names all five, and what was asked for."""
    with pytest.raises(ValueError, match=r"fp8_current, fp8_delayed.*nvfp4, got 'int3'"):
        recipe_of("int3")
    own = QuantizationRecipe("own", recipe_of("mxfp8").weight, None, None)
    assert recipe_of(own) is own
