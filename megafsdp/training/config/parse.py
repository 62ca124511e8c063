"""Read a :class:`Config` from YAML files and command lines, and write it as YAML.

pydantic checks each value alone, by the types and bounds of the sections; the options of the
command line and their help are the sections' fields and docstrings. This file adds what YAML and
pydantic lack: numbers such as ``1e3``, errors for repeated keys, and the known names nearest to an
unknown one. Checks across values are in ``megafsdp.training.config.validate``.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megafsdp.errors import ConfigError, expected
from megafsdp.training.config.blend import separate_weights, words_of
from megafsdp.training.config.described import (
    DescribedValue,
    sections,
    summary_of,
    values_of,
)
from megafsdp.training.config.sections import CONFIG_FILE, METRICS_FILE, Config
from megafsdp.training.config.words import is_list, is_text, type_in_words, value_in_words

_NUM_SUGGESTIONS = 3
_DESCRIPTION = (
    "Pretrain a model. Every value of the configuration can stand in a YAML file (--config) and be "
    "overridden on the command line (--section.field value). With --dry-run [RANKS] nothing is "
    "trained: layouts, memory and collectives of that many ranks are printed (--json for JSON), "
    "and drawn with --html FILE. "
    "Text arrives as it is written; the bare word null on the command line stands for no value; "
    "--section.field+=value appends to a list."
)
_USAGE = "megafsdp train [--config FILE] [--section.field VALUE] [--print-config]"
_ALL_SECTIONS = "all"
_HELP_HELP = (
    "Describe the values of these sections, or of all with the word all; without any list them."
)
_CONFIG_HELP = "YAML file; of several a later one overrides, and options override them all."
_HINT = "See megafsdp train --help for the sections, and --print-config for an example"
_COMMAND_LINE = "the command line"


class _Loader(yaml.SafeLoader):
    """Refuse repeated keys, where YAML would take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if (first := lines.get((key.tag, key.value))) is not None:
                    raise yaml.YAMLError(f"'{key.value}' twice, in lines {first} and {line}")
                lines[key.tag, key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quote text that :class:`_Loader` reads as a number."""


# PyYAML reads 1e3 as text. A date stays text, as no field is a date.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)
# PyYAML reads 010 as 8, 1:30 as 90 and 0x10 as 16. Here they stay text, which number fields refuse.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _decimal(node.value))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def parse_config(arguments: Sequence[str]) -> Config:
    """Read a configuration from a command line; local.

    ``--config FILE`` reads YAML and ``--section.field value`` overrides it, in any order;
    ``--print-config`` prints the result as YAML and exits, ``--help`` lists the sections, and
    ``--help SECTION`` the values of one.

    Args:
        arguments: The words after ``megafsdp train``.

    Returns:
        The configuration; values across sections are not checked against each other yet.

    Raises:
        ConfigError: A file cannot be read, a name is unknown (the nearest are named), or a value
            has the wrong type or is out of its range; or a run's config.yaml names another folder
            for the run than the one that it lies in.
    """
    try:
        given, unknown = _parser(sections()).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise _unreadable(str(error), _COMMAND_LINE) from error
    if given.help is not None:
        print(_help(given.help), end="")
        raise SystemExit(0)
    if unknown and unknown[0].startswith("--"):
        name = unknown[0][2:].partition("=")[0]
        raise _section(name) if name in sections() else _unknown(name, _COMMAND_LINE)
    if unknown:
        raise _unreadable(repr(unknown[0]), _COMMAND_LINE)
    values: dict[str, dict[str, Any]] = {}
    named_in = None
    for path in given.config:
        for section, content in _read_file(path).items():
            values.setdefault(section, {}).update(content)
            named_in = path if section == "run" and "directory" in content else named_in
    for option, value in given.options:
        _override(values, option, value)
        named_in = None if option == "--run.directory" else named_in
    config = _checked(values, _COMMAND_LINE)
    if given.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    if named_in is not None:
        _require_own_folder(config, Path(named_in))
    return config


def _require_own_folder(config: Config, path: Path) -> None:
    """Refuse the file of a run whose folder was moved: it would begin another run, unasked."""
    folder = path.parent
    is_of_run = path.name == CONFIG_FILE and (folder / METRICS_FILE).is_file()
    if is_of_run and folder.resolve() != config.run_directory.resolve():
        raise ConfigError(
            expected(
                f"the run's own folder, '{folder}'",
                repr(config.run.directory),
                where=f"run.directory of '{path}'",
                hint=f"Give --run.directory {folder} to go on with this run, or another folder to "
                "begin a new one; relative folders count from where the command is started",
            )
        )


def _override(values: dict[str, Any], option: str, value: object) -> None:
    """Set the value of an option, or add to it if the option ends in a plus."""
    *parents, name = option.strip("-+").split(".")
    into = values
    for parent in parents:
        if not isinstance(into.get(parent), dict):
            into[parent] = {}
        into = into[parent]
    if option.endswith("+"):
        default = _known_names()[".".join([*parents, name])]
        before: Any = words_of(into.get(name, default)) or []
        value = [*before, *(value if isinstance(value, list) else [value])]
    into[name] = value


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Build a configuration from nested dicts, as YAML has them.

    Raises:
        ConfigError: A name is unknown, or a value has the wrong type or is out of its range.
    """
    return _checked(values, "the training configuration")


def to_yaml(config: Config) -> str:
    """Return the whole configuration as YAML that ``--config`` reads."""
    return yaml.dump(config.to_dict(), Dumper=_Dumper, sort_keys=False, width=100)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the values that differ between two configurations given as dicts, one line each."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    absent = object()

    def shown(values: Mapping[str, object], name: str) -> str:
        return repr(values[name]) if name in values else "absent"

    return [
        f"{name}: {shown(before, name)} -> {shown(after, name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name, absent) != after.get(name, absent)
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _known_names() -> dict[str, Any]:
    """Return the default of each field by its ``section.field``."""
    return {value.path: value.default for value in _all_values()}


def _all_values() -> Iterator[DescribedValue]:
    for name, cls in sections().items():
        yield from values_of(name, cls)


class _Option(argparse.Action):
    """Keep an option's spelling and value, in the order of the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.options = [*namespace.options, (option_string, values)]


def _parser(chosen: Mapping[str, type]) -> argparse.ArgumentParser:
    """Return a parser with an option for each field of some sections."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description=_DESCRIPTION,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", nargs="*", metavar="SECTION", help=_HELP_HELP)
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=os.path.expanduser,
        metavar="FILE",
        help=_CONFIG_HELP,
    )
    names, text = ("--print-config", "--print_config"), "Print the values as YAML and exit."
    parser.add_argument(*names, action="store_true", help=text)
    parser.set_defaults(options=[])
    for section, cls in chosen.items():
        group = parser.add_argument_group(section, summary_of(cls))
        for value in values_of(section, cls):
            kind, spelt = type_in_words(value.hint), json.dumps(value.default)
            group.add_argument(
                *(f"--{value.path}{sign}" for sign in ("", "+")[: 1 + ("a list, each" in kind)]),
                action=_Option,
                dest="options",
                type=_text if is_text(value.hint) else _value,
                metavar="VALUE",
                help=f"{value.description} ({kind}; default {spelt})".replace("%", "%%"),
            )
    return parser


