"""Mapped weights make exact round trips, and what does not fit is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megafsdp.checkpoint.huggingface.mapping import (
    MappingRow,
    full_names,
    layout_sizes,
    mapping_rows,
    unbuilt_names,
)
from megafsdp.errors import CheckpointError
from megafsdp.models import ModelConfig
from tests.checkpoint.huggingface.whole_dicts import (
    stored_names,
    weights_from_hugging_face,
    weights_to_hugging_face,
)

_VOCABULARY, _HIDDEN, _FFN = 11, 12, 20
# The table is chosen by the model type; this architecture takes heads of any width.
_CONFIG = ModelConfig(
    architecture="gpt",
    num_layers=2,
    hidden_size=_HIDDEN,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=_FFN,
    vocab_size=16,
    tie_embeddings=False,
)
_FAMILIES = ("gpt2", "llama", "qwen3", "qwen3_moe", "qwen3_next")
_EXPERTS = {"num_experts": 3, "num_experts_per_token": 2, "moe_ffn_hidden_size": 5}
_LINEAR = {
    "shared_expert_ffn_hidden_size": 7,
    "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 4,
}


def _config(model_type: str, is_tied: bool) -> ModelConfig:
    config = replace(_CONFIG, tie_embeddings=is_tied)
    if model_type in ("qwen3_moe", "qwen3_next"):
        more = _LINEAR if model_type == "qwen3_next" else {}
        return replace(config, architecture=model_type, **_EXPERTS, **more)
    # Heads fill the hidden size, and each is its own group.
    return replace(config, num_query_groups=4, head_dim=3) if model_type == "gpt2" else config


def _shape(name: str, model_type: str) -> tuple[int, ...]:
    """Return the shape of a Hugging Face tensor by its name."""
    of_next: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (32, _HIDDEN),
        "in_proj_qkvz.weight": (2 * 2 * 3 + 2 * 6 * 4, _HIDDEN),
        "in_proj_ba.weight": (2 * 6, _HIDDEN),
        "conv1d.weight": (2 * 2 * 3 + 6 * 4, 1, 4),
        "A_log": (6,),
        "dt_bias": (6,),
        "linear_attn.norm.weight": (4,),
        "out_proj.weight": (_HIDDEN, 6 * 4),
        "shared_expert_gate.weight": (1, _HIDDEN),
        "shared_expert.gate_proj.weight": (7, _HIDDEN),
        "shared_expert.up_proj.weight": (7, _HIDDEN),
        "shared_expert.down_proj.weight": (_HIDDEN, 7),
    }
    suffixes: dict[str, tuple[int, ...]] = {
        **(of_next if model_type == "qwen3_next" else {}),
        "mlp.gate.weight": (3, _HIDDEN),
        **{f"experts.{i}.gate_proj.weight": (5, _HIDDEN) for i in range(3)},
        **{f"experts.{i}.up_proj.weight": (5, _HIDDEN) for i in range(3)},
        **{f"experts.{i}.down_proj.weight": (_HIDDEN, 5) for i in range(3)},
        "wte.weight": (11, _HIDDEN),
        "embed_tokens.weight": (11, _HIDDEN),
        "lm_head.weight": (11, _HIDDEN),
        "wpe.weight": (32, _HIDDEN),
        "c_attn.weight": (_HIDDEN, 3 * _HIDDEN),
        "c_attn.bias": (3 * _HIDDEN,),
        "attn.c_proj.weight": (_HIDDEN, _HIDDEN),
        "c_fc.weight": (_HIDDEN, _FFN),
        "c_fc.bias": (_FFN,),
        "mlp.c_proj.weight": (_FFN, _HIDDEN),
        "q_proj.weight": (16, _HIDDEN),
        "k_proj.weight": (8, _HIDDEN),
        "v_proj.weight": (8, _HIDDEN),
        "o_proj.weight": (_HIDDEN, 16),
        "q_norm.weight": (4,),
        "k_norm.weight": (4,),
        "gate_proj.weight": (_FFN, _HIDDEN),
        "up_proj.weight": (_FFN, _HIDDEN),
        "down_proj.weight": (_HIDDEN, _FFN),
    }
    return next((s for end, s in suffixes.items() if name.endswith(end)), (_HIDDEN,))


def _state(model_type: str, config: ModelConfig) -> dict[str, Tensor]:
    """Make a Hugging Face state dict of distinct numbers, tied names as one tensor."""
    state: dict[str, Tensor] = {}
    start = 0
    for row in mapping_rows(model_type, config):
        for name in stored_names(row, config.num_experts):
            tensor = torch.empty(_shape(name, model_type))
            state[name] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
            start += tensor.numel()
    if config.tie_embeddings:
        state["lm_head.weight"] = next(iter(state.values()))
    return state


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("model_type", _FAMILIES)
def test_round_trip_is_exact(model_type: str, is_tied: bool) -> None:
    """There and back every number stands where it stood, without padding."""
    config = _config(model_type, is_tied)
    state = _state(model_type, config)
    ours = weights_from_hugging_face(state, model_type, config, _VOCABULARY)
    back = weights_to_hugging_face(ours, model_type, config, _VOCABULARY)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].is_contiguous(), name
    again = weights_from_hugging_face(back, model_type, config, _VOCABULARY)
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())


def test_query_groups_are_interleaved() -> None:
    """Rows of two groups of two query heads: q0 q1 k0 v0 | q2 q3 k1 v1, drawn in numbers."""
    config = replace(_CONFIG, num_layers=1, head_dim=1)
    state = _state("llama", replace(_CONFIG, num_layers=1))
    at = "model.layers.0.self_attn"
    state[f"{at}.q_proj.weight"] = torch.tensor([[0], [1], [2], [3]])
    state[f"{at}.k_proj.weight"] = torch.tensor([[10], [11]])
    state[f"{at}.v_proj.weight"] = torch.tensor([[20], [21]])
    ours = weights_from_hugging_face(state, "llama", config, _VOCABULARY)
    fused = ours["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gpt2_blocks_become_heads() -> None:
    """Columns [q; k; v] of the Conv1D become rows q, k, v of each head; the bias alike."""
    config = replace(
        _config("gpt2", True), num_layers=1, num_attention_heads=2, num_query_groups=2, head_dim=1
    )
    state = _state("gpt2", replace(_config("gpt2", True), num_layers=1))
    blocks = torch.tensor([0, 1, 10, 11, 20, 21])
    state["transformer.h.0.attn.c_attn.weight"] = torch.stack((blocks, blocks + 100))
    state["transformer.h.0.attn.c_attn.bias"] = blocks
    ours = weights_from_hugging_face(state, "gpt2", config, _VOCABULARY)
    fused = ours["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert fused[:, 0].tolist() == [0, 10, 20, 1, 11, 21]
    assert fused[:, 1].tolist() == [100, 110, 120, 101, 111, 121]
    bias = ours["decoder.layers.0.self_attention.linear_qkv.bias"]
    assert bias.tolist() == [0, 10, 20, 1, 11, 21]


def test_gated_queries_and_linear_attention_are_rearranged_as_megatron_does() -> None:
    """The formulas written out: per key head and per head there, one part after another here."""
    config = _config("qwen3_next", False)
    state = _state("qwen3_next", config)
    ours = weights_from_hugging_face(state, "qwen3_next", config, _VOCABULARY)
    at = "model.layers.0.linear_attn"
    heads, dk, values, dv = 2, 3, 3, 4
    qkvz = state[f"{at}.in_proj_qkvz.weight"].view(heads, -1, _HIDDEN)
    pieces = qkvz.split([dk, dk, values * dv, values * dv], dim=1)
    pieces += state[f"{at}.in_proj_ba.weight"].view(heads, -1, _HIDDEN).split(values, dim=1)
    wanted = torch.cat([piece.flatten(0, 1) for piece in pieces])
    assert torch.equal(ours["decoder.layers.0.self_attention.in_proj.weight"], wanted)
    for name, theirs in (
        ("conv1d.weight",) * 2,
        ("A_log",) * 2,
        ("out_norm.weight", "norm.weight"),
    ):
        assert torch.equal(ours[f"decoder.layers.0.self_attention.{name}"], state[f"{at}.{theirs}"])
    at = "model.layers.1.self_attn"
    groups, heads, dim = 2, 2, 4
    q, gate = state[f"{at}.q_proj.weight"].view(groups, heads, 2, dim, _HIDDEN).unbind(2)
    k, v = (state[f"{at}.{name}_proj.weight"].view(groups, dim, _HIDDEN) for name in "kv")
    wanted = torch.cat((q.flatten(1, 2), gate.flatten(1, 2), k, v), dim=1).flatten(0, 1)
    assert torch.equal(ours["decoder.layers.1.self_attention.linear_qkv.weight"], wanted)
    assert not any(".in_proj." in name for name in ours if "layers.1" in name)
    assert not any(".linear_qkv." in name for name in ours if "layers.0" in name)


def test_experts_are_read_from_tensors_of_their_own_and_from_packed_ones() -> None:
    """Stacks with gate above up, whichever way the files have them."""
    config = _config("qwen3_moe", False)
    state = _state("qwen3_moe", config)
    wanted = weights_from_hugging_face(state, "qwen3_moe", config, _VOCABULARY)
    at = "model.layers.1.mlp.experts"
    gate, up, down = (
        torch.stack([state.pop(f"{at}.{i}.{name}_proj.weight") for i in range(3)])
        for name in ("gate", "up", "down")
    )
    state[f"{at}.gate_up_proj"] = torch.cat((gate, up), dim=1)
    state[f"{at}.down_proj"] = down
    ours = weights_from_hugging_face(state, "qwen3_moe", config, _VOCABULARY)
    experts = "decoder.layers.1.mlp.experts"
    assert torch.equal(ours[f"{experts}.linear_fc1.weight"], state[f"{at}.gate_up_proj"])
    assert torch.equal(ours[f"{experts}.linear_fc2.weight"], down)
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in wanted.items())


def test_modules_that_transformers_leaves_out_are_left_out() -> None:
    """Published files of Qwen3-Next hold layers that predict further tokens."""
    names = ["model.norm.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"]
    assert full_names(names, "qwen3_next") == {"model.norm.weight": "model.norm.weight"}
    assert unbuilt_names(names, "qwen3_next") == names[1:]
    assert unbuilt_names(names, "qwen3_moe") == []


@pytest.mark.parametrize(
    ("model_type", "kept", "left_out"),
    [
        ("gpt2", "transformer.wte.weight", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.wte.weight", "transformer.h.0.attn.masked_bias"),
        ("llama", "model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_buffers_of_old_files_are_left_out(model_type: str, kept: str, left_out: str) -> None:
    """Masks and frequencies are computed."""
    assert full_names([kept, left_out], model_type) == {kept: kept}


def test_one_wanted_name_does_not_make_all_names_full() -> None:
    """The output layer's name has no prefix, whether the others have one or not."""
    wanted = {"transformer.wte.weight", "lm_head.weight"}
    found = full_names(["wte.weight", "lm_head.weight"], "gpt2", wanted)
    assert found == {"transformer.wte.weight": "wte.weight", "lm_head.weight": "lm_head.weight"}


