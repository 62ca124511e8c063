"""A run that was stopped and started again is the run that never stopped."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafsdp.training import Config, train
from megafsdp.training.step.train_step import StepResult
from tests.ranks import Ranks
from tests.training.runs import rows, stored_tensors, tiny, write_corpus

NUM_STEPS = 6

Told = list[tuple[int, float, tuple[int, ...], float | None]]

# Window 2 makes the scale grow into the next overflow again and again.
FP16 = {
    "precision": {"param_dtype": "fp16"},
    "loss_scale": {"initial": 2.0**20, "window": 2, "hysteresis": 2},
}
REMAINDERS = {
    "precision": {
        "param_dtype": "bf16",
        "main_params_dtype": "bf16",
        "main_grads_dtype": "fp32",
    },
    "optimizer": {"store_param_remainders": True},
}
OPTIMIZERS: dict[str, dict[str, dict[str, Any]]] = {
    "fused adamw": {},
    "scaled states": {"optimizer": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}},
    "remainders": REMAINDERS,
    "torch's adamw": {"optimizer": {"implementation": "fused"}},
    "muon": {"optimizer": {"kind": "muon", "lr_multipliers": {"*embedding*": 0.5}}},
    "coupled adam, one bf16 state, saved in background": {
        "optimizer": {"kind": "adam", "exp_avg_dtype": "bf16"},
        "checkpoint": {"in_background": True, "interval_steps": 1},
    },
    "fp16": FP16,
    "fp16, torch's sgd": {
        **FP16,
        "optimizer": {"kind": "sgd", "implementation": "foreach", "lr": 0.1},
    },
}
# The second signal comes to a run that was resumed, at a step that is evaluated.
STOPPED_TWICE = {"remainders", "coupled adam, one bf16 state, saved in background", "fp16"}


def _note(told: Told, interrupt_at: int | None, step: int, result: StepResult) -> None:
    told.append((step, result.loss, result.sample_ids, result.loss_scale))
    if step == interrupt_at and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)


def _run(config: Config, interrupt_at: int | None = None) -> Told:
    """Train; return number, loss and this rank's samples of each step."""
    told: Told = []
    train(config, on_step=functools.partial(_note, told, interrupt_at))
    return told


def _config(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    return tiny(
        folder,
        run={"directory": str(folder / name)},
        model={"num_layers": 1},
        train={"steps": NUM_STEPS, "micro_batch_size": 2},
        # Evaluations stand in the way on purpose: they must not change what is trained.
        evaluation={"interval_steps": 4, "batches": 1},
        **{"checkpoint": {"interval_steps": 3}, **copy.deepcopy(sections)},
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stopped_run_equals_uninterrupted_run_bit_by_bit(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Losses, loss scales, main weights and states of two ranks, over one SIGTERM or two."""
    write_corpus(tmp_path)
    sections = OPTIMIZERS[kind]
    whole, broken = _config(tmp_path, "whole", **sections), _config(tmp_path, "run", **sections)
    straight = ranks(2).run(_run, whole)
    signals, lengths = ((1, 3), [2, 2, 2]) if kind in STOPPED_TWICE else ((1,), [2, 4])
    pieces = [ranks(2).run(_run, broken, at) for at in (*signals, None)]
    for rank in range(2):
        assert [len(piece[rank]) for piece in pieces] == lengths
        assert [told for piece in pieces for told in piece[rank]] == straight[rank]

    scales = [scale for *_, scale in straight[0]]
    if "loss_scale" in sections:
        assert scales[2] != scales[0], "the first interruption comes after the scale has moved"
        assert len(set(scales[2:])) > 1, "it moves after that too"
    else:
        assert set(scales) == {None}

    ours = stored_tensors(broken.checkpoint_directory, NUM_STEPS)
    theirs = stored_tensors(whole.checkpoint_directory, NUM_STEPS)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("model.") for name in ours)
    assert any(name.startswith("optimizer.state.") for name in ours)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name

    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == list(range(1, NUM_STEPS + 1))
    assert [row["step"] for row in rows(tmp_path) if "validation_loss" in row] == [4, 6]


@pytest.fixture(scope="module")
def by_two_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Told]]:
    """Return the folder of a run that two ranks left after two steps, and all they would do."""
    folder = tmp_path_factory.mktemp("two")
    write_corpus(folder)
    straight = ranks(2).run(_run, _config(folder, "whole"))
    ranks(2).run(_run, _config(folder, "run"), 1)
    return folder, straight


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_number_of_ranks_goes_on_with_the_same_batches(
    ranks: Ranks, tmp_path: Path, by_two_ranks: tuple[Path, list[Told]], num_ranks: int
) -> None:
    """Each global batch has the sample ids that two ranks would have read, and the losses agree.

    The tolerance is that of fp32 sums in another order over four steps of Adam with eps 1e-5.
    """
    folder, straight = by_two_ranks
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = _config(tmp_path, "run")
    resumed = ranks(num_ranks).run(_run, config)
    assert [step for step, *_ in resumed[0]] == [3, 4, 5, 6]
    for index, (step, loss, *_) in enumerate(resumed[0]):
        ours = sorted(i for told in resumed for i in told[index][2])
        theirs = sorted(i for told in straight for i in told[step - 1][2])
        assert ours == theirs
        assert len(set(ours)) == config.train.global_batch_size
        assert loss == pytest.approx(straight[0][step - 1][1], rel=1e-5)
