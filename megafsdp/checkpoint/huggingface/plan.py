"""The plan of an export or import of Hugging Face weights, made before a tensor moves.

The model contributes its whole parameters and persistent buffers by name, sharded as they are (the
parts in which checkpoints store fused parameters do not fit Hugging Face's layouts). Our models are
mapped by the table of their family; models under Hugging Face's own names are taken as they are.
Either way the plan is a list of entries: one of our tensors, and the stored tensors that hold its
rows. Nothing here touches a tensor or communicates.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from megafsdp.checkpoint.format.regions import underlying
from megafsdp.checkpoint.huggingface.mapping import (
    Entry,
    MappingRow,
    expect_names,
    full_names,
    is_mapped,
    layout_sizes,
    mapping_rows,
    our_vocabulary_rows,
    their_vocabulary_name,
)
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.checkpoint.state.canonical import canonical_name, model_state, parameter_names
from megafsdp.checkpoint.state.declared import declared_parts
from megafsdp.errors import CheckpointError, expected, listed
from megafsdp.mesh.annotation import annotation_of
from megafsdp.models.config import ModelConfig
from megafsdp.models.hf_config import config_from_hugging_face, config_to_hugging_face
from megafsdp.optimizer.states.quantized import main_weight_of

_DTYPE_FIELDS = ("dtype", "torch_dtype")
_PREFIX = "model."
# In the names of all tensors of a PeftModel, and of the layers that adapters are added to.
_PEFT_PREFIX, _PEFT_LAYER = "base_model.model.", ".base_layer."
_WRAPPERS = frozenset({"DistributedDataParallel", "OptimizedModule"})

_LOGGER = logging.getLogger("megafsdp.checkpoint")


@runtime_checkable
class HasJson(Protocol):
    """A config of transformers."""

    def to_json_string(self) -> str:
        """Return the fields as JSON."""


ConfigLike = ModelConfig | Mapping[str, object] | HasJson


@dataclass(frozen=True, slots=True)
class HubPlan:
    """A model in Hugging Face's terms.

    Attributes:
        entries: Every distinct tensor once, in the model's order.
        tied: Further stored names of tensors: name -> the name in ``entries``. Files may omit them.
        fields: Fields of the model's ``config.json``.
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
    reader: SafetensorsReader | None = None,
) -> HubPlan:
    """Find the stored tensors of a model.

    Args:
        shapes: Its distinct tensors by name.
        aliases: Further names of tied tensors.
        config: Config of the model. For our models a ``ModelConfig``, whose vocabulary is not
            trimmed, or Hugging Face fields. The import of a model under Hugging Face's own names
            needs none.
        reader: The files of an import; the vocabulary is then that of the files.

    Raises:
        CheckpointError: The config is missing or does not fit these tensors, the vocabulary of the
            files is too large, or a model to be exported has adapters.
        ConfigError: Hugging Face's models do not support the config.
    """
    if not is_mapped(shapes):
        if reader is None:
            _require_no_adapters(shapes)
        same = (MappingRow(n, {n: "rows"}).entry(shape, {}) for n, shape in shapes.items())
        fields = {} if config is None and reader is not None else _their_fields(config)
        return HubPlan(tuple(same), aliases, fields)
    rows = our_vocabulary_rows(shapes)
    model, fields = _our_config(config, rows)
    model_type, vocab_size = str(fields["model_type"]), int(str(fields["vocab_size"]))
    stored: Mapping[str, str] = {}
    if reader is not None:
        vocab_size = _stored_vocabulary(reader, model_type, rows)
        stored = full_names(reader.names, model_type)
    table = list(mapping_rows(model_type, model, stored))
    expect_names(shapes, {row.ours for row in table}, optional=set(), where="the model")
    sizes = layout_sizes(model, vocab_size, padded_to=rows)
    entries = tuple(row.entry(shapes[row.ours], sizes) for row in table)
    tied = {"lm_head.weight": next(iter(entries[0].theirs))} if model.tie_embeddings else {}
    return HubPlan(entries, tied, fields)


def _require_no_adapters(names: Iterable[str]) -> None:
    adapted = [n for n in names if n.startswith(_PEFT_PREFIX) or _PEFT_LAYER in n]
    if adapted:
        raise CheckpointError.expected(
            "the names of a class of transformers",
            f"those of a model with adapters of PEFT: {listed(adapted)}",
            where="a model to be exported to Hugging Face files",
            hint="Save the adapters by model.save_pretrained(path, "
            "state_dict=megafsdp.full_state_dict(model)) on all ranks, and merge them in one "
            "process",
        )


def _stored_vocabulary(reader: SafetensorsReader, model_type: str, rows: int) -> int:
    """Return the rows of the embedding in the files, or of ours if they have none."""
    name = their_vocabulary_name(reader.names, model_type)
    vocab_size = rows if name is None else reader.shape(name)[0]
    if vocab_size > rows:
        raise CheckpointError.expected(
            f"a vocabulary of at most {rows} rows",
            vocab_size,
            where=f"'{name}' of the Hugging Face files",
            hint="Build the model with at least as many rows",
        )
    return vocab_size


