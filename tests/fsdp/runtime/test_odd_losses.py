"""Losses that reach parameters past a unit's outputs, and edits: gradients are torch's."""

from __future__ import annotations

import copy
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    full_tensor,
    fully_shard,
    microbatch,
    register_fsdp_forward_method,
    summon_full_params,
)
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.device.torch_private import num_gradient_hooks
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.toy import Net, assert_same_grads, batches, mine, pair, shard
from tests.pairwise import gate_of
from tests.ranks import Ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDTH = 8


class _Layers(nn.Module):
    """Three layers, of which the first and the last may be one unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class _HidesItsOutput(_Layers):
    def forward(self, x: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(loss=super().forward(x).square().mean())


class _HidingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> types.SimpleNamespace:  # type: ignore[override]
        return types.SimpleNamespace(y=super().forward(x))


class _HidesAnInnerOutput(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = _HidingLinear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))).y)).square().mean()


class _EditingLinear(nn.Linear):
    def forward(self, state: types.SimpleNamespace) -> None:  # type: ignore[override]
        state.y = super().forward(state.y)


class _EditsAnObject(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = _EditingLinear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = types.SimpleNamespace(y=torch.tanh(self.first(x)))
        self.middle(state)
        return self.last(torch.tanh(state.y)).square().mean()


class _HidesAllOutputs(_Layers):
    """Every unit's output is an object, and the input of the first needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (_HidingLinear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> types.SimpleNamespace:
        for layer in (self.first, self.middle, self.last):
            x = torch.tanh(layer(x).y)
        return types.SimpleNamespace(loss=x.square().mean())


class _LendingLinear(nn.Linear):
    """Returns parameters and views of them beside its output."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.table = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        own = [self.bias, self.scale, self.table]
        return {"y": super().forward(x), "own": own, "views": [self.weight.t(), self.weight[1]]}


class _UsesWhatAnInnerUnitReturns(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = _LendingLinear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.middle(torch.tanh(self.first(x)))
        bias, scale, table = out["own"]
        y = torch.tanh(self.last(torch.tanh(out["y"])) * scale + bias) @ out["views"][0]
        return (y * table + out["views"][1]).square().mean()


class _WeightAlone(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


class _ReturnsNoneButAParameter(_Layers):
    """The last layer and the model return parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = _WeightAlone(WIDTH, WIDTH, bias=False)
        self.factor = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (torch.tanh(self.middle(self.first(x))) @ self.last(x)).square().mean()
        return loss, self.factor


class _ReturnsNothing(_Layers):
    def forward(self, state: types.SimpleNamespace) -> None:  # type: ignore[override]
        state.loss = super().forward(state.x).square().mean()


class _GoesBackInForward(_Layers):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        loss = super().forward(x).square().mean() * scale
        loss.backward()
        return loss.detach()


class _SkipsTheLast(_Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(torch.tanh(self.first(x)))).square().mean()


