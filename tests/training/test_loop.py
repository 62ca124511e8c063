"""Whole runs of a tiny model: their files, their ends, and what they do when started again."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import itertools
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from megafsdp.data import IndexedDataset, IndexedDatasetWriter
from megafsdp.errors import ConfigError, DataError
from megafsdp.training import Config, RunSummary, config_from_dict, train
from megafsdp.training.metrics.tracker import JsonlTracker
from megafsdp.training.step import evaluation
from megafsdp.training.step.train_step import StepResult
from tests.ranks import Ranks, RanksError
from tests.training.runs import rows, tiny, write_corpus


def _interrupt(at: int, step: int, result: StepResult) -> None:
    # One rank alone gets the signal; the others must learn of it.
    if step == at and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def _train_until(config: Config, at: int) -> RunSummary:
    return train(config, on_step=functools.partial(_interrupt, at))


def test_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of steps and evaluations, configuration, checkpoint, sample and the next command."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, evaluation={"interval_steps": 3, "sample_prompt": "ab"})
    summary = train(config)
    assert (summary.step, summary.consumed_samples, summary.is_finished) == (6, 72, True)
    assert summary.text is not None
    assert summary.text.startswith("ab")
    steps = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s"} <= steps[0].keys()
    assert [row["consumed_tokens"] for row in steps] == [72 // 6 * 16 * s for s in range(1, 7)]
    for name in ("time", "elapsed_s"):
        assert sorted({row[name] for row in rows(tmp_path)}) == [
            row[name] for row in rows(tmp_path)
        ]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[1]["lr"] == 1e-2
    evaluations = [row for row in rows(tmp_path) if "validation_loss" in row]
    assert [row["step"] for row in evaluations] == [3, 6]
    assert evaluations[-1]["bits_per_byte"] > 0
    written = yaml.safe_load((config.run_directory / "config.yaml").read_text())
    assert config_from_dict(written) == config
    assert (config.checkpoint_directory / "iter_0000006").is_dir()
    printed = capsys.readouterr().out
    assert "step 6/6  100.0%" in printed
    assert f"train --config {config.run_directory}/config.yaml" in printed


def _draws(config: Config, stop_at: int = 0) -> list[tuple[float, float, float]]:
    found: list[tuple[float, float, float]] = []

    def draw(step: int, result: StepResult) -> None:
        found.append((random.random(), float(np.random.random()), torch.rand(()).item()))
        _interrupt(stop_at, step, result)

    train(config, on_step=draw)
    return found


def test_every_generator_begins_with_the_seed_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """Python's, NumPy's and torch's: equal runs draw equally, ranks unlike, resumed ones go on."""
    write_corpus(tmp_path)
    runs = []
    for name in ("first", "second"):
        config = tiny(tmp_path, run={"directory": str(tmp_path / name), "device": "cpu"})
        if name == "first":
            runs.append(ranks(2).run(_draws, config))
        else:
            head = ranks(2).run(_draws, config, 3)
            tail = ranks(2).run(_draws, config)
            runs.append([[*begun, *rest] for begun, rest in zip(head, tail, strict=True)])
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == 6
    for numbers in zip(*[step for rank in runs[0] for step in rank], strict=True):
        assert len(set(numbers)) == 12


def test_finished_run_is_evaluated_again(tmp_path: Path) -> None:
    """It trains no further, saves nothing, and its last evaluation is there once."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, train={"steps": 2})
    first, second = train(config), train(config)
    assert second.is_finished
    assert second.step == 2
    assert second.evaluation == first.evaluation
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2]
    assert len([row for row in rows(tmp_path) if "validation_loss" in row]) == 1


def test_finished_run_keeps_the_evaluation_that_is_not_made_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Neither for want of held-out data nor because a signal ends it."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, train={"steps": 1})
    ranks(2).run(train, config)
    (evaluation,) = (row for row in rows(tmp_path) if "validation_loss" in row)
    ranks(2).run(train, tiny(tmp_path, train={"steps": 1}, data={"validation": []}))
    assert [row for row in rows(tmp_path) if "validation_loss" in row] == [evaluation]
    assert ranks(2).run(_interrupted_evaluation, config)[0].evaluation is None
    assert [row for row in rows(tmp_path) if "validation_loss" in row] == [evaluation]


def test_checkpoints_follow_interval_and_retention(tmp_path: Path) -> None:
    """Every second step is saved, the newest two stay, and those that are to be kept."""
    write_corpus(tmp_path)
    section = {"interval_steps": 1, "keep_last": 2, "keep_every": 3}
    config = tiny(tmp_path, checkpoint=section)
    train(config)
    saved = sorted(path.name for path in config.checkpoint_directory.glob("iter_*"))
    assert saved == ["iter_0000003", "iter_0000005", "iter_0000006"]


def test_megatron_style_prints_megatron_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choice of logging.style reaches the printer."""
    write_corpus(tmp_path)
    train(tiny(tmp_path, logging={"style": "megatron"}, train={"steps": 1}))
    assert "iteration        1/       1 | consumed samples:" in capsys.readouterr().out