def test_tensors_are_contiguous_on_either_side() -> None:
    """Whatever memory they come from, as files and checkpoints need them."""
    entry = MappingRow("ours", {"theirs": "rows"}).entry((3, 2), {})
    whole = torch.arange(6.0).view(2, 3).T
    for found in (entry.join([whole]), entry.split(whole)["theirs"]):
        assert found.is_contiguous() and torch.equal(found, whole)


def test_a_part_of_fewer_digits_does_not_decide_over_the_others() -> None:
    """Files may keep some tensors in another dtype; the joined tensor holds all of them exactly."""
    entry = MappingRow("ours", {"gate": "gate", "up": "up"}, "gate up").entry((4, 2), {})
    few, many = torch.ones(2, 2, dtype=torch.bfloat16), torch.full((2, 2), 1.001)
    for parts in ((few, many), (many, few)):
        found = entry.join(parts)
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.cat([part.float() for part in parts]))
    assert entry.join((few, few)).dtype == torch.bfloat16


def test_the_vocabulary_is_padded_with_zeros_and_trimmed() -> None:
    """Padding rows are ours alone."""
    state = _state("qwen3", _CONFIG)
    ours = weights_from_hugging_face(state, "qwen3", _CONFIG, _VOCABULARY)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert ours[name].shape == (16, _HIDDEN)
        assert torch.all(ours[name][11:] == 0)
    ours["output_layer.weight"][11:] = 7
    back = weights_to_hugging_face(ours, "qwen3", _CONFIG, _VOCABULARY)
    assert torch.equal(back["lm_head.weight"], state["lm_head.weight"])


