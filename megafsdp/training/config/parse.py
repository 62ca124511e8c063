"""From YAML files and command lines to a :class:`Config`, and back to YAML.

jsonargparse does the parsing and the types; here stand the names: an unknown one is answered with
the nearest known ones, wherever it was written.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jsonargparse
import yaml

from megafsdp.errors import ConfigError, expected
from megafsdp.training.config.sections import Config

_NUM_SUGGESTIONS = 3
_DESCRIPTION = (
    "Pretrain a model. Every value of the configuration can stand in a YAML file (--config) and be "
    "overridden on the command line (--section.field value). With --dry-run [RANKS] nothing is "
    "trained: layouts, memory and collectives of that many ranks are printed (--json for JSON). "
    "Text arrives as it is written; the bare word null on the command line stands for no value."
)
_CONFIG_HELP = "YAML file; of several a later one overrides, and options override them all."
_MODE = "megafsdp"
_T = TypeVar("_T")


class _Text(str):
    """Text that a file or a caller has given as text.

    jsonargparse reads a plain str as YAML once more, where "null" and "# Title" are no value.
    """


class _Dumper(yaml.SafeDumper):
    """Quotes text that jsonargparse's YAML reads as a number, and PyYAML's does not."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class _Parser(jsonargparse.ArgumentParser):
    """Raises ConfigError in place of printing usage and exiting."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise _unreadable("the training configuration", message) from ex


def parse_config(arguments: Sequence[str]) -> Config:
    """Read a configuration from a command line; local.

    ``--config FILE`` reads YAML, ``--section.field value`` overrides it, wherever the two stand;
    ``--print-config`` prints the result as YAML and exits, ``--help`` lists all values.

    Args:
        arguments: The words after ``megafsdp train``.

    Returns:
        The configuration; values across sections are not checked against each other yet.

    Raises:
        ConfigError: A file cannot be read, a name is unknown (the nearest are named), or a value
            has the wrong type.
    """
    words = ["--print_config" if w == "--print-config" else w for w in arguments]
    _check_options(words)
    ordered = _files_first(words)
    return _instantiate(lambda parser: parser.parse_args(ordered))


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Build a configuration from nested dicts, as YAML has them.

    Raises:
        ConfigError: A name is unknown, or a value has the wrong type.
    """
    _check_names(values, "the given values")
    return _instantiate(lambda parser: parser.parse_object(_marked(dict(values))))


def to_yaml(config: Config) -> str:
    """Return the whole configuration as YAML that ``--config`` reads."""
    return _dump(config.to_dict())


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the values that differ between two configurations given as dicts, one line each."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    absent = "absent"
    return [
        f"{name}: {before.get(name, absent)!r} -> {after.get(name, absent)!r}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, absent) != after.get(name, absent)
    ]


def _instantiate(parse: Callable[[_Parser], jsonargparse.Namespace]) -> Config:
    jsonargparse.set_loader(_MODE, _load, (yaml.YAMLError,))
    jsonargparse.set_dumper(_MODE, _dump)
    parser = _Parser(prog="megafsdp train", description=_DESCRIPTION, parser_mode=_MODE)
    parser.add_argument("--config", action="config", help=_CONFIG_HELP)
    parser.add_class_arguments(Config)
    try:
        parsed = parse(parser)
        for name, value in list(parsed.items()):
            parsed[name] = _unmarked(value)
        parsed = parser.instantiate(parsed)
    except (argparse.ArgumentError, TypeError) as error:
        raise _unreadable("the training configuration", str(error)) from error
    return Config(**{f.name: parsed[f.name] for f in fields(Config)})


def _load(text: str) -> object:
    """Read a file, or a value of the command line; what YAML takes for nothing is that text."""
    _check_keys(text)
    value = jsonargparse.get_loader("yaml")(text)
    return text if value is None else _marked(value)


def _dump(values: object) -> str:
    return yaml.dump(_unmarked(values), Dumper=_Dumper, sort_keys=False, width=100)


def _marked(value: _T) -> _T:
    return _map_text(_Text, value)


def _unmarked(value: _T) -> _T:
    return _map_text(str, value)


def _map_text(convert: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _map_text(convert, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_text(convert, each) for each in value)
    return convert(value) if isinstance(value, str) else value


def _check_options(words: Sequence[str]) -> None:
    known = set(_known_names()) | {"config", "print_config", "help"}
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        if " " in name:
            # Text, which argparse takes for a value too.
            continue
        if name.removesuffix("+") not in known:
            raise _unknown(name, "the command line", known)
        if name == "config":
            path = value if equals else next(iter(words[index + 1 :]), "")
            _check_names(_read_yaml(path), f"file '{path}'")


def _files_first(words: Sequence[str]) -> list[str]:
    """Return words with the files before the options, which jsonargparse applies in order."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--config":
            files += [word, *itertools.islice(rest, 1)]
        else:
            (files if word.startswith("--config=") else others).append(word)
    return files + others


def _check_names(values: object, where: str) -> None:
    known = set(_known_names())
    if not isinstance(values, Mapping):
        raise _unreadable(where, f"a {type(values).__name__}")
    for section, content in values.items():
        if section not in known:
            raise _unknown(str(section), where, known)
        if content is None:
            raise _unreadable(where, f"section '{section}' without a value")
        for name in content if isinstance(content, Mapping) else ():
            if f"{section}.{name}" not in known:
                raise _unknown(f"{section}.{name}", where, known)


def _read_yaml(path: str) -> object:
    try:
        text = Path(path).read_text()
        _check_keys(text)
        return yaml.safe_load(text) or {}
    # ValueError: text that is not UTF-8, or a date that no calendar has.
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(f"file '{path}'", str(error)) from error


def _check_keys(text: str) -> None:
    """Check that no mapping in YAML has a key twice, of which YAML would take the last.

    Raises:
        yaml.YAMLError: One has, or the text is not YAML.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    left, seen = [root] if root else [], set()
    while left:
        node = left.pop()
        # Aliases lead to one node again and again.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                left.append(value)
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if (first := lines.get((key.tag, key.value))) is not None:
                        raise yaml.YAMLError(f"'{key.value}' twice, in lines {first} and {line}")
                    lines[key.tag, key.value] = line


def _known_names() -> Iterator[str]:
    for section in fields(Config):
        yield section.name
        cls = section.default_factory
        if is_dataclass(cls):
            yield from (f"{section.name}.{f.name}" for f in fields(cls))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unknown(name: str, where: str, known: set[str]) -> ConfigError:
    # The last part alone finds a right name in the wrong section.
    last = {k: k.rpartition(".")[2] for k in sorted(known)}
    similar = difflib.get_close_matches(name, sorted(known), n=_NUM_SUGGESTIONS, cutoff=0.6)
    namesakes = difflib.get_close_matches(name.rpartition(".")[2], last.values(), cutoff=0.8)
    nearest = list(dict.fromkeys([*similar, *(k for k in last if last[k] in namesakes)]))
    hint = f"Did you mean {' or '.join(nearest[:_NUM_SUGGESTIONS])}" if nearest else "See --help"
    return ConfigError(expected("a known name", repr(name), where=where, hint=hint))


def _unreadable(where: str, got: str) -> ConfigError:
    return ConfigError(
        expected(
            "YAML or options of sections and fields",
            got.replace("\n", " "),
            where=where,
            hint="See --help for names and types, and --print-config for an example",
        )
    )
