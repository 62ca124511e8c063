"""Random sequences of calls around optimizers and checkpoints leave the bits of one process.

Every rank has the same batch, so the mean of equal gradients over 2 or 4 ranks is exact, and no
sum depends on the layout. A load goes on with another strategy on another mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import StepLR

from megafsdp import FusedAdam, Muon, OffloadPolicy, checkpoint, load_full_state_dict
from tests.call_sequences import STRATEGIES, TwinCalls, call_in_random_order
from tests.fsdp.toy import Net, batches, full_tensors, shard
from tests.ranks import Ranks

_NUM_CALLS = 35
_MORE = [pytest.param(seed, marks=pytest.mark.matrix("optimizer-calls")) for seed in range(6, 120)]
_BF16, _FP16, _FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# The last group is the embedding's.
_OPTIMIZERS: list[Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = [
    lambda groups: FusedAdam(groups, lr=1e-2, weight_decay=0.1),
    lambda groups: Muon([groups[0], {**groups[1], "use_muon": False}], lr=1e-2),
    lambda groups: FusedAdam(groups, lr=1e-2, exp_avg_dtype=_FP8, exp_avg_sq_dtype=_FP16),
    lambda groups: Muon(groups, lr=1e-2, bucket_numel=50),
    lambda groups: FusedAdam(groups, lr=1e-2, exp_avg_dtype=_BF16, exp_avg_sq_dtype=_BF16),
    lambda groups: SGD(groups, lr=5e-3, momentum=0.9),
    lambda groups: FusedAdam(groups, lr=1e-2, adam_w_mode=False, weight_decay=0.1),
    lambda groups: AdamW(groups, lr=1e-2, amsgrad=True),
    lambda groups: Adagrad(groups, lr=1e-2),
]


class _Twins(TwinCalls):
    """A plain and a sharded net with equal optimizers, schedules, and checkpoints of them."""

    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(seed)
        self.directory, self.make = directory, _OPTIMIZERS[seed % len(_OPTIMIZERS)]
        self.nets = [plain := Net(), self._sharded(copy.deepcopy(plain))]
        self.optimizers = [self._optimizer(net) for net in self.nets]
        self.schedules = [StepLR(each, 3, 0.7) for each in self.optimizers]
        self.has_grads = False
        # What one process had at each save, by its step, and the save while it is being written.
        self.saved: list[tuple[Any, checkpoint.PendingSave | None]] = []

    def _sharded(self, net: Net) -> nn.Module:
        rng, options = self._rng, {}
        strategy = rng.choice(STRATEGIES)
        if dist.get_world_size() == 4 and rng.random() < 0.6:
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
            if strategy == "optim_grads_params":
                options["outer_strategy"] = rng.choice(["optim", "no_shard"])
        offload = OffloadPolicy(params=rng.random() < 0.15)
        return shard(net, strategy=strategy, offload_policy=offload, **options)

    def _optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        inner = [p for name, p in net.named_parameters() if not name.startswith("embedding")]
        return self.make([{"params": inner}, {"params": [net.embedding.weight], "lr": 5e-3}])

    def _states(self, index: int) -> dict[str, torch.Tensor]:
        """Return values, gradients and states of a net by name."""
        net, optimizer = self.nets[index], self.optimizers[index]
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        states, found = optimizer.state_dict()["state"], {}
        for name, parameter in net.named_parameters():
            found[name] = parameter.detach()
            if parameter.grad is not None:
                found[f"{name}/grad"] = parameter.grad
            number = next(i for i, each in enumerate(ordered) if each is parameter)
            found |= {f"{name}/{k}": torch.as_tensor(v) for k, v in states.get(number, {}).items()}
        return found

    def _check(self) -> None:
        wanted, found = self._states(0), full_tensors(self._states(1))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            own = found[name]
            assert own is not None and own.dtype == value.dtype and torch.equal(own, value), name
        for own_group, group in zip(*(o.param_groups for o in self.optimizers), strict=True):
            assert [own_group[k] for k in ("lr", "weight_decay")] == [
                group[k] for k in ("lr", "weight_decay")
            ]

    def _clear(self) -> None:
        for net in self.nets:
            net.zero_grad()
        self.has_grads = False

    def read(self) -> None:
        self._check()

    def go_backward(self) -> None:
        batch = batches(1, seed=self._rng.randrange(1 << 30))[0]
        for net in self.nets:
            net(*batch).backward()
        self.has_grads = True

    def train(self) -> None:
        self.go_backward()
        self.step()
        self.clear()

    def step(self) -> None:
        if self.has_grads:
            for optimizer in self.optimizers:
                optimizer.step()

    def schedule(self) -> None:
        self.step()
        if self.has_grads:
            for schedule in self.schedules:
                schedule.step()

    def clear(self) -> None:
        to_none = self._rng.random() < 0.7
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        self.has_grads &= not to_none

    def drop_a_gradient(self) -> None:
        name = self._a_name()
        for net in self.nets:
            net.get_parameter(name).grad = None

    def change_an_option(self) -> None:
        index, (name, value) = (
            self._rng.randrange(2),
            self._rng.choice([("lr", 2e-2), ("lr", 4e-3), ("weight_decay", 0.05)]),
        )
        for optimizer in self.optimizers:
            optimizer.param_groups[index][name] = value

    def freeze_or_thaw(self) -> None:
        super().freeze_or_thaw()
        for net in self.nets:
            net.embedding.requires_grad_(True)

    def reload_optimizer(self) -> None:
        state = self.optimizers[1].state_dict()
        if self._rng.random() < 0.5:
            state = copy.deepcopy(state)
            self._replace_optimizer()
        self.optimizers[1].load_state_dict(state)

    def _replace_optimizer(self) -> None:
        schedule = self.schedules[1].state_dict()
        self.optimizers[1] = self._optimizer(self.nets[1])
        self.schedules[1] = StepLR(self.optimizers[1], 3, 0.7)
        self.schedules[1].load_state_dict(schedule)

    def load_full_state(self) -> None:
        state = {name: 0.97 * value for name, value in self.nets[0].state_dict().items()}
        self.nets[0].load_state_dict(state)
        load_full_state_dict(self.nets[1], state)

    def save(self) -> None:
        of_plain = (self.nets[0], self.optimizers[0], self.schedules[0])
        state = copy.deepcopy([each.state_dict() for each in of_plain])
        save = self._rng.choice([checkpoint.save, checkpoint.async_save])
        pending = save(
            self.directory,
            step=len(self.saved) + 1,
            model=self.nets[1],
            optimizer=self.optimizers[1],
            lr_scheduler=self.schedules[1],
        )
        self.saved.append((state, pending if save is checkpoint.async_save else None))

    def load(self) -> None:
        if not self.saved:
            return
        index = self._rng.randrange(len(self.saved))
        states, pending = self.saved[index]
        if pending is not None:
            pending.result()
        self._clear()
        if self._rng.random() < 0.7:
            net = copy.deepcopy(self.nets[0])
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(-3)
            self.nets[1] = self._sharded(net)
            self._replace_optimizer()
        checkpoint.load(
            self.directory,
            step=index + 1,
            model=self.nets[1],
            optimizer=self.optimizers[1],
            lr_scheduler=self.schedules[1],
        )
        of_plain = (self.nets[0], self.optimizers[0], self.schedules[0])
        for each, state in zip(of_plain, copy.deepcopy(states), strict=True):
            each.load_state_dict(state)
        self._check()


def _run(seed: int, directory: Path) -> None:
    often = ["train"] * 5 + ["read"] * 3 + ["save", "load", "schedule"]
    call_in_random_order(_Twins(seed, directory), _NUM_CALLS, often=often)
    checkpoint.wait_for_saves()


@pytest.mark.parametrize("seed", [*range(6), *_MORE])
def test_any_sequence_with_loads_leaves_the_bits_of_one_process(
    ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    """Weights, gradients, states and rates, through saves, also in the background, and loads."""
    ranks((2, 4, 1)[seed // 2 % 3]).run(_run, seed, tmp_path)
