"""Random sequences of calls: HybridDeviceOptimizer leaves the bits that FusedAdam leaves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from megafsdp import clip_grad_norm_, full_state_dict, load_full_state_dict, microbatch
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.fsdp.toy import Net, batches, mine, shard
from tests.optimizer.offload.hybrid_runs import (
    BF16,
    FP32,
    Case,
    assert_same,
    backward,
    local_bits,
    make_optimizer,
)
from tests.ranks import Ranks

_NUM_CALLS = 28
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_MORE = [pytest.param(seed, marks=pytest.mark.matrix("offload-calls")) for seed in range(6, 120)]


class _Session:
    """Two equal nets, one of them stepped with offload, and the calls that both are given."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        strategy, policy = rng.choice(_STRATEGIES), rng.choice([BF16, FP32])
        self.nets = [self._net(strategy, policy) for _ in range(2)]
        overlaps = rng.random() < 0.8
        case = Case(
            rng.choice([0.3, 0.5, 1.0, "auto"]),
            overlaps,
            rng.choice([None, 0.3, 2.0]),
            speculate=rng.choice([True, False, "auto"] if overlaps else [False, "auto"]),
        )
        self.cases = [replace(case, fraction=None), case]
        self.optimizers = list(map(make_optimizer, self.nets, self.cases))
        self.has_grads = False

    @staticmethod
    def _net(strategy: str, policy: object) -> Net:
        net = Net()
        net.scale = nn.Parameter(torch.ones(()))  # Replicated under every strategy.
        net.norm.register_forward_hook(lambda _, inputs, output: output * net.scale)
        return shard(net, strategy=strategy, mp_policy=policy)

    def _seed(self) -> int:
        return self.rng.randrange(1 << 30)

    def _check(self) -> None:
        plain, offloaded = map(local_bits, self.nets, self.optimizers)
        assert_same(offloaded, plain)

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def go_backward(self) -> None:
        seed, hands_over = self._seed(), self.rng.random() < 0.6
        for net in self.nets:
            with microbatch(net, is_last=True) if hands_over else torch.enable_grad():
                backward(net, seed)
        self.has_grads = True

    def train(self) -> None:
        self.go_backward()
        self._step()
        if self.rng.random() < 0.6:
            self.clear()

    def train_two_microbatches(self) -> None:
        first, second = self._seed(), self._seed()
        for net in self.nets:
            with microbatch(net, is_last=False):
                backward(net, first)
            with microbatch(net, is_last=True):
                backward(net, second)
        self._step()
        self.clear()

    def step_again(self) -> None:
        if self.has_grads:
            self._step()

    def clear(self) -> None:
        to_none = self.rng.random() < 0.7
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        self.has_grads &= not to_none

    def run_without_backward(self) -> None:
        inputs = mine(batches(1, seed=self._seed())[0])
        with self.rng.choice([torch.no_grad, torch.enable_grad])():
            plain, offloaded = (net(*inputs) for net in self.nets)
        assert torch.equal(plain, offloaded)

    def run_a_last_forward_without_backward(self) -> None:
        inputs = mine(batches(1, seed=self._seed())[0])
        for net in self.nets:
            with microbatch(net, is_last=True):
                net(*inputs)

    def edit_a_weight(self) -> None:
        name = self.rng.choice([name for name, _ in self.nets[0].named_parameters()])
        with torch.no_grad():
            for net in self.nets:
                net.get_parameter(name).mul_(0.9)

    def edit_gradients(self) -> None:
        edit = self.rng.choice([lambda grad: grad.mul_(1.5), lambda grad: grad.add_(0.01)])
        self.synchronize()
        with torch.no_grad():
            for net in self.nets:
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        edit(parameter.grad)
        self.step_again()

    def drop_a_gradient(self) -> None:
        name = self.rng.choice([name for name, _ in self.nets[0].named_parameters()])
        for net in self.nets:
            net.get_parameter(name).grad = None

    def freeze_or_thaw(self) -> None:
        name = self.rng.choice([name for name, _ in self.nets[0].named_parameters()])
        for net in self.nets:
            parameter = net.get_parameter(name)
            parameter.requires_grad_(not parameter.requires_grad)
            if not parameter.requires_grad:
                parameter.grad = None

    def clip(self) -> None:
        if self.has_grads:
            plain, offloaded = (clip_grad_norm_(net.parameters(), 0.2) for net in self.nets)
            assert torch.equal(plain, offloaded)

    def change_hyperparameters(self) -> None:
        name, value = self.rng.choice(
            [("lr", 2e-2), ("lr", 5e-3), ("weight_decay", 0.05), ("betas", (0.8, 0.95))]
        )
        for optimizer in self.optimizers:
            optimizer.param_groups[0][name] = value

    def reload_optimizers(self) -> None:
        for index, (net, case) in enumerate(zip(self.nets, self.cases, strict=True)):
            state = copy.deepcopy(self.optimizers[index].state_dict())
            for parameter in net.parameters():
                parameter.requires_grad_(True)
            self.optimizers[index] = make_optimizer(net, case)
            self.optimizers[index].load_state_dict(state)

    def load_full_state(self) -> None:
        state = {name: 0.98 * value for name, value in full_state_dict(self.nets[0]).items()}
        for net in self.nets:
            load_full_state_dict(net, state)

    def synchronize(self) -> None:
        optimizer = self.optimizers[1]
        assert isinstance(optimizer, HybridDeviceOptimizer)
        optimizer.synchronize()


_CALLS: dict[str, Callable[[_Session], None]] = {
    name: call
    for name, call in vars(_Session).items()
    if callable(call) and not name.startswith("_")
}
# What the other calls need is called more often.
_NAMES = (*_CALLS, *["train"] * 5)


def _run(seed: int) -> None:
    session, called = _Session(seed), []
    for _ in range(_NUM_CALLS):
        called.append(session.rng.choice(_NAMES))
        try:
            _CALLS[called[-1]](session)
            # Not always: reading waits for the host.
            if session.rng.random() < 0.2:
                session._check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {', '.join(called)}") from error
    session._check()


@pytest.mark.parametrize("seed", [*range(6), *_MORE])
def test_any_sequence_of_calls_leaves_the_bits_of_one_without_offload(
    ranks: Ranks, seed: int
) -> None:
    """Weights and states, for every fraction, clipped or not, ahead of the step or after it."""
    ranks(1 + seed % 3).run(_run, seed)
