"""What the doctor finds, and what it says is lost."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafsdp.training.process import doctor
from megafsdp.training.process.doctor import examine, is_installed


def _state() -> dict[str, str]:
    return {finding.name: finding.describe() for finding in examine()}


def test_everything_is_looked_at() -> None:
    """torch, backends, GPUs, compiler, native modules, numba and the optional packages."""
    found = set(_state())
    assert {"python", "torch", "gloo", "nccl", "compiler", "numba", "wandb", "vl_convert"} <= found
    assert {"native", "native CUDA"} <= found
    assert any(name.startswith("GPU") for name in found)


def test_loss_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is marked, with what it costs; the rest stays ok."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    state = _state()
    assert state["native"].startswith("lost")
    assert "megafsdp._csrc is not used" in state["native"]
    assert "megafsdp._cuda is not used" in state["native CUDA"]
    assert "cannot be built" in state["compiler"]
    assert "several times slower" in state["numba"]
    assert state["gloo"].startswith("ok")


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism exchanges activations in every layer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpu = SimpleNamespace(name="H100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert _state()["GPU links"].startswith("ok")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    links = _state()["GPU links"]
    assert links.startswith("lost") and "between GPUs 1 and 2: parallel.tp" in links


def test_kernels_of_linear_attention_are_missed_on_gpus_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU torch's operators are all that there is."""
    monkeypatch.setattr(doctor, "is_installed", lambda package: False)
    for has_gpu, mark in ((False, "ok"), (True, "lost")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        state = _state()
        for name in ("fla", "causal_conv1d"):
            assert state[name].startswith(mark) and "not installed" in state[name]


def test_a_folder_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs of wandb leave a folder of its name in the working directory."""
    (tmp_path / "megafsdp_no_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("megafsdp_no_package") is not None
    assert not is_installed("megafsdp_no_package")
    assert is_installed("torch") and not is_installed("megafsdp_nothing")


def test_a_package_without_metadata_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkout on the path has none."""
    (tmp_path / "megafsdp_bare.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_OPTIONAL", (("megafsdp_bare", ""),))
    on_gpus = (("megafsdp_bare", "megafsdp_bare", ""),)
    monkeypatch.setattr(doctor, "_OPTIONAL_ON_GPUS", on_gpus)
    assert [finding.state[:5] for finding in doctor._packages()] == ["found", "found"]
