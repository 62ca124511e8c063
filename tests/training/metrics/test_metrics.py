"""Rates, peaks, and the lines that show them."""

from __future__ import annotations

import re

import pytest
import torch

from megafsdp.training.metrics import metrics
from megafsdp.training.metrics.metrics import (
    Meter,
    Position,
    Rates,
    megatron_line,
    peak_flops,
    peak_memory_nbytes,
    progress_line,
)
from megafsdp.training.metrics.terminal import Screen
from megafsdp.training.step.train_step import StepResult
from megafsdp.training.step.update import StepStatistics

POSITION = Position(20, 200, 480, 24, 1)
RESULT = StepResult(3.05631, 0.7204, False, ())
RATES = Rates(0.1761, 17443.2, 0.0467, None, 2**29, 3722.6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some other device", None),
    ],
)
def test_peak_is_found_by_name(name: str, peak: float | None) -> None:
    """The longer of two matching names counts; an unknown device has no peak, not another's."""
    assert peak_flops(name) == peak


def test_memory_is_counted_in_bytes() -> None:
    """The peak is more than a tensor that is held, and less than any machine has."""
    tensor = torch.ones(2**26, dtype=torch.uint8)
    assert tensor.numel() < peak_memory_nbytes(torch.device("cpu")) < 2**44


class _Clock:
    """Counts seconds when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_rates_leave_out_what_is_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 0.5 s with a pause are 0.5 s a step; the next reading starts over."""
    clock = _Clock()
    monkeypatch.setattr(metrics, "time", clock)
    meter = Meter(torch.device("cpu"), tokens_per_step=100, flops_per_token=4e9, num_devices=2)
    for _ in range(2):
        meter.start_step()
        clock.now_s += 0.5
        meter.end_step()
        clock.now_s += 60.0
    rates = meter.read(num_steps_left=8)
    assert (rates.step_s, rates.tokens_per_s, rates.eta_s) == (0.5, 200.0, 4.0)
    assert rates.tflops == pytest.approx(100 * 4e9 / 2 / 0.5 / 1e12)
    assert rates.mfu is None
    meter.start_step()
    clock.now_s += 0.25
    meter.end_step()
    assert meter.read(num_steps_left=1).step_s == 0.25
    nothing = meter.read(num_steps_left=1)
    assert (nothing.step_s, nothing.tokens_per_s, nothing.tflops, nothing.eta_s) == (0, 0, 0, 0)


def test_the_end_of_a_step_is_the_begin_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are queued one behind the other."""
    clock = _Clock()
    monkeypatch.setattr(metrics, "time", clock)
    meter = Meter(torch.device("cpu"), tokens_per_step=100, flops_per_token=4e9, num_devices=1)
    meter.start_step()
    for seconds in (0.25, 0.75):
        clock.now_s += seconds
        meter.end_step()
    assert meter.read(num_steps_left=1).step_s == 0.5


def test_mfu_is_a_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 312 TFLOP/s on a device that has so many."""
    clock = _Clock()
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12)
    meter = Meter(torch.device("cuda"), tokens_per_step=2, flops_per_token=78e12, num_devices=1)
    meter.start_step()
    clock.now_s += 1.0
    meter.end_step()
    rates = meter.read(num_steps_left=1)
    assert (rates.tflops, rates.mfu, rates.memory_nbytes) == (156.0, 0.5, 12)


def test_progress_line_shows_every_figure() -> None:
    """Step, share, loss, norm, rate, speed, memory and time left, on one line."""
    line = progress_line(POSITION, RESULT, 3e-3, RATES)
    assert line == (
        "step  20/200   10.0%  loss 3.0563  grad norm 0.720  lr 3.00e-03  176 ms/step"
        "  17,443 tokens/s  0.0467 TFLOP/s  memory 0.50 GiB  ETA 1:02:03"
    )


