"""The Trainer of transformers, and TRL's for supervised fine-tuning, around a sharded model."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import (
    FSDPModule,
    checkpoint,
    full_state_dict,
    full_tensor,
    fully_shard_model,
    summon_full_params,
)
from megafsdp.errors import CheckpointError
from megafsdp.fsdp.runtime.unit import units_below
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import MODELS, ROWS_PER_RANK, VOCABULARY, build, global_batch
from tests.fsdp.toy import assert_same_parameters
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="ecosystem: accelerate is not installed")
pytest.importorskip("peft", reason="ecosystem: peft is not installed")
pytest.importorskip("trl", reason="ecosystem: trl is not installed")
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from megafsdp.integrations.transformers import FOLDER, Sharded

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


class MixedTrainer(Sharded, PlainTrainer):
    """The Trainer of transformers with our mix-in."""


class MixedTuningTrainer(Sharded, TuningTrainer):
    """The trainer of TRL with our mix-in."""


class MixedWritingTrainer(Sharded, Seq2SeqTrainer):
    """The trainer of transformers that evaluates by writing, with our mix-in."""


class MixedRewardingTrainer(Sharded, GRPOTrainer):
    """The trainer of TRL that writes and rewards, with our mix-in."""


class MixedPreferringTrainer(Sharded, DPOTrainer):
    """The trainer of TRL for preferences, with our mix-in."""


CLASSES = {
    "transformers": {False: PlainTrainer, True: MixedTrainer},
    "trl": {False: TuningTrainer, True: MixedTuningTrainer},
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that are numbers, apart by spaces."""
    words = WordLevel({f"word{n}": n for n in range(VOCABULARY)}, unk_token="word0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="word0", bos_token="word1", eos_token="word2"
    )


def make_trainer(
    name: str, model: nn.Module, directory: Path, *, is_mixed: bool = False, **options: Any
) -> Trainer:
    """Return a trainer of three steps of two microbatches, with or without our mix-in."""
    trainer_class = CLASSES[name][is_mixed]
    batches = map(global_batch, range(NUM_STEPS * NUM_MICROBATCHES))
    rows = torch.cat([batch["input_ids"] for batch in batches]).tolist()
    if name == "transformers":
        data = [{"input_ids": row, "labels": row} for row in rows]
        given = TrainingArguments(directory, **OPTIONS | options)
        return trainer_class(model, given, train_dataset=data, eval_dataset=data[:5])
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.2)
    return trainer_class(
        model,
        SFTConfig(directory, **OPTIONS | {"bf16": False} | options),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        eval_dataset=Dataset.from_dict({"input_ids": rows[:5]}),
        processing_class=make_tokenizer(),
        peft_config=adapters if "save_steps" in options else None,
    )


def _train(name: str, directory: Path, is_mixed: bool) -> None:
    reference = build("qwen3")
    model = copy.deepcopy(reference)
    if not is_mixed:
        fully_shard_model(model)
        # The line of set-up: accelerate is not to wrap the model into DDP.
        model._is_accelerate_prepared = True
    with launcher_environment():
        trainer = make_trainer(name, model, directory, is_mixed=is_mixed)
        assert trainer.model is model and isinstance(model, FSDPModule)
        trainer.train()
        assert trainer.accelerator.num_processes == dist.get_world_size()
        if not is_mixed:
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


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_a_trainer_trains_as_one_process(
    ranks: Ranks, name: str, is_mixed: bool, tmp_path: Path
) -> None:
    """Losses, norms before clipping, and parameters after three steps are those of one."""
    ranks(2).run(_train, name, tmp_path, is_mixed)


