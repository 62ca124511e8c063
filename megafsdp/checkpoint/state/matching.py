"""Match the keys that a load requests with the keys of a checkpoint, strictly both ways by default.

A requested key must be stored, with equal shape and dtype, and a stored key of the requested
sections must be used; :class:`Rules` says what may differ. One error lists all differences. Nothing
is read or written here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from megafsdp.checkpoint.format.manifest import Manifest, path_of, section_of
from megafsdp.checkpoint.format.regions import Stored
from megafsdp.errors import CheckpointError, expected, listed

STRICTNESS = ("all", "model", "none")


@dataclass(frozen=True, slots=True)
class Rules:
    """How strictly a load matches.

    Attributes:
        strict: ``"all"``, ``"model"`` (sections other than the model may differ) or ``"none"``.
        ignore: Patterns of keys that are left alone on both sides.
        allow_missing: Patterns of requested keys that the checkpoint need not have.
        whole_of: Key of a part of a fused tensor -> key of the whole, which patterns match too.
        hint: Advice in the error; None names the arguments of ``load``.
    """

    strict: str
    ignore: tuple[str, ...]
    allow_missing: tuple[str, ...]
    whole_of: Mapping[str, str] = field(default_factory=dict)
    hint: str | None = None

    def __post_init__(self) -> None:
        """Check the choice.

        Raises:
            ValueError: ``strict`` is none of the choices.
        """
        if self.strict not in STRICTNESS:
            raise ValueError(
                expected(
                    f"strict to be one of {STRICTNESS}",
                    repr(self.strict),
                    where="checkpoint.load()",
                    hint="Pass strict='all' unless the checkpoint is meant to differ",
                )
            )

    def is_strict(self, key: str) -> bool:
        """Return whether a key must be on both sides."""
        return self.strict == "all" or (self.strict == "model" and section_of(key) == "model")

    def is_ignored(self, key: str) -> bool:
        """Return whether the caller left a key out."""
        return self._matches(key, self.ignore)

    def may_be_missing(self, key: str) -> bool:
        """Return whether a requested key need not be stored."""
        return not self.is_strict(key) or self._matches(key, self.allow_missing)

    def _matches(self, key: str, patterns: tuple[str, ...]) -> bool:
        whole = self.whole_of.get(key)
        return _matches(key, patterns) or (whole is not None and _matches(whole, patterns))


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of matching.

    Attributes:
        sources: Requested key -> stored key to read, tied names resolved.
        skipped: Requested keys whose targets stay as they are.
        unused: Stored keys of the requested sections that were not requested.
        idle: Patterns of keys to leave alone that match none.
    """

    sources: dict[str, str]
    skipped: list[str]
    unused: list[str]
    idle: list[str]


def as_patterns(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a tuple.

    Raises:
        ValueError: A single string was given; each of its characters would be a pattern.
    """
    if isinstance(patterns, str):
        raise ValueError(
            expected(
                f"a sequence of patterns for {name}",
                repr(patterns),
                where="checkpoint.load()",
                hint=f"Write {name}=({patterns!r},)",
            )
        )
    return tuple(patterns)


def match(
    manifest: Manifest,
    *,
    tensors: Mapping[str, Stored],
    objects: set[str],
    sections: set[str],
    elsewhere: Collection[str] = (),
    rules: Rules,
    where: str,
) -> Match:
    """Pair requested keys with stored ones.

    Args:
        manifest: What is stored.
        tensors: Requested tensors by key.
        objects: Requested non-tensor keys.
        sections: Sections whose stored keys must all be used.
        elsewhere: Names of parameters whose stored keys other ranks use.
        rules: How strictly to match.
        where: The checkpoint, for messages.

    Raises:
        CheckpointError: Keys, shapes or dtypes differ in a way the rules do not allow; all are
            listed.
    """
    stored = {key: key for key in (*manifest.tensors, *manifest.objects)} | manifest.aliases
    problems: dict[str, list[str]] = {}
    keys = {*stored, *tensors, *objects}
    alone = {pattern: replace(rules, ignore=(pattern,)) for pattern in rules.ignore}
    idle = [pattern for pattern, rule in alone.items() if not any(map(rule.is_ignored, keys))]
    result = Match({}, [], [], idle)
    for key in (*tensors, *sorted(objects)):
        source = stored.get(key)
        if rules.is_ignored(key):
            result.skipped.append(key)
        elif source is None or (source in manifest.tensors) != (key in tensors):
            result.skipped.append(key)
            if not rules.may_be_missing(key):
                problems.setdefault("missing in the checkpoint", []).append(key)
        else:
            result.sources[key] = source
            if key in tensors:
                _compare(key, tensors[key], manifest, source=source, rules=rules, problems=problems)
    used = set(result.sources.values())
    for key, source in sorted(stored.items()):
        is_ignored = rules.is_ignored(key) or rules.is_ignored(source)
        is_ignored = is_ignored or _parameter_of(key) in elsewhere
        if section_of(key) in sections and source not in used and not is_ignored:
            result.unused.append(key)
            if rules.is_strict(key):
                problems.setdefault("in the checkpoint but not asked for", []).append(key)
    if problems:
        raise CheckpointError(_message(problems, where, rules.hint))
    return result


def _compare(
    key: str,
    tensor: Stored,
    manifest: Manifest,
    *,
    source: str,
    rules: Rules,
    problems: dict[str, list[str]],
) -> None:
    entry = manifest.tensors[source]
    if entry.shape != tuple(tensor.shape):
        problems.setdefault("of another shape", []).append(
            f"{key} stored {entry.shape}, wanted {tuple(tensor.shape)}"
        )
    elif entry.torch_dtype != tensor.dtype and rules.strict != "none":
        problems.setdefault("of another dtype", []).append(
            f"{key} stored {entry.torch_dtype}, wanted {tensor.dtype}"
        )


def _message(problems: dict[str, list[str]], where: str, hint: str | None) -> str:
    by_kind = [f"{len(names)} {kind}: {listed(names)}" for kind, names in problems.items()]
    return expected(
        "the names, shapes and dtypes of the checkpoint",
        "; ".join(by_kind),
        where=where,
        hint=hint
        or (
            "Build the model and optimizer that were saved, or relax with ignore=[patterns], "
            "allow_missing=[patterns], strict='model' (only the model must match) or strict='none' "
            "(take what fits; also casts dtypes)"
        ),
    )


def _parameter_of(key: str) -> str:
    path = path_of(key)
    return path[2] if len(path) == 4 else path[-1]


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    """Match patterns against the whole key, or against the key from the parameter's name on."""
    is_state = key.startswith("optimizer.state.")
    short = key.removeprefix("optimizer.state.") if is_state else key.split(".", 1)[-1]
    return any(fnmatchcase(key, p) or fnmatchcase(short, p) for p in patterns)
