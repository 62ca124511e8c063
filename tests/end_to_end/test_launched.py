"""Runs started as users start them: processes of a launcher, from the command line."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.training.cli.main import main
from tests.ranks import Ranks
from tests.training.runs import SEQUENCE_LENGTH, write_corpus

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/configs/quickstart.yaml"


def _environment() -> dict[str, str]:
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def _launch(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command of two ranks in a folder, as ``run.sh`` does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*launcher, "--nproc-per-node=2", *words],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _rank_processes(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(child) for child in children]


def _run_as_launched(folder: Path, port: int, words: Sequence[str]) -> tuple[object, str]:
    """Run a program where a launcher would; return the code it ends with and its output."""
    rank, num_ranks, output = dist.get_rank(), dist.get_world_size(), io.StringIO()
    # Until all ranks have connected: one that leaves earlier fails those that still do.
    dist.barrier()
    dist.destroy_process_group()
    launched = {"RANK": rank, "LOCAL_RANK": rank}
    launched |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        for name, value in launched.items():
            patch.setenv(name, str(value))
        patch.chdir(folder)
        patch.setattr(sys, "argv", list(words))
        # It would outlast this program in a process that runs others.
        patch.setattr("megafsdp.training.cli.main._configure_logging", lambda: None)
        run = runpy.run_path if words[0].endswith(".py") else runpy.run_module
        try:
            run(words[0], run_name="__main__")
        except SystemExit as end:
            return end.code, output.getvalue()
    return 0, output.getvalue()


def _free_port() -> int:
    """Return a port that nothing listens to; each job needs another one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def port() -> int:
    """Return a port that nothing listens to."""
    return _free_port()


def test_quickstart_learns_stops_and_resumes_at_other_degrees(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two commands: loss falls, SIGTERM to the ranks saves with code 0, a restart goes on.

    First on 4 ranks that share layers and experts out, then on 2 that do not, to the end.
    """
    monkeypatch.chdir(tmp_path)
    assert main(["prep", "--stdlib", "--output", "runs/quickstart/data"]) == 0
    words = ["-m", "megafsdp", "train", "--config", str(QUICKSTART)]
    words += ["--train.steps=24", "--logging.interval_steps=1", "--evaluation.batches=2"]
    words += ["--evaluation.sample_tokens=8"]
    # A third of its batches: the same steps in a third of the time.
    words += ["--train.global_batch_size=8", "--schedule.warmup_samples=160"]
    words += ["--data.num_samples=192"]
    metrics = tmp_path / "runs/quickstart/metrics.jsonl"
    job = _launch(tmp_path, *words)
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
    assert 6 <= stopped_at < 21

    moved_to = stopped_at + 3
    shared = ["--parallel.tp=2", "--parallel.ep=2", f"--train.steps={moved_to}"]
    job_words = [*words[1:], *shared]
    outcomes = ranks(4).run(_run_as_launched, tmp_path, _free_port(), job_words)
    output = outcomes[0][1]
    assert [code for code, _ in outcomes] == [0] * 4, output
    assert f"resumed from step {stopped_at} of {moved_to}" in output
    assert "on 4 cpu rank(s) (2 x 2 tensor-parallel, 2 expert-parallel)" in output
    outcomes = ranks(2).run(_run_as_launched, tmp_path, _free_port(), words[1:])
    output = outcomes[0][1]
    assert [code for code, _ in outcomes] == [0] * 2, output
    assert f"resumed from step {moved_to} of 24" in output
    assert "---- sample ----" in output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 24
    assert 5.0 < losses[0] < 6.0
    assert losses[-1] < 3.2
    assert rows[-1]["bits_per_byte"] < 5.0
    assert (tmp_path / "runs/quickstart/checkpoints/iter_0000024").is_dir()


def test_wrong_name_ends_every_rank_with_a_code(ranks: Ranks, tmp_path: Path, port: int) -> None:
    """No rank waits for the other, and the nearest name is in the output."""
    words = ["megafsdp", "train", "--config", str(QUICKSTART), "--optimizer.rate=1"]
    for code, output in ranks(2).run(_run_as_launched, tmp_path, port, words):
        assert code == 2
        assert "optimizer.rate" in output
        assert "Did you mean" in output


def test_own_loop_example_runs(ranks: Ranks, tmp_path: Path, port: int) -> None:
    """The plain PyTorch loop learns and leaves a checkpoint."""
    words = [str(ROOT / "examples/own_loop.py")]
    (code, output), (other, _) = ranks(2).run(_run_as_launched, tmp_path, port, words)
    assert code == other == 0
    losses = [float(line.split()[3]) for line in output.splitlines() if line.startswith("step ")]
    assert losses[0] > 5.0
    assert losses[-1] < 3.2
    assert (tmp_path / "runs/own_loop/iter_0000040").is_dir()


def test_tensor_parallel_example_runs(ranks: Ranks, tmp_path: Path, port: int) -> None:
    """A model of transformers, cut by its own plan and sharded, learns and is saved."""
    words = [str(ROOT / "examples/own_loop_tp.py")]
    outcomes = ranks(4).run(_run_as_launched, tmp_path, port, words)
    assert [code for code, _ in outcomes] == [0] * 4
    lines = outcomes[0][1].splitlines()
    losses = [float(line.split()[3]) for line in lines if line.startswith("step ")]
    assert losses[0] > 5.0
    assert losses[-1] < 3.5
    assert (tmp_path / "runs/own_loop_tp/iter_0000020").is_dir()


@pytest.mark.ecosystem
def test_mixture_example_runs(ranks: Ranks, tmp_path: Path, port: int) -> None:
    """A mixture of transformers with declared experts learns; its parts are named apart."""
    words = [str(ROOT / "examples/own_loop_moe.py")]
    (code, output), (other, _) = ranks(2).run(_run_as_launched, tmp_path, port, words)
    assert code == other == 0, output
    losses = [float(line.split()[3]) for line in output.splitlines() if line.startswith("step ")]
    assert losses[0] > 5.0
    assert losses[-1] < 3.5
    saved = read_manifest(tmp_path / "runs/own_loop_moe/iter_0000020").tensors
    assert "model.model.layers.1.mlp.experts.up_proj" in saved


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


def test_quantized_compares_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs start from the same weights, each recipe changes the losses, and a picture is drawn."""
    monkeypatch.chdir(tmp_path)
    words = ["--recipes", "fp8_block", "nvfp4", "--plot", "losses.svg", "--run.device=cpu"]
    words += ["--model.hidden_size=64", "--model.ffn_hidden_size=64", "--train.steps=3"]
    words += ["--data.sequence_length=16", "--train.global_batch_size=2"]
    path = str(ROOT / "examples/quantized.py")
    monkeypatch.setattr(sys, "argv", [path, *words])
    runpy.run_path(path, run_name="__main__")
    *_, header, bf16, block, narrow, _ = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["recipe", "first", "last"]
    rows = [line.split() for line in (bf16, block, narrow)]
    assert [row[0] for row in rows] == ["bf16", "fp8_block", "nvfp4"]
    first, last = ([float(row[column]) for row in rows] for column in (1, 2))
    assert max(first) - min(first) < 0.02 * first[0], "the same weights and samples"
    assert len(set(last)) == 3, "recipes compute otherwise"
    assert (tmp_path / "losses.svg").read_text().count("<polyline") == 3
