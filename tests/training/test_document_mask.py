"""Runs in which a token sees its own document alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megafsdp.data import ByteTokenizer, SampleSource
from megafsdp.models import build_model
from megafsdp.training import Config, train
from megafsdp.training.datasets import build_datasets
from tests.ranks import Ranks
from tests.training.runs import HYBRID, MODEL, rows, tiny, write_corpus

_END = ByteTokenizer.eod


def _run(folder: Path, name: str, model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return tiny(
        folder,
        run={"directory": str(folder / name / "run")},
        data={"document_mask": True, "cache": str(folder / "cache")} | sections.pop("data", {}),
        model={"vocab_size": 320} | model,
        train={"steps": 3} | sections.pop("train", {}),
        **sections,
    )


def _losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


def _loss_alone(config: Config, source: SampleSource, num_samples: int) -> float:
    """Compute the loss of the first samples with the first weights, from each document alone."""
    model = build_model(config.model.resolve(), seed=config.run.seed)
    losses = []
    for sample in range(num_samples):
        tokens = torch.from_numpy(source[sample])
        ends = [0, *((tokens[:-1] == _END).nonzero().flatten() + 1).tolist(), len(tokens) - 1]
        for start, end in pairwise(ends):
            if start < end:
                logits, labels = model(tokens[None, start:end])[0], tokens[start + 1 : end + 1]
                losses.append(F.cross_entropy(logits, labels, reduction="none"))
    # Documents lie across samples, and several in one.
    assert len(losses) > num_samples
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("architecture", ["gpt", "qwen3"])
def test_the_loss_is_that_of_each_document_by_itself(
    ranks: Ranks, tmp_path: Path, architecture: str
) -> None:
    """And training goes on alike on one rank, on two, and with sequences shared out."""
    write_corpus(tmp_path, largest=_END)
    model = {"architecture": architecture}
    found = {}
    for name, num_ranks, sections in [
        ("one", 1, {}),
        ("two", 2, {"train": {"micro_batch_size": 3}}),
        ("shared", 2, {"parallel": {"cp": 2}}),
        ("together", 1, {"data": {"document_mask": False}}),
    ]:
        config = _run(tmp_path, name, model, **sections)
        ranks(num_ranks).run(train, config)
        found[name] = _losses(tmp_path / name)
        if name == "one":
            source = build_datasets(config, vocab_size=320, tokenizer=ByteTokenizer()).train
            wanted = _loss_alone(config, source, config.train.global_batch_size)
            assert found[name][0] == pytest.approx(wanted, rel=1e-5)
    # fp32 sums in another order over three steps of Adam with eps 1e-5.
    assert found["two"] == pytest.approx(found["one"], rel=1e-5)
    assert found["shared"] == pytest.approx(found["one"], rel=1e-5)
    assert abs(found["together"][0] - found["one"][0]) > 1e-4


def test_evaluations_tell_documents_apart_too(ranks: Ranks, tmp_path: Path) -> None:
    """Of weights that training has hardly moved: the loss of all held-out documents alone."""
    write_corpus(tmp_path, largest=_END)
    config = _run(tmp_path, "one", MODEL, optimizer={"lr": 1e-12})
    ranks(1).run(train, config)
    (found,) = [row for row in rows(tmp_path / "one") if "validation_loss" in row]
    held_out = build_datasets(config, vocab_size=320, tokenizer=ByteTokenizer()).validation
    assert held_out is not None
    wanted = _loss_alone(config, held_out, len(held_out))
    assert found["validation_loss"] == pytest.approx(wanted, rel=1e-5)


def test_ranks_that_share_a_hybrid_evaluate_it_alike(ranks: Ranks, tmp_path: Path) -> None:
    """On one rank and on two that share layers and experts out."""
    write_corpus(tmp_path, largest=_END)
    found = []
    for name, num_ranks, parallel in [("one", 1, {}), ("more", 2, {"tp": 2, "ep": 2})]:
        config = _run(tmp_path, name, MODEL | HYBRID, parallel=parallel, train={"steps": 1})
        ranks(num_ranks).run(train, config)
        found.append([row for row in rows(tmp_path / name) if "validation_loss" in row])
    assert found[0] and found[0][-1].keys() == found[1][-1].keys()
    for one, more in zip(*found, strict=True):
        assert more["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
