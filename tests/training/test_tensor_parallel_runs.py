"""Whole runs whose layers or sequences are shared out: data-parallel ranks, and the next degree."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafsdp.training import Config, train
from megafsdp.training.step.evaluation import EvaluationResult
from tests.ranks import Ranks
from tests.training.runs import rows, tiny, write_corpus

_MODEL = {"num_attention_heads": 4, "num_query_groups": 2, "head_dim": 8}


@dataclass
class _Seen:
    """What one rank saw of a run, step by step."""

    losses: list[float]
    norms: list[float]
    samples: list[tuple[int, ...]]
    draws: list[tuple[float, float, float]]
    evaluation: EvaluationResult | None
    warnings: list[str]


def _train(config: Config) -> _Seen:
    seen = _Seen([], [], [], [], None, [])

    def look(step: int, result: object) -> None:
        seen.losses.append(result.loss)
        seen.norms.append(result.grad_norm)
        seen.samples.append(result.sample_ids)
        seen.draws.append((random.random(), float(np.random.random()), torch.rand(()).item()))

    with pytest.MonkeyPatch.context() as patch:
        logger = logging.getLogger("megafsdp.checkpoint")
        patch.setattr(logger, "warning", lambda text, *parts: seen.warnings.append(text % parts))
        seen.evaluation = train(config, on_step=look).evaluation
    return seen


def _config(folder: Path, steps: int, **degrees: int) -> Config:
    # Norms of this model are about 0.9: every step is clipped.
    return tiny(
        folder,
        model=_MODEL,
        parallel=degrees,
        optimizer={"clip_norm": 0.5},
        train={"steps": steps},
        schedule={"kind": "constant"},
        data={"num_samples": 72},
    )


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[_Seen]:
    """Return what two data-parallel ranks see of six steps."""
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    return ranks(2).run(_train, _config(folder, steps=6))


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_run_at_degree_2_is_that_at_1_and_goes_on_there(
    ranks: Ranks, tmp_path: Path, whole: list[_Seen], axis: str
) -> None:
    """Ranks 2d and 2d + 1 read and draw what rank d does alone; losses differ by rounding.

    The tolerance is that of fp32 sums over ranks in another order. After a resume at another degree
    the samples are the next ones, and only the random states begin anew.
    """
    write_corpus(tmp_path)
    first = ranks(4).run(_train, _config(tmp_path, steps=3, **{axis: 2}))
    rest = ranks(2).run(_train, _config(tmp_path, steps=6))
    for rank, seen in enumerate(first):
        alone = whole[rank // 2]
        assert seen.samples == alone.samples[:3]
        assert seen.draws == alone.draws[:3]
        assert seen.losses == pytest.approx(alone.losses[:3], rel=1e-5)
        assert seen.norms == pytest.approx(alone.norms[:3], rel=1e-5)
        assert seen.evaluation is not None
        assert seen.evaluation.num_tokens == whole[0].evaluation.num_tokens
        # The same bits, so that copies cannot drift apart.
        assert (seen.losses, seen.norms) == (first[0].losses, first[0].norms)
    assert first[0].draws != first[2].draws
    for seen, alone in zip(rest, whole, strict=True):
        assert seen.samples == alone.samples[3:]
        assert seen.losses == pytest.approx(alone.losses[3:], rel=1e-5)
        assert seen.evaluation.loss == pytest.approx(alone.evaluation.loss, rel=1e-5)
        (warning,) = seen.warnings
        assert "saved by 4 ranks and is loaded by 2" in warning
    assert whole[0].losses[-1] < whole[0].losses[0] - 0.3
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]


_CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "recomputed": {
        "activation_checkpointing": {"mode": "selective"},
        "parallel": {"dp_outer": 2, "outer_strategy": "optim"},
    },
    "muon": {"optimizer": {"kind": "muon"}, "parallel": {"strategy": "optim_grads"}},
    "offloaded": {
        "model": {"architecture": "gpt", "tie_embeddings": False},
        "optimizer": {"offload_fraction": 0.5},
        "train": {"micro_batch_size": 2},
    },
}


def _figures_of_each(folder: Path, tp: int) -> dict[str, list[tuple[float, float]]]:
    """Return losses and norms of two steps of a run of each choice."""
    figures: dict[str, list[tuple[float, float]]] = {}
    for name, choice in _CHOICES.items():
        sections = {section: dict(values) for section, values in choice.items()}
        sections["model"] = _MODEL | sections.get("model", {})
        sections["parallel"] = {**sections.get("parallel", {}), "tp": tp}
        sections["train"] = {**sections.get("train", {}), "steps": 2}
        sections["optimizer"] = {**sections.get("optimizer", {}), "clip_norm": 0.5}
        sections["run"] = {"directory": str(folder / f"{name}{tp}")}
        seen: list[tuple[float, float]] = []
        train(
            tiny(folder, **sections),
            on_step=lambda step, result, seen=seen: seen.append((result.loss, result.grad_norm)),
        )
        figures[name] = seen
    return figures


def test_choices_of_the_configuration_mean_the_same_at_tp_2(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and clipped norms are those without tp, up to fp32 sums in another order."""
    write_corpus(tmp_path)
    wanted = ranks(2).run(_figures_of_each, tmp_path, 1)[0]
    for found in ranks(4).run(_figures_of_each, tmp_path, 2):
        for name, figures in wanted.items():
            assert sum(found[name], ()) == pytest.approx(sum(figures, ()), rel=1e-5), name
