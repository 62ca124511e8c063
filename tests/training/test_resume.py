"""What a checkpoint brings back, and what is said where the configuration differs."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafsdp import full_state_dict, full_tensor, fully_shard_model
from megafsdp.checkpoint import latest_step, save
from megafsdp.checkpoint.format import save_root as directory
from megafsdp.data import Batch, IndexedDatasetWriter, Loader
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.models import build_model, unit_classes
from megafsdp.training import Config, RunSummary, train
from megafsdp.training.resume import Restorable, RunState, find_stored, restore
from megafsdp.training.run_folder import checkpoints_of
from megafsdp.training.step.lr import LearningRate, Schedule
from megafsdp.training.step.optimizers import build_optimizer
from megafsdp.training.step.train_step import StepResult, TrainStep
from tests.ranks import Ranks, RanksError
from tests.training.runs import numbers_read_late, rows, stored_tensors, tiny, write_corpus

Finished = Callable[..., Config]


@pytest.fixture(scope="module")
def finished_runs() -> dict[str, Path]:
    """Return the folders of runs that tests of this file share, by their configuration."""
    return {}


@pytest.fixture
def finished(
    finished_runs: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    ranks: Ranks,
) -> Finished:
    """Return a function that puts a finished run into ``tmp_path``; each is trained once."""

    def put(num_ranks: int = 1, **sections: dict[str, Any]) -> Config:
        key = json.dumps([num_ranks, sections])
        if key not in finished_runs:
            folder = tmp_path_factory.mktemp("finished")
            write_corpus(folder)
            config = tiny(folder, **sections)
            ranks(num_ranks).run(train, config) if num_ranks > 1 else train(config)
            finished_runs[key] = folder
        shutil.copytree(finished_runs[key], tmp_path, dirs_exist_ok=True)
        return tiny(tmp_path, **sections)

    return put


def _restore(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> RunState:
    """Load the run's latest checkpoint and return where it stands."""
    rate = LearningRate(optimizer, Schedule.of(config), follows_checkpoint=False)
    stored = find_stored(config)
    assert stored is not None
    restore(config, Restorable(model, optimizer, rate), stored, order={})
    return stored.state


