"""Layers of Megatron-core that fuse tensors: what is declared, trained and refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from megafsdp import megatron
from megafsdp.megatron.fused_layers import declare_fused
from megafsdp.mesh.annotation import ExpertRange, FusedParts, annotate, annotation_of
from megafsdp.parallel.mappings import gather_sequence, reduce_scatter_sequence
from tests.megatron.core_net import ALONE, WIDTH, Degrees, Part
from tests.ranks import Ranks

IN_FP64 = megatron.MixedPrecisionPolicy(torch.float64, torch.float64, torch.float64)
KEY_HEADS, VALUE_HEADS, SIZE, STATES = 2, 4, 2, 3
KEYS, VALUES = KEY_HEADS * SIZE, VALUE_HEADS * SIZE


def _part(*shape: int) -> nn.Parameter:
    """Return a parameter that is marked as a part, without its dimension, as up to release 0.16."""
    made = nn.Parameter(torch.empty(shape))
    made.tensor_model_parallel = True
    return made


def _convolution(channels: int) -> nn.Conv1d:
    made = nn.Conv1d(channels, channels, 2, groups=channels)
    made.weight.tensor_model_parallel = made.bias.tensor_model_parallel = True
    return made


def _mixed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve (tokens, channels) with the token before."""
    return F.conv1d(F.pad(x.mT, (1, 0)), weight, bias, groups=len(bias)).mT


class GatedDelta(nn.Module):
    """The parameters and attributes of linear attention; each token sees the one before.

    Args:
        group: The ranks that have other heads.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.tp_size = group, group.size()
        self.qk_dim, self.v_dim, self.num_value_heads = KEYS, VALUES, VALUE_HEADS
        self.sizes = [size // self.tp_size for size in (KEYS, KEYS, VALUES, VALUES, 4, 4)]
        self.in_proj = Part((sum(self.sizes) * self.tp_size, WIDTH), 0, group)
        self.conv1d = _convolution(sum(self.sizes[:3]))
        self.dt_bias, self.A_log = _part(self.sizes[-1]), _part(self.sizes[-1])
        self.out_norm = nn.RMSNorm(SIZE, eps=1e-5)
        self.out_proj = Part((WIDTH, VALUES), 1, group)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same."""
        rows = self.in_proj(gather_sequence(x, self.group))
        *qkv, gate, beta, alpha = rows.split(self.sizes, -1)
        mixed = _mixed(torch.cat(qkv, -1), self.conv1d.weight, self.conv1d.bias)
        query, key, value = mixed.split(self.sizes[:3], -1)
        scores = (query.cos() * key).unflatten(-1, (-1, SIZE)).sum(-1).repeat_interleave(2, -1)
        decay = (-self.A_log.exp() * F.softplus(alpha + self.dt_bias)).exp()
        heads = value.unflatten(-1, (-1, SIZE)) * (scores * beta.sigmoid() + decay)[..., None]
        y = self.out_norm(heads).flatten(-2) * F.silu(gate)
        return reduce_scatter_sequence(self.out_proj(y), self.group)


class Views:
    """What a state-space layer gives its parameters to, which reads them in forward."""

    def __init__(self, **parameters: nn.Parameter) -> None:
        self.scale = 1.0
        for name, parameter in parameters.items():
            setattr(self, name, parameter)

    def decay(self, step: Tensor) -> Tensor:
        """Return the decay of each head."""
        return self.scale * (-self.A_log_cp1.exp() * F.softplus(step + self.dt_bias_cp1)).exp()


