"""Work on the host ahead of step() changes no bit, and is dropped where its premises fail."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megafsdp import (
    FusedAdam,
    LossScaler,
    ScaleRule,
    clip_grad_norm_,
    full_tensor,
    mark_main_weights_changed,
    microbatch,
)
from megafsdp._native import native_module
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.background import BackgroundThread
from megafsdp.device.host_copies import Copies, ThreadLink, Transfer
from megafsdp.device.memory import ByteLedger
from megafsdp.optimizer.kernels import square_sum
from megafsdp.optimizer.offload import run_ahead
from megafsdp.optimizer.offload.bucket import Bucket
from megafsdp.optimizer.offload.bucket_step import DeferredScalar, HostThreads
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import groups_of
from megafsdp.optimizer.offload.run_ahead import (
    AheadStep,
    ClippingForecast,
    Forecaster,
    OffloadCounts,
    StepsAhead,
)
from tests.fsdp.toy import Net, batches, mine
from tests.optimizer.offload.hybrid_runs import (
    Case,
    HeldTarget,
    assert_same,
    backward,
    go_on,
    local_bits,
    make_net,
    make_optimizer,
)
from tests.ranks import Ranks


def _guesses_from_norms(limit: float) -> list[int]:
    """Return how many buckets have run ahead after each step."""
    case = Case(1.0, max_grad_norm=limit, speculate="auto")
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    numbers = []
    for seed in range(4):
        _handed_over(net, seed)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        numbers.append(optimizer.offload_counts.speculated)
    return numbers


def _handed_over(net: Net, seed: int) -> float:
    with microbatch(net, is_last=True):
        return backward(net, seed)


@pytest.mark.parametrize(
    ("limit", "wanted"), [(math.inf, [0, 4, 8, 12]), (100.0, [0, 0, 4, 8]), (7.0, [0] * 4)]
)
def test_auto_guesses_while_norms_are_well_below_the_limit(
    ranks: Ranks, limit: float, wanted: list[int]
) -> None:
    """Not before a norm is known, unless nothing is ever clipped; the first guess makes memory."""
    assert ranks(2).run(_guesses_from_norms, limit) == [wanted] * 2


def _doubles_rate(net: Net, optimizer: FusedAdam) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 2


def _doubles_grads_one_by_one(net: Net, optimizer: FusedAdam) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


def _doubles_grads_together(net: Net, optimizer: FusedAdam) -> None:
    torch._foreach_mul_([p.grad for p in net.parameters()], 2)


def _doubles_local_grads(net: Net, optimizer: FusedAdam) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        local_tensor(parameter.grad).mul_(2)


def _clips(net: Net, optimizer: FusedAdam) -> None:
    clip_grad_norm_(net, 0.25)


def _clips_as_torch_does(net: Net, optimizer: FusedAdam) -> None:
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)


def _unscales_as_torch_does(net: Net, optimizer: FusedAdam) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _replaces_grads(net: Net, optimizer: FusedAdam) -> None:
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach().clone() * 2


def _forgets_some_grads(net: Net, optimizer: FusedAdam) -> None:
    for parameter in list(net.parameters())[::2]:
        parameter.grad = None


def _loads_weights(net: Net, optimizer: FusedAdam) -> None:
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})


def _edits_weights(net: Net, optimizer: FusedAdam) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)


def _edits_rows_of_weights(net: Net, optimizer: FusedAdam) -> None:
    for parameter in net.parameters():
        local_tensor(parameter).mul_(0.5)
    mark_main_weights_changed(net)


def _loads_states(net: Net, optimizer: FusedAdam) -> None:
    packed = optimizer.state_dict()
    for state in packed["state"].values():
        state["exp_avg"] = state["exp_avg"] * 2
        state["step"] = state["step"] + 1
    optimizer.load_state_dict(packed)


def _edits_states(net: Net, optimizer: FusedAdam) -> None:
    for parameter in net.parameters():
        optimizer.state[parameter]["exp_avg_sq"].mul_(2)


def _adds_a_backward(net: Net, optimizer: FusedAdam) -> None:
    backward(net, 17)


def _adds_a_handed_over_backward(net: Net, optimizer: FusedAdam) -> None:
    _handed_over(net, 17)


def _starts_over(net: Net, optimizer: FusedAdam) -> None:
    optimizer.zero_grad()
    _handed_over(net, 17)


def _starts_over_in_place(net: Net, optimizer: FusedAdam) -> None:
    optimizer.zero_grad(set_to_none=False)
    _handed_over(net, 17)


def _forgets_all_grads(net: Net, optimizer: FusedAdam) -> None:
    net.zero_grad()
    backward(net, 17)


def _evaluates(net: Net, optimizer: FusedAdam) -> None:
    with torch.no_grad():
        net(*mine(batches(1, seed=3)[0]))


_CHANGES = {
    "gradients": [
        _doubles_grads_one_by_one,
        _doubles_grads_together,
        _doubles_local_grads,
        _clips,
        _clips_as_torch_does,
        _unscales_as_torch_does,
        _replaces_grads,
        _forgets_some_grads,
    ],
    "weights and states": [
        _doubles_rate,
        _loads_weights,
        _edits_weights,
        _edits_rows_of_weights,
        _loads_states,
        _edits_states,
    ],
    "runs": [
        _adds_a_backward,
        _adds_a_handed_over_backward,
        _starts_over,
        _starts_over_in_place,
        _forgets_all_grads,
        _evaluates,
    ],
}


def _changes_count(of: str) -> None:
    """Change something between a handed-over backward and its step, in every other step."""
    case = Case(1.0, max_grad_norm=100.0, speculate=True, num_blocks=1)
    wanted: list[dict[str, torch.Tensor]] = []
    for fraction, is_late in ((None, False), (1.0, False), (1.0, True)):
        net = make_net(case)
        optimizer = make_optimizer(net, replace(case, fraction=fraction))
        for number, change in enumerate(_CHANGES[of]):
            before = getattr(optimizer, "offload_counts", OffloadCounts()).committed
            for is_changed in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    may_run = _hold_back(patch, AheadStep, "run") if is_late else threading.Event()
                    try:
                        _handed_over(net, 2 * number + is_changed)
                        if is_changed:
                            change(net, optimizer)
                        optimizer.step()
                        optimizer.zero_grad()
                    finally:
                        may_run.set()
                    if isinstance(optimizer, HybridDeviceOptimizer):
                        optimizer.synchronize()
            found = local_bits(net, optimizer)
            if not isinstance(optimizer, HybridDeviceOptimizer):
                wanted.append(found)
                continue
            differing = [n for n, v in wanted[number].items() if not torch.equal(found[n], v)]
            assert not differing and len(found) == len(wanted[number]), (change, is_late, differing)
            committed = optimizer.offload_counts.committed - before
            # Two units in the step without a change; what the other one takes depends on it.
            assert committed == 4 if change is _evaluates else committed >= 2, (change, is_late)
        if isinstance(optimizer, HybridDeviceOptimizer) and is_late:
            # What was known to be of no use when the worker came to it has not run.
            counts = optimizer.offload_counts
            assert (counts.speculated, counts.replayed) == (counts.committed, 0)


def _hold_back(patch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """Hold calls of a method back until the event is set."""
    event, inner = threading.Event(), getattr(owner, name)

    def late(*arguments: object) -> None:
        assert event.wait(120), "the gate was opened"
        inner(*arguments)

    patch.setattr(owner, name, late)
    return event


@pytest.mark.native
@pytest.mark.parametrize("of", _CHANGES)
def test_what_changes_between_backward_and_step_counts(ranks: Ranks, of: str) -> None:
    """The step is that of FusedAdam; what ran ahead may have ended by then, or not begun."""
    ranks(2).run(_changes_count, of)


def _step_returns_first(limit: float) -> OffloadCounts:
    """Hold all steps ahead back until step() has returned."""
    case = Case(1.0, max_grad_norm=limit, speculate=True)
    found = []
    for fraction in (None, 1.0):
        net = make_net(case)
        optimizer = make_optimizer(net, replace(case, fraction=fraction))
        for seed in range(3):
            with pytest.MonkeyPatch.context() as patch:
                may_run = _hold_back(patch, HostThreads, "update")
                try:
                    _handed_over(net, seed)
                    optimizer.step()
                    optimizer.zero_grad()
                    if fraction is not None:
                        assert optimizer.offload_counts.committed <= 4 * seed
                finally:
                    may_run.set()
                if fraction is not None:
                    optimizer.synchronize()
        found.append(local_bits(net, optimizer))
    assert_same(found[1], found[0])
    assert isinstance(optimizer, HybridDeviceOptimizer)
    return optimizer.offload_counts


def test_step_returns_before_the_work_ahead_of_it_has_run(ranks: Ranks) -> None:
    """All of it is taken, whether it has run or not."""
    assert ranks(2).run(_step_returns_first, 100.0) == [OffloadCounts(12, 12, 0)] * 2


def _failure_ahead() -> None:
    net = make_net(Case(max_grad_norm=100.0))
    optimizer = make_optimizer(net, Case(1.0, max_grad_norm=100.0, speculate=True))

    def fails(step: AheadStep) -> None:
        raise MemoryError("no host memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AheadStep, "_run", fails)
        _handed_over(net, 0)
        optimizer.step()
        with pytest.raises(RuntimeError, match="no host memory") as error:
            optimizer.step()
    assert isinstance(error.value.__cause__, MemoryError)


def test_a_failure_ahead_of_the_step_is_raised_with_its_cause(ranks: Ranks) -> None:
    """By the first step that waits for it."""
    ranks(2).run(_failure_ahead)


def _scaled_run(case: Case, unscales: bool) -> tuple[dict[str, Any], OffloadCounts | None]:
    """Train with a loss scale that doubles and gradients that overflow once."""
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    scaler = LossScaler(ScaleRule(1024.0, growth_window=3, hysteresis=1))
    for seed in range(8):
        with microbatch(net, is_last=True):
            loss = net(*mine(batches(1, seed=seed)[0]))
            scaler.scale(loss * (math.inf if seed == 2 else 1.0)).backward()
        if unscales:
            scaler.step(optimizer)
            scaler.update()
        else:
            # As torch.amp.GradScaler does.
            optimizer.grad_scale = torch.tensor(scaler.current_scale)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(float(seed == 2))  # type: ignore[attr-defined]
            optimizer.step()
            scaler.update(is_finite=seed != 2)
        optimizer.zero_grad()
    counts = getattr(optimizer, "offload_counts", None)
    return local_bits(net, optimizer) | {"scale": scaler.current_scale}, counts


def _scaled_runs_agree(unscales: bool) -> OffloadCounts | None:
    case = Case(None, max_grad_norm=100.0, speculate=True)
    wanted, _ = _scaled_run(case, unscales)
    found, counts = _scaled_run(replace(case, fraction=1.0), unscales)
    assert_same(found, wanted)
    return counts


@pytest.mark.native
@pytest.mark.parametrize("unscales", [False, True])
def test_loss_scales_and_overflows_change_no_bit(ranks: Ranks, unscales: bool) -> None:
    """The guess follows the scale; gradients that are unscaled in place are copied anew."""
    for counts in ranks(2).run(_scaled_runs_agree, unscales):
        # The first scale is not known beforehand, later ones are until they move.
        assert (counts.committed > 0) == (counts.replayed > 0) == (not unscales)


def _gaps_after_right_guesses() -> int:
    """Return how many elements of the main weights are gaps."""
    case = Case(1.0, max_grad_norm=1e3, speculate=True)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    go_on(net, optimizer, range(3))
    optimizer.synchronize()
    assert optimizer.offload_counts.committed
    gaps = [gap for group in groups_of(net.parameters()) for gap in group.main_weight.gaps]
    assert not any(gap.any() for gap in gaps)
    return sum(gap.numel() for gap in gaps)


def test_gaps_of_both_slabs_are_zero(ranks: Ranks) -> None:
    """Steps write runs alone, and sums over flat tensors read all."""
    assert sum(ranks(3).run(_gaps_after_right_guesses)) > 0


def _ahead_under_a_limit(starts_over: bool) -> int:
    """Return how many of four buckets ran ahead; the limit is below the norm, or below twice it."""
    net = make_net(Case())
    backward(net, 0)
    buffers = [group.gradients.main_grad.buffer for group in groups_of(net.parameters())]
    squares = [b.flat.double().square().sum().item() for b in buffers if b is not None]
    square = 1.5 * sum(squares) if starts_over else sum(squares) - min(squares) / 2
    case = Case(1.0, max_grad_norm=math.sqrt(square), speculate=True)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    for _ in range(1 + starts_over):
        optimizer.zero_grad()
        _handed_over(net, 0)
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.offload_counts.committed == (4 if starts_over else 0)
    return optimizer.offload_counts.speculated


def test_a_guess_is_refuted_by_all_buckets_together(ranks: Ranks) -> None:
    """Each of them alone, and all but the last, keep to the limit; cleared gradients do not add."""
    assert ranks(1).run(_ahead_under_a_limit, False)[0] < 4
    assert ranks(1).run(_ahead_under_a_limit, True)[0] >= 4


def test_cancelled_work_makes_no_second_slab() -> None:
    """The bucket may have been cancelled because it returns to the device."""
    link, bucket = ThreadLink(), mock.create_autospec(Bucket, instance=True)
    ahead = StepsAhead(True, BackgroundThread("unused"), link, ByteLedger())
    threads = HostThreads(num_threads=1, ftz=False)
    ahead.begin(bucket, torch.ones(1), math.inf, threads, lambda: [])
    ahead.cancel(bucket)
    ahead.make_spares()
    assert not bucket.shown.called
    ahead.begin(bucket, torch.ones(1), math.inf, threads, lambda: [])
    with mock.patch.object(run_ahead, "SpareSlab") as spare:
        ahead.make_spares()
    spare.assert_called_once()
    link.close()


def _num_states_after_a_skipped_step() -> tuple[int, int]:
    """Return how many parameters have states after a first step that is skipped, and the next."""
    case = Case(1.0, max_grad_norm=100.0, speculate=True)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    scaler, numbers = LossScaler(ScaleRule(1.0)), []
    for factor in (math.inf, 1.0):
        with microbatch(net, is_last=True):
            scaler.scale(net(*mine(batches(1)[0])) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        numbers.append(len(optimizer.state))
        optimizer.zero_grad()
    return numbers[0], numbers[1]


def test_a_step_that_does_not_come_makes_no_states(ranks: Ranks) -> None:
    """A rank that saw the overflow earlier began nothing, and a save wants the same on all."""
    num_parameters = len(list(Net(3).parameters()))
    assert ranks(2).run(_num_states_after_a_skipped_step) == [(0, num_parameters)] * 2


def _sums_are_made_once() -> tuple[int, int]:
    """Return how often gradients are squared and summed in a step that is handed over, and not."""
    case = Case(1.0, max_grad_norm=100.0, speculate=True)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    numbers = []
    for run in (_handed_over, backward):
        with pytest.MonkeyPatch.context() as patch:
            calls: list[int] = []
            inner = square_sum.device_sum_of_squares

            def counted(
                values: torch.Tensor,
                calls: list[int] = calls,
                inner: Callable[..., torch.Tensor] = inner,
                **options: Any,
            ) -> torch.Tensor:
                calls.append(values.numel())
                return inner(values, **options)

            patch.setattr(square_sum, "device_sum_of_squares", counted)
            run(net, 0)
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(len(calls))
    return numbers[0], numbers[1]


@pytest.mark.native
def test_the_norm_is_made_of_the_sums_that_travel_with_gradients(ranks: Ranks) -> None:
    """Each gradient is read once for both; without kernels the norm is made in another way."""
    num_for_norm = 0 if native_module() is None else 4
    assert ranks(2).run(_sums_are_made_once) == [(4, num_for_norm)] * 2


def _frozen_parts_agree() -> int:
    case = Case(None, max_grad_norm=100.0, speculate=True)
    found = []
    for fraction in (None, 1.0):
        net = make_net(case)
        # A part that the optimizer does not have, and one that is frozen after two steps.
        net.blocks[0].up.weight.requires_grad_(False)
        optimizer = make_optimizer(net, replace(case, fraction=fraction))
        for seed in range(5):
            net.blocks[1].norm.weight.requires_grad_(seed < 2)
            _handed_over(net, seed)
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        weights = {n: full_tensor(p.detach()) for n, p in net.named_parameters()}
        found.append({n: w.clone() for n, w in weights.items()})
    assert_same(found[1], found[0])
    assert isinstance(optimizer, HybridDeviceOptimizer)
    return optimizer.offload_counts.committed


@pytest.mark.native
def test_frozen_parts_of_a_unit_keep_their_values(ranks: Ranks) -> None:
    """A unit whose step leaves elements out is not stepped into the second slab."""
    for num_committed in ranks(2).run(_frozen_parts_agree):
        # Two units in all five steps, one in two of them.
        assert num_committed == 2 * 5 + 2


def _bytes() -> None:
    guesses = Case(1.0, max_grad_norm=100.0, speculate=True)
    for case, per_element in (
        (replace(guesses, speculate=False), 12),
        (replace(guesses, overlap=False), 12),
        (replace(guesses, strategy="no_shard"), 12),
        (guesses, 24),
    ):
        net = make_net(case)
        optimizer = make_optimizer(net, case)
        assert isinstance(optimizer, HybridDeviceOptimizer)
        for seed in range(2):
            _handed_over(net, seed)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        numel = sum(g.main_weight.flat.numel() for g in groups_of(net.parameters()))
        assert optimizer.host_ledger.total == per_element * numel
        # Gradients in fp32 and a cast in bf16.
        assert optimizer.host_nbytes == (per_element + 6) * numel


def test_a_second_slab_is_made_by_those_who_guess(ranks: Ranks) -> None:
    """Twelve bytes an element in place, as many again where steps may have to be undone.

    Without overlap nothing begins in backward, and changes of replicated gradients go unnoticed.
    """
    ranks(2).run(_bytes)


class _LateLink(ThreadLink):
    """A link whose device comes to numbers, and to each bucket, when it is told so.

    Args:
        num_buckets: How many there are.
    """

    def __init__(self, num_buckets: int = 0) -> None:
        super().__init__()
        self.may_send_numbers = threading.Event()
        self.may_send = [threading.Event() for _ in range(num_buckets)]
        self.num_fences = 0
        self._gates = iter(self.may_send)

    def fence(self) -> None:
        self.num_fences += 1

    def to_host(self, copies: Copies) -> Transfer:
        is_number = copies[0][0].ndim == 0
        held = torch.zeros(()).as_subclass(HeldTarget)
        held.may_begin = self.may_send_numbers if is_number else next(self._gates)
        super().to_host([(held, torch.zeros(()))])
        return super().to_host(copies)


def test_a_number_of_the_device_comes_over_the_link() -> None:
    """After what is queued, and as it was then; a number of the host is there at once."""
    link = _LateLink()
    assert DeferredScalar(0.5, link).is_there and DeferredScalar(0.5, link).value() == 0.5
    # In fp64, as factors are: a cast of another dtype would be a copy anyway.
    source = torch.tensor(3.0, dtype=torch.float64)
    late = DeferredScalar(source, link)
    source.zero_()
    assert link.num_fences == 1 and not late.is_there
    link.may_send_numbers.set()
    assert late.value() == 3.0 and late.is_there
    link.close()


@pytest.mark.parametrize("norms", [[3.0, 4.0005, 0.7], [math.nan], [math.inf]])
def test_a_forecast_is_refuted_when_the_norm_must_clip(norms: list[float]) -> None:
    """As soon as the gradients seen so far have such a norm, unscaled, or none at all.

    A norm that is above the limit by rounding alone says nothing.
    """
    forecast = ClippingForecast(0.5, 2.5)
    for norm in norms[:-1]:
        forecast.add_norm(norm)
        assert not forecast.is_refuted
    forecast.add_norm(norms[-1])
    assert forecast.is_refuted


def test_the_guess_of_a_step_is_made_of_the_last() -> None:
    """Its loss scale unscales the next step's gradients; "auto" waits for a norm."""
    link = ThreadLink()
    forecaster = Forecaster("auto")
    assert forecaster.forecast(1.0) is None
    forecaster.note_step(torch.tensor(0.7), torch.tensor(4.0), link)
    guess = forecaster.forecast(1.0)
    assert guess is not None and guess.scale == 0.25
    # A step that is skipped says nothing about later ones.
    for norm in (math.inf, math.nan):
        forecaster.note_step(torch.tensor(norm), None, link)
        assert forecaster.forecast(1.0) is not None
    # All steps count, also those before which nothing asked for a guess.
    for norm in (5.0, math.nan):
        forecaster.note_step(torch.tensor(norm), None, link)
    assert forecaster.forecast(1.0) is None
    assert forecaster.forecast(2.0) is not None
    assert Forecaster(speculate=False).forecast(1.0) is None
    assert Forecaster("auto").forecast(math.inf) is not None
    link.close()


