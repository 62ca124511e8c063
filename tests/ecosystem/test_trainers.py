"""The Trainer of transformers, and TRL's for supervised fine-tuning, around a sharded model."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import checkpoint, fully_shard_model
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import ROWS_PER_RANK, VOCABULARY, build, global_batch
from tests.fsdp.toy import assert_same_parameters
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="ecosystem: accelerate is not installed")
pytest.importorskip("trl", reason="ecosystem: trl is not installed")
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

MAX_NORM = 0.5
DECAY = 1e-2
NUM_MICROBATCHES = 2
NUM_STEPS = 3
OPTIONS = {
    "use_cpu": True,
    "per_device_train_batch_size": ROWS_PER_RANK,
    "gradient_accumulation_steps": NUM_MICROBATCHES,
    "max_steps": NUM_STEPS,
    "max_grad_norm": MAX_NORM,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-5,
    "weight_decay": DECAY,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "logging_steps": 1,
    # A checkpoint of the Trainer would be one of a whole model.
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


class InOrder:
    """A trainer that takes rows in the order of the data."""

    def _get_train_sampler(self, *unused: object) -> None:
        return None


class PlainTrainer(InOrder, Trainer):
    """The Trainer of transformers."""


class TuningTrainer(InOrder, SFTTrainer):
    """The trainer of TRL."""


def make_trainer(name: str, model: nn.Module, directory: Path) -> Trainer:
    """Return a trainer of three steps of two microbatches."""
    batches = map(global_batch, range(NUM_STEPS * NUM_MICROBATCHES))
    rows = torch.cat([batch["input_ids"] for batch in batches]).tolist()
    if name == "transformers":
        data = [{"input_ids": row, "labels": row} for row in rows]
        return PlainTrainer(model, TrainingArguments(directory, **OPTIONS), train_dataset=data)
    words = {f"word{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="word0")),
        pad_token="word0",
        eos_token="word2",
    )
    return TuningTrainer(
        model,
        SFTConfig(directory, **OPTIONS, bf16=False),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
    )


def _train(name: str, directory: Path) -> None:
    reference = build("qwen3")
    model = fully_shard_model(copy.deepcopy(reference))
    with launcher_environment():
        # The line of set-up: accelerate is not to wrap the model into DDP.
        model._is_accelerate_prepared = True
        trainer = make_trainer(name, model, directory)
        trainer.train()
        assert trainer.accelerator.num_processes == dist.get_world_size()
        # The first rank saves alone.
        refusal = pytest.raises(NotImplementedError, match="full_")
        with refusal if dist.get_rank() == 0 else nullcontext():
            trainer.save_model(directory / "refused")
        checkpoint.save(directory, step=NUM_STEPS, model=model, optimizer=trainer.optimizer)
        other = fully_shard_model(build("qwen3"))
        checkpoint.load(directory, model=other)
    decayed = set(trainer.get_decay_parameter_names(reference))
    names = dict(reference.named_parameters())
    groups = [
        {"params": [p for n, p in names.items() if n in decayed]},
        {"params": [p for n, p in names.items() if n not in decayed], "weight_decay": 0.0},
    ]
    assert all(group["params"] for group in groups)
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5, weight_decay=DECAY)
    for step in range(NUM_STEPS):
        total = torch.zeros(())
        for number in range(NUM_MICROBATCHES):
            tokens = global_batch(step * NUM_MICROBATCHES + number)["input_ids"]
            loss = reference(input_ids=tokens, labels=tokens).loss / NUM_MICROBATCHES
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        logged = trainer.state.log_history[step]
        assert logged["loss"] == pytest.approx(total.item(), rel=1e-5)
        assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
    assert_same_parameters(other, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_a_trainer_trains_as_one_process(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Losses, norms before clipping, and parameters after three steps are those of one."""
    ranks(2).run(_train, name, tmp_path)


def _refused(directory: Path) -> None:
    model = fully_shard_model(build("qwen3"))
    with launcher_environment(), pytest.raises(ValueError, match="DistributedDataParallel"):
        make_trainer("transformers", model, directory).train()


def test_a_trainer_without_the_line_of_set_up_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """It would be wrapped into DDP."""
    ranks(2).run(_refused, tmp_path)
