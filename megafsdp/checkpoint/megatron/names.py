"""Names in Megatron-LM's ``fsdp_dtensor`` checkpoints, mapped to ours and back; pure functions.

A parameter's name is Megatron's FQN in both formats, so most of a key is the same. The differences
are the wrappers in front (``module.``), a norm that a Transformer Engine layer keeps inside the
linear map that follows it, and the inner layer of multi-token prediction. Fused parameters are
stored as the same parts under the same names. A layer's experts are one stack in our format, and
one tensor per expert, by global index, in Megatron-LM's. Nothing here touches a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from megafsdp.checkpoint.state.experts import ANY_EXPERT
from megafsdp.errors import CheckpointError, expected

PRECISIONS = ("bf16", "fp16", "fp32")
TRANSFORMER_IMPLS = ("transformer_engine", "local")
VERSION = 3.0
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FLOPS = "num_floating_point_operations_so_far"
SCHEDULER = "opt_param_scheduler"
GROUP_META = "optimizer.param_to_group_meta"

# Common keys, and prefixes of groups of common keys.
_COMMON = frozenset({"args", "checkpoint_version", "iteration", FLOPS})
_COMMON_GROUPS = (f"{SCHEDULER}.", "rng_state.")
# State of Megatron's own machinery, which no other program can use.
_MACHINERY = ("rerun_state_machine", "content_metadata")
_EXTRA_STATE = "._extra_state"

_MODEL = re.compile(r"model\.(?:module\.)*(?P<name>.+)")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(?P<name>.+)\.(?P<field>[^.]+)")
# NVIDIA's converter from torch_dist writes one more dot after the wrappers.
_GROUP = re.compile(
    r"optimizer\.param_to_group_meta\.(?:module\.)*\.?(?P<name>[^.].*)\.(?P<field>[^.]+)"
)
# That converter also copies groups with numbered parameters; the numbers mean nothing here.
_NUMBERED_GROUP = re.compile(
    r"optimizer\.(?:\d+\.optimizer\.)?param_groups\.(?P<name>\d+)\.(?P<field>.+)"
)

# A linear map with a norm in front of it, and the name of that norm where it is its own layer.
_FUSED_NORMS = (
    ("self_attention.linear_qkv", "input_layernorm"),
    ("self_attention.linear_qkv_down_proj", "input_layernorm"),
    ("self_attention.in_proj", "input_layernorm"),
    ("mlp.linear_fc1", "pre_mlp_layernorm"),
    ("self_attention.linear_q_up_proj", "self_attention.q_layernorm"),
    ("self_attention.linear_kv_up_proj", "self_attention.kv_layernorm"),
)
_TE_NORM = re.compile(
    rf"(?P<layer>.*\.)(?P<linear>{'|'.join(re.escape(linear) for linear, _ in _FUSED_NORMS)})"
    r"\.layer_norm_(?P<leaf>weight|bias)"
)
_NORMS = sorted({norm for _, norm in _FUSED_NORMS})
_LOCAL_NORM = re.compile(
    rf"(?P<layer>.*\.)(?P<norm>{'|'.join(map(re.escape, _NORMS))})\.(?P<leaf>weight|bias)"
)
_EXPERT = re.compile(r"(\.experts\.local_experts)\.\d+\.")
_STACK = re.compile(r"(?P<experts>.*\.experts)\.(?P<leaf>linear_fc[12]\.weight)(?P<part>_[wv])?")
# A grouped layer numbers its parameters, a sequential one its modules.
_OF_STACK = (
    re.compile(_STACK.pattern.replace("(?P<part>", r"(?P<index>\d+)(?P<part>")),
    re.compile(
        _STACK.pattern.replace(r"\.(?P<leaf>", r"\.local_experts\.(?P<index>\d+)\.(?P<leaf>")
    ),
)
_MTP_ON_DISK = re.compile(r"((?:.*\.)?mtp\.layers\.\d+)\.transformer_layer\.")
_MTP_IN_MODULE = re.compile(r"((?:.*\.)?mtp\.layers\.\d+)\.mtp_model_layer\.")

# Suffixes of the parts' names, in the order in which they are joined along dim 0.
_SUFFIXED_PARTS = (
    (re.compile(r".*\blinear_fc1\.(?:weight|bias)\d*"), ("_w", "_v")),
    *(
        (re.compile(r".*\bin_proj\.weight"), suffixes)
        for suffixes in (
            (".query", ".key", ".value", ".z", ".beta", ".alpha"),
            (".query", ".key", ".value", ".z", ".f", ".b", ".w"),
            (".query", ".key", ".value", ".g", ".gate"),
            (".query", ".key", ".value"),
            (".z", ".x", ".B", ".C", ".dt"),
        )
    ),
    (re.compile(r".*\bconv1d\.(?:weight|bias)"), (".query", ".key", ".value")),
    (re.compile(r".*\bconv1d\.(?:weight|bias)"), (".x", ".B", ".C")),
)
_DOWN_PROJ = re.compile(r"(.*\b)linear_qkv_down_proj\.(weight|bias)")
_DOWN_PROJS = ("linear_q_down_proj", "linear_kv_down_proj")


@dataclass(frozen=True, slots=True)
class TheirKey:
    """The meaning of a Megatron-LM key.

    Attributes:
        kind: ``model``, ``state``, ``group``, ``numbered`` (a group that does not name its
            parameters), ``common``, or ``dropped`` (no meaning outside the job that wrote it).
        name: Our name of the parameter or buffer; the whole key of a common or dropped value; the
            number of a numbered parameter group.
        field: Name of the optimizer state or of the group's field.
    """

    kind: str
    name: str
    field: str = ""


def read_key(key: str) -> TheirKey | None:
    """Return the meaning of a Megatron-LM key, or None if it is unknown."""
    if key.endswith(_EXTRA_STATE) or f"{_EXTRA_STATE}." in key or key.startswith(_MACHINERY):
        return TheirKey("dropped", key)
    if key in _COMMON or key.startswith(_COMMON_GROUPS):
        return TheirKey("common", key)
    if found := _STATE.fullmatch(key):
        return TheirKey("state", our_name(found["name"]), found["field"])
    if found := _GROUP.fullmatch(key):
        return TheirKey("group", our_name(found["name"]), found["field"])
    if found := _NUMBERED_GROUP.fullmatch(key):
        return TheirKey("numbered", found["name"], found["field"])
    if found := _MODEL.fullmatch(key):
        return TheirKey("model", our_name(found["name"]))
    return None


def our_name(name: str) -> str:
    """Return our name of a Megatron-LM parameter, given without wrappers.

    A norm inside a linear map becomes a layer of its own, and the inner layer of multi-token
    prediction is named as its module is, ``mtp_model_layer``.
    """
    if found := _TE_NORM.fullmatch(name):
        name = f"{found['layer']}{dict(_FUSED_NORMS)[found['linear']]}.{found['leaf']}"
    return _MTP_ON_DISK.sub(r"\1.mtp_model_layer.", name)


def place_in_stack(name: str) -> tuple[str, int] | None:
    """Return our stack for a parameter of one expert, and the expert's index; None if not one.

    Args:
        name: Name of a whole parameter or of a part, as :func:`our_name` returns it.
    """
    for pattern in _OF_STACK:
        if found := pattern.fullmatch(name):
            return f"{found['experts']}.{found['leaf']}{found['part'] or ''}", int(found["index"])
    return None


def is_output_norm(name: str) -> bool:
    """Return whether our tensor of this name is the norm after a gated delta rule.

    We store its weight plain. Megatron-LM stores weight - 1 if it does so for all norms
    (``apply_layernorm_1p``); we store the other norms in that form too.
    """
    return name.endswith(".self_attention.out_norm.weight")


def is_stack(name: str) -> bool:
    """Return whether our tensor of this name is a stack of experts, or a part of one."""
    return _STACK.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class TheirNames:
    """Translates our names to Megatron-LM's, for one model and one kind of job.

    Attributes:
        names: All our names of parameters and buffers, with the whole name of fused parameters.
        precision: One of ``PRECISIONS``; a 16-bit run has one more wrapper in its optimizer.
        transformer_impl: One of ``TRANSFORMER_IMPLS``: Transformer Engine's layers keep norms
            inside linear maps.
        num_experts: Number of experts of each stack, or part of a stack, by name.
        is_grouped: A Megatron-LM layer computes all its experts at once, and numbers their
            parameters.
    """

    names: frozenset[str]
    precision: str
    transformer_impl: str
    num_experts: Mapping[str, int] = field(default_factory=dict)
    is_grouped: bool = True

    def __post_init__(self) -> None:
        """Check the choices.

        Raises:
            ValueError: A choice is unknown.
        """
        for argument, value, choices in (
            ("precision", self.precision, PRECISIONS),
            ("transformer_impl", self.transformer_impl, TRANSFORMER_IMPLS),
        ):
            if value not in choices:
                raise ValueError(
                    expected(
                        f"{argument} to be one of {choices}",
                        repr(value),
                        where="to_megatron()",
                        hint="Name the one that the Megatron-LM job will run with",
                    )
                )

    def of_experts(self, name: str) -> list[str]:
        """Return the name of each expert's tensor in a stack; for other tensors, [name]."""
        found = _STACK.fullmatch(name)
        if found is None or name not in self.num_experts:
            return [name]
        experts, leaf, part = found["experts"], found["leaf"], found["part"] or ""
        indices = range(self.num_experts[name])
        if self.is_grouped:
            return [f"{experts}.{leaf}{i}{part}" for i in indices]
        return [f"{experts}.local_experts.{i}.{leaf}{part}" for i in indices]

    def model_key(self, name: str) -> tuple[str, ...]:
        """Return the key of a weight or buffer, as its path in nested dicts."""
        return ("model", f"module.{self._on_disk(name)}")

    def state_key(self, name: str, state: str) -> tuple[str, ...]:
        """Return the key of an optimizer state."""
        return ("optimizer", "state", f"{self._wrappers}{self._on_disk(name)}", state)

    def group_key(self, name: str, field: str) -> tuple[str, ...]:
        """Return the key of a field of a parameter's group; a fused one goes by its whole name.

        Megatron-LM does not rename here: the key has the name in the module.
        """
        return (*GROUP_META.split("."), f"{self._wrappers}{self._fused_norm(name)}", field)

    @property
    def _wrappers(self) -> str:
        return "module." * (2 if self.precision == "fp32" else 3)

    def _on_disk(self, name: str) -> str:
        return _MTP_IN_MODULE.sub(r"\1.transformer_layer.", self._fused_norm(name))

    def _fused_norm(self, name: str) -> str:
        found = _LOCAL_NORM.fullmatch(name)
        if found is None or self.transformer_impl == "local":
            return name
        for linear, norm in _FUSED_NORMS:
            if norm == found["norm"] and f"{found['layer']}{linear}.weight" in self.names:
                return f"{found['layer']}{linear}.layer_norm_{found['leaf']}"
        return name


