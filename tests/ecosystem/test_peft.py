"""LoRA adapters of PEFT train over sharded weights that are frozen."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import PreTrainedModel

from megafsdp import full_state_dict, fully_shard_model
from megafsdp.fsdp.keywords import StrategyChoice
from tests.ecosystem.models import (
    ROWS_PER_RANK,
    adamw,
    build,
    global_batch,
    mean_over_ranks,
    own_rows,
    train_beside,
)
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

peft = pytest.importorskip("peft", reason="ecosystem: peft is not installed")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]


def with_adapters(base: PreTrainedModel) -> peft.PeftModel:
    """Return a model with LoRA adapters, whose second factors are not zero."""
    return _adapted(base, target_modules="all-linear")


def _adapted(base: PreTrainedModel, **targets: object) -> peft.PeftModel:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **targets)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _train(name: str, strategy: StrategyChoice, directory: Path) -> None:
    reference = with_adapters(build(name))
    model = fully_shard_model(copy.deepcopy(reference), strategy=strategy)
    train_beside(reference, model)
    for net in (reference, model):
        net.eval()
    batch = global_batch(9)
    # As trainers of preferences do, which take the frozen model for reference.
    with torch.no_grad(), reference.disable_adapter(), model.disable_adapter():
        expected, loss = reference(**batch).loss, model(**own_rows(batch)).loss
        assert_close(mean_over_ranks(loss), expected, rtol=1e-5, atol=0)
    train_beside(reference.train(), model.train())
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=state)
        loaded = peft.PeftModel.from_pretrained(build(name), directory).state_dict()
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("qwen3", "optim_grads_params"),
        ("qwen3", "optim"),
        ("gpt2", "optim_grads_params"),
    ],
)
def test_adapters_train_as_in_one_process(
    ranks: Ranks, name: str, strategy: StrategyChoice, tmp_path: Path
) -> None:
    """Gradients and adapters are equal, frozen weights stay; PEFT reads what it saved."""
    ranks(2).run(_train, name, strategy, tmp_path)


def _train_experts() -> None:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    reference = _adapted(build("qwen3-moe"), target_modules=[], target_parameters=experts)
    train_beside(reference, fully_shard_model(copy.deepcopy(reference)))


def test_adapters_of_experts_train_as_in_one_process(ranks: Ranks) -> None:
    """PEFT adds them to bare parameters, which it writes for as long as a forward takes."""
    ranks(2).run(_train_experts)


def _train_over_bf16() -> None:
    base = build("qwen3")
    for parameter in base.parameters():
        parameter.data = parameter.data.bfloat16()
    reference = with_adapters(base)
    model = fully_shard_model(copy.deepcopy(reference))
    optimizers = [adamw(reference), adamw(model)]
    for step in range(3):
        batch = global_batch(step)
        # A rank at a time, because bf16 rounds by the number of rows in a product.
        for start in range(0, len(batch["labels"]), ROWS_PER_RANK):
            rows = {name: whole[start : start + ROWS_PER_RANK] for name, whole in batch.items()}
            (reference(**rows).loss / dist.get_world_size()).backward()
        model(**own_rows(batch)).loss.backward()
        assert_same_grads(model, reference, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Main weights are fp32, those of frozen parameters too.
    assert_same_parameters(model, reference.float(), rtol=0, atol=0)


def test_adapters_train_over_bf16_weights(ranks: Ranks) -> None:
    """Adapters are fp32, as PEFT makes them; every bit is that of one process."""
    ranks(2).run(_train_over_bf16)


def _refuse_merge() -> None:
    model = fully_shard_model(with_adapters(build("qwen3")))
    with pytest.raises(NotImplementedError, match="'mm'"):
        model.merge_and_unload()


def test_merging_sharded_adapters_is_refused(ranks: Ranks) -> None:
    """The product of two factors of which each rank has some rows; merge what PEFT has read."""
    ranks(2).run(_refuse_merge)


def _refuse_late_adapters() -> None:
    model = with_adapters(fully_shard_model(build("qwen3")))
    with pytest.raises(RuntimeError, match=r"lora_A.*registered after.*get_peft_model\(\), before"):
        model(**own_rows(global_batch(0)))


def test_adapters_that_are_added_to_a_sharded_model_are_refused(ranks: Ranks) -> None:
    """No unit would reduce their gradients; the first forward says to add them before."""
    ranks(2).run(_refuse_late_adapters)
