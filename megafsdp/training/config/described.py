"""Every value of the configuration with its type, default and description, as the sections say.

The command line takes its options and their help from here, and so does the page of the
documentation that lists all values. Nothing is parsed or checked here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from megafsdp.training.config.sections import Config


@dataclass(frozen=True, slots=True)
class DescribedValue:
    """One value of a section, or of a group of values in it.

    Attributes:
        path: Its name as an option, ``section.field``.
        hint: Its type, bounds included.
        default: The value if none is given.
        description: What it means, from the docstring of its section.
    """

    path: str
    hint: Any
    default: object
    description: str


def sections() -> dict[str, type]:
    """Return the class of each section by its name, in the order of the configuration."""
    hints = get_type_hints(Config)
    return {field.name: hints[field.name] for field in fields(Config)}


def summary_of(section: type) -> str:
    """Return the first line of a section's docstring."""
    return inspect.cleandoc(section.__doc__ or "").partition("\n")[0]


def values_of(prefix: str, section: type) -> Iterator[DescribedValue]:
    """Yield the values of a section; the values of a group follow the group.

    Args:
        prefix: The name of the section, or the path of the group.
        section: Its class.
    """
    defaults, hints = section(), get_type_hints(section, include_extras=True)
    descriptions = _descriptions(section)
    for name, hint in hints.items():
        path = f"{prefix}.{name}"
        yield DescribedValue(path, hint, getattr(defaults, name), descriptions[name])
        for part in get_args(hint):
            if isinstance(part, type) and is_dataclass(part):
                yield from values_of(path, part)


def _descriptions(section: type) -> dict[str, str]:
    """Return the description of each field of a section by its name, from the docstring."""
    text = inspect.cleandoc(section.__doc__ or "")
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", description) for name, description in found}