class StateSpace(nn.Module):
    """The parameters and attributes of a state-space layer, with the object of its parameters."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.d_state = group, STATES
        self.d_inner_local_tp = VALUES // group.size()
        self.nheads_local_tp = VALUE_HEADS // group.size()
        self.ngroups_local_tp = KEY_HEADS // group.size()
        states = self.ngroups_local_tp * STATES
        inner, heads = self.d_inner_local_tp, self.nheads_local_tp
        self.sizes = [inner, inner, states, states, heads]
        self.in_proj = Part((sum(self.sizes) * group.size(), WIDTH), 0, group)
        self.conv1d_weight = _part(sum(self.sizes[1:4]), 1, 2)
        self.conv1d_bias = _part(sum(self.sizes[1:4]))
        self.dt_bias, self.A_log, self.D = _part(heads), _part(heads), _part(heads)
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.norm.weight.tensor_model_parallel = True
        self.out_proj = Part((WIDTH, VALUES), 1, group)
        self.cp = Views(dt_bias_cp1=self.dt_bias, A_log_cp1=self.A_log, D_cp1=self.D)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same."""
        z, *xbc, step = self.in_proj(gather_sequence(x, self.group)).split(self.sizes, -1)
        mixed = _mixed(torch.cat(xbc, -1), self.conv1d_weight, self.conv1d_bias)
        x, b, c = mixed.split(self.sizes[1:4], -1)
        scores = (b.cos() * c).unflatten(-1, (-1, STATES)).sum(-1).repeat_interleave(2, -1)
        factors = self.cp.decay(step) * scores + self.cp.D_cp1
        heads = x.unflatten(-1, (-1, SIZE)) * factors[..., None]
        # Heads are normed by themselves, with weights of their own.
        weights = self.norm.weight.unflatten(-1, (-1, SIZE))
        y = (F.rms_norm(heads, (SIZE,)) * weights).flatten(-2) * F.silu(z)
        return reduce_scatter_sequence(self.out_proj(y), self.group)


class MLP(nn.Module):
    """A gated MLP of a release whose parameters do not say so."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.config = group, SimpleNamespace(gated_linear_unit=True)
        self.linear_fc1 = Part((2 * SIZE, WIDTH), 0, group)
        self.linear_fc2 = Part((WIDTH, SIZE), 1, group)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same."""
        gate, up = self.linear_fc1(gather_sequence(x, self.group)).chunk(2, -1)
        return reduce_scatter_sequence(self.linear_fc2(F.silu(gate) * up), self.group)


class Net(nn.Module):
    """One layer of each kind; returns the loss of a batch."""

    def __init__(self, group: Any = ALONE) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(group) for kind in (GatedDelta, StateSpace, MLP))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over (tokens, width) of a function of the outputs."""
        for layer in self.layers:
            x = x + layer(x)
        return torch.tanh(x).square().sum()


def _oracle() -> Net:
    net, generator = Net(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return net


def _load(net: Net, whole: Net, group: Any) -> None:
    """Copy this rank's part of each tensor of the oracle."""
    delta, space, mlp = whole.layers
    sizes_of = {
        id(delta.in_proj.weight): delta.sizes,
        id(delta.conv1d.weight): delta.sizes[:3],
        id(delta.conv1d.bias): delta.sizes[:3],
        id(space.in_proj.weight): space.sizes,
        id(space.conv1d_weight): space.sizes[1:4],
        id(space.conv1d_bias): space.sizes[1:4],
        id(mlp.linear_fc1.weight): [SIZE, SIZE],
    }
    for (name, own), parameter in zip(net.named_parameters(), whole.parameters(), strict=True):
        value = parameter.detach()
        if getattr(own, "tensor_model_parallel", False):
            dim = 1 if name.endswith(("out_proj.weight", "linear_fc2.weight")) else 0
            tensors = value.split(sizes_of.get(id(parameter), value.shape[dim]), dim)
            value = torch.cat([t.chunk(group.size(), dim)[group.rank()] for t in tensors], dim)
        own.data.copy_(value)


def _trains(num_tp_ranks: int) -> None:
    mesh, _ = Degrees(tp=num_tp_ranks).meshes(dist.get_world_size())
    mesh = mesh["dp", "tp"]
    group, num_data_ranks = mesh.get_group("tp"), mesh["dp"].size()
    whole, net = _oracle(), Net(group)
    _load(net, whole, group)
    megatron.fully_shard_model(
        net,
        mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[GatedDelta, StateSpace, MLP],
        mixed_precision_policy=IN_FP64,
    )
    # Read by its old name, each parameter is what the layer has.
    assert net.layers[1].cp.dt_bias_cp1 is net.layers[1].dt_bias
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.05) for n in (whole, net)]
    for step in range(2):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        # The convolution begins anew in each half.
        losses = [whole(half) for half in batch.chunk(num_data_ranks)]
        (sum(losses) / num_data_ranks).backward()
        tokens = batch.chunk(num_data_ranks)[mesh.get_local_rank("dp")]
        net(tokens.chunk(group.size())[group.rank()]).backward()
        for (name, parameter), wanted in zip(
            net.named_parameters(), whole.parameters(), strict=True
        ):
            assert wanted.grad.count_nonzero()
            torch.testing.assert_close(
                parameter.grad.full_tensor(),
                wanted.grad,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text, name=name: f"{text}\n{name}",
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, wanted in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("num_ranks", "num_tp_ranks"), [(2, 2), (2, 1), (4, 2)])
def test_training_is_that_of_one_process(ranks: Ranks, num_ranks: int, num_tp_ranks: int) -> None:
    """Whole weights have the tensors in the order of one process, at each degree."""
    ranks(num_ranks).run(_trains, num_tp_ranks)


