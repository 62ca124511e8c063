"""Parameters of one unit on meshes of their own, as torch's ``ShardPlacementResult`` names them.

The model shares experts out without any layer or declaration of this package, as programs for
FSDP2 do: stacks are DTensors over ``ep``, and ranks with the same experts divide them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megafsdp import (
    annotate,
    fully_shard,
    fully_shard_model,
)
from megafsdp.fsdp.division import UnitMeshes
from megafsdp.fsdp.grouping import find_parameters
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.placement_choice import choose_meshes
from megafsdp.mesh.spmd import spmd_mesh_of
from tests.fsdp.mixture import show_to_all
from tests.fsdp.test_spmd_mesh import Dims
from tests.fsdp.toy import train_on_shares
from tests.ranks import Ranks

WIDTH, NUM_EXPERTS = 6, 4


@dataclass(frozen=True)
class Result:
    """A placement and a mesh of its own, with the names of torch's, which came with 2.12."""

    placement: Shard | None
    mesh_info: Info


@dataclass(frozen=True)
class Info:
    """A data-parallel mesh, with the names of torch's."""

    mesh: DeviceMesh
    dp_mesh_dims: Dims | None = None
    spmd_mesh: DeviceMesh | None = None


def result_of_torch(placement: Shard, mesh: DeviceMesh) -> Any:
    """Return torch's own pair where it has one, else ours of the same names."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_common as common
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

        return common.ShardPlacementResult(placement, _get_mesh_info(mesh))
    except (ImportError, AttributeError):
        return Result(placement, Info(mesh))


class Layer(nn.Module):
    """A dense map, and a stack of experts of which a rank may have some."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the experts' outputs for the tokens x (tokens, width)."""
        return x + self.experts(torch.tanh(x @ _local(self.dense)))


class Experts(nn.Module):
    """Maps in a stack, weighted for each token by its own first elements."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / 2)
        self.ep: DeviceMesh | None = None

    def forward(self, h: Tensor) -> Tensor:
        """Mix the experts' outputs, each rank of ``ep`` those of its own."""
        gates, ep = h[:, :NUM_EXPERTS].softmax(1), self.ep
        if ep is None:
            return self._mix(h, gates)
        h, gates = (show_to_all(each, ep) for each in (h, gates))
        own = self._mix(h, gates.chunk(ep.size(), 1)[ep.get_local_rank()])
        summed = DTensor.from_local(own, ep, [Partial()], run_check=False)
        return summed.redistribute(placements=[Shard(0)]).to_local()

    def _mix(self, h: Tensor, gates: Tensor) -> Tensor:
        return torch.einsum("te,enk,tk->tn", gates, _local(self.stack), h)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Net(nn.Module):
    """Two layers under a root with a parameter of its own; the mean square of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over tokens."""
        for layer in self.layers:
            x = layer(x)
        return (x @ _local(self.head)).square().sum(1).mean()


Divide = Callable[[Net, "Meshes"], None]


@dataclass(frozen=True)
class Meshes:
    """The data-parallel mesh, that of ranks with the same experts, and the axis of experts."""

    data: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh
    of_experts: DeviceMesh


