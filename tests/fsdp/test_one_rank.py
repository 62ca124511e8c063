"""A process group of one rank: the engine issues no collective in it, whatever is called."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    full_tensor,
    fully_shard,
    load_full_state_dict,
    materialize,
    microbatch,
    summon_full_params,
)
from megafsdp.buffer.comm import collectives as door
from megafsdp.buffer.comm.agreement import agree, on_rank_zero, raise_together
from megafsdp.buffer.comm.trace import DEBUG_VARIABLE, read_environment
from megafsdp.device.memory import Category
from tests.end_to_end.strategy_cases import ENGINES, MeshShape, mesh_of_shape
from tests.fsdp.toy import (
    Net,
    assert_same_grads,
    assert_same_parameters,
    batches,
    mine,
    with_grads,
)
from tests.ranks import Ranks

NUM_STEPS = 2


class Copies(TorchDispatchMode):
    """Note how many elements each operator copies from one tensor to another."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note and run."""
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy"):
            self.numels.append(args[0].numel())
        elif name == "_foreach_copy_":
            self.numels += [target.numel() for target in args[0]]
        return func(*args, **(kwargs or {}))


class GroupSizes(TorchDispatchMode):
    """Note the number of ranks of every collective that reaches torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note and run."""
        if func.namespace == "c10d":
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            self.sizes.append(dist.ProcessGroup.unbox(boxed).size())
        return func(*args, **(kwargs or {}))


def _one_process() -> list[nn.Module]:
    """Return the net with the gradients of each step, and then as the last step leaves it."""
    net = Net(2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-5)
    steps = []
    for step in range(NUM_STEPS):
        for batch in batches(2, seed=step):
            net(*batch).backward()
        steps.append(with_grads(net))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, net]


def _program(engine: str, shape: MeshShape, root: Path, one_process: list[nn.Module]) -> None:
    """Train beside one process, clip, save, load, and fill an empty net."""
    world = dist.get_world_size()
    # Sums of one rank are not rounded to the dtype in which others would be sent.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if world == 1 else None)
    engine_options = ENGINES[engine].with_options(mp_policy=policy)
    net = engine_options.shard(Net(2), shape)
    optimizer = FusedAdam(net.parameters(), lr=1e-2, eps=1e-5)
    *steps, end = one_process
    for step, reference in enumerate(steps):
        for k, batch in enumerate(batches(2, seed=step)):
            with microbatch(net, is_last=k == 1):
                net(*mine(batch)).backward()
        assert_same_grads(net, reference)
        clip_grad_norm_(net.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, end, rtol=1e-4, atol=1e-5)
    with summon_full_params(net):
        torch.testing.assert_close(net.norm.weight, end.norm.weight)
    state = full_state_dict(net)
    load_full_state_dict(net, state)
    checkpoint.save(root / engine, step=2, model=net, optimizer=optimizer)
    checkpoint.load(root / engine, model=net, optimizer=optimizer)
    assert all(torch.equal(full_state_dict(net)[name], value) for name, value in state.items())
    with torch.device("meta"):
        empty = Net(2)
    materialize(engine_options.shard(empty, shape))


def _issues_none(root: Path, sizes: list[int]) -> None:
    world = dist.get_world_size()
    one_process = _one_process()
    for engine, options in ENGINES.items():
        shapes = [(1, world), (world, 1)] if len(options.meshes[0]) == 2 else [(world,)]
        for shape in dict.fromkeys(shape for shape in shapes if 1 in shape):
            mesh_of_shape(shape)
            with GroupSizes() as noted:
                _program(engine, shape, root / str(shape), one_process)
            assert set(noted.sizes) == set(sizes), f"{engine} on {shape}"


def _issues_none_in_debug_mode(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEBUG_VARIABLE, "1")
        _issues_none(root, [])
    read_environment()


def test_one_rank_issues_no_collective(ranks: Ranks, tmp_path: Path) -> None:
    """In every strategy, from the agreement of the first forward to a checkpoint."""
    ranks(1).run(_issues_none_in_debug_mode, tmp_path)


def test_an_axis_of_one_rank_issues_no_collective(ranks: Ranks, tmp_path: Path) -> None:
    """Whether it is the outer axis or the inner one; the other issues its own."""
    ranks(2).run(_issues_none, tmp_path, [2])


