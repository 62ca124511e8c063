"""What is logged of gradients beside their norm: the parameter groups' norms, and zeros."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafsdp import FusedAdam, Muon, fully_shard_model
from megafsdp.models import LanguageModel, ModelConfig, build_model, unit_classes
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.training import train
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.train_step import TrainStep
from megafsdp.training.step.update import StatisticsRequest
from tests.ranks import Ranks
from tests.training.runs import MODEL, rows, tiny, write_corpus
from tests.training.step.steps import batches_of, rows_of

CPU = torch.device("cpu")
# Tokens that do not come leave rows of zeros in an embedding that is no output layer.
CONFIG = ModelConfig(**MODEL, tie_embeddings=False)
MAX_NORM, SCALE = 0.25, 1024.0
Statistics = tuple[float, list[float], int | None]


def _model() -> LanguageModel:
    return build_model(CONFIG, seed=5)


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if (p.ndim > 1) is flag]} for flag in (True, False)]


def _make(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "FusedAdam":
        return FusedAdam(_groups(model), max_grad_norm=MAX_NORM)
    if kind == "Muon":
        matrices, vectors = _groups(model)
        return Muon([{**matrices, "use_muon": True}, {**vectors, "use_muon": False}])
    return torch.optim.AdamW(_groups(model), fused=True)


def _statistics(kind: str, scale: float | None, strategy: str, is_wanted: bool) -> Statistics:
    model = fully_shard_model(_model(), unit_classes(CONFIG), strategy=strategy)
    step = TrainStep(
        model,
        _make(kind, model),
        device=CPU,
        clip_norm=MAX_NORM,
        skips_nonfinite=False,
        max_skips=0,
        stop=StopRequest(CPU),
        scaler=None if scale is None else LossScaler(ScaleRule.constant(scale)),
    )
    batches = batches_of(0, dist.get_rank(), dist.get_world_size())
    result = step(batches, wanted=StatisticsRequest(group_norms=is_wanted, num_zeros=is_wanted))
    found = result.statistics
    return result.grad_norm, list(found.group_norms), found.num_zeros


@functools.cache
def _wanted() -> Statistics:
    """Measure plain gradients of the whole batch, elsewhere than here."""
    model = _model()
    tokens = rows_of(0, 2).flatten(0, 2)
    model(tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), tokens.shape[1] - 1)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [
        torch.cat([g.flatten() for g in grads if (g.ndim > 1) is flag]).norm().item()
        for flag in (True, False)
    ]
    zeros = sum(int((grad == 0).sum()) for grad in grads)
    return torch.tensor(norms).norm().item(), norms, zeros


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("kind", ["FusedAdam", "AdamW", "Muon"])
def test_statistics_are_of_unscaled_unclipped_gradients(
    ranks: Ranks, kind: str, scale: float | None
) -> None:
    """As plain torch has them for the whole batch, whoever unscales and clips, on all ranks."""
    norm, norms, zeros = _wanted()
    assert norm > 2 * MAX_NORM
    assert zeros
    for strategy in ("no_shard", "optim_grads_params"):
        both = ranks(2).run(_statistics, kind, scale, strategy, True)
        assert both[0] == both[1]
        found_norm, found_norms, found_zeros = both[0]
        assert found_norm == pytest.approx(norm, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert found_zeros == zeros


def test_nothing_is_measured_that_is_not_logged(ranks: Ranks) -> None:
    """Unless asked, a step has no statistics."""
    for _, norms, zeros in ranks(2).run(_statistics, "FusedAdam", None, "optim", False):
        assert (norms, zeros) == ([], None)


def _rows_of_run(folder: Path, fraction: float) -> list[dict[str, Any]]:
    sections = {
        "model": {"tie_embeddings": False},
        "optimizer": {"offload_fraction": fraction, "clip_norm": MAX_NORM},
        "logging": {"interval_steps": 2, "group_grad_norms": True, "num_zero_grads": True},
    }
    train(tiny(folder, **sections))
    return [row for row in rows(folder) if "loss" in row]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_run_logs_them_wherever_its_optimizer_lives(
    ranks: Ranks, tmp_path: Path, fraction: float
) -> None:
    """In the rows of the first, the last and every second step; offloading changes no bit."""
    found = []
    for name, share in (("here", 0.0), ("host", fraction)):
        folder = tmp_path / name
        folder.mkdir()
        write_corpus(folder)
        found.append(ranks(2).run(_rows_of_run, folder, share)[0])
    assert [row["step"] for row in found[0]] == [1, 2, 4, 6]
    for here, host in zip(*found, strict=True):
        names = ("grad_norm", "grad_norm/0", "grad_norm/1", "num_zero_grads")
        assert [here[name] for name in names] == [host[name] for name in names]
        norms = torch.tensor([here["grad_norm/0"], here["grad_norm/1"]])
        assert norms.norm().item() == pytest.approx(here["grad_norm"], rel=1e-5)
        assert here["num_zero_grads"] > 0


def test_megatrons_line_has_zeros_where_megatron_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the gradient norm and the skipped iterations; not there unless asked for."""
    write_corpus(tmp_path)
    for is_wanted in (True, False):
        logging = {"style": "megatron", "num_zero_grads": is_wanted}
        run = {"directory": str(tmp_path / f"{is_wanted}")}
        train(tiny(tmp_path, run=run, logging=logging, train={"steps": 1}))
        parts = [part.strip() for part in capsys.readouterr().out.split("|")]
        position = next(i for i, part in enumerate(parts) if part.startswith("grad norm:"))
        assert parts[position + 1].startswith("num zeros:") is is_wanted
