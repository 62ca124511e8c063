"""Types and values of the configuration in plain words, for its help and its error messages."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

_BOUNDS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (Gt, lambda bound: f"above {bound.gt:,}"),
    (Ge, lambda bound: f"of at least {bound.ge:,}"),
    (Lt, lambda bound: f"below {bound.lt:,}"),
    (Le, lambda bound: f"at most {bound.le:,}"),
    (MinLen, lambda bound: "that is not empty"),
)
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "null",
}


def type_in_words(hint: Any) -> str:
    """Say what values a type has, such as ``a whole number above 0 or null``.

    Args:
        hint: The type of a field of a section, bounds included.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([type_in_words(arguments[0]), *_bounds_in_words(arguments[1:])])
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_in_words, arguments))
    if origin is Literal:
        return _either([str(value) for value in arguments])
    if origin is list:
        return f"a list, each item {type_in_words(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each item {type_in_words(arguments[0])}"
    if origin is dict:
        return f"a mapping, each value {type_in_words(arguments[1])}"
    if is_dataclass(hint):
        return f"a mapping of {', '.join(field.name for field in fields(hint))}"
    return _KINDS[hint]


def is_text(hint: Any) -> bool:
    """Return whether a type is text, or either text or null."""
    if get_origin(hint) in (Union, types.UnionType):
        return all(part is types.NoneType or is_text(part) for part in get_args(hint))
    return (get_args(hint)[0] if get_origin(hint) is Annotated else hint) is str


def is_list(hint: Any) -> bool:
    """Return whether a type is a list of any length, or either such a list or null."""
    if get_origin(hint) in (Union, types.UnionType, Annotated):
        return any(map(is_list, get_args(hint)))
    return get_origin(hint) is list


def value_in_words(value: object) -> str:
    """Say what a value is, such as ``the text 'fast'``; values are spelt as YAML spells them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is not finite"
    if isinstance(value, Mapping):
        return f"the mapping {value}"
    if isinstance(value, list | tuple):
        return f"the list {list(value)}"
    return f"{value}"


def _bounds_in_words(metadata: Sequence[object]) -> list[str]:
    bounds = [
        bound
        for item in metadata
        for bound in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]
    said = [say(bound) for bound in bounds for kind, say in _BOUNDS if isinstance(bound, kind)]
    return [" and ".join(said)] if said else []


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
