"""Recipes by name."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    # Histories of weights stay.
    assert recipe_of("fp8_delayed", quantize_activations=False).history == 1024


def test_an_unknown_recipe_is_refused_by_a_list_of_those_there_are() -> None:
    """The message names all five, and what was asked for."""
    with pytest.raises(ValueError, match=r"fp8_current, fp8_delayed.*nvfp4, got 'int3'"):
        recipe_of("int3")
    with pytest.raises(ValueError, match=r"one of the recipes .* got None"):
        recipe_of(None)  # type: ignore[arg-type]
    own = QuantizationRecipe("own", recipe_of("mxfp8").weight, None, None)
    assert recipe_of(own) is own


_BLOCK, _TENSOR = recipe_of("fp8_block"), recipe_of("fp8_current")


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (_BLOCK, {"grad": None}, "formats of both inputs and gradients, or of neither"),
        (_BLOCK, {"input": None}, "formats of both inputs and gradients, or of neither"),
        (_BLOCK, {"has_stochastic_rounding": True}, "gradients in e2m1, got e4m3"),
        (_TENSOR, {"has_stochastic_rounding": True}, "gradients in e2m1, got e5m2"),
        (recipe_of("nvfp4"), {"input": None, "grad": None}, "has_hadamard beside formats"),
        (_TENSOR, {"history": -1}, "a history of 0, or of several steps"),
        (_BLOCK, {"history": 16}, r"got 16 with tiles \(128, 128\)"),
    ],
    ids=lambda given: given.name if isinstance(given, QuantizationRecipe) else None,
)
def test_parts_that_do_not_go_together_are_refused(
    recipe: QuantizationRecipe, changes: dict[str, Any], message: str
) -> None:
    """When the recipe is made, not in the first forward or backward."""
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(recipe, **changes)
    assert f"the recipe '{recipe.name}'" in str(caught.value)


@pytest.mark.parametrize("block", [0, -32, 48, 2048])
def test_blocks_that_kernels_do_not_take_are_refused(block: int) -> None:
    """Only powers of two up to 1024, of which compiled code and torch make the same bits."""
    assert _BLOCK.input is not None
    with pytest.raises(ValueError, match=f"a block of a power of two up to 1024.*got {block}"):
        dataclasses.replace(_BLOCK.input, block=block)
