"""Bytes of host and device that a dry run says of an offloaded optimizer, against real steps."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp.device import host_threads
from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.meta_engine import PlannedUnit
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.offload import hybrid
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.training import Config
from megafsdp.training.cli.main import main
from megafsdp.training.config.optimizer_sections import OptimizerSection
from megafsdp.training.dry_run.bytes import groups_to_offload, state_nbytes
from megafsdp.training.dry_run.dry_run import DryRunReport, dry_run
from tests.device.stand_in_cudart import stand_in
from tests.ranks import Ranks
from tests.training.runs import tiny
from tests.training.step.steps import train_configured

Bytes = dict[Category, int]


def _config(directory: Path, **sections: Any) -> Config:
    # Without a limit no step that has begun early is given up.
    optimizer = {"offload_fraction": 0.5, "speculate": False, "clip_norm": None}
    given = {
        "optimizer": optimizer | sections.pop("optimizer", {}),
        "model": {"num_layers": 3} | sections.pop("model", {}),
        "precision": {"param_dtype": "bf16"} | sections.pop("precision", {}),
    }
    return tiny(directory, **given, **sections)


def _train_steps(config: Config) -> tuple[Bytes, Bytes, int, Bytes, int, float]:
    """Return what the second step cost: of the device at rest and at its peak, of the host."""
    model, optimizer, _ = train_configured(config)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    optimizer.synchronize()
    device, host = model._fsdp_unit().ledger, optimizer.host_ledger
    figures = dict(device.live), dict(device.peak), device.peak_total
    return *figures, dict(host.live), optimizer.host_nbytes, optimizer.offloaded_fraction


def _assert_as_said(report: DryRunReport, measured: list[tuple[Any, ...]]) -> None:
    said, host = report.footprint, report.host
    for resting, peak, peak_total, on_host, host_nbytes, _ in measured:
        for category in Category:
            assert said.resting[category] == resting[category], category
            assert said.peak[category] == peak[category], category
        assert said.peak_total == peak_total
        num_copies = 2 if host.second_copy else 1
        assert num_copies * host.main_weight == on_host[Category.MAIN_WEIGHT]
        assert num_copies * host.optimizer_state == on_host[Category.OPTIMIZER_STATE]
        assert host.total == host_nbytes
    assert host.total > 0


CASES = [
    ("no_shard", 1.0, 1, True, "fp32"),
    ("no_shard", 1.0, 1, True, "bf16"),
    ("optim", 0.5, 0, True, "bf16"),
    ("optim_grads", 0.3, 2, True, "fp32"),
    ("optim_grads_params", 0.5, 1, True, "bf16"),
    ("optim_grads_params", 1.0, 2, False, "fp32"),
    ("optim_grads_params", 0.7, 0, True, "bf16"),
]
OTHER_DTYPE = {"fp32": "bf16", "bf16": "fp32"}
OTHER_CASES = [(*case, OTHER_DTYPE[dtype]) for *case, dtype in CASES[2:]]


@pytest.mark.parametrize(
    ("strategy", "fraction", "prefetch", "overlap", "param_dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix("dry-run")) for case in OTHER_CASES)],
)
def test_bytes_of_host_and_device_are_those_of_real_steps(
    ranks: Ranks,
    tmp_path: Path,
    strategy: str,
    fraction: float,
    prefetch: int,
    overlap: bool,
    param_dtype: str,
) -> None:
    """Both ledgers of training steps on two ranks, to the byte."""
    config = _config(
        tmp_path,
        parallel={"strategy": strategy, "prefetch": prefetch},
        precision={"param_dtype": param_dtype},
        optimizer={"offload_fraction": fraction, "offload_overlap": overlap},
        train={"micro_batch_size": 3},
    )
    measured = ranks(2).run(_train_steps, config)
    _assert_as_said(dry_run(config, 2), measured)
    assert all(figures[-1] == pytest.approx(fraction, abs=0.2) for figures in measured)


@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
def test_bytes_over_two_axes_are_those_of_real_steps(
    ranks: Ranks, tmp_path: Path, outer_strategy: str
) -> None:
    """Replicas of the host's part, or pieces of it that are joined over the outer axis."""
    outer = {"dp_outer": 2, "outer_strategy": outer_strategy}
    config = _config(
        tmp_path, model={"num_layers": 2}, parallel=outer, train={"micro_batch_size": 3}
    )
    _assert_as_said(dry_run(config, 4), ranks(4).run(_train_steps, config))


