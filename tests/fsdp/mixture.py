"""A small mixture of experts in stacks, cut over any meshes by hand, and its oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafsdp import fully_shard_model
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.mesh.parallel_dims import Meshes

NUM_EXPERTS, WIDTH, INNER, NUM_TOKENS = 4, 6, 5, 5
GATE_AND_UP = FusedParts(
    ("gate", "up"),
    (INNER, INNER),
    dim=1,
    stored_as=("{module}.{parameter}_w", "{module}.{parameter}_v"),
)


class Experts(nn.Module):
    """Stacks of gated maps, each applied to all tokens and weighted; a rank has some of them."""

    computes_on_part = True

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * INNER, WIDTH))
        self.fc2 = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, INNER))
        self.ep: DeviceMesh | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both stacks."""
        for stack in (self.fc1, self.fc2):
            nn.init.normal_(stack, std=0.5)

    def cut(self, ep: DeviceMesh | None) -> None:
        """Keep the experts of this rank of ``ep``, and declare that they are some."""
        self.ep = ep
        if ep is not None:
            for name, stack in list(self.named_parameters()):
                setattr(self, name, nn.Parameter(distribute_tensor(stack.detach(), ep, [Shard(0)])))
        annotate(self.fc1, is_expert=True, fused=GATE_AND_UP)
        annotate(self.fc2, is_expert=True)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Mix the experts' outputs for this rank's tokens (tokens, width)."""
        assert type(self.fc1) is nn.Parameter, "the plain part"
        if self.ep is None:
            return self._mix(x, gates)
        # Tokens go to all ranks, each computes with its experts, and the sums come back.
        x, gates = (show_to_all(t, self.ep) for t in (x, gates))
        y = self._mix(x, gates.chunk(self.ep.size(), 1)[self.ep.get_local_rank()])
        summed = DTensor.from_local(y, self.ep, [Partial()], run_check=False)
        return summed.redistribute(placements=[Shard(0)]).to_local()

    def _mix(self, x: Tensor, gates: Tensor) -> Tensor:
        gate, up = torch.einsum("enk,tk->etn", self.fc1, x).chunk(2, 2)
        return torch.einsum("te,etn,ekn->tk", gates, F.silu(gate) * up, self.fc2)


def show_to_all(x: Tensor, ep: DeviceMesh) -> Tensor:
    """Return the tokens of all ranks of ``ep``; gradients come back as sums over them."""
    shown = DTensor.from_local(x, ep, [Shard(0)], run_check=False)
    return shown.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Mixture(nn.Module):
    """A dense layer, a router that chooses two experts and never the first, and experts."""

    expert_bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.register_buffer("expert_bias", torch.tensor([-9.0, 0.01, 0.0, -0.01]))

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the mixture."""
        h = torch.tanh(self.dense(x))
        scores = self.router(h).softmax(1)
        chosen = (scores + self.expert_bias).topk(2, 1).indices
        return x + self.experts(h, scores * torch.zeros_like(scores).scatter(1, chosen, 1.0))


class Net(nn.Module):
    """Two mixtures under a dense root; returns the mean square."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over tokens."""
        x = self.first(x)
        for mixture in self.mixtures:
            x = checkpoint(mixture, x, use_reentrant=False) if self.recomputes else mixture(x)
        return x.square().sum(1).mean()


def cut(net: Net, meshes: Meshes) -> Net:
    """Share the experts out, and declare what the ranks of tp compute together."""
    for mixture in net.mixtures:
        mixture.experts.cut(meshes.ep)
    if meshes.tp is not None:
        # Every rank of tp has tokens of its own, as under sequence parallelism.
        for name, parameter in net.named_parameters():
            if "experts" not in name:
                annotate(parameter, sums_over_tp=True)
    return net


def shard(net: Net, meshes: Meshes, **options: object) -> Net:
    """Cut the net, and make each mixture and the root a unit."""
    cut(net, meshes)
    fully_shard_model(net, [Mixture], mesh=meshes.data, expert_mesh=meshes.experts, **options)
    return net


def pair(meshes: Meshes, dtype: torch.dtype = torch.float64, **options: object) -> tuple[Net, Net]:
    """Return the oracle, which every rank runs on all tokens, and the sharded net."""
    reference = Net().to(dtype)
    return reference, shard(copy.deepcopy(reference), meshes, **options)


def backwards(
    reference: nn.Module, net: nn.Module, meshes: Meshes, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the backward of both, on all tokens and on this rank's, a step at a time.

    Yields:
        The losses of both, the sharded net's as a mean over all ranks.
    """
    dtype = next(reference.parameters()).dtype
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    shape = (num_steps, world, NUM_TOKENS, WIDTH)
    for batch in torch.randn(shape, dtype=dtype, generator=generator):
        expected = reference(batch.flatten(0, 1))
        expected.backward()
        # Each data rank's loss is a mean over the tokens of its tp ranks.
        loss = net(batch[dist.get_rank()]) * meshes.data_size / world
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        yield expected.detach(), total / meshes.data_size
