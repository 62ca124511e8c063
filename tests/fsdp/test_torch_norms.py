"""Norms and clipping of torch itself on sharded gradients, of every order."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from megafsdp import fully_shard
from tests.fsdp.toy import assert_same_grads, batches, mine, options_of_strategies, pair
from tests.ranks import Ranks

# Gradients are summed in another order over ranks, which small orders of norms amplify.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}
# The smallest magnitude is that of one element, whose terms may cancel: as for gradients.
OF_ONE = {"rtol": 1e-4, "atol": 1e-6}
ORDERS = (2.0, math.inf, 1.0, 3.0, 0.5, -math.inf, 0.0)


def _full(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _norms(options: dict[str, object]) -> None:
    reference, net = pair(1, **options)
    (batch,) = batches(1)
    reference(*batch).backward()
    net(*mine(batch)).backward()
    grads = [p.grad for p in net.parameters()]
    wanted_grads = [p.grad for p in reference.parameters()]
    # One of each shape, hence of each division into rows.
    of_shape = {
        wanted.shape: (grad, wanted) for grad, wanted in zip(grads, wanted_grads, strict=True)
    }
    for order in ORDERS:
        wanted = get_total_norm(wanted_grads, order)
        # Without lists each norm is that of one tensor, which is compared by itself below.
        for foreach in (True, False) if order == ORDERS[0] else (True,):
            found = _full(get_total_norm(grads, order, foreach=foreach))
            torch.testing.assert_close(found, wanted, **CLOSE)
        # Of one tensor, of which some ranks may have no rows.
        for grad, wanted_grad in of_shape.values():
            found = _full(torch.linalg.vector_norm(grad, order))
            wanted = torch.linalg.vector_norm(wanted_grad, order)
            torch.testing.assert_close(found, wanted, **(OF_ONE if order == -math.inf else CLOSE))
    for order in (math.inf, 1.0, 2.0, 3.0):
        wanted = clip_grad_norm_(reference.parameters(), 0.01, order)
        found = _full(clip_grad_norm_(net.parameters(), 0.01, order, error_if_nonfinite=True))
        torch.testing.assert_close(found, wanted, **CLOSE)
        assert_same_grads(net, reference)
    total = get_total_norm(grads, math.inf)
    clip_grads_with_norm_(net.parameters(), 1e-4, total)
    clip_grads_with_norm_(reference.parameters(), 1e-4, get_total_norm(wanted_grads, math.inf))
    assert_same_grads(net, reference, atol=1e-9)


def _norms_in_every_strategy() -> None:
    for options in options_of_strategies():
        # Gradients of these two are divided as those of optim_grads_params.
        if options.get("strategy") not in ("optim", "optim_grads"):
            _norms(options)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_total_norms_and_clipping_are_those_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    """Largest and smallest magnitudes too, where a rank has no rows of a tensor."""
    ranks(num_ranks).run(_norms_in_every_strategy)


def _not_finite() -> None:
    layer = nn.Linear(3, 5)
    net = fully_shard(copy.deepcopy(layer))
    x = torch.ones(2, 3) * (math.inf if dist.get_rank() == 0 else 1.0)
    net(x).sum().backward()
    for order in (math.inf, 2.0):
        assert not bool(_full(get_total_norm([p.grad for p in net.parameters()], order)).isfinite())
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(net.parameters(), 1.0, order, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_found_on_all_ranks(ranks: Ranks) -> None:
    """Also where the rows are another rank's."""
    ranks(3).run(_not_finite)