@pytest.mark.parametrize("width", [1, 10, 40, 79, 80, 120, 200])
def test_progress_line_fits_the_terminal(width: int) -> None:
    """Whole parts go, those that matter least first; the step stays, and what is wrong."""
    line = progress_line(POSITION, RESULT, 3e-3, RATES, Screen(width))
    whole = progress_line(POSITION, RESULT, 3e-3, RATES)
    assert len(line) <= width
    assert set(line.split("  ")) <= set(whole.split("  ")) or width < 12
    # The next part would not have fitted.
    assert line == whole or len(line) > width - 30
    for least, part in ((12, "step"), (26, "loss 3.0563"), (40, "176 ms/step"), (200, "TFLOP/s")):
        assert width < least or part in line
    skipped = StepResult(float("nan"), 1.0, True, ())
    if width >= 40:
        assert "SKIPPED" in progress_line(POSITION, skipped, 0.0, RATES, Screen(width))


def test_colours_take_no_room() -> None:
    """The text of a coloured line is that of a plain one of the same width."""
    skipped = StepResult(2.5, 1.0, True, ())
    for width in (40, 80, None):
        line = progress_line(POSITION, skipped, 0.0, RATES, Screen(width, has_colours=True))
        plain = progress_line(POSITION, skipped, 0.0, RATES, Screen(width))
        assert re.sub(r"\x1b\[\d+m", "", line) == plain
        assert "\x1b[31mSKIPPED\x1b[0m" in line
        assert "\x1b" not in plain


def test_progress_line_shows_mfu_and_skips_where_there_are_any() -> None:
    """On a known GPU the share of the peak is shown; a skipped step says so."""
    on_gpu = Rates(0.1, 1.0, 400.0, 0.404, 0, 5.0)
    skipped = StepResult(float("nan"), 1.0, True, ())
    line = progress_line(POSITION, skipped, 0.0, on_gpu)
    assert "MFU 40.4%" in line
    assert line.endswith("ETA 0:05  SKIPPED")


def test_loss_scale_is_shown_where_there_is_one() -> None:
    """In both forms; a step that overflowed is skipped, but its loss is no NaN."""
    scaled = StepResult(2.0, float("inf"), True, (), 65536.0)
    assert "lr 0.00e+00  loss scale 65536  " in progress_line(POSITION, scaled, 0.0, RATES)
    line = megatron_line(POSITION, scaled, 0.0, RATES)
    assert "| loss scale: 65536.0 |" in line
    assert line.endswith("number of skipped iterations:   1 | number of nan iterations:   0 |")
    plain = StepResult(float("nan"), 1.0, True, ())
    line = megatron_line(POSITION, plain, 0.0, RATES)
    assert "| loss scale: 1.0 |" in line
    assert line.endswith("number of nan iterations:   1 |")


def test_loads_of_experts_are_shown_where_there_are_some() -> None:
    """The auxiliary loss too, of a model that has one."""
    for statistics, shown in (
        (StepStatistics(max_load=1.5), "lr 0.00e+00  max load 1.50  "),
        (
            StepStatistics(max_load=1.5, aux_loss=1.0312),
            "lr 0.00e+00  max load 1.50  aux loss 1.0312  ",
        ),
    ):
        result = StepResult(2.0, 1.0, False, (), statistics=statistics)
        assert shown in progress_line(POSITION, result, 0.0, RATES)
    assert "max load" not in progress_line(POSITION, RESULT, 0.0, RATES)


def test_megatron_line_is_read_by_its_scripts() -> None:
    """The patterns that log readers of Megatron-LM use find their numbers."""
    line = megatron_line(POSITION, RESULT, 3e-3, RATES)
    found = {
        name: re.search(rf"{re.escape(name)}:? *([0-9.E+-]+)", line)
        for name in (
            "iteration",
            "consumed samples",
            "elapsed time per iteration (ms)",
            "throughput per GPU (TFLOP/s/GPU)",
            "learning rate",
            "global batch size",
            "lm loss",
            "grad norm",
            "number of skipped iterations",
            "number of nan iterations",
        )
    }
    values = {name: float(match[1]) for name, match in found.items() if match}
    assert values.keys() == found.keys()
    assert values["lm loss"] == 3.05631
    assert values["iteration"] == 20
    assert values["elapsed time per iteration (ms)"] == 176.1
    assert re.search(r"iteration +20/ +200 \|", line)


def test_no_peak_is_shadowed() -> None:
    """An entry whose name contains an earlier entry's would never be found."""
    names = [part for part, _ in metrics._PEAK_FLOPS]
    assert [b for i, a in enumerate(names) for b in names[i + 1 :] if a in b] == []