def _stored(*names: str) -> tuple[str, ...]:
    return tuple("{module}.{parameter}." + name for name in names)


def _fused(module: nn.Module, name: str) -> FusedParts | None:
    return annotation_of(module.get_parameter(name)).fused


def test_tensors_have_the_names_of_nvidias_checkpoints() -> None:
    """In linear attention and in a state-space layer, whose other parameters are one tensor."""
    net = Net()
    declare_fused(net, 1)
    delta, space, mlp = net.layers
    query_key_value = ("query", "key", "value")
    names = (*query_key_value, "z", "beta", "alpha")
    sizes = (KEYS, KEYS, VALUES, VALUES, VALUE_HEADS, VALUE_HEADS)
    assert _fused(delta, "in_proj.weight") == FusedParts(names, sizes, stored_as=_stored(*names))
    convolved = FusedParts(query_key_value, sizes[:3], stored_as=_stored(*query_key_value))
    assert _fused(delta, "conv1d.weight") == _fused(delta, "conv1d.bias") == convolved
    states = KEY_HEADS * STATES
    names, sizes = ("z", "x", "B", "C", "dt"), (VALUES, VALUES, states, states, VALUE_HEADS)
    assert _fused(space, "in_proj.weight") == FusedParts(names, sizes, stored_as=_stored(*names))
    convolved = FusedParts(names[1:4], sizes[1:4], stored_as=_stored(*names[1:4]))
    assert _fused(space, "conv1d_weight") == _fused(space, "conv1d_bias") == convolved
    gated = _fused(mlp, "linear_fc1.weight")
    assert gated is not None and gated.names == ("gate", "up")
    assert gated.stored_as == ("{module}.{parameter}_w", "{module}.{parameter}_v")
    others = {
        name: p.partition_dim
        for name, p in net.named_parameters()
        if hasattr(p, "partition_dim") and annotation_of(p).fused is None
    }
    assert others == {
        "layers.0.A_log": 0,
        "layers.0.dt_bias": 0,
        "layers.0.out_proj.weight": 1,
        "layers.1.A_log": 0,
        "layers.1.dt_bias": 0,
        "layers.1.D": 0,
        "layers.1.norm.weight": 0,
        "layers.1.out_proj.weight": 1,
        "layers.2.linear_fc2.weight": 1,
    }


def test_other_parameters_stay_as_they_are() -> None:
    """Such as those of a fused norm, of layers within, and of models without the marks."""
    layer = GatedDelta(ALONE)
    layer.in_proj.layer_norm_weight = nn.Parameter(torch.empty(WIDTH))
    layer.inner = nn.Module()
    layer.inner.weight = _part(WIDTH)
    declare_fused(layer, 1)
    for parameter in (layer.in_proj.layer_norm_weight, layer.inner.weight):
        assert annotation_of(parameter).fused is None and not hasattr(parameter, "partition_dim")
    layer = GatedDelta(ALONE)
    del layer.A_log.tensor_model_parallel
    declare_fused(layer, 1)
    assert not annotation_of(layer.out_norm.weight).sums_over_tp


def test_a_layer_may_name_its_tensors() -> None:
    """Variants of linear attention say their own."""
    layer = GatedDelta(ALONE)
    layer.in_proj_split_names = ["query", "key", "value", "g", "gate"]
    layer.in_proj_split_sections = (KEYS, KEYS, VALUES, 2 * VALUE_HEADS - 1, VALUES + 1)
    declare_fused(layer, 1)
    fused = _fused(layer, "in_proj.weight")
    assert fused is not None and fused.names == ("query", "key", "value", "g", "gate")
    assert fused.sizes == layer.in_proj_split_sections


