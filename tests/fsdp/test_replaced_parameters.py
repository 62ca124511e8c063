"""Parameters that were assigned, tied, removed or added after fully_shard: a forward names them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from megafsdp import FusedAdam, fully_shard, summon_full_params
from megafsdp.buffer.comm.collectives import record_collectives
from tests.fsdp.toy import (
    WIDTH,
    Net,
    assert_same_grads,
    assert_same_parameters,
    batches,
    mine,
    options_of_strategies,
    pair,
    shard,
    train_both,
)
from tests.ranks import Ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _resize(net: Net) -> None:
    net.blocks[1].up.weight = nn.Parameter(torch.zeros(3, WIDTH))


def _merge(net: Net) -> None:
    net.blocks[1].up.weight = nn.Parameter(torch.zeros(5 * WIDTH, WIDTH))


def _untie(net: Net) -> None:
    net.head.weight = nn.Parameter(torch.zeros(net.head.weight.shape))


def _tie(net: Net) -> None:
    net.blocks[1].norm.weight = net.norm.weight


def _remove(net: Net) -> None:
    net.blocks[1].up.bias = None


def _prune(net: Net) -> None:
    with torch.no_grad():
        prune.identity(net.blocks[1].up, "bias")


class _Transposing(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t().t()


def _parametrize(net: Net) -> None:
    register_parametrization(net.blocks[1].up, "weight", _Transposing(), unsafe=True)


def _assign_dtensor(net: Net) -> None:
    weight = net.blocks[1].up.weight
    full = torch.zeros(weight.shape)
    net.blocks[1].up.weight = nn.Parameter(
        DTensor.from_local(full, weight.device_mesh, [Replicate()], run_check=False)
    )


# What is done to a sharded net, and words that name the old parameter, the new one and the cure.
CHANGES: dict[Callable[[Net], None], tuple[str, ...]] = {
    _resize: ("'up.weight' of shape (60, 12)", "Parameter of shape (3, 12)", "load_state_dict()"),
    _merge: ("'up.weight' of shape (60, 12)", "Parameter of shape (60, 12)", "'blocks.1'"),
    _untie: ("'embedding.weight' of shape (37, 12)", "'weight' of Linear", "unit 'Net'"),
    _tie: ("'norm.weight' of shape (12,)", "'norm.weight' of unit 'Net'", "before fully_shard()"),
    _remove: ("'up.bias' of shape (60,)", "none, in its place", "Assign it before"),
    _prune: ("'up.bias' of shape (60,)", "'bias' of Linear", "unit 'blocks.1'"),
    _parametrize: (
        "'up.weight' of shape (60, 12)",
        "a parametrization of it",
        "before fully_shard()",
    ),
    _assign_dtensor: ("'up.weight' of shape (60, 12)", "of shape (60, 12)", "'weight' of Linear"),
}


def _refused(words: tuple[str, ...], call: Callable[..., object], *args: object) -> None:
    with record_collectives() as record, pytest.raises(RuntimeError) as caught:
        call(*args)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not record.calls


def _replaced_in_every_strategy() -> None:
    for options in options_of_strategies():
        _replaced(options)


@contextlib.contextmanager
def _changed(net: Net, change: Callable[[Net], None]) -> Iterator[None]:
    """Change a net, and take the change back."""
    own = [
        (kept, dict(kept))
        for module in net.modules()
        for kept in (
            module._parameters,
            module._buffers,
            module._modules,
            module._forward_pre_hooks,
        )
    ]
    attributes = [(module, set(vars(module))) for module in net.modules()]
    classes = [(module, type(module)) for module in net.modules()]
    change(net)
    yield
    for module, cls in classes:
        module.__class__ = cls
    for kept, before in own:
        kept.clear()
        kept.update(before)
    for module, names in attributes:
        for name in set(vars(module)) - names:
            del vars(module)[name]


def _replaced(options: dict[str, object]) -> None:
    batch = mine(batches(1)[0])
    trained = shard(Net(2), **options)
    trained(*batch).backward()
    for change, words in CHANGES.items():
        for net in (shard(Net(2), **options), trained):
            # The errors name units within the root, which is known from the first forward on.
            num_known = len(words) if net is trained else 1 if "unit '" in words[1] else 2
            with _changed(net, change):
                _refused(words[:num_known], net, *batch)
                with pytest.raises(RuntimeError, match="in its place"), summon_full_params(net):
                    pass
    trained(*batch).backward()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_next_forward_names_a_replaced_parameter_and_what_replaced_it(
    ranks: Ranks, num_ranks: int
) -> None:
    """Before the first forward or later, on all ranks, before any collective."""
    ranks(num_ranks).run(_replaced_in_every_strategy)


def _goes_on() -> None:
    for strategy in STRATEGIES:
        reference, net = pair(2, strategy=strategy)
        layer = net.blocks[1].up
        own, other = layer.weight, nn.Parameter(torch.zeros(5 * WIDTH, WIDTH))
        first, second = batches(2)
        loss = net(*mine(first))
        # Backward needs what forward read, whatever has been assigned since.
        layer.weight = other
        loss.backward()
        reference(*first).backward()
        assert layer.weight is other
        _refused(("'up.weight'",), net, *mine(second))
        layer.weight = own
        assert_same_grads(net, reference)
        with summon_full_params(net):
            layer.weight = other
        assert layer.weight is other, "not dropped"
        layer.weight = own
        # A unit alone, and one that is gathered by hand.
        net.blocks[0].up.weight, before = other, net.blocks[0].up.weight
        x = torch.randn(2, WIDTH)
        _refused(("'up.weight'",), net.blocks[0], x)
        _refused(("'up.weight'",), net.blocks[0].unshard)
        net.blocks[1](x)
        net.blocks[0].up.weight = before
        for batch in (second, first):
            net(*mine(batch)).backward()
            reference(*batch).backward()
        assert_same_grads(net, reference)


def test_nothing_is_lost_where_the_parameter_is_put_back(ranks: Ranks) -> None:
    """Gradients are those of a model that nobody touched."""
    ranks(2).run(_goes_on)


class Recomputed(nn.Module):
    """A block that is recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of x."""
        y: torch.Tensor = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return y


def _recomputes() -> None:
    block = Recomputed(fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    net = fully_shard(nn.Sequential(nn.Linear(4, 4), block))
    y = net(torch.ones(2, 4)).sum()
    own = block.block[0].weight
    block.block[0].weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match=r"'0\.weight' of shape"):
        y.backward()
    block.block[0].weight = own
    net(torch.ones(2, 4)).sum().backward()


def test_a_recomputed_forward_names_it_too(ranks: Ranks) -> None:
    """Its graph would be another one than that of the forward."""
    ranks(2).run(_recomputes)


def _called_with_others() -> None:
    for strategy in STRATEGIES:
        _, net = pair(1, strategy=strategy)
        batch = mine(batches(1)[0])
        others = {"norm.weight": torch.zeros(WIDTH)}
        words = ("'norm.weight'", "another Tensor of shape (12,)")
        _refused(words, torch.func.functional_call, net, others, batch)
        net(*batch).backward()


def test_functional_call_with_other_values_is_refused(ranks: Ranks) -> None:
    """It would be called with the own ones."""
    ranks(2).run(_called_with_others)


class Adapter(nn.Module):
    """What PEFT puts in the place of a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.first = nn.Linear(layer.in_features, 2, bias=False)
        self.second = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the adapter's."""
        y: torch.Tensor = self.layer(x) + self.second(self.first(x))
        return y


