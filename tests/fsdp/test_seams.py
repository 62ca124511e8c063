"""Places where later features plug in, each exercised by a toy: group axes, recipes, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from megafsdp import ParallelDims, full_tensor, fully_shard, mark_main_weights_changed
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.fsdp_module import mix_in
from megafsdp.fsdp.grouping import find_parameters, place_parameters
from megafsdp.fsdp.params.group_buffers import GroupDtypes
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.runtime.schedule import UnitOptions
from megafsdp.fsdp.runtime.unit import FSDPUnit
from megafsdp.fsdp.weight_sync import watch_optimizer_steps
from megafsdp.mesh.parallel_dims import flat_group
from megafsdp.parallel import Linear
from megafsdp.quantize.recipe import WHOLE_ROW, BufferSpec, Recipe, Use
from tests.ranks import Ranks

FP32 = GroupDtypes(torch.float32, torch.float32, torch.float32, torch.float32)


def make_unit(
    module: nn.Module,
    axes_of: Callable[[str], DataParallelAxes],
    scale_of: Callable[[str], float],
    recipe: Recipe | None = None,
    reshard_after_forward: int | None = None,
    mesh: DeviceMesh | None = None,
) -> FSDPUnit:
    """Make a unit with one group for each axes its parameters are given."""
    policy, memory = MixedPrecisionPolicy(), UnitMemory()
    found = find_parameters([module], (), policy)
    place_parameters(found, [module], mesh, None)
    by_axes: dict[DataParallelAxes, list] = {}
    for item in found:
        by_axes.setdefault(axes_of(item.record.name), []).append(item)
    groups = [
        ParameterGroup(
            [item.parameter for item in items],
            [item.record for item in items],
            axes=axes,
            dtypes=FP32,
            memory=memory,
            gradient_scale=scale_of(items[0].record.name),
            recipe=recipe,
        )
        for axes, items in by_axes.items()
    ]
    mix_in(module)
    watch_optimizer_steps()
    return FSDPUnit(
        [module],
        groups,
        policy=policy,
        memory=memory,
        options=UnitOptions(1, reshard_after_forward),
    )


class Mixture(nn.Module):
    """A dense layer, and an expert that only this rank has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        return self.expert(self.dense(x)).square().mean()


def _two_axes_in_one_unit() -> None:
    rank = dist.get_rank()
    reference = Mixture()
    net = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    axes = {name: DataParallelAxes.sharded(mesh[name]) for name in ("all", "alone")}
    make_unit(
        net,
        lambda name: axes["alone" if name.startswith("expert") else "all"],
        lambda name: 0.5,
    )
    x = torch.arange(32.0).view(2, 2, 8) / 32
    for _ in range(2):
        losses = [reference(x[r]) for r in range(2)]
        dense = torch.autograd.grad(sum(losses) / 2, list(reference.dense.parameters()))
        expert = torch.autograd.grad(reference(x[rank]) / 2, list(reference.expert.parameters()))
        net.zero_grad()
        net(x[rank]).backward()
        for p, wanted in zip(net.parameters(), [*dense, *expert], strict=True):
            torch.testing.assert_close(full_tensor(p.grad), wanted)
    assert [g.axes.num_shards for g in net._fsdp_unit().groups] == [2, 1]


def test_dense_and_expert_parameters_share_a_unit(ranks: Ranks) -> None:
    """The group owns mesh, process group and divisor, not the unit."""
    ranks(2).run(_two_axes_in_one_unit)


class CodedWeight(torch.Tensor):
    """A tensor subclass that is read from codes and scales."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, scales: torch.Tensor) -> CodedWeight:
        """Make one over its parts."""
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scales = codes, scales
        return made

    def read(self) -> torch.Tensor:
        """Return the values that the codes stand for."""
        return self.codes.float() * self.scales.unsqueeze(-1)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        """Stay coded under detach; compute with the values otherwise."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return CodedWeight(args[0].codes, args[0].scales)
        read = tree_map(lambda t: t.read() if isinstance(t, CodedWeight) else t, (args, kwargs))
        return func(*read[0], **(read[1] or {}))


