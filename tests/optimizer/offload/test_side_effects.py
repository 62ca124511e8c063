"""What an offloaded step touches: copies, pinned memory, other parameters, collectives, no rows.

Checkpoints of offloaded optimizers are in the tests of that folder.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafsdp import FusedAdam, MixedPrecisionPolicy, full_tensor, fully_shard, microbatch
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device import host_memory
from megafsdp.device.background import BackgroundThread, Job
from megafsdp.device.host_copies import ThreadLink
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import groups_of
from tests.fsdp.toy import Net, shard
from tests.optimizer.offload.hybrid_runs import (
    BF16,
    Case,
    assert_same,
    backward,
    local_bits,
    make_net,
    make_optimizer,
)
from tests.ranks import Ranks

_PINNING = {"is_pinned", "_pin_memory", "pin_memory"}
_COPYING = {"copy_", "_to_copy", "clone", "to", "contiguous"}


class _Seen:
    """Names of operators: those that met a DTensor, the others; collectives; those beside us."""

    def __init__(self) -> None:
        self.by_dtensor: Counter[str] = Counter()
        self.plain: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()


class _Spy(TorchDispatchMode):
    """Notes what one thread dispatches, with a DTensor among the operands or without."""

    def __init__(self, seen: _Seen, *, is_beside: bool = False) -> None:
        super().__init__()
        self._seen, self._is_beside = seen, is_beside

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note, then run."""
        name = func._schema.name.rpartition("::")[2]
        has_dtensor = any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        (self._seen.by_dtensor if has_dtensor else self._seen.plain)[name] += 1
        self._seen.beside[name] += self._is_beside
        if (kwargs or {}).get("pin_memory"):
            self._seen.plain["pin_memory"] += 1
        if func.namespace in ("c10d", "_c10d_functional"):
            self._seen.collectives[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class _SpiedJob:
    """A job of a thread beside us, which modes do not reach by themselves."""

    job: Job
    seen: _Seen

    @property
    def urgency(self) -> int:
        """Return the job's."""
        return self.job.urgency

    @property
    def can_begin(self) -> bool:
        """Return the job's."""
        return self.job.can_begin

    def run(self) -> None:
        """Do the work, seen."""
        with _Spy(self.seen, is_beside=True):
            self.job.run()


@contextmanager
def _spying() -> Iterator[_Seen]:
    """See what this thread and those beside it dispatch."""
    seen = _Seen()
    inner = BackgroundThread.submit

    def submit(thread: BackgroundThread, job: Job) -> None:
        inner(thread, _SpiedJob(job, seen))

    with pytest.MonkeyPatch.context() as patch, _Spy(seen):
        patch.setattr(BackgroundThread, "submit", submit)
        yield seen


def _copies_are_local(max_grad_norm: float | None, strategy: str) -> None:
    net = make_net(Case(strategy=strategy, num_blocks=1))
    with _spying() as seen:
        optimizer = make_optimizer(net, Case(1.0, max_grad_norm=max_grad_norm, speculate=True))
        for seed in range(2):
            with microbatch(net, is_last=True):
                backward(net, seed)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.state  # noqa: B018 - Waits for the worker.
        of_steps = seen.by_dtensor.copy()
        mesh = net.embedding.weight.device_mesh
        DTensor.from_local(torch.ones(1), mesh, run_check=False).clone()
    assert isinstance(optimizer, HybridDeviceOptimizer)
    runs_ahead = max_grad_norm is not None and strategy != "no_shard"
    assert (optimizer.offload_counts.speculated > 0) == runs_ahead
    assert seen.beside["copy_"] > 0, "gradients are copied beside this thread"
    assert seen.by_dtensor["clone"] == of_steps["clone"] + 1, "the spy sees DTensors"
    assert not (_PINNING | _COPYING) & of_steps.keys(), of_steps


@pytest.mark.parametrize(
    ("max_grad_norm", "strategy"),
    [(None, "optim_grads_params"), (1e3, "optim_grads_params"), (1e3, "no_shard")],
)
def test_copies_never_dispatch_through_dtensor(
    ranks: Ranks, max_grad_norm: float | None, strategy: str
) -> None:
    """Weights and gradients are moved, cast and pinned as the plain tensors of this rank."""
    ranks(2).run(_copies_are_local, max_grad_norm, strategy)


_FLAGS = [(True, True), (True, False), (False, True), (False, False)]


def _train_with_flags(pins_params: bool, pins_grads: bool, device: str) -> tuple[int, int, Any]:
    """Return the bytes that were asked for pinned, those that were not, and the bits."""
    nbytes: Counter[bool] = Counter()
    inner = host_memory.host_bytes

    def noted(num: int, *, is_pinned: bool, is_meta: bool = False) -> torch.Tensor:
        nbytes[is_pinned] += num
        return inner(num, is_pinned=is_pinned, is_meta=is_meta)

    net = shard(Net(num_blocks=1).to(device), mp_policy=BF16)
    with pytest.MonkeyPatch.context() as patch, _spying() as seen:
        patch.setattr(host_memory, "host_bytes", noted)
        optimizer = HybridDeviceOptimizer(
            net.parameters(), pin_cpu_params=pins_params, pin_cpu_grads=pins_grads
        )
        tokens = torch.arange(8, device=device).view(2, 4)
        net(tokens, tokens).backward()
        optimizer.step()
        found = local_bits(net, optimizer)
    assert device == "cuda" or not _PINNING & (seen.by_dtensor + seen.plain).keys()
    is_host_pinned = {local_tensor(p).is_pinned() for p in net.parameters()}
    assert is_host_pinned == {pins_params and device == "cuda"}
    return nbytes[True], nbytes[False], {name: value.cpu() for name, value in found.items()}


def _flags_without_cuda() -> None:
    found = [_train_with_flags(*flags, "cpu") for flags in _FLAGS]
    for pinned, pageable, own in found:
        assert (pinned, pageable) == (0, found[0][1])
        assert pageable > 0
        assert_same(own, found[0][2])


def test_nothing_is_pinned_without_cuda_whatever_the_flags_say(ranks: Ranks) -> None:
    """Both flags are on by default, and no tensor is pinned or asked whether it is."""
    ranks(2).run(_flags_without_cuda)


def _flags_on_cuda() -> None:
    both, params, grads, neither = (_train_with_flags(*flags, "cuda") for flags in _FLAGS)
    assert neither[0] == 0
    assert params[0] > grads[0] > 0
    assert (both[0], both[1]) == (params[0] + grads[0], 0)
    for _, _, own in (params, grads, neither):
        assert_same(own, both[2])


@pytest.mark.gpu
def test_the_flags_alone_decide_what_is_pinned(ranks: Ranks) -> None:
    """One for weights, states and what is copied back, one for gradients."""
    ranks(1, "nccl").run(_flags_on_cuda)


class _Mixed:
    """The sharded toy, a plain tensor, and one that torch shards, all in one optimizer."""

    def __init__(self, fraction: float | None) -> None:
        self.net = make_net(Case())
        torch.manual_seed(5)
        self.plain = nn.Parameter(torch.randn(7))
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        self.foreign = nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]))
        own = [p for name, p in self.net.named_parameters() if name != "blocks.1.up.weight"]
        params = [{"params": own}, {"params": [self.plain, self.foreign], "lr": 2e-2}]
        self.other = torch.optim.SGD([self.net.blocks[1].up.weight], lr=1e-2)
        self.optimizer = FusedAdam(params, lr=1e-2, eps=1e-5)
        if fraction is not None:
            self.optimizer = HybridDeviceOptimizer(
                params, lr=1e-2, eps=1e-5, offload_fraction=fraction
            )

    def train(self) -> None:
        """Step three times."""
        for seed in range(3):
            backward(self.net, seed)
            for parameter in (self.plain, self.foreign):
                parameter.grad = torch.full_like(parameter, 0.5 + seed)
            for stepped in (self.optimizer, self.other):
                stepped.step()
                stepped.zero_grad()

    def bits(self) -> dict[str, torch.Tensor]:
        """Return all weights and the states of what is not the toy's; collective."""
        found = {n: full_tensor(p.detach()).clone() for n, p in self.net.named_parameters()}
        for name, parameter in (("plain", self.plain), ("foreign", self.foreign)):
            found[name] = full_tensor(parameter.detach()).clone()
            for state_name, value in self.optimizer.state[parameter].items():
                found[f"{name}.{state_name}"] = full_tensor(value).clone()
        return found


