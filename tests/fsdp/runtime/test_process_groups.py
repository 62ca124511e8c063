"""Which process groups a model's collectives use, and what happens when ranks disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.comm.trace import DEBUG_VARIABLE, read_environment
from megafsdp.device.memory import Category
from tests.fsdp.toy import Net, assert_same_grads, batches, mine, pair, shard
from tests.ranks import RankPool, RanksError

Ranks = Callable[[int], RankPool]


def _groups_used(is_separate: bool) -> tuple[set[str], set[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("o", "i"))
    reference, net = pair(mesh=mesh, outer_strategy="optim")
    if is_separate:
        net.set_separate_reduce_scatter_group()
        net.set_separate_reduce_scatter_group(False)
        net.set_separate_reduce_scatter_group(True)
    with record_collectives() as record:
        batch = batches(1)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    groups = record.calls_by_group
    return (
        {group for kind, group in groups if kind == "all_gather"},
        {group for kind, group in groups if kind == "reduce_scatter"},
    )


def test_reductions_may_have_communicators_of_their_own(ranks: Ranks) -> None:
    """By default both use the mesh's groups; asked for, neither axis shares one."""
    for gathers, reductions in ranks(4).run(_groups_used, False):
        assert gathers == reductions and len(gathers) == 2
    for gathers, reductions in ranks(4).run(_groups_used, True):
        assert len(gathers) == len(reductions) == 2 and not gathers & reductions


def _most_partials(num_buffers: int) -> int:
    reference, net = pair()
    net.set_reduce_scatter_max_input_buffers(num_buffers)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    with pytest.raises(ValueError, match="1 or more buffers"):
        net.set_reduce_scatter_max_input_buffers(0)
    return net._fsdp_unit().ledger.peak_num_live[Category.PARTIAL_GRAD]


def test_as_many_reductions_are_under_way_as_the_user_allows(ranks: Ranks) -> None:
    """One beside the unit that is being packed, or more."""
    assert ranks(2).run(_most_partials, 1) == [2, 2]
    assert ranks(2).run(_most_partials, 2) == [3, 3]


class _Skipping(Net):
    """Skips its second block on some ranks."""

    skips = False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = x if self.skips and i == 1 else block(x)
        return self.head(self.norm(x)).square().mean()


def _runs_a_unit_alone(rank_that_skips: int) -> None:
    monkeypatch = pytest.MonkeyPatch()
    net = shard(_Skipping())
    net(mine(batches(1)[0])[0]).backward()
    try:
        with monkeypatch.context() as patch:
            # After the first step: a root's forward looks at the environment.
            patch.setenv(DEBUG_VARIABLE, "1")
            net(mine(batches(1)[0])[0]).backward()
            net.skips = torch.distributed.get_rank() == rank_that_skips
            net(mine(batches(1)[0])[0]).backward()
    finally:
        read_environment()


def test_the_debug_mode_names_a_unit_that_only_some_ranks_run(ranks: Ranks) -> None:
    """All ranks raise alike instead of hanging."""
    with pytest.raises(RanksError) as error:
        ranks(2).run(_runs_a_unit_alone, 1)
    message = str(error.value)
    for rank in range(2):
        own = message.split(f"---- rank {rank} ----")[1]
        assert "Expected the same collective on all ranks" in own
        assert "all_gather of 'blocks.1'" in own


def test_the_debug_mode_is_silent_where_ranks_agree(ranks: Ranks) -> None:
    """A rank that does not exist skips nothing."""
    ranks(2).run(_runs_a_unit_alone, 5)


def _bound_while_made() -> list[object]:
    world, make, seen = dist.group.WORLD, dist.new_group, []

    def noting(*args: object, **kwargs: object) -> object:
        seen.append(world.bound_device_id)
        assert kwargs["use_local_synchronization"]
        return make(*args, **kwargs)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("o", "i"))
    net = shard(Net(1), mesh=mesh["i"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noting)
        # As init_process_group(device_id=...) leaves it; gloo itself takes no notice.
        world.bound_device_id = torch.device("cuda", 5)
        # One of two replicas alone, as one stage of a pipeline.
        if mesh.get_local_rank("o") == 0:
            net.set_separate_reduce_scatter_group()
        assert world.bound_device_id == torch.device("cuda", 5), "as it was"
        world.bound_device_id = None
    return seen


def test_groups_of_some_ranks_are_made_without_the_others(ranks: Ranks) -> None:
    """A default group that is bound to a device would be split, which needs all ranks."""
    assert ranks(4).run(_bound_while_made) == [[None], [None], [], []]
