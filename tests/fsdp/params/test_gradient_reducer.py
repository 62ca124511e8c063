"""Gradients of sharded units equal those of one process on the whole batch."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megafsdp import FusedAdam, MixedPrecisionPolicy, full_tensor, fully_shard, microbatch
from megafsdp.buffer.comm.collectives import Pending, record_collectives
from megafsdp.device.memory import Category
from megafsdp.fsdp.runtime import agreement
from megafsdp.fsdp.runtime.unit import units_below
from tests.end_to_end.strategy_cases import mesh_of_shape, told
from tests.fsdp.toy import (
    Net,
    assert_same_grads,
    assert_same_parameters,
    batches,
    full_grads,
    mine,
    pair,
    shard,
    with_grads,
)
from tests.pairwise import each_value, gate_of
from tests.ranks import Ranks

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
MANNERS = ("plain", "microbatch", "no_sync")

NAMES = ("strategy", "mesh_shape", "manner", "num_microbatches")
PRODUCT = [
    *itertools.product(STRATEGIES, [(1,), (2,), (4,)], MANNERS, [3]),
    *itertools.product(["optim_grads_params"], [(2, 2), (1, 4), (4, 1)], MANNERS, [1, 3]),
    *itertools.product(["no_shard", "optim", "optim_grads"], [(2, 2)], ["microbatch"], [3]),
]
# One rank runs one strategy.
SELECTED = [
    *each_value([case for case in PRODUCT if case[1] != (1,)]),
    ("optim_grads_params", (1,), "plain", 3),
]


@functools.cache
def _references(world_size: int, num_microbatches: int) -> list[nn.Module]:
    """Return the net after one pass over the global batches and after a second; once a rank."""
    net = Net(num_blocks=2)
    passes = []
    for _ in range(2):
        for batch in batches(num_microbatches):
            net(*batch).backward()
        passes.append(with_grads(net))
    return passes


def _accumulate(
    strategy: str, mesh_shape: tuple[int, ...], manner: str, num_microbatches: int
) -> float:
    net = shard(Net(num_blocks=2), strategy=strategy, mesh=mesh_of_shape(mesh_shape))
    for reference in _references(dist.get_world_size(), num_microbatches):
        # The second pass adds to gradients that were reduced before.
        for k, batch in enumerate(batches(num_microbatches)):
            with told(net, manner, k, num_microbatches):
                net(*mine(batch)).backward()
        found = assert_same_grads(net, reference)
    norms = [
        torch.stack([grad.norm() for grad in grads if grad is not None]).norm()
        for grads in (found.values(), [p.grad for p in reference.parameters()])
    ]
    return float(norms[0] / norms[1])


@pytest.mark.parametrize(NAMES, gate_of(PRODUCT, "accumulation", SELECTED), ids=str)
def test_gradients_accumulate_over_microbatches_and_backwards(
    ranks: Ranks, strategy: str, mesh_shape: tuple[int, ...], manner: str, num_microbatches: int
) -> None:
    """The same microbatches twice without clearing give the single process's sum.

    With replicas each shard is summed over them exactly once.
    """
    num_ranks = math.prod(mesh_shape)
    ratios = ranks(num_ranks).run(_accumulate, strategy, mesh_shape, manner, num_microbatches)
    assert ratios == pytest.approx([1.0] * num_ranks, abs=1e-5)


def _told_of_the_last_backward() -> None:
    reference, net = pair(strategy="optim")
    first, second = batches(2)
    for batch in (first, second):
        reference(*batch).backward()
    net.set_is_last_backward(False)
    with record_collectives() as record:
        net(*mine(first)).backward()
    assert not record.calls["reduce_scatter"]
    assert set(full_grads(net).values()) == {None}
    net.set_is_last_backward(True)
    net(*mine(second)).backward()
    assert_same_grads(net, reference)


def test_reductions_wait_until_the_last_backward_is_told(ranks: Ranks) -> None:
    """As torch's name for what ``microbatch()`` does."""
    ranks(2).run(_told_of_the_last_backward)


