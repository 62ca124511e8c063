"""Megatron-core's own parallel parameters: trained, clipped, stored and refused as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import megafsdp
from megafsdp import checkpoint, full_state_dict, load_full_state_dict, megatron
from megafsdp.mesh.annotation import ExpertRange, FusedParts, annotate, annotation_of
from megafsdp.optimizer.grads.norms import num_zero_grads, param_group_norms, total_norm
from tests.megatron.core_net import (
    CoreNet,
    Degrees,
    Heads,
    Layer,
    Norm,
    Part,
    SequentialExperts,
    groups_of,
    oracle,
)
from tests.ranks import Ranks

OWN_DTYPE = megatron.MixedPrecisionPolicy(None)
IN_FP64 = megatron.MixedPrecisionPolicy(torch.float64, torch.float64, torch.float64)
NUM_TOKENS = 8


def _sharded(degrees: Degrees, whole: CoreNet, **options: Any) -> CoreNet:
    mesh, of_experts = degrees.meshes(dist.get_world_size())
    groups = groups_of(mesh, of_experts)
    is_grouped = not hasattr(whole.layers[0].mixture.experts, "local_experts")
    net = CoreNet(groups, is_grouped=is_grouped).to(whole.norm.weight.dtype).load(whole, groups)
    outer = {"dp_outer_dim": "outer"} if degrees.outer > 1 else {}
    # Experts that are not cut need no axis for it.
    names = ("dp", "ep", "tp") if degrees.etp > 1 else ("dp", "ep")
    keywords: dict[str, Any] = {
        "device_mesh": mesh if outer else mesh["dp", "tp"],
        "expt_device_mesh": of_experts if outer else of_experts[names],
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
        "fsdp_unit_modules": [Layer],
        "mixed_precision_policy": IN_FP64,
    }
    megatron.fully_shard_model(net, **{**keywords, **outer, **options})
    return net


def _adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-3)


def _batch(step: int) -> torch.Tensor:
    """Return the tokens of all ranks; the loss is the mean over them."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 16, (NUM_TOKENS * dist.get_world_size(),), generator=generator)


def _backward(net: CoreNet, degrees: Degrees, step: int) -> None:
    num_data_ranks = dist.get_world_size() // degrees.tp
    net(_batch(step).chunk(num_data_ranks)[dist.get_rank() // degrees.tp]).backward()


def _assert_same(net: CoreNet, whole: CoreNet, *, attribute: str | None = None) -> None:
    wholes = dict(whole.named_parameters())
    named = net.named_by_layer()
    declared = [experts for p in named.values() if (experts := annotation_of(p).experts)]
    assert declared, "each layer has experts"
    if all(experts.count == experts.total for experts in declared):
        assert list(named) == list(wholes)
    for name, parameter in named.items():
        found = parameter if attribute is None else getattr(parameter, attribute)
        wanted = wholes[name] if attribute is None else getattr(wholes[name], attribute)
        torch.testing.assert_close(
            found.full_tensor().detach(),
            wanted.detach(),
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text, name=name: f"{text}\n{name}",
        )


CASES = [
    (Degrees(tp=2, etp=2), {}),
    (Degrees(tp=4, etp=1), {"zero_dp_strategy": "optim"}),
    (Degrees(tp=2, ep=2, etp=2), {}),
    (Degrees(tp=2, ep=2), {"zero_dp_strategy": "optim_grads"}),
    (Degrees(ep=2), {}),
    (Degrees(ep=4), {}),
    (Degrees(ep=2, outer=2), {}),
    (Degrees(ep=2, outer=2), {"outer_dp_sharding_strategy": "optim"}),
]


def _trains(degrees: Degrees, options: dict[str, Any]) -> None:
    whole = oracle()
    net = _sharded(degrees, whole, **options)
    optimizers = [_adamw(whole), _adamw(net)]
    for step in range(2):
        whole(_batch(step)).backward()
        _backward(net, degrees, step)
        _assert_same(net, whole, attribute="grad")
        assert num_zero_grads(net) == num_zero_grads(whole)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), math.inf)
        found = megafsdp.clip_grad_norm_(net, math.inf)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_same(net, whole)


