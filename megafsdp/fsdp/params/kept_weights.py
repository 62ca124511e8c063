"""Describe briefly which weights of a model a recipe leaves unquantized, and why.

:mod:`megafsdp.fsdp.eligible` decides which weights these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megafsdp.errors import ConfigError, expected, listed
from megafsdp.quantize.recipes import QuantizationRecipe


def describe_kept(reasons: Mapping[str, str]) -> list[str]:
    """Return one line for each reason to leave parameters unquantized, with their names.

    Numbers in names become ``*``, so that a name stands for all layers of a model.

    Args:
        reasons: The reason for each parameter, by FQN; empty for those that are quantized.
    """
    names: dict[str, list[str]] = {}
    for fqn, reason in reasons.items():
        if reason:
            names.setdefault(reason, []).append(fqn)
    return [f"{reason}: {listed(in_all_layers(found))}" for reason, found in names.items()]


def in_all_layers(names: Iterable[str]) -> list[str]:
    """Return names with ``*`` for each number, without duplicates."""
    split = (name.split(".") for name in names)
    joined = (".".join("*" if part.isdecimal() else part for part in parts) for parts in split)
    return list(dict.fromkeys(joined))


def check_any_is_quantized(
    recipes: Iterable[QuantizationRecipe], reasons: Mapping[str, str], *, where: str
) -> None:
    """Check that the recipes of a model's units quantize something of it.

    Args:
        recipes: The recipes of the units; none if nothing is to be quantized.
        reasons: As for :func:`describe_kept`, for every parameter.
        where: The call, for the message.

    Raises:
        ConfigError: They leave all parameters unquantized; the message lists these.
    """
    names = sorted({recipe.name for recipe in recipes})
    if names and reasons and all(reasons.values()):
        raise ConfigError(
            expected(
                f"weights that {' or '.join(names)} can quantize",
                "; ".join(describe_kept(reasons)),
                where=where,
                hint="Leave out the recipe, which is precision.recipe of a run, choose another "
                "one, or declare weights of your own layers by annotate(..., "
                "is_linear_weight=True)",
            )
        )
