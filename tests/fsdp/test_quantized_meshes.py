"""Quantized weights that model axes cut or repeat: which ranks share a scale, and combine it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from megafsdp import ParallelDims, full_tensor, fully_shard
from megafsdp import summon_full_params as summon
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.mesh.fused_parts import gate_and_up
from megafsdp.mesh.parallel_dims import flat_group
from megafsdp.parallel import Linear
from megafsdp.parallel.experts import GroupedExperts
from tests.fsdp.quantized import (
    maxima_of,
    policy_for,
    quantize,
    quantized_parameters,
    recipe_for,
)
from tests.ranks import Ranks

TILED = ("fp8_block", "mxfp8", "nvfp4")


class Mlp(nn.Module):
    """A column-parallel pair of fused maps, a row-parallel one, and one that is whole."""

    def __init__(self, tp: DeviceMesh | None, weight_mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        fused = gate_and_up(128)
        self.up = Linear(64, 256, parallel_mode="column", fused=fused)
        self.down = Linear(128, 64, parallel_mode="row")
        self.whole = Linear(64, 32)
        with torch.no_grad():
            # The largest values of the cut weights are on one rank of tp alone.
            self.up.weight[5].mul_(8)
            self.down.weight[:, 3].mul_(8)
        for layer in (self.up, self.down, self.whole):
            layer.set_device_mesh(tp, weight_mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.whole(self.down(F.silu(gate) * up)).float().square().mean()


def _quantized(net: nn.Module) -> list:
    return list(quantized_parameters(net).values())


def _parts_under_tp(name: str) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    recipe = recipe_for(name, "weights")
    wholes = {n: p.detach().clone() for n, p in Mlp(None).named_parameters()}
    net = fully_shard(Mlp(root["tp"]), mesh=root["dp"], mp_policy=policy_for(recipe))
    with record_collectives() as record:
        net(torch.ones(2, 64))
    labels = [label for _, label in record.events]
    # Over the data axis for all together; over tp what a scale has of both parts.
    by_group = {
        name: n for (kind, name), n in record.calls_by_group.items() if kind == "all_reduce"
    }
    assert labels.count("maxima") == (1 if name in TILED else 2)
    assert by_group[root["dp"].get_group().group_name] == 1
    found = quantized_parameters(net)
    assert set(found) == {"up.weight", "down.weight", "whole.weight"}
    with summon(net):
        for fqn, (_, record_of) in found.items():
            whole = wholes[fqn].bfloat16()
            part = record_of.model.part.cut(whole).contiguous()
            shown = record_of.unsharded
            if name in TILED:
                # Tiles of the part that this rank of tp has.
                wanted = quantize(part, recipe)
                assert torch.equal(shown.codes, wanted.codes), fqn
                assert torch.equal(shown.table, wanted.table), fqn
            else:
                # One scale for the whole weight: codes of the part are those of the whole.
                wanted = quantize(whole, recipe)
                assert torch.equal(shown.table, wanted.table), fqn
                cut = record_of.model.part.cut(wanted.codes.view(whole.shape))
                assert torch.equal(shown.codes, cut.flatten()), fqn
    tables = torch.cat([p.unsharded.table for _, p in found.values()])
    by_rank = [torch.empty_like(tables) for _ in range(4)]
    dist.all_gather(by_rank, tables)
    is_equal = [torch.equal(other, tables) for other in by_rank]
    peers = [dist.get_rank() ^ 2, dist.get_rank()]
    assert all(is_equal) if name not in TILED else all(is_equal[rank] for rank in peers)


@pytest.mark.parametrize("name", ["fp8_current", *TILED])
def test_parts_of_a_weight_share_scales_where_a_scale_is_of_the_whole(
    ranks: Ranks, name: str
) -> None:
    """Per tensor over tp as well, tiles of each part by themselves; one all-reduce an axis."""
    ranks(4).run(_parts_under_tp, name)


class Experts(nn.Module):
    """Experts in stacks, of which a rank of ep has some, behind a linear that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32, bias=False)
        self.experts = GroupedExperts(4, 32, 64)
        with torch.no_grad():
            for e in range(4):
                self.experts.linear_fc1.weight[e].mul_(2.0**e)

    def cut(self, ep: DeviceMesh) -> None:
        """Keep this rank's experts."""
        for layer in (self.experts.linear_fc1, self.experts.linear_fc2):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), ep, [Shard(0)]))
            layer.ep_mesh = ep
            layer.annotate_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Give each of this rank's experts as many rows."""
        x = self.first(x)
        num = full_tensor_rows(self.experts.linear_fc1.weight)
        load = torch.full((num,), x.shape[0] // num)
        return self.experts(x, load).float().square().mean()


def full_tensor_rows(stack: Tensor) -> int:
    """Return how many experts a rank computes with."""
    local = stack.to_local() if hasattr(stack, "to_local") else stack
    return local.shape[0]


def _experts_under_ep(name: str) -> None:
    meshes = ParallelDims(ep=2).build("cpu")
    recipe = recipe_for(name, "all")
    net = Experts()
    wholes = {n: p.detach().clone() for n, p in net.named_parameters()}
    net.cut(meshes.ep)
    fully_shard(net, mesh=meshes.data, expert_mesh=meshes.experts, mp_policy=policy_for(recipe))
    with record_collectives() as record:
        loss = net(torch.ones(8, 32))
    labels = [label for _, label in record.events]
    # One for each mesh, and none over ep: other ranks have other experts.
    assert labels.count("maxima") == 2
    combined = {n for (kind, n) in record.calls_by_group if kind == "all_reduce"}
    assert meshes.ep.get_group().group_name not in combined
    found = quantized_parameters(net)
    assert set(found) == set(wholes)
    for fqn, (_, item) in found.items():
        own = item.model.part.cut(wholes[fqn]).bfloat16()
        with summon(net):
            shown = item.unsharded
            shown = shown.to_local() if hasattr(shown, "to_local") else shown
            wanted = quantize(own, recipe)
            assert torch.equal(shown.codes, wanted.codes), fqn
            assert torch.equal(shown.table, wanted.table), fqn
        if own.ndim == 3:
            # A scale an expert, or tiles that lie in one.
            by_expert = [maxima_of(matrix, recipe) for matrix in own]
            assert torch.equal(maxima_of(own, recipe), torch.cat(by_expert))
    loss.backward()
    for parameter in net.parameters():
        assert full_tensor(parameter.grad).isfinite().all()
        assert full_tensor(parameter.grad).count_nonzero() > 0


@pytest.mark.parametrize("name", ["fp8_current", *TILED])
def test_experts_have_scales_of_their_own(ranks: Ranks, name: str) -> None:
    """Combined over the ranks that have the same experts; two all-reduces a step."""
    ranks(4).run(_experts_under_ep, name)


def _maxima_over(names: tuple[str, str]) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    first, second = root[names[0]], root[names[1]]
    joined = flat_group(root)
    policy = policy_for(recipe_for("fp8_current", "weights"))
    # (data mesh, strategy, the layer's mesh, ranks that combine its maxima, whether these are all
    # that have a part): data ranks and tp, HSDP, and replicas.
    cases = [
        (first, 3, None, (first, second), True),
        (first, 3, first, (first,), False),
        (first, 3, root, (joined,), True),
        (first, 0, None, (second,), True),
        (first, 0, second, (second,), True),
        (root, 3, None, (second,), True),
        (root, 3, second, (second,), True),
        (root, 3, root, (joined,), True),
    ]
    for mesh, strategy, weight_mesh, wanted, is_whole in cases:
        tp = None if mesh is root else second
        net = Linear(32, 64, bias=False, parallel_mode="column")
        with torch.no_grad():
            net.weight[40].mul_(4)
        whole = net.weight.detach().clone()
        net.set_device_mesh(tp)
        if weight_mesh is not None:
            # Of two axes too, as users give a mesh that they have flattened.
            net.weight_mesh = weight_mesh
            net.annotate_parameters()
        fully_shard(net, mesh=mesh, strategy=strategy, mp_policy=policy)
        with record_collectives() as record:
            net(torch.ones(1, 32))
        found = {name for (kind, name) in record.calls_by_group if kind == "all_reduce"}
        groups = [g.get_group() if isinstance(g, DeviceMesh) else g for g in wanted]
        assert found == {group.group_name for group in groups}, (mesh, strategy, weight_mesh)
        ((group, item),) = _quantized(net)
        part = item.model.part
        source = whole if is_whole else part.cut(whole)
        table = quantize(source.bfloat16(), group.quantization.recipe).table
        with summon(net):
            assert torch.equal(item.unsharded.table, table), (mesh, strategy, weight_mesh)


def test_a_layer_may_say_which_ranks_combine_its_maxima(ranks: Ranks) -> None:
    """Data ranks, the model axis, all, replicas: by any names of axes; scales agree among them."""
    for names in (("dp_replicate", "dp_shard"), ("a", "b")):
        ranks(4).run(_maxima_over, names)


def _maxima_without_a_data_rank() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = Linear(32, 32, parallel_mode="column", tp_mesh=root["tp"], weight_mesh=root["tp"])
    policy = policy_for("fp8_current", quantize_activations=False)
    with pytest.raises(ValueError, match=r"a weight_mesh with all ranks that divide .*'weight'"):
        fully_shard(layer, mesh=root["dp"], mp_policy=policy)
    fully_shard(layer, mesh=root["dp"], strategy="no_shard", mp_policy=policy)
    assert {g.maxima_groups for g, _ in _quantized(layer)} == {(root["tp"].get_group(),)}


def test_maxima_without_a_rank_that_divides_the_weight_are_refused(ranks: Ranks) -> None:
    """Its rows would be coded with a scale of their own; ranks that have copies may be left out."""
    ranks(4).run(_maxima_without_a_data_rank)