class _KeepsAFeature(_Layers):
    """The loss is of what a hook has taken out of the middle layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: list[torch.Tensor] = []
        hook = self.middle.register_forward_pre_hook(lambda _, args: features.append(args[0] * 2))
        super().forward(x)
        hook.remove()
        return features[0].square().mean()


def _shard_layers(net: _Layers, *, is_joined: bool = False, **options: object) -> _Layers:
    fully_shard([net.first, net.last] if is_joined else net.first, **options)
    fully_shard(net.middle, **options)
    return fully_shard(net, **options)


def _inputs(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(dist.get_world_size())]


def _matches(
    kind: type[_Layers],
    loss_of: Callable[..., Any],
    strategy: str,
    is_joined: bool,
    num_neighbours: int | None = None,
) -> None:
    reference = kind()
    options = {"strategy": strategy, "reshard_after_forward": num_neighbours}
    net = _shard_layers(copy.deepcopy(reference), is_joined=is_joined, **options)
    groups = [group for unit in units_below([net]).values() for group in unit.groups]
    num_hooks = []
    for step in range(2):
        inputs = _inputs(step)
        for x in inputs:
            loss_of(reference, x, 1 / len(inputs))
        loss_of(net, inputs[dist.get_rank()], 1.0)
        assert_same_grads(net, reference)
        assert not any(unit.is_at_work for unit in units_below([net]).values())
        num_hooks.append(sum(num_gradient_hooks(p.unsharded) for g in groups for p in g.parameters))
        net.state_dict()
        net.zero_grad()
        reference.zero_grad()
    assert num_hooks[0] == num_hooks[1], "hooks on parameters go with the backward"


def _of_loss(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    (model(x) * scale).backward()


def _of_object(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    (model(x).loss * scale).backward()


def _of_edits(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    state = types.SimpleNamespace(x=x)
    model(state)
    (state.loss * scale).backward()


def _of_product(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    loss, factor = model(x)
    (loss * factor * scale).backward()


def _of_itself(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    model(x, scale)


def _of_weights_frozen_since(model: nn.Module, x: torch.Tensor, scale: float) -> None:
    found = model(x)
    model.requires_grad_(False)
    with torch.no_grad():
        model(x)
    model.requires_grad_(True)
    loss = found if isinstance(found, torch.Tensor) else found.loss
    (loss * scale).backward()


# Where weights are freed after forward, torch finds none in a backward that no output has begun.
KEPT = [strategy for strategy in STRATEGIES if strategy != "optim_grads_params"]
WAYS = [
    (_HidesItsOutput, _of_object, False),
    (_GoesBackInForward, _of_itself, False),
    (_SkipsTheLast, _of_loss, True),
    (_HidesAnInnerOutput, _of_loss, False),
    (_HidesAllOutputs, _of_object, False),
    (_HidesAllOutputs, _of_object, True),
    (_ReturnsNothing, _of_edits, False),
    (_EditsAnObject, _of_loss, False),
    (_UsesWhatAnInnerUnitReturns, _of_loss, False),
    (_ReturnsNoneButAParameter, _of_product, False),
    (_KeepsAFeature, _of_loss, False),
    # No output says that a backward begins for which they are to be trained again.
    (_HidesItsOutput, _of_weights_frozen_since, False),
    (_HidesAnInnerOutput, _of_weights_frozen_since, False),
]
PRODUCT = [
    (way, strategy)
    for way in WAYS
    for strategy in (KEPT if way[0] is _KeepsAFeature else STRATEGIES)
]
# Each way where weights are freed after forward, and in one of the strategies that keep them.
SELECTED = [
    *((way, STRATEGIES[-1]) for way in WAYS),
    *zip(WAYS, itertools.cycle(KEPT), strict=False),
]


@pytest.mark.parametrize(("way", "strategy"), gate_of(PRODUCT, "odd-losses", SELECTED))
def test_gradients_that_pass_by_a_units_outputs_are_reduced(
    ranks: Ranks, way: tuple[type[_Layers], Callable[..., Any], bool], strategy: str
) -> None:
    """Nothing is left for the step after, and every unit rests."""
    kind, loss_of, is_joined = way
    ranks(2).run(_matches, kind, loss_of, strategy, is_joined)


def _goes_back_alone(strategy: str) -> None:
    reference = _GoesBackInForward()
    net = fully_shard(copy.deepcopy(reference), strategy=strategy)
    for step in range(2):
        x = _inputs(step)
        for rows in x:
            reference(rows, 1 / len(x))
        net(x[dist.get_rank()])
        assert_same_grads(net, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_without_inner_units_may_go_backward(ranks: Ranks, strategy: str) -> None:
    """No output begins that backward; its gradients are reduced when the forward ends."""
    ranks(2).run(_goes_back_alone, strategy)


class _Penalised(nn.Module):
    """Keeps a penalty of its weight as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.penalty = self.linear.weight.square().sum()
        return y


