"""Tokens to experts and back, against indexing in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.parallel.dispatch import combine, dispatch
from tests.ranks import Ranks

_NUM_EXPERTS, _WIDTH = 6, 5
# By rank and token. "One expert" is of rank 1; of "every expert" K is E.
Choices = list[list[list[int]]]
_CHOICES: dict[str, Choices] = {
    "random": [[[0, 3], [5, 1], [2, 4]], [[4, 0], [1, 0], [3, 5], [2, 3]]],
    "idle experts": [[[4, 1], [1, 4]], [[1, 4], [4, 1], [1, 4]]],
    "one expert": [[[5], [5], [5]], [[5], [5]]],
    "every expert": [[[3, 0, 1, 5, 4, 2]], [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]]],
    "a rank without tokens": [[[0, 3], [5, 1], [2, 4]], []],
    "a rank without rows": [[[0, 1], [2, 0]], [[1, 2]]],
}


def _inputs(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, weights and what multiplies the rows of each expert, of the whole batch."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return draw(len(experts), _WIDTH), draw(*experts.shape), draw(_NUM_EXPERTS, _WIDTH)


def _joined(by_rank: Choices) -> list[list[int]]:
    return [token for tokens in by_rank for token in tokens]


def _chosen(rows: list[list[int]], num_choices: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), num_choices)


def _run(by_rank: Choices) -> dict[str, Tensor]:
    """Pass this rank's tokens, or without ranks all, through experts that multiply."""
    group = dist.group.WORLD if dist.is_initialized() else None
    num_choices = len(by_rank[0][0])
    x, weights, factors = _inputs(_chosen(_joined(by_rank), num_choices))
    rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
    own = _joined(by_rank) if group is None else by_rank[rank]
    first = 0 if rank == 0 else len(by_rank[0])
    x = x[first : first + len(own)].requires_grad_()
    weights = weights[first : first + len(own)].requires_grad_()
    factors = factors.chunk(num_ranks)[rank].requires_grad_()
    dispatched = dispatch(x, _chosen(own, num_choices), weights, _NUM_EXPERTS, group)
    rows, load_E = dispatched.rows_RH, dispatched.plan.load_E
    out = combine(rows * factors.repeat_interleave(load_E, dim=0), dispatched)
    # A different gradient for each element.
    grad = torch.arange(x.numel(), dtype=x.dtype).view_as(x) + 100 * first
    out.backward(grad)
    assert x.grad is not None and weights.grad is not None and factors.grad is not None
    return {
        "rows": rows.detach(),
        "loads": load_E,
        "out": out.detach(),
        "grad of x": x.grad,
        "grad of weights": weights.grad,
        "grad of factors": factors.grad,
    }


def _run_naively(by_rank: Choices) -> dict[str, Tensor]:
    """Compute the same by indexing, whose gradients autograd adds up."""
    experts = _chosen(_joined(by_rank), len(by_rank[0][0]))
    x, weights, factors = (t.requires_grad_() for t in _inputs(experts))
    out = (x.unsqueeze(1) * factors[experts] * weights.unsqueeze(2)).sum(1)
    starts = [0, len(by_rank[0])]
    grad = torch.cat(
        [
            torch.arange(len(own) * _WIDTH, dtype=x.dtype).view(-1, _WIDTH) + 100 * start
            for own, start in zip(by_rank, starts, strict=True)
        ]
    )
    out.backward(grad)
    assert x.grad is not None and weights.grad is not None and factors.grad is not None
    rows = [x[(experts == expert).any(1)] for expert in range(_NUM_EXPERTS)]
    return {
        "rows": torch.cat(rows).detach(),
        "loads": torch.tensor([len(of_expert) for of_expert in rows]),
        "out": out.detach(),
        "grad of x": x.grad,
        "grad of weights": weights.grad,
        "grad of factors": factors.grad,
    }


@pytest.mark.parametrize("name", [name for name in _CHOICES if "rank" not in name])
def test_rows_are_sorted_by_expert_and_come_back(name: str) -> None:
    """In one process: rows, outputs and gradients of indexing, whatever the tokens choose."""
    joined = [_joined(_CHOICES[name]), []]
    found, wanted = _run(joined), _run_naively(joined)
    for key, expected in wanted.items():
        tolerance = 0 if key in ("rows", "loads") else 1e-12
        torch.testing.assert_close(found[key], expected, rtol=tolerance, atol=tolerance, msg=key)


