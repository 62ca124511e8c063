"""Ray Train on two workers of this machine: the program of docs/integrations/ray.md, twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafsdp import checkpoint, full_state_dict, fully_shard_model
from megafsdp.errors import CheckpointError
from megafsdp.models import build_model, presets
from tests.ecosystem.test_pages import PAGES
from tests.end_to_end.test_readme import ROOT, python_blocks
from tests.ranks import Ranks

pytest.importorskip("ray", reason="ecosystem: ray is not installed")
from megafsdp.integrations import ray as bridge

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

STEPS = (2, 4)
# Ray writes no token into the home folder and sends nothing.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
# Runs the program as it stands, then once more for longer; Ray itself is started once.
DRIVER = """
import json, sys
page, out, *all_steps = sys.argv[1:]
program = open(page).read()
metrics = []
for steps in all_steps:
    names = {"__name__": "__main__"}
    text = program.replace('"steps": 2', f'"steps": {steps}')
    once = "ray.init(num_cpus=2, ignore_reinit_error=True, include_dashboard=False)"
    text = text.replace("ray.init(num_cpus=2)", once)
    exec(compile(text, page, "exec"), names)
    metrics.append(names["result"].metrics)
json.dump(metrics, open(out, "w"))
"""


def _unbroken(program: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return what the training function reports if it runs on these ranks at once, and weights."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "ray.md", "exec"), names)
    reported: list[dict[str, Any]] = []
    models = []

    def report(metrics: dict[str, Any], *, step: int, model: torch.nn.Module, **_: object) -> None:
        reported.append(metrics | {"step": step})
        models.append(model)

    replaced = {"report": report, "resume": lambda model, optimizer: 0}
    before = {name: getattr(bridge, name) for name in replaced}
    try:
        vars(bridge).update(replaced)
        names["train"]({"steps": STEPS[-1]})
    finally:
        vars(bridge).update(before)
    return reported, full_state_dict(models[-1])


def _loaded(directory: Path) -> dict[str, torch.Tensor]:
    model = fully_shard_model(build_model(presets["qwen3-toy"], seed=1), ["TransformerLayer"])
    checkpoint.load(directory, model=model)
    return full_state_dict(model)


def test_a_run_of_two_workers_goes_on_from_its_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and weights of two runs are, bit for bit, those of one that nothing interrupts."""
    (program,) = python_blocks((PAGES / "ray.md").read_text())
    page, out = tmp_path / "program.py", tmp_path / "metrics.json"
    page.write_text(program.replace("/tmp/runs", str(tmp_path)))
    words = [sys.executable, "-c", DRIVER, page, out, *STEPS]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(word) for word in words], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = json.loads(out.read_text())
    reported, weights = ranks(2).run(_unbroken, program)[0]
    assert [m["first"] for m in metrics] == [1, STEPS[0] + 1]
    assert [(m["step"], m["loss"]) for m in metrics] == [(m["step"], m["loss"]) for m in reported]
    root = tmp_path / "ray" / "megafsdp"
    assert checkpoint.latest_step(root) == STEPS[-1]
    # On another number of ranks.
    for state in ranks(3).run(_loaded, root):
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_storage_that_workers_do_not_mount_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written: the workers of a cluster write one checkpoint together."""
    storage = SimpleNamespace(storage_filesystem=SimpleNamespace(type_name="s3"))
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(bridge.train, "get_context", lambda: context)
    with pytest.raises(NotImplementedError, match=r"storage_path.*'s3'.*all workers mount"):
        bridge.report({}, step=1, model=torch.nn.Linear(1, 1))


def _keep_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder the storage of the run."""
    storage = SimpleNamespace(
        storage_filesystem=SimpleNamespace(type_name="local"), experiment_fs_path=str(folder)
    )
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(bridge.train, "get_context", lambda: context)


def _stepped(num_steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_schedules_are_saved_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside weights; Ray refers to the folder and copies nothing."""
    _keep_in(tmp_path, monkeypatch)
    reported: dict[str, Any] = {}
    monkeypatch.setattr(bridge.train, "report", lambda metrics, **given: reported.update(given))
    model, optimizer, scheduler = _stepped(3)
    bridge.report({}, step=3, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    assert reported["checkpoint_upload_mode"] is bridge.CheckpointUploadMode.NO_UPLOAD
    monkeypatch.setattr(bridge.train, "get_checkpoint", lambda: reported["checkpoint"])
    other, optimizer, scheduler = _stepped(0)
    assert bridge.resume(other, optimizer, scheduler) == 3
    assert scheduler.last_epoch == 3 and torch.equal(other.weight, model.weight)


def test_a_step_that_cannot_be_saved_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only a step that is there already is no error."""
    _keep_in(tmp_path, monkeypatch)
    (tmp_path / bridge.FOLDER).write_text("not a folder")
    with pytest.raises(CheckpointError, match=bridge.FOLDER):
        bridge.report({}, step=2, model=torch.nn.Linear(1, 1))


def test_a_step_that_was_saved_but_not_reported_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that died in between takes nothing with it: the run comes by again."""
    _keep_in(tmp_path, monkeypatch)
    reported: list[str] = []

    def died(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    def report(metrics: object, *, checkpoint_dir_name: str, **options: object) -> None:
        reported.append(checkpoint_dir_name)

    model = torch.nn.Linear(1, 1)
    for step in (2, 4):
        monkeypatch.setattr(bridge.train, "report", died)
        with pytest.raises(KeyboardInterrupt):
            bridge.report({}, step=step, model=model)
        monkeypatch.setattr(bridge.train, "report", report)
        bridge.report({}, step=step, model=model)
    assert reported == ["megafsdp/iter_0000002", "megafsdp/iter_0000004"]
