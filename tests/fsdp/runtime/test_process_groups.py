"""Which process groups a model's collectives use, and what happens when ranks disagree."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.comm.trace import DEBUG_VARIABLE, read_environment
from megafsdp.device.memory import Category
from megafsdp.fsdp import division
from megafsdp.fsdp.runtime import process_groups
from megafsdp.mesh.parallel_dims import ParallelDims, flat_group
from tests.fsdp.toy import Net, assert_same_grads, batches, mine, pair, shard
from tests.ranks import RankPool, RanksError

Ranks = Callable[[int], RankPool]


def _groups_used(is_separate: bool, by_inner: bool = False) -> tuple[set[str], set[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("o", "i"))
    reference, net = pair(mesh=mesh, outer_strategy="optim")
    if by_inner:
        net.blocks[1].set_separate_reduce_scatter_group(is_separate)
    elif is_separate:
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


def test_an_inner_units_choice_of_communicators_outlives_the_roots_first_forward(
    ranks: Ranks,
) -> None:
    """It applies to all units under the root."""
    for gathers, reductions in ranks(4).run(_groups_used, True, True):
        assert len(gathers) == len(reductions) == 2 and not gathers & reductions
    for gathers, reductions in ranks(4).run(_groups_used, False, True):
        assert gathers == reductions and len(gathers) == 2


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


def _partials_by_units() -> list[int]:
    most = []
    for chosen in ("inner", "root then inner", "inner then root"):
        reference, net = pair()
        if chosen == "inner":
            net.blocks[1].set_reduce_scatter_max_input_buffers(2)
        elif chosen == "root then inner":
            net.set_reduce_scatter_max_input_buffers(2)
            net.blocks[1].set_reduce_scatter_max_input_buffers(1)
        else:
            net.blocks[1].set_reduce_scatter_max_input_buffers(2)
            net.set_reduce_scatter_max_input_buffers(1)
        batch = batches(1)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference)
        most.append(net._fsdp_unit().ledger.peak_num_live[Category.PARTIAL_GRAD])
    return most


def test_of_all_units_choices_the_largest_number_of_reductions_counts(ranks: Ranks) -> None:
    """Also one made before the root's first forward; the root's replaces those below it."""
    assert ranks(2).run(_partials_by_units) == [[3, 3, 2]] * 2


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


class _Options:
    """Stands in for the options of NCCL, which this torch may lack."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout: datetime.timedelta | None = None


def _options_of_groups(backends: str, outer: int) -> list[tuple[list[int], bool, bool]]:
    """Return ranks, priority, and whether the timeout is the world's, of each group made."""
    make, seen = dist.new_group, list[tuple[list[int], object, object]]()

    def noting(ranks: list[int], **kwargs: object) -> object:
        if dist.get_rank() in ranks:
            seen.append((ranks, kwargs.get("pg_options"), kwargs.get("timeout")))
        kwargs.pop("pg_options", None)
        return make(ranks, **kwargs)

    world = dist.group.WORLD
    assert world is not None
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noting)
        patch.setattr(device_mesh, "new_group", noting)
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
        patch.setattr(dist, "get_backend_config", lambda group=None: backends)
        mesh = ParallelDims(dp_outer=outer).build("cpu").data
        net = shard(Net(1), mesh=mesh, reshard_after_forward=2 if outer == 1 else None)
        net.set_separate_reduce_scatter_group()
    made = [options for _, options, _ in seen if options is not None]
    assert len(set(map(id, made))) == len(made), "torch writes the group's name into the options"
    return [
        (ranks, getattr(options, "is_high_priority_stream", False), given == timeout)
        for ranks, options, given in seen
    ]


@pytest.mark.parametrize(
    ("outer", "wanted"),
    [(1, [[0, 1], [0, 1, 2, 3]]), (2, [[0, 2], [0, 1], [0, 1], [0, 2]])],
    ids=["neighbours and a twin", "two axes and a twin of each"],
)
def test_groups_on_nccl_have_streams_of_high_priority(
    ranks: Ranks, outer: int, wanted: list[list[int]]
) -> None:
    """Groups made beside the default one, with the timeout that the user gave to that."""
    found = ranks(4).run(_options_of_groups, "cpu:gloo,cuda:nccl", outer)[0]
    assert [group for group, _, _ in found] == wanted
    assert all(is_high and is_same for _, is_high, is_same in found)
    for _, is_high, _ in ranks(4).run(_options_of_groups, "cpu:gloo,cuda:gloo", outer)[0]:
        assert not is_high, "another library has no such option"


def _shards_on_gpus(gpus: list[str], mesh_type: str = "cuda", backend: str = "nccl") -> str:
    """Return the error of a model on a mesh that looks as if it were of these GPUs; or nothing."""
    process_groups._shared_gpus.cache_clear()
    mesh = ParallelDims(dp_outer=2).build("cpu").data
    seen = SimpleNamespace(device_type=mesh_type)
    plain = process_groups.require_own_gpus
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "flat_group", lambda seen: flat_group(mesh))
        patch.setattr(process_groups, "backends", lambda group: {"cuda": backend})
        patch.setattr(process_groups, "_own_gpu", lambda: gpus[dist.get_rank()])
        patch.setattr(division, "require_own_gpus", lambda mesh: plain(seen))
        try:
            shard(Net(1), mesh=mesh)
            # Once a mesh: another exchange would find its own counts in the store.
            shard(Net(1), mesh=mesh)
        except ValueError as error:
            return str(error)
        finally:
            process_groups._shared_gpus.cache_clear()
    return ""


def test_ranks_that_share_a_gpu_are_named_on_all_ranks(ranks: Ranks) -> None:
    """Before NCCL refuses them, at the first call of fully_shard."""
    found = ranks(4).run(_shards_on_gpus, ["GPU a", "GPU b", "GPU a", "GPU b"])
    assert len(set(found)) == 1
    assert "each of the 4 ranks" in found[0] and "set_device(local_rank)" in found[0]
    assert "got ranks 0, 2 on GPU a; ranks 1, 3 on GPU b." in found[0]


def test_ranks_with_gpus_of_their_own_or_without_nccl_are_not_refused(ranks: Ranks) -> None:
    """With gloo a GPU takes several ranks a GPU, and a mesh of CPUs has none."""
    assert ranks(4).run(_shards_on_gpus, ["a", "b", "c", "d"]) == [""] * 4
    assert ranks(4).run(_shards_on_gpus, ["a"] * 4, "cuda", "gloo") == [""] * 4
    assert ranks(4).run(_shards_on_gpus, ["a"] * 4, "cpu") == [""] * 4
