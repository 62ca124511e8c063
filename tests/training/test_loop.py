"""Whole runs of a tiny model: their files, their ends, and what they do when started again."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafsdp import full_state_dict, fully_shard_model
from megafsdp.errors import ConfigError, DataError
from megafsdp.models import ActivationCheckpointing, LanguageModel, build_model
from megafsdp.training import Config, RunSummary, config_from_dict, evaluation, loop, train
from megafsdp.training.step import StepResult
from megafsdp.training.world import find_world
from tests.ranks import Ranks, RanksError
from tests.training.runs import rows, tiny, write_corpus


def _interrupt(at: int, step: int, result: StepResult) -> None:
    # One rank alone gets the signal; the others must learn of it.
    if step == at and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def _train_until(config: Config, at: int) -> RunSummary:
    return train(config, on_step=functools.partial(_interrupt, at))


def test_run_writes_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of steps and evaluations, configuration, checkpoint, sample and the next command."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, evaluation={"interval_steps": 3, "sample_prompt": "ab"})
    summary = train(config)
    assert (summary.step, summary.consumed_samples, summary.is_finished) == (6, 72, True)
    assert summary.text is not None
    assert summary.text.startswith("ab")
    steps = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s"} <= steps[0].keys()
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[1]["lr"] == 1e-2
    evaluations = [row for row in rows(tmp_path) if "validation_loss" in row]
    assert [row["step"] for row in evaluations] == [3, 6]
    assert evaluations[-1]["bits_per_byte"] > 0
    written = yaml.safe_load((config.run_directory / "config.yaml").read_text())
    assert config_from_dict(written) == config
    assert (config.checkpoint_directory / "iter_0000006").is_dir()
    printed = capsys.readouterr().out
    assert "step 6/6  100.0%" in printed
    assert f"train --config {config.run_directory}/config.yaml" in printed


def test_finished_run_is_evaluated_again(tmp_path: Path) -> None:
    """It trains no further, saves nothing, and its last evaluation is there once."""
    write_corpus(tmp_path)
    config = tiny(tmp_path)
    first, second = train(config), train(config)
    assert second.is_finished
    assert second.step == 6
    assert second.evaluation == first.evaluation
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert len([row for row in rows(tmp_path) if "validation_loss" in row]) == 1


def test_checkpoints_follow_interval_and_retention(tmp_path: Path) -> None:
    """Every second step is saved, the newest two stay, and those that are to be kept."""
    write_corpus(tmp_path)
    section = {"interval_steps": 1, "keep_last": 2, "keep_every": 3}
    config = tiny(tmp_path, checkpoint=section)
    train(config)
    saved = sorted(path.name for path in config.checkpoint_directory.glob("iter_*"))
    assert saved == ["iter_0000003", "iter_0000005", "iter_0000006"]


def test_megatron_style_prints_megatron_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choice of logging.style reaches the printer."""
    write_corpus(tmp_path)
    train(tiny(tmp_path, logging={"style": "megatron"}, train={"steps": 1}))
    assert "iteration        1/       1 | consumed samples:" in capsys.readouterr().out


def test_signal_on_one_rank_stops_all_with_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """The running step is finished, nothing is evaluated, and the run is not finished."""
    write_corpus(tmp_path)
    config = tiny(tmp_path)
    for summary in ranks(2).run(_train_until, config, 2):
        # The signal came after step 2 had agreed, so step 3 carries the news.
        assert (summary.step, summary.is_finished, summary.evaluation) == (3, False, None)
    assert (config.checkpoint_directory / "iter_0000003").is_dir()
    assert rows(tmp_path)[-1]["step"] == 3
    assert ranks(2).run(train, config)[0].is_finished
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def _interrupted_evaluation(config: Config) -> RunSummary:
    """Signal one rank in the first batch of the first evaluation."""
    num_asked = [0]
    plain = evaluation.evaluate

    def evaluate(*parts: Any, should_stop: Any, **options: Any) -> Any:
        def signalling() -> bool:
            num_asked[0] += 1
            if num_asked[0] == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return should_stop()

        return plain(*parts, should_stop=signalling, **options)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("megafsdp.training.loop.evaluate", evaluate)
    try:
        return train(config)
    finally:
        monkeypatch.undo()