@pytest.mark.parametrize(
    ("strategy", "speculate", "overlap", "has_copy"),
    [
        ("optim_grads_params", True, True, True),
        ("optim_grads_params", "auto", True, True),
        ("optim", "auto", True, True),
        ("optim_grads_params", "auto", False, False),
        ("no_shard", True, True, False),
    ],
)
def test_steps_that_begin_early_have_a_second_copy(
    ranks: Ranks,
    tmp_path: Path,
    strategy: str,
    speculate: bool | str,
    overlap: bool,
    has_copy: bool,
) -> None:
    """Of main weights and moments, where gradients are divided; bytes as in real steps."""
    choices = {"speculate": speculate, "offload_overlap": overlap}
    config = _config(
        tmp_path, model={"num_layers": 2}, parallel={"strategy": strategy}, optimizer=choices
    )
    report = dry_run(config, 2)
    three = report.host.main_weight + report.host.optimizer_state
    assert report.host.second_copy == has_copy * three
    _assert_as_said(report, ranks(2).run(_train_steps, config))


def _locked_nbytes(config: Config) -> tuple[int, int, int]:
    """Return what the optimizer says is locked, what is, and what is left without the model."""
    with pytest.MonkeyPatch.context() as patch:
        cudart = stand_in(patch)
        patch.setattr(hybrid, "can_be_pinned", lambda device: True)
        model, optimizer, _ = train_configured(config)
        assert isinstance(optimizer, HybridDeviceOptimizer)
        optimizer.synchronize()
        said, locked = optimizer.pinned_nbytes, sum(cudart.live.values())
        del model, optimizer
        gc.collect()
        return said, locked, sum(cudart.live.values())


