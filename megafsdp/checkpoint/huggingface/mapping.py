"""Names and layouts of Hugging Face weights, mapped to ours and back.

Pure functions on dicts of full tensors: nothing is read from disk, no model is built, no rank talks
to another. One table a model family says which Hugging Face tensors make up one of ours and by
which rule; the rule knows both directions.

Beside layouts two things differ: our embedding may have padding rows, which Hugging Face never
sees, and tied weights stand under both of their names in both dicts, as in ``state_dict()``, as one
tensor. A further family is a further table here and, where its tensors are fused in a new way, a
further rule in ``hf_rules``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megafsdp.checkpoint.huggingface.rules import (
    BLOCKS_QKV,
    CONV1D_BLOCKS_QKV,
    GATE_UP,
    GROUPED_QKV,
    PADDED_VOCABULARY,
    SAME,
    TRANSPOSED,
    Rule,
    WeightGeometry,
)
from megafsdp.errors import CheckpointError, expected

_OUR_EMBEDDING = "embedding.word_embeddings.weight"
_OUR_OUTPUT = "output_layer.weight"
_THEIR_OUTPUT = "lm_head.weight"
_NUM_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class MappingRow:
    """One of our tensors and the Hugging Face tensors that hold the same numbers.

    Attributes:
        ours: Our name; ``{layer}`` stands for each layer's index in a table, never in a result.
        theirs: Hugging Face names, likewise.
        rule: The way between them.
    """

    ours: str
    theirs: tuple[str, ...]
    rule: Rule


@dataclass(frozen=True, slots=True)
class _Family:
    """The table of one model family.

    Attributes:
        prefix: Of every Hugging Face name but the output layer's; checkpoints of the bare model
            omit it.
        rows: The table, without the output layer, Hugging Face names without the prefix.
        ignored: Ends of names of buffers that old checkpoints hold and no model needs.
    """

    prefix: str
    rows: tuple[MappingRow, ...]
    ignored: tuple[str, ...]


def _layer_row(ours: str, *theirs: str, rule: Rule = SAME, at: str) -> MappingRow:
    return MappingRow(
        f"decoder.layers.{{layer}}.{ours}",
        tuple(f"{at}.{{layer}}.{name}" for name in theirs),
        rule,
    )


def _gpt2_affine_rows(ours: str, theirs: str, *, rule: Rule = SAME) -> tuple[MappingRow, ...]:
    bias_rule = BLOCKS_QKV if rule is CONV1D_BLOCKS_QKV else SAME
    return (
        _layer_row(f"{ours}.weight", f"{theirs}.weight", rule=rule, at="h"),
        _layer_row(f"{ours}.bias", f"{theirs}.bias", rule=bias_rule, at="h"),
    )


_GPT2 = _Family(
    "transformer.",
    (
        MappingRow(_OUR_EMBEDDING, ("wte.weight",), PADDED_VOCABULARY),
        MappingRow("embedding.position_embeddings.weight", ("wpe.weight",), SAME),
        *_gpt2_affine_rows("input_layernorm", "ln_1"),
        *_gpt2_affine_rows("self_attention.linear_qkv", "attn.c_attn", rule=CONV1D_BLOCKS_QKV),
        *_gpt2_affine_rows("self_attention.linear_proj", "attn.c_proj", rule=TRANSPOSED),
        *_gpt2_affine_rows("pre_mlp_layernorm", "ln_2"),
        *_gpt2_affine_rows("mlp.linear_fc1", "mlp.c_fc", rule=TRANSPOSED),
        *_gpt2_affine_rows("mlp.linear_fc2", "mlp.c_proj", rule=TRANSPOSED),
        MappingRow("decoder.final_layernorm.weight", ("ln_f.weight",), SAME),
        MappingRow("decoder.final_layernorm.bias", ("ln_f.bias",), SAME),
    ),
    (".attn.bias", ".attn.masked_bias"),
)


def _rotary_family(*head_norms: MappingRow) -> _Family:
    return _Family(
        "model.",
        (
            MappingRow(_OUR_EMBEDDING, ("embed_tokens.weight",), PADDED_VOCABULARY),
            _layer_row("input_layernorm.weight", "input_layernorm.weight", at="layers"),
            _layer_row(
                "self_attention.linear_qkv.weight",
                "self_attn.q_proj.weight",
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
                rule=GROUPED_QKV,
                at="layers",
            ),
            *head_norms,
            _layer_row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", at="layers"),
            _layer_row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", at="layers"),
            _layer_row(
                "mlp.linear_fc1.weight",
                "mlp.gate_proj.weight",
                "mlp.up_proj.weight",
                rule=GATE_UP,
                at="layers",
            ),
            _layer_row("mlp.linear_fc2.weight", "mlp.down_proj.weight", at="layers"),
            MappingRow("decoder.final_layernorm.weight", ("norm.weight",), SAME),
        ),
        ("rotary_emb.inv_freq",),
    )


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": _rotary_family(),
        "qwen3": _rotary_family(
            _layer_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", at="layers"),
            _layer_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", at="layers"),
        ),
    }
)


def mapping_rows(model_type: str, geometry: WeightGeometry) -> Iterator[MappingRow]:
    """Yield one row for each of our distinct tensors, with full names, in the model's order.

    A reader or writer that cannot hold the whole model takes the rows one by one. A tied output
    layer is no tensor of its own and has no row.

    Args:
        model_type: Hugging Face's: ``gpt2``, ``llama`` or ``qwen3``.
        geometry: The model's sizes.

    Yields:
        Rows without placeholders.

    Raises:
        CheckpointError: There is no table for the model type.
    """
    family = _family(model_type)
    for row in family.rows:
        layers = range(geometry.num_layers) if "{layer}" in row.ours else range(1)
        for layer in layers:
            theirs = tuple(family.prefix + name.format(layer=layer) for name in row.theirs)
            yield MappingRow(row.ours.format(layer=layer), theirs, row.rule)
    if not geometry.is_tied:
        yield MappingRow(_OUR_OUTPUT, (_THEIR_OUTPUT,), PADDED_VOCABULARY)


def weights_from_hugging_face(
    state: Mapping[str, Tensor], model_type: str, *, geometry: WeightGeometry
) -> dict[str, Tensor]:
    """Map a Hugging Face state dict to ours.

    Args:
        state: Full tensors; names may lack the base model's prefix, and a tied model's
            ``lm_head.weight`` may be there or not, as on disk.
        model_type: Hugging Face's: ``gpt2``, ``llama`` or ``qwen3``.
        geometry: The model's sizes.

    Returns:
        Our state dict. Tensors that need no rearranging are the given ones; padding rows are 0.

    Raises:
        CheckpointError: A tensor is missing, unknown or of the wrong number of rows, or the two
            weights of a tied model differ.
    """
    family = _family(model_type)
    known = {_full_name(name, family): name for name in state if not name.endswith(family.ignored)}
    rows = list(mapping_rows(model_type, geometry))
    wanted = {name for row in rows for name in row.theirs}
    optional = {_THEIR_OUTPUT} if geometry.is_tied else set()
    expect_names(known.keys(), wanted, optional=optional, where="the Hugging Face state dict")
    ours = {
        row.ours: row.rule.join([state[known[name]] for name in row.theirs], geometry)
        for row in rows
    }
    if geometry.is_tied:
        embedding_name = known[rows[0].theirs[0]]
        _expect_tied(state, embedding_name, _THEIR_OUTPUT)
        ours[_OUR_OUTPUT] = ours[_OUR_EMBEDDING]
    return ours


def weights_to_hugging_face(
    state: Mapping[str, Tensor], model_type: str, *, geometry: WeightGeometry
) -> dict[str, Tensor]:
    """Map our state dict to Hugging Face's; undoes ``weights_from_hugging_face`` bit by bit.

    Args:
        state: Full tensors under our names; a tied model's ``output_layer.weight`` may be there or
            not.
        model_type: Hugging Face's: ``gpt2``, ``llama`` or ``qwen3``.
        geometry: The model's sizes.

    Returns:
        Contiguous tensors under Hugging Face names, without padding rows. A tied model's
        ``lm_head.weight`` is the embedding tensor; leave it out where a file format wants no
        aliases.

    Raises:
        CheckpointError: A tensor is missing, unknown or of the wrong number of rows, or the two
            weights of a tied model differ.
    """
    rows = list(mapping_rows(model_type, geometry))
    optional = {_OUR_OUTPUT} if geometry.is_tied else set()
    expect_names(
        state.keys(), {row.ours for row in rows}, optional=optional, where="our state dict"
    )
    theirs: dict[str, Tensor] = {}
    for row in rows:
        theirs.update(zip(row.theirs, row.rule.split(state[row.ours], geometry), strict=True))
    if geometry.is_tied:
        _expect_tied(state, _OUR_EMBEDDING, _OUR_OUTPUT)
        theirs[_THEIR_OUTPUT] = theirs[rows[0].theirs[0]]
    return theirs


def is_mapped(names: Iterable[str]) -> bool:
    """Tell whether names are those of our models, rather than Hugging Face's own."""
    return _OUR_EMBEDDING in set(names)


