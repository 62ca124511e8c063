"""Exchanges in compiled functions and in gradients of gradients; values are in test_layers.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.estimate.meta_engine import fake_ranks
from megafsdp.parallel.mappings import (
    Exchange,
    copy_to_tp,
    gather_sequence,
    gather_vocabulary,
    reduce_from_tp,
    reduce_scatter_sequence,
)
from tests.ranks import Ranks


# The tracer asks every input for .grad, and torch warns where it is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_function_exchanges_as_it_is() -> None:
    """Its graph ends at each exchange, which runs and is counted in forward and in backward."""
    torch.compiler.reset()
    with fake_ranks(2):
        group = dist.group.WORLD
        assert group is not None

        def layer(x: torch.Tensor) -> torch.Tensor:
            return reduce_scatter_sequence(gather_sequence(x * 2, group) + 1, group) * 3

        x = torch.ones(1, 4, 8, requires_grad=True)
        with record_collectives() as record:
            out = torch.compile(layer, backend="eager")(x)
            out.sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None and x.grad.shape == x.shape
    assert record.calls == {"all_gather": 2, "reduce_scatter": 2}


def _same(x: Tensor) -> Tensor:
    return x


def _penalty(
    enter: Exchange, turn: Exchange, leave: Exchange, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x and of two matrices by a penalty on the gradient of x."""
    x, up, down = (each.detach().requires_grad_() for each in inputs)
    y = leave(turn((enter(x) @ up).tanh()) @ down).sin().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), (x, up, down))


def _drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 8, 6), (6, 10), (10, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _part(whole: Tensor, dim: int | None, rank: int) -> Tensor:
    return whole if dim is None else whole.chunk(2, dim)[rank]


# What is done to x, to the hidden values and to the outputs, and the dims that are cut.
_LAYERS = {
    "whole": ((copy_to_tp, _same, reduce_from_tp), (None, 1, 0)),
    "sequence": ((gather_sequence, _same, reduce_scatter_sequence), (1, 1, 0)),
    "vocabulary": ((_same, copy_to_tp, gather_vocabulary), (None, None, 1)),
}


def _own_penalty(name: str) -> tuple[Tensor, ...]:
    exchanges, dims = _LAYERS[name]
    with_group = [f if f is _same else partial(f, group=dist.group.WORLD) for f in exchanges]
    own = [_part(x, dim, dist.get_rank()) for x, dim in zip(_drawn(), dims, strict=True)]
    return _penalty(*with_group, *own)


@pytest.mark.parametrize("name", _LAYERS)
def test_gradients_of_gradients_are_parts_of_one_processs(ranks: Ranks, name: str) -> None:
    """A penalty on the gradient of a layer's inputs goes through exchanges once more."""
    wanted = _penalty(_same, _same, _same, *_drawn())
    for rank, found in enumerate(ranks(2).run(_own_penalty, name)):
        for got, all_, dim in zip(found, wanted, _LAYERS[name][1], strict=True):
            # fp64 sums of some ten terms in another order.
            torch.testing.assert_close(got, _part(all_, dim, rank), rtol=1e-11, atol=1e-11)
