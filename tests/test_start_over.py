"""``run.sh --fresh`` removes the run that it will start, and nothing else."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megafsdp import checkpoint
from megafsdp.training.process.run_lock import sole_job
from megafsdp.training.process.world import World
from tests.checkpoint.faulty_store import Fault, FaultyStore

_WHOLE = ["--data.train", "[tokens]", "--train.steps", "6"]
_SCRIPT = Path(__file__).parents[1] / "scripts" / "start_over.py"


@pytest.fixture
def start_over() -> Callable[[Sequence[str]], int]:
    """Return the script's function."""
    return runpy.run_path(str(_SCRIPT))["main"]


def _run(root: Path, checkpoints: Path | None = None) -> list[Path]:
    """Make what a run leaves; return the files that starting over removes."""
    folder = checkpoints or root / "checkpoints"
    for step in (2, 4):
        checkpoint.save(folder, step=step, model=torch.nn.Linear(2, 2))
    root.mkdir(exist_ok=True)
    logs = [root / name for name in ("metrics.jsonl", "events.jsonl")]
    for path in logs:
        path.touch()
    (folder / "notes.txt").touch()
    return [*logs, *(p for p in folder.rglob("*") if p.name != "notes.txt")]


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_run_that_options_name_is_removed(
    tmp_path: Path, start_over: Callable[[Sequence[str]], int], is_apart: bool
) -> None:
    """Its checkpoints and metrics, wherever they are; another run and other files stay."""
    apart = tmp_path / "apart" if is_apart else None
    removed, others = _run(tmp_path / "mine", apart), _run(tmp_path / "other")
    options = [*_WHOLE, "--run.directory", str(tmp_path / "mine")]
    if apart is not None:
        options += ["--checkpoint.directory", str(apart)]
    assert start_over(options) == 0
    assert not any(path.exists() for path in removed)
    assert all(path.exists() for path in others)
    assert ((apart or tmp_path / "mine" / "checkpoints") / "notes.txt").exists()
    assert start_over(options) == 0, "nothing is left to remove"


def test_checkpoints_in_a_store_are_removed(
    tmp_path: Path,
    start_over: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As those on a disk are; a store that does not let them go is one message."""
    store = FaultyStore(tmp_path / "store")
    for step in (2, 4):
        checkpoint.save(store.root, step=step, model=torch.nn.Linear(2, 2))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.touch()
    (store.objects / "run" / "notes.txt").touch()
    before = store.names()
    options = [*_WHOLE, "--run.directory", str(metrics.parent)]
    options += ["--checkpoint.directory", store.root]
    store.plan(Fault("remove", "denied"))
    assert start_over(options) == 2
    assert "lets objects be removed" in capsys.readouterr().err
    assert store.names() == before and metrics.exists()
    store.plan()
    for _ in range(2):
        assert start_over(options) == 0
        assert store.names() == {"notes.txt"} and not metrics.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer.knd", "muon"], "optimizer.kind"),
        (["--optimizer.lr", "-1"], "a number above 0, got -1"),
        (
            ["--train.global_batch_size", "7"],
            "a multiple of the 2 data-parallel ranks (dp_outer x dp_shard), got 7",
        ),
    ],
)
def test_a_mistake_in_the_options_removes_nothing(
    tmp_path: Path,
    start_over: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    """It is answered as the run would answer it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    kept = _run(tmp_path)
    assert start_over([*_WHOLE, "--run.directory", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("held", ["mine", "apart"])
def test_a_running_job_keeps_its_files(
    tmp_path: Path,
    start_over: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
    held: str,
) -> None:
    """It would go on without the checkpoints that it counts on."""
    kept = _run(tmp_path / "mine", tmp_path / "apart")
    folders = ["--run.directory", str(tmp_path / "mine")]
    folders += ["--checkpoint.directory", str(tmp_path / "apart")]
    with sole_job(tmp_path / held, World(0, 1, 0, 1, torch.device("cpu"))):
        assert start_over([*_WHOLE, *folders]) == 2
    assert "a folder in which no other job runs" in capsys.readouterr().err
    assert all(path.exists() for path in kept)
