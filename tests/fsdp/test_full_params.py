"""Full state dicts, forwards with everything gathered, and state dicts at the wrong time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard, distribute_tensor

from megafsdp import full_state_dict, fully_shard, load_full_state_dict, summon_full_params
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from tests.fsdp.toy import Net, batches, mine, pair, shard
from tests.ranks import Ranks


def _round_trip(strategy: str) -> None:
    reference, net = pair(strategy=strategy)
    state = full_state_dict(net)
    wanted = reference.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[n], wanted[n]) for n in wanted)
    other = Net(seed=5)
    with torch.no_grad():
        net(*mine(batches(1)[0]))
    net(*mine(batches(1)[0]))  # Keeps storage, which must not be used stale.
    load_full_state_dict(net, other.state_dict())
    batch = batches(1)[0]
    rank = dist.get_rank()
    with torch.no_grad():
        expected = other(*[t[2 * rank : 2 * rank + 2] for t in batch])
        torch.testing.assert_close(net(*mine(batch)), expected)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_a_full_state_dict_round_trips_bitwise(ranks: Ranks, strategy: str) -> None:
    """Names and values are the unsharded model's, and loading refreshes kept storage."""
    ranks(3).run(_round_trip, strategy)


def _mismatch() -> None:
    _, net = pair()
    before = [p.local.clone() for p in net.parameters()]
    state = Net(seed=5).state_dict()
    if dist.get_rank() == 1:
        state["extra"] = torch.zeros(1)
        state["norm.weight"] = torch.zeros(3)
        del state["norm.bias"]
    words = "missing 'norm.bias'.*unknown 'extra'.*'norm.weight' of shape"
    with pytest.raises(ValueError if dist.get_rank() == 1 else RuntimeError, match=words):
        load_full_state_dict(net, state)
    assert all(torch.equal(a, p.local) for a, p in zip(before, net.parameters(), strict=True))


def test_a_wrong_full_state_dict_raises_on_all_ranks_and_changes_nothing(ranks: Ranks) -> None:
    """One rank's bad state is every rank's error, with all names."""
    ranks(2).run(_mismatch)


def _summon() -> None:
    reference, net = pair()
    tokens, _ = batches(1)[0]
    with summon_full_params(net):
        with record_collectives() as record, torch.no_grad():
            for _ in range(dist.get_rank() + 1):
                logits = net(tokens)
        assert not record.calls, "ranks may call the model a different number of times"
        assert torch.equal(dict(net.named_parameters())["norm.weight"], reference.norm.weight)
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(tokens))
    assert not net.blocks[0]._fsdp_unit().is_unsharded
    assert all(hasattr(p, "local") for p in net.parameters())


def test_summoned_parameters_are_full_and_forwards_gather_nothing(ranks: Ranks) -> None:
    """Inside the context the model runs on one rank alone; after it, it is sharded again."""
    ranks(2).run(_summon)


def _state_dict_inside() -> None:
    net = shard(Net())
    net.norm.register_forward_hook(lambda *_: net.state_dict())
    with pytest.raises(RuntimeError, match="outside of the unit's forward"):
        net(*mine(batches(1)[0]))


def test_state_dict_in_the_middle_of_a_forward_is_refused(ranks: Ranks) -> None:
    """It would show gathered parameters."""
    ranks(2).run(_state_dict_inside)


def _load_state_dict() -> None:
    _, net = pair()
    _, other = pair()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    net(*mine(batches(1)[0]))
    objects = [id(p) for p in net.parameters()]
    net.load_state_dict(other.state_dict())
    assert [id(p) for p in net.parameters()] == objects
    with torch.no_grad():
        assert torch.equal(net(*mine(batches(1)[0])), other(*mine(batches(1)[0])))


def _writes_into_a_state_dict(strategy: str) -> None:
    net, other = (shard(Net(seed=seed), strategy=strategy) for seed in (0, 5))
    batch = mine(batches(1)[0])
    with torch.no_grad():
        before = net(*batch)
        given = other.state_dict()
        for name, tensor in net.state_dict().items():
            local_tensor(tensor).copy_(local_tensor(given[name]))
        wanted = other(*batch)
        assert not torch.equal(before, wanted)
        assert torch.equal(net(*batch), wanted)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_writes_into_the_tensors_of_a_state_dict_count(ranks: Ranks, strategy: str) -> None:
    """As ``torch.distributed.checkpoint`` writes, without ``load_state_dict``."""
    ranks(2).run(_writes_into_a_state_dict, strategy)


def test_load_state_dict_copies_and_refreshes(ranks: Ranks) -> None:
    """A sharded state dict of an equal model loads by copy into the same parameters."""
    ranks(2).run(_load_state_dict)


def _loads_what_fsdp2_cut_after_tp() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for num_rows in (8, 9, 3):
        for dim in (0, 1):
            weight = torch.randn(num_rows, 6)
            theirs, ours = (nn.Linear(6, num_rows, bias=False) for _ in range(2))
            theirs.weight = nn.Parameter(distribute_tensor(weight, root["tp"], [Shard(dim)]))
            fsdp2(theirs, mesh=root["dp"])
            fully_shard(ours)
            ours.load_state_dict(theirs.state_dict())
            assert torch.equal(ours.weight.full_tensor(), weight)


def test_rows_that_tp_cut_before_fsdp2_are_loaded_in_order(ranks: Ranks) -> None:
    """Strided shards, uneven ones too, come together as the tensor that was cut."""
    ranks(4).run(_loads_what_fsdp2_cut_after_tp)