def test_names_without_the_prefix_and_old_buffers_are_taken() -> None:
    """Checkpoints of the bare GPT-2, as published, omit the prefix and hold mask buffers."""
    config = _config("gpt2", True)
    state = _state("gpt2", config)
    wanted = weights_from_hugging_face(state, "gpt2", config, _VOCABULARY)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    got = weights_from_hugging_face(bare, "gpt2", config, _VOCABULARY)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_missing_and_unknown_tensors_are_named() -> None:
    """A layer too few or a tensor too many is an error on either side."""
    state = _state("llama", _CONFIG)
    del state["model.norm.weight"]
    state["model.layers.0.mlp.gate.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        weights_from_hugging_face(state, "llama", _CONFIG, _VOCABULARY)
    assert "1 missing (model.norm.weight)" in str(caught.value)
    assert "1 unknown (model.layers.0.mlp.gate.weight)" in str(caught.value)


@pytest.mark.parametrize("change", [{"head_dim": 8}, {"num_query_groups": 4}])
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    """Rows that cannot be those of the config are not rearranged."""
    with pytest.raises(CheckpointError, match="rows for"):
        weights_from_hugging_face(
            _state("qwen3", _CONFIG), "qwen3", replace(_CONFIG, **change), _VOCABULARY
        )


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(12, 15), (11, 8)])
def test_a_vocabulary_that_does_not_fit_is_refused(vocab_size: int, num_rows: int) -> None:
    """Rows are neither cut off nor left over."""
    row = next(mapping_rows("qwen3", _CONFIG))
    # A model of 15 rows whose config has 16, and one of 8 rows.
    sizes = layout_sizes(_CONFIG, vocab_size, padded_to=16 if num_rows == 15 else num_rows)
    with pytest.raises(CheckpointError, match="rows for 'vocabulary padding'"):
        row.entry((num_rows, _HIDDEN), sizes)


def test_an_unknown_family_is_refused() -> None:
    """The message lists the families that have a table."""
    with pytest.raises(CheckpointError, match=", ".join(_FAMILIES)):
        weights_from_hugging_face({}, "bert", _CONFIG, _VOCABULARY)
