"""Work on the host whose neighbours fail, change or come late: nothing hangs, no bit is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.optim import Optimizer

from megafsdp import full_tensor, fully_shard, microbatch
from megafsdp.device.host_copies import Copies, ThreadLink, Transfer
from megafsdp.optimizer.adam.step import AdamPass
from megafsdp.optimizer.offload.bucket import Bucket
from megafsdp.optimizer.offload.bucket_step import BucketStep
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.run_ahead import AheadStep
from megafsdp.optimizer.offload.torch_optimizer import TorchBucketStep
from tests.fsdp.toy import Net
from tests.optimizer.offload.hybrid_runs import (
    FP32,
    Case,
    HeldTarget,
    assert_same,
    backward,
    bits,
    make_net,
    make_optimizer,
)
from tests.ranks import Ranks

_NUM_BUCKETS = 4


class _DoneOnceAsked:
    """A transfer that is not there when it is asked for, and arrives right after."""

    def __init__(self, transfer: Transfer, arrive: Callable[[], None]) -> None:
        self._transfer, self._arrive = transfer, arrive
        self.is_armed = False

    @property
    def is_done(self) -> bool:
        is_done = self._transfer.is_done
        if self.is_armed and not is_done:
            self.is_armed = False
            self._arrive()
        return is_done

    def wait(self) -> None:
        self._transfer.wait()

    order = wait


class _LateLink(ThreadLink):
    """A link that holds the last bucket and the factor after it back, and lets both go at once."""

    def __init__(self) -> None:
        super().__init__()
        self.may_send = threading.Event()
        self.last: _DoneOnceAsked | None = None
        self._num_buckets = 0
        self._numbers: list[Transfer] = []

    def to_host(self, copies: Copies) -> Transfer:
        is_number = copies[0][0].ndim == 0
        self._num_buckets += not is_number
        if not is_number and self._num_buckets < _NUM_BUCKETS:
            return super().to_host(copies)
        held = torch.zeros(()).as_subclass(HeldTarget)
        held.may_begin = self.may_send
        super().to_host([(held, torch.zeros(()))])
        transfer = super().to_host(copies)
        if is_number:
            self._numbers.append(transfer)
            return transfer
        self.last = _DoneOnceAsked(transfer, self._send)
        return self.last

    def _send(self) -> None:
        self.may_send.set()
        for number in self._numbers:
            number.wait()


def _gradients_come_while_the_worker_chooses() -> int:
    """Return how many steps ahead were replayed; the guess of all is wrong."""
    case = Case(1.0, speculate=True, policy=FP32)
    net = make_net(case)
    optimizer = make_optimizer(net, replace(case, fraction=None, max_grad_norm=1e9))
    with microbatch(net, is_last=True):
        backward(net, seed=0)
    # Above what a rank's own buckets say: none of them learns that the guess is wrong.
    case = replace(case, max_grad_norm=0.95 * optimizer.measure_grad_norm().item())
    found = []
    for fraction in (None, 1.0):
        net, link = make_net(case), _LateLink()
        options = {} if fraction is None else {"link": link}
        optimizer = make_optimizer(net, replace(case, fraction=fraction), **options)
        may_run, begun, run = threading.Event(), [], AheadStep._run

        def run_late(
            step: AheadStep,
            begun: list[AheadStep] = begun,
            may_run: threading.Event = may_run,
            run: Callable[[AheadStep], None] = run,
        ) -> None:
            begun.append(step)
            if len(begun) == _NUM_BUCKETS - 1:
                assert may_run.wait(120), "the gate was opened"
            run(step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AheadStep, "_run", run_late)
            with microbatch(net, is_last=True):
                backward(net, seed=0)
            optimizer.step()
            if link.last is not None:
                link.last.is_armed = True
                may_run.set()
                assert isinstance(optimizer, HybridDeviceOptimizer)
                optimizer.synchronize()
                time.sleep(0.05)  # For what is left in the worker's queue.
        found.append(bits(net, optimizer))
    assert_same(found[1], found[0])
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert optimizer.offload_counts.committed == 0
    return optimizer.offload_counts.replayed


def test_a_step_ahead_never_runs_after_its_step(ranks: Ranks) -> None:
    """Its gradients may come between the questions whether it and whether the step can begin."""
    assert ranks(2).run(_gradients_come_while_the_worker_chooses) == [_NUM_BUCKETS - 1] * 2


def _update_with_tensor_rate(overlap: bool) -> torch.Tensor:
    net = make_net(Case())
    optimizer = HybridDeviceOptimizer(
        net.parameters(),
        lr=torch.tensor(1e-2),
        overlap=overlap,
        cpu_optimizer_cls=torch.optim.SGD,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    may_run, update = threading.Event(), TorchBucketStep._update

    def update_late(step: TorchBucketStep, scale: float) -> None:
        assert may_run.wait(120), "the gate was opened"
        update(step, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBucketStep, "_update", update_late)
        backward(net, seed=0)
        if not overlap:
            may_run.set()
        optimizer.step()
        schedule.step()
        may_run.set()
        optimizer.synchronize()
    return full_tensor(net.blocks[0].up.weight.detach())


def test_a_rate_that_a_scheduler_fills_in_place_is_that_of_its_step(ranks: Ranks) -> None:
    """However late another optimizer's step runs on the host."""
    (late, _), (early, _) = (ranks(2).run(_update_with_tensor_rate, x) for x in (True, False))
    assert torch.equal(late, early)


