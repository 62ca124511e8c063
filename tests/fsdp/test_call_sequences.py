"""Random sequences of a user's calls leave a sharded net like one process without sharding.

Each other test makes few calls in an order that somebody has thought of. Here what one call leaves
behind meets any other.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafsdp import (
    FSDPModule,
    FusedAdam,
    OffloadPolicy,
    clip_grad_norm_,
    full_state_dict,
    full_tensor,
    fully_shard,
    load_full_state_dict,
    summon_full_params,
)
from tests.call_sequences import STRATEGIES, TwinCalls, call_in_random_order
from tests.fsdp.toy import (
    VOCABULARY,
    assert_same_grads,
    assert_same_parameters,
    batches,
)
from tests.library import library_on_gloo
from tests.ranks import Ranks
from tests.user_comms import UserAllGather, UserReduceScatter, give

_NUM_CALLS = 30
_MORE = [pytest.param(seed, marks=pytest.mark.matrix("calls")) for seed in range(8, 200)]
_MORE_CUT = [pytest.param(seed, marks=pytest.mark.matrix("calls")) for seed in range(2, 100)]


class _FailedError(Exception):
    """What a forward or backward raises when it is asked to."""


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise _FailedError


class _Layer(nn.Module):
    """A residual MLP of any shape; some have a norm, a unit within, parameters of 0 and 3 dims."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        rows, has_bias = rng.choice([1, 3, 7, 20]), rng.random() < 0.5
        self.up = nn.Linear(width, rows, bias=has_bias)
        self.down = nn.Linear(rows, width, bias=has_bias)
        self.inner = nn.Linear(width, width) if rng.random() < 0.4 else None
        self.norm = nn.LayerNorm(width) if rng.random() < 0.4 else nn.Identity()
        self.scale = nn.Parameter(torch.ones(())) if rng.random() < 0.3 else None
        self.cube = nn.Parameter(0.1 * torch.randn(2, 3, width)) if rng.random() < 0.3 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(torch.tanh(self.up(y if self.inner is None else self.inner(y))))
        if self.scale is not None:
            y = y * self.scale
        if self.cube is not None:
            y = y + self.cube.mean((0, 1))
        return x + y