def fields_of(config: ModelConfig) -> dict[str, object]:
    """Return the ``config.json`` of one of our models, without special tokens.

    They are set to None: transformers' defaults may lie outside the vocabulary.
    """
    return config_to_hugging_face(config) | {"bos_token_id": None, "eos_token_id": None}


def _our_config(config: ConfigLike | None, rows: int) -> tuple[ModelConfig, dict[str, object]]:
    if isinstance(config, ModelConfig):
        return config, fields_of(config)
    fields = _their_fields(config)
    model = config_from_hugging_face(fields, padded_vocab_size=rows)
    if not fields.get("architectures"):
        fields["architectures"] = config_to_hugging_face(model)["architectures"]
    return model, fields


def _their_fields(config: ConfigLike | None) -> dict[str, object]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, HasJson):
        return dict(json.loads(config.to_json_string()))
    raise CheckpointError.expected(
        "a config to write as config.json",
        "none" if config is None else f"a {type(config).__name__}",
        where="a model to be exported to, or imported from, Hugging Face files",
        hint="Pass config= (--config): the fields of config.json, or a ModelConfig for a model "
        "of megafsdp.models",
    )


def config_fields(fields: Mapping[str, object], dtypes: Iterator[torch.dtype]) -> dict[str, object]:
    """Return the contents of ``config.json``, with the dtype of the stored weights.

    Args:
        fields: Fields of the model's config.
        dtypes: Dtypes of the stored tensors; the first floating-point one is named.
    """
    dtype = next((d for d in dtypes if d.is_floating_point), None)
    kept = {name: value for name, value in fields.items() if name not in _DTYPE_FIELDS}
    # transformers 4 reads torch_dtype, transformers 5 reads dtype or torch_dtype.
    return kept | ({} if dtype is None else {"torch_dtype": str(dtype).removeprefix("torch.")})


@dataclass(frozen=True, slots=True)
class HubState:
    """A model's tensors by name, sharded as they are.

    Attributes:
        tensors: Every distinct tensor; for a quantized parameter, its fp32 main weight.
        tied: Further names of tied tensors: name -> name in ``tensors``.
        rank_zero: Names of buffers: their values may differ between ranks, so rank 0's are taken.
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
    """List the tensors that go to Hugging Face files; local, nothing is copied.

    Args:
        model: Any module at rest, sharded or not.

    Raises:
        CheckpointError: The model is not at rest.
        NotImplementedError: A rank has only some experts of a layer, or the parts of a fused tensor
            are ordered rank after rank.
    """
    stored = model_state(model)
    if stored.objects:
        _LOGGER.warning("Hugging Face files have no place for %s", sorted(stored.objects)[:20])
    names = parameter_names(model)
    tensors: dict[str, torch.Tensor] = {}
    for parameter, name in names.items():
        _require_all_experts(name, parameter)
        _require_whole_order(name, parameter)
        weight = main_weight_of(parameter)
        tensors[name] = parameter if weight is None else weight
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    spelt = {canonical_name(f): p for f, p in bare.named_parameters(remove_duplicate=False)}
    tied = {name: names[p] for name, p in spelt.items() if names[p] != name}
    buffers = {key.removeprefix(_PREFIX): stored.tensors[key] for key in sorted(stored.rank_zero)}
    tensors.update((name, underlying(buffer)) for name, buffer in buffers.items())
    of_buffers = {n: first for n, first in stored.aliases.items() if first in stored.rank_zero}
    tied |= {n.removeprefix(_PREFIX): f.removeprefix(_PREFIX) for n, f in of_buffers.items()}
    return HubState(tensors, tied, frozenset(buffers))


def config_of(model: nn.Module) -> ConfigLike | None:
    """Return the model's config, or None."""
    config = model.config if isinstance(model, _HasConfig) else None
    return config if isinstance(config, ModelConfig | Mapping | HasJson) else None


def generation_config_of(model: nn.Module) -> str | None:
    """Return the text of the model's generation config, or None."""
    config = model.generation_config if isinstance(model, _HasGenerationConfig) else None
    return config.to_json_string() if isinstance(config, HasJson) else None


def architecture_of(model: nn.Module) -> str:
    """Return the name of the class that the user built."""
    built = next(m for m in model.modules() if type(m).__name__ not in _WRAPPERS)
    return next(c.__name__ for c in type(built).__mro__ if not issubclass(c, TorchFSDPModule))


def _require_all_experts(name: str, tensor: torch.Tensor) -> None:
    experts = annotation_of(tensor).experts
    if experts is not None and experts.count < experts.total:
        what, got = "parameters of all experts of a layer", f"{experts.count} of {experts.total}"
        raise _refusal(what, f"{got} experts", name)


def _require_whole_order(name: str, parameter: torch.Tensor) -> None:
    num_ranks = declared_parts(parameter).num_ranks
    if num_ranks > 1:
        what = "fused parts in the order of the whole, as under megafsdp.fully_shard"
        raise _refusal(what, f"those of {num_ranks} ranks of tp one after another", name)


def _refusal(what: str, got: str, name: str) -> NotImplementedError:
    hint = "Go by a checkpoint: save() and megafsdp ckpt export-hf, or import-hf and load()"
    where = f"'{name}', to or from Hugging Face files"
    return NotImplementedError(expected(what, got, where=where, hint=hint))