@dataclass(frozen=True)
class Int8PerTensor:
    """Codes of 8 bits with the tensor's largest value as scale, kept once a row; a toy."""

    is_elementwise: bool = False
    num_statistics: int = 1

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        """Codes and scales are read in both directions, the mask in backward alone."""
        return (
            BufferSpec("codes", torch.int8),
            BufferSpec("scales", torch.float32, WHOLE_ROW),
            BufferSpec("mask", torch.uint8, use=Use.BACKWARD),
        )

    def statistics(self, main: torch.Tensor) -> torch.Tensor:
        """Return the largest absolute value of the local rows."""
        return main.abs().max().reshape(1) if main.numel() else main.new_zeros(1)

    def encode(
        self,
        main: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        statistics: torch.Tensor | None,
    ) -> None:
        """Round to multiples of the tensor's scale."""
        assert statistics is not None
        scale = statistics / 127
        outputs["codes"].copy_((main / scale).round().clamp(-127, 127))
        outputs["scales"].copy_(scale.expand_as(outputs["scales"]))
        outputs["mask"].copy_(main > 0)

    def assemble(self, shape: torch.Size, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a coded tensor over the buffers."""
        return CodedWeight(buffers["codes"].view(shape), buffers["scales"].view(shape[:-1]))


class Coded(nn.Module):
    """Two matrices of different row sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(48, 32))
        self.down = nn.Parameter(torch.randn(32, 64))
        self.mix = torch.randn(48, 64) / 48

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by both."""
        return (F.linear(x, self.up) @ self.mix @ self.down.t()).square().mean()


def _rounded(parameter: torch.Tensor) -> torch.Tensor:
    scale = parameter.detach().abs().max() / 127
    return (parameter.detach() / scale).round() * scale


def _axes(kind: str) -> DataParallelAxes:
    if kind == "divided":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        return DataParallelAxes.divided(mesh)
    return DataParallelAxes.sharded(init_device_mesh("cpu", (dist.get_world_size(),)))


def _coded_weights(kind: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    reference = nn.Sequential(Coded())
    net = copy.deepcopy(reference)
    axes, is_sent = _axes(kind), world > 1
    num_neighbours = 2 if kind == "neighbours" else None
    make_unit(net[0], lambda _: axes, lambda _: 1 / world, Int8PerTensor(), num_neighbours)
    faces = [id(p.unsharded) for p in net[0]._fsdp_unit().groups[0].parameters]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(world, 3, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        before = [full_tensor(p.detach()) for p in net.parameters()]
        with torch.no_grad():
            for p, exact in zip(reference.parameters(), before, strict=True):
                p.copy_(_rounded(exact))
        reference.zero_grad()
        reference(x).backward()
        with record_collectives() as record:
            net(x[rank]).backward()
        # Codes and scales once in forward, which the root keeps, and the mask alone in backward;
        # neighbours gather what they kept apart from it, and the outer axis joins all three.
        num_gathers = {"divided": 3, "neighbours": 3}.get(kind, 2)
        assert record.calls["all_gather"] == is_sent * num_gathers
        labels = [label for kind, label in record.events if kind == "all_reduce"]
        assert labels.count("statistics") == is_sent
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(p.grad), q.grad, rtol=1e-4, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(before[0], full_tensor(next(iter(net.parameters())).detach()))
    with record_collectives() as record, torch.no_grad():
        net(x[rank])
        net(x[rank])
    assert record.calls["all_reduce"] == is_sent, (
        "one refresh after a step, none in a second forward"
    )
    assert [id(p.unsharded) for p in net[0]._fsdp_unit().groups[0].parameters] == faces
    # Storage that a forward keeps for backward is gathered again once weights have changed.
    net(x[rank])
    with torch.no_grad():
        for p, exact in zip(net.parameters(), reference.parameters(), strict=True):
            p.mul_(-1.5)
            exact.copy_(_rounded(full_tensor(p.detach())))
    mark_main_weights_changed(net)
    torch.testing.assert_close(net(x[rank]), reference(x[rank]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("sharded", 1), ("sharded", 2), ("sharded", 3), ("divided", 4), ("neighbours", 4)],
)
def test_a_recipe_with_several_buffers_and_a_statistic_trains(
    ranks: Ranks, kind: str, num_ranks: int
) -> None:
    """Named buffers, gathered when needed; one collective for statistics; a subclass, made once."""
    ranks(num_ranks).run(_coded_weights, kind)


class HalfCoded(nn.Module):
    """A matrix that a model axis cuts, and one that its ranks repeat, as their plain parts."""

    computes_on_part = True

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The largest value of each is one rank's alone.
        cut, repeated = torch.randn(4, 32).cumsum(0), torch.randn(2, 32)
        self.up = nn.Parameter(distribute_tensor(cut, tp, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(repeated, tp, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by both."""
        assert type(self.up) is CodedWeight, "the very object, refreshed in place"
        return F.linear(x, self.up).sum() + F.linear(x, self.down).sum()


def _statistics_of_parts() -> None:
    names = ("outer", "inner", "tp")
    root = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    net = HalfCoded(root["tp"])
    whole = {n: p.full_tensor().detach() for n, p in net.named_parameters()}
    axes = DataParallelAxes.sharded(root["outer", "inner"]).beside(root["tp"])
    unit = make_unit(net, lambda _: axes, lambda _: 0.5, Int8PerTensor(), mesh=axes.mesh)
    with record_collectives() as record:
        net(torch.ones(1, 32))
    by_group = {
        name: n for (kind, name), n in record.calls_by_group.items() if kind == "all_reduce"
    }
    groups = {name: root.get_group(name).group_name for name in names}
    # Over the axis that cuts, and not over replicas, which have the same values.
    assert by_group[groups["tp"]] == 1 and groups["outer"] not in by_group
    for p in unit.groups[0].parameters:
        rounded = _rounded(whole[p.name])
        torch.testing.assert_close(p.unsharded.read(), p.model.part.cut(rounded))