def _ahead_while_the_factor_is_late() -> int:
    """Return how many of four buckets ran ahead of a factor that step() left on the device."""
    case = Case(1.0, max_grad_norm=100.0, speculate=True)
    link = _LateLink(num_buckets=4)
    found = []
    for fraction in (None, 1.0):
        net = make_net(case)
        options = {} if fraction is None else {"link": link}
        optimizer = make_optimizer(net, replace(case, fraction=fraction), **options)
        with microbatch(net, is_last=True):
            backward(net, seed=0)
        optimizer.step()
        if isinstance(optimizer, HybridDeviceOptimizer):
            counts = optimizer.offload_counts
            for number, gate in enumerate(link.may_send, start=1):
                gate.set()
                end_s = time.monotonic() + 60
                while counts.speculated < number and time.monotonic() < end_s:
                    time.sleep(0.001)
            num_ahead = counts.speculated
            assert counts.committed == 0
            link.may_send_numbers.set()
            optimizer.synchronize()
            assert counts.committed == num_ahead
        found.append(local_bits(net, optimizer))
    assert_same(found[1], found[0])
    return num_ahead


def test_steps_ahead_run_while_their_factor_is_not_there(ranks: Ranks) -> None:
    """A step that only lacks its factor is not waited for in their stead."""
    assert ranks(2).run(_ahead_while_the_factor_is_late) == [4, 4]
