"""Exchanges of activations inside of compiled functions; their values are in test_layers.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.estimate.meta_engine import fake_ranks
from megafsdp.parallel.mappings import gather_sequence, reduce_scatter_sequence


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
