"""Threads of the host: a rank's share of the cores, near its GPU."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafsdp.device import host_threads
from megafsdp.device.host_threads import (
    check_host_threads,
    cores_near,
    default_host_threads,
    is_core_shared,
    share_of_cores,
    stay_near,
    torch_threads,
    zero_by_threads,
)

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Ask the machine anew, in each test and after it."""
    for asked in (share_of_cores, is_core_shared, cores_near):
        asked.cache_clear()
    yield
    for asked in (share_of_cores, is_core_shared, cores_near):
        asked.cache_clear()


def _machine(
    patch: pytest.MonkeyPatch, own: set[int], launcher: set[int] | None, num_ranks: str | None
) -> None:
    def affinity(process: int) -> set[int]:
        if process == 0:
            return own
        assert process == os.getppid()
        if launcher is None:
            raise PermissionError
        return launcher

    patch.setattr(os, "sched_getaffinity", affinity)
    patch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if num_ranks is not None:
        patch.setenv("LOCAL_WORLD_SIZE", num_ranks)


_ALL, _HALF = set(range(128)), set(range(64))


@pytest.mark.parametrize(
    ("own", "launcher", "num_ranks", "wanted"),
    [
        (_ALL, _ALL, "8", 16),
        (_HALF, _ALL, "8", 16),
        (set(range(16)), _ALL, "8", 16),
        (set(range(10)), _ALL, "8", 10),
        (_HALF, _HALF, "8", 8),
        (_HALF, None, "8", 8),
        (_ALL, _ALL, None, 128),
        (_ALL, _ALL, "x", 128),
        (_HALF, _ALL, None, 64),
        ({0, 1}, {0, 1}, "8", 1),
        (_ALL, _ALL, "0", 128),
    ],
)
def test_ranks_of_a_machine_divide_its_cores(
    monkeypatch: pytest.MonkeyPatch,
    own: set[int],
    launcher: set[int] | None,
    num_ranks: str | None,
    wanted: int,
) -> None:
    """Whatever they are bound to; torch's own number counts for models on a CPU alone."""
    _machine(monkeypatch, own, launcher, num_ranks)
    assert share_of_cores() == wanted == default_host_threads("cuda")
    assert default_host_threads("cpu") == torch.get_num_threads()


@pytest.mark.parametrize(
    ("num_cores", "launcher", "num_ranks", "wanted"),
    [
        (4, None, "4", False),
        (4, None, "5", True),
        (1, {0, 1}, "2", False),
        (1, {0, 1}, "3", True),
        (1, None, None, False),
    ],
)
def test_ranks_beyond_the_cores_share_them(
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    launcher: set[int] | None,
    num_ranks: str | None,
    wanted: bool,
) -> None:
    """A rank that its launcher bound to one of several cores has that one for itself."""
    _machine(monkeypatch, set(range(num_cores)), launcher, num_ranks)
    assert is_core_shared() is wanted


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "4"])
def test_a_number_of_threads_without_meaning_is_refused(given: object) -> None:
    """The message names the argument."""
    with pytest.raises(ValueError, match=r"above 0, got .* here"):
        check_host_threads(given, where="here")


def test_more_threads_than_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They slow each other down, and are the user's choice."""
    _machine(monkeypatch, {0, 1, 2}, None, None)
    check_host_threads(None, where="here")
    check_host_threads(3, where="here")
    assert not caplog.records
    check_host_threads(4, where="here")
    assert [r.getMessage() for r in caplog.records] == ["here is 4, but this process has 3 cores."]


def test_operators_of_torch_use_other_threads_in_a_context() -> None:
    """As many as before afterwards, also after an error."""
    before = torch.get_num_threads()
    with torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
    with pytest.raises(RuntimeError), torch_threads(before + 1):
        raise RuntimeError
    assert torch.get_num_threads() == before


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a system with two nodes, on the second of which the GPU is."""
    gpu = tmp_path / "bus/pci/devices/0001:8a:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    for node, cores in enumerate(["0-3,8-11\n", "4-7,12\n"]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    found = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x8A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(host_threads, "_SYSTEM", tmp_path)
    _machine(monkeypatch, set(range(7)), None, "2")
    return tmp_path


def test_cores_near_a_gpu_are_those_of_its_node(
    system: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of them, those that the process may run on; said once."""
    with caplog.at_level(logging.INFO):
        assert cores_near(GPU) == cores_near(GPU) == {4, 5, 6}
    (record,) = caplog.records
    said = "3 cores are near cuda:0, on node 1; threads of the host run on those alone."
    assert record.getMessage() == said
    assert cores_near(torch.device("cpu")) == frozenset()


@pytest.mark.usefixtures("system")
def test_a_rank_with_more_cores_than_a_node_uses_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the only one of the machine, whose other node's memory would lie idle."""
    _machine(monkeypatch, set(range(7)), None, None)
    with caplog.at_level(logging.INFO):
        assert cores_near(GPU) == frozenset()
    assert "threads of the host run on any." in caplog.text


@pytest.mark.parametrize("node", ["-1\n", "7\n", None])
def test_a_system_that_does_not_say_it_is_no_error(
    system: Path, caplog: pytest.LogCaptureFixture, node: str | None
) -> None:
    """No node, an unknown one, or no file of the device: one line, and threads run anywhere."""
    path = system / "bus/pci/devices/0001:8a:00.0/numa_node"
    path.unlink() if node is None else path.write_text(node)
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO):
        assert cores_near(GPU) == frozenset()
        stay_near(GPU)
    assert len(caplog.records) == 1 and "does not say" in caplog.text
    assert os.sched_getaffinity(0) == before


def test_a_system_that_refuses_is_no_error(
    system: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread runs where it did."""

    def refuse(process: int, cores: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with caplog.at_level(logging.INFO):
        stay_near(GPU)
    assert "cannot be kept near it (no)" in caplog.text


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("nbytes", [1, 4097, (3 << 24) + 5])
def test_memory_is_zeroed_by_threads_near_the_gpu(
    system: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int, nbytes: int
) -> None:
    """Every byte, and none beside them; each thread stays near before it writes."""
    kept: dict[int, object] = {}
    monkeypatch.setattr(host_threads, "default_host_threads", lambda device_type: num_threads)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cores: kept.update({threading.get_ident(): cores})
    )
    memory = torch.full((nbytes + 2,), 0x7F, dtype=torch.uint8)
    zero_by_threads(memory[1:-1], GPU)
    assert not memory[1:-1].any()
    assert memory[0] == memory[-1] == 0x7F
    assert 1 <= len(kept) <= num_threads and set(map(frozenset, kept.values())) == {cores_near(GPU)}  # type: ignore[arg-type]
    assert threading.get_ident() not in kept, "the caller goes where it likes"
