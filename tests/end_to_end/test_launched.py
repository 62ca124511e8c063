"""Runs started as users start them: processes of a launcher, from the command line."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import SEQUENCE_LENGTH, write_corpus

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/configs/quickstart.yaml"


def _environment() -> dict[str, str]:
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def _launch(folder: Path, *words: str, num_ranks: int = 2) -> subprocess.Popen[str]:
    """Start a command of two ranks in a folder, as ``run.sh`` does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*launcher, f"--nproc-per-node={num_ranks}", *words],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _rank_processes(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the first command of the quick start has run."""
    folder = tmp_path_factory.mktemp("quickstart")
    subprocess.run(
        [sys.executable, "-m", "megafsdp", "prep", "--stdlib", "--output", "runs/quickstart/data"],
        cwd=folder,
        env=_environment(),
        check=True,
    )
    return folder


def test_quickstart_learns_stops_and_resumes(prepared: Path) -> None:
    """The second command: loss falls, SIGTERM to the ranks saves with code 0, a restart ends."""
    words = ["-m", "megafsdp", "train", "--config", str(QUICKSTART)]
    words += ["--train.steps=24", "--logging.interval_steps=1", "--evaluation.batches=2"]
    words += ["--evaluation.sample_tokens=8"]
    metrics = prepared / "runs/quickstart/metrics.jsonl"
    job = _launch(prepared, *words)
    deadline_s = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 6):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    for rank in _rank_processes(job.pid):
        os.kill(rank, signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert "stopped; resume with:" in output
    stopped_at = len(metrics.read_text().splitlines())
    assert 6 <= stopped_at < 24

    job = _launch(prepared, *words)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    assert f"resumed from step {stopped_at} of 24" in output
    assert "---- sample ----" in output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 24
    assert 5.0 < losses[0] < 6.0
    assert losses[-1] < 3.2
    assert rows[-1]["bits_per_byte"] < 5.0
    assert (prepared / "runs/quickstart/checkpoints/iter_0000024").is_dir()


def test_wrong_name_ends_every_rank_with_a_code(tmp_path: Path) -> None:
    """No rank waits for the other, and the nearest name is in the output."""
    words = ["-m", "megafsdp", "train", "--config", str(QUICKSTART), "--optimizer.rate=1"]
    job = _launch(tmp_path, *words)
    output = job.communicate(timeout=60)[0]
    assert job.returncode != 0
    assert "optimizer.rate" in output
    assert "Did you mean" in output


def test_own_loop_example_runs(tmp_path: Path) -> None:
    """The plain PyTorch loop learns and leaves a checkpoint."""
    job = _launch(tmp_path, str(ROOT / "examples/own_loop.py"))
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 0, output
    losses = [float(line.split()[3]) for line in output.splitlines() if line.startswith("step ")]
    assert losses[0] > 5.0
    assert losses[-1] < 3.2
    assert (tmp_path / "runs/own_loop/iter_0000040").is_dir()


@pytest.mark.parametrize("name", ["pretrain_qwen3", "pretrain_gpt"])
def test_pretraining_example_is_configuration_and_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its configuration trains at a toy's size in a single process."""
    toy = {
        "model.num_layers": 1,
        "model.hidden_size": 32,
        "model.ffn_hidden_size": 32,
        "model.vocab_size": 320,
        "model.max_sequence_length": SEQUENCE_LENGTH,
        "data.train": [str(tmp_path / "train")],
        "data.validation": [str(tmp_path / "validation")],
        "data.tokenizer": "byte",
        "data.sequence_length": SEQUENCE_LENGTH,
        "train.steps": 2,
        "train.global_batch_size": 2,
        "train.micro_batch_size": 1,
        "evaluation.sample_tokens": 0,
        "logging.wandb": "false",
        "logging.tensorboard": "false",
        "run.directory": str(tmp_path / "run"),
        "run.device": "cpu",
    }
    write_corpus(tmp_path)
    path = str(ROOT / f"examples/{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *(f"--{key}={value}" for key, value in toy.items())])
    runpy.run_path(path, run_name="__main__")
    assert (tmp_path / "run/checkpoints/iter_0000002").is_dir()
    monkeypatch.setattr(sys, "argv", [path, "--optimizer.rate=1"])
    with pytest.raises(SystemExit, match=rf"{name}\.py: Expected a known name, got .*optimizer.lr"):
        runpy.run_path(path, run_name="__main__")


def test_offload_sweep_compares_fractions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are those with nothing offloaded, bytes move to the host, and a picture is drawn."""
    monkeypatch.chdir(tmp_path)
    words = ["--fractions", "0.5", "1", "--plot", "sweep.svg", "--run.device=cpu"]
    words += ["--model.hidden_size=32", "--model.ffn_hidden_size=32", "--train.steps=4"]
    words += ["--data.sequence_length=16", "--train.global_batch_size=2"]
    path = str(ROOT / "examples/offload_sweep.py")
    monkeypatch.setattr(sys, "argv", [path, *words])
    runpy.run_path(path, run_name="__main__")
    *_, header, zero, half, whole = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "fraction"
    rows = [line.split() for line in (zero, half, whole)]
    assert [row[0] for row in rows] == ["0.00", "0.50", "1.00"]
    assert all(row[5] == "equal" for row in rows)
    device, host = ([float(row[column]) for row in rows] for column in (3, 4))
    assert device[0] > device[1] > device[2] == 0
    assert 0 == host[0] < host[1] < host[2]
    assert (tmp_path / "sweep.svg").read_text().count("<rect") == 3
