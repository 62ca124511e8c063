"""Random sequences of calls: HybridDeviceOptimizer leaves the bits that FusedAdam leaves."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from megafsdp import clip_grad_norm_, full_state_dict, load_full_state_dict, microbatch
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.call_sequences import STRATEGIES, TwinCalls, call_in_random_order
from tests.fsdp.toy import batches, mine
from tests.optimizer.offload.hybrid_runs import (
    BF16,
    FP32,
    Case,
    assert_same,
    backward,
    local_bits,
    make_optimizer,
    make_scaled_net,
)
from tests.ranks import Ranks

_NUM_CALLS = 28
_MORE = [pytest.param(seed, marks=pytest.mark.matrix("offload-calls")) for seed in range(6, 120)]


class _Twins(TwinCalls):
    """Two equal nets, one of them stepped with offload, and the calls that both are given."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self._rng
        strategy, policy = rng.choice(STRATEGIES), rng.choice([BF16, FP32])
        self.nets = [make_scaled_net(strategy, policy) for _ in range(2)]
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

    def _seed(self) -> int:
        return self._rng.randrange(1 << 30)

    def _check(self) -> None:
        plain, offloaded = map(local_bits, self.nets, self.optimizers)
        assert_same(offloaded, plain)

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def go_backward(self) -> None:
        seed, hands_over = self._seed(), self._rng.random() < 0.6
        for net in self.nets:
            with microbatch(net, is_last=True) if hands_over else torch.enable_grad():
                backward(net, seed)
        self.has_grads = True

    def train(self) -> None:
        self.go_backward()
        self._step()
        if self._rng.random() < 0.6:
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
        to_none = self._rng.random() < 0.7
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        self.has_grads &= not to_none

    def run_without_backward(self) -> None:
        inputs = mine(batches(1, seed=self._seed())[0])
        with self._rng.choice([torch.no_grad, torch.enable_grad])():
            plain, offloaded = (net(*inputs) for net in self.nets)
        assert torch.equal(plain, offloaded)

    def run_a_last_forward_without_backward(self) -> None:
        inputs = mine(batches(1, seed=self._seed())[0])
        for net in self.nets:
            with microbatch(net, is_last=True):
                net(*inputs)

    def edit_gradients(self) -> None:
        edit = self._rng.choice([lambda grad: grad.mul_(1.5), lambda grad: grad.add_(0.01)])
        self.synchronize()
        with torch.no_grad():
            for net in self.nets:
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        edit(parameter.grad)
        self.step_again()

    def drop_a_gradient(self) -> None:
        name = self._a_name()
        for net in self.nets:
            net.get_parameter(name).grad = None

    def clip(self) -> None:
        if self.has_grads:
            plain, offloaded = (clip_grad_norm_(net.parameters(), 0.2) for net in self.nets)
            assert torch.equal(plain, offloaded)

    def change_hyperparameters(self) -> None:
        name, value = self._rng.choice(
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

    def read(self) -> None:
        self._check()

    def synchronize(self) -> None:
        optimizer = self.optimizers[1]
        assert isinstance(optimizer, HybridDeviceOptimizer)
        optimizer.synchronize()


def _run(seed: int) -> None:
    call_in_random_order(_Twins(seed), _NUM_CALLS, often=["train"] * 5 + ["read"] * 3)


@pytest.mark.parametrize("seed", [*range(6), *_MORE])
def test_any_sequence_of_calls_leaves_the_bits_of_one_without_offload(
    ranks: Ranks, seed: int
) -> None:
    """Weights and states, for every fraction, clipped or not, ahead of the step or after it."""
    ranks(1 + seed % 3).run(_run, seed)