def _smoothed(
    directory: Path, is_mixed: bool
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    with launcher_environment():
        model, options = build("qwen3"), {"label_smoothing_factor": 0.1}
        trainer = make_trainer("transformers", model, directory, is_mixed=is_mixed, **options)
        trainer.train()
        return trainer.state.log_history[:NUM_STEPS], full_state_dict(trainer.model)


def test_a_trainer_smooths_labels_as_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """The trainer shifts them for classes whose names are in a table."""
    (log, state), (oracle_log, oracle) = (
        ranks(2).run(_smoothed, tmp_path, is_mixed)[0] for is_mixed in (True, False)
    )
    assert state.keys() == oracle.keys()
    for name, tensor in oracle.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    for row, wanted in zip(log, oracle_log, strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-5)


def _refused(directory: Path) -> None:
    model = fully_shard_model(build("qwen3"))
    with launcher_environment(), pytest.raises(ValueError, match="DistributedDataParallel"):
        make_trainer("transformers", model, directory).train()


def test_a_trainer_without_the_line_of_set_up_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """It would be wrapped into DDP."""
    ranks(2).run(_refused, tmp_path)


SAVED_STEP, LAST_STEP = 2, 4
RESUMABLE = {
    "max_steps": LAST_STEP,
    "save_strategy": "steps",
    "save_steps": SAVED_STEP,
    "eval_strategy": "steps",
    "eval_steps": SAVED_STEP,
    "lr_scheduler_type": "cosine",
}


def _resumable(name: str, directory: Path, **options: Any) -> Trainer:
    """Return a trainer with dropout, whose random states matter."""
    model_class, config_class, fields = MODELS["qwen3"]
    torch.manual_seed(0)
    model = model_class(config_class(**fields, attention_dropout=0.2))
    return make_trainer(name, model, directory, is_mixed=True, **RESUMABLE | options)


def _everything(trainer: Trainer) -> dict[str, object]:
    """Return weights, states and what was logged, but for times and counts; collective."""
    found: dict[str, object] = dict(full_state_dict(trainer.model))
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = full_tensor(value).clone()
    found["scheduler"] = trainer.lr_scheduler.state_dict()
    # TRL counts the tokens of each call of train() from zero.
    left_out = ("time", "per_second", "num_tokens")
    found["log"] = [
        {key: value for key, value in row.items() if not any(word in key for word in left_out)}
        for row in trainer.state.log_history
        # The last row is about this call of train() alone.
        if "train_loss" not in row
    ]
    return found


def _assert_equal(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got, is_tensor = found[name], isinstance(value, torch.Tensor)
        assert torch.equal(got, value) if is_tensor else got == value, (name, got, value)


def _resume(name: str, directory: Path) -> dict[str, object]:
    with launcher_environment():
        whole = _resumable(name, directory)
        whole.train()
        expected = _everything(whole)
        rows = [row for row in expected["log"] if "loss" in row]
        assert len(rows) == LAST_STEP and len({row["loss"] for row in rows}) == LAST_STEP
        assert [row["step"] for row in expected["log"] if "eval_loss" in row] == [2, 4]
        # In the same folder: the checkpoint of the last step is written again.
        resumed = _resumable(name, directory)
        saved = directory / f"checkpoint-{SAVED_STEP}"
        resumed._load_from_checkpoint(saved)
        assert any(
            not torch.equal(tensor, expected[key])
            for key, tensor in full_state_dict(resumed.model).items()
        )
        resumed.train(resume_from_checkpoint=str(saved))
        _assert_equal(_everything(resumed), expected)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(saved / FOLDER)
        dist.barrier()
        with pytest.raises(CheckpointError, match=FOLDER):
            resumed.train(resume_from_checkpoint=str(saved))
    return {key: value for key, value in expected.items() if key != "log"}


def _end(name: str, directory: Path) -> dict[str, object]:
    with launcher_environment():
        trainer = _resumable(name, directory)
        trainer.create_optimizer_and_scheduler(LAST_STEP)
        # What train() calls; it would make a step more.
        trainer._load_optimizer_and_scheduler(str(directory / f"checkpoint-{LAST_STEP}"))
        return {key: value for key, value in _everything(trainer).items() if key != "log"}


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_a_resumed_run_equals_an_unbroken_one(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Bit for bit: weights, states, schedule, losses, norms and evaluations; with TRL, adapters.

    Another number of ranks begins with the same bits, and the library reads the weights.
    """
    expected = ranks(2).run(_resume, name, tmp_path)[0]
    for found in ranks(3).run(_end, name, tmp_path):
        _assert_equal(found, expected)
    last = tmp_path / f"checkpoint-{LAST_STEP}"
    if name == "trl":
        loaded = PeftModel.from_pretrained(build("qwen3"), last)
    else:
        loaded = MODELS["qwen3"][0].from_pretrained(last)
    state = loaded.state_dict()
    assert state and all(torch.equal(expected[key], tensor) for key, tensor in state.items())


def _best(directory: Path, is_model_alone: bool) -> dict[str, torch.Tensor]:
    with launcher_environment():
        options = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        # The loss falls, so the first evaluation's is the greatest.
        options |= {"greater_is_better": True, "save_only_model": is_model_alone}
        trainer = _resumable("transformers", directory, **options)
        trainer.train()
        assert trainer.state.best_global_step == SAVED_STEP
    return full_state_dict(trainer.model)


@pytest.mark.parametrize("is_model_alone", [False, True])
def test_the_best_model_is_loaded_at_the_end(
    ranks: Ranks, tmp_path: Path, is_model_alone: bool
) -> None:
    """From its checkpoint's folder, which may have weights alone."""
    best = ranks(2).run(_best, tmp_path, is_model_alone)[0]
    saved = [
        MODELS["qwen3"][0].from_pretrained(tmp_path / f"checkpoint-{step}").state_dict()
        for step in (SAVED_STEP, LAST_STEP)
    ]
    assert all(torch.equal(best[key], tensor) for key, tensor in saved[0].items())
    assert any(not torch.equal(best[key], tensor) for key, tensor in saved[1].items())
    assert (tmp_path / f"checkpoint-{SAVED_STEP}" / FOLDER).exists() != is_model_alone


def _best_adapters(directory: Path, is_model_alone: bool) -> tuple[int, dict[str, torch.Tensor]]:
    with launcher_environment():
        options = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        options |= {"greater_is_better": True, "save_only_model": is_model_alone}
        trainer = _resumable("trl", directory, **options)
        trainer.train()
    return trainer.state.best_global_step, full_state_dict(trainer.model)


@pytest.mark.parametrize("is_model_alone", [False, True])
def test_the_best_adapters_are_loaded_at_the_end(
    ranks: Ranks, tmp_path: Path, is_model_alone: bool
) -> None:
    """PEFT saves them without the frozen weights."""
    best, found = ranks(2).run(_best_adapters, tmp_path, is_model_alone)[0]
    saved = [
        PeftModel.from_pretrained(build("qwen3"), tmp_path / f"checkpoint-{step}").state_dict()
        for step in (best, SAVED_STEP + LAST_STEP - best)
    ]
    assert all(torch.equal(found[key], tensor) for key, tensor in saved[0].items())
    assert any(not torch.equal(found[key], tensor) for key, tensor in saved[1].items())


def _optimizer_given(directory: Path) -> None:
    reference, rows = build("qwen3"), global_batch(0)["input_ids"]
    model = copy.deepcopy(reference)
    with launcher_environment():
        given = TrainingArguments(
            directory, **OPTIONS | {"max_steps": 1, "gradient_accumulation_steps": 1}
        )
        data = [{"input_ids": row, "labels": row} for row in rows.tolist()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        MixedTrainer(model, given, train_dataset=data, optimizers=(optimizer, constant)).train()
    reference(input_ids=rows, labels=rows).loss.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_was_given_steps_the_sharded_model(ranks: Ranks, tmp_path: Path) -> None:
    """It is built before the trainer, hence before the model is sharded."""
    ranks(2).run(_optimizer_given, tmp_path)


class Regression(nn.Module):
    """A model of the user's, which names no classes of units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": (self.layer(rows) - labels).square().mean()}


def _one_unit(directory: Path) -> None:
    model, reference = Regression(), Regression()
    rows, labels = torch.randn(4, 4), torch.randn(4, 3)
    data = [{"rows": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    warned: list[str] = []
    with launcher_environment():
        options = {"max_steps": 1, "gradient_accumulation_steps": 1, "weight_decay": 0.0}
        given = TrainingArguments(directory, **OPTIONS | options)
        logger = logging.getLogger("megafsdp.integrations")
        logger.addFilter(lambda record: warned.append(record.getMessage()) or True)
        MixedTrainer(model, given, train_dataset=data).train()
    assert len(units_below([model])) == 1
    (text,) = warned
    assert "Regression" in text and "_no_split_modules" in text and "shard_model()" in text
    reference(rows, labels)["loss"].backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0).step()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)


def test_a_model_that_names_no_units_is_one(ranks: Ranks, tmp_path: Path) -> None:
    """With a warning, which says how to choose them."""
    ranks(2).run(_one_unit, tmp_path)


class CompilingTrainer(MixedTrainer):
    """Compiles layers, as the refusal of ``torch_compile`` says."""

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Compile each layer, and shard."""
        for layer in model.model.layers:
            layer.compile(backend="eager")
        return super().shard_model(model)


def _refused_arguments(directory: Path) -> None:
    rows = global_batch(0)["input_ids"].tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    with launcher_environment():
        for options, hint in (
            ({"torch_compile": True}, r"torch_compile to be False.*layer\.compile"),
            ({"bf16_full_eval": True}, r"bf16_full_eval.*bf16=True"),
            ({"fp16_full_eval": True}, r"fp16_full_eval.*bf16=True"),
        ):
            with pytest.raises(NotImplementedError, match=hint):
                MixedTrainer(build("qwen3"), TrainingArguments(directory, use_cpu=True, **options))
            os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)
        with pytest.raises(NotImplementedError, match=r"sync_ref_model.*full_state_dict"):
            MixedPreferringTrainer(
                build("qwen3"),
                ref_model=build("qwen3"),
                args=DPOConfig(directory, **OPTIONS | {"bf16": False, "sync_ref_model": True}),
                train_dataset=Dataset.from_dict(_preferences()),
                processing_class=make_tokenizer(),
            )
        given = TrainingArguments(directory, **OPTIONS | {"max_steps": 1})
        torch._dynamo.utils.counters.clear()
        CompilingTrainer(build("qwen3"), given, train_dataset=data * 2).train()
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0


def test_arguments_that_are_not_translated_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """With what to do instead."""
    ranks(2).run(_refused_arguments, tmp_path)


def _choices(directory: Path) -> None:
    reference = build("qwen3")
    with launcher_environment():
        given = TrainingArguments(directory, **OPTIONS | {"bf16": True, "max_steps": 1})
        rows = global_batch(0)["input_ids"].tolist()
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = MixedTrainer(
            args=given,
            model_init=lambda: build("qwen3"),
            train_dataset=data * 2,
            eval_dataset=data,
        )
        # Evaluated before training, by compute weights in bf16.
        loss = trainer.evaluate()["eval_loss"]
        tokens = torch.tensor(rows)
        with torch.no_grad():
            expected = reference.bfloat16()(input_ids=tokens, labels=tokens).loss.item()
        assert loss == pytest.approx(expected, rel=1e-2)
        before = trainer.model
        trainer.train()
        # model_init makes a model for each training.
        assert trainer.model is not before
        for unit in units_below([trainer.model]).values():
            assert unit.policy.param_dtype == torch.bfloat16
        given.fp16 = True
        with pytest.raises(NotImplementedError, match=r"fp16.*bf16=True"):
            trainer._sharded(build("qwen3"))
        given.fp16, trainer.is_fsdp_enabled = False, True
        with pytest.raises(NotImplementedError, match=r"fsdp to be False, got True.*torchrun"):
            trainer._sharded(build("qwen3"))
        trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = False, True
        with pytest.raises(NotImplementedError, match=r"deepspeed to be False, got True"):
            trainer._sharded(build("qwen3"))


def test_arguments_of_the_trainer_choose_dtypes(ranks: Ranks, tmp_path: Path) -> None:
    """bf16 over fp32 main weights, also of models from model_init; fp16 and others are refused."""
    ranks(2).run(_choices, tmp_path)


def _writes(directory: Path) -> None:
    reference = build("t5").eval()
    rows = [{"input_ids": list(range(3, 9 + 2 * n)), "labels": [5, 6, 7, 2]} for n in (0, 1)]
    with launcher_environment():
        given = Seq2SeqTrainingArguments(
            directory,
            **OPTIONS | {"predict_with_generate": True, "generation_max_length": 8},
            per_device_eval_batch_size=1,
        )
        trainer = MixedWritingTrainer(copy.deepcopy(reference), given)
        written = trainer.predict(rows).predictions
    for row, text in zip(rows, written, strict=True):
        wanted = reference.generate(torch.tensor([row["input_ids"]]), max_length=8)[0]
        assert text[: len(wanted)].tolist() == wanted.tolist()


def test_a_trainer_evaluates_by_writing(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank its own rows, by an encoder outside of the model's forward."""
    ranks(2).run(_writes, tmp_path)


ADAPTERS = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")


def _prompts(directory: Path) -> dict[str, torch.Tensor]:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(build("qwen3"), config)
    with launcher_environment():
        trainer = make_trainer("transformers", model, directory, is_mixed=True)
        before = full_state_dict(model)
        trainer.train()
        trainer.save_model()
        state = full_state_dict(model)
        with summon_full_params(model):
            if dist.get_rank() == 0:
                model.save_pretrained(directory / "alone", state_dict=state)
    assert {key for key, value in before.items() if not torch.equal(value, state[key])} == {
        "prompt_encoder.default.embedding.weight"
    }
    return state


def test_prompts_are_saved_as_other_adapters(ranks: Ranks, tmp_path: Path) -> None:
    """PEFT computes them on the rank that writes; by the trainer, and by PEFT's own method."""
    state = ranks(2).run(_prompts, tmp_path)[0]
    for folder in (tmp_path, tmp_path / "alone"):
        loaded = PeftModel.from_pretrained(build("qwen3"), folder).state_dict()
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


def _words(count: int, seed: int) -> str:
    numbers = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"word{number}" for number in numbers.tolist())


def _rewards(directory: Path) -> None:
    with launcher_environment():
        model = build("qwen3")
        trainer = MixedRewardingTrainer(
            model,
            reward_funcs=lambda completions, **unused: [float(len(c)) for c in completions],
            args=GRPOConfig(
                directory,
                **OPTIONS | {"bf16": False, "num_generations": 2, "max_completion_length": 6},
            ),
            train_dataset=Dataset.from_dict({"prompt": [_words(4 + n % 3, n) for n in range(16)]}),
            processing_class=make_tokenizer(),
            peft_config=ADAPTERS,
        )
        before = full_state_dict(trainer.model)
        trainer.train()
        after = full_state_dict(trainer.model)
    for name, tensor in before.items():
        # Only adapters are trained; the texts that they have learnt from were written by them.
        assert "lora_B" in name or "lora_A" in name or torch.equal(after[name], tensor)
    assert any("lora_B" in name and after[name].any() for name in after)


def test_a_trainer_rewards_what_adapters_write(ranks: Ranks, tmp_path: Path) -> None:
    """TRL's GRPO generates before each step, by a model that PEFT has wrapped."""
    ranks(2).run(_rewards, tmp_path)


def _preferences() -> dict[str, list[str]]:
    return {
        "prompt": [_words(4, n) for n in range(16)],
        "chosen": [" " + _words(3 + n % 3, 100 + n) for n in range(16)],
        "rejected": [" " + _words(4, 200 + n) for n in range(16)],
    }


def _prefers(
    directory: Path, is_mixed: bool, recomputes: bool
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    with launcher_environment():
        options = OPTIONS | {"bf16": False, "gradient_checkpointing": recomputes}
        trainer = (MixedPreferringTrainer if is_mixed else DPOTrainer)(
            build("qwen3"),
            args=DPOConfig(directory / str(is_mixed), **options),
            train_dataset=Dataset.from_dict(_preferences()),
            processing_class=make_tokenizer(),
            peft_config=ADAPTERS,
        )
        trainer.train()
        state = full_state_dict(trainer.model)
    adapters = {name: tensor for name, tensor in state.items() if "lora_" in name}
    return trainer.state.log_history[:NUM_STEPS], adapters


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_trainer_prefers_as_under_ddp(ranks: Ranks, tmp_path: Path, recomputes: bool) -> None:
    """TRL's DPO with adapters, whose reference is the same model with adapters off."""
    (log, adapters), (oracle_log, oracle) = (
        ranks(2).run(_prefers, tmp_path, is_mixed, recomputes)[0] for is_mixed in (True, False)
    )
    assert adapters.keys() == oracle.keys()
    for name, tensor in oracle.items():
        torch.testing.assert_close(adapters[name], tensor, rtol=1e-3, atol=1e-5)
    for row, wanted in zip(log, oracle_log, strict=True):
        for name in ("loss", "grad_norm", "rewards/margins"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5)