@pytest.mark.parametrize(("degrees", "options"), CASES)
def test_training_is_that_of_one_process(
    ranks: Ranks, degrees: Degrees, options: dict[str, Any]
) -> None:
    """Gradients, their norm and zeros, and parameters, with experts cut, shared out or both."""
    ranks(4).run(_trains, degrees, options)


def _stored(saved: Degrees, loaded: Degrees, directory: str, is_grouped: bool) -> None:
    whole = oracle(is_grouped=is_grouped)
    net = _sharded(saved, whole)
    optimizers = [_adamw(whole), _adamw(net)]
    whole(_batch(0)).backward()
    _backward(net, saved, 0)
    for optimizer in optimizers:
        optimizer.step()
    checkpoint.save(directory, step=1, model=net, optimizer=optimizers[1])
    other = _sharded(loaded, oracle(is_grouped=is_grouped))
    optimizer = _adamw(other)
    checkpoint.load(directory, model=other, optimizer=optimizer)
    _assert_same(other, whole)
    # The moments too: the next step is the same.
    for each in (whole, other):
        each.zero_grad()
    whole(_batch(1)).backward()
    _backward(other, loaded, 1)
    optimizers[0].step()
    optimizer.step()
    _assert_same(other, whole)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Degrees(tp=2, ep=2, etp=2), Degrees(ep=4)),
        (Degrees(ep=2), Degrees(tp=4, etp=2)),
        (Degrees(tp=4, etp=4), Degrees(tp=2, ep=2)),
    ],
)
def test_checkpoints_load_at_other_degrees(
    ranks: Ranks, tmp_path: Any, saved: Degrees, loaded: Degrees, is_grouped: bool
) -> None:
    """[gate; up] in the order of the whole, and experts by their index in the layer."""
    ranks(4).run(_stored, saved, loaded, str(tmp_path), is_grouped)


def _whole_states() -> None:
    whole = oracle()
    net = _sharded(Degrees(tp=2, etp=2), whole)
    names = dict(whole.named_parameters())
    state = full_state_dict(net)
    for name, parameter in names.items():
        assert torch.equal(state[name], parameter), name
    for parameter in net.parameters():
        parameter.detach().zero_()
    load_full_state_dict(net, state)
    _assert_same(net, whole)
    shared = _sharded(Degrees(ep=2), whole)
    for action in (full_state_dict, lambda net: load_full_state_dict(net, state)):
        with pytest.raises(ValueError, match=r"all experts.*those of 2 of 4.*checkpoint\.save"):
            action(shared)


def test_whole_states_have_the_order_of_one_process(ranks: Ranks) -> None:
    """Refused where ranks have other experts under one name."""
    ranks(4).run(_whole_states)


def _norms() -> None:
    whole = oracle()
    net = _sharded(Degrees(ep=2), whole)
    whole(_batch(0)).backward()
    _backward(net, Degrees(ep=2), 0)
    experts = [p.grad for name, p in net.named_parameters() if ".experts." in name]
    with pytest.raises(ValueError, match=r"all ranks of 2 sets.*norm of experts together with"):
        total_norm(experts)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wanted = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    torch.testing.assert_close(param_group_norms(optimizer)[0].double(), wanted, rtol=1e-6, atol=0)
    # Gradients of the user's own do not say whose they are.
    parameter = net.layers[0].mixture.experts.local_experts[0].linear_fc1.weight
    parameter.grad = parameter.grad * 1
    with pytest.raises(ValueError, match=r"norm of gradients.*before fully_shard"):
        megafsdp.clip_grad_norm_(net, 1.0)
    replicated = _sharded(Degrees(ep=2), whole, zero_dp_strategy="no_shard")
    _backward(replicated, Degrees(ep=2), 0)
    with pytest.raises(ValueError, match=r"all ranks of 2 sets.*strategy='optim' or more"):
        megafsdp.clip_grad_norm_(replicated, 1.0)