def _two_rank_reduction() -> bool:
    reference, net = pair()
    batch = batches(1)[0]
    partials = []
    for rank in range(2):
        one = copy.deepcopy(reference)
        one(batch[0][2 * rank : 2 * rank + 2], batch[1][2 * rank : 2 * rank + 2]).backward()
        partials.append({n: p.grad for n, p in one.named_parameters()})
    net(*mine(batch)).backward()
    return all(
        torch.equal(grad, (partials[0][name] + partials[1][name]) * 0.5)
        for name, grad in full_grads(net).items()
        if grad is not None
    )


def test_reduction_over_two_ranks_is_exact(ranks: Ranks) -> None:
    """The mean of two fp32 gradients is the correctly rounded one, bit by bit."""
    assert ranks(2).run(_two_rank_reduction) == [True, True]


class Branches(nn.Module):
    """Two branches of which each rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """Use one branch."""
        return (self.first if which == 0 else self.second)(x).sum()


def _usage(which_of_rank: list[int], shape: tuple[int, ...]) -> list[str]:
    reference = Branches()
    net = fully_shard(copy.deepcopy(reference), mesh=mesh_of_shape(shape))
    world = dist.get_world_size()
    inputs = torch.arange(8.0 * world).view(world, 1, 8)
    for _ in range(2):
        for rank, which in enumerate(which_of_rank):
            (reference(inputs[rank], which) / world).backward()
        net(inputs[dist.get_rank()], which_of_rank[dist.get_rank()]).backward()
        assert_same_grads(net, reference)
    return [name for name, p in net.named_parameters() if p.grad is None]


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("which", [[0, 0], [0, 1], [1, 0]])
def test_unused_parameters_keep_no_gradient_unless_another_rank_used_them(
    ranks: Ranks, which: list[int], shape: tuple[int, ...]
) -> None:
    """``.grad`` is None exactly where the single process has None, and never mixed between them.

    Also where an inner axis of one rank packs nothing: the outer one sums what a rank left out.
    """
    never = ["never.weight", "never.bias"]
    other = {(0, 0): ["second.weight", "second.bias"]}.get(tuple(which), [])
    assert ranks(2).run(_usage, which, shape) == [[*other, *never]] * 2


def _in_some_backwards(orders: list[list[int]]) -> None:
    reference = Branches()
    net = fully_shard(copy.deepcopy(reference))
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.arange(8.0 * world).view(world, 1, 8)
    for which_of_rank in zip(*orders, strict=True):
        for each, which in enumerate(which_of_rank):
            (reference(inputs[each], which) / world).backward()
        net(inputs[rank], which_of_rank[rank]).backward()
        assert_same_grads(net, reference)


@pytest.mark.parametrize(
    "orders", [[[0, 1, 1, 0], [0, 1, 1, 0]], [[0, 1, 1, 0], [0, 0, 1, 1]]], ids=["alike", "apart"]
)
def test_gradients_outlast_backwards_that_do_not_use_their_parameters(
    ranks: Ranks, orders: list[list[int]]
) -> None:
    """What a backward has left in ``.grad`` stays there until the user clears it."""
    ranks(2).run(_in_some_backwards, orders)


def _given_up_between_microbatches(strategy: str) -> None:
    reference = Branches()
    net = fully_shard(copy.deepcopy(reference), strategy=strategy)
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.arange(8.0 * world).view(world, 1, 8)
    with microbatch(net, is_last=False):
        net(inputs[rank], rank).backward()
    if strategy == "optim":
        net.zero_grad()  # Only the model knows of sums that wait on this rank.
    for parameter in net.parameters():
        parameter.grad = None  # As an optimizer does, which knows nothing of the model.
    for each in range(world):
        (reference(inputs[each], 0) / world).backward()
    net(inputs[rank], 0).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_clearing_between_microbatches_clears_what_only_other_ranks_used(
    ranks: Ranks, strategy: str
) -> None:
    """A sum that waits for the ranks to agree goes with the gradients that are shown."""
    ranks(2).run(_given_up_between_microbatches, strategy)


class Optional(nn.Module):
    """A layer that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, is_all_used: bool) -> torch.Tensor:
        """Use one layer or both."""
        y = self.always(x)
        return (self.sometimes(y) if is_all_used else y).sum()