def test_signal_during_evaluation_saves(ranks: Ranks, tmp_path: Path) -> None:
    """The step that was evaluated is saved, and evaluated when the run goes on."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, evaluation={"interval_steps": 2})
    for summary in ranks(2).run(_interrupted_evaluation, config):
        assert (summary.step, summary.is_finished, summary.evaluation) == (2, False, None)
    assert (config.checkpoint_directory / "iter_0000002").is_dir()
    assert ranks(2).run(train, config)[0].is_finished
    assert [row["step"] for row in rows(tmp_path) if "validation_loss" in row] == [2, 4, 6]


def test_missing_data_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """No rank hangs, and each says which file."""
    with pytest.raises(RanksError, match=r"train\.idx") as failure:
        ranks(2).run(train, tiny(tmp_path))
    assert set(failure.value.failures) == {0, 1}


def test_small_vocabulary_is_an_error(tmp_path: Path) -> None:
    """A token that has no row in the embedding is found before the first step."""
    write_corpus(tmp_path)
    with pytest.raises(DataError, match=r"token 255.*train\.bin"):
        train(tiny(tmp_path, model={"vocab_size": 250}))


def test_world_that_does_not_fit_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Before any collective: the degrees do not multiply to the number of ranks."""
    write_corpus(tmp_path)
    with pytest.raises(RanksError, match="world size 3") as failure:
        ranks(3).run(train, tiny(tmp_path, parallel={"dp_shard": 2}))
    assert set(failure.value.failures) == {0, 1, 2}
    assert all("ConfigError" in text for text in failure.value.failures.values())


def test_fault_of_the_first_rank_alone_is_raised_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """Only one rank writes the run's folder; the others hear when it cannot."""
    write_corpus(tmp_path)
    (tmp_path / "run").write_text("a file in the folder's place")
    config = tiny(tmp_path, data={"cache": str(tmp_path / "cache")})
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, config)
    assert "FileExistsError" in failure.value.failures[0]
    assert "rank 0: FileExistsError" in failure.value.failures[1]


def _train_without_data_on_one_rank(config: Config) -> RunSummary:
    if dist.get_rank() == 1:
        section = dataclasses.replace(config.data, train=["no/such/file"])
        config = dataclasses.replace(config, data=section)
    return train(config)


def test_fault_of_another_rank_alone_is_raised_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """A file that one machine does not have ends the others before they wait for it."""
    write_corpus(tmp_path)
    with pytest.raises(RanksError) as failure:
        ranks(2).run(_train_without_data_on_one_rank, tiny(tmp_path))
    assert "rank 1: DataError" in failure.value.failures[0]
    assert "DataError" in failure.value.failures[1]


