"""Sort the keys of a Megatron-LM ``fsdp_dtensor`` directory and check that they fit together.

Everything that can be wrong with the set of keys and the shapes is found here, before anything is
written. names.py says what keys mean; importer.py reads the values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megafsdp.checkpoint.megatron.names import TheirKey, joined_parts, place_in_stack, read_key
from megafsdp.checkpoint.megatron.values import plain_args
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.tools.dcp_reader import DCPDirectory
from megafsdp.errors import CheckpointError, listed

_LOGGER = logging.getLogger("megafsdp.checkpoint")

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Contents:
    """The contents of a Megatron-LM directory, under our names.

    Attributes:
        weights: Key of each weight and buffer by our name.
        states: Keys of optimizer states by our name and the state's name.
        fields: Fields of each parameter's group, by the name of the whole (unsplit) parameter.
        common: Keys of everything else.
        dropped: Keys that have no meaning outside the job that wrote them.
        parts: Names of the parts of each fused parameter.
        whole_by_part: Name of the fused parameter by the name of each part.
        stacks: Names of the tensors in each stack of experts, in the order of the experts.
        problems: Keys with problems, by kind of problem.
        has_stacks: A layer's experts become one stack.
    """

    has_stacks: bool

    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    fields: dict[str, dict[str, object]] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    whole_by_part: dict[str, str] = field(default_factory=dict)
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)

    def add(self, key: str, meant: TheirKey) -> None:
        """File a key under its meaning."""
        if meant.kind in ("common", "dropped"):
            (self.common if meant.kind == "common" else self.dropped).append(key)
            return
        is_weight = meant.kind == "model"
        keys = self.weights if is_weight else self.states.setdefault(meant.name, {})
        if keys.setdefault(meant.name if is_weight else meant.field, key) != key:
            self.complain("of a name that another key has too", key)

    def whole_name(self, name: str) -> str:
        """Return the name of the fused parameter that a name is a part of, or the name itself."""
        return self.whole_by_part.get(name, name)

    def stored_name(self, name: str) -> str:
        """Return the name in our checkpoint: the stack's name if the parameter is an expert's."""
        place = place_in_stack(name) if self.has_stacks else None
        return name if place is None else place[0]

    def members(self) -> dict[str, tuple[str, ...]]:
        """Return, for each tensor that we store, the names of its source tensors (mostly one)."""
        stored = dict.fromkeys(map(self.stored_name, self.weights))
        return {name: self.stacks.get(name, (name,)) for name in stored}

    def complain(self, kind: str, key: str) -> None:
        """Note a problem with a key."""
        self.problems.setdefault(kind, []).append(key)

    def require_sound(self, directory: Location) -> None:
        """Raise if there is any problem, or a common value is missing.

        Raises:
            CheckpointError: There are problems; the message lists all of them.
        """
        for key in ("iteration", "checkpoint_version"):
            if key not in self.common:
                self.complain("missing", key)
        if self.problems:
            found = (f"{len(keys)} {kind}: {listed(keys)}" for kind, keys in self.problems.items())
            raise CheckpointError.expected(
                "the keys of an fsdp_dtensor checkpoint",
                "; ".join(found),
                where=f"'{directory}'",
                hint="Use a whole checkpoint; leave unknown keys out with ignore=[patterns]",
            )


def read_contents(theirs: DCPDirectory, ignore: tuple[str, ...], *, has_stacks: bool) -> Contents:
    """Sort the keys of a directory and check that they fit together.

    Args:
        theirs: The directory.
        ignore: Patterns of keys to leave out.
        has_stacks: A layer's experts become one stack.

    Raises:
        CheckpointError: They do not fit; the message lists all problems.
    """
    contents = Contents(has_stacks)
    fields = _sort_keys(theirs, ignore, contents)
    contents.parts = joined_parts(contents.weights, fields)
    for name, parts in contents.parts.items():
        contents.whole_by_part |= dict.fromkeys(parts, name)
    for name, of_name in fields.items():
        # Fields occur in two forms: for each part of a parameter alike, or for the whole one.
        merged = contents.fields.setdefault(contents.whole_name(name), of_name)
        if repr(merged) != repr(of_name):
            contents.complain("of a group that is not that of the other parts", name)
    _check_states(theirs, contents)
    _check_groups(contents)
    if has_stacks:
        _find_stacks(theirs, contents)
    contents.require_sound(theirs.directory)
    if contents.dropped:
        _LOGGER.info("'%s': left out %s", theirs.directory, listed(contents.dropped))
    return contents


def _sort_keys(
    theirs: DCPDirectory, ignore: tuple[str, ...], contents: Contents
) -> dict[str, dict[str, object]]:
    """File each key under its meaning; return the fields of each parameter's group."""
    fields: dict[str, dict[str, object]] = {}
    numbered: dict[str, dict[str, object]] = {}
    for key in (*theirs.tensors, *theirs.objects):
        if any(fnmatchcase(key, pattern) for pattern in ignore):
            continue
        meant = read_key(key)
        if meant is None or (meant.kind == "model" and key in theirs.objects):
            contents.complain("unknown", key)
        elif meant.kind in ("group", "numbered"):
            of_kind = fields if meant.kind == "group" else numbered
            contents.dropped += _read_field(theirs, key, meant, of_kind.setdefault(meant.name, {}))
        else:
            contents.add(key, meant)
    if numbered and not fields:
        return _shared_fields(theirs, list(numbered.values()), contents.states)
    return fields