def _restored(config: Config) -> tuple[RunState, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what restore() fills: the state, the weights, and the first moments by name."""
    model_config = config.model.resolve()
    model = fully_shard_model(build_model(model_config, seed=99), unit_classes(model_config))
    optimizer = build_optimizer(model, config.optimizer)
    state = _restore(config, model, optimizer)
    moments = {
        name: full_tensor(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()
    }
    return state, full_state_dict(model), moments


def test_any_number_of_ranks_loads_exactly_what_two_saved(ranks: Ranks, finished: Finished) -> None:
    """Weights and moments are equal bit for bit, and the position is the saved one."""
    config = finished(num_ranks=2, train={"steps": 2})
    stored = stored_tensors(config.checkpoint_directory, 2)
    restored = [each for num_ranks in (1, 2, 3) for each in ranks(num_ranks).run(_restored, config)]
    assert len(restored) == 6
    for state, weights, moments in restored:
        assert (state.step, state.consumed_samples) == (2, 24)
        for name, weight in weights.items():
            if f"model.{name}" in stored:
                assert torch.equal(weight, stored[f"model.{name}"])
        assert moments
        for name, moment in moments.items():
            assert torch.equal(moment, stored[f"optimizer.state.{name}.exp_avg"])
            assert moment.any()


def test_checkpoint_of_another_model_is_refused(
    ranks: Ranks, tmp_path: Path, finished: Finished
) -> None:
    """On every rank, naming the tensors that differ; the checkpoint stays."""
    finished(train={"steps": 1})
    other = tiny(tmp_path, model={"ffn_hidden_size": 64})
    with pytest.raises(RanksError, match=r"mlp\.linear_fc1\.weight") as failure:
        ranks(2).run(train, other)
    assert set(failure.value.failures) == {0, 1}
    for text in failure.value.failures.values():
        assert "CheckpointError" in text
        assert "(model.ffn_hidden_size: 48 -> 64), or begin anew in another run.directory" in text
        assert "strict=" not in text
    assert stored_tensors(other.checkpoint_directory, 1)


def _failing_at(num_files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a save find the disk full at the file of this number."""
    files_opened = []

    def fail(point: str) -> None:
        if point == "file opened":
            files_opened.append(point)
            if len(files_opened) == num_files:
                raise OSError("no space left")

    monkeypatch.setattr(directory, "reached", fail)


def test_a_failed_background_save_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised by the next save at the latest, which saves the state of that moment."""
    write_corpus(tmp_path)
    section = {"interval_steps": 2, "in_background": True, "keep_last": None}
    config = tiny(tmp_path, checkpoint=section, train={"steps": 7})
    _failing_at(2, monkeypatch)
    with pytest.raises(CheckpointError, match=r"step 4 failed.*no space left"):
        train(config)
    assert directory.published_steps(config.checkpoint_directory) == [2, 6]


def test_a_stop_after_a_failed_background_save_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step at which SIGTERM came is saved, and the failure is raised all the same."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, checkpoint={"interval_steps": 3, "in_background": True})
    _failing_at(1, monkeypatch)

    def stop(step: int, result: StepResult) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(CheckpointError, match=r"step 3 failed.*no space left"):
        train(config, on_step=stop)
    # The signal came after step 4 had agreed, so step 5 is the last.
    assert latest_step(config.checkpoint_directory) == 5


def test_the_last_background_save_is_made_again_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has no step left to save at still ends with its last state on disk."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, checkpoint={"in_background": True}, train={"steps": 2})
    _failing_at(1, monkeypatch)
    with pytest.raises(CheckpointError, match=r"step 2 failed.*no space left"):
        train(config)
    assert latest_step(config.checkpoint_directory) == 2


def _train_to_a_nan(
    config: Config, at_step: int, failing_file: int | None = None, is_late: bool = False
) -> str:
    """Train with a loss that is NaN from one step on; return the error."""
    accumulate, num_calls = TrainStep._accumulate, [0]

    def spoilt(
        step: TrainStep, batches: Sequence[Batch], before_backward: Callable[[], None]
    ) -> torch.Tensor:
        num_calls[0] += 1
        if num_calls[0] < at_step:
            return accumulate(step, batches, before_backward)
        with step._model.register_forward_hook(lambda model, args, loss: loss * math.nan):
            return accumulate(step, batches, before_backward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "_accumulate", spoilt)
        if failing_file is not None:
            _failing_at(failing_file, patch)
        with (
            pytest.raises(RuntimeError, match="a finite loss") as failure,
            numbers_read_late(is_late),
        ):
            train(config)
    return str(failure.value)


@pytest.mark.parametrize(
    ("checkpoints", "optimizer", "is_late"),
    [
        ({}, {}, False),
        ({}, {}, True),
        ({"interval_steps": 3}, {}, False),
        ({"interval_steps": 3, "in_background": True}, {"kind": "sgd"}, False),
        ({"interval_steps": 2, "in_background": True}, {}, True),
        ({"interval_steps": 2, "in_background": True}, {"offload_fraction": 0.5}, False),
    ],
)
def test_a_loss_that_is_not_finite_loses_one_step(
    ranks: Ranks,
    tmp_path: Path,
    finished: Finished,
    checkpoints: dict[str, Any],
    optimizer: dict[str, Any],
    is_late: bool,
) -> None:
    """The step before is on disk as a straight run has it, and the run that goes on ends alike."""
    every = {"interval_steps": 3, "keep_last": None}
    steps = {"steps": 5}
    straight = finished(num_ranks=2, optimizer=optimizer, checkpoint=every, train=steps)
    checkpoints = {"keep_last": None, **checkpoints}
    apart = {"directory": str(tmp_path / "apart")}
    config = tiny(tmp_path, run=apart, optimizer=optimizer, checkpoint=checkpoints, train=steps)
    # Late, step 4 is read when the forward of step 5 was queued, which is given up.
    for error in ranks(2).run(_train_to_a_nan, config, 4, None, is_late):
        where = f"'{config.checkpoint_directory}'"
        assert error.endswith(f". Step 3, the one before, is saved in {where}.")
    assert latest_step(config.checkpoint_directory) == 3
    ranks(2).run(train, config)
    for step in (3, 5):
        wanted = stored_tensors(straight.checkpoint_directory, step)
        found = stored_tensors(config.checkpoint_directory, step)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_first_loss_that_is_not_finite_saves_nothing(tmp_path: Path) -> None:
    """There is nothing that a run could go on from."""
    write_corpus(tmp_path)
    config = tiny(tmp_path)
    assert _train_to_a_nan(config, 1).endswith(". No step came before it.")
    assert latest_step(config.checkpoint_directory) is None


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failing_save_does_not_hide_a_loss_that_is_not_finite(
    ranks: Ranks, tmp_path: Path, in_background: bool
) -> None:
    """Both are reported; a background save that failed is made again at the same moment."""
    write_corpus(tmp_path)
    section = {"interval_steps": 2, "in_background": True} if in_background else {}
    config = tiny(tmp_path, checkpoint=section)
    # The first rank's first file.
    for error in ranks(2).run(_train_to_a_nan, config, 4, 1):
        assert re.search(r"A save failed as well: .*no space left", error, re.DOTALL)
    assert latest_step(config.checkpoint_directory) == (3 if in_background else None)


@pytest.mark.parametrize("place", ["a file", "a file/below"])
def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    """On every rank, so that no training is lost for want of a place to save it."""
    write_corpus(tmp_path)
    (tmp_path / "a file").write_text("")
    config = tiny(tmp_path, checkpoint={"directory": str(tmp_path / place)})
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, config)
    assert set(failure.value.failures) == {0, 1}
    for text in failure.value.failures.values():
        assert "CheckpointError: Expected a folder that checkpoints can be written to" in text
    assert rows(tmp_path) == []


def test_a_finished_run_needs_no_place_for_checkpoints(finished: Finished) -> None:
    """It is evaluated again beside checkpoints that it could not replace."""
    config = finished(train={"steps": 1})
    folder = config.checkpoint_directory
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert train(config).is_finished
    assert {path: path.stat().st_mtime_ns for path in before} == before


def _changed(
    finished: Finished, folder: Path, caplog: pytest.LogCaptureFixture, **sections: dict[str, Any]
) -> str:
    """Train one step more than a finished run with other values; return what was logged."""
    finished(train={"steps": 1}, schedule={"warmup_samples": 0})
    with caplog.at_level(logging.INFO, logger="megafsdp.training"):
        sections.setdefault("schedule", {}).setdefault("warmup_samples", 0)
        train(tiny(folder, **sections))
    return caplog.text


def test_differences_from_the_checkpoint_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, finished: Finished
) -> None:
    """Each changed value with both of its values; the order of samples is not questioned."""
    text = _changed(
        finished, tmp_path, caplog, train={"steps": 2}, optimizer={"weight_decay": 0.25}
    )
    assert "optimizer.weight_decay: 0.1 -> 0.25" in text
    assert "train.steps: 1 -> 2" in text
    assert "order of samples" not in text


def _restored_weight_decay(config: Config) -> float:
    model_config = config.model.resolve()
    model = fully_shard_model(build_model(model_config, seed=99), unit_classes(model_config))
    optimizer = build_optimizer(model, config.optimizer)
    _restore(config, model, optimizer)
    return optimizer.param_groups[0]["weight_decay"]


def test_configured_hyperparameters_win(ranks: Ranks, tmp_path: Path, finished: Finished) -> None:
    """The optimizer goes on with the configuration's weight decay, not the checkpoint's."""
    finished(train={"steps": 1})
    config = tiny(tmp_path, optimizer={"weight_decay": 0.25})
    assert ranks(1).run(_restored_weight_decay, config) == [0.25]


def test_skips_are_counted_across_a_resume(tmp_path: Path) -> None:
    """A run that skips every step ends, however often it is started again."""
    write_corpus(tmp_path)
    broken: dict[str, Any] = {
        # The logits overflow, so no loss is ever finite.
        "model": {"init_std": 1e30},
        "data": {"validation": []},
    }
    policy = {"nan_policy": "skip", "max_skips": 3}
    train(tiny(tmp_path, train=policy | {"steps": 3}, **broken))
    with pytest.raises(RuntimeError, match="4 steps in a row"):
        train(tiny(tmp_path, train=policy | {"steps": 4}, **broken))


@pytest.mark.parametrize("is_late", [False, True])
def test_steps_of_a_row_of_skips_push_no_checkpoint_out(tmp_path: Path, is_late: bool) -> None:
    """The run can go back to what came before them; only where it ends they are saved."""
    write_corpus(tmp_path)
    config = tiny(
        tmp_path,
        # Weights after the first step are so large that no later loss or gradient is finite.
        optimizer={"kind": "sgd", "lr": 1e30, "clip_norm": None},
        schedule={"warmup_samples": 0},
        train={"nan_policy": "skip", "max_skips": 3},
        checkpoint={"interval_steps": 1, "keep_last": 2},
        data={"validation": []},
    )
    with numbers_read_late(is_late), pytest.raises(RuntimeError, match="Step 4, the one before"):
        train(config)
    assert directory.published_steps(tmp_path / "run/checkpoints") == [1, 4]


def _loss_scales(config: Config) -> list[float | None]:
    scales: list[float | None] = []
    train(config, on_step=lambda step, result: scales.append(result.loss_scale))
    return scales


def test_runs_change_to_fp16_and_back(tmp_path: Path, finished: Finished) -> None:
    """Without a stored scale the first one is taken; a stored one is left where it is not asked."""
    finished(train={"steps": 1})
    fp16 = {"precision": {"param_dtype": "fp16"}, "loss_scale": {"initial": 256.0, "window": 1}}
    assert _loss_scales(tiny(tmp_path, train={"steps": 3}, **fp16)) == [256.0, 512.0]
    assert _loss_scales(tiny(tmp_path, train={"steps": 4}, **fp16)) == [1024.0]
    constant = fp16 | {"loss_scale": {"constant": 64.0}}
    assert _loss_scales(tiny(tmp_path, train={"steps": 5}, **constant)) == [64.0]
    assert _loss_scales(tiny(tmp_path)) == [None]


def _losses(config: Config) -> list[float]:
    losses: list[float] = []
    train(config, on_step=lambda step, result: losses.append(result.loss))
    return losses


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_implementations_go_on_from_each_other(tmp_path: Path, kind: str) -> None:
    """A step by each of torch's and our forms, back and forth, are three steps of one.

    The tolerance is that of fp32 rounding over three steps of Adam with eps 1e-5.
    """
    write_corpus(tmp_path)
    # A schedule that does not depend on the length of the run.
    schedule = {"kind": "constant", "warmup_samples": 24}
    run = {"directory": str(tmp_path / "plain")}
    whole = {"steps": 3}
    straight = tiny(tmp_path, run=run, optimizer={"kind": kind}, schedule=schedule, train=whole)
    wanted, mixed = _losses(straight), []
    for steps, form in ((1, "fused"), (2, "megafsdp"), (3, "loop")):
        section = {"kind": kind, "implementation": form}
        config = tiny(tmp_path, optimizer=section, schedule=schedule, train={"steps": steps})
        mixed += _losses(config)
    assert mixed == pytest.approx(wanted, rel=1e-5)


def test_adam_goes_on_from_adamw_with_its_own_decay(tmp_path: Path) -> None:
    """The kind of decay is the configuration's, whichever a checkpoint had."""
    write_corpus(tmp_path)
    weights = []
    for name, form in (("a", "megafsdp"), ("b", "loop")):
        run = {"directory": str(tmp_path / name)}
        section = {"weight_decay": 0.5, "implementation": form}
        train(tiny(tmp_path, run=run, optimizer=section, train={"steps": 1}))
        config = tiny(tmp_path, run=run, optimizer=section | {"kind": "adam"}, train={"steps": 2})
        train(config)
        weights.append(stored_tensors(config.checkpoint_directory, 2))
    for key, tensor in weights[0].items():
        if key.startswith("model."):
            torch.testing.assert_close(tensor, weights[1][key], rtol=1e-4, atol=1e-5)


def test_multipliers_of_the_rate_are_the_configurations(tmp_path: Path) -> None:
    """A run that goes on with other factors for the same groups steps by the new ones."""
    write_corpus(tmp_path)
    key = "model.embedding.word_embeddings.weight"
    train(tiny(tmp_path, train={"steps": 1}, optimizer={"lr_multipliers": {"*embedding*": 0.5}}))
    first = tiny(tmp_path).checkpoint_directory
    frozen = {"lr_multipliers": {"*embedding*": 0.0}}
    train(tiny(tmp_path, train={"steps": 2}, optimizer=frozen))
    before, after = stored_tensors(first, 1), stored_tensors(first, 2)
    assert torch.equal(before[key], after[key])
    assert any(not torch.equal(before[k], after[k]) for k in before if k.startswith("model."))


def _regrouped(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Compare every restored state with the checkpoint's.

    Returns:
        The options of the restored groups, those of a fresh optimizer, and the number of states.
    """
    model_config = config.model.resolve()
    model = fully_shard_model(build_model(model_config, seed=99), unit_classes(model_config))
    optimizer, fresh = (build_optimizer(model, config.optimizer, config.muon) for _ in range(2))
    _restore(config, model, optimizer)
    stored = stored_tensors(config.checkpoint_directory, 2)
    num_states = 0
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            whole = full_tensor(value) if value.ndim else value
            assert torch.equal(whole, stored[f"optimizer.state.{name}.{key}"])
            assert whole.any()
            num_states += 1
    options = [
        [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in o.param_groups]
        for o in (optimizer, fresh)
    ]
    return options[0], options[1], num_states


_HALF = {"lr_multipliers": {"*embedding*": 0.5}}
REGROUPED = {
    "no decay": ({}, {"weight_decay": 0.0}),
    "decay": ({"weight_decay": 0.0}, {}),
    "multiplier": ({}, _HALF),
    "another pattern": (_HALF, {"lr_multipliers": {"*linear_fc1*": 0.5}}),
    "loop without decay": ({}, {"implementation": "loop", "weight_decay": 0.0}),
    "sgd without decay": ({"kind": "sgd"}, {"kind": "sgd", "weight_decay": 0.0}),
    "offloaded without decay": (
        {"offload_fraction": 0.5},
        {"offload_fraction": 0.5, "weight_decay": 0.0},
    ),
    "muon without decay": ({"kind": "muon"}, {"kind": "muon", "weight_decay": 0.0}),
}


@pytest.mark.parametrize("change", REGROUPED)
def test_parameters_are_grouped_as_configured(
    ranks: Ranks, tmp_path: Path, finished: Finished, change: str
) -> None:
    """Each parameter keeps its states, bit for bit, in whichever group it is."""
    before, after = REGROUPED[change]
    num_ranks = 2 if change == "no decay" else 1
    unevaluated: dict[str, Any] = {"data": {"validation": []}}
    finished(train={"steps": 2}, optimizer=before, **unevaluated)
    config = tiny(tmp_path, train={"steps": 3}, optimizer=after, **unevaluated)
    for restored, configured, num_states in ranks(num_ranks).run(_regrouped, config):
        assert restored == configured
        assert num_states > 10
    assert ranks(num_ranks).run(train, config)[0].step == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"optimizer": {"kind": "sgd"}}),
        ({"kind": "sgd"}, {"optimizer": {"kind": "adamw"}}),
        ({}, {"optimizer": {"kind": "muon", "weight_decay": 0.0}}),
        ({"kind": "muon"}, {"optimizer": {"kind": "adamw", "weight_decay": 0.0}}),
        ({"kind": "muon"}, {"optimizer": {"kind": "muon"}, "muon": {"adamw": ["*"]}}),
    ],
)
def test_states_of_another_optimizer_are_refused(
    tmp_path: Path, finished: Finished, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Whatever else changes: they would be lost without a message."""
    finished(train={"steps": 2}, optimizer=before)
    with pytest.raises(CheckpointError, match=r"group|not asked for: optimizer\.state\.") as caught:
        train(tiny(tmp_path, train={"steps": 3}, **after))
    assert re.search(r"Set back .*\((muon|optimizer)\.\w+: .* -> ", str(caught.value))
    assert "strict=" not in str(caught.value)


def test_a_checkpoint_without_its_optimizer_is_refused(tmp_path: Path) -> None:
    """Other groups are no reason to begin with empty moments."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, optimizer={"weight_decay": 0.0})
    model = build_model(config.model.resolve(), seed=1)
    save(
        config.checkpoint_directory,
        step=1,
        model=model,
        lr_scheduler=LearningRate(
            torch.optim.SGD(model.parameters()), Schedule.of(config), follows_checkpoint=False
        ),
        extra={"run": asdict(RunState(step=1)), "config": tiny(tmp_path).to_dict()},
    )
    with pytest.raises(
        CheckpointError, match=r"missing in the checkpoint: optimizer\.param_groups"
    ):
        train(config)


def _seen_samples(config: Config) -> tuple[RunSummary, list[int]]:
    """Train; return how it ended and the first sample of each step."""
    starts: list[int] = []
    plain = Loader.step_batch

    def watched(loader: Loader, start: int) -> Any:
        starts.append(start)
        return plain(loader, start)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Loader, "step_batch", watched)
        return train(config), starts


@pytest.mark.parametrize(
    ("before", "after", "starts"),
    [(12, 6, [48, 54, 60, 66]), (6, 12, [24, 36, 48, 60])],
)
def test_steps_count_whatever_their_batch_was(
    tmp_path: Path, before: int, after: int, starts: list[int]
) -> None:
    """The run ends at the step asked for; data and learning rate reach to its last sample."""
    # So few that the order of samples must be made for the right number of epochs.
    write_corpus(tmp_path, num_documents=3)
    data = {"validation": []}
    first = {"steps": 4, "global_batch_size": before}
    train(tiny(tmp_path, train=first, data=data, schedule={"warmup_samples": 0}))
    second = {"steps": 8, "global_batch_size": after}
    config = tiny(tmp_path, train=second, data=data, schedule={"warmup_samples": 0})
    summary, seen = _seen_samples(config)
    assert (summary.step, summary.consumed_samples) == (8, starts[-1] + after)
    assert seen == starts
    lr = [row["lr"] for row in rows(tmp_path)][4:]
    assert lr[0] == 1e-2
    assert lr[-1] == pytest.approx(1e-3)
    assert lr[-2] > lr[-1]


@pytest.mark.parametrize(
    ("before", "after", "train_section"),
    [
        (12, 6, {"steps": 8}),
        (6, 12, {"steps": 8}),
        (6, 12, {"steps": None, "samples": 78}),
    ],
)
def test_schedule_must_fit_the_samples_of_all_batches(
    tmp_path: Path, before: int, after: int, train_section: dict[str, Any]
) -> None:
    """Those before the resume count as they were, those after it as they will be."""
    write_corpus(tmp_path)
    data = {"validation": []}
    first = {"steps": 4 if train_section["steps"] else 1, "global_batch_size": before}
    train(tiny(tmp_path, train=first, data=data, schedule={"warmup_samples": 0}))
    section = train_section | {"global_batch_size": after}
    num_samples = 78 if train_section["steps"] is None else 72
    short, long = (
        tiny(
            tmp_path,
            train=section,
            data=data,
            schedule={"warmup_samples": 24, "decay_samples": num_samples - 24 + more},
        )
        for more in (0, 1)
    )
    with pytest.raises(ConfigError, match=f"within the run's {num_samples} samples"):
        train(long)
    assert train(short).consumed_samples == num_samples
    # No step is left, so no rate is asked for.
    assert train(long).is_finished


def test_followed_schedule_of_a_checkpoint_is_not_measured(
    tmp_path: Path, finished: Finished
) -> None:
    """What the configuration has in its place decides nothing."""
    finished(train={"steps": 1}, schedule={"warmup_samples": 0})
    schedule = {"decay_samples": 100, "from_checkpoint": True}
    assert train(tiny(tmp_path, train={"steps": 2}, schedule=schedule)).step == 2


def test_samples_count_whatever_the_batch_was(tmp_path: Path) -> None:
    """The last whole batch that fits is trained, counted from where the run went on."""
    write_corpus(tmp_path)
    data = {"validation": []}
    train(tiny(tmp_path, train={"steps": 1, "global_batch_size": 6}, data=data))
    section = {"steps": None, "samples": 54, "global_batch_size": 12}
    summary = train(tiny(tmp_path, train=section, data=data))
    assert (summary.step, summary.consumed_samples) == (5, 54)


def test_another_order_of_samples_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, finished: Finished
) -> None:
    """Some samples would be seen again, which no other message would tell."""
    text = _changed(finished, tmp_path, caplog, train={"steps": 2}, data={"seed": 7})
    assert "order of samples is not the checkpoint's" in text
    assert "seed: 1234 -> 7" in text


def test_weights_of_another_sum_are_the_same_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only shares decide; other shares are a warning."""
    write_corpus(tmp_path)
    prefixes = [str(tmp_path / "train"), str(tmp_path / "validation")]
    for weights, is_warned in (([0.5, 0.5], False), ([1.0, 1.0], False), ([1.0, 3.0], True)):
        data = {"train": prefixes, "weights": weights, "validation": []}
        train(tiny(tmp_path, train={"steps": 1}, data=data))
        assert ("order of samples is not the checkpoint's" in caplog.text) == is_warned


@pytest.mark.parametrize("is_known", [True, False])
def test_data_that_was_prepared_again_is_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
) -> None:
    """As many tokens in other documents; a checkpoint that knows no documents is no cause."""

    def write(lengths: list[int]) -> None:
        with IndexedDatasetWriter(tmp_path / "train", "<u2") as writer:
            for length in lengths:
                writer.add_document([7] * length)

    def save_older(*arguments: Any, extra: dict[str, Any], **keywords: Any) -> object:
        del extra["order"]["lengths_sha256"]
        return save(*arguments, extra=extra, **keywords)

    write([400, 300, 500])
    with monkeypatch.context() as patch:
        if not is_known:
            patch.setattr("megafsdp.checkpoint.save", save_older)
        train(tiny(tmp_path, train={"steps": 1}, data={"validation": []}))
    for lengths, is_warned in (([400, 300, 500], False), ([300, 400, 500], is_known)):
        write(lengths)
        caplog.clear()
        train(tiny(tmp_path, train={"steps": 1}, data={"validation": []}))
        assert ("order of samples is not the checkpoint's" in caplog.text) == is_warned


def test_fresh_run_over_checkpoints_is_refused(tmp_path: Path, finished: Finished) -> None:
    """Nothing is overwritten by a run with checkpoint.resume false."""
    finished(train={"steps": 1})
    config = tiny(tmp_path, checkpoint={"resume": False})
    with pytest.raises(ConfigError, match=r"checkpoint\.resume.*step 1"):
        train(config)
    assert stored_tensors(config.checkpoint_directory, 1)


def test_half_written_checkpoint_is_refused(finished: Finished) -> None:
    """A checkpoint without one of its files is an error that names it, not a fresh start."""
    config = finished(train={"steps": 1})
    (data_file,) = config.checkpoint_directory.glob("iter_*/*.distcp")
    data_file.unlink()
    with pytest.raises(CheckpointError, match=f"{data_file.name}.*number into latest_checkpointed"):
        train(config)


def test_checkpoints_without_their_tracker_are_gone_on_from(
    tmp_path: Path, finished: Finished, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that were copied by themselves, say: a run from the start would replace them."""
    finished(train={"steps": 2}, checkpoint={"interval_steps": 1})
    config = tiny(tmp_path, train={"steps": 2}, checkpoint={"keep_last": None})
    (config.checkpoint_directory / "latest_checkpointed_iteration.txt").unlink()
    assert train(config).step == 2
    assert "steps [1, 2] and no 'latest_checkpointed_iteration.txt'" in caplog.text
    run = config.run_directory
    assert checkpoints_of(run) == config.checkpoint_directory
    assert train(replace(config, train=replace(config.train, steps=3))).step == 3
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3]