def test_norms_that_would_leave_experts_out_are_refused(ranks: Ranks) -> None:
    """Of experts alone, of gradients that the user made, and of replicated ones."""
    ranks(4).run(_norms)


def _clips() -> None:
    whole, degrees = oracle().float(), Degrees(tp=2, ep=2, etp=2)
    net = _sharded(degrees, whole, mixed_precision_policy=megatron.MixedPrecisionPolicy())
    adam = megafsdp.FusedAdam(
        net.parameters(), lr=0.05, eps=1e-3, weight_decay=0.01, max_grad_norm=0.1
    )
    optimizers = [_adamw(whole), adam]
    for step in range(2):
        whole(_batch(step)).backward()
        _backward(net, degrees, step)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in net.named_by_layer().items():
        wanted = dict(whole.named_parameters())[name].detach()
        found = parameter.full_tensor().detach()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_clipping_keeps_copies_equal(ranks: Ranks) -> None:
    """All ranks take one factor, of the norm of the whole model."""
    ranks(4).run(_clips)


def _keeps_attributes() -> None:
    mesh, of_experts = Degrees(tp=2, etp=2).meshes(2)
    net = CoreNet(groups_of(mesh, of_experts)).float()
    net.layers[1].requires_grad_(requires_grad=False)
    keywords: dict[str, Any] = {"dp_shard_dim": "dp", "tp_dim": "tp", "fsdp_unit_modules": [Layer]}
    megatron.fully_shard_model(net, mesh["dp", "tp"], **keywords)
    assert [p.requires_grad for p in net.layers[1].parameters()].count(True) == 0
    assert all(p.requires_grad for p in net.layers[0].parameters())
    weight = net.layers[0].mlp.linear_fc2.weight
    assert weight.tensor_model_parallel and weight.partition_dim == 1
    assert net.norm.weight.sequence_parallel
    kinds = []
    handle = net.layers[0].mlp.linear_fc2.register_forward_pre_hook(
        lambda module, _: kinds.append((type(module.weight), tuple(module.weight.shape)))
    )
    _backward(net, Degrees(tp=2, etp=2), 0)
    handle.remove()
    assert kinds == [(nn.Parameter, (8, 4))]


def test_layers_see_plain_parts_with_their_attributes(ranks: Ranks) -> None:
    """Optimizers read the attributes too."""
    ranks(2).run(_keeps_attributes)


class Beside(Part):
    """A part beside a DTensor."""

    def __init__(self, group: Any, mesh: Any) -> None:
        super().__init__((8, 8), 0, group)
        self.other = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))