def _penalised(strategy: str) -> None:
    reference = nn.Sequential(_Penalised(), _Penalised())
    net = copy.deepcopy(reference)
    for unit in net:
        fully_shard(unit, strategy=strategy)
    fully_shard(net, strategy=strategy)
    x = _inputs(0)
    (reference(torch.cat(x)).square().mean() + sum(u.penalty for u in reference)).backward()
    loss = net(x[dist.get_rank()]).square().mean() + sum(u.penalty for u in net)
    if strategy in KEPT:
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        reference.zero_grad()
        net.zero_grad()
        reference(torch.cat(x)).square().mean().backward()
        net(x[dist.get_rank()]).square().mean().backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_reads_no_weights_that_were_freed(ranks: Ranks, strategy: str) -> None:
    """A loss of weights that no output shows is right where they stay gathered, else refused."""
    ranks(2).run(_penalised, strategy)


def test_units_that_no_output_shows_are_not_cut_into_slices(ranks: Ranks) -> None:
    """Nothing would tell when to gather them again."""
    way = (_HidesAllOutputs, _of_object, "optim_grads_params", False)
    ranks(4).run(_matches, *way, 2)


def _frozen_and_hidden() -> None:
    reference = _HidesItsOutput().requires_grad_(False)
    net = fully_shard(copy.deepcopy(reference))
    inputs = [torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_() for _ in range(2)]
    for model, x in zip((reference, net), inputs, strict=True):
        model(x).loss.backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert not net._fsdp_unit().is_unsharded


def test_frozen_weights_are_freed_after_a_backward_that_no_output_has_begun(ranks: Ranks) -> None:
    """No gradient of a parameter tells of it either: that of the input does, at the end."""
    ranks(2).run(_frozen_and_hidden)


def _lends_without_a_graph(strategy: str) -> None:
    reference = _UsesWhatAnInnerUnitReturns()
    net = _shard_layers(copy.deepcopy(reference), strategy=strategy)
    x = _inputs(0)[0]
    with torch.no_grad():
        assert torch.equal(net(x), reference(x))
        views = net.middle(x)["views"]
    assert torch.equal(views[0], reference.middle.weight.t())
    assert not any(unit.is_at_work for unit in units_below([net]).values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_a_unit_returns_are_read_without_a_graph(
    ranks: Ranks, strategy: str
) -> None:
    """They are copies, so the unit's storage is free by then."""
    ranks(2).run(_lends_without_a_graph, strategy)


def _num_hooks(strategy: str) -> list[int]:
    net = _UsesWhatAnInnerUnitReturns()
    table = net.middle.table
    fully_shard(net.middle, strategy=strategy, ignored_params=[table])
    fully_shard(net, strategy=strategy, ignored_params=[table])
    owned = [p for unit in units_below([net]).values() for g in unit.groups for p in g.parameters]
    watched = [table, *(p.unsharded for p in owned)]
    found = []
    for _ in range(3):
        net(_inputs(0)[0]).backward()
        found.append(sum(num_gradient_hooks(p) for p in watched))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_a_unit_returns_gain_no_hooks(ranks: Ranks, strategy: str) -> None:
    """Neither the unit's own nor ignored ones, which outlive the graph of each forward."""
    for first, *others in ranks(2).run(_num_hooks, strategy):
        assert others == [first, first]


def _of_own_rows(p: torch.Tensor) -> torch.Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).square().sum()


def _of_all_rows(p: torch.Tensor) -> torch.Tensor:
    total = p.square().sum() + p.abs().mean() + 0.3 * p.norm()
    return total.full_tensor() if isinstance(total, DTensor) else total


def _of_the_whole(p: torch.Tensor) -> torch.Tensor:
    """Return how far columns are from being orthogonal, which no rank's rows tell."""
    whole = p.full_tensor() if isinstance(p, DTensor) else p
    matrix = whole.view(len(whole), -1)
    return (matrix.T @ matrix - torch.eye(matrix.shape[1])).square().sum()