class _Net(nn.Module):
    """Layers that may be skipped or recomputed, one of them maybe twice; the head may be tied."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice([5, 8, 12])
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_Layer(rng, width) for _ in range(rng.choice([2, 3, 4])))
        if rng.random() < 0.3:
            self.layers.append(self.layers[0])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if rng.random() < 0.5:
            self.head.weight = self.embedding.weight
        self.skipped: frozenset[int] = frozenset()
        self.recomputes = self.fails = False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            if index in self.skipped:
                continue
            if self.fails and index == len(self.layers) - 1:
                raise _FailedError
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _cut(net: _Net, mesh: DeviceMesh) -> None:
    """Cut a net over a tensor-parallel mesh, as torch does; the rest of its layers stay plain."""
    is_tied = net.head.weight is net.embedding.weight
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index, layer in enumerate(dict.fromkeys(net.layers)):
        # torch cannot take the gradient of a bias of one element, on one rank either.
        if layer.up.out_features > 1 and layer.up.out_features % mesh.size() == 0:
            plan |= {
                f"layers.{index}.up": ColwiseParallel(),
                f"layers.{index}.down": RowwiseParallel(),
            }
    parallelize_module(net, mesh, plan)
    if is_tied:
        net.head.weight = net.embedding.weight


def _sharded(net: _Net, rng: random.Random, degree: int) -> _Net:
    """Shard a copy of a net in one of many ways, on a mesh with an axis tp if a degree is given."""
    strategy = rng.choice((*STRATEGIES, "optim_grads_params"))
    options: dict[str, Any] = {
        "strategy": strategy,
        "reshard_after_forward": rng.choice([None, True, False]),
        "prefetch": rng.choice([0, 1, 2]),
        "offload_policy": OffloadPolicy(params=rng.random() < 0.15),
    }
    net, has_outer = copy.deepcopy(net), False
    if degree > 0:
        has_outer = rng.random() < 0.5
        shape, names = (2, 1) if has_outer else (1, 2), ("outer", "inner", "tp")
        root = init_device_mesh("cpu", (*shape, degree), mesh_dim_names=names)
        _cut(net, root["tp"])
        options["mesh"] = root["outer", "inner"] if has_outer else root["inner"]
    elif dist.get_world_size() == 4 and rng.random() < 0.6:
        has_outer = True
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if has_outer and strategy == "optim_grads_params" and rng.random() < 0.5:
        options["outer_strategy"] = "optim"
    share = rng.choice([0.0, 0.5, 1.0])
    for layer in dict.fromkeys(net.layers):
        if layer.inner is not None and rng.random() < share / 2:
            fully_shard(layer.inner, **options)
        if rng.random() < share:
            fully_shard(layer, **options)
    fully_shard(net, **options)
    if strategy != "no_shard" and rng.random() < 0.2:
        give(net, UserAllGather(), UserReduceScatter())
    return net


def _optimizer(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    # An epsilon and rates that do not turn rounding noise into steps: gradients add up, uncleared.
    if kind == "fused" and isinstance(net, FSDPModule):
        return FusedAdam(net.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=5e-3, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


class _Twins(TwinCalls):
    """A plain and a sharded net with their optimizers, and the calls that both are given."""

    def __init__(self, seed: int, degree: int) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)
        self.degree = degree
        self.plain = _Net(self._rng)
        for parameter in self.plain.parameters():
            parameter.requires_grad_(self._rng.random() > 0.1)
        self.plain.embedding.requires_grad_(True)
        self.sharded = _sharded(self.plain, self._rng, degree)
        self.nets = (self.plain, self.sharded)
        self.kind = self._rng.choice(["fused", "adamw", "sgd"])
        self.optimizers = [_optimizer(net, self.kind) for net in self.nets]
        # Whether gradients wait for a last microbatch, and whether any are there.
        self.is_pending = self.has_grads = False

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return batches(1, seed=self._rng.randrange(1 << 30))[0]

    def _mine(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the rows of this rank's data rank."""
        degree = max(self.degree, 1)
        num_parts = dist.get_world_size() // degree
        return tuple(each.chunk(num_parts)[dist.get_rank() // degree] for each in batch)

    def _check(self) -> None:
        assert_same_parameters(self.sharded, self.plain, rtol=1e-4, atol=5e-5)

    def _check_grads(self) -> None:
        assert_same_grads(self.sharded, self.plain, rtol=1e-4, atol=2e-5)

    def _note_backward(self, *, is_last: bool = True) -> None:
        self.has_grads, self.is_pending = True, not is_last
        if is_last:
            self._check_grads()

    def train(self) -> None:
        batch = self._batch()
        self.sharded(*self._mine(batch)).backward()
        self.plain(*batch).backward()
        self._note_backward()

    def train_in_eval_mode(self) -> None:
        for net in self.nets:
            net.eval()
        self.train()
        for net in self.nets:
            net.train()

    def microbatch(self) -> None:
        batch = self._batch()
        if self._rng.random() < 0.5:
            with self.sharded.no_sync():
                self.sharded(*self._mine(batch)).backward()
        else:
            self.sharded.set_requires_gradient_sync(False)
            self.sharded(*self._mine(batch)).backward()
            self.sharded.set_requires_gradient_sync(True)
        self.plain(*batch).backward()
        self._note_backward(is_last=False)

    def go_backward_twice(self) -> None:
        batch = self._batch()
        for net, inputs in zip(self.nets, (batch, self._mine(batch)), strict=True):
            loss = net(*inputs)
            loss.backward(retain_graph=True)
            loss.backward()
        self._note_backward()

    def go_forward_twice(self) -> None:
        first, second, order = self._batch(), self._batch(), self._rng.choice(["ab", "ba", "sum"])
        for net, is_whole in zip(self.nets, (True, False), strict=True):
            a, b = (net(*(part if is_whole else self._mine(part))) for part in (first, second))
            losses = {"ab": [a, b], "ba": [b, a], "sum": [a + b]}[order]
            for loss in losses:
                loss.backward()
        self._note_backward()

    def evaluate(self) -> None:
        batch = self._batch()
        context = self._rng.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        with context():
            found, wanted = self.sharded(self._mine(batch)[0]), self.plain(self._mine(batch)[0])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)

    def step(self) -> None:
        if self.has_grads and not self.is_pending:
            for optimizer in self.optimizers:
                optimizer.step()
            self._check()

    def clear_by_optimizer(self) -> None:
        if not self.is_pending:
            to_none = self._rng.random() < 0.7
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            self.has_grads &= not to_none

    def clear_by_net(self) -> None:
        for net in self.nets:
            net.zero_grad()
        self.has_grads = self.is_pending = False

    def clip(self) -> None:
        if self.is_pending or all(p.grad is None for p in self.plain.parameters()):
            return
        clip = self._rng.choice([clip_grad_norm_, nn.utils.clip_grad_norm_])
        norm: Any = clip(self.sharded.parameters(), 0.3)
        wanted = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.3)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        torch.testing.assert_close(norm, wanted, rtol=1e-4, atol=1e-6)
        self._check_grads()

    def edit_gradients(self) -> None:
        if self.has_grads and not self.is_pending:
            with torch.no_grad():
                for net in self.nets:
                    for parameter in net.parameters():
                        if parameter.grad is not None:
                            parameter.grad.add_(parameter.detach(), alpha=0.1)
            self._check_grads()

    def freeze_or_thaw(self) -> None:
        if not self.is_pending:
            super().freeze_or_thaw()
            # Whatever is skipped, a loss has a gradient.
            for net in self.nets:
                net.embedding.requires_grad_(True)

    def load_own_state(self) -> None:
        self.sharded.load_state_dict({k: v.clone() for k, v in self.sharded.state_dict().items()})

    def load_full_state(self) -> None:
        state = {name: 0.97 * value for name, value in self.plain.state_dict().items()}
        self.plain.load_state_dict(state)
        load_full_state_dict(self.sharded, state)

    def read_full_state(self) -> None:
        wanted = self.plain.state_dict()
        found = full_state_dict(self.sharded)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=5e-5)

    def read_full_parameters(self) -> None:
        with summon_full_params(self.sharded):
            for found, wanted in zip(
                *(net.parameters() for net in reversed(self.nets)), strict=True
            ):
                torch.testing.assert_close(full_tensor(found), wanted, rtol=1e-4, atol=5e-5)

    def reload_optimizer(self) -> None:
        state = self.optimizers[1].state_dict()
        self.optimizers[1] = _optimizer(self.sharded, self.kind)
        self.optimizers[1].load_state_dict(state)

    def change_rate(self) -> None:
        factor = self._rng.choice([0.5, 2.0])
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def skip_layers(self) -> None:
        skipped = frozenset(i for i in range(5) if self._rng.random() < 0.3)
        for net in self.nets:
            net.skipped = skipped

    def recompute_or_save(self) -> None:
        for net in self.nets:
            net.recomputes = not net.recomputes

    def unshard_by_hand(self) -> None:
        units = [m for m in self.sharded.modules() if isinstance(m, FSDPModule)]
        unit = self._rng.choice(units)
        unit.unshard()
        unit.reshard()

    def change_resharding(self) -> None:
        self.sharded.set_reshard_after_forward(self._rng.random() < 0.5)

    def run_without_backward(self) -> None:
        self.sharded(*self._mine(self._batch()))

    def fail_in_forward(self) -> None:
        if len(self.plain.layers) - 1 not in self.sharded.skipped:
            self.sharded.fails = True
            with pytest.raises(_FailedError):
                self.sharded(*self._mine(self._batch()))
            self.sharded.fails = False

    def fail_in_backward(self) -> None:
        # Gradients of earlier backwards may have got a part of this one's.
        if not self.has_grads:
            loss = _Fail.apply(self.sharded(*self._mine(self._batch())))
            with pytest.raises(_FailedError):
                loss.backward()
            self._recover()

    def fail_in_hook(self) -> None:
        if not self.has_grads:
            # The hooks of skipped layers run on no rank.
            used = [self.sharded.embedding, *self._layers_that_run(), self.sharded.head]
            parameters = [p for layer in used for p in layer.parameters() if p.requires_grad]
            handle = self._rng.choice(parameters).register_post_accumulate_grad_hook(_fail)
            with pytest.raises(_FailedError):
                self.sharded(*self._mine(self._batch())).backward()
            handle.remove()
            self._recover()

    def _recover(self) -> None:
        if self._rng.random() < 0.5:
            self.sharded.zero_grad()
        else:
            # What the unit has not reduced yet is dropped by the next forward.
            self.optimizers[1].zero_grad()
            self.train()

    def _layers_that_run(self) -> list[nn.Module]:
        layers = self.sharded.layers
        return [layers[i] for i in range(len(layers)) if i not in self.sharded.skipped]


def _fail(parameter: nn.Parameter) -> None:
    raise _FailedError


def _run(seed: int, degree: int = 0) -> None:
    # Half of them with sums by a library, as those of NCCL, which are under way in another order.
    with library_on_gloo() if seed % 8 >= 4 else contextlib.nullcontext():
        call_in_random_order(_Twins(seed, degree), _NUM_CALLS, often=("train", "train", "step"))


@pytest.mark.parametrize("seed", [*range(8), *_MORE])
def test_any_sequence_of_calls_leaves_what_it_leaves_without_sharding(
    ranks: Ranks, seed: int
) -> None:
    """Losses, gradients, weights, norms and states, on one to four ranks, under every strategy."""
    ranks((2, 3, 4, 1)[seed % 4]).run(_run, seed)


@pytest.mark.parametrize("seed", [*range(2), *_MORE_CUT])
def test_any_sequence_of_calls_is_right_beside_tensor_parallelism(ranks: Ranks, seed: int) -> None:
    """The same with layers that torch has cut, at a degree of two, and of one."""
    degree = 1 + seed % 2
    ranks(2 * degree).run(_run, seed, degree)