def _train_on_copies(folder: Path, other: dict[str, Any]) -> str:
    """Train with the files of another folder on rank 1; return the error, or ''."""
    config = tiny(folder, train={"steps": 1}, data=other if dist.get_rank() == 1 else {})
    try:
        train(config)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["train", "validation"])
@pytest.mark.parametrize("change", ["tokens", "lengths", "files"])
def test_ranks_that_read_different_data_raise_alike(
    ranks: Ranks, tmp_path: Path, name: str, change: str
) -> None:
    """Before the first step, with the option and the rank; the same files elsewhere are fine."""
    copy = tmp_path / "copy"
    copy.mkdir()
    write_corpus(tmp_path)
    write_corpus(copy)
    other = {split: [str(copy / split)] for split in ("train", "validation")}
    assert ranks(2).run(_train_on_copies, tmp_path, other) == ["", ""]
    if change == "files":
        other[name] *= 2
    else:
        tokens = IndexedDataset(copy / name).tokens.tolist()
        if change == "tokens":
            tokens[len(tokens) // 2] ^= 1
        lengths = IndexedDataset(copy / name).sequence_lengths.tolist()
        if change == "lengths":
            lengths[1:3] = lengths[1] + 1, lengths[2] - 1
        with IndexedDatasetWriter(copy / name) as writer:
            for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
                writer.add_document(tokens[end - length : end])
    first, second = ranks(2).run(_train_on_copies, tmp_path, other)
    assert first == second
    number = int(change == "files")
    assert f"the same data on all ranks, got data.{name}[{number}]: " in first
    assert "between rank 0 and rank 1" in first


def test_signal_on_one_rank_stops_all_with_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """The running step is finished, nothing is evaluated, and the run is not finished."""
    write_corpus(tmp_path)
    config = tiny(tmp_path)
    for summary in ranks(2).run(_train_until, config, 2):
        # The signal came after step 2 had agreed, so step 3 carries the news.
        assert (summary.step, summary.is_finished, summary.evaluation) == (3, False, None)
    assert (config.checkpoint_directory / "iter_0000003").is_dir()
    assert rows(tmp_path)[-1]["step"] == 3
    assert ranks(2).run(train, config)[0].is_finished
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def _interrupted_evaluation(config: Config) -> RunSummary:
    """Signal one rank in the first batch of the first evaluation."""
    num_asked = [0]
    plain = evaluation.evaluate

    def evaluate(*parts: Any, should_stop: Any, **options: Any) -> Any:
        def signalling() -> bool:
            num_asked[0] += 1
            if num_asked[0] == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return should_stop()

        return plain(*parts, should_stop=signalling, **options)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("megafsdp.training.loop.evaluate", evaluate)
    try:
        return train(config)
    finally:
        monkeypatch.undo()


def test_signal_during_evaluation_saves(ranks: Ranks, tmp_path: Path) -> None:
    """The step that was evaluated is saved, and evaluated when the run goes on."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, evaluation={"interval_steps": 2})
    for summary in ranks(2).run(_interrupted_evaluation, config):
        assert (summary.step, summary.is_finished, summary.evaluation) == (2, False, None)
    assert (config.checkpoint_directory / "iter_0000002").is_dir()
    assert ranks(2).run(train, config)[0].is_finished
    assert [row["step"] for row in rows(tmp_path) if "validation_loss" in row] == [2, 4, 6]


def test_missing_data_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """No rank hangs, and each says which file."""
    with pytest.raises(RanksError, match=r"train\.idx") as failure:
        ranks(2).run(train, tiny(tmp_path))
    assert set(failure.value.failures) == {0, 1}


def test_small_vocabulary_is_an_error(tmp_path: Path) -> None:
    """A token that has no row in the embedding is found before the first step."""
    write_corpus(tmp_path)
    with pytest.raises(DataError, match=r"token 255.*train\.bin"):
        train(tiny(tmp_path, model={"vocab_size": 250}))


def test_world_that_does_not_fit_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Before any collective: the degrees do not multiply to the number of ranks."""
    write_corpus(tmp_path)
    with pytest.raises(RanksError, match="world size 3") as failure:
        ranks(3).run(train, tiny(tmp_path, parallel={"dp_shard": 2}))
    assert set(failure.value.failures) == {0, 1, 2}
    assert all("ConfigError" in text for text in failure.value.failures.values())


def test_fault_of_the_first_rank_alone_is_raised_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """Only one rank writes the run's files; the others hear when it cannot."""
    write_corpus(tmp_path)
    # A folder in the file's place.
    (tmp_path / "run/config.yaml").mkdir(parents=True)
    config = tiny(tmp_path, data={"cache": str(tmp_path / "cache")})
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, config)
    assert "IsADirectoryError" in failure.value.failures[0]
    said = "rank 0: ConfigError: Expected a folder that can be written to, got IsADirectoryError"
    assert said in failure.value.failures[1]


