"""Quantized weights: formats, recipes, and how compute weights are made from main weights.

The public names are exported here. Bytes are uint8 everywhere; what they mean is said by a format,
a frozen value.

Read first: formats.py.
"""

from megafsdp.quantize.recipes import RECIPE_NAMES, QuantizationRecipe, recipe_of

# A name here is a promise to users; tests/test_public.py lists its path.
__all__ = ["RECIPE_NAMES", "QuantizationRecipe", "recipe_of"]
