"""Tiny random models of every family, ours and transformers', with the same weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megafsdp import fully_shard_model
from megafsdp.models import (
    LanguageModel,
    ModelConfig,
    build_model,
    config_from_hugging_face,
    unit_classes,
)
from tests.checkpoint.huggingface.whole_dicts import weights_from_hugging_face
from tests.end_to_end.strategy_cases import mesh_of_shape
from tests.pairwise import gate_of

VOCABULARY = 61
DENSE = ("gpt2", "llama", "qwen3")
MIXTURES = ("qwen3_moe", "qwen3_next")
# Family, whether embeddings are tied, and number of ranks; beyond the pairs under --full.
CASES = gate_of(list(product(DENSE + MIXTURES, (False, True), (1, 2, 3))), "round-trips")
_CONFIGS = {
    "gpt2": GPT2Config,
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
}


def their_config(family: str, is_tied: bool = False) -> PretrainedConfig:
    """Describe a tiny model with distinct sizes, so that a wrong transposition shows."""
    # Of wider weights, fp32 is off by several times 1e-5 in either hybrid.
    spread = 0.08 if family == "qwen3_next" else 0.2
    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": is_tied, "initializer_range": spread}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 80, "n_positions": 64}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(**common, **special, **sizes, **dropout)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    if family in MIXTURES:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    if family == "qwen3_next":
        sizes |= {"layer_types": ["linear_attention", "full_attention"]}
        sizes |= {"shared_expert_intermediate_size": 28}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
    return _CONFIGS[family](**common, **special, **sizes)


def their_model(family: str, is_tied: bool = False) -> PreTrainedModel:
    """Build a tiny random model whose norms and biases are random as well."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(their_config(family, is_tied))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def our_config(family: str, is_tied: bool = False, *, padding: int = 0) -> ModelConfig:
    """Return the config of ours that is the same model, with padding rows in its vocabulary."""
    fields = their_config(family, is_tied).to_dict()
    return config_from_hugging_face(fields, padded_vocab_size=VOCABULARY + padding)


def our_model(family: str, is_tied: bool = False, *, padding: int = 0) -> LanguageModel:
    """Build ours with the weights of :func:`their_model`, by whole state dicts."""
    config = our_config(family, is_tied, padding=padding)
    model = build_model(config, seed=1)
    state = their_model(family, is_tied).state_dict()
    ours = weights_from_hugging_face(state, family, config, VOCABULARY)
    model.load_state_dict(ours)
    return model.eval()


def sharded(model: nn.Module, shape: tuple[int, ...] = (), **options: object) -> nn.Module:
    """Shard a model, ours or transformers', over all ranks, or a mesh of a shape."""
    if shape:
        options["mesh"] = mesh_of_shape(shape)
    units = unit_classes(model.config) if isinstance(model, LanguageModel) else None
    return fully_shard_model(model, units, **options)


def tokens() -> torch.Tensor:
    """Return a fixed batch."""
    return torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory with the library alone."""
    return {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_files(left: Path, right: Path) -> None:
    """Compare the tensors of two directories bit by bit."""
    a, b = read(left), read(right)
    assert a.keys() == b.keys()
    assert len(a) > 10
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def assert_loads(directory: Path, family: str, is_tied: bool) -> None:
    """Load an fp32 export with transformers and compare weights and logits with its origin."""
    loaded, report = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    origin = their_model(family, is_tied)
    assert loaded.state_dict().keys() == origin.state_dict().keys()
    for name, tensor in origin.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens()).logits, origin(tokens()).logits)
