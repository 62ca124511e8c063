"""Statistics of parameters and gradients that people log, and norms over units of two kinds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from megafsdp import fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from tests.fsdp.toy import Net, batches, mine, options_of_strategies, shard
from tests.ranks import Ranks

STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean,
    "std": torch.std,
    "var": torch.var,
    "max": torch.max,
    "min": torch.min,
    "abs max": lambda t: t.abs().max(),
    "norm": torch.norm,
    "isnan": lambda t: t.isnan().any(),
    "isfinite": lambda t: t.isfinite().all(),
    "count_nonzero": torch.count_nonzero,
}


def _with_gradients(options: dict[str, object]) -> tuple[Net, Net]:
    reference = Net(num_blocks=1)
    net = shard(copy.deepcopy(reference), **options)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    return reference, net


def _are_those_of_one_process() -> None:
    for options in options_of_strategies():
        reference, net = _with_gradients(options)
        wanted = dict(reference.named_parameters())
        # Many rows, few rows of which some ranks have none, and vectors.
        for name in ("embedding.weight", "blocks.0.down.weight", "blocks.0.norm.bias"):
            parameter = net.get_parameter(name)
            assert parameter.grad is not None
            for key, statistic in STATISTICS.items():
                for own, full in ((parameter, wanted[name]), (parameter.grad, wanted[name].grad)):
                    with record_collectives() as record:
                        result = statistic(own.detach())
                    assert isinstance(result, DTensor) and not record.calls
                    torch.testing.assert_close(
                        result.full_tensor(),
                        statistic(full.detach()),
                        # Gradients differ by the order of their sum over ranks.
                        rtol=1e-4,
                        atol=1e-6,
                        msg=lambda m, n=name, k=key, o=options: f"{k} of {n}, {o}: {m}",
                    )
        # Before full_tensor() the parameter itself, which autograd watches, gives the same.
        weight = net.blocks[0].up.weight
        if IS_DISPATCH_BYPASSED and options.get("strategy") != "no_shard":
            with pytest.raises(NotImplementedError, match=r"'std within .*torch\.no_grad\(\)"):
                weight.std()
        else:
            assert torch.equal(weight.std().full_tensor(), weight.detach().std().full_tensor())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_logged_statistics_are_those_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    """Of every parameter and gradient, in every strategy, without a collective of the call."""
    ranks(num_ranks).run(_are_those_of_one_process)


def _mixed_units() -> None:
    reference = Net(num_blocks=1)
    net = copy.deepcopy(reference)
    fully_shard(net.blocks[0], strategy="no_shard")
    fully_shard(net)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    for order in (math.inf, 2.0):
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()], order)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()], order)
        torch.testing.assert_close(norm.full_tensor(), wanted, rtol=1e-4, atol=1e-6)


def test_norms_of_sharded_and_replicated_gradients_together(ranks: Ranks) -> None:
    """One list has gradients of two strategies."""
    ranks(3).run(_mixed_units)
