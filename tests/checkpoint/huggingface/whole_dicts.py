"""Whole state dicts through the mapping table, without files, ranks or models."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from megafsdp.checkpoint.huggingface.mapping import (
    MappingRow,
    expect_names,
    full_names,
    layout_sizes,
    mapping_rows,
)
from megafsdp.models import ModelConfig

_TIED = ("embedding.word_embeddings.weight", "output_layer.weight")


def stored_names(row: MappingRow, num_experts: int) -> list[str]:
    """Return the names of a row, those of single experts spelt out in the order of an entry."""
    return [
        name.replace("{expert}", str(expert))
        for name in row.theirs
        for expert in range(num_experts if "{expert}" in name else 1)
    ]


def _join(row: MappingRow, theirs: list[Tensor], sizes: Mapping[str, int]) -> Tensor:
    """Join tensors whose rows tell the shape of ours."""
    rows = [t.T if row.is_transposed else t for t in theirs]
    padding = sizes["padding"] if "padding" in row.layout else 0
    shape = (sum(t.shape[0] for t in rows) + padding, *rows[0].shape[1:])
    if row.layout.startswith("experts("):
        shape = (sizes["experts"], shape[0] // sizes["experts"], *shape[1:])
    return row.entry(shape, sizes).join(theirs)


def weights_from_hugging_face(
    state: Mapping[str, Tensor], model_type: str, config: ModelConfig, vocab_size: int
) -> dict[str, Tensor]:
    """Map a Hugging Face state dict to ours; both names of a tied tensor are one tensor."""
    sizes = layout_sizes(config, vocab_size, padded_to=config.vocab_size)
    known = full_names(state, model_type)
    rows = list(mapping_rows(model_type, config, known))
    names = {row.ours: stored_names(row, config.num_experts) for row in rows}
    wanted = {name for stored in names.values() for name in stored}
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    expect_names(known, wanted, optional=optional, where="the Hugging Face state dict")
    ours = {
        row.ours: _join(row, [state[known[name]] for name in names[row.ours]], sizes)
        for row in rows
    }
    if config.tie_embeddings:
        ours[_TIED[1]] = ours[_TIED[0]]
    return ours


def weights_to_hugging_face(
    state: Mapping[str, Tensor],
    model_type: str,
    config: ModelConfig,
    vocab_size: int,
    *,
    stored: Container[str] = (),
) -> dict[str, Tensor]:
    """Map our state dict to Hugging Face's; both names of a tied tensor are one tensor."""
    sizes = layout_sizes(config, vocab_size, padded_to=config.vocab_size)
    theirs: dict[str, Tensor] = {}
    for row in mapping_rows(model_type, config, stored):
        ours = state[row.ours]
        theirs |= row.entry(tuple(ours.shape), sizes).split(ours)
    if config.tie_embeddings:
        theirs["lm_head.weight"] = next(iter(theirs.values()))
    return theirs