def _waits_for_usage(is_all_used: list[bool]) -> list[int]:
    net = fully_shard(Optional())
    net.always.bias.requires_grad_(False)
    waits: list[str] = []
    original = agreement.start_all_reduce

    class Noting(Pending):
        def __init__(self, inner: Pending) -> None:
            super().__init__()
            self.inner = inner

        def wait(self) -> None:
            waits.append("usage")
            self.inner.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "start_all_reduce", lambda *a, **k: Noting(original(*a, **k)))
        net(torch.ones(1, 8), is_all_used[dist.get_rank()]).backward()
        num_in_backward = len(waits)
        net(torch.ones(1, 8), True)
    return [num_in_backward, len(waits)]


def test_only_a_rank_that_left_a_parameter_unused_waits_for_the_others_usage(ranks: Ranks) -> None:
    """Frozen parameters count as used; the next forward waits for the rest."""
    assert ranks(2).run(_waits_for_usage, [True, True]) == [[0, 1], [0, 1]]
    assert ranks(2).run(_waits_for_usage, [True, False]) == [[0, 1], [1, 1]]


class Skippable(nn.Module):
    """A layer that passes its input on instead when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, or nothing."""
        return self.linear(x) if self.is_used else x


def _unit_without_gradients(is_used: list[bool]) -> list[bool]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), Skippable(), nn.Linear(8, 1))
    net = copy.deepcopy(reference)
    fully_shard(net[1])
    fully_shard(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(world, 3, 8)
    net[1].is_used = is_used[rank]
    for _ in range(2):
        for each in range(world):
            reference[1].is_used = is_used[each]
            (reference(x[each]).mean() / world).backward()
        net(x[rank]).mean().backward()
        assert_same_grads(net, reference)
    return [p.grad is None for p in net[1].parameters()]


@pytest.mark.parametrize("is_used", [[True, False], [False, True], [False, False], [False]])
def test_a_unit_that_runs_without_using_its_parameters_is_reduced_all_the_same(
    ranks: Ranks, is_used: list[bool]
) -> None:
    """As a layer to which a rank has routed nothing: the others get their gradients."""
    found = ranks(len(is_used)).run(_unit_without_gradients, is_used)
    assert found == [[not any(is_used)] * 2] * len(is_used)


def _cleared_and_replaced() -> None:
    reference, net = pair()
    first, second = batches(2)
    for model, batch in ((reference, first), (net, mine(first))):
        model(*batch).backward()
    for model in (reference, net):
        parameters = list(model.parameters())
        parameters[0].grad = None
        parameters[1].grad = parameters[1].grad * 3.0
        parameters[2].grad.mul_(0.5)
    for model, batch in ((reference, second), (net, mine(second))):
        model(*batch).backward()
    assert_same_grads(net, reference)
    for model in (reference, net):
        model.zero_grad(set_to_none=True)
    for model, batch in ((reference, first), (net, mine(first))):
        model(*batch).backward()
    assert_same_grads(net, reference)


def test_gradients_follow_what_the_user_did_to_them(ranks: Ranks) -> None:
    """Cleared gradients start anew; replaced and scaled ones are added to, as in plain torch."""
    ranks(2).run(_cleared_and_replaced)


def _given_back() -> None:
    reference = Branches()
    net = fully_shard(copy.deepcopy(reference))
    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = torch.arange(8.0 * world).view(world, 1, 8)

    def backward(which: int) -> None:
        for each in range(world):
            (reference(inputs[each], which) / world).backward()
        net(inputs[rank], which).backward()

    backward(1)
    kept = [(p, p.grad) for model in (reference, net) for p in model.second.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    backward(0)
    for parameter, grad in kept:
        parameter.grad = grad
    backward(1)
    assert_same_grads(net, reference)


def test_a_kept_gradient_that_is_given_back_is_added_to(ranks: Ranks) -> None:
    """Also where the backward between has made gradients of other parameters alone."""
    ranks(2).run(_given_back)


def _references_survive(is_cleared_late: bool) -> bool:
    _, net = pair()
    first, second = batches(2)
    net(*mine(first)).backward()
    parameter = next(iter(net.parameters()))
    kept = parameter.grad
    value = kept.local.clone()
    loss = net(*mine(second))
    if is_cleared_late:
        net.zero_grad()
    else:
        net.zero_grad()
        loss = net(*mine(second))
    loss.backward()
    return torch.equal(kept.local, value) and not torch.equal(parameter.grad.local, value)


@pytest.mark.parametrize("is_cleared_late", [False, True])
def test_a_kept_gradient_is_not_overwritten_by_the_next_step(
    ranks: Ranks, is_cleared_late: bool
) -> None:
    """A reference keeps its values, whether zero_grad() comes before forward or after it."""
    assert ranks(2).run(_references_survive, is_cleared_late) == [True, True]


def _kept_beside_others(strategy: str, is_replaced: bool) -> None:
    reference, net = pair(strategy=strategy)
    first, second = batches(2)
    kept = []
    models = [(reference, first, second), (net, mine(first), mine(second))]
    for model, batch, next_batch in models:
        model(*batch).backward()
        parameters = list(model.parameters())
        kept.append([p.grad for p in parameters[::2]])
        for parameter in parameters[::2]:
            parameter.grad = parameter.grad * 2.0 if is_replaced else None
        model(*next_batch).backward()
    assert_same_grads(net, reference)
    for (model, *_), grads in zip(models, kept, strict=True):
        for parameter, grad in zip(list(model.parameters())[::2], grads, strict=True):
            parameter.grad = grad
    assert_same_grads(net, reference)
    torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-3).step()
    FusedAdam(net.parameters(), lr=1e-2, eps=1e-3).step()
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_kept_gradient_is_not_overwritten_where_others_stay(
    ranks: Ranks, strategy: str, is_replaced: bool
) -> None:
    """A task's gradient that is taken away while the others accumulate, and given back later."""
    ranks(2).run(_kept_beside_others, strategy, is_replaced)


def _counts_as_a_write() -> None:
    # Without gaps in the buffer, whose zeros would count.
    net = fully_shard(nn.Linear(8, 8, bias=False))
    x = torch.ones(1, 8)
    net(x).sum().backward()
    grad = net.weight.grad
    factor = torch.ones_like(grad.to_local(), requires_grad=True)
    product = (grad.to_local() * factor).sum()
    net(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_sum_that_is_added_to_a_gradient_counts_as_a_write(ranks: Ranks) -> None:
    """Autograd finds that a gradient which it has saved is another, as in plain torch."""
    ranks(2).run(_counts_as_a_write)


def _freed_with_the_last() -> list[int]:
    _, net = pair()
    ledger = net._fsdp_unit().ledger
    net(*mine(batches(1)[0])).backward()
    alive = [ledger.live[Category.MAIN_GRAD]]
    groups = net._fsdp_unit().require_context().groups
    buffers = [g.gradients.main_grad.buffer for g in groups]
    storages = [StorageWeakRef(b.flat.untyped_storage()) for b in buffers if b is not None]
    del buffers
    parameters = list(net.blocks[0].parameters())
    for parameter in parameters[1:]:
        parameter.grad = None
    alive.append(ledger.live[Category.MAIN_GRAD])
    # As optimizers clear: the module is not told.
    for parameter in net.parameters():
        parameter.grad = None
    assert len(storages) == len(groups)
    assert all(storage.expired() for storage in storages), "a view outlives the gradients"
    return [*alive, ledger.live[Category.MAIN_GRAD]]


def test_main_gradients_are_freed_with_the_last_gradient_that_shows_them(ranks: Ranks) -> None:
    """Clearing gradients frees their memory at once, not in the next step."""
    for before, between, after in ranks(2).run(_freed_with_the_last):
        assert before == between > after == 0


def _token_average() -> None:
    reference, net = pair(average="token")
    batch = batches(1)[0]
    world = dist.get_world_size()
    (reference(*batch) * world).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)


def _divide_factor() -> None:
    reference, net = pair()
    for module in (net, *net.blocks):
        module.set_gradient_divide_factor(0.5)
    batch = batches(1)[0]
    (reference(*batch) * (dist.get_world_size() / 0.5)).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("body", [_token_average, _divide_factor])
def test_averaging_is_a_choice(ranks: Ranks, body: object) -> None:
    """``average='token'`` sums, and a divide factor replaces the number of ranks."""
    ranks(2).run(body)


def _bf16(reduce_dtype: torch.dtype | None, main_grads_dtype: torch.dtype | None) -> torch.dtype:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, main_grads_dtype=main_grads_dtype
    )
    reference, net = pair(mp_policy=policy)
    batch = batches(1)[0]
    partials: list[dict[str, torch.Tensor | None]] = []
    for rank in range(dist.get_world_size()):
        one = copy.deepcopy(reference).to(torch.bfloat16)
        one(batch[0][2 * rank : 2 * rank + 2], batch[1][2 * rank : 2 * rank + 2]).backward()
        partials.append({n: p.grad for n, p in one.named_parameters()})
    with record_collectives() as record:
        net(*mine(batch)).backward()
    for name, grad in full_grads(net).items():
        total = sum(p[name].float() for p in partials) / len(partials)
        assert torch.equal(grad, total.to(grad.dtype)), name
    packed = sum(g.layout.gathered_numel for m in (net, *net.blocks) for g in m._fsdp_unit().groups)
    assert record.nbytes["reduce_scatter"] == 2 * packed, "gradients travel in bf16"
    return next(iter(net.parameters())).grad.dtype


