"""Tiny models of transformers, made from configurations, and how each trains beside its oracle."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.fsdp.toy import assert_same_grads, assert_same_parameters

VOCABULARY = 320
ROWS_PER_RANK = 2
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2}
_T5 |= {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, _DECODER),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_DECODER, "tie_word_embeddings": True}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_DECODER, **_EXPERTS}),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {**_DECODER, "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**_DECODER, **_EXPERTS, **_LINEAR_ATTENTION},
    ),
    # One layer of local attention, one of global.
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {**_DECODER, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    "bert": (BertForMaskedLM, BertConfig, {**_COMMON, **_NO_DROPOUT}),
    "t5": (T5ForConditionalGeneration, T5Config, _T5),
    # Each expert is a module of its own, which a rank may not call.
    "switch": (
        SwitchTransformersForConditionalGeneration,
        SwitchTransformersConfig,
        {**_T5, "num_experts": 32, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"num_decoder_layers": 2, "router_jitter_noise": 0.0},
    ),
}


def build(name: str) -> PreTrainedModel:
    """Build a model, the same on every rank."""
    torch.manual_seed(0)
    model_class, config_class, fields = MODELS[name]
    return model_class(config_class(**fields)).train()


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """Return the rows of all ranks for one step."""
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS_PER_RANK * dist.get_world_size(), 16)
    tokens = torch.randint(3, VOCABULARY, shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens.flip(-1)}


def own_rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's rows of a global batch."""
    start = ROWS_PER_RANK * dist.get_rank()
    return {name: rows[start : start + ROWS_PER_RANK] for name, rows in batch.items()}


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean of each rank's loss; collective."""
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return AdamW over what trains, with an epsilon that rounding noise does not reach."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-5)


def train_beside(reference: PreTrainedModel, model: PreTrainedModel, num_steps: int = 3) -> None:
    """Train a sharded model and its oracle, which sees the rows of all ranks; compare each step.

    Raises:
        AssertionError: A loss, gradient or parameter differs, or nothing was trained.
    """
    before = copy.deepcopy(reference)
    trained = set()
    optimizers = [adamw(reference), adamw(model)]
    for step in range(num_steps):
        batch = global_batch(step)
        expected = reference(**batch).loss
        loss = model(**own_rows(batch)).loss
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), rtol=1e-5, atol=0)
        expected.backward()
        loss.backward()
        grads = assert_same_grads(model, reference)
        # An expert may be idle on all ranks.
        trained |= {name for name, grad in grads.items() if grad is not None}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
    assert trained
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)) == (name not in trained), name
