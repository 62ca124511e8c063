"""A small model of layers like Megatron-core's: plain parts of weights, with its attributes.

Tokens are cut over tp as under sequence parallelism. With groups of one rank it is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from megafsdp.parallel.mappings import gather_sequence, reduce_scatter_sequence

VOCABULARY, WIDTH, HEADS, INNER, NUM_EXPERTS = 16, 8, 4, 8, 4


class Alone:
    """Stands for a process group of one rank."""

    def size(self) -> int:
        """Return the number of ranks."""
        return 1

    def rank(self) -> int:
        """Return the number of this rank."""
        return 0


ALONE = Alone()


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that share out a model.

    Attributes:
        tp: Those that cut weights, and the tokens.
        ep: Those that have other experts.
        etp: Those that cut the weights of an expert.
    """

    tp: Any = ALONE
    ep: Any = ALONE
    etp: Any = ALONE


class Part(nn.Module):
    """One weight, of which this rank has a part.

    Args:
        shape: Shape of the whole weight.
        dim: The dimension that is cut.
        group: The ranks that have the parts.
        stride: How many tensors of equal size lie along ``dim``, each cut by itself.
    """

    def __init__(self, shape: tuple[int, ...], dim: int, group: Any, stride: int = 1) -> None:
        super().__init__()
        local = [size // (group.size() if i == dim else 1) for i, size in enumerate(shape)]
        self.weight = nn.Parameter(torch.empty(local))
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = dim
        self.weight.partition_stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with this rank's part."""
        return F.linear(x, self.weight)

    def get_extra_state(self) -> None:
        """Return nothing, as Megatron-core's layers do."""

    def set_extra_state(self, state: object) -> None:
        """Accept nothing."""
        assert state is None


class Norm(nn.RMSNorm):
    """A norm of this rank's tokens."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, eps=1e-5)
        self.weight.sequence_parallel = True


class Heads(nn.Module):
    """A map whose heads are shared out; each is normed by weights that all of them have."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.linear_qkv = Part((HEADS * WIDTH, WIDTH), 0, group)
        # Without an attribute: Megatron-core knows such norms by their name.
        self.q_layernorm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.linear_proj = Part((WIDTH, HEADS * WIDTH), 1, group)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same."""
        heads = self.linear_qkv(gather_sequence(x, self.group)).unflatten(-1, (-1, WIDTH))
        y = self.linear_proj(torch.tanh(self.q_layernorm(heads)).flatten(-2))
        return reduce_scatter_sequence(y, self.group)


class GatedMLP(nn.Module):
    """[gate; up] and down, of which this rank has columns and rows; sums nothing over ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.linear_fc1 = Part((2 * INNER, WIDTH), 0, group, stride=2)
        self.linear_fc2 = Part((WIDTH, INNER), 1, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's addend."""
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


class SequentialExperts(nn.Module):
    """This rank's experts one after another, numbered from 0."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.ep_group = groups.ep
        self.num_local_experts = NUM_EXPERTS // groups.ep.size()
        self.local_experts = nn.ModuleList(
            GatedMLP(groups.etp) for _ in range(self.num_local_experts)
        )

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return this rank's addend for tokens with the weights of its experts."""
        return sum(e(x) * gates[:, i : i + 1] for i, e in enumerate(self.local_experts))


class GroupedLinear(nn.Module):
    """One weight for each of this rank's experts, ``weight0`` and so on."""

    def __init__(self, shape: tuple[int, ...], dim: int, groups: Groups, stride: int = 1) -> None:
        super().__init__()
        for i in range(NUM_EXPERTS // groups.ep.size()):
            self.register_parameter(f"weight{i}", Part(shape, dim, groups.etp, stride).weight)

    get_extra_state = Part.get_extra_state
    set_extra_state = Part.set_extra_state


class GroupedExperts(nn.Module):
    """The same experts, with a module for each of the two maps of all of them."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.ep_group = groups.ep
        self.num_local_experts = NUM_EXPERTS // groups.ep.size()
        self.linear_fc1 = GroupedLinear((2 * INNER, WIDTH), 0, groups, stride=2)
        self.linear_fc2 = GroupedLinear((WIDTH, INNER), 1, groups)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return this rank's addend for tokens with the weights of its experts."""
        y = torch.zeros_like(x)
        for i in range(self.num_local_experts):
            gate, up = F.linear(x, getattr(self.linear_fc1, f"weight{i}")).chunk(2, -1)
            down = F.linear(F.silu(gate) * up, getattr(self.linear_fc2, f"weight{i}"))
            y = y + down * gates[:, i : i + 1]
        return y


class Mixture(nn.Module):
    """A router and experts, which see the tokens of all ranks that share them out."""

    def __init__(self, groups: Groups, *, is_grouped: bool) -> None:
        super().__init__()
        self.groups, self.ep_group = groups, groups.ep
        self.num_local_experts = NUM_EXPERTS // groups.ep.size()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.router.weight.sequence_parallel = True
        self.experts = (GroupedExperts if is_grouped else SequentialExperts)(groups)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same."""
        ep, etp = self.groups.ep, self.groups.etp
        first = ep.rank() * self.num_local_experts
        gates = self.router(x).softmax(-1)
        x, gates = (gather_sequence(gather_sequence(t, ep), etp) for t in (x, gates))
        y = self.experts(x, gates[:, first : first + self.num_local_experts])
        return reduce_scatter_sequence(reduce_scatter_sequence(y, etp), ep)


class Layer(nn.Module):
    """Heads, an MLP and a mixture of experts, each after a norm."""

    def __init__(self, groups: Groups, *, is_grouped: bool) -> None:
        super().__init__()
        self.group = groups.tp
        self.norms = nn.ModuleList(Norm() for _ in range(3))
        self.heads = Heads(groups.tp)
        self.mlp = GatedMLP(groups.tp)
        self.mixture = Mixture(groups, is_grouped=is_grouped)

    def forward(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same."""
        x = x + self.heads(self.norms[0](x))
        y = self.mlp(gather_sequence(self.norms[1](x), self.group))
        x = x + reduce_scatter_sequence(y, self.group)
        return x + self.mixture(self.norms[2](x))


class CoreNet(nn.Module):
    """An embedding, layers, and a head tied to the embedding; returns the loss of a batch."""

    def __init__(self, groups: Groups | None = None, *, is_grouped: bool = False) -> None:
        super().__init__()
        groups = groups or Groups()
        self.group = groups.tp
        self.embedding = Part((VOCABULARY, WIDTH), 0, groups.tp)
        self.layers = nn.ModuleList(Layer(groups, is_grouped=is_grouped) for _ in range(2))
        self.norm = Norm()
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean over (tokens,) of a function of the logits."""
        size = VOCABULARY // self.group.size()
        own = F.one_hot(tokens, VOCABULARY).split(size, -1)[self.group.rank()]
        weight = self.embedding.weight
        x = reduce_scatter_sequence(own.to(weight.dtype) @ weight, self.group)
        for layer in self.layers:
            x = layer(x)
        logits = self.embedding(gather_sequence(self.norm(x), self.group))
        # Each rank has the addend of its columns.
        return torch.tanh(logits).square().sum(-1).mean()

    def named_by_layer(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names that they have in the oracle."""
        found = {}
        for name, parameter in self.named_parameters():
            components = name.split(".")
            if "experts" in components:
                mixture = self.get_submodule(".".join(components[:3]))
                first = mixture.ep_group.rank() * mixture.num_local_experts
                at = components.index("local_experts") + 1 if "local_experts" in name else -1
                stem = components[at].rstrip("0123456789")
                components[at] = f"{stem}{int(components[at][len(stem) :]) + first}"
            found[".".join(components)] = parameter
        return found

    def load(self, whole: CoreNet, groups: Groups) -> CoreNet:
        """Copy this rank's parts of the oracle's weights, and return the net."""
        wholes = dict(whole.named_parameters())
        for name, parameter in self.named_by_layer().items():
            value = wholes[name].detach()
            if getattr(parameter, "tensor_model_parallel", False):
                group = groups.etp if ".experts." in name else groups.tp
                dim, stride = parameter.partition_dim, parameter.partition_stride
                tensors = [
                    t.chunk(group.size(), dim)[group.rank()] for t in value.chunk(stride, dim)
                ]
                value = torch.cat(tensors, dim)
            parameter.data.copy_(value)
        return self


def oracle(*, is_grouped: bool = False) -> CoreNet:
    """Return the whole net, with the same values on all ranks."""
    net = CoreNet(is_grouped=is_grouped)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return net


@dataclass(frozen=True)
class Degrees:
    """How many ranks share out what.

    Attributes:
        tp: Weights and tokens.
        ep: Experts.
        etp: The weights of an expert.
        outer: Replicas of the data-parallel shards.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 1
    outer: int = 1

    def meshes(self, num_ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh of all weights and that of experts, as Megatron-core numbers ranks."""
        inner = num_ranks // self.outer
        shape = (self.outer, inner // self.tp, self.tp)
        of_experts = (self.outer, inner // (self.ep * self.etp), self.ep, self.etp)
        return (
            init_device_mesh("cpu", shape, mesh_dim_names=("outer", "dp", "tp")),
            init_device_mesh("cpu", of_experts, mesh_dim_names=("outer", "dp", "ep", "tp")),
        )


def groups_of(mesh: DeviceMesh, of_experts: DeviceMesh) -> Groups:
    """Return the groups of two meshes."""
    return Groups(mesh.get_group("tp"), of_experts.get_group("ep"), of_experts.get_group("tp"))
