"""Training runs of a small net, on the host and on the stand-in, and every bit that they show."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import FusedAdam, MixedPrecisionPolicy, microbatch
from megafsdp.buffer.comm import collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.fsdp.toy import WIDTH, Net, batches, mine, shard
from tests.stand_in.connect import stand_in
from tests.stand_in.device import DEVICE, Order, on_device
from tests.user_comms import give

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy()
_ADAM = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
_NUM_STEPS, _NUM_BLOCKS = 3, 3

Run = Callable[["Case"], dict[str, Any]]


class Odd(Net):
    """The toy with a parameter and a block that are not always used.

    Attributes:
        has_bonus: Whether the parameter is used.
        num_used: How many blocks run.
        fails: Whether backward raises when it has come to the first block.
        comms: Objects of the user's that make collectives.
    """

    def __init__(self) -> None:
        super().__init__(num_blocks=_NUM_BLOCKS)
        self.comms: list[_Gather] = []
        self.bonus = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.has_bonus, self.num_used, self.fails = True, _NUM_BLOCKS, False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        x = self.embedding(tokens)
        if self.has_bonus:
            x = x + self.bonus
        for number, block in enumerate(self.blocks):
            if number < self.num_used:
                x = block(x)
            if self.fails and number == 0:
                x.register_hook(_fail)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("a hook of the user")


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        options: Of fully_shard.
        offload: Of HybridDeviceOptimizer; None for FusedAdam.
        is_sgd: Whether torch's SGD steps, which writes no casts.
        policy: Dtypes.
        mesh: Ranks of the outer and of the inner axis; None for one axis.
        num_microbatches: Of each step.
        says_last: Whether the loop says which microbatch is the last.
        clears: Whether gradients are cleared to None, to zeros, or not at all.
        is_odd: Whether the second step leaves out blocks, and on all ranks but the last a
            parameter; forwards without backward leave out the blocks always.
        fails: Whether a backward of the second step fails first.
        repeats: Whether each step is made twice, with the same gradients.
        comms: Whether objects of the user's make the collectives of all units, and whether each of
            them raises once in the second step.
    """

    options: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] | None = None
    is_sgd: bool = False
    policy: MixedPrecisionPolicy = BF16
    mesh: tuple[int, int] | None = None
    num_microbatches: int = 2
    says_last: bool = True
    clears: Literal["to None", "to zeros", "never"] = "to None"
    is_odd: bool = False
    fails: bool = False
    repeats: bool = False
    comms: Literal["default", "the user's", "failing"] = "default"


class _Gather:
    """A user's all-gather, whose work goes on after the call.

    Attributes:
        fails: Whether the next call raises.
    """

    fails = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory of the device."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        """Gather."""
        self._fail_once()
        pair = output_tensor, input_tensor
        return collectives._all_gather_single(*pair, group=group, async_op=True)

    def _fail_once(self) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError("a link of the user")


class _ReduceScatter(_Gather):
    """A user's reduce-scatter."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any) -> Any:
        """Sum."""
        self._fail_once()
        pair = output_tensor, input_tensor
        return collectives._reduce_scatter_single(*pair, group=group, op=op, async_op=True)


def make_net(case: Case) -> Odd:
    """Return the toy as a case shards it, with the same values every time."""
    options = dict(case.options)
    if case.mesh is not None:
        options["mesh"] = init_device_mesh("cpu", case.mesh, mesh_dim_names=("outer", "inner"))
    net = shard(Odd().to(DEVICE), mp_policy=case.policy, **options)
    assert isinstance(net, Odd)
    if case.comms != "default":
        net.comms = [_Gather(), _ReduceScatter()]
        give(net, *net.comms)
    return net


def make_optimizer(net: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Return the optimizer of a case."""
    if case.is_sgd:
        return torch.optim.SGD(net.parameters(), lr=1e-2, foreach=False)
    if case.offload is None:
        return FusedAdam(net.parameters(), **_ADAM)
    return HybridDeviceOptimizer(net.parameters(), **_ADAM, **case.offload)


def losses_of_steps(
    net: Odd, optimizer: torch.optim.Optimizer, case: Case
) -> Iterator[torch.Tensor]:
    """Train; yield the losses of each step, on the device, before its gradients are cleared."""
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    for step in range(_NUM_STEPS):
        losses = []
        is_second = step == 1
        net.num_used = 1 if case.is_odd and is_second else _NUM_BLOCKS
        net.has_bonus = is_last_rank or not (case.is_odd and is_second)
        parts = [tuple(map(on_device, mine(b))) for b in batches(case.num_microbatches, seed=step)]
        if case.fails and is_second:
            net.fails = True
            with contextlib.suppress(ArithmeticError):
                net(*parts[0]).backward()
            net.fails = False
        if case.comms == "failing" and is_second:
            for comm in net.comms:
                comm.fails = True
                with contextlib.suppress(ArithmeticError):
                    net(*parts[0]).backward()
                assert not comm.fails, "it was called"
                optimizer.zero_grad()
        for number, part in enumerate(parts, start=1):
            is_last = number == len(parts)
            with microbatch(net, is_last=is_last) if case.says_last else contextlib.nullcontext():
                loss = net(*part) / len(parts)
                loss.backward()
                losses.append(loss.detach())
        net.num_used = 1 if case.is_odd else _NUM_BLOCKS
        for _ in range(2 if case.repeats else 1):
            # Nothing waits for it before the step writes the weights that it reads.
            with torch.no_grad():
                losses.append(net(*parts[0]))
            optimizer.step()
        yield torch.stack(losses)
        if case.clears != "never":
            optimizer.zero_grad(set_to_none=case.clears == "to None")


def train(case: Case) -> dict[str, Any]:
    """Train; return all that a run shows on this rank, as numbers."""
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    losses = list(losses_of_steps(net, optimizer, case))
    # Read at the end: the host is as far ahead of the device as it can be.
    return {"losses": torch.stack(losses).tolist()} | bits(net, optimizer)


def bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this rank's rows of every weight and state, as numbers."""
    found = {}
    for name, parameter in net.named_parameters():
        for state_name, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{state_name}"] = local_tensor(value).tolist()
        found[name] = local_tensor(parameter.detach()).tolist()
    return found


def with_orders(cases: Iterable[str], quick: Mapping[str, Order]) -> pytest.MarkDecorator:
    """Return the parameters of a test: all cases in all orders, of which some run by default."""
    parameters = []
    for name, order in itertools.product(cases, Order):
        marks = () if quick.get(name) is order else (pytest.mark.matrix("waits"),)
        parameters.append(pytest.param(name, order, marks=marks, id=f"{name}-{order.value}"))
    return pytest.mark.parametrize(("name", "order"), parameters)


def run_on_host(case: Case, run: Run = train) -> dict[str, Any]:
    """Return what a run shows on the host."""
    # As on the stand-in: the norm of a kernel has other bits, and so has a sum by a library.
    with (
        mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0"),
        mock.patch.object(collectives, "backends", lambda group: {"cpu": "library"}),
    ):
        wanted = run(case)
    assert repr(wanted).count("nan") == 0, "a difference can show"
    return wanted


def differences(
    case: Case, orders: list[Order], run: Run = train, wanted: dict[str, Any] | None = None
) -> list[str]:
    """Return what differs between a run on the host and those on the stand-in, by their orders."""
    found = []
    if wanted is None:
        wanted = run_on_host(case, run)
    for order in orders:
        with stand_in(order):
            shown = run(case)
        assert shown.keys() == wanted.keys()
        found += [f"{order.value}: {name}" for name in wanted if shown[name] != wanted[name]]
    return found