def _door() -> None:
    group = dist.group.WORLD
    assert group is not None
    shard = torch.arange(6.0)
    code = torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with GroupSizes() as noted, door.record_collectives() as record:
        outputs = [torch.full((6,), torch.nan), torch.zeros(6, dtype=torch.float8_e4m3fn)]
        door.all_gather(outputs, [shard, code], group=group, label="").wait()
        assert torch.equal(outputs[0], shard) and outputs[1].view(torch.uint8).tolist() == [
            *range(6)
        ]
        door.all_gather([shard], [shard], group=group, label="").wait()
        assert torch.equal(door.all_gather_equal(shard, group=group, label=""), shard[None])
        options: dict[str, Any] = {"group": group, "reduce_dtype": torch.bfloat16, "label": ""}
        third = torch.full((4,), 1 / 3)
        for accumulate in (False, True):
            for out in (torch.ones(4), torch.ones(4, dtype=torch.float64)):
                wanted = accumulate * out.clone() + 0.5 * third
                pending = door.reduce_scatter(
                    [out], [third], scale=0.5, accumulate=accumulate, **options
                )
                pending.wait()
                pending.wait()
                assert torch.equal(out, wanted.to(out.dtype))
                out.fill_(1)
                door.all_reduce_partials(
                    out, third.clone(), scale=0.5, accumulate=accumulate, **options
                ).wait()
                assert torch.equal(out, wanted.to(out.dtype))
        out = torch.ones(4)
        door.reduce_scatter([out], [third], scale=1, accumulate=False, **options).discard()
        assert torch.equal(out, torch.ones(4)), "a discarded sum is not written"
        received = torch.empty(4)
        door.all_to_all(received, third, ([4], [4]), group, "")
        assert torch.equal(received, third)
        for op in ("sum", "max", "min", "avg"):
            for of in (None, group):
                door.all_reduce(received, op=op, group=of)
        assert torch.equal(received, third)
        assert door.all_gather_objects({"a": 1}) == door.gather_objects({"a": 1}) == [{"a": 1}]
        assert door.broadcast_object({"a": 1}) == {"a": 1}
        door.barrier()
        door.require_equal("a", what="", group=group, hint="")
        raise_together(None)
        assert agree(1, None) == [1] and on_rank_zero(lambda: 2) == 2
        with pytest.raises(ValueError, match="own error"):
            raise_together(ValueError("own error"))
    assert noted.sizes == [] and not record.events


def test_the_door_does_the_work_of_one_rank_itself(ranks: Ranks) -> None:
    """Every function of it returns or writes what a collective would."""
    ranks(1).run(_door)


def _copies(dtype: torch.dtype, shape: MeshShape) -> tuple[int, int, int]:
    """Return the copies as large as a weight in a step, and bytes of partials and full buffers."""
    net = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False))
    reference = copy.deepcopy(net).to(dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    mesh = mesh_of_shape(shape)
    fully_shard(net, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        with Copies() as copies:
            net(x).square().mean().backward()
    reference(x.to(dtype)).square().mean().backward()
    ledger, (group,) = net._fsdp_unit().ledger, net._fsdp_unit().groups
    for shown, expected in zip(net.parameters(), reference.parameters(), strict=True):
        assert shown.grad is not None and expected.grad is not None
        summed = expected.grad.float()
        dist.all_reduce(summed)
        # Twice, by two equal backwards; powers of two round nothing.
        assert torch.equal(full_tensor(shown.grad), 2 * summed / dist.get_world_size())
    if dtype == torch.float32:
        weights = group.main_weight.flat.untyped_storage().data_ptr()
        assert all(p.unsharded.untyped_storage().data_ptr() == weights for p in group.parameters)
    partial, full = (ledger.peak[c] for c in (Category.PARTIAL_GRAD, Category.UNSHARDED))
    # A buffer has both weights; activations are smaller than one.
    return sum(numel >= 24 * 40 for numel in copies.numels), partial, full


@pytest.mark.parametrize(("mesh", "sizes"), [((1,), 1), ((2, 1), 2)], ids=str)
def test_one_rank_computes_with_its_main_weight_and_packs_no_gradient(
    ranks: Ranks, mesh: MeshShape, sizes: int
) -> None:
    """No weight or gradient is copied on the way, beside ranks that repeat the group too."""
    assert ranks(sizes).run(_copies, torch.float32, mesh) == [(0, 0, 0)] * sizes


def test_one_rank_casts_its_main_weight_once_a_gather(ranks: Ranks) -> None:
    """In forward and in backward, into the full buffer; gradients are not packed either."""
    assert ranks(1).run(_copies, torch.bfloat16, (1,)) == [(2, 0, 2 * 2 * 24 * 40)]


def _written_before_backward() -> None:
    net = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    loss = net(torch.ones(3, 4)).square().mean()
    with torch.no_grad():
        net[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_write_to_a_main_weight_that_it_has_saved(ranks: Ranks) -> None:
    """Backward would read the written values, as forward reads the main weight itself."""
    ranks(1).run(_written_before_backward)