def our_vocabulary_rows(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the rows of our embedding, padding included."""
    return shapes[_OUR_EMBEDDING][0]


def their_vocabulary_name(names: Iterable[str], model_type: str) -> str | None:
    """Return the stored name of the embedding among Hugging Face names; None without one."""
    family = _family(model_type)
    wanted = family.prefix + family.rows[0].theirs[0]
    return next((name for name in names if _full_name(name, family) == wanted), None)


def full_names(names: Iterable[str], model_type: str) -> dict[str, str]:
    """Return stored Hugging Face names by full name, without buffers that no model needs.

    Names of a type without a table are full already.
    """
    family = _FAMILIES.get(model_type)
    if family is None:
        return {name: name for name in names}
    return {_full_name(name, family): name for name in names if not name.endswith(family.ignored)}


def _family(model_type: str) -> _Family:
    if model_type not in _FAMILIES:
        raise CheckpointError(
            expected(
                f"a model type among {', '.join(_FAMILIES)}",
                repr(model_type),
                where="the table of Hugging Face families",
                hint="Convert a model of one of these types",
            )
        )
    return _FAMILIES[model_type]


def _full_name(name: str, family: _Family) -> str:
    return name if name == _THEIR_OUTPUT or name.startswith(family.prefix) else family.prefix + name


def expect_names(
    names: Iterable[str],
    wanted: set[str],
    *,
    optional: set[str],
    where: str,
) -> None:
    """Compare names both ways.

    Raises:
        CheckpointError: A wanted one is missing, or one is neither wanted nor optional.
    """
    got = set(names)
    missing, unknown = sorted(wanted - got), sorted(got - wanted - optional)
    if missing or unknown:
        raise CheckpointError(
            expected(
                f"the {len(wanted)} tensors of this model",
                f"{len(missing)} missing {_some(missing)}, {len(unknown)} unknown {_some(unknown)}",
                where=where,
                hint="Check the model type and the number of layers, and whether weights are tied",
            )
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    return f"({shown}{', ...' if len(names) > _NUM_NAMES_SHOWN else ''})"


def _expect_tied(state: Mapping[str, Tensor], embedding_name: str, output_name: str) -> None:
    output = state.get(output_name)
    if output is None or output is state[embedding_name]:
        return
    if not torch.equal(output, state[embedding_name]):
        raise CheckpointError(
            expected(
                f"{output_name} equal to {embedding_name}",
                "two different tensors",
                where="the weights of a model whose config ties them",
                hint="Set is_tied=False (tie_embeddings=False in the model's config)",
            )
        )
