"""Translate the values beside tensors in Megatron-LM's checkpoints, to ours and back.

The learning rate schedule, the parameter groups and the random states are translated. The
arguments of the job are kept as plain data; if a checkpoint has none, those that a load needs are
derived. Keys of the directory are in names.py; files are read and written elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from megafsdp.checkpoint.megatron.names import (
    EMBEDDING,
    OUTPUT,
    group_member,
    is_output_norm,
)
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.safe_pickle import Foreign
from megafsdp.errors import CheckpointError
from megafsdp.mesh.fused_parts import FusedParts

# Fields by which Megatron-LM tells its groups apart, with their values in an ordinary group.
_GROUP_IDENTITY = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
_OUR_MULTIPLIER = "lr_multiplier"
# A schedule that lacks one of these is not translated.
_SCHEDULE_FIELDS = frozenset(
    {"max_lr", "min_lr", "lr_warmup_steps", "num_steps", "lr_decay_steps", "lr_decay_style"}
)
# Shapes of the decay of a WSD schedule: Megatron-LM's names -> ours.
_DECAY_SHAPES = {**{s: s for s in ("linear", "cosine", "exponential")}, "minus_sqrt": "sqrt"}
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_RNG_KEY = re.compile(
    r"rng_state\.\((?P<stage>\d+), (?P<tensor>\d+)\)"
    r"(?:\.(?P<rank>\d+)\.(?P<field>\w+)(?:\.(?P<name>.+))?)?"
)
_TRACKERS = "rng_tracker_states"
_POSITIONS = "embedding.position_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\..*")
_QKV = re.compile(r".*self_attention\.linear_qkv\.(?:weight|bias)")
_QKV_PARTS: tuple[str, ...] = ("query", "key", "value")
_GATED_QKV_PARTS: tuple[str, ...] = ("query", "gate", "key", "value")


def plain_args(value: object) -> tuple[dict[str, object], list[str]]:
    """Return a job's arguments as plain values.

    Args:
        value: The ``args`` of a checkpoint, as ``safe_pickle`` reads them.

    Returns:
        The arguments, and the names of those that were no plain values and became text.

    Raises:
        ValueError: ``value`` is no namespace.
    """
    attributes = value.attributes() if isinstance(value, Foreign) else value
    if not isinstance(attributes, dict) or not all(isinstance(key, str) for key in attributes):
        raise ValueError(f"a namespace expected, got {_text(value)}")
    foreign: list[str] = []
    found = {name: _plain(name, item, foreign) for name, item in attributes.items()}
    return found, sorted(set(foreign))


def _plain(name: str, value: object, foreign: list[str]) -> object:
    if isinstance(value, Foreign):
        attributes = value.attributes()
        if value.name in _NAMESPACES and attributes is not None:
            return {k: _plain(name, v, foreign) for k, v in attributes.items()}
        foreign.append(name)
        return value.describe()
    if isinstance(value, dict):
        return {_plain(name, k, foreign): _plain(name, v, foreign) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(name, v, foreign) for v in value)
    if isinstance(value, set | frozenset):
        return sorted((_plain(name, v, foreign) for v in value), key=repr)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (*_PLAIN, torch.Tensor)):
        return value
    foreign.append(name)
    return _text(value)


def _text(value: object) -> str:
    return value.describe() if isinstance(value, Foreign) else repr(value)


def our_schedule(theirs: Mapping[str, object], args: Mapping[str, object]) -> dict | None:
    """Return the state of a learning rate schedule in the form of ``megafsdp.training``.

    Args:
        theirs: The fields of ``opt_param_scheduler``; its steps are samples.
        args: The job's arguments; only they have the decay of a WSD schedule.

    Returns:
        The schedule, or None if we have no schedule of this kind.
    """
    if any(theirs.get(name) is None for name in _SCHEDULE_FIELDS):
        return None
    fields: dict[str, Any] = {**args, **theirs}
    style = str(fields["lr_decay_style"])
    warmup, end = int(fields["lr_warmup_steps"]), int(fields["lr_decay_steps"])
    kinds = {"cosine": ("cosine", "cosine"), "linear": ("wsd", "linear")}
    kinds["constant"] = ("constant", "linear")
    decay: object = max(end - warmup, 0)
    if style == "WSD":
        kinds["WSD"] = ("wsd", _DECAY_SHAPES.get(str(fields.get("lr_wsd_decay_style")), ""))
        decay = fields.get("wsd_decay_steps", fields.get("lr_wsd_decay_samples"))
        if decay is None and fields.get("lr_wsd_decay_iters") is not None:
            decay = int(fields["lr_wsd_decay_iters"]) * int(fields["global_batch_size"])
    kind, shape = kinds.get(style, ("", ""))
    if not shape or not isinstance(decay, int):
        return None
    return {
        "kind": kind,
        "peak": float(fields["max_lr"]),
        "minimum": float(fields["min_lr"]),
        "warmup_samples": warmup,
        "decay_start": end - decay,
        "decay_samples": decay,
        "decay_shape": shape,
    }


def their_schedule(
    ours: Mapping[str, object] | None, groups: list[dict], *, num_samples: int
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields of ``opt_param_scheduler``.

    Args:
        ours: The state of a schedule of ``megafsdp.training``. The state of any other scheduler, or
            None, becomes a constant rate.
        groups: The optimizer's parameter groups.
        num_samples: Samples that the schedule has counted.

    Returns:
        The fields, and the arguments that Megatron-LM needs beside them.
    """
    peak = max((_number(group["lr"]) for group in groups if "lr" in group), default=0.0)
    weight_decay = max((_number(group.get("weight_decay", 0.0)) for group in groups), default=0.0)
    low, warmup, end, style = 0.0, 0, 1, "constant"
    args: dict[str, object] = {}
    own: dict[str, Any] = dict(ours or {})
    if {"kind", "peak", "decay_start", "decay_samples"} <= own.keys():
        peak, low, warmup = own["peak"], own["minimum"], own["warmup_samples"]
        start, length, shape = own["decay_start"], own["decay_samples"], own.get("decay_shape")
        end = start + length
        if own["kind"] in ("cosine", "constant"):
            style = own["kind"]
        elif shape == "linear" and start == warmup:
            style = "linear"
        else:
            style = "WSD"
            (their_shape,) = (name for name, its_own in _DECAY_SHAPES.items() if its_own == shape)
            args = dict.fromkeys(("lr_wsd_decay_samples", "wsd_decay_steps"), length)
            args["lr_wsd_decay_style"] = their_shape
    theirs = {
        "max_lr": peak,
        "lr_warmup_steps": warmup,
        "num_steps": num_samples,
        "lr_decay_style": style,
        "lr_decay_steps": end,
        "min_lr": low,
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": end,
    }
    return theirs, args