def _others_are_untouched() -> None:
    wanted = _Mixed(None)
    wanted.train()
    mixed = _Mixed(1.0)
    shared = mixed.net.blocks[1].up.weight
    on_host = [g.host_memory is not None for g in groups_of(mixed.net.parameters())]
    assert any(on_host)
    assert not all(on_host), "a group that is shared with another optimizer stays"
    assert groups_of([shared])[0].host_memory is None
    before = [local_tensor(p).data_ptr() for p in (mixed.plain, mixed.foreign, shared)]
    mixed.train()
    mixed.optimizer.synchronize()
    assert before == [local_tensor(p).data_ptr() for p in (mixed.plain, mixed.foreign, shared)]
    for name, value in mixed.optimizer.state[mixed.plain].items():
        assert not isinstance(value, DTensor), name
    assert type(mixed.optimizer.state[mixed.foreign]["exp_avg"]) is DTensor
    assert_same(mixed.bits(), wanted.bits())


def test_only_parameters_of_units_are_repacked(ranks: Ranks) -> None:
    """Plain tensors, another library's, and another optimizer's stay as and where they are."""
    ranks(2).run(_others_are_untouched)


def _narrow_weights_stay() -> None:
    found = []
    for kind in (FusedAdam, HybridDeviceOptimizer):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        for layer, dtype in zip(model, (torch.bfloat16, torch.float32), strict=True):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(main_params_dtype=dtype))
        optimizer = kind(model.parameters(), lr=1e-2)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5 - step)
            optimizer.step()
        found.append(local_bits(model, optimizer))
    narrow, wide = groups_of(model.parameters())
    assert narrow.host_memory is None and wide.host_memory is not None
    assert_same(found[1], found[0])