def _fail(*args: object, **kwargs: object) -> None:
    raise MemoryError("no room")


def _begin_fails() -> bool:
    net = make_net(Case(1.0))
    optimizer = make_optimizer(net, Case(1.0))
    backward(net, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "copy_pieces", _fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.zero_grad()
    has_ended = threading.Event()

    def go_on() -> None:
        backward(net, seed=1)
        has_ended.set()

    threading.Thread(target=go_on, daemon=True).start()
    return has_ended.wait(60)


def test_a_step_that_could_not_begin_is_not_waited_for(ranks: Ranks) -> None:
    """The next forward runs."""
    assert ranks(2).run(_begin_fails) == [True, True]


def _device_fails() -> bool:
    net = make_net(Case(0.5))
    optimizer = make_optimizer(net, Case(0.5))
    assert isinstance(optimizer, HybridDeviceOptimizer)
    backward(net, seed=0)
    may_run, has_run, update = threading.Event(), threading.Event(), BucketStep._update

    def update_late(step: BucketStep, scale: float) -> None:
        assert may_run.wait(120), "the gate was opened"
        update(step, scale)
        has_run.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketStep, "_update", update_late)
        patch.setattr(AdamPass, "step_flat", _fail)
        with pytest.raises(MemoryError):
            optimizer.step()
        threading.Timer(0.2, may_run.set).start()
        optimizer.synchronize()
        return has_run.is_set()


def test_steps_under_way_are_waited_for_where_the_devices_part_fails(ranks: Ranks) -> None:
    """They still read gradients and write weights."""
    assert ranks(2).run(_device_fails) == [True, True]


def _rows_of_few_ranks() -> None:
    net = Net()
    for block in net.blocks:
        fully_shard(block.norm, mp_policy=FP32)
        fully_shard(block, mp_policy=FP32)
    fully_shard(net, mp_policy=FP32)
    optimizer = make_optimizer(net, Case(1.0))
    norm = net.blocks[0].norm.weight
    backward(net, seed=0)
    older = norm.grad
    net.zero_grad()
    backward(net, seed=1)
    norm.grad = older
    optimizer.step()
    # The model's own: the optimizer learns nothing of it.
    net.zero_grad()
    backward(net, seed=2)
    optimizer.step()
    optimizer.state  # noqa: B018 - waits


def test_gradients_of_two_backwards_leave_ranks_without_rows_alike(ranks: Ranks) -> None:
    """A copy of no pieces is no copy of the next gradient."""
    ranks(4).run(_rows_of_few_ranks)


def _states_stay() -> None:
    net = make_net(Case(1.0))
    optimizer = make_optimizer(net, Case(1.0))
    backward(net, seed=0)
    optimizer.step()
    wanted = bits(net, optimizer)
    packed = optimizer.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "_process_value_according_to_param_policy", staticmethod(_fail))
        optimizer.load_state_dict(packed)
    assert_same(bits(net, optimizer), wanted)


def test_loaded_states_never_lie_on_the_device_all_at_once(ranks: Ranks) -> None:
    """The base class would move each to its parameter's device."""
    ranks(2).run(_states_stay)