def _read_field(
    theirs: DCPDirectory, key: str, meant: TheirKey, fields: dict[str, object]
) -> list[str]:
    """Add a field of a group; return its key instead if an optimizer here cannot use it."""
    # Parameter numbers mean nothing outside the job.
    if meant.field.partition(".")[0] == "params":
        return [key]
    value = theirs.tensor(key) if key in theirs.tensors else theirs.value(key)
    plain, foreign = plain_args({key: value})
    if not foreign:
        fields[meant.field] = plain[key]
    return [key] if foreign else []


def _shared_fields(
    theirs: DCPDirectory, groups: list[dict[str, object]], names: Iterable[str]
) -> dict[str, dict[str, object]]:
    """Return for each parameter the fields that all groups share, as groups name no parameters."""
    first = groups[0]
    shared = {n: v for n, v in first.items() if len({repr(group.get(n)) for group in groups}) == 1}
    _LOGGER.warning(
        "'%s': its %d parameter groups do not name their parameters. All are one group here, "
        "without what differs between groups: %s",
        theirs.directory,
        len(groups),
        listed(sorted({name for group in groups for name in group} - {*shared})),
    )
    return {name: dict(shared) for name in names}


def _check_states(theirs: DCPDirectory, contents: Contents) -> None:
    for name, states in contents.states.items():
        if name not in contents.weights:
            for key in states.values():
                contents.complain("of a parameter that has no weight", key)
            continue
        shape = theirs.tensors[contents.weights[name]].shape
        present = [state for state in _MOMENTS if state in states]
        if len(present) == 1:
            lacking = next(state for state in _MOMENTS if state not in states)
            contents.complain("missing", f"the state {lacking} of {name}")
        for key in (states[state] for state in present):
            entry = theirs.tensors.get(key)
            if entry is None or entry.shape != shape:
                found = "no tensor" if entry is None else entry.shape
                contents.complain("of another shape", f"{key} {found}, its weight {shape}")


def _check_groups(contents: Contents) -> None:
    covered = set()
    for name, fields in contents.fields.items():
        for part in contents.parts.get(name, (name,)):
            covered.add(part)
            if part not in contents.weights:
                contents.complain("missing", f"the weight {part}")
            elif fields.get("step") and part not in contents.states:
                contents.complain("missing", f"the states of {part}")
    for name in contents.states:
        if name in contents.weights and name not in covered:
            contents.complain("missing", f"the parameter group of {name}")


def _find_stacks(theirs: DCPDirectory, contents: Contents) -> None:
    """Note the stacks of experts, and the problems of experts that cannot form a stack."""
    found: dict[str, dict[int, str]] = {}
    for name in contents.weights:
        if (place := place_in_stack(name)) is not None:
            stack, index = place
            if found.setdefault(stack, {}).setdefault(index, name) != name:
                contents.complain("of an expert that another key has too", name)
    for stack, by_index in found.items():
        count = max(by_index) + 1
        for index in sorted(set(range(count)) - set(by_index)):
            contents.complain("missing", f"expert {index} of {stack}")
        contents.stacks[stack] = tuple(by_index[index] for index in sorted(by_index))
        first, *others = contents.stacks[stack]
        for name in others:
            if _facts(theirs, contents, name) != _facts(theirs, contents, first):
                kind = "of another shape, dtype, states or group than the layer's first expert"
                contents.complain(kind, name)


def _facts(theirs: DCPDirectory, contents: Contents, name: str) -> tuple[object, ...]:
    """Return the facts that must be equal for all experts of a stack."""
    entry = theirs.tensors[contents.weights[name]]
    fields = contents.fields.get(contents.whole_name(name))
    return entry.shape, entry.dtype, sorted(contents.states.get(name, {})), repr(fields)