def our_groups(
    fields: Mapping[str, Mapping[str, object]], stored_name: Callable[[str], str]
) -> tuple[list[dict], dict[str, object]]:
    """Gather parameters of equal fields into groups.

    Args:
        fields: The fields of each parameter's group, by the name of the whole (unsplit) parameter.
        stored_name: Returns the name of a parameter in our checkpoint.

    Returns:
        Groups with ``names`` and hyperparameters, in the order of their first parameters; and the
        ``step`` of each parameter whose group counts steps.
    """
    groups: dict[str, dict] = {}
    seen: dict[str, set[str]] = {}
    steps: dict[str, object] = {}
    for name, of_parameter in fields.items():
        own = dict(of_parameter)
        if "step" in own:
            steps[name] = own.pop("step")
        multiplier = own.get("lr_mult", 1.0)
        if multiplier != 1.0:
            own[_OUR_MULTIPLIER] = multiplier
        key = repr(sorted(own.items()))
        names = groups.setdefault(key, {"names": []} | own)["names"]
        if (member := group_member(stored_name(name))) not in seen.setdefault(key, set()):
            seen[key].add(member)
            names.append(member)
    return list(groups.values()), steps


def their_group(group: Mapping[str, object], schedule: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that each parameter of a group gets, except its step.

    Args:
        group: Hyperparameters of one of our groups; ``names`` is left out.
        schedule: The fields of ``opt_param_scheduler``.
    """
    fields = {k: v for k, v in group.items() if k not in ("names", _OUR_MULTIPLIER)}
    for name in ("lr", "weight_decay"):
        if isinstance(fields.get(name), torch.Tensor):
            fields[name] = _number(fields[name])
    multiplier = _number(group.get(_OUR_MULTIPLIER, group.get("lr_mult", 1.0)))
    decays = _number(group.get("weight_decay", 0.0)) != 0.0
    identity: dict[str, object] = dict(_GROUP_IDENTITY)
    identity |= {"lr_mult": multiplier, "wd_mult": 1.0 if decays else 0.0}
    identity |= {"max_lr": schedule["max_lr"], "min_lr": schedule["min_lr"]}
    # What the import left of the job's own multiplier may no longer be the one in use.
    return identity | fields | {"lr_mult": multiplier}


def our_rng_states(values: Iterable[tuple[str, Any]]) -> tuple[list[dict], list[str]]:
    """Return random states by rank, in the form of ``rng.rng_state``.

    Args:
        values: Keys ``rng_state.(stage, tp)...`` and their values: a list of the states of ranks,
            or a single value of one state.

    Returns:
        The states of the ranks at ``(0, 0)``, and the keys of the other ranks, which have no
        counterpart here.

    Raises:
        CheckpointError: The values are not what Megatron-LM writes.
    """
    ranks: dict[int, dict[str, Any]] = {}
    unused = []
    try:
        for key, value in values:
            found = _RNG_KEY.fullmatch(key)
            if found is None or (found["stage"], found["tensor"]) != ("0", "0"):
                unused.append(key)
            elif found["rank"] is None:
                ranks |= {rank: dict(state) for rank, state in enumerate(value)}
            elif found["name"] is None:
                ranks.setdefault(int(found["rank"]), {})[found["field"]] = value
            else:
                trackers = ranks.setdefault(int(found["rank"]), {}).setdefault(found["field"], {})
                trackers[found["name"]] = value
        return [_our_rng(ranks[rank]) for rank in range(len(ranks))], unused
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError.expected(
            "the states of Python's, numpy's and torch's generators of each rank",
            f"{type(error).__name__}: {error}",
            where="'rng_state.(0, 0)'",
            hint="Pass ignore=['rng_state.*'] to go on without random states",
        ) from error


def _our_rng(theirs: Mapping) -> dict[str, object]:
    version, words, gauss = theirs["random_rng_state"]
    _, keys, position, has_gauss, cached = theirs["np_rng_state"]
    ours: dict[str, object] = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached),
        },
        "torch": theirs["torch_rng_state"],
    }
    if theirs.get("cuda_rng_state") is not None:
        ours["cuda"] = theirs["cuda_rng_state"]
    if theirs.get(_TRACKERS):
        ours["trackers"] = dict(theirs[_TRACKERS])
    return ours


def their_rng_state(ours: Mapping) -> dict[str, object]:
    """Return one rank's random states as Megatron-LM keeps them.

    Args:
        ours: What ``rng.rng_state`` returned; ``cuda`` and ``trackers`` are optional.
    """
    python, numpy = ours["python"], ours["numpy"]
    theirs: dict[str, object] = {
        "random_rng_state": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        "np_rng_state": (
            "MT19937",
            numpy["keys"].numpy().astype(np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached_gauss"],
        ),
        "torch_rng_state": ours["torch"],
    }
    if "cuda" in ours:
        theirs["cuda_rng_state"] = ours["cuda"]
    return theirs | {_TRACKERS: dict(ours.get("trackers", {}))}


def _number(value: object) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]


def query_groups(
    name: str, shape: tuple[int, ...], args: Mapping[str, object]
) -> FusedParts | None:
    """Return the query groups inside a weight or bias; None if args do not determine them.

    Args:
        name: Our name.
        shape: Shape of the stored tensor.
        args: The job's arguments.
    """
    heads = args.get("num_attention_heads")
    if not _QKV.fullmatch(name) or not isinstance(heads, int):
        return None
    groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
    hidden, head_dim = args.get("hidden_size"), args.get("kv_channels")
    if head_dim is None and isinstance(hidden, int):
        head_dim = hidden // heads
    if not (isinstance(groups, int) and isinstance(head_dim, int) and groups and head_dim):
        return None
    names = _GATED_QKV_PARTS if args.get("attention_output_gate") else _QKV_PARTS
    # A gate is as wide as the queries.
    sizes = (heads // groups * head_dim,) * (len(names) - 2) + (head_dim, head_dim)
    parts = FusedParts(names, sizes, 0, groups)
    return parts if parts.extent == shape[0] else None


def args_needed_to_load(ours: CheckpointReader, names: Collection[str]) -> dict[str, object]:
    """Return the arguments that a load compares or reads, for a checkpoint that came with none.

    Megatron-LM compares the sizes of the model; :func:`query_groups` and a load of a tied model
    read the others.

    Args:
        ours: The checkpoint.
        names: All our names of parameters and buffers, with the whole name of fused parameters.
    """
    manifest = ours.manifest
    args: dict[str, object] = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    layers = {int(found[1]) for name in names if (found := _LAYER.fullmatch(name))}
    if layers:
        args["num_layers"] = max(layers) + 1
    if EMBEDDING in names:
        args["hidden_size"] = ours.shape(f"model.{EMBEDDING}")[1]
        args["add_position_embedding"] = _POSITIONS in names
        args["untie_embeddings_and_output_weights"] = f"model.{OUTPUT}" not in manifest.aliases
    if any(map(is_output_norm, names)):
        # In a model with a gated delta net, the other norms are stored as weight - 1.
        args["apply_layernorm_1p"] = True
    # Search all layers: the first ones may have linear attention.
    layers_qkv = (manifest.tensors.get(f"model.{name}") for name in names if _QKV.fullmatch(name))
    qkv = next((entry.fused for entry in layers_qkv if entry is not None), None)
    if qkv is not None and qkv.names in (_QKV_PARTS, _GATED_QKV_PARTS):
        query_rows, *_, head_dim = qkv.sizes
        num_groups = qkv.num_groups
        args["attention_output_gate"] = qkv.names == _GATED_QKV_PARTS
        heads = query_rows // head_dim * num_groups
        args |= {"num_attention_heads": heads, "kv_channels": head_dim}
        args |= {"group_query_attention": heads != num_groups, "num_query_groups": num_groups}
    return args
