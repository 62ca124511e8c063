"""What an export or import of Hugging Face weights consists of, before a tensor moves.

Our models go by the table of their family; models under Hugging Face's own names go as they are.
Either way the result is a list of entries: one of our tensors, and the stored ones that hold its
rows. No tensor is touched here and no rank talks to another.


What of a model goes to Hugging Face files: whole parameters and persistent buffers, by name.

Checkpoints store fused parameters in parts; Hugging Face's layouts are made from the whole, so the
parts are of no use here. Tensors stay where they are, sharded as they are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.checkpoint.format.regions import underlying
from megafsdp.checkpoint.huggingface.mapping import (
    expect_names,
    full_names,
    is_mapped,
    mapping_rows,
    our_vocabulary_rows,
    their_vocabulary_name,
)
from megafsdp.checkpoint.huggingface.rules import SAME, Allocate, Rule, Run, WeightGeometry
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader, StoredTensor
from megafsdp.checkpoint.state.canonical import canonical_name, model_state, parameter_names
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp import FSDPModule
from megafsdp.mesh.annotation import annotation_of
from megafsdp.models.config import ModelConfig
from megafsdp.models.hf_config import config_from_hugging_face, config_to_hugging_face

_DTYPE_FIELDS = ("dtype", "torch_dtype")
# Of tensors that are stored as they are; their rule looks at no size.
_NO_GEOMETRY = WeightGeometry(0, 1, 1, 1, 0, 0, False)


@runtime_checkable
class HasJson(Protocol):
    """A config of transformers."""

    def to_json_string(self) -> str:
        """Return the fields as JSON."""


ConfigLike = ModelConfig | Mapping[str, object] | HasJson


@dataclass(frozen=True, slots=True)
class Entry:
    """One of our tensors and the stored ones.

    Attributes:
        ours: Our name.
        shape: Our shape.
        theirs: Stored names.
        rule: The way between them.
        geometry: The model's sizes, for the rule.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    rule: Rule = SAME
    geometry: WeightGeometry = _NO_GEOMETRY

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of each stored tensor."""
        return self.rule.their_shapes(self.shape, self.geometry) if self.shape else [()]

    def stored(self, dtype: torch.dtype) -> list[StoredTensor]:
        """Return the stored tensors in a dtype."""
        shapes = zip(self.theirs, self.their_shapes(), strict=True)
        return [StoredTensor(name, dtype, shape) for name, shape in shapes]

    def part(self, index: int, ours: torch.Tensor, allocate: Allocate) -> torch.Tensor:
        """Return one stored tensor; see :meth:`Rule.part`."""
        if not self.shape:
            return ours
        return self.rule.part(index, ours, self.geometry, allocate=allocate)

    def join(self, theirs: list[torch.Tensor]) -> torch.Tensor:
        """Return ours from the stored tensors."""
        return self.rule.join(theirs, self.geometry) if self.shape else theirs[0]

    def runs(self) -> list[Run]:
        """Return where our rows stand; a tensor without dimensions has none."""
        return self.rule.runs(self.rule.part_rows(self.shape[0], self.geometry), self.geometry)


@dataclass(frozen=True, slots=True)
class HubPlan:
    """A model in Hugging Face's terms.

    Attributes:
        entries: Every distinct tensor once, in the model's order.
        tied: Stored names that may stand for a tensor a second time: name -> the name in
            ``entries``.
        fields: Its ``config.json``.
    """

    entries: tuple[Entry, ...]
    tied: Mapping[str, str]
    fields: Mapping[str, object]

    @property
    def model_type(self) -> str:
        """Return Hugging Face's name of the model's type."""
        return str(self.fields.get("model_type", ""))


def plan_model(
    shapes: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    config: ConfigLike | None,
    *,
    vocab_size: int | None = None,
) -> HubPlan:
    """Find the stored tensors of a model.

    Args:
        shapes: Its distinct tensors by name.
        aliases: Further names of tied tensors.
        config: What the model is. For our models a ``ModelConfig``, whose vocabulary is not
            trimmed, or Hugging Face fields.
        vocab_size: Rows of the stored vocabulary, if it is not the config's.

    Raises:
        CheckpointError: The config is missing or is not that of these tensors.
        ConfigError: Hugging Face's models cannot be configured so.
    """
    if not is_mapped(shapes):
        tied = {alias: target for alias, target in aliases.items() if alias != target}
        entries = tuple(Entry(name, shape, (name,)) for name, shape in shapes.items())
        return HubPlan(entries, tied, _their_fields(config))
    rows = our_vocabulary_rows(shapes)
    model_config, fields = _our_config(config, rows)
    if vocab_size is None:
        vocab_size = int(str(fields["vocab_size"]))
    geometry = WeightGeometry(
        num_layers=model_config.num_layers,
        num_attention_heads=model_config.num_attention_heads,
        num_query_groups=model_config.num_query_groups,
        head_dim=model_config.head_dim,
        vocab_size=vocab_size,
        padded_vocab_size=rows,
        is_tied=model_config.tie_embeddings,
    )
    table = list(mapping_rows(str(fields["model_type"]), geometry))
    expect_names(shapes, {row.ours for row in table}, optional=set(), where="the model")
    entries = tuple(
        Entry(row.ours, shapes[row.ours], row.theirs, row.rule, geometry) for row in table
    )
    tied = {"lm_head.weight": entries[0].theirs[0]} if geometry.is_tied else {}
    return HubPlan(entries, tied, fields)


def plan_stored(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    config: ConfigLike | None,
    reader: SafetensorsReader,
) -> HubPlan:
    """Find the stored tensors of a model in files that are there; they say the vocabulary.

    Raises:
        CheckpointError: The config is missing, the vocabulary is too large, or there is none.
    """
    if not is_mapped(shapes):
        return plan_model(shapes, tied, {} if config is None else config)
    rows = our_vocabulary_rows(shapes)
    _, fields = _our_config(config, rows)
    name = their_vocabulary_name(reader.names, str(fields["model_type"]))
    vocab_size = rows if name is None else reader.shape(name)[0]
    if vocab_size > rows:
        raise CheckpointError(
            expected(
                f"a vocabulary of at most {rows} rows",
                vocab_size,
                where=f"'{name}' of the Hugging Face files",
                hint="Build the model with at least as many rows",
            )
        )
    return plan_model(shapes, tied, config, vocab_size=vocab_size)


def stored_names(plan: HubPlan, names: list[str]) -> dict[str, str]:
    """Match the names in the files with a plan, strictly both ways.

    Returns:
        The stored name by the name in the plan, tied names among them.

    Raises:
        CheckpointError: A tensor is missing or unknown.
    """
    known = full_names(names, plan.model_type)
    wanted = {name for entry in plan.entries for name in entry.theirs}
    expect_names(known, wanted, optional=set(plan.tied), where="the Hugging Face files")
    return known


def fields_of(config: ModelConfig) -> dict[str, object]:
    """Return the ``config.json`` of one of our models, which knows no special tokens.

    Left out, they would be transformers' defaults, which may lie outside of the vocabulary.
    """
    return config_to_hugging_face(config) | {"bos_token_id": None, "eos_token_id": None}


def _our_config(config: ConfigLike | None, rows: int) -> tuple[ModelConfig, dict[str, object]]:
    if isinstance(config, ModelConfig):
        return config, fields_of(config)
    fields = _their_fields(config)
    return config_from_hugging_face(fields, padded_vocab_size=rows), fields


def _their_fields(config: ConfigLike | None) -> dict[str, object]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, HasJson):
        return dict(json.loads(config.to_json_string()))
    raise CheckpointError(
        expected(
            "a config to write as config.json",
            "none" if config is None else f"a {type(config).__name__}",
            where="a model to be exported to, or imported from, Hugging Face files",
            hint="Pass config= (--config): the fields of config.json, or a ModelConfig for a model "
            "of megafsdp.models",
        )
    )


def config_fields(fields: Mapping[str, object], dtypes: Iterator[torch.dtype]) -> dict[str, object]:
    """Return what ``config.json`` says, with the dtype of the stored weights.

    Args:
        fields: The model's.
        dtypes: Those of the stored tensors; the first floating-point one is named.
    """
    dtype = next((d for d in dtypes if d.is_floating_point), None)
    kept = {name: value for name, value in fields.items() if name not in _DTYPE_FIELDS}
    # transformers 4 reads torch_dtype, transformers 5 either.
    return kept | ({} if dtype is None else {"torch_dtype": str(dtype).removeprefix("torch.")})


_log = logging.getLogger("megafsdp.checkpoint")

_PREFIX = "model."
_WRAPPERS = frozenset({"DistributedDataParallel", "OptimizedModule"})


@dataclass(frozen=True, slots=True)
class HubState:
    """A model's tensors by name, as they are spread over the ranks.

    Attributes:
        tensors: Every distinct one.
        tied: Further names of tied ones: name -> name in ``tensors``.
        rank_zero: Names of buffers, whose values may differ between ranks.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    rank_zero: frozenset[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


@runtime_checkable
class _HasConfig(Protocol):
    config: object


@runtime_checkable
class _HasGenerationConfig(Protocol):
    generation_config: object


def hub_state(model: nn.Module) -> HubState:
    """List what goes to Hugging Face files; local, nothing is copied.

    Args:
        model: Any module at rest, sharded or not.

    Raises:
        CheckpointError: The model is not at rest.
        NotImplementedError: A tensor is not whole within data parallelism.
    """
    listed = model_state(model)
    if listed.objects:
        _log.warning("Hugging Face files have no place for %s", sorted(listed.objects)[:20])
    names = parameter_names(model)
    tensors: dict[str, torch.Tensor] = {name: parameter for parameter, name in names.items()}
    for name, tensor in tensors.items():
        _require_data_parallel(name, tensor)
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    spelt = {canonical_name(f): p for f, p in bare.named_parameters(remove_duplicate=False)}
    tied = {name: names[p] for name, p in spelt.items() if names[p] != name}
    buffers = {key.removeprefix(_PREFIX): listed.tensors[key] for key in sorted(listed.rank_zero)}
    tensors.update((name, underlying(buffer)) for name, buffer in buffers.items())
    return HubState(tensors, tied, frozenset(buffers))


def config_of(model: nn.Module) -> ConfigLike | None:
    """Return the config that a model carries; None without one."""
    config = model.config if isinstance(model, _HasConfig) else None
    return config if isinstance(config, ModelConfig | Mapping | HasJson) else None


def generation_config_of(model: nn.Module) -> str | None:
    """Return the text of the generation config that a model carries; None without one."""
    config = model.generation_config if isinstance(model, _HasGenerationConfig) else None
    return config.to_json_string() if isinstance(config, HasJson) else None


def architecture_of(model: nn.Module) -> str:
    """Return the name of the class that the user built."""
    built = next(m for m in model.modules() if type(m).__name__ not in _WRAPPERS)
    return next(c.__name__ for c in type(built).__mro__ if not issubclass(c, FSDPModule))


def _require_data_parallel(name: str, tensor: torch.Tensor) -> None:
    experts = annotation_of(tensor).experts
    got = None
    if isinstance(tensor, UnevenDTensor):
        layout = tensor.uneven_layout
        if layout.region_shape != layout.shape:
            got = f"the part {layout.region_shape} of {layout.shape}"
    if experts is not None and experts.count < experts.total:
        got = f"{experts.count} of {experts.total} experts"
    if got is not None:
        raise NotImplementedError(
            expected(
                "tensors that are sharded by data parallelism alone",
                got,
                where=f"'{name}', to or from Hugging Face files",
                hint="Go by a checkpoint: save() and megafsdp ckpt export-hf, or import-hf and "
                "load()",
            )
        )