@pytest.mark.parametrize("param_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("speculate", [True, False])
def test_pinned_bytes_are_those_that_real_steps_lock(
    ranks: Ranks, tmp_path: Path, speculate: bool, param_dtype: str
) -> None:
    """To the byte, by a stand-in for CUDA's call; all are given back with model and optimizer."""
    choices = {"speculate": speculate, "offload_fraction": 1.0}
    config = _config(tmp_path, precision={"param_dtype": param_dtype}, optimizer=choices)
    report = dry_run(replace(config, run=replace(config.run, device="auto")), 2)
    host = report.host
    assert ranks(2).run(_locked_nbytes, config) == [(host.pinned, host.pinned, 0)] * 2
    # Each of a group's buffers begins at a multiple of 256 bytes, and the norm's sum is one more.
    groups = [g for unit in report.units for g in unit.groups * unit.count if g.is_offloaded]
    wanted = 0
    for group in groups:
        numel = group.layout.shard_numel
        itemsizes = [4, 4, 4] * (2 if speculate else 1) + [4] + [2] * (param_dtype == "bf16")
        wanted += 256 + sum(-(-numel * itemsize // 256) * 256 for itemsize in itemsizes)
    assert host.pinned == wanted
    assert wanted > host.total + 256 * len(groups), "some buffer is rounded up"
    assert json.loads(report.to_json())["host_pinned_nbytes"] == wanted
    assert "pinned of these" in report.describe()


def test_nothing_is_pinned_for_a_cpu(tmp_path: Path) -> None:
    """Of a configuration that says so; on auto a dry run plans for a GPU."""
    report = dry_run(_config(tmp_path), 2)
    assert report.host.pinned == 0 < report.host.total
    assert "pinned" not in report.describe()


@pytest.mark.parametrize(
    ("given", "device", "wanted"), [(7, "auto", 7), (None, "auto", 5), (None, "cpu", 1)]
)
def test_threads_of_the_host_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, device: str, wanted: int
) -> None:
    """The configured number, or this machine's share of a rank."""
    monkeypatch.setattr(host_threads, "share_of_cores", lambda: 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    config = _config(tmp_path, optimizer={"host_threads": given}, run={"device": device})
    report = dry_run(config, 2)
    assert json.loads(report.to_json())["host_threads"] == wanted
    assert f"stepped by {wanted} thread" in report.describe()


def _names_on_host(config: Config) -> set[str]:
    model, _, _ = train_configured(config)
    owned = {name: group_of(parameter) for name, parameter in model.named_parameters()}
    held = [name for name, group in owned.items() if group is not None and group.host_memory]
    return {".".join(name.split(".")[:3]) for name in held}


def test_groups_are_chosen_in_the_order_of_the_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """A learning rate of its own puts the first layer behind the others."""
    multipliers = {"*layers.0.*": 0.5, "*": 2.0}
    config = _config(tmp_path, optimizer={"offload_fraction": 0.3, "lr_multipliers": multipliers})
    on_host = [u for u in dry_run(config, 2).units if any(g.is_offloaded for g in u.groups)]
    assert [(unit.name, unit.count) for unit in on_host] == [("decoder.layers.0", 1)]
    assert ranks(2).run(_names_on_host, config) == [{"decoder.layers.0"}] * 2


def test_frozen_groups_have_no_place_and_no_states(tmp_path: Path) -> None:
    """No optimizer has them."""
    config = _config(tmp_path)
    units = [PlannedUnit(unit.name, unit.groups) for unit in dry_run(config, 2).units]
    frozen = [
        PlannedUnit(unit.name, tuple(replace(g, is_trainable=False) for g in unit.groups))
        for unit in units
    ]
    assert groups_to_offload(frozen, {}, 1.0) == []
    device = OptimizerSection()
    assert (
        state_nbytes(frozen, device, config.muon)
        == 0
        < state_nbytes(
            [
                PlannedUnit(u.name, tuple(replace(g, is_offloaded=False) for g in u.groups))
                for u in units
            ],
            device,
            config.muon,
        )
    )


def test_auto_is_counted_as_all(tmp_path: Path) -> None:
    """The table says so; the bytes are those of everything on the host."""
    auto = dry_run(_config(tmp_path, optimizer={"offload_fraction": "auto"}), 2)
    assert auto.host == dry_run(_config(tmp_path, optimizer={"offload_fraction": 1.0}), 2).host
    assert "offload_fraction auto is counted as 1, its most" in auto.describe()
    none = dry_run(_config(tmp_path, optimizer={"offload_fraction": 0.0}), 2)
    assert "host" not in none.describe()
    assert json.loads(none.to_json())["host_total_nbytes"] == 0


def test_json_and_table_of_two_large_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """30 bytes a parameter with both copies, a gradient and a cast; two stay on the device."""
    words = ["--model.preset=qwen3-8b", "--model.num_layers=2", "--dry-run=64"]
    words += [
        "--precision.param_dtype=bf16",
        "--train.global_batch_size=64",
        "--optimizer.offload_fraction=1",
    ]
    assert main(["train", *words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    groups = [(unit["count"], group) for unit in content["units"] for group in unit["groups"]]
    assert all(group["is_offloaded"] for _, group in groups)
    numel = sum(count * group["shard_numel"] for count, group in groups)
    assert content["host_memory"] == {
        "main weight": 4 * numel,
        "optimizer state": 8 * numel,
        "second copy": 12 * numel,
        "main grad": 4 * numel,
        "copied back": 2 * numel,
    }
    assert content["host_total_nbytes"] == 30 * numel
    memory = content["memory"]
    assert memory["main weight"]["peak_nbytes"] == memory["optimizer state"]["peak_nbytes"] == 0
    assert memory["compute weight"] == {"resting_nbytes": 2 * numel, "peak_nbytes": 2 * numel}
    assert main(["train", *words, "--optimizer.speculate=false"]) == 0
    printed = capsys.readouterr().out
    assert "host memory of a rank" in printed and "second copy" not in printed
    assert printed.count(", on the host") == 2