def _register(net: Net) -> None:
    net.blocks[1].up.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def _adapt(net: Net) -> None:
    net.blocks[0].up = Adapter(net.blocks[0].up)


def _append(net: Net) -> None:
    net.blocks.append(nn.Linear(WIDTH, WIDTH))


ADDITIONS: dict[Callable[[Net], None], tuple[str, ...]] = {
    _register: ("'blocks.1.up.extra'",),
    _adapt: ("'blocks.0.up.first.weight', 'blocks.0.up.second.weight'",),
    _append: ("'blocks.2.weight', 'blocks.2.bias'",),
}


def _added_in_every_strategy() -> None:
    batch = mine(batches(1)[0])
    for options in options_of_strategies():
        for add, words in ADDITIONS.items():
            net = shard(Net(2), **options)
            # A unit that ran alone is known; the root's first forward looks at all.
            net.blocks[1](torch.randn(2, WIDTH))
            add(net)
            _refused(
                (*words, "registered after fully_shard()", "before fully_shard()"), net, *batch
            )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_first_forward_names_parameters_that_no_unit_has(ranks: Ranks, num_ranks: int) -> None:
    """Registered, in an adapter or a new module; on all ranks, before any collective."""
    ranks(num_ranks).run(_added_in_every_strategy)


def _allowed_additions() -> None:
    net = Net(2)
    net.blocks[0].up = Adapter(net.blocks[0].up)
    ignored = [net.blocks[0].up.first.weight]
    for block in net.blocks:
        fully_shard(block, ignored_params=iter(ignored))
    # The root's unit takes what was added before it, and a unit of its own what comes later.
    net.norm.extra = nn.Parameter(torch.zeros(3))
    fully_shard(net, ignored_params=ignored)
    fully_shard(net.blocks.append(nn.Linear(WIDTH, WIDTH))[-1])
    net.blocks[1].frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    # A load with assign=True replaces ignored parameters.
    net.blocks[0].up.first.weight = nn.Parameter(ignored[0].detach().clone())
    net(*mine(batches(1)[0])).backward()