def _help(wanted: Collection[str]) -> str:
    """Return the help of some sections; without any, their list."""
    known = sections()
    for name in wanted:
        if name not in (*known, _ALL_SECTIONS):
            raise _unknown(name, f"--help {name}", [*known, _ALL_SECTIONS])
    if not wanted:
        width = max(map(len, known)) + 2
        rows = [f"  {name:<{width}}{summary_of(cls)}" for name, cls in known.items()]
        how = "megafsdp train --help SECTION describes the values of a section."
        return "\n".join([_parser({}).format_help(), "sections:", *rows, "", how, ""])
    is_all = _ALL_SECTIONS in wanted
    chosen = {name: cls for name, cls in known.items() if is_all or name in wanted}
    return _parser(chosen).format_help()


def _decimal(text: str) -> int | str:
    is_decimal = re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", text) is not None
    return int(text.replace("_", "")) if is_decimal else text


def _text(word: str) -> str | None:
    return None if word == "null" else word


def _value(word: str) -> object:
    try:
        value = yaml.load(word, _Loader)
    except yaml.YAMLError as error:
        # In this class the parser names the option.
        what = f"{word!r} is not YAML, quote what it reserves as in '\"*\"': {error}"
        raise argparse.ArgumentTypeError(what) from error
    # YAML reads empty words and comments as null too.
    return word if value is None and word.lower() not in ("null", "~") else value


