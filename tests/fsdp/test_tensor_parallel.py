"""torch's tensor-parallel models under our engine: values, gradients, collectives, states."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import full_tensor, fully_shard
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from tests.fsdp.llama import Llama, batches, parallelize
from tests.ranks import Ranks

# In fp64 the sides differ by the order of sums alone.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def _grid(*shape: int) -> DeviceMesh:
    names = ("outer", "inner", "tp")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _shard(model: Llama, shard: Callable[..., object], **options: object) -> Llama:
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _counts(record: CollectiveRecord, unit: str) -> list[str]:
    """Return the kinds of a unit's collectives, in their order."""
    return [kind for kind, label in record.events if label == unit]


def _three_ways() -> None:
    grid = _grid(2, 2)
    mesh, tp = grid["inner"], grid["tp"]
    reference = Llama().double()
    ours, theirs = (parallelize(copy.deepcopy(reference), tp) for _ in range(2))
    _shard(ours, fully_shard, mesh=mesh)
    _shard(theirs, torch_fully_shard, mesh=mesh)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.placements == other.placements and own.shape == other.shape
    before = [p.detach().clone() for p in reference.parameters()]
    optimizers = [_adamw(model) for model in (reference, ours, theirs)]
    own_rows = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    for step, (tokens, labels) in enumerate(batches(3, 4)):
        wanted = reference(tokens, labels)
        wanted.backward()
        with record_collectives() as record:
            loss = ours(tokens[own_rows], labels[own_rows])
            loss.backward()
        other = theirs(tokens[own_rows], labels[own_rows])
        other.backward()
        losses = torch.stack([loss.detach(), other.detach()])
        dist.all_reduce(losses, group=mesh.get_group(), op=dist.ReduceOp.SUM)
        torch.testing.assert_close(losses / 2, wanted.detach().expand(2), **TOLERANCE)
        torch.testing.assert_close(loss, other, **TOLERANCE)
        models = (reference, ours, theirs)
        for p, q, r in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(full_tensor(q.grad), p.grad, **TOLERANCE)
            torch.testing.assert_close(r.grad.full_tensor(), p.grad, **TOLERANCE)
        # The last block and the root stay gathered for backward; the sum over tp comes before the
        # reduction reads it.
        units = {"blocks.1": 1 + (step == 0), "blocks.0": 2, "Llama": 1}
        for unit, num_gathers in units.items():
            wanted_kinds = ["all_gather"] * num_gathers + ["all_reduce", "reduce_scatter"]
            assert _counts(record, unit) == wanted_kinds, unit
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for old, p, q in zip(before, reference.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(q.detach()), p.detach(), **TOLERANCE)
        assert not torch.equal(old, p), "every parameter moved"


def test_a_model_of_torchs_plan_equals_fsdp2_and_one_process(ranks: Ranks) -> None:
    """Losses, every gradient and three steps; one gather, one reduction and one sum a unit."""
    ranks(4).run(_three_ways)
