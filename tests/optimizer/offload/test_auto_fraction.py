"""The automatic fraction: what is measured, how ranks agree, and that no bit hangs on it."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafsdp.device.memory import ByteLedger
from megafsdp.device.streams import DeviceHandle, TimeMark
from megafsdp.optimizer.offload import run_ahead
from megafsdp.optimizer.offload.auto_fraction import FractionMeter
from megafsdp.optimizer.offload.bucket import Bucket
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import groups_of
from megafsdp.optimizer.offload.run_ahead import ClippingForecast, Forecaster, SpareSlab
from tests.optimizer.offload.hybrid_runs import Case, assert_same, make_net, make_optimizer, train
from tests.ranks import Ranks

# The sixth step settles; the seventh shows that it stays so.
_NUM_STEPS = 7


class _Clock(DeviceHandle):
    """A device whose time passes when it is told to."""

    now_s = 0.0

    def mark_time(self) -> TimeMark:
        return TimeMark(_Clock.now_s)


def _measured(num_steps: int, *, runs_ahead: bool) -> FractionMeter:
    """Return the meter of steps with 30 ms after the step, of which 10 ms were waited."""
    meter = FractionMeter(_Clock(torch.device("cpu")))
    for step in range(num_steps):
        if runs_ahead:
            meter.note_grads()
        _Clock.now_s += 0.01
        meter.note_step_begin()
        # The first steps take long and must not count.
        meter.rate.note(10**9 if step < 2 else 10**4, 0.01)
        _Clock.now_s += 0.5
        meter.note_step_end()
        for passed_s, waited_s in ((0.005, 0.01), (0.025, 1.0)):
            _Clock.now_s += passed_s
            meter.note_use(meter.mark_time(), waited_s)
        _Clock.now_s += 0.2
    meter.note_step_begin()
    return meter


@pytest.mark.parametrize(("runs_ahead", "window_s"), [(False, 0.02), (True, 0.03)])
def test_the_window_is_without_what_was_waited(runs_ahead: bool, window_s: float) -> None:
    """From first gradients to the step, from its end to the last use; at 1e6 elements a second."""
    meter = _measured(5, runs_ahead=runs_ahead)
    assert meter.is_done
    assert meter.free_numel() == pytest.approx(window_s * 1e6)


def test_the_first_steps_are_not_enough() -> None:
    """Nor do they count."""
    meter = _measured(2, runs_ahead=True)
    assert not meter.is_done
    assert meter.free_numel() == 0


@functools.cache
def _without_offload(case: Case) -> dict[str, Any]:
    net = make_net(case)
    return train(net, make_optimizer(net, case), case, _NUM_STEPS)


def _settles(case: Case, free: tuple[float, ...], room: tuple[float, ...]) -> tuple[float, ...]:
    """Train with fractions that each rank would choose by itself; return what they agree on."""
    numel = sum(g.main_weight.flat.numel() for g in groups_of(make_net(case).parameters()))
    rank = dist.get_rank()
    wanted = _without_offload(replace(case, fraction=None, speculate="auto"))
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    fractions = []
    inner = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        fractions.append(optimizer.offloaded_fraction)
        inner(set_to_none)

    def spare_of(bucket: Bucket, ledger: ByteLedger) -> SpareSlab:
        assert bucket.group.host_memory is not None, "the bucket has not come back"
        return SpareSlab(bucket, ledger)

    def forecast(self: Forecaster, max_norm: float) -> ClippingForecast | None:
        """Guess first in the backward before the step that settles."""
        return ClippingForecast(1.0, max_norm) if len(fractions) >= 5 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FractionMeter, "free_numel", lambda meter: free[rank] * numel)
        patch.setattr(FractionMeter, "returnable_numel", lambda meter: room[rank] * numel)
        patch.setattr(optimizer, "zero_grad", zero_grad)
        patch.setattr(run_ahead, "SpareSlab", spare_of)
        if case.speculate == "auto":
            patch.setattr(Forecaster, "forecast", forecast)
        found = train(net, optimizer, case, _NUM_STEPS)
    assert_same(found, wanted)
    assert fractions[:5] == [1.0] * 5, "all is offloaded while the meter measures"
    on_host = sum(g.main_weight.flat.nbytes for g in groups_of(net.parameters()) if g.host_memory)
    second = 2 if case.speculate is True else 1
    assert optimizer.host_ledger.total == 3 * second * on_host
    return tuple(fractions[5:])


@pytest.mark.parametrize(
    ("strategy", "speculate"),
    [
        ("optim_grads_params", True),
        ("optim_grads_params", False),
        ("optim", True),
        ("hfsdp", False),
        ("no_shard", False),
        pytest.param("optim", False, marks=pytest.mark.matrix("offload")),
        pytest.param("hfsdp", True, marks=pytest.mark.matrix("offload")),
    ],
)
def test_ranks_agree_on_what_is_free_for_all(ranks: Ranks, strategy: str, speculate: bool) -> None:
    """The slower host decides; weights and states come back without a bit changed."""
    case = Case("auto", max_grad_norm=100.0, strategy=strategy, speculate=speculate)
    (first, *others), *same = ranks(2).run(_settles, case, (0.5, 0.8), (9.0, 9.0))
    assert first == pytest.approx(0.5, abs=0.2)
    assert others == [first] * (_NUM_STEPS - 6)
    assert all(fractions == (first, *others) for fractions in same)


def test_what_has_no_room_stays_on_the_host(ranks: Ranks) -> None:
    """The device with the least memory decides, though its host is too slow."""
    case = Case("auto", max_grad_norm=100.0, speculate=True)
    for fractions in ranks(2).run(_settles, case, (0.0, 0.0), (9.0, 0.4)):
        assert fractions == (pytest.approx(0.6, abs=0.2),) * (_NUM_STEPS - 5)


def test_all_of_it_may_come_back(ranks: Ranks) -> None:
    """A host that is too slow for anything is left with nothing, and gets no second slab."""
    case = Case("auto", max_grad_norm=100.0)
    for fractions in ranks(2).run(_settles, case, (0.0, 1.0), (9.0, 9.0)):
        assert fractions == (0.0,) * (_NUM_STEPS - 5)


def _measures_by_itself() -> float:
    """Train without a word to the meter, with a forward that gives the host all the time."""
    case = Case("auto", max_grad_norm=100.0, speculate=True, num_blocks=1)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    net.blocks[0].register_forward_pre_hook(lambda *unused: time.sleep(0.05))
    train(net, optimizer, case, 7)
    return optimizer.offloaded_fraction


def test_a_fast_host_keeps_everything(ranks: Ranks) -> None:
    """Fifty milliseconds of forward are plenty for some thousand elements."""
    assert ranks(2).run(_measures_by_itself) == [1.0] * 2


def _refused() -> None:
    net = make_net(Case())
    with pytest.raises(ValueError, match="beside cpu_optimizer_cls"):
        HybridDeviceOptimizer(
            net.parameters(), offload_fraction="auto", cpu_optimizer_cls=torch.optim.SGD
        )
    with pytest.raises(ValueError, match="or 'auto'"):
        HybridDeviceOptimizer(net.parameters(), offload_fraction="most")  # type: ignore[arg-type]


def test_auto_beside_states_of_another_optimizer_is_refused(ranks: Ranks) -> None:
    """They could not be moved; nor is another word a fraction."""
    ranks(2).run(_refused)
