"""LoRA adapters train over frozen weights of bitsandbytes, in 4 bits (QLoRA) and in 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import BitsAndBytesConfig, PreTrainedModel, Qwen3ForCausalLM

from megafsdp import checkpoint, full_state_dict, fully_shard_model
from megafsdp.fsdp.keywords import StrategyChoice
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import ROWS_PER_RANK, adamw, build, global_batch, own_rows
from tests.fsdp.toy import assert_same_grads
from tests.ranks import Ranks

pytest.importorskip("bitsandbytes", reason="ecosystem: bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="ecosystem: peft is not installed")
pytest.importorskip("accelerate", reason="ecosystem: accelerate is not installed")

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the folder of a model whose weights loads quantize."""
    build("qwen3").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _four_bits(storage: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )


def _quantized(base: Path, config: BitsAndBytesConfig) -> PreTrainedModel:
    return Qwen3ForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


def _adapted(base: Path, config: BitsAndBytesConfig, recomputes: bool = False) -> peft.PeftModel:
    model = peft.prepare_model_for_kbit_training(
        _quantized(base, config),
        use_gradient_checkpointing=recomputes,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, _lora())
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def _lora() -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _assert_same_bits(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    state, wanted = full_state_dict(model), dict(reference.named_parameters())
    # Scales of 4-bit weights stay with their layers.
    assert state.keys() <= reference.state_dict().keys()
    for name, parameter in wanted.items():
        expected = parameter.detach().to(state[name].dtype)
        assert torch.equal(_bits(state[name]), _bits(expected)), name


def _train_beside(model: torch.nn.Module, reference: torch.nn.Module) -> torch.optim.Optimizer:
    optimizers = [adamw(reference), adamw(model)]
    for step in range(3):
        batch, losses = global_batch(step), []
        # A rank at a time, because bf16 rounds by the number of rows in a product.
        for start in range(0, len(batch["labels"]), ROWS_PER_RANK):
            rows = {name: whole[start : start + ROWS_PER_RANK] for name, whole in batch.items()}
            losses.append(reference(**rows).loss)
            (losses[-1] / dist.get_world_size()).backward()
        loss = model(**own_rows(batch)).loss
        assert torch.equal(loss, losses[dist.get_rank()])
        loss.backward()
        assert any(
            g is not None for g in assert_same_grads(model, reference, rtol=0, atol=0).values()
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_same_bits(model, reference)
    return optimizers[1]


def _train(base: Path, storage: torch.dtype, strategy: StrategyChoice, recomputes: bool) -> None:
    config = _four_bits(storage)
    reference = _adapted(base, config)
    model = fully_shard_model(_adapted(base, config, recomputes), strategy=strategy)
    packed = [p for n, p in model.named_parameters() if n.endswith("q_proj.base_layer.weight")]
    assert packed and {p.dtype for p in packed} == {storage}
    optimizer = _train_beside(model, reference)
    state = full_state_dict(model)
    set_model_state_dict(model, get_model_state_dict(model))
    checkpoint.save(base.parent / "saved", step=3, model=model, optimizer=optimizer)
    other = fully_shard_model(_adapted(base, config))
    checkpoint.load(base.parent / "saved", model=other, optimizer=adamw(other))
    _assert_same_bits(other, reference)
    if dist.get_rank() == 0:
        model.save_pretrained(base.parent / "adapters", state_dict=state)
        loaded = peft.PeftModel.from_pretrained(_quantized(base, config), base.parent / "adapters")
        for name, tensor in loaded.state_dict().items():
            assert "lora" not in name or torch.equal(tensor, state[name]), name
        loaded.merge_and_unload()


@pytest.mark.parametrize(
    ("storage", "strategy", "recomputes"),
    [
        (torch.bfloat16, "optim_grads_params", True),
        (torch.float32, "optim", False),
        (torch.uint8, "optim_grads_params", False),
    ],
)
def test_adapters_train_over_4_bits_as_in_one_process(
    ranks: Ranks, base: Path, storage: torch.dtype, strategy: StrategyChoice, recomputes: bool
) -> None:
    """Losses, gradients and parameters have its bits, in checkpoints too; PEFT reads adapters."""
    ranks(2).run(_train, base, storage, strategy, recomputes)


def _train_over_8_bits(base: Path) -> None:
    config = BitsAndBytesConfig(load_in_8bit=True)
    reference, model = (_adapted(base, config) for _ in range(2))
    with pytest.raises(NotImplementedError, match=r"q_proj.*Int8Params.*ignored_params"):
        fully_shard_model(model)
    ignored = {p for p in model.parameters() if p.dtype == torch.int8}
    _train_beside(fully_shard_model(model, ignored_params=ignored), reference)


def test_adapters_train_over_8_bits_that_units_ignore(ranks: Ranks, base: Path) -> None:
    """Layers read copies of these weights, so that units could not divide them."""
    ranks(2).run(_train_over_8_bits, base)


def _in_trainer(base: Path, steps: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from megafsdp.integrations.transformers import Sharded
    from tests.ecosystem.test_trainers import OPTIONS, make_tokenizer

    class ShardedTuningTrainer(Sharded, SFTTrainer):
        """The trainer of TRL with our mix-in."""

    return ShardedTuningTrainer(
        _quantized(base, _four_bits(torch.bfloat16)),
        SFTConfig(base.parent / "runs", **OPTIONS | {"bf16": True} | steps),
        train_dataset=Dataset.from_dict({"input_ids": global_batch(0)["input_ids"].tolist() * 8}),
        processing_class=make_tokenizer(),
        peft_config=_lora(),
    )


def _resume(base: Path) -> None:
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    states = []
    with launcher_environment():
        for resumed_from in (None, str(base.parent / "runs" / "checkpoint-2")):
            trainer = _in_trainer(base, steps)
            trainer.train(resume_from_checkpoint=resumed_from)
            states.append(full_state_dict(trainer.model))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(_bits(tensor), _bits(states[1][name])), name


def test_a_trainer_of_trl_resumes_over_4_bits(ranks: Ranks, base: Path) -> None:
    """Bit for bit the run that was not interrupted."""
    pytest.importorskip("trl", reason="ecosystem: trl is not installed")
    ranks(2).run(_resume, base)