def test_statistics_include_the_ranks_that_have_the_other_parts(ranks: Ranks) -> None:
    """A scale of a whole tensor: one more maximum over the model axis, none over replicas."""
    ranks(4).run(_statistics_of_parts)


class CodedStack(nn.Module):
    """Matrices of experts that ep shares out."""

    computes_on_part = True

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The largest value of all is one expert's alone.
        stack = torch.randn(4, 3, 32) * torch.tensor([1.0, 4.0, 2.0, 3.0])[:, None, None]
        self.stack = nn.Parameter(distribute_tensor(stack, ep, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by each."""
        return torch.mul(self.stack, x).sum()


def _statistics_of_experts() -> None:
    meshes = ParallelDims(ep=2).build("cpu")
    net = CodedStack(meshes.ep)
    whole = net.stack.full_tensor().detach()
    axes = DataParallelAxes.sharded(meshes.experts).beside(meshes.ep)
    unit = make_unit(net, lambda _: axes, lambda _: 0.25, Int8PerTensor(), mesh=axes.mesh)
    with record_collectives() as record:
        net(torch.ones(1, 32))
    found = {name for kind, name in record.calls_by_group if kind == "all_reduce"}
    assert found == {mesh.get_group().group_name for mesh in (meshes.experts, meshes.ep)}
    (p,) = unit.groups[0].parameters
    # Codes and scales that were gathered are those of the gathered values.
    assert torch.equal(p.unsharded.read(), p.model.part.cut(_rounded(whole)))


def test_statistics_of_a_stack_are_over_all_its_experts(ranks: Ranks) -> None:
    """Over the ranks that divide an expert, then over those that have the others."""
    ranks(4).run(_statistics_of_experts)


def _statistics_over(names: tuple[str, str]) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    first, second = root[names[0]], root[names[1]]
    joined = flat_group(root)
    # (axes, the layer's mesh for statistics, the groups that combine them, whether these are all
    # ranks with a part): a data axis and tp, HSDP, and replicas.
    cases = [
        (DataParallelAxes.sharded(first).beside(second), None, (first, second), True),
        (DataParallelAxes.sharded(first).beside(second), first, (first,), False),
        (DataParallelAxes.sharded(first).beside(second), root, (joined,), True),
        (DataParallelAxes.replicated(first).beside(second), None, (second,), True),
        (DataParallelAxes.replicated(first).beside(second), second, (second,), True),
        (DataParallelAxes.sharded(root), None, (second,), True),
        (DataParallelAxes.sharded(root), second, (second,), True),
        (DataParallelAxes.sharded(root), root, (joined,), True),
    ]
    for axes, weight_mesh, wanted, is_whole in cases:
        net: nn.Module = Coded() if axes.model_mesh is None else HalfCoded(second)
        whole = {name: full_tensor(p).detach() for name, p in net.named_parameters()}
        if weight_mesh is not None:
            axes = axes.with_statistics_over(weight_mesh)
        unit = make_unit(net, lambda _, a=axes: a, lambda _: 1.0, Int8PerTensor(), mesh=axes.mesh)
        with record_collectives() as record:
            net(torch.ones(1, 32))
        found = {name for (kind, name) in record.calls_by_group if kind == "all_reduce"}
        groups = [g.get_group() if isinstance(g, DeviceMesh) else g for g in wanted]
        assert found == {group.group_name for group in groups}, (axes, weight_mesh)
        for p in unit.groups[0].parameters:
            part, full = p.model.part, whole[p.name]
            rounded = part.cut(_rounded(full)) if is_whole else _rounded(part.cut(full))
            torch.testing.assert_close(p.unsharded.read(), rounded)


def test_a_layer_may_say_which_ranks_combine_its_statistics(ranks: Ranks) -> None:
    """Data ranks, the model axis, all, replicas: by any names of axes; scales agree among them."""
    for names in (("dp_replicate", "dp_shard"), ("a", "b")):
        ranks(4).run(_statistics_over, names)


def _statistics_without_a_data_rank() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = Linear(8, 8, parallel_mode="column", tp_mesh=root["tp"], weight_mesh=root["tp"])
    with pytest.raises(ValueError, match=r"a weight_mesh with all ranks that divide .*'weight'"):
        fully_shard(layer, mesh=root["dp"])
    fully_shard(layer, mesh=root["dp"], strategy="no_shard")
    groups = layer._fsdp_unit().groups
    assert {g.statistics_groups for g in groups} == {(root["tp"].get_group(),)}


def test_statistics_without_a_rank_that_divides_the_weight_are_refused(ranks: Ranks) -> None:
    """Its rows would be coded with a scale of their own; ranks that have copies may be left out."""
    ranks(4).run(_statistics_without_a_data_rank)