def _meshes(*outer: int) -> Meshes:
    """Return the meshes of four ranks, replicated over an outer axis if one is given."""
    names, ranks = ("dp_outer",) * len(outer), 4 // (outer[0] if outer else 1)
    data = init_device_mesh("cpu", (*outer, ranks), mesh_dim_names=(*names, "dp"))
    grid = init_device_mesh("cpu", (*outer, ranks // 2, 2), mesh_dim_names=(*names, "edp", "ep"))
    return Meshes(data, grid[(*names, "edp")] if outer else grid["edp"], grid["ep"], grid)


def _cut_experts(net: Net, meshes: Meshes) -> None:
    for layer in net.layers:
        experts = layer.experts
        experts.ep = meshes.ep
        stack = distribute_tensor(experts.stack.detach(), meshes.ep, [Shard(0)])
        experts.stack = nn.Parameter(stack)


def _by_results(net: Net, meshes: Meshes) -> None:
    """Divide each layer in one call, as torchtitan does."""
    _cut_experts(net, meshes)

    def place(parameter: nn.Parameter) -> object:
        # Shard(1) asks to cut within each matrix, where there are more ranks than matrices.
        is_stack = parameter.ndim == 3
        return result_of_torch(Shard(int(is_stack)), meshes.experts if is_stack else meshes.data)

    fully_shard_model(net, [Layer], mesh=meshes.data, shard_placement_fn=place)
    groups = net.layers[0]._fsdp_unit().groups
    assert [group.axes.mesh for group in groups] == [meshes.data, meshes.experts]


def _by_units(net: Net, meshes: Meshes) -> None:
    """Make the experts of each layer a unit of their own, as programs did before."""
    _cut_experts(net, meshes)
    for layer in net.layers:
        fully_shard(layer.experts, mesh=meshes.experts)
        # As in torch, their mean would be over the ranks that have the same experts alone.
        layer.experts.set_gradient_divide_factor(4)
        fully_shard(layer, mesh=meshes.data)
    fully_shard(net, mesh=meshes.data)


def _on_all_axes(net: Net, meshes: Meshes) -> None:
    """Make all parameters DTensors on all axes, of two meshes."""
    names = meshes.data.mesh_dim_names
    for layer in net.layers:
        layer.experts.ep = meshes.ep
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_stack = parameter.ndim == 3
            mesh = meshes.of_experts if is_stack else meshes.data
            placements = [Replicate()] * (mesh.ndim - is_stack) + [Shard(0)] * is_stack
            whole = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(module, name, nn.Parameter(whole))
    dims, of_experts = Dims((names[-1],), names[:-1]), Dims(("edp",), names[:-1])

    def place(parameter: nn.Parameter) -> object:
        if parameter.ndim < 3:
            return Result(Shard(0), Info(meshes.data, dims, meshes.data))
        return Result(Shard(0), Info(meshes.experts, of_experts, meshes.of_experts))

    options: dict[str, Any] = {"mesh": meshes.data, "dp_mesh_dims": dims}
    fully_shard_model(net, [Layer], shard_placement_fn=place, **options)


def _equal_one_process(divide: Divide, outer: Sequence[int]) -> None:
    meshes = _meshes(*outer)
    reference = Net().double()
    net = copy.deepcopy(reference)
    divide(net, meshes)
    train_on_shares(reference, net, 4, dist.get_rank())


@pytest.mark.parametrize("divide", [_by_results, _by_units, _on_all_axes])
@pytest.mark.parametrize("outer", [(), (2,)], ids=str)
def test_experts_on_a_mesh_of_their_own_train_as_in_one_process(
    ranks: Ranks, divide: Divide, outer: Sequence[int]
) -> None:
    """Gradients, norms and steps, in one call a layer or two, with replicas too."""
    ranks(4).run(_equal_one_process, divide, outer)


def _grouped() -> None:
    meshes = _meshes()
    tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def groups_of(module: nn.Module, **options: Any) -> list[DataParallelAxes]:
        return [group.axes for group in fully_shard(module, **options)._fsdp_unit().groups]

    # All ranks, named before the mesh of all ranks is made; annotated, without another mesh.
    whole = Result(Shard(0), Info(init_device_mesh("cpu", (4,))))
    (axes,) = groups_of(Layer(), shard_placement_fn=lambda _: whole)
    assert not axes.is_expert
    # All ranks on two axes are another mesh: the first axis repeats what the second one divides.
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    (axes,) = groups_of(Layer(), shard_placement_fn=lambda _: Result(Shard(0), Info(two)))
    assert axes.is_expert and axes.mesh == two and axes.num_shards == 2
    for options in ({}, {"expert_mesh": meshes.data}):
        annotate((layer := Layer()).experts.stack, is_expert=True)
        (axes,) = groups_of(layer, mesh=meshes.data, **options)
        assert not axes.is_expert
    # The function names a mesh for one stack: another that is annotated stays with the rest.
    annotate((layer := Layer()).dense, is_expert=True)
    found = find_parameters([layer], (), MixedPrecisionPolicy())
    chosen = Result(Shard(0), Info(meshes.experts))
    place = {3: chosen, 2: None}
    named = choose_meshes(found, lambda p: place[p.ndim], UnitMeshes(meshes.data))
    assert named.experts == meshes.experts
    assert {item.record.name: item.is_expert for item in found} == {
        "dense": False,
        "experts.stack": True,
    }
    # The data axes of the unit's own full mesh.
    found = find_parameters([Layer()], (), MixedPrecisionPolicy())
    dims = Dims(("dp",))
    full = UnitMeshes(tp, spmd=spmd_mesh_of(tp, dims))
    assert choose_meshes(found, lambda _: Result(None, Info(tp["dp"], dims, tp)), full) == full
    # tp may cut a stack by heads; and a parameter beside it makes a unit no unit of experts.
    heads = Experts()
    heads.stack = nn.Parameter(distribute_tensor(heads.stack.detach(), tp["tp"], [Shard(0)]))
    (axes,) = groups_of(heads, mesh=tp["dp"])
    assert not axes.is_expert
    _cut_experts(net := Net(), meshes)
    experts = net.layers[0].experts
    experts.bias = nn.Parameter(torch.zeros(3))
    axes, *others = groups_of(experts, mesh=meshes.experts)
    assert not others and not axes.is_expert and axes.model_mesh == meshes.ep


def test_which_parameters_are_experts(ranks: Ranks) -> None:
    """What a keyword, a function, or the parameters of a unit say."""
    ranks(4).run(_grouped)


def _refused() -> None:
    meshes, alone = _meshes(), init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    net = Net()
    layer = net.layers[0]

    def refused(error: type[Exception], words: str, *results: object, **options: object) -> None:
        given = iter(results)
        options = {"mesh": meshes.data, **options}
        with pytest.raises(error, match=words):
            fully_shard(layer, shard_placement_fn=lambda _: next(given), **options)

    third = "one mesh beside that of the unit.*fully_shard\\(\\) of their own"
    results = [Result(None, Info(mesh)) for mesh in (meshes.experts, halves["x"])]
    refused(NotImplementedError, third, *results)
    refused(NotImplementedError, third, results[0], None, expert_mesh=halves["x"])
    refused(NotImplementedError, r"Shard\(0\) or Shard\(1\), got S", None, Shard(2))
    refused(NotImplementedError, r"Expected Shard\(0\), got S", Result(Shard(1), Info(alone["a"])))
    # The stacks are plain: no axis gives other ranks the other experts.
    refused(ValueError, r"covers ranks \[0, 1, 2, 3\]", None, Result(Shard(0), Info(alone["b"])))
    fully_shard(layer, mesh=meshes.data, shard_placement_fn=lambda p: Shard(int(p.ndim == 3)))
    assert {p.placements for p in layer.parameters()} == {(Shard(0),)}


def test_meshes_and_placements_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    """With a cure, before anything is changed: the calls after them succeed."""
    ranks(4).run(_refused)


def _full_meshes_refused() -> None:
    meshes, net = _meshes(), Net()
    small = init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "one"))["one"]
    dims = Dims(("dp",))
    for parameter in net.layers[0].parameters():
        whole = distribute_tensor(parameter.detach(), meshes.data, [Replicate()])
        owner = net.layers[0] if parameter.ndim == 2 else net.layers[0].experts
        setattr(owner, "dense" if parameter.ndim == 2 else "stack", nn.Parameter(whole))
    of_others = Result(None, Info(meshes.data, dims, meshes.data))
    cases = [
        (NotImplementedError, "a full mesh for experts too", Info(meshes.experts)),
        (ValueError, "a full mesh of experts over ranks", Info(small, Dims(("one",)), small)),
    ]
    for error, words, info in cases:
        with pytest.raises(error, match=words):
            fully_shard(
                net.layers[0],
                mesh=meshes.data,
                dp_mesh_dims=dims,
                shard_placement_fn=lambda p, i=info: of_others if p.ndim == 2 else Result(None, i),
            )


def test_full_meshes_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    """Experts need a full mesh of the same ranks."""
    ranks(4).run(_full_meshes_refused)