def group_member(name: str) -> str:
    """Return the name of a parameter in our groups; all experts of a layer have one name."""
    return _EXPERT.sub(rf"\1.{ANY_EXPERT}.", name)


def group_members(name: str, names: Collection[str]) -> list[str]:
    """Return the parameters that a name in our parameter groups stands for.

    Args:
        name: A name of :func:`group_member`.
        names: All parameters; those that match are returned if ``name`` stands for all experts.
    """
    if ANY_EXPERT not in name:
        return [name]
    pattern = re.compile(re.escape(name).replace(re.escape(ANY_EXPERT), r"\d+"))
    return sorted(other for other in names if pattern.fullmatch(other))


def joined_parts(names: Collection[str], whole_names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Find the parts of fused parameters among stored names.

    Args:
        names: Stored names of weights.
        whole_names: Names that the optimizer's groups use. Only they tell whether an MLA layer
            fuses its two down-projections: the weights are stored alike.

    Returns:
        The names of the parts of each whole name, in the order in which they are joined.

    Raises:
        CheckpointError: A part is missing.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        for pattern, suffixes in _SUFFIXED_PARTS:
            suffix = next((s for s in suffixes if name.endswith(s)), None)
            if suffix is None or not pattern.fullmatch(whole := name.removesuffix(suffix)):
                continue
            parts = tuple(f"{whole}{s}" for s in suffixes)
            # Several kinds of layer have an in_proj: take the one with most of its parts stored.
            if whole not in found or _fit(parts, names) > _fit(found[whole], names):
                found[whole] = parts
    for whole in whole_names:
        if match := _DOWN_PROJ.fullmatch(whole):
            found[whole] = tuple(f"{match[1]}{part}.{match[2]}" for part in _DOWN_PROJS)
    missing = [part for parts in found.values() for part in parts if part not in names]
    if missing:
        wholes = tuple(f"{whole}." for whole, parts in found.items() if {*parts} & {*missing})
        known = {part for parts in found.values() for part in parts}
        unknown = [name for name in names if name.startswith(wholes) and name not in known]
        beside = f", beside unknown parts {', '.join(sorted(unknown)[:20])}" if unknown else ""
        raise CheckpointError.expected(
            "all parts of each fused parameter",
            f"{len(missing)} missing: {', '.join(sorted(missing)[:20])}{beside}",
            where="the model of the checkpoint",
            hint="Ask for support of this kind of layer"
            if unknown
            else "The directory is incomplete: use another checkpoint",
        )
    return found


def _fit(parts: tuple[str, ...], names: Collection[str]) -> tuple[int, int]:
    """Return a sort key: more stored parts first, then fewer missing ones."""
    return sum(part in names for part in parts), -len(parts)