def _regularised(
    strategy: str, is_before: bool, of_one: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    reference, net = pair(num_blocks=1, strategy=strategy)

    def penalty(model: nn.Module) -> torch.Tensor:
        return sum((of_one(p) for p in model.parameters()), torch.zeros(()))

    for batch in batches(2):
        (reference(*batch) + penalty(reference)).backward()
        first = penalty(net) if is_before else None
        loss = net(*mine(batch))
        (loss + (penalty(net) if first is None else first)).backward()
        assert_same_grads(net, reference)
        reference.zero_grad()
        net.zero_grad()


PENALTIES = (_of_own_rows, _of_all_rows, _of_the_whole)


@pytest.mark.parametrize(
    ("of_one", "strategy", "is_before"),
    gate_of(list(itertools.product(PENALTIES, STRATEGIES, (True, False))), "odd-losses"),
)
def test_losses_of_the_parameters_themselves_add_to_the_models(
    ranks: Ranks, of_one: Callable[[torch.Tensor], torch.Tensor], strategy: str, is_before: bool
) -> None:
    """Autograd gives theirs at any moment of backward, also while a reduction is under way."""
    if strategy != "no_shard" and IS_DISPATCH_BYPASSED:
        pytest.skip("torch 2.11 cuts what autograd makes by itself; there it is refused")
    ranks(2).run(_regularised, strategy, is_before, of_one)


class _Writer(Net):
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def _generates_between(strategy: str, has_sync: bool) -> None:
    reference = _Writer(num_blocks=1)
    net = shard(copy.deepcopy(reference), strategy=strategy)
    register_fsdp_forward_method(net, "generate")
    first, last = batches(2)
    for batch in (first, last):
        reference(*batch).backward()
    if has_sync:
        with microbatch(net, is_last=False):
            net(*mine(first)).backward()
    else:
        net.set_requires_gradient_sync(False)
        net(*mine(first)).backward()
        net.set_requires_gradient_sync(True)
    with torch.no_grad():
        assert torch.equal(net.generate(first[0]), reference.generate(first[0]))
    net(*mine(last)).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("has_sync", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_method_that_calls_the_model_keeps_the_sums_of_microbatches(
    ranks: Ranks, strategy: str, has_sync: bool
) -> None:
    """As a text sample in the middle of a step: its inner forwards are no new beginning."""
    ranks(2).run(_generates_between, strategy, has_sync)


def _sees_edits(strategy: str, how: str) -> None:
    net = shard(Net(num_blocks=1), strategy=strategy, mp_policy=BF16)
    tokens, labels = batches(1)[0]
    before = net(tokens, labels).item()
    with torch.no_grad():
        for parameter in net.parameters():
            if how == "data":
                parameter.data.copy_(2 * parameter)
            else:
                parameter.mul_(2.0)
    after = net(tokens, labels).item()
    fresh = shard(Net(num_blocks=1), strategy=strategy, mp_policy=BF16)
    fresh.load_state_dict(net.state_dict())
    assert after == fresh(tokens, labels).item() != before


@pytest.mark.parametrize("how", ["data", "in place"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_edits_of_parameters_are_seen(ranks: Ranks, strategy: str, how: str) -> None:
    """By the parameter and by its ``.data``, as averages of weights are swapped in."""
    ranks(2).run(_sees_edits, strategy, how)


def _summons_within() -> int:
    net = shard(Net())
    tokens = batches(1)[0][0]
    wanted = net(tokens).detach()
    with torch.no_grad(), summon_full_params(net):
        with summon_full_params(net.blocks[0]):
            assert not isinstance(net.blocks[0].up.weight, DTensor)
        assert not isinstance(net.blocks[0].up.weight, DTensor)
        for _ in range(1 + dist.get_rank()):
            assert torch.equal(net(tokens), wanted)
    assert all(isinstance(p, DTensor) for p in net.parameters())
    return full_tensor(next(net.parameters()).detach()).numel()


def test_full_parameters_stay_until_the_outermost_context_ends(ranks: Ranks) -> None:
    """Ranks may still run the model a different number of times behind the inner one."""
    ranks(2).run(_summons_within)


def _optimizes_full_parameters() -> None:
    net = shard(Net())
    with summon_full_params(net):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1), FusedAdam(net.parameters())]
    net(*mine(batches(1)[0])).backward()
    for optimizer in optimizers:
        with pytest.raises(ValueError, match="not within summon_full_params"):
            optimizer.step()


def test_an_optimizer_of_full_parameters_is_refused(ranks: Ranks) -> None:
    """It would train nothing: they are shown for reading."""
    ranks(2).run(_optimizes_full_parameters)
