"""Draws into unevenly cut tensors take the rows of a draw for the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED, refusing_random_numbers
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.device.torch_private import version_of
from tests.buffer.cuts import cut, random, whole_mesh
from tests.buffer.dtensor.test_op_rules import CUTS, _path
from tests.ranks import Ranks

SEED = 5
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda a: a.normal_(1.0, 0.5),
    "uniform": lambda a: nn.init.uniform_(a, -1.0, 1.0),
    "bernoulli": lambda a: a.bernoulli_(0.3),
    "geometric": lambda a: a.geometric_(0.3),
    "kaiming": lambda a: nn.init.kaiming_uniform_(a, mode="fan_in"),
    "xavier": nn.init.xavier_normal_,
    "by a generator": lambda a: a.normal_(generator=torch.Generator().manual_seed(1)),
    "twice": lambda a: a.normal_().add_(torch.randn_like(a)),
    "as double": lambda a: torch.rand_like(a, dtype=torch.float64),
    "log-normal of an empty one": lambda a: torch.empty_like(a).log_normal_(),
}


def _rows_of_a_whole_draw(is_bypassed: bool) -> None:
    mesh = whole_mesh()
    with _path(is_bypassed), torch.no_grad():
        for name, draw in DRAWS.items():
            torch.manual_seed(SEED)
            wanted = draw(torch.empty(10, 4))
            state = torch.get_rng_state()
            for cuts in CUTS:
                torch.manual_seed(SEED)
                found = draw(cut(torch.zeros(10, 4), mesh, **cuts))
                assert torch.equal(torch.get_rng_state(), state), name
                assert type(found) is UnevenDTensor and found.dtype == wanted.dtype
                assert torch.equal(found.full_tensor(), wanted), name
        tensor = cut(random(10, 4), mesh)
        with pytest.raises(NotImplementedError, match="bernoulli_ with a tensor"):
            tensor.bernoulli_(tensor.abs())


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_draws_are_rows_of_a_draw_for_the_whole(ranks: Ranks, is_bypassed: bool) -> None:
    """On ranks with many rows, few and none, which leave the random state alike."""
    ranks(3).run(_rows_of_a_whole_draw, is_bypassed)


def _refused_for_a_while() -> None:
    tensor = cut(torch.zeros(10, 4), whole_mesh())
    with refusing_random_numbers(), pytest.raises(NotImplementedError, match="normal_"):
        tensor.normal_()
    assert bool((tensor.normal_().full_tensor() != 0).all())


def test_draws_are_refused_only_beside_an_initialiser(ranks: Ranks) -> None:
    """Afterwards they are rows of a draw for the whole again."""
    ranks(2).run(_refused_for_a_while)


def _rows(is_bypassed: bool) -> None:
    mesh = whole_mesh()
    with _path(is_bypassed), torch.no_grad():
        for full in (random(10, 4), random(10), random(4, 3, 2)):
            for row in (0, 3, -1):
                wanted, tensor = full.clone(), cut(full, mesh)
                before = version_of(tensor)
                wanted[row].fill_(2.0)
                tensor[row].fill_(2.0)
                assert torch.equal(tensor.full_tensor(), wanted)
                assert torch.equal(tensor[row].mul(3.0).full_tensor(), wanted[row] * 3.0)
                # Of a view, so torch 2.11 does not count it on the tensor.
                assert version_of(tensor) > before or is_bypassed or IS_DISPATCH_BYPASSED
            with pytest.raises(IndexError, match="10 is out of"):
                tensor[10]


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_a_row_may_be_written(ranks: Ranks, is_bypassed: bool) -> None:
    """Whichever rank has it, as embeddings do with the row of padding."""
    ranks(3).run(_rows, is_bypassed)


def _counted(is_bypassed: bool) -> None:
    with _path(is_bypassed), torch.no_grad():
        parameter = nn.Parameter(cut(random(10, 4), whole_mesh()))
        for write in (nn.init.ones_, nn.init.normal_, lambda p: p.mul_(2), lambda p: p.copy_(p)):
            before = version_of(parameter)
            write(parameter)
            assert version_of(parameter) > before


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_every_write_is_counted_on_the_parameter(ranks: Ranks, is_bypassed: bool) -> None:
    """On ranks without rows too: by the count a parameter is known to have values."""
    ranks(3).run(_counted, is_bypassed)