def _bytes_that_wait(strategy: str) -> tuple[int, int]:
    net = shard(Net(), strategy=strategy, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with microbatch(net, is_last=False):
        net(*mine(batches(1)[0])).backward()
    groups = [group for unit in units_below([net]).values() for group in unit.groups]
    numel = sum(group.layout.gathered_numel for group in groups if group.is_trainable)
    return net._fsdp_unit().ledger.live[Category.PARTIAL_GRAD], 4 * numel


@pytest.mark.parametrize("strategy", ["optim", "no_shard"])
def test_waiting_microbatches_add_up_in_the_main_gradients_dtype(
    ranks: Ranks, strategy: str
) -> None:
    """Gradients in bf16 wait for the last microbatch in full size and in fp32."""
    for nbytes, expected in ranks(2).run(_bytes_that_wait, strategy):
        assert nbytes == expected > 0


@pytest.mark.parametrize("main_grads_dtype", [None, torch.bfloat16])
def test_bf16_gradients_travel_as_they_are_and_are_summed_in_fp32(
    ranks: Ranks, main_grads_dtype: torch.dtype | None
) -> None:
    """The wire loses nothing, and two ranks' sum is the exact one rounded once."""
    dtypes = ranks(2).run(_bf16, torch.float32, main_grads_dtype)
    assert dtypes == [main_grads_dtype or torch.float32] * 2


def _reduced_in_bf16() -> None:
    bf16 = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)
    reference, net = pair(strategy="no_shard", mp_policy=policy)
    batch = batches(1)[0]
    partials = []
    for rank in range(2):
        one = copy.deepcopy(reference).to(bf16)
        one(batch[0][2 * rank : 2 * rank + 2], batch[1][2 * rank : 2 * rank + 2]).backward()
        partials.append({n: p.grad for n, p in one.named_parameters()})
    net(*mine(batch)).backward()
    for name, grad in full_grads(net).items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, 0.5 * (partials[0][name] + partials[1][name]).float()), name