def test_main_weights_that_are_not_fp32_stay_on_the_device(ranks: Ranks) -> None:
    """They are stepped there, beside those on the host."""
    ranks(2).run(_narrow_weights_stay)


def _plain_model_alone() -> None:
    found = []
    for kind in (FusedAdam, HybridDeviceOptimizer):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        optimizer = kind(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        addresses = [p.data_ptr() for p in model.parameters()]
        for _ in range(3):
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert addresses == [p.data_ptr() for p in model.parameters()]
        found.append(local_bits(model, optimizer))
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert (optimizer.host_nbytes, optimizer.offloaded_fraction) == (0, 0.0)
    assert_same(found[1], found[0])


def test_a_model_without_units_is_stepped_where_it_is(ranks: Ranks) -> None:
    """There is nothing to offload, and nothing is."""
    ranks(2).run(_plain_model_alone)


def _states_need_no_collective() -> Counter[str]:
    net = make_net(Case())
    backward(net, 0)
    with record_collectives() as record, _spying() as seen:
        optimizer = make_optimizer(net, Case(1.0))
        optimizer.step()
        shown = [state for p in net.parameters() for state in optimizer.state[p].values()]
        optimizer.load_state_dict(optimizer.state_dict())
        for parameter in net.parameters():
            optimizer.canonical_state(parameter)
    assert any(isinstance(state, DTensor) for state in shown)
    assert not record.calls
    assert not seen.collectives
    with _spying() as seen:
        net(torch.zeros(1, 2, dtype=torch.long))
    return seen.collectives


def test_wrapping_states_checks_nothing_across_ranks(ranks: Ranks) -> None:
    """States become sharded tensors by arithmetic; the spy does see a gather."""
    for seen in ranks(2).run(_states_need_no_collective):
        assert sum(seen.values()) > 0


class _FewRows(nn.Module):
    """Three rows: with four ranks one of them has none of the only unit's matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 6) to (B, 3)."""
        return self.second(self.first(x))


def _mixed_grads() -> None:
    found = []
    for fraction in (None, 1.0):
        net = make_net(Case())
        optimizer = make_optimizer(net, Case(fraction))
        backward(net, 0)
        older = [parameter.grad for parameter in net.parameters()]
        optimizer.zero_grad()
        backward(net, 1)
        for parameter, grad in list(zip(net.parameters(), older, strict=True))[::2]:
            assert parameter.grad is not grad
            parameter.grad = grad
        optimizer.step()
        found.append(local_bits(net, optimizer))
    assert_same(found[1], found[0])


def test_gradients_of_two_backwards_are_copied_from_where_they_are(ranks: Ranks) -> None:
    """A user may have kept some of an older one, which lie in another buffer."""
    ranks(2).run(_mixed_grads)


def _grads_are_freed(how: str) -> None:
    case, link = Case(1.0, max_grad_norm=100.0, speculate=False), ThreadLink()
    net = make_net(case)
    optimizer = make_optimizer(net, case, link=link)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    with microbatch(net, is_last=True):
        backward(net, seed=0)
    grads = [group.gradients.main_grad.buffer for group in groups_of(net.parameters())]
    flats = [weakref.ref(buffer.flat) for buffer in grads if buffer is not None]
    del grads
    if how != "no step":
        optimizer.step()
    # Copies are made in order, so those of all gradients are complete.
    link.to_host([(torch.zeros(1), torch.zeros(1))]).wait()
    assert len(flats) == 4 and all(flat() is not None for flat in flats)
    if how == "cleared by hand":
        optimizer.synchronize()
        for parameter in net.parameters():
            parameter.grad = None
    else:
        optimizer.zero_grad()
    assert not any(flat() is not None for flat in flats)


@pytest.mark.parametrize("how", ["no step", "step", "cleared by hand"])
def test_gradients_are_freed_once_they_are_cleared(ranks: Ranks, how: str) -> None:
    """Their copies have read them; the step on the host may be under way, or never come."""
    ranks(2).run(_grads_are_freed, how)


def _few_rows() -> dict[str, Any]:
    found = []
    for fraction in (None, 1.0):
        model = _FewRows()
        for layer in (model.first, model.second):
            fully_shard(layer, mp_policy=BF16)
        optimizer = make_optimizer(model, Case(fraction))
        for seed in range(3):
            torch.manual_seed(10 * seed + dist.get_rank())
            model(torch.randn(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(local_bits(model, optimizer))
    assert_same(found[1], found[0])
    assert isinstance(optimizer, HybridDeviceOptimizer)
    parameters = list(model.parameters())
    return {
        "rows": [local_tensor(p).shape[0] for p in parameters],
        "on host": [g.host_memory is not None for g in groups_of(parameters)],
        "fraction": optimizer.offloaded_fraction,
        "nbytes": optimizer.host_nbytes,
        "states": [sorted(optimizer.state[p]) for p in parameters],
        "shapes": [tuple(optimizer.state[p]["exp_avg"].shape) for p in parameters],
        "counts": [optimizer.state[p]["step"].item() for p in parameters],
    }


def test_shards_without_rows_are_offloaded_with_the_others(ranks: Ranks) -> None:
    """A rank at the end that holds nothing of a unit treats it as the other ranks do."""
    found = ranks(4).run(_few_rows)
    for rows in zip(*(own.pop("rows") for own in found), strict=True):
        assert sum(rows) == 3
        assert 0 in rows
    wanted = {"on host": [True, True], "fraction": 1.0, "nbytes": found[0]["nbytes"]}
    wanted |= {"states": [["exp_avg", "exp_avg_sq", "step"]] * 2}
    wanted |= {"shapes": [(3, 6), (3, 3)], "counts": [3.0, 3.0]}
    assert found == [wanted] * 4
