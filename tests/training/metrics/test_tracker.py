"""metrics.jsonl, W&B and TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from megafsdp.errors import ConfigError
from megafsdp.training.config.sections import Config
from megafsdp.training.metrics.tracker import (
    JsonlTracker,
    TensorBoardTracker,
    Trackers,
    check_trackers,
)
from tests.training.runs import tiny


def _steps(path: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(r["step"], "evaluation" if "validation_loss" in r else "step") for r in rows]


@pytest.fixture
def metrics_path(tmp_path: Path) -> Path:
    """Return a file with steps 1 to 4, evaluations at 2 and 4, and half a line."""
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, last_step=0)
    for step in range(1, 5):
        tracker.log({"step": step, "loss": 1.0 / step})
        if step % 2 == 0:
            tracker.log({"step": step, "validation_loss": 2.0, "bits_per_byte": None})
    tracker.close()
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    return path


def test_rows_after_the_resumed_step_are_cut(metrics_path: Path) -> None:
    """Steps that will be taken again are not there twice; half a line is dropped."""
    JsonlTracker(metrics_path, last_step=2).close()
    assert _steps(metrics_path) == [(1, "step"), (2, "step"), (2, "evaluation")]


def test_evaluation_that_is_repeated_takes_the_place_of_the_first(metrics_path: Path) -> None:
    """A finished run that is started again has its last evaluation once, and never none."""
    steps = [(1, "step"), (2, "step"), (2, "evaluation"), (3, "step"), (4, "step")]
    before = [*steps, (4, "evaluation")]
    tracker = JsonlTracker(metrics_path, last_step=4)
    assert _steps(metrics_path) == before
    tracker.log({"step": 4, "validation_loss": 1.5})
    assert _steps(metrics_path) == before
    assert json.loads(metrics_path.read_text().splitlines()[-1])["validation_loss"] == 1.5
    tracker.log({"step": 5, "validation_loss": 1.25})
    tracker.close()
    assert _steps(metrics_path) == [*before, (5, "evaluation")]


def test_a_damaged_file_does_not_end_a_resume(tmp_path: Path) -> None:
    """A byte that is no UTF-8, and a time that is no number, cost their values alone."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "elapsed_s": 5.0}\n\xff\n{"step": 2, "elapsed_s": null}\n'
        b'{"step": 2, "elapsed_s": "7"}\n'
    )
    tracker = JsonlTracker(path, last_step=2)
    tracker.close()
    assert tracker.elapsed_s == 5.0
    assert _steps(path) == [(1, "step"), (2, "step"), (2, "step")]


def test_new_run_starts_a_new_file(metrics_path: Path) -> None:
    """Without a checkpoint, old rows belong to another run."""
    JsonlTracker(metrics_path, last_step=0).close()
    assert metrics_path.read_text() == ""


def test_row_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    """Nothing waits in a buffer that a kill would lose; NaN becomes null, which JSON can say."""
    tracker = JsonlTracker(tmp_path / "m.jsonl", last_step=0)
    tracker.log({"step": 1, "loss": float("nan"), "lr": float("inf")})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": None, "lr": None}
    tracker.close()


@pytest.fixture
def wandb_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a run that logs to W&B, without a key."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = tiny(tmp_path, logging={"wandb": True})
    config.run_directory.mkdir()
    return config