class Columns(SequentialExperts):
    """A matrix with columns of all experts, beside their modules."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.weight1 = nn.Parameter(torch.empty(8, 4))
        self.weight1.tensor_model_parallel = True
        self.weight1.partition_dim = 1


class Norms(nn.Module):
    """A norm as torch's layers have it under tensor parallelism, beside a plain parameter."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
        self.scale = nn.Parameter(torch.ones(8))
        self.kinds: list[type] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, scaled twice."""
        self.kinds += [type(self.weight.data), type(self.scale)]
        return x * self.weight.to_local() * self.scale


def _beside_dtensors() -> None:
    mesh, of_experts = Degrees(tp=2).meshes(2)
    group = groups_of(mesh, of_experts).tp
    net = nn.Sequential(Norms(mesh["tp"]), Part((8, 8), 0, group))
    megatron.fully_shard_model(net, mesh["dp", "tp"], dp_shard_dim="dp", tp_dim="tp")
    net(torch.ones(2, 8)).sum().backward()
    assert net[0].kinds == [DTensor, nn.Parameter]
    # A copy on both ranks, which counts once.
    assert net[0].scale.placements[-1].is_replicate()


def test_layers_with_dtensors_keep_them(ranks: Ranks) -> None:
    """And their plain parameters."""
    ranks(2).run(_beside_dtensors)


def _refuses() -> None:
    mesh, of_experts = Degrees(tp=2, etp=2).meshes(2)
    groups = groups_of(mesh, of_experts)
    keywords: dict[str, Any] = {
        "device_mesh": mesh["dp", "tp"],
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
    }
    # Its matrix of columns is whole, but of other experts on each rank.
    shared = groups_of(*Degrees(ep=2).meshes(2))
    undeclared = Part((8, 8), 0, groups.tp)
    del undeclared.weight.partition_dim
    # A layer of this package, whose mesh was forgotten.
    forgotten = nn.Sequential(nn.Linear(8, 8, bias=False), Part((8, 8), 0, groups.tp))
    annotate(forgotten[0].weight, tp_dim=0)
    cases = [
        (forgotten, ValueError, r"as its layer declares.*'0\.weight'.*set_device_mesh"),
        (undeclared, ValueError, r"partition_dim.*got -1.*'weight'.*annotate"),
        (Beside(groups.tp, mesh["tp"]), NotImplementedError, r"DTensors beside them.*'weight'"),
        (Columns(groups), NotImplementedError, r"columns of all experts.*'weight1'.*Sequential"),
        (Columns(shared), NotImplementedError, r"columns of all experts.*'weight1'.*Sequential"),
    ]
    for net, error, text in cases:
        with pytest.raises(error, match=text):
            megatron.fully_shard_model(net, **keywords)
    # Experts that the other rank has not, on a mesh of both.
    with pytest.raises(ValueError, match=r"with the same 2 of 4 experts, got 2.*expert_mesh"):
        megatron.fully_shard_model(SequentialExperts(shared))
    # What another check refuses is as it was, and so is its optimizer.
    net = nn.Sequential(Part((8, 8), 0, groups.tp, stride=2), nn.Linear(8, 8).half())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = list(net.parameters())
    with pytest.raises(ValueError, match="float16"):
        megatron.fully_shard(net, optimizer, **keywords, mixed_precision_policy=OWN_DTYPE)
    with pytest.raises(TypeError, match="MixedPrecisionPolicy"):
        megatron.fully_shard(net, optimizer, **keywords, mixed_precision_policy=None)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    megatron.fully_shard(net, optimizer, **keywords)
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    assert annotation_of(net[0].weight).fused.sizes == (4, 4)


def test_parts_that_do_not_say_what_they_are_part_of_are_refused(ranks: Ranks) -> None:
    """By name, with nothing changed."""
    ranks(2).run(_refuses)


def _optimizers_follow(strategy: str) -> None:
    degrees, whole = Degrees(tp=2, etp=2), oracle()
    mesh, of_experts = degrees.meshes(4)
    groups = groups_of(mesh, of_experts)
    net = CoreNet(groups).load(whole, groups)
    optimizers = [
        torch.optim.Adagrad(n.parameters(), lr=0.1, initial_accumulator_value=0.5)
        for n in (whole, net)
    ]
    keywords: dict[str, Any] = {
        "device_mesh": mesh["dp", "tp"],
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
        "zero_dp_strategy": strategy,
        "mixed_precision_policy": IN_FP64,
    }
    megatron.fully_shard(net, optimizers[1], **keywords)
    whole(_batch(0)).backward()
    _backward(net, degrees, 0)
    for optimizer in optimizers:
        optimizer.step()
    _assert_same(net, whole)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_states_that_an_optimizer_has_made_are_cut_with_the_parts(
    ranks: Ranks, strategy: str
) -> None:
    """Adagrad makes its sums when it is built, of the part."""
    ranks(4).run(_optimizers_follow, strategy)


class Latent(nn.Module):
    """Latent attention's names: each rank norms the same queries."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.q_layernorm = nn.RMSNorm(8)
        self.linear_q_up_proj = Part((8, 8), 0, group)


