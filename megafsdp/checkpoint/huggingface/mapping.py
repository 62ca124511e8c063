"""One table per model family: which Hugging Face tensors hold the rows of each of our tensors.

A line of a table names one of our tensors, the Hugging Face tensors with the same numbers, and the
layout of each (see row_layout.py). Elements are only rearranged, so a round trip is exact, and a
few of our rows are read from a few slices of the files. Two more differences: our embedding may
have padding rows, and a tied output layer is no tensor of its own.

To add a family, add a table here. Files are read and written elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from megafsdp.checkpoint.huggingface.row_layout import Part, RowRun, match_rows
from megafsdp.errors import CheckpointError, listed
from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig

_OUR_EMBEDDING = "embedding.word_embeddings.weight"
_OUR_OUTPUT = "output_layer.weight"
_THEIR_OUTPUT = "lm_head.weight"


def layout_sizes(config: ModelConfig, vocab_size: int, *, padded_to: int) -> dict[str, int]:
    """Return the sizes of the repetitions and blocks in layouts, by name.

    Args:
        config: The model; its vocabulary is not read.
        vocab_size: Rows of Hugging Face's embedding.
        padded_to: Rows of our embedding.
    """
    sizes = {
        "groups": config.num_query_groups,
        "heads": config.num_attention_heads // config.num_query_groups,
        **dict.fromkeys(("q", "q_gate", "k", "v"), config.head_dim),
        "experts": config.num_experts,
        "vocabulary": vocab_size,
        "padding": max(0, padded_to - vocab_size),
    }
    if config.has_linear_attention:
        num_heads = config.linear_num_key_heads
        num_values = config.linear_num_value_heads // num_heads
        value_rows = num_values * config.linear_value_head_dim
        sizes |= {"linear_heads": num_heads, "linear_v": value_rows, "z": value_rows}
        sizes |= dict.fromkeys(("linear_q", "linear_k"), config.linear_key_head_dim)
        sizes |= dict.fromkeys(("beta", "alpha"), num_values)
    return sizes


@dataclass(frozen=True, slots=True)
class MappingRow:
    """One of our tensors and the Hugging Face tensors with the same numbers.

    Attributes:
        ours: Our name; ``{layer}`` stands for each layer's index in a table, never in a result.
        theirs: Layout of each Hugging Face tensor by its name. A name with ``{expert}`` stands for
            one tensor per expert; ours is then a stack of shape ``(experts, rows, ...)`` whose
            layout repeats ``experts``.
        layout: Layout of our tensor.
        is_transposed: The rows of our tensor are columns of Hugging Face's.
        layer_type: The only type of layers that have the tensor; empty if all have it.
        packed: Name of a Hugging Face tensor of our shape that files may have instead of
            ``theirs``; empty if there is none.
    """

    ours: str
    theirs: Mapping[str, str]
    layout: str = "rows"
    is_transposed: bool = False
    layer_type: str = ""
    packed: str = ""

    def entry(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Entry:
        """Match our tensor of a given shape with the stored tensors that hold its rows.

        Args:
            shape: Our shape.
            sizes: Sizes of the layouts' repetitions and blocks.

        Raises:
            CheckpointError: The number of rows differs between our tensor and its layout.
        """
        parts: dict[str, Part] = {}
        is_stack = any("{expert}" in name for name in self.theirs)
        for name, layout in self.theirs.items():
            if "{expert}" not in name:
                parts[name] = Part(layout)
                continue
            for expert in range(sizes["experts"]):
                parts[name.format(expert=expert)] = Part(layout, (expert,))
        # A tensor without dimensions is one row.
        matrix = (shape[0] * shape[1], *shape[2:]) if is_stack else shape or (1,)
        rows, runs = match_rows(self.layout, list(parts.values()), sizes, matrix[0])
        shapes = [(n, *matrix[1:])[: len(shape)] for n in rows]
        if self.is_transposed:
            shapes = [s[::-1] for s in shapes]
        theirs = dict(zip(parts, shapes, strict=True))
        return Entry(self.ours, shape, matrix, theirs, runs, self.is_transposed)


@dataclass(frozen=True, slots=True)
class Entry:
    """One of our tensors and the stored tensors that hold its rows.

    Attributes:
        ours: Our name.
        shape: Our shape.
        matrix: Our shape; in a stack of experts, the rows of all experts are one dimension.
        theirs: Shape of each stored tensor by its name.
        runs: Places of our rows in the stored tensors; rows in no run are padding.
        is_transposed: The rows of our tensor are columns of the stored ones.
    """

    ours: str
    shape: tuple[int, ...]
    matrix: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]
    runs: tuple[RowRun, ...] = field(repr=False)
    is_transposed: bool

    @property
    def stored_numel(self) -> int:
        """Return the number of stored elements, without padding."""
        return sum(map(math.prod, self.theirs.values()))

    @property
    def is_padded(self) -> bool:
        """Return whether our tensor has rows that the stored ones lack."""
        return sum(run.num_rows for run in self.runs) < self.matrix[0]

    def join(self, theirs: Sequence[Tensor]) -> Tensor:
        """Return our tensor; padding rows are 0. A view if no elements need to move.

        If the stored tensors have several dtypes, it has one that holds all of them.
        """
        parts = [t.T for t in theirs] if self.is_transposed else theirs
        if self.matrix[0] == self.runs[0].num_rows:
            return parts[0].contiguous().view(self.shape)
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        ours = parts[0].new_zeros(self.matrix, dtype=dtype)
        for run in self.runs:
            ours[run.ours] = parts[run.part][run.theirs]
        return ours.view(self.shape)

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors by name, contiguous; views of ours if no elements move."""
        rows = ours.reshape(self.matrix)
        theirs: dict[str, Tensor] = {}
        for index, (name, shape) in enumerate(self.theirs.items()):
            runs = [run for run in self.runs if run.part == index]
            if len(runs) == 1 and not self.is_transposed:
                theirs[name] = rows[runs[0].ours].contiguous().view(shape)
                continue
            theirs[name] = rows.new_empty(shape)
            as_rows = theirs[name].T if self.is_transposed else theirs[name]
            for run in runs:
                as_rows[run.theirs] = rows[run.ours]
        return theirs


