"""Hugging Face models train and generate as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megafsdp import fully_shard_model, summon_full_params
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(name: str) -> PreTrainedModel:
    """Build a tiny random model."""
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    if name == "qwen3-tied":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
    return GPT2LMHeadModel(GPT2Config(**GPT2_SIZES))


def _train_and_generate(name: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    reference = make(name)
    model = copy.deepcopy(reference)
    fully_shard_model(model)
    assert model.get_output_embeddings().weight is not reference.get_output_embeddings().weight
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5, fused=True) for m in (reference, model)
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, VOCABULARY, (2 * world, 16), generator=generator)
        mine = tokens[2 * rank : 2 * rank + 2]
        reference(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model(input_ids=mine, labels=mine, use_cache=False).loss.backward()
        assert_same_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
    prompt = tokens[:1, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with summon_full_params(model):
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    wanted = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(written, wanted)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gpt2"])
def test_a_hugging_face_model_trains_and_generates_as_it_is(ranks: Ranks, name: str) -> None:
    """Units come from _no_split_modules; three steps and a greedy text equal the unsharded ones."""
    ranks(2).run(_train_and_generate, name)