def test_the_sum_over_ranks_has_the_dtype_of_the_policy(ranks: Ranks) -> None:
    """A sum in bf16 is rounded to it, and kept in fp32."""
    ranks(2).run(_reduced_in_bf16)


def _whole_and_odd() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.one = nn.Parameter(torch.randn(1))
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.cube = nn.Parameter(torch.randn(3, 5, 7))
            self.rows = nn.Parameter(torch.randn(7, 5).t())
            self.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.einsum("bi,kij->bkj", x, self.cube).sum(1) * self.scale + self.one
            return (y @ (self.rows + self.frozen).t()).square().mean() + self.empty.sum()

    reference = Odd()
    net = fully_shard(copy.deepcopy(reference))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (reference, net)]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        x = torch.randn(2 * world, 5, generator=torch.Generator().manual_seed(step))
        reference(x).backward()
        net(x[2 * rank : 2 * rank + 2]).backward()
        assert_same_grads(net, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in net.named_parameters():
        wanted = dict(reference.named_parameters())[name].detach()
        torch.testing.assert_close(full_tensor(parameter.detach()), wanted, rtol=1e-4, atol=1e-5)
    buffers = [g.gradients.main_grad.buffer for g in net._fsdp_unit().groups]
    grads = [b.flat for b in buffers if b is not None]
    ledger = net._fsdp_unit().ledger
    trainable = [g for g in net._fsdp_unit().groups if g.is_trainable]
    assert len(trainable) == 2 and len(net._fsdp_unit().groups) == 3
    assert ledger.live[Category.MAIN_GRAD] == sum(g.numel() * g.element_size() for g in grads)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_odd_parameters_train_like_plain_ones(ranks: Ranks, num_ranks: int) -> None:
    """0-dim, 1-element, empty, 3-D, non-contiguous and frozen parameters, the last without grad."""
    ranks(num_ranks).run(_whole_and_odd)


def _hooks() -> list[int]:
    _, net = pair()
    fired = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad is not None))
    batch = batches(1)[0]
    net(*mine(batch)).backward()
    return [len(fired), sum(fired), len(list(net.parameters()))]