@dataclass(frozen=True, slots=True)
class _Family:
    """The table of one model family.

    Attributes:
        prefix: Prefix of every Hugging Face name but the output layer's; checkpoints of the bare
            model omit it.
        rows: The table without the output layer; the first row is the embedding's. Hugging Face
            names have no prefix here.
        ignored: Suffixes of names of buffers in old checkpoints that no model needs.
        unbuilt: Prefixes of names of modules that neither transformers nor we build.
    """

    prefix: str
    rows: tuple[MappingRow, ...]
    ignored: tuple[str, ...]
    unbuilt: tuple[str, ...] = ()


def _same(ours: str, theirs: str, *, is_transposed: bool = False) -> MappingRow:
    return MappingRow(ours, {theirs: "rows"}, is_transposed=is_transposed)


def _embedding(theirs: str) -> MappingRow:
    return MappingRow(_OUR_EMBEDDING, {theirs: "vocabulary"}, "vocabulary padding")


def _layers(at: str, *rows: MappingRow) -> tuple[MappingRow, ...]:
    """Return the rows of one layer, with the path of the layers in front of each name."""
    return tuple(
        replace(
            row,
            ours=f"decoder.layers.{{layer}}.{row.ours}",
            theirs={f"{at}.{{layer}}.{name}": layout for name, layout in row.theirs.items()},
            packed=row.packed and f"{at}.{{layer}}.{row.packed}",
        )
        for row in rows
    )


_FUSED_QKV = "groups(heads(q) k v)"
# One tensor of three blocks: all queries, all keys, all values.
_BLOCKS_QKV = "groups(heads(q)) groups(k) groups(v)"


def _gpt2() -> _Family:
    layer = _layers(
        "h",
        *(
            _same(f"{ours}.{kind}", f"{theirs}.{kind}")
            for ours, theirs in (("input_layernorm", "ln_1"), ("pre_mlp_layernorm", "ln_2"))
            for kind in ("weight", "bias")
        ),
        # Conv1D keeps its weight as (in, out).
        MappingRow(
            "self_attention.linear_qkv.weight",
            {"attn.c_attn.weight": _BLOCKS_QKV},
            _FUSED_QKV,
            is_transposed=True,
        ),
        MappingRow("self_attention.linear_qkv.bias", {"attn.c_attn.bias": _BLOCKS_QKV}, _FUSED_QKV),
        _same("self_attention.linear_proj.weight", "attn.c_proj.weight", is_transposed=True),
        _same("self_attention.linear_proj.bias", "attn.c_proj.bias"),
        _same("mlp.linear_fc1.weight", "mlp.c_fc.weight", is_transposed=True),
        _same("mlp.linear_fc1.bias", "mlp.c_fc.bias"),
        _same("mlp.linear_fc2.weight", "mlp.c_proj.weight", is_transposed=True),
        _same("mlp.linear_fc2.bias", "mlp.c_proj.bias"),
    )
    rows = (
        _embedding("wte.weight"),
        _same("embedding.position_embeddings.weight", "wpe.weight"),
        *layer,
        _same("decoder.final_layernorm.weight", "ln_f.weight"),
        _same("decoder.final_layernorm.bias", "ln_f.bias"),
    )
    return _Family("transformer.", rows, (".attn.bias", ".attn.masked_bias"))


