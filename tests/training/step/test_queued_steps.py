"""Steps whose numbers the host reads after the next step's forward was queued, as on a GPU."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp.data import Batch
from megafsdp.training import train
from megafsdp.training.step.train_step import StepResult, TrainStep
from tests.training.runs import numbers_read_late, rows, stored_tensors, tiny, write_corpus

NUM_STEPS = 6
# Numbers that a clock or the machine gives.
_MEASURED = {"time", "elapsed_s", "step_s", "tokens_per_s", "tflops", "mfu", "memory_nbytes"}
Accumulate = Callable[..., torch.Tensor]


def _spoiling(steps: frozenset[int]) -> Accumulate:
    """Return a pass over microbatches in which the loss of some steps is NaN."""
    plain, num_calls = TrainStep._accumulate, [0]

    def accumulate(
        step: TrainStep, batches: Sequence[Batch], before_backward: Callable[[], None]
    ) -> torch.Tensor:
        num_calls[0] += 1
        factor = math.nan if num_calls[0] in steps else 1.0
        with step._model.register_forward_hook(lambda model, args, loss: loss * factor):
            return plain(step, batches, before_backward)

    return accumulate


def _lines_of(printed: str) -> list[str]:
    """Return what was printed, without what a clock or the machine gives."""
    lines = [re.sub(r"  [\d,]+ ms/step.*ETA [\d:]+", "", line) for line in printed.splitlines()]
    return [line for line in lines if not line.startswith(("finished", "saved"))]


@pytest.mark.parametrize(
    ("sections", "spoilt", "num_skipped"),
    [
        ({"optimizer": {"clip_norm": 0.5}, "logging": {"group_grad_norms": True}}, (), 0),
        ({"train": {"nan_policy": "skip"}, "model": {"tie_embeddings": False}}, (1, 2, 5), 3),
        # fp16 gradients overflow until the scale has fallen.
        (
            {
                "precision": {"param_dtype": "fp16"},
                "loss_scale": {"initial": 2.0**21, "hysteresis": 1},
            },
            (),
            2,
        ),
    ],
    ids=["plain", "skipped", "overflowing"],
)
def test_when_the_host_reads_changes_no_number_and_no_bit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, dict[str, Any]],
    spoilt: tuple[int, ...],
    num_skipped: int,
) -> None:
    """Rows, the order of lines, and checkpoints in between and at the end are the same."""
    write_corpus(tmp_path)
    found = []
    for is_late in (False, True):
        monkeypatch.setattr(TrainStep, "_accumulate", _spoiling(frozenset(spoilt)))
        apart = tmp_path / f"{is_late}"
        config = tiny(
            tmp_path,
            run={"directory": str(apart / "run")},
            evaluation={"interval_steps": 5},
            checkpoint={"interval_steps": 4, "keep_last": None},
            **sections,
        )
        with numbers_read_late(is_late):
            summary = train(config)
        monkeypatch.undo()
        logged = [{k: v for k, v in row.items() if k not in _MEASURED} for row in rows(apart)]
        stored = [stored_tensors(config.checkpoint_directory, step) for step in (4, NUM_STEPS)]
        printed = _lines_of(capsys.readouterr().out)
        found.append((logged, printed, summary.evaluation, stored))
    assert found[0][:3] == found[1][:3]
    assert [row for row in found[0][0] if "loss" in row][-1]["num_skipped"] == num_skipped
    for early, late in zip(found[0][3], found[1][3], strict=True):
        assert early.keys() == late.keys()
        assert all(torch.equal(early[key], late[key]) for key in early)


def _counting_reads(patch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Note each number that the host reads of a tensor, and who reads it."""

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: object) -> Any:
            frame = sys._getframe(1)
            caller = frame.f_code
            # Sample ids and torch's counts of steps are on the host; and so are, on a CPU, the
            # kernel's arguments.
            if tensor.is_floating_point() and not re.search(
                r"adam/step|kernels/adam_kernel|torch/optim", caller.co_filename
            ):
                # Python 3.10 has no co_qualname.
                owner = type(frame.f_locals.get("self")).__name__
                events.append(f"read by {owner}.{caller.co_name}")
            return plain(tensor, *args)

        return read

    for name in ("item", "tolist", "cpu", "__float__", "__int__", "__bool__"):
        patch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))


def _noting_steps(patch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Note when a step begins, when its forward was queued, and when its backward was."""
    accumulate, plain = TrainStep._accumulate, TrainStep._reduce

    def noting(
        step: TrainStep, batches: Sequence[Batch], before_backward: Callable[[], None]
    ) -> torch.Tensor:
        events.append("step")
        with step._model.register_forward_hook(lambda *_: events.append("forward")):
            return accumulate(step, batches, before_backward)

    def reduce(step: TrainStep, *args: Any) -> torch.Tensor:
        events.append("backward")
        return plain(step, *args)

    patch.setattr(TrainStep, "_accumulate", noting)
    patch.setattr(TrainStep, "_reduce", reduce)


def _count_from_here(
    patch: pytest.MonkeyPatch, events: list[str], step: int, result: StepResult
) -> None:
    """Count between the first step, which makes states, and the last, which is saved."""
    if step == 1:
        _counting_reads(patch, events)
    elif step == NUM_STEPS:
        patch.undo()


@pytest.mark.parametrize(
    ("is_late", "optimizer", "dtype"),
    [
        (True, {}, "fp32"),
        (True, {}, "fp16"),
        (False, {}, "fp32"),
        (False, {"implementation": "fused"}, "fp16"),
        (False, {"kind": "muon"}, "fp32"),
    ],
    ids=["late", "late fp16", "fused", "torch fp16", "muon"],
)
def test_the_host_waits_for_the_device_once_a_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_late: bool,
    optimizer: dict[str, Any],
    dtype: str,
) -> None:
    """All numbers in one read; late, it comes when the next forward is queued, or at the end."""
    write_corpus(tmp_path)
    events: list[str] = []
    sections = {"data": {"validation": []}, "logging": {"num_zero_grads": True}}
    sections["precision"] = {"param_dtype": dtype}
    sections["loss_scale"] = {"constant": 64.0} if dtype == "fp16" else {}
    config = tiny(tmp_path, optimizer={"clip_norm": 0.5, **optimizer}, **sections)
    read = "read by LateNumbers.read"
    with monkeypatch.context() as patch, numbers_read_late(is_late):
        _noting_steps(patch, events)
        train(config, on_step=functools.partial(_count_from_here, patch, events))
    step = ["step", "forward", "backward"]
    if is_late:
        # The first step's read is not counted yet, and the last one's follows it.
        wanted = [*step, *step, *(["step", "forward", read, "backward"] * (NUM_STEPS - 2)), read]
    else:
        wanted = [*step, *([*step, read] * (NUM_STEPS - 1))]
    assert events == wanted, Counter(events)


def _interrupt(at: int, step: int, result: StepResult) -> None:
    if step == at:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_a_run_whose_numbers_are_late(tmp_path: Path) -> None:
    """The step that is queued when the ranks agree is the last; it is saved, and all are logged."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, logging={"interval_steps": 2})
    with numbers_read_late():
        summary = train(config, on_step=functools.partial(_interrupt, 2))
        # Step 3 was queued when step 2 was read; its loss had the wish, which step 4 read.
        assert (summary.step, summary.is_finished) == (4, False)
        assert (config.checkpoint_directory / "iter_0000004").is_dir()
        assert train(config).is_finished
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 4, 6]