def _end_wandb() -> None:
    """End W&B's process, which writes on after the end of a run."""
    import wandb

    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_runs_offline_and_keeps_its_identity(wandb_config: Config) -> None:
    """Without a key nothing is sent; a resumed run has the identity of the first."""
    first = Trackers(wandb_config, last_step=0, wandb_id=None)
    first.log({"step": 1, "loss": 2.0})
    first.close()
    again = Trackers(wandb_config, last_step=1, wandb_id=first.wandb_id)
    again.close()
    _end_wandb()
    assert first.wandb_id
    assert again.wandb_id == first.wandb_id
    assert list(wandb_config.run_directory.glob(f"wandb/offline-run-*/run-{first.wandb_id}.wandb"))


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file of W&B: LevelDB's log, after a header of seven bytes.

    A record lies in one piece or several in blocks of 32 KiB, each piece after its checksum (4
    bytes), length (2) and kind: the whole, the first, one between, the last.
    """
    start, record = 7, b""
    while start + 7 <= len(data):
        if start % 32768 > 32768 - 7:
            start += -start % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, start + 4)
        record += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.parametrize("error", [ConnectionError("no such host"), KeyError("no such host")])
def test_wandb_that_does_not_answer_is_refused(
    wandb_config: Config, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """With the way on; all ranks end by one message."""

    def fail(**unused: object) -> None:
        raise error

    monkeypatch.setattr("wandb.init", fail)
    with pytest.raises(ConfigError, match=r"no such host.*logging\.wandb.*WANDB_MODE=offline"):
        Trackers(wandb_config, last_step=0, wandb_id=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_keeps_rows_of_a_step_before_its_last(wandb_config: Config) -> None:
    """As a resumed run logs them, and an evaluation of the step that it resumed from."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = [{"step": 1, "loss": 4.0}, {"step": 3, "loss": 3.0}, {"step": 2, "validation_loss": 2.0}]
    trackers = Trackers(wandb_config, last_step=0, wandb_id=None)
    for row in rows:
        trackers.log(row)
    trackers.close()
    _end_wandb()
    (path,) = wandb_config.run_directory.glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in _records(path.read_bytes())]
    logged = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    # Beside the row W&B writes its own step and times.
    assert [{k: v for k, v in row.items() if k[0] != "_"} for row in logged] == rows
    axes = {record.metric.glob_name: record.metric.step_metric for record in records}
    assert axes["*"] == "step"


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    """Each number of a row is a scalar at its step; missing ones are left out."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(tmp_path, logging={"tensorboard": True})
    config.run_directory.mkdir()
    trackers = Trackers(config, last_step=0, wandb_id=None)
    trackers.log({"step": 3, "loss": 2.5, "mfu": None})
    trackers.close()
    events = EventAccumulator(str(config.run_directory / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 2.5)]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The error comes before anything is built; a package that is not asked for is not missed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_trackers(tiny(tmp_path))
    with pytest.raises(ConfigError, match=rf"pip install 'megafsdp\[{package}\]'"):
        check_trackers(tiny(tmp_path, logging={package: True}))


def test_a_tracker_that_fails_leaves_the_others_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a row nor the end raises; the warning comes once."""
    pytest.importorskip("tensorboard")
    config = tiny(tmp_path, logging={"tensorboard": True})
    config.run_directory.mkdir()
    trackers = Trackers(config, last_step=0, wandb_id=None)

    def fail(*unused: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(TensorBoardTracker, "log", fail)
        broken.setattr(TensorBoardTracker, "close", fail)
        for step in (1, 2):
            trackers.log({"step": step, "loss": 1.0})
        trackers.close()
    assert _steps(config.run_directory / "metrics.jsonl") == [(1, "step"), (2, "step")]
    assert caplog.text.count("TensorBoardTracker lacks rows") == 1


_OWN = """
class Rows:
    def __init__(self, config, *, last_step):
        self.path = config.run_directory / "own.txt"
        self.path.write_text(f"{config.run_name} from {last_step}\\n")
    def log(self, row):
        with self.path.open("a") as file:
            file.write(f"{row['step']} {row.get('loss')}\\n")
    def close(self):
        with self.path.open("a") as file:
            file.write("closed\\n")
class Mute:
    def __init__(self, config, *, last_step):
        pass
class Broken(Rows):
    def __init__(self, config, *, last_step):
        raise KeyError("token")
class Outer:
    Inner = Rows
number = 7
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with trackers as a user writes them."""
    (tmp_path / "own_trackers.py").write_text(_OWN)
    (tmp_path / "torn_trackers.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_trackers"


@pytest.mark.parametrize("name", ["Rows", "Outer.Inner"])
def test_a_tracker_of_the_users_own_gets_every_row(
    tmp_path: Path, own_module: str, name: str
) -> None:
    """Beside metrics.jsonl; it knows the run and the step that it goes on from."""
    config = tiny(tmp_path, logging={"trackers": [f"{own_module}:{name}"]})
    config.run_directory.mkdir()
    check_trackers(config)
    trackers = Trackers(config, last_step=4, wandb_id=None)
    trackers.log({"step": 5, "loss": 2.5})
    trackers.close()
    written = (config.run_directory / "own.txt").read_text()
    assert written == "run from 4\n5 2.5\nclosed\n"
    assert _steps(config.run_directory / "metrics.jsonl") == [(5, "step")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own_trackers", "the name of a class as module:Class"),
        ("own_trackers:", "the name of a class as module:Class"),
        (":Rows", "the name of a class as module:Class"),
        ("own_trackers:Row", "module 'own_trackers' has no attribute 'Row'"),
        ("own_tracker:Rows", "No module named 'own_tracker'"),
        ("torn_trackers:Rows", "No module named 'no_such_package'"),
        ("own_trackers:number", "a class, got 7"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused_before_the_run(
    tmp_path: Path, own_module: str, spec: str, message: str
) -> None:
    """With its name and how to write it."""
    config = tiny(tmp_path, logging={"trackers": [spec]})
    with pytest.raises(ConfigError, match=f"{message}.*logging.trackers '{spec}'.*PYTHONPATH"):
        check_trackers(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("Mute", "the methods log and close, got Mute"), ("Broken", "got KeyError: 'token'")],
)
def test_a_tracker_that_cannot_be_made_is_refused(
    tmp_path: Path, own_module: str, name: str, message: str
) -> None:
    """When the run opens its trackers, on which all ranks agree."""
    config = tiny(tmp_path, logging={"trackers": [f"{own_module}:{name}"]})
    config.run_directory.mkdir()
    with pytest.raises(ConfigError, match=message):
        Trackers(config, last_step=0, wandb_id=None)