_ATTENTION = (
    MappingRow(
        "self_attention.linear_qkv.weight",
        {
            "self_attn.q_proj.weight": "groups(heads(q))",
            "self_attn.k_proj.weight": "groups(k)",
            "self_attn.v_proj.weight": "groups(v)",
        },
        _FUSED_QKV,
    ),
    _same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
# The queries of each head are followed by its gate.
_GATED_ATTENTION = (
    replace(
        _ATTENTION[0],
        theirs={**_ATTENTION[0].theirs, "self_attn.q_proj.weight": "groups(heads(q q_gate))"},
        layout="groups(heads(q) heads(q_gate) k v)",
    ),
    _ATTENTION[1],
)
_HEAD_NORMS = (
    _same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
_LINEAR_ATTENTION = (
    # Stored by key head: its query and key, then the values and gates that it serves.
    MappingRow(
        "self_attention.in_proj.weight",
        {
            "linear_attn.in_proj_qkvz.weight": "linear_heads(linear_q linear_k linear_v z)",
            "linear_attn.in_proj_ba.weight": "linear_heads(beta alpha)",
        },
        " ".join(
            f"linear_heads({block})"
            for block in ("linear_q", "linear_k", "linear_v", "z", "beta", "alpha")
        ),
    ),
    _same("self_attention.conv1d.weight", "linear_attn.conv1d.weight"),
    _same("self_attention.A_log", "linear_attn.A_log"),
    _same("self_attention.dt_bias", "linear_attn.dt_bias"),
    _same("self_attention.out_norm.weight", "linear_attn.norm.weight"),
    _same("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
)


def _mlp(ours: str = "mlp", theirs: str = "mlp") -> tuple[MappingRow, ...]:
    gate_and_up = {f"{theirs}.gate_proj.weight": "gate", f"{theirs}.up_proj.weight": "up"}
    return (
        MappingRow(f"{ours}.linear_fc1.weight", gate_and_up, "gate up"),
        _same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight"),
    )


_EXPERT = "mlp.experts.{expert}"
_EXPERTS = (
    _same("mlp.router.weight", "mlp.gate.weight"),
    MappingRow(
        "mlp.experts.linear_fc1.weight",
        {f"{_EXPERT}.gate_proj.weight": "gate", f"{_EXPERT}.up_proj.weight": "up"},
        "experts(gate up)",
        packed="mlp.experts.gate_up_proj",
    ),
    MappingRow(
        "mlp.experts.linear_fc2.weight",
        {f"{_EXPERT}.down_proj.weight": "down"},
        "experts(down)",
        packed="mlp.experts.down_proj",
    ),
)
_SHARED_EXPERT = (
    *_mlp("mlp.shared_experts", "mlp.shared_expert"),
    _same("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)


def _only_in(layer_type: str, rows: tuple[MappingRow, ...]) -> tuple[MappingRow, ...]:
    return tuple(replace(row, layer_type=layer_type) for row in rows)


def _llama(*rows: MappingRow, unbuilt: tuple[str, ...] = ()) -> _Family:
    """Return the table of a family with Llama's names around attention and the MLP."""
    layer = _layers(
        "layers",
        _same("input_layernorm.weight", "input_layernorm.weight"),
        *rows,
        _same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    )
    final_norm = _same("decoder.final_layernorm.weight", "norm.weight")
    table = (_embedding("embed_tokens.weight"), *layer, final_norm)
    return _Family("model.", table, ("rotary_emb.inv_freq",), unbuilt)


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt2": _gpt2(),
        "llama": _llama(*_ATTENTION, *_mlp()),
        "qwen3": _llama(*_ATTENTION, *_HEAD_NORMS, *_mlp()),
        "qwen3_moe": _llama(*_ATTENTION, *_HEAD_NORMS, *_EXPERTS),
        "qwen3_next": _llama(
            *_only_in(FULL_ATTENTION, (*_GATED_ATTENTION, *_HEAD_NORMS)),
            *_only_in(LINEAR_ATTENTION, _LINEAR_ATTENTION),
            *_EXPERTS,
            *_SHARED_EXPERT,
            # Multi-token prediction.
            unbuilt=("mtp.",),
        ),
    }
)


def mapping_rows(
    model_type: str, config: ModelConfig, stored: Container[str] = ()
) -> Iterator[MappingRow]:
    """Yield a row for each of our distinct tensors, with full names; the embedding is first.

    A tied output layer is no tensor of its own and has no row.

    Args:
        model_type: Hugging Face's: ``gpt2``, ``llama``, ``qwen3``, ``qwen3_moe`` or ``qwen3_next``.
        config: The model.
        stored: Full names in the files that are read. If they have experts packed in one tensor,
            the row names that tensor.

    Yields:
        Rows without ``{layer}``.

    Raises:
        CheckpointError: There is no table for the model type.
    """
    family = _family(model_type)
    types = config.layer_types or (FULL_ATTENTION,) * config.num_layers
    for row in family.rows:
        for layer, layer_type in enumerate(types if "{layer}" in row.ours else ("",)):
            if row.layer_type not in ("", layer_type):
                continue
            ours, packed = (n.replace("{layer}", str(layer)) for n in (row.ours, row.packed))
            if packed and family.prefix + packed in stored:
                yield MappingRow(ours, {family.prefix + packed: "rows"})
                continue
            theirs = {
                family.prefix + name.replace("{layer}", str(layer)): layout
                for name, layout in row.theirs.items()
            }
            yield replace(row, ours=ours, theirs=theirs)
    if not config.tie_embeddings:
        yield MappingRow(_OUR_OUTPUT, {_THEIR_OUTPUT: "vocabulary"}, "vocabulary padding")


def is_mapped(names: Iterable[str]) -> bool:
    """Return whether names are those of our models rather than Hugging Face's."""
    return _OUR_EMBEDDING in set(names)


def our_vocabulary_rows(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the rows of our embedding, padding included."""
    return shapes[_OUR_EMBEDDING][0]


def their_vocabulary_name(names: Iterable[str], model_type: str) -> str | None:
    """Return the stored name of the embedding among Hugging Face names; None without one."""
    family = _family(model_type)
    (embedding,) = family.rows[0].theirs
    return full_names(names, model_type).get(family.prefix + embedding)


def full_names(
    names: Iterable[str], model_type: str, wanted: Collection[str] = ()
) -> dict[str, str]:
    """Return stored Hugging Face names by full name, without those that no model needs.

    Names are full already if the model type has no table, if any name has the family's prefix, or
    if all ``wanted`` names are among them. Otherwise the files are of the bare model, and the
    prefix is added.
    """
    family = _FAMILIES.get(model_type, _Family("", (), ()))
    kept = [
        name
        for name in names
        if not name.endswith(family.ignored) and not name.startswith(family.unbuilt)
    ]
    is_full = any(name.startswith(family.prefix) for name in kept)
    if is_full or (wanted and set(wanted) <= set(kept)):
        return {name: name for name in kept}
    return {name if name == _THEIR_OUTPUT else family.prefix + name: name for name in kept}


def unbuilt_names(names: Iterable[str], model_type: str) -> list[str]:
    """Return the stored names of modules that are not built, such as multi-token prediction."""
    family = _FAMILIES.get(model_type, _Family("", (), ()))
    return [name for name in names if name.startswith(family.unbuilt)]


def _family(model_type: str) -> _Family:
    if model_type not in _FAMILIES:
        raise CheckpointError.expected(
            f"a model type among {', '.join(_FAMILIES)}",
            repr(model_type),
            where="the table of Hugging Face families",
            hint="Convert a model of one of these types",
        )
    return _FAMILIES[model_type]


def expect_names(
    names: Iterable[str],
    wanted: set[str],
    *,
    optional: set[str],
    where: str,
    hint: str | None = None,
) -> None:
    """Compare names both ways.

    Raises:
        CheckpointError: A wanted name is missing, or a name is neither wanted nor optional.
    """
    got = set(names)
    missing, unknown = sorted(wanted - got), sorted(got - wanted - optional)
    if missing or unknown:
        raise CheckpointError.expected(
            f"the {len(wanted)} tensors of this model",
            f"{len(missing)} missing ({listed(missing)}), "
            f"{len(unknown)} unknown ({listed(unknown)})",
            where=where,
            hint=hint
            or "Check the model type and the number of layers, and whether weights are tied",
        )
