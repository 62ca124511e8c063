"""Hugging Face models train and generate as they are."""

from __future__ import annotations

import copy

import pytest
import torch

from megafsdp import fully_shard_model, summon_full_params
from tests.ecosystem.models import build, train_beside
from tests.ranks import Ranks


def _train_and_generate(name: str) -> None:
    reference = build(name)
    model = fully_shard_model(copy.deepcopy(reference))
    train_beside(reference, model)
    assert model.get_output_embeddings().weight is not reference.get_output_embeddings().weight
    prompt = torch.arange(3, 7)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with summon_full_params(model):
        written = model.generate(prompt, **options)
    assert torch.equal(written, reference.generate(prompt, **options))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_hugging_face_model_trains_and_generates_as_it_is(ranks: Ranks, name: str) -> None:
    """Units come from _no_split_modules; three steps and a greedy text equal the unsharded ones."""
    ranks(2).run(_train_and_generate, name)