def _losses(ranks: Ranks, num_ranks: int, folder: Path, **sections: dict[str, Any]) -> list[float]:
    """Train the tiny run in a folder of its own beside the shared corpus; return its losses."""
    directory = folder / f"run{len(list(folder.glob('run*')))}"
    run = {"directory": str(directory)} | sections.pop("run", {})
    config = tiny(folder, run=run, data={"cache": str(folder / "cache")}, **sections)
    ranks(num_ranks).run(train, config)
    metrics = (directory / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    return losses


def test_number_of_ranks_does_not_change_the_losses(ranks: Ranks, tmp_path: Path) -> None:
    """One, two and three ranks begin with the same weights and read the same batches.

    The tolerance is that of fp32 sums in another order over six steps of Adam with eps 1e-5.
    """
    write_corpus(tmp_path)
    one, *more = [_losses(ranks, size, tmp_path) for size in (1, 2, 3)]
    for losses in more:
        assert losses == pytest.approx(one, rel=1e-5)


def _mesh_of_run(config: Config) -> tuple[tuple[int, ...], float]:
    """Train, and return the shape of the mesh with the share of the model that this rank holds."""
    found: list[nn.Module] = []
    plain = fully_shard_model

    def watched(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        found.append(model)
        return plain(model, *args, **options)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("megafsdp.training.loop.fully_shard_model", watched)
    try:
        train(config)
    finally:
        monkeypatch.undo()
    parameters = [p for p in found[0].parameters() if isinstance(p, DTensor)]
    local = sum(p.to_local().numel() for p in parameters)
    return parameters[0].device_mesh.shape, local / sum(p.numel() for p in parameters)


# Ranks, options, and the part of the main weights that one rank holds.
STRATEGIES = [
    (2, {"strategy": "no_shard"}, 1),
    (2, {"strategy": "optim"}, 1 / 2),
    (2, {"strategy": "optim_grads"}, 1 / 2),
    (2, {"dp_outer": 2}, 1),
    (2, {"reshard_after_forward": False, "prefetch": 0}, 1 / 2),
    (4, {}, 1 / 4),
    (4, {"dp_outer": 2}, 1 / 2),
    (4, {"dp_outer": 2, "dp_shard": 2, "reshard_after_forward": True}, 1 / 2),
    (4, {"dp_outer": 2, "strategy": "optim"}, 1 / 2),
    (4, {"dp_outer": 2, "strategy": "optim_grads", "prefetch": 2}, 1 / 2),
    (4, {"dp_outer": 4}, 1),
    (4, {"dp_outer": 2, "strategy": "no_shard"}, 1),
    (2, {"dp_outer": 2, "outer_strategy": "optim"}, 1 / 2),
    (4, {"dp_outer": 2, "outer_strategy": "optim"}, 1 / 4),
    (4, {"dp_outer": 4, "outer_strategy": "optim"}, 1 / 4),
    (4, {"reshard_after_forward": 2}, 1 / 4),
    (4, {"dp_outer": 2, "reshard_after_forward": 2}, 1 / 2),
]


@pytest.mark.parametrize(("num_ranks", "parallel", "share"), STRATEGIES)
def test_way_to_divide_does_not_change_the_losses(
    ranks: Ranks, tmp_path: Path, num_ranks: int, parallel: dict[str, Any], share: float
) -> None:
    """Every strategy on every mesh trains as one rank does, and holds the share that it should.

    The tolerance is that of fp32 sums in another order over six steps of Adam with eps 1e-5.
    """
    write_corpus(tmp_path)
    alone = _losses(ranks, 1, tmp_path)
    assert _losses(ranks, num_ranks, tmp_path, parallel=parallel) == pytest.approx(alone, rel=1e-5)
    short = tiny(
        tmp_path,
        run={"directory": str(tmp_path / "short")},
        train={"steps": 1},
        schedule={"kind": "constant"},
        parallel=parallel,
    )
    found = ranks(num_ranks).run(_mesh_of_run, short)
    outer = parallel.get("dp_outer", 1)
    shape = (num_ranks,) if outer == 1 else (outer, num_ranks // outer)
    assert [s for s, _ in found] == [shape] * num_ranks
    # Rows of other tensors may lie on the other side of a cut.
    assert [part for _, part in found] == pytest.approx([share] * num_ranks, rel=0.2)


@pytest.mark.parametrize(
    "choice",
    [
        {"mode": "full"},
        {"mode": "full", "every": 2},
        {"mode": "full", "use_reentrant": True},
        {"mode": "selective"},
    ],
)
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_recomputation_does_not_change_the_losses(
    ranks: Ranks, tmp_path: Path, choice: dict[str, Any], param_dtype: str
) -> None:
    """Six steps on two ranks have the same losses to the last bit."""
    write_corpus(tmp_path)
    sections = {"precision": {"param_dtype": param_dtype}}
    wanted = _losses(ranks, 2, tmp_path, **sections)
    assert _losses(ranks, 2, tmp_path, activation_checkpointing=choice, **sections) == wanted


def _choice_of_run(config: Config) -> ActivationCheckpointing:
    """Return what the trained model was told to recompute."""
    found: list[LanguageModel] = []
    plain = build_model

    def watched(*args: Any, **options: Any) -> LanguageModel:
        found.append(plain(*args, **options))
        return found[-1]

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("megafsdp.training.loop.build_model", watched)
    try:
        train(config)
    finally:
        monkeypatch.undo()
    return found[0].activation_checkpointing


def test_recomputation_is_what_the_configuration_says(tmp_path: Path) -> None:
    """The section reaches the model; without it nothing is recomputed."""
    write_corpus(tmp_path)
    assert _choice_of_run(tiny(tmp_path)) == ActivationCheckpointing()
    section = {"mode": "full", "every": 2, "use_reentrant": True}
    config = tiny(
        tmp_path, run={"directory": str(tmp_path / "run2")}, activation_checkpointing=section
    )
    assert _choice_of_run(config) == ActivationCheckpointing("full", 2, True)


def _dtypes_of_run(config: Config) -> set[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of main weights and main gradients at the first step of the optimizer."""
    found: set[tuple[torch.dtype, torch.dtype]] = set()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.update((p.dtype, p.grad.dtype) for p in parameters if p.grad is not None)

    handle = register_optimizer_step_pre_hook(look)
    try:
        train(config)
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("precision", "weights", "gradients"),
    [
        ({}, torch.float32, torch.float32),
        ({"param_dtype": "bf16"}, torch.float32, torch.float32),
        ({"param_dtype": "bf16", "main_grads_dtype": "bf16"}, torch.float32, torch.bfloat16),
        ({"param_dtype": "bf16", "main_params_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
        (
            {"main_params_dtype": "bf16", "main_grads_dtype": "fp32"},
            torch.bfloat16,
            torch.float32,
        ),
    ],
)
def test_main_dtypes_are_what_the_configuration_says(
    ranks: Ranks,
    tmp_path: Path,
    precision: dict[str, str],
    weights: torch.dtype,
    gradients: torch.dtype,
) -> None:
    """What the optimizer sees; main gradients follow main weights unless they are named."""
    write_corpus(tmp_path)
    # torch's AdamW takes gradients of the weights' dtype only.
    optimizer = {"kind": "sgd", "implementation": "foreach"}
    config = tiny(tmp_path, precision=precision, optimizer=optimizer)
    assert ranks(2).run(_dtypes_of_run, config) == [{(weights, gradients)}] * 2


def test_no_validation_data_means_no_evaluation(tmp_path: Path) -> None:
    """A run without held-out data ends well."""
    write_corpus(tmp_path)
    summary = train(tiny(tmp_path, data={"validation": []}, evaluation={"interval_steps": 2}))
    assert summary.is_finished
    assert summary.evaluation is None


def test_bf16_run_learns(ranks: Ranks, tmp_path: Path) -> None:
    """Compute in bf16 with fp32 main weights goes down the same way."""
    write_corpus(tmp_path)
    ranks(2).run(train, tiny(tmp_path, precision={"param_dtype": "bf16"}))
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_other_architectures_train(tmp_path: Path, kind: str) -> None:
    """Every architecture runs through the same loop."""
    write_corpus(tmp_path)
    sizes = {"num_query_groups": 2} if kind == "gpt" else {}
    assert train(tiny(tmp_path, model={"architecture": kind, **sizes})).is_finished


def test_bad_configuration_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A run that cannot start leaves no folder behind."""
    write_corpus(tmp_path)
    with pytest.raises(ConfigError):
        train(tiny(tmp_path, optimizer={"lr": -1.0}))
    assert not (tmp_path / "run").exists()


def _weights_of_a_run(folder: Path) -> None:
    config = tiny(folder)
    model_config = config.model.resolve()
    before = torch.get_rng_state()
    model = loop._build_sharded(config, model_config, find_world("cpu"))
    assert torch.equal(torch.get_rng_state(), before), "the rank's own random state is left alone"
    reference = build_model(model_config, seed=config.run.seed)
    state = full_state_dict(model)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_initial_weights_are_those_of_the_seed(ranks: Ranks, tmp_path: Path) -> None:
    """Initialising the divided model gives what building the whole one gives."""
    write_corpus(tmp_path)
    ranks(2).run(_weights_of_a_run, tmp_path)