@pytest.mark.parametrize("name", _CHOICES)
def test_two_ranks_equal_one_process(ranks: Ranks, name: str) -> None:
    """Rows of each expert in the same order, and outputs and gradients of the joined batch."""
    first, second = ranks(2).run(_run, _CHOICES[name])
    for key, expected in _run_naively(_CHOICES[name]).items():
        found = torch.cat([first[key], second[key]])
        # Rows are copies, in the order of the whole batch; the rest are sums of up to 6 products.
        tolerance = 0 if key in ("rows", "loads") else 1e-12
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=key)


def _count_exchanges(name: str) -> tuple[dict[str, int], dict[str, int]]:
    group = dist.group.WORLD
    assert group is not None
    own = _CHOICES[name][group.rank()]
    x = torch.ones(len(own), _WIDTH, requires_grad=True)
    weights = torch.ones(len(own), 2, requires_grad=True)
    with record_collectives() as forward:
        dispatched = dispatch(x, _chosen(own, 2), weights, _NUM_EXPERTS, group)
        out = combine(dispatched.rows_RH, dispatched)
    with record_collectives() as backward:
        out.sum().backward()
    return dict(forward.calls), dict(backward.calls)


@pytest.mark.parametrize("name", ["random", "a rank without tokens", "a rank without rows"])
def test_each_rank_exchanges_once_each_way(ranks: Ranks, name: str) -> None:
    """Numbers, tokens there and back; two in backward: also a rank that has nothing to send."""
    wanted = ({"all_to_all": 3}, {"all_to_all": 2})
    assert ranks(2).run(_count_exchanges, name) == [wanted, wanted]


def _sent_nbytes(by_rank: Choices) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    experts = _chosen(by_rank[group.rank()], len(by_rank[0][0]))
    x = torch.ones(len(experts), _WIDTH, requires_grad=True)
    weights = torch.ones(experts.shape, requires_grad=True)
    with record_collectives() as forward:
        dispatched = dispatch(x, experts, weights, _NUM_EXPERTS, group)
        out = combine(dispatched.rows_RH, dispatched)
    with record_collectives() as backward:
        out.sum().backward()
    return [record.nbytes["all_to_all"] for record in (forward, backward)]