def test_post_accumulate_hooks_see_the_reduced_gradient(ranks: Ranks) -> None:
    """Every hook on a sharded parameter fires once a backward, after ``.grad`` is set."""
    assert all(a == b == c for a, b, c in ranks(2).run(_hooks))


def _flip() -> None:
    reference, net = pair()
    for value in (False, True):
        for model in (reference, net):
            model.blocks[1].up.weight.requires_grad_(value)
            model.zero_grad()
        batch = batches(1)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference)


def _thaw() -> None:
    reference = Net()
    reference.blocks[1].up.weight.requires_grad_(False)
    net = shard(copy.deepcopy(reference))
    for value in (False, True, False):
        for model in (reference, net):
            model.blocks[1].up.weight.requires_grad_(value)
            model.zero_grad()
        batch = batches(1)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference)


def _gaps(is_given: bool) -> int:
    _, net = pair()
    if is_given:
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter.detach())
    for batch in batches(2):
        net(*mine(batch)).backward()
    num_gaps = 0
    for module in (net, *net.blocks):
        for group in module._fsdp_unit().groups:
            main_grad = group.gradients.main_grad.buffer
            for start, stop in group.layout.local_gaps(group.axes.shard):
                num_gaps += 1
                assert not group.main_weight.flat[start:stop].any()
                assert main_grad is not None and not main_grad.flat[start:stop].any()
    return num_gaps


@pytest.mark.parametrize("is_given", [False, True])
def test_gaps_of_main_weights_and_gradients_are_zero(ranks: Ranks, is_given: bool) -> None:
    """Flat passes of an optimizer may sweep them, though fresh memory was poisoned.

    A gradient that the user gave, to which backward adds, is copied between the gaps.
    """
    assert all(num_gaps > 0 for num_gaps in ranks(2).run(_gaps, is_given))


@pytest.mark.parametrize("body", [_flip, _thaw])
def test_requires_grad_may_be_flipped_between_steps(ranks: Ranks, body: object) -> None:
    """Frozen after or before sharding: no gradient, and one again when it is unfrozen."""
    ranks(2).run(body)