def test_ignored_and_frozen_parameters_and_later_units_are_let_be(ranks: Ranks) -> None:
    """Ignored ones by their place, whoever ignores them."""
    ranks(2).run(_allowed_additions)


def _head(net: Net) -> None:
    net.head = nn.Linear(WIDTH, 5)


def _added_in_mid_training() -> None:
    first, second = batches(2)
    for add, words in {**ADDITIONS, _head: ("'head.weight', 'head.bias'",)}.items():
        net = shard(Net(2))
        net(*mine(first)).backward()
        add(net)
        # The error stays until it is mended.
        for _ in range(2):
            _refused((*words, "registered after fully_shard()", "a forward of"), net, *mine(second))


def test_a_later_forward_names_parameters_that_no_unit_has(ranks: Ranks) -> None:
    """A model that has trained is looked at again once something was registered."""
    ranks(2).run(_added_in_mid_training)


def _units_in_mid_training() -> None:
    reference, net = pair(2)
    train_both(reference, net, num_steps=1)
    for model in (reference, net):
        torch.manual_seed(3)
        model.blocks[1] = nn.Linear(WIDTH, WIDTH)
        model.blocks.append(nn.Linear(WIDTH, WIDTH))
    first = reference.blocks[2].weight.detach().clone()
    for block in net.blocks[1:]:
        fully_shard(block)
    train_both(reference, net, num_steps=2)
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-6)
    assert not torch.equal(reference.blocks[2].weight, first)


def test_units_that_replace_or_follow_others_in_mid_training_train(ranks: Ranks) -> None:
    """As the error says: new modules get fully_shard() calls of their own."""
    ranks(2).run(_units_in_mid_training)


class _Language(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(7, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        if is_tied:
            self.tie()

    def tie(self) -> None:
        self.embedding.weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens))).logsumexp(-1).mean()


def _tied_later(strategy: str) -> None:
    reference, net = _Language(is_tied=True), _Language(is_tied=False)
    fully_shard([net.embedding, net.norm, net.head], strategy=strategy)
    fully_shard(net, strategy=strategy)
    net.tie()
    optimizers = [FusedAdam(each.parameters(), lr=1e-2) for each in (reference, net)]
    tokens = torch.arange(14).view(2, 7) % 7
    for _ in range(3):
        for each, optimizer in zip((reference, net), optimizers, strict=True):
            each(tokens).backward()
            optimizer.step()
        assert_same_grads(net, reference)
        assert net.embedding.weight is net.head.weight
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-5, atol=1e-6)
    assert len(list(net.parameters())) == 3
    # One of another shape is no tie.
    net.norm.bias, bias = net.head.weight, net.norm.bias
    with pytest.raises(RuntimeError, match=r"'bias' of shape .* in its place"):
        net(tokens)
    net.norm.bias = bias
    # What was there before has no place: nothing was computed with it.
    group = net.head._fsdp_unit().groups[0]
    (left,) = (p for p in group.parameters if not p.living_owners())
    assert left.name == "weight" and left.sharded.grad is None
    with summon_full_params(net):
        assert net.embedding.weight is net.head.weight


def test_a_tie_within_a_unit_may_come_after_fully_shard(ranks: Ranks) -> None:
    """As programs tie again that initialise weights on their devices."""
    for strategy in STRATEGIES:
        ranks(2).run(_tied_later, strategy)