def _norms_of_heads() -> None:
    mesh, of_experts = Degrees(tp=2).meshes(2)
    group = groups_of(mesh, of_experts).tp
    net = nn.Sequential(Latent(group), Heads(group), Norm())
    megatron.fully_shard_model(net, mesh["dp", "tp"], dp_shard_dim="dp", tp_dim="tp")
    norms = (net[0].q_layernorm, net[1].q_layernorm, net[2])
    found = [annotation_of(norm.weight).sums_over_tp for norm in norms]
    assert found == [False, True, True]


def test_gradients_of_norms_are_sums_where_ranks_have_addends(ranks: Ranks) -> None:
    """Norms of single heads are, whether the sequence is cut or not."""
    ranks(2).run(_norms_of_heads)


def _declared() -> None:
    mesh, of_experts = Degrees(tp=2).meshes(2)
    group = groups_of(mesh, of_experts).tp
    whole = torch.arange(48.0).view(12, 4)
    # Three tensors, two groups of two, and two tensors whose columns are cut.
    fused = (
        FusedParts(("a", "b", "c"), (2, 1, 3)),
        FusedParts(("a", "b"), (1, 2), num_groups=2),
        FusedParts(("a", "b"), (8, 4)),
    )
    net = nn.Sequential(*(Part((12, 4), dim, group) for dim in (0, 0, 1)))
    for layer, parts in zip(net, fused, strict=True):
        annotate(layer.weight, fused=parts, sums_over_tp=True)
        dim = layer.weight.partition_dim
        cut = [2 * size for size in parts.sizes] if parts.num_groups + dim == 1 else [12]
        own = [tensor.chunk(2, dim)[group.rank()] for tensor in whole.split(cut)]
        layer.weight.data.copy_(torch.cat(own))
    net.append(nn.Linear(4, 4, bias=False))
    annotate(net[3].weight, sums_over_tp=True)
    # Two modules with one parameter.
    net.append(Part((12, 4), 0, group))
    net[4].weight = net[0].weight
    megatron.fully_shard_model(net, mesh["dp", "tp"], dp_shard_dim="dp", tp_dim="tp")
    for layer in net[:3]:
        assert torch.equal(layer.weight.full_tensor(), whole)
    assert net[4].weight is net[0].weight
    of_whole = (
        FusedParts(("a", "b", "c"), (4, 2, 6)),
        FusedParts(("a", "b"), (1, 2), num_groups=4),
        fused[2],
    )
    assert [annotation_of(layer.weight).fused for layer in net[:3]] == list(of_whole)
    assert annotation_of(net[3].weight).sums_over_tp


def test_fused_parts_are_declared_with_the_sizes_of_a_rank(ranks: Ranks) -> None:
    """Each tensor is cut by itself, as Megatron-core's layers of linear attention do."""
    ranks(2).run(_declared)


def _whole_experts() -> None:
    mesh, of_experts = Degrees(tp=2).meshes(2)
    groups = groups_of(mesh, of_experts)
    # Not cut, and all experts on each rank: a matrix with columns of all is like any other.
    columns = Columns(groups)
    megatron.fully_shard_model(columns, mesh["dp"])
    assert annotation_of(columns.weight1).experts is None
    # All experts on each rank of tp are copies, too, which count once.
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    annotate(net[1].weight, experts=ExpertRange(0, 4, 4, name_component=-2))
    megafsdp.fully_shard(net, mesh=mesh["dp"])
    assert net[1].weight.placements[-1].is_replicate()


def test_experts_that_all_ranks_have_are_like_other_parameters(ranks: Ranks) -> None:
    """Also beside tensor parallelism."""
    ranks(2).run(_whole_experts)