@pytest.mark.parametrize("name", ["random", "every expert", "a rank without tokens"])
def test_a_token_travels_once_to_each_rank(ranks: Ranks, name: str) -> None:
    """However many of its experts are there, and with them the choices and their weights."""
    by_rank = _CHOICES[name]
    num_choices, itemsize = len(by_rank[0][0]), 4
    places = [[{expert // 3 for expert in token} for token in own] for own in by_rank]
    for rank, nbytes in enumerate(ranks(2).run(_sent_nbytes, by_rank)):
        sent = sum(len(of_token) for of_token in places[rank])
        arrived = sum(rank in of_token for own in places for of_token in own)
        # A rank counts what it gives: tokens that it sends, and sums of those that came to it.
        numbers, width = 2 * 2 * 8, (sent + arrived) * _WIDTH
        assert nbytes == [
            numbers + (width + sent * 2 * num_choices) * itemsize,
            (width + arrived * num_choices) * itemsize,
        ]


def _pass_many_experts(dtype: torch.dtype, is_cut: bool) -> list[Tensor]:
    """Pass tokens that choose among 1,000 experts; the joined batch if experts are not cut."""
    group, num_experts = dist.group.WORLD, 1000
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(20, num_experts, generator=generator).topk(8).indices
    x, weights = (torch.randn(20, width, generator=generator) for width in (8, 8))
    grad = torch.randn(20, 8, generator=generator)
    own = [t.chunk(2)[group.rank()] if is_cut else t for t in (experts, x, weights, grad)]
    experts, x, weights, grad = own
    x = x.to(dtype).requires_grad_()
    # As routers give them: wider than tokens of 16 bits.
    weights = weights.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    dispatched = dispatch(x, experts, weights, num_experts, group if is_cut else None)
    out = combine(dispatched.rows_RH * 0.5, dispatched)
    out.backward(grad.to(dtype))
    assert x.grad is not None and weights.grad is not None
    loads = dispatched.plan.load_E
    return [dispatched.rows_RH.detach(), loads, out.detach(), x.grad, weights.grad]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_experts_travel_in_every_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    """More experts than bf16 and fp16 have whole numbers for; rows and loads are exact."""
    pool = ranks(2)
    first, second = pool.run(_pass_many_experts, dtype, True)
    wanted = pool.run(_pass_many_experts, dtype, False)[0]
    for place, (a, b, whole) in enumerate(zip(first, second, wanted, strict=True)):
        # A sum of 8 is rounded on each of two ranks and then once more.
        tolerance = 0 if place < 2 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(torch.cat([a, b]), whole, rtol=tolerance, atol=tolerance)


def _pass_few_to_rank_1(dtype: torch.dtype, num_arriving: int) -> tuple[Tensor, Tensor]:
    """Send so many of rank 0's tokens to rank 1, and none of its own; one expert a token."""
    group = dist.group.WORLD
    assert group is not None
    experts = torch.zeros(3, 1, dtype=torch.int64)
    if group.rank() == 0:
        experts[:num_arriving] = 4
    x = torch.arange(3.0 * 8).view(3, 8) + 100 * group.rank()
    weights = torch.ones(3, 1)
    dispatched = dispatch(x.to(dtype), experts, weights.to(dtype), _NUM_EXPERTS, group)
    return dispatched.rows_RH, dispatched.plan.load_E


@pytest.mark.parametrize("num_arriving", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rank_that_gets_at_most_one_token(
    ranks: Ranks, dtype: torch.dtype, num_arriving: int
) -> None:
    """The bits of a single row's numbers begin at an odd element of its message."""
    _, (rows, load) = ranks(2).run(_pass_few_to_rank_1, dtype, num_arriving)
    assert torch.equal(rows, torch.arange(8.0 * num_arriving).to(dtype).view(-1, 8))
    assert load.tolist() == [0, num_arriving, 0]


class _Names(TorchDispatchMode):
    """Note the operators in the order in which they are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note and run."""
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _operators(name: str) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    own = _chosen(_CHOICES[name][group.rank()], 2)
    with _Names() as noted:
        dispatch(torch.ones(len(own), _WIDTH), own, torch.ones(own.shape), _NUM_EXPERTS, group)
    return noted.names


def test_tokens_are_sorted_while_numbers_are_exchanged(ranks: Ranks) -> None:
    """The exchange is issued before the first sort, and what it brings is joined after it."""
    for names in ranks(2).run(_operators, "random"):
        issued = names.index("alltoall_base_")
        places = [issued, names.index("sort"), names.index("stack", issued)]
        assert places == sorted(places)


def _num_nodes(out: Tensor) -> int:
    """Return how many nodes of the graph are functions in Python."""
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return sum(isinstance(node, BackwardCFunction) for node in seen)


def _nodes(name: str) -> int:
    group = dist.group.WORLD
    assert group is not None
    own = _CHOICES[name][group.rank()]
    x = torch.ones(len(own), _WIDTH, requires_grad=True)
    dispatched = dispatch(x, _chosen(own, 2), torch.ones(len(own), 2), _NUM_EXPERTS, group)
    return _num_nodes(combine(dispatched.rows_RH, dispatched))


def test_each_way_is_one_node_of_the_graph(ranks: Ranks) -> None:
    """Gathers and the exchange together: a node in Python costs more than a small gather."""
    assert ranks(2).run(_nodes, "random") == [2, 2]


def test_one_rank_exchanges_nothing() -> None:
    """The tokens that arrive are its own."""
    with record_collectives() as record:
        experts = _chosen([[1, 0], [0, 2]], 2)
        x, weights = torch.ones(2, _WIDTH), torch.ones(2, 2)
        dispatched = dispatch(x, experts, weights, _NUM_EXPERTS, None)
        combine(dispatched.rows_RH, dispatched)
    assert not record.calls and dispatched.plan.exchange is None


def test_a_second_run_gives_the_same_bits() -> None:
    """Forward and backward in fp32, of many tokens for each expert, in any order of threads."""
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(500, _NUM_EXPERTS, generator=generator).topk(4).indices
    weights, x = torch.rand(500, 4, generator=generator), torch.randn(500, 33, generator=generator)
    grad = torch.randn(500, 33, generator=generator)

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        dispatched = dispatch(leaf, experts, weights, _NUM_EXPERTS, None)
        out = combine(dispatched.rows_RH * 1.1, dispatched)
        out.backward(grad)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    torch.set_num_threads(4)
    try:
        first, second = run(), run()
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_gradients_are_refused() -> None:
    """Sums of weighted rows are not linear in both, and their graph would end here."""
    x, weights, _ = _inputs(torch.tensor([[0, 3], [5, 1]]))
    weights.requires_grad_()
    dispatched = dispatch(x, torch.tensor([[0, 3], [5, 1]]), weights, _NUM_EXPERTS, None)
    out = combine(dispatched.rows_RH, dispatched)
    with pytest.raises(NotImplementedError, match="Leave layers of experts out"):
        torch.autograd.grad(out.sum(), weights, create_graph=True)
