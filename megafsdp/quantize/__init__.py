"""Quantized weights: formats, recipes, and how compute weights are made from main weights.

The public names are exported here. Bytes are uint8 everywhere; a format, which is a frozen value,
says what they mean.

Read first: formats.py.
"""

from megafsdp.quantize.recipes import RECIPE_NAMES, QuantizationRecipe, recipe_of

# A name here is a promise to users; tests/test_public.py lists its path.
__all__ = ["RECIPE_NAMES", "QuantizationRecipe", "recipe_of"]