def _read_file(path: str) -> dict[str, dict[str, Any]]:
    """Return the values of a YAML file, each of them checked."""
    where = f"file '{path}'"
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        what = "a file that can be read"
        got = error.strerror or str(error)
        raise ConfigError(
            expected(what, got, where=where, hint="Name a file that you may read")
        ) from error
    # ValueError: text that is not UTF-8.
    except (ValueError, yaml.YAMLError) as error:
        raise _unreadable(str(error), where) from error
    _checked(values, where)
    return dict(values)


def _checked(values: object, where: str) -> Config:
    """Return the configuration of nested dicts, with each value checked alone."""
    if isinstance(values, Mapping) and isinstance(data := values.get("data"), Mapping):
        values = {**values, "data": separate_weights(data)}
    try:
        return _adapter().validate_json(json.dumps(values))
    except ValidationError as error:
        found = error.errors()
    except (TypeError, ValueError) as error:
        raise _unreadable(str(error), where) from error
    for each in found:
        if each["type"] == "unexpected_keyword_argument":
            raise _unknown(".".join(map(str, each["loc"])), where)
    raise _wrong_type(values, found[0]["loc"], where)


def _wrong_type(values: object, place: Sequence[object], where: str) -> ConfigError:
    """Return the error for a value of the wrong type, with the whole value of its field."""
    # The place may go on into the field: to an item of a list, or to one type of a union.
    hints = {value.path: value.hint for value in _all_values()}
    names: list[str] = []
    for part in place:
        if ".".join([*names, str(part)]) not in (*sections(), *hints):
            break
        names.append(str(part))
        values = values.get(part) if isinstance(values, Mapping) else values
    path = ".".join(names)
    if path not in hints:
        name = f"section {path}" if path else "the values"
        what = f"{name} to be a mapping of {'fields' if path else 'sections'} to values"
        return ConfigError(expected(what, value_in_words(values), where=where, hint=_HINT))
    what = f"{path} to be {type_in_words(hints[path])}"
    hint = f"See megafsdp train --help {names[0]} for what it does"
    if isinstance(values, str | int | float) and is_list(hints[path]):
        hint = f"Write a list of one item as [{values}]. {hint}"
    return ConfigError(expected(what, value_in_words(values), where=where, hint=hint))


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _unknown(name: str, where: str, names: Collection[str] | None = None) -> ConfigError:
    # Comparing the last part alone finds a right name in the wrong section.
    known = sorted([*_known_names(), *(field.name for field in fields(Config))])
    known = known if names is None else sorted(names)
    last = {k: k.rpartition(".")[2] for k in known}
    similar = difflib.get_close_matches(name, known, n=_NUM_SUGGESTIONS, cutoff=0.6)
    namesakes = difflib.get_close_matches(name.rpartition(".")[2], last.values(), cutoff=0.8)
    nearest = list(dict.fromkeys([*similar, *(k for k in last if last[k] in namesakes)]))
    hint = f"Did you mean {' or '.join(nearest[:_NUM_SUGGESTIONS])}" if nearest else "See --help"
    if name in known:
        # A file whose keys are spelt as options are.
        hint = f"Write it as {': {'.join(name.split('.'))}: VALUE{'}' * name.count('.')}"
    return ConfigError(expected("a known name", repr(name), where=where, hint=hint))


def _section(name: str) -> ConfigError:
    """Return the error for a section that was given as if it were one value."""
    field = next(known for known in _known_names() if known.startswith(f"{name}."))
    hint = f"Give one of its fields, such as --{field}; megafsdp train --help {name} lists them"
    what = "a field of a section"
    return ConfigError(expected(what, f"the section '{name}'", where=_COMMAND_LINE, hint=hint))


def _unreadable(got: str, where: str) -> ConfigError:
    what, got = "YAML or options of sections and fields", got.replace("\n", " ")
    return ConfigError(expected(what, got, where=where, hint=_HINT))
