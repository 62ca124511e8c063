"""Whole runs whose experts are shared out: losses, loads, biases, and the next degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.training import Config, train
from tests.ranks import Ranks
from tests.training.runs import HYBRID, MIXTURE, rows, stored_tensors, tiny, write_corpus

Figures = list[tuple[float, float]]
_RATE = 0.01


def _config(folder: Path, steps: int, model: dict[str, Any], **degrees: int) -> Config:
    # Norms of this model are about 0.9: every step is clipped.
    return tiny(
        folder,
        model={"router_balance": "bias", "router_bias_update_rate": _RATE, **model},
        parallel=degrees,
        # At a rate of 1e-2, Adam makes of a difference in the last bit one of 1e-5 in five steps,
        # where keys of the linear attention, which are normalized, are small.
        optimizer={"clip_norm": 0.5, "lr": 3e-3},
        train={"steps": steps},
        schedule={"kind": "constant"},
        data={"num_samples": 72},
        checkpoint={"interval_steps": 3, "keep_last": None},
    )


def _train(config: Config) -> Figures:
    figures: Figures = []
    train(config, on_step=lambda step, result: figures.append((result.loss, result.grad_norm)))
    return figures


def _biases(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = stored_tensors(folder / "run/checkpoints", step)
    return {name: each for name, each in tensors.items() if name.endswith("expert_bias")}


@pytest.mark.parametrize(
    ("model", "axes"),
    [(MIXTURE, ("tp",)), (HYBRID, ("tp", "cp"))],
    ids=["qwen3_moe", "qwen3_next"],
)
def test_a_run_with_shared_experts_is_that_without_and_goes_on_at_another_degree(
    ranks: Ranks, tmp_path: Path, model: dict[str, Any], axes: tuple[str, ...]
) -> None:
    """Four ranks with tp or cp 2 and ep 2, then two with ep 2: losses and norms of two without.

    The tolerance is that of fp32 sums in another order. Loads are counts, so that the biases in the
    checkpoints are equal bit by bit, the last ones after moves in both halves of the run.
    """
    for name in ("whole", *axes):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name)
    whole = ranks(2).run(_train, _config(tmp_path / "whole", 6, model))[0]
    loads = [row["expert_max_load"] for row in rows(tmp_path / "whole") if "loss" in row]
    assert all(1.0 < load <= 2.0 for load in loads)
    assert whole[-1][0] < whole[0][0] - 0.3
    for axis in axes:
        parts = tmp_path / axis
        first = ranks(4).run(_train, _config(parts, 3, model, ep=2, **{axis: 2}))
        rest = ranks(2).run(_train, _config(parts, 6, model, ep=2))
        for seen in first:
            assert sum(seen, ()) == pytest.approx(sum(whole[:3], ()), rel=1e-6), axis
            assert seen == first[0], axis
        for seen in rest:
            assert sum(seen, ()) == pytest.approx(sum(whole[3:], ()), rel=1e-6), axis
        for step in (3, 6):
            wanted, found = _biases(tmp_path / "whole", step), _biases(parts, step)
            assert len(found) == 2
            assert found.keys() == wanted.keys()
            for name, bias in found.items():
                assert torch.equal(bias, wanted[name]), (axis, name)
                assert 0 < bias.abs().max() <= step * _RATE * 1.0001
        assert [row["expert_max_load"] for row in rows(parts) if "loss" in row] == loads, axis


_DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "balance": ({"model": {"router_balance": "aux_loss"}}, "model.router_balance: 'bias' ->"),
    "mesh": ({"parallel": {"ep": 2}}, "parallel.ep: 1 -> 2 between rank 0 and rank 1"),
}


def _train_differently(folder: Path, name: str) -> str:
    model = MIXTURE | {"router_balance": "bias"}
    sections: dict[str, dict[str, Any]] = {"model": dict(model), "parallel": {}}
    if dist.get_rank() == 1:
        for section, values in _DIFFERENT[name][0].items():
            sections[section] |= values
    with pytest.raises(ConfigError) as caught:
        train(tiny(folder, **sections))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_optimizers_of_torch_save_the_states_of_shared_experts(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Their lists have experts' rows beside whole replicas, which come first."""
    optimizer = {"kind": kind, "implementation": "foreach"}
    stored = {}
    for name, degrees in (("whole", {}), ("parts", {"ep": 2})):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name)
        config = tiny(
            tmp_path / name,
            model=MIXTURE,
            parallel={"strategy": "no_shard", **degrees},
            optimizer=optimizer,
            train={"steps": 2},
        )
        ranks(2).run(train, config)
        stored[name] = stored_tensors(tmp_path / name / "run/checkpoints", 2)
    assert stored["parts"].keys() == stored["whole"].keys()
    assert any("experts" in key and "optimizer" in key for key in stored["parts"])
    for key, tensor in stored["parts"].items():
        # Sums over ranks in another order; Adam divides what is near its eps by as little.
        torch.testing.assert_close(
            tensor, stored["whole"][key], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", _DIFFERENT)
def test_ranks_of_different_configurations_raise_alike(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Before anything is built, with the value and the ranks named; folders may differ."""
    write_corpus(tmp_path)
    first, second = ranks(2).run(_train_differently, tmp_path, name)
    assert first == second
    assert _DIFFERENT[name][1] in first


def _resume_refused(folder: Path, model: dict[str, Any]) -> str:
    train(tiny(folder, model=HYBRID, train={"steps": 1}))
    with pytest.raises(CheckpointError) as caught:
        train(tiny(folder, model=HYBRID | model, train={"steps": 2}))
    return str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_experts": 6},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"router_balance": "bias"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_checkpoint_of_another_mixture_is_refused_by_name(
    ranks: Ranks, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Its tensors do not fit; the message names the value of the configuration that made them."""
    write_corpus(tmp_path)
    (message,) = ranks(1).run(_resume_refused, tmp_path, changed)
    assert f"model.{next(iter(changed))}: " in message