def _train_without_data_on_one_rank(config: Config) -> RunSummary:
    if dist.get_rank() == 1:
        section = dataclasses.replace(config.data, train=["no/such/file"])
        config = dataclasses.replace(config, data=section)
    return train(config)


def test_fault_of_another_rank_alone_is_raised_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """A file that one machine does not have ends the others before they wait for it."""
    write_corpus(tmp_path)
    with pytest.raises(RanksError) as failure:
        ranks(2).run(_train_without_data_on_one_rank, tiny(tmp_path))
    assert "rank 1: DataError" in failure.value.failures[0]
    assert "DataError" in failure.value.failures[1]


class _FullDisk(io.StringIO):
    """An output that has no room for one line."""

    def write(self, text: str) -> int:
        if "step 3/6" in text:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def _train_on_a_full_disk(config: Config) -> tuple[RunSummary, str, list[str]]:
    """Train where step 3 can be neither printed nor logged; return the output and warnings too."""
    plain = JsonlTracker.log

    def log(self: JsonlTracker, row: Mapping[str, float | int | None]) -> None:
        if row["step"] in (3, 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(self, row)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(JsonlTracker, "log", log)
        monkeypatch.setattr("sys.stdout", _FullDisk())
        warnings: list[str] = []
        logger = logging.getLogger("megafsdp.training")
        monkeypatch.setattr(logger, "warning", lambda text, *parts: warnings.append(text % parts))
        return train(config), sys.stdout.getvalue(), warnings  # type: ignore[attr-defined]


def test_a_full_disk_costs_rows_but_not_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """Each sink warns once and goes on when there is room again; the other rank never waits."""
    write_corpus(tmp_path)
    first, second = ranks(2).run(_train_on_a_full_disk, tiny(tmp_path))
    assert first[0].is_finished
    assert second[0].is_finished
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 5, 6]
    assert "step 2/6" in first[1]
    assert "step 4/6" in first[1]
    assert len(first[2]) == 2
    assert all("No space left" in text for text in first[2])


@pytest.mark.parametrize("is_wanted", [True, False])
def test_no_validation_data_means_no_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_wanted: bool
) -> None:
    """A run without held-out data and tokenizer ends well, and says what was asked in vain."""
    write_corpus(tmp_path)
    wanted = {"interval_steps": 2, "sample_prompt": "def"} if is_wanted else {}
    data = {"validation": [], "tokenizer": None}
    summary = train(tiny(tmp_path, data=data, evaluation=wanted, train={"steps": 2}))
    assert summary.is_finished
    assert (summary.evaluation, summary.text) == (None, None)
    assert caplog.text.count("Nothing is evaluated every 2 steps") == is_wanted
    assert caplog.text.count("No text goes on from the prompt 'def'") == is_wanted


def test_options_that_have_their_data_are_no_cause_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Held-out files or a split, and a tokenizer."""
    write_corpus(tmp_path)
    wanted = {"interval_steps": 1, "sample_prompt": "def", "sample_tokens": 1}
    for data in ({}, {"validation": [], "split": "90,10"}):
        run = {"directory": str(tmp_path / f"run{len(data)}")}
        train(tiny(tmp_path, run=run, data=data, evaluation=wanted, train={"steps": 1}))
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_bad_configuration_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A run that cannot start leaves no folder behind."""
    write_corpus(tmp_path)
    with pytest.raises(ConfigError):
        train(tiny(tmp_path, optimizer={"lr": -1.0}))
    assert not (tmp_path / "run").exists()


def test_schedule_longer_than_the_run_is_an_error_on_every_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Before the first step, and before anything is written but the lock."""
    write_corpus(tmp_path)
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, tiny(tmp_path, schedule={"decay_samples": 49}))
    assert set(failure.value.failures) == {0, 1}
    for text in failure.value.failures.values():
        assert "warm-up and decay within the run's 72 samples, got 24 and 49" in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_tokenizer_and_prompt_are_looked_at_before_the_first_step(tmp_path: Path) -> None:
    """Neither a week's run nor an evaluation begins with a wrong one."""
    write_corpus(tmp_path, largest=999)
    with pytest.raises(ConfigError, match="token 999"):
        train(tiny(tmp_path, model={"vocab_size": 1024}))
    write_corpus(tmp_path)
    with pytest.raises(ConfigError, match="sample_prompt"):
        train(tiny(tmp_path, model={"vocab_size": 256}, evaluation={"sample_prompt": ""}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
