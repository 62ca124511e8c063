"""Models that transformers distributes while it loads them, sharded in place of FSDP2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3ForSequenceClassification,
    Trainer,
    TrainingArguments,
    core_model_loading,
)
from transformers.distributed import DistributedConfig, fsdp

from megafsdp import FSDPModule, clip_grad_norm_, full_state_dict
from megafsdp.integrations.pretrained import replacing_fsdp2
from megafsdp.integrations.transformers import Sharded
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import VOCABULARY, adamw, build
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

# transformers warns of its own future.
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]


def _saved(name: str, folder: str) -> PreTrainedModel:
    model = build(name)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def _load(folder: str, degrees: dict[str, int], **options: Any) -> PreTrainedModel:
    plan = {"tp_plan": "auto"} if degrees.get("tp_size", 1) > 1 else {}
    with launcher_environment(), replacing_fsdp2(**options):
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(**degrees, **plan)
        )
    assert isinstance(model, FSDPModule)
    return model.train()


def _trains(name: str, folder: str, degrees: dict[str, int], options: dict[str, Any]) -> None:
    reference = _saved(name, folder)
    model = _load(folder, degrees, **options)
    assert_same_parameters(model, reference, rtol=0, atol=0)
    tokens = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))
    num_tp = degrees.get("tp_size", 1)
    own = tokens.chunk(dist.get_world_size() // num_tp)[dist.get_rank() // num_tp]
    optimizers = [adamw(reference), adamw(model)]
    for _ in range(2):
        reference(tokens, labels=tokens).loss.backward()
        model(own, labels=own).loss.backward()
        assert_same_grads(model, reference)
        # torch refuses gradients on several meshes.
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), math.inf)
        torch.testing.assert_close(clip_grad_norm_(model, math.inf), wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=1e-5, atol=1e-6)
    model.save_pretrained(f"{folder}/after")
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/after")
    assert_same_parameters(model, again, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "degrees", "options"),
    [
        ("llama", {"fsdp_size": 4}, {"strategy": "optim"}),
        ("llama", {"fsdp_size": 2, "tp_size": 2}, {}),
        # Tied, which transformers does after it has sharded the two modules.
        ("qwen3", {"fsdp_size": 2, "dp_replicate_size": 2}, {}),
        ("qwen3", {"fsdp_size": 2, "tp_size": 2}, {}),
        ("qwen3-moe", {"fsdp_size": 4}, {}),
        ("qwen3-moe", {"fsdp_size": 2, "tp_size": 2}, {}),
        ("qwen3-moe", {"fsdp_size": 4, "ep_size": 2}, {}),
        ("qwen3-moe", {"fsdp_size": 4, "ep_size": 4}, {}),
        ("qwen3-moe", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, {}),
    ],
)
def test_a_distributed_model_trains_as_one_process(
    ranks: Ranks, tmp_path: Path, name: str, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    """It has the values of the files, and is saved as it is read."""
    ranks(4).run(_trains, name, str(tmp_path), degrees, options)


def _misses(folder: str) -> None:
    _saved("llama", folder)
    keywords: dict[str, Any] = {"num_labels": 3}
    torch.manual_seed(5)
    one = Qwen3ForSequenceClassification.from_pretrained(folder, **keywords)
    torch.manual_seed(5)
    keywords["distributed_config"] = DistributedConfig(fsdp_size=2)
    with launcher_environment(), replacing_fsdp2():
        model = Qwen3ForSequenceClassification.from_pretrained(folder, **keywords)
    assert_same_parameters(model, one, rtol=0, atol=0)
    larger = build("llama").config
    larger.vocab_size += 8
    keywords = {"config": larger, "distributed_config": DistributedConfig(fsdp_size=2)}
    with (
        launcher_environment(),
        replacing_fsdp2(),
        pytest.raises(RuntimeError, match="ignore_mismatched_sizes"),
    ):
        AutoModelForCausalLM.from_pretrained(folder, **keywords)


def test_what_a_file_lacks_is_initialised_as_by_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """And tensors of other shapes are reported."""
    ranks(2).run(_misses, str(tmp_path))


class MixedTrainer(Sharded, Trainer):
    """The trainer with our mix-in."""


def _train(folder: str, degrees: dict[str, int], *, resumes: bool) -> dict[str, torch.Tensor]:
    model = _load(folder, degrees)
    rows = torch.randint(3, VOCABULARY, (32, 12), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows.tolist()]
    with launcher_environment():
        arguments = TrainingArguments(
            f"{folder}/runs",
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            save_steps=2,
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = MixedTrainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=f"{folder}/runs/checkpoint-2" if resumes else None)
    return full_state_dict(model)


def _resumes(folder: str) -> None:
    _saved("qwen3-moe", folder)
    degrees = {"fsdp_size": 2, "ep_size": 2}
    found = [_train(folder, degrees, resumes=resumes) for resumes in (False, True)]
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


def test_a_trainer_saves_and_resumes_it(ranks: Ranks, tmp_path: Path) -> None:
    """With the bits of the uninterrupted run; transformers' own trainer saves no states."""
    ranks(2).run(_resumes, str(tmp_path))


def test_transformers_has_its_own_functions_again() -> None:
    """After the context, also if it ends by an exception; meshes are refused before it begins."""
    before = fsdp.fully_shard, core_model_loading.set_param_for_module
    with pytest.raises(KeyError), replacing_fsdp2():
        outer = fsdp.fully_shard
        assert outer is not before[0]
        with replacing_fsdp2(strategy="optim"):
            assert fsdp.fully_shard not in (outer, before[0])
        assert fsdp.fully_shard is outer
        raise KeyError
    assert (fsdp.fully_shard, core_model_loading.set_param_for_module) == before
    refused = pytest.raises(TypeError, match=r"meshes, got \['mesh'\].*DistributedConfig")
    with refused, replacing_fsdp2(mesh=None):
        pass
