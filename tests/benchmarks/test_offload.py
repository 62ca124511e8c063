"""The offload case: its clock, its check, and a whole run on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import offload_cuda, offload_sides, simulated_device
from benchmarks.__main__ import main
from benchmarks.offload_sides import (
    AHEAD,
    BASE,
    NORM_FIRST,
    RIVAL,
    RIVAL_BASE,
    SIDES,
    Options,
    Side,
    Timed,
)
from benchmarks.record import CheckError
from benchmarks.simulated_device import SimulatedDevice
from tests.native import compiled
from tests.ranks import Ranks


class _Clock:
    """Wall time that passes only where it is told to, and where it is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slept_s = 100.0, []
        monkeypatch.setattr(simulated_device.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(simulated_device.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_the_thread_goes_ahead_of_a_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are queued one after another; who waits for them waits for what is left."""
    clock = _Clock(monkeypatch)
    device = SimulatedDevice()
    device.compute(4)
    clock.now_s += 1
    device.compute(2)
    assert device.time_when_done() == 106 and not clock.slept_s
    device.synchronize()
    assert clock.slept_s == [5] and device.idle_s == 0


def test_a_device_is_idle_where_the_thread_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers; not from the end of a step to the first layer of the next."""
    clock = _Clock(monkeypatch)
    device = SimulatedDevice()
    device.compute(4)
    clock.now_s += 7
    device.compute(4)
    assert device.idle_s == 3 and device.time_when_done() == 111
    device.synchronize()
    clock.now_s += 5
    device.compute(4)
    assert device.idle_s == 3 and device.time_when_done() == 120
    clock.now_s += 6
    device.synchronize()
    assert device.idle_s == 5 and clock.slept_s == [4, 0]


def test_gradients_follow_the_losses_of_every_layer() -> None:
    """At both ends of a parameter they are those of automatic differentiation of the formula."""
    times = simulated_device.Times(0.0, 0.0)
    model = simulated_device.build_model(2, 64, SimulatedDevice(), times)
    x = simulated_device.model_input(0)
    model(x).sum().backward()
    ends = [
        torch.stack([torch.cat([w.flatten()[:16], w.flatten()[-16:]]) for w in layer.weights])
        for layer in model
    ]
    plain = [end.detach().requires_grad_() for end in ends]
    for end in plain:
        total = end.sum(dim=0)
        x = torch.sin((1 + total) * x + total)
    x.sum().backward()
    for layer, end in zip(model, plain, strict=True):
        for weight, wanted in zip(layer.weights, end.grad, strict=True):
            own = weight.grad.flatten()
            # Gradients are bf16.
            torch.testing.assert_close(own[:16], wanted[:16].bfloat16().float())
            torch.testing.assert_close(own[-16:], wanted[16:].bfloat16().float())
            assert own.count_nonzero() > 0.9 * own.numel()


class _Nothing:
    grad_norm = None

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...

    def synchronize(self) -> None: ...


def _side(losses: list[float], weight: float = 1.0) -> Side:
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, weight)
    return Side(model, lambda step: torch.zeros(()), _Nothing(), [torch.tensor(x) for x in losses])


def test_sides_that_train_apart_are_refused() -> None:
    """By a loss or by a weight; a tolerance is for losses, and says whether they are equal."""
    base = _side([1.0, 2.0])
    assert offload_sides.check({BASE: base, AHEAD: _side([1.0, 2.0])}, "x") == {
        BASE: True,
        AHEAD: True,
    }
    apart = _side([1.0, 2.0001])
    with pytest.raises(CheckError, match="x: losses of 'ahead of the norm' differ"):
        offload_sides.check({BASE: base, AHEAD: apart}, "x")
    assert not offload_sides.check({BASE: base, AHEAD: apart}, "x", loss_tolerance=0.1)[AHEAD]
    with pytest.raises(CheckError, match="differ by nan"):
        offload_sides.check({BASE: base, AHEAD: _side([1.0, float("nan")])}, "x")
    with pytest.raises(CheckError, match="weight 0 of 'ahead of the norm' differs"):
        offload_sides.check({BASE: base, AHEAD: _side([1.0, 2.0], weight=2.0)}, "x")
    with pytest.raises(CheckError, match="no loss changes"):
        offload_sides.check({BASE: _side([1.0, 1.0])}, "x")


def test_what_a_device_waits_for_the_thread_is_no_time_of_its_own() -> None:
    """It is taken off each step."""
    assert Timed([10.0, 12.0], [1.0, 0.0]).on_device_ms() == [9.0, 12.0]


def _train_gpt_on_a_cpu() -> tuple[dict[str, bool], dict[str, dict[str, object]]]:
    setting = offload_cuda.make_setting(offload_cuda.Shape("gpt-toy", 1, 16), torch.device("cpu"))
    sides = offload_sides.build_sides(0.5, setting)
    offload_sides.warm_up(sides, setting, 2)
    timed = offload_sides.time_blocks(sides, setting, Options((0.5,), repeats=1, steps=2))
    speeds = {"alone": 1.0, "beside transfers": 1.0}
    gb_per_s = {"kernel in place": speeds, "kernel out of place": speeds}
    found = offload_sides.summarize(sides, timed, gb_per_s=gb_per_s, link_gb_per_s=1.0)
    return offload_sides.check(sides, "gpt", loss_tolerance=1e-2), found


def test_sides_of_a_real_device_train_alike_on_a_cpu(ranks: Ranks) -> None:
    """A GPT and FSDP2 with its offload; ours are equal in every bit."""
    (value,) = ranks(1).run(_train_gpt_on_a_cpu)
    are_equal, found = value
    assert all(are_equal[name] for name in SIDES)
    assert set(found) == {*SIDES, offload_cuda.FSDP2}
    assert "exposed_ms" not in found[offload_cuda.FSDP2]


@compiled
@pytest.mark.matrix("benchmarks")
def test_offload_is_timed_on_a_simulated_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record says what it is, and has times, bytes and equal losses of every side."""
    sizes = ["--layers", "3", "--hidden", "64", "--fractions", "0.5", "1", "--room", "100"]
    arguments = ["offload", "--device", "simulated", *sizes, "--repeats", "1", "--steps", "2"]
    main(["--records", str(tmp_path), *arguments])
    assert "SIMULATED device" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert results["is_simulated"] and results["link_gb_per_s"] == 8
    assert {speed for speeds in results["gb_per_s"].values() for speed in speeds} == {
        "alone",
        "beside transfers",
    }
    assert list(results["sizes"]) == ["free", "tight"]
    free, tight = (results["sizes"][size]["layers_ms"] for size in ("free", "tight"))
    assert free["backward"] == pytest.approx(2 * free["forward"])
    assert free["forward"] == pytest.approx(2 * tight["forward"])
    for case in results["sizes"].values():
        half, whole = (case["fractions"][fraction] for fraction in ("0.5", "1"))
        assert tuple(half) == tuple(whole) == SIDES
        for sides in (half, whole):
            assert all(side["are_losses_equal"] for side in sides.values())
            assert all(side["step_ms"]["count"] == 1 for side in sides.values())
            assert sides[BASE]["host_nbytes"] == sides[RIVAL_BASE]["host_nbytes"] == 0
            assert sides[AHEAD]["ahead"]["committed"] > 0 == sides[NORM_FIRST]["ahead"]["committed"]
            assert sides[AHEAD]["ahead"]["replayed"] == 0
            # A second slab of weights and moments, and nothing more.
            second = sides[AHEAD]["host_nbytes"] - sides[NORM_FIRST]["host_nbytes"]
            assert second == pytest.approx(12 / 16 * sides[NORM_FIRST]["host_nbytes"], rel=0.02)
        for name in (NORM_FIRST, AHEAD, RIVAL):
            assert whole[name]["device_nbytes"] < half[name]["device_nbytes"]
            assert whole[name]["host_nbytes"] > half[name]["host_nbytes"]
    assert set(results["targets"]) == {
        "exposed share of a step",
        "exposed by one optimizer a parameter, over ours",
        "kernel over its probe, beside transfers",
    }