def test_a_parameter_may_list_the_sizes_of_its_tensors() -> None:
    """By partition_sizes; what is annotated by hand comes first."""
    first, second = Part((6, 4), 0, ALONE), Part((6, 4), 0, ALONE)
    first.weight.partition_sizes = second.weight.partition_sizes = [2, 0, 4]
    by_hand = FusedParts(("a", "b"), (1, 5))
    annotate(second.weight, fused=by_hand)
    third = Part((4, 6), 1, ALONE, stride=2)
    declare_fused(nn.Sequential(first, second, third), 1)
    # A state-space layer with products of several factors has other tensors.
    layer = StateSpace(ALONE)
    layer.num_householder = 2
    layer.in_proj.weight.partition_sizes = layer.sizes
    declare_fused(layer, 1)
    listed = _fused(layer, "in_proj.weight")
    assert listed is not None and listed.names[0] == "part0" and listed.stored_as is None
    gated = _fused(third, "weight")
    assert gated is not None and (gated.dim, gated.sizes) == (1, (3, 3))
    assert _fused(first, "weight") == FusedParts(("part0", "part1"), (2, 4))
    assert _fused(second, "weight") == by_hand


def test_gated_experts_are_declared_by_their_layer() -> None:
    """Each of several in one module, but not a stack, nor blocks of gate and up in turn."""
    layer = MLP(ALONE)
    layer.linear_fc1 = nn.Module()
    stacks = (("weight", (2, 4, 8)), ("bias", (2, 4)))
    for name, shape in (("weight0", (4, 8)), ("bias0", (4,)), *stacks):
        layer.linear_fc1.register_parameter(name, nn.Parameter(torch.empty(shape)))
    layer.linear_fc1.layer_norm_weight = nn.Parameter(torch.empty(8))
    declare_fused(layer, 1)
    found = {n: p for n, p in layer.linear_fc1.named_parameters() if annotation_of(p).fused}
    assert list(found) == ["weight0", "bias0"]
    assert annotation_of(found["bias0"]).fused.sizes == (2, 2)

    layer = MLP(ALONE)
    layer.config.moe_mlp_glu_interleave_size = 1
    annotate(layer.linear_fc1.weight, experts=ExpertRange(0, 1, 1, name_component=-2))
    dense = MLP(ALONE)
    dense.config = layer.config
    declare_fused(nn.Sequential(layer, dense), 1)
    assert _fused(layer, "linear_fc1.weight") is None
    assert _fused(dense, "linear_fc1.weight") is not None


def _refuses() -> None:
    mesh, _ = Degrees(tp=2).meshes(2)
    keywords = {"device_mesh": mesh["dp", "tp"], "dp_shard_dim": "dp", "tp_dim": "tp"}
    net = nn.Sequential(GatedDelta(mesh.get_group("tp")))
    del net[0].qk_dim
    with pytest.raises(NotImplementedError, match=r"'0\.in_proj\.weight'"):
        megatron.fully_shard_model(net, **keywords)
    annotate(net[0].in_proj.weight, fused=FusedParts(("all",), (sum(net[0].sizes),)))
    with pytest.raises(NotImplementedError, match=r"'0\.conv1d\.weight'"):
        megatron.fully_shard_model(net, **keywords)
    channels = [sum(net[0].sizes[:3])]
    net[0].conv1d.weight.partition_sizes = net[0].conv1d.bias.partition_sizes = channels
    megatron.fully_shard_model(net, **keywords)


def test_unknown_tensors_of_a_cut_layer_are_refused(ranks: Ranks) -> None:
    """Their rows would be in the order of this degree; where nothing is cut, nothing is asked."""
    ranks(2).run(_refuses)
    layer = GatedDelta(ALONE)
    del layer.qk_dim
    declare_fused(layer, 1)
    assert _fused(layer, "in_proj.weight") is None


def _keeps_dtensors() -> None:
    mesh, _ = Degrees(tp=2).meshes(2)
    net = MLP(ALONE)
    whole = distribute_tensor(torch.ones(4, WIDTH), mesh["tp"], [Shard(0)])
    net.linear_fc1.weight = nn.Parameter(whole)
    declare_fused(net, 2)
    assert _fused(net, "linear_fc1.weight") is None


def test_dtensors_say_themselves_what_they_fuse(ranks: Ranks) -> None:
    """A layer of torch's tensor parallelism may have the names of a gated MLP."""
    ranks(2).run(_keeps_dtensors)


def test_an_object_with_parameters_reads_them_from_its_layer() -> None:
    """Also in a copy of the layer; its other attributes stay its own."""
    layer = StateSpace(ALONE)
    declare_fused(layer, 1)
    for one in (layer, copy.deepcopy(layer)):
        assert isinstance(one.cp, Views)
        assert one.cp.D_cp1 is one.D and one.cp.scale == 1.0
        with pytest.raises(AttributeError, match=r"Views.*'other'"):
            _ = one.cp.other
    assert layer.cp.D_cp1 is not one.cp.D_cp1
