"""A small network with tied, 1-D and odd-row parameters, its oracle, and how tests use both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from megafsdp import clip_grad_norm_, full_tensor, fully_shard
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.buffer.dtensor.uneven_layout import whole as region_of

VOCABULARY = 37
WIDTH = 12


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 5 * width)
        self.down = nn.Linear(5 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the MLP of its norm."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding; returns the loss or the logits."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, or with labels the mean cross entropy."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def shard(net: Net, **options: object) -> Net:
    """Make each block and then the net a unit."""
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def options_of_strategies() -> Iterator[dict[str, object]]:
    """Yield the options of fully_shard for each strategy; on 4 ranks those of a 2 x 2 mesh."""
    num_ranks = dist.get_world_size()
    shapes = [(2, 2)] if num_ranks == 4 else [(num_ranks, 1), (1, num_ranks)]
    if num_ranks != 4:
        strategies = ("optim_grads_params", "optim_grads", "optim", "no_shard")
        yield from ({"strategy": strategy} for strategy in strategies)
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        # A single replica is what the strategies above have.
        for outer in ("no_shard", "optim") if shape[0] > 1 else ("optim",):
            yield {"mesh": mesh, "outer_strategy": outer}


def pair(num_blocks: int = 3, **options: object) -> tuple[Net, Net]:
    """Return an unsharded net and the same net sharded over all ranks."""
    reference = Net(num_blocks)
    return reference, shard(copy.deepcopy(reference), **options)


def batches(num: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return global batches of (tokens, labels), 2 rows a rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2 * dist.get_world_size(), 6)
    return [
        (
            torch.randint(0, VOCABULARY, shape, generator=generator),
            torch.randint(0, VOCABULARY, shape, generator=generator),
        )
        for _ in range(num)
    ]


def mine(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of a global batch."""
    rank = dist.get_rank()
    tokens, labels = batch
    return tokens[2 * rank : 2 * rank + 2], labels[2 * rank : 2 * rank + 2]


def full_tensors(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return whole tensors, None for None; collective over all ranks of the job.

    Of uneven DTensors every rank sends its rows at once, and they are put together by the regions
    that its layout says. That is an oracle for ``full_tensor()``, and much faster for many.
    """
    uneven = {name: t for name, t in tensors.items() if isinstance(t, UnevenDTensor)}
    # As arrays of numpy, of which a view is pickled without the flat buffer, and faster.
    own = {
        name: (t.uneven_layout.regions(), t.local.detach().cpu().view(-1).view(torch.uint8).numpy())
        for name, t in uneven.items()
    }
    by_rank: list[dict[str, tuple[list[Region], np.ndarray]]] = [own] * dist.get_world_size()
    # Alone there is nobody to ask, and tests count what one rank issues.
    if len(by_rank) > 1:
        dist.all_gather_object(by_rank, own)
    found = {n: t if t is None or n in uneven else full_tensor(t) for n, t in tensors.items()}
    for name, tensor in uneven.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        is_written = torch.zeros(tensor.shape, dtype=torch.bool)
        origin = region_of(tuple(tensor.shape))
        # The own rows last: each rank compares its own copy of what several have.
        for of_rank in (*by_rank, own):
            regions, rows = of_rank[name]
            elements = torch.empty(sum(region.numel for region in regions), dtype=tensor.dtype)
            elements.view(torch.uint8).numpy()[:] = rows
            pieces = elements.split([region.numel for region in regions])
            for region, piece in zip(regions, pieces, strict=True):
                place = region.slices_in(origin)
                whole[place] = piece.view(region.sizes)
                is_written[place] = True
        assert is_written.all(), f"{name}: no rank has some of its elements"
        found[name] = whole.to(tensor.device)
    return found


def full_grads(net: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return every parameter's full gradient; collective."""
    return full_tensors({name: p.grad for name, p in net.named_parameters()})


def assert_same_grads(
    sharded: nn.Module, reference: nn.Module, rtol: float = 1e-4, atol: float = 1e-6
) -> dict[str, torch.Tensor | None]:
    """Assert that gradients are equal, None exactly where the reference has None.

    Returns:
        The full gradients of the sharded side.
    """
    expected = dict(reference.named_parameters())
    found = full_grads(sharded)
    for name, grad in found.items():
        wanted = expected[name].grad
        assert (grad is None) == (wanted is None), f"{name}: {grad} and {wanted}"
        if grad is not None and wanted is not None:
            torch.testing.assert_close(
                grad.to(wanted.device),
                wanted,
                rtol=rtol,
                atol=atol,
                msg=lambda m, n=name: f"{m}\n{n}",
            )
    return found


def assert_same_parameters(
    sharded: nn.Module, reference: nn.Module, rtol: float, atol: float
) -> None:
    """Assert that full parameters are equal."""
    expected = dict(reference.named_parameters())
    for name, full in full_tensors(dict(sharded.named_parameters())).items():
        torch.testing.assert_close(
            full,
            expected[name].detach(),
            rtol=rtol,
            atol=atol,
            msg=lambda m, n=name: f"{m}\n{n}",
        )


def adamw(net: nn.Module, **options: object) -> torch.optim.AdamW:
    """Return AdamW with an epsilon that does not turn rounding noise into steps."""
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-5, **options)


def fused_adamw(net: nn.Module) -> torch.optim.AdamW:
    """Return the same in torch's fused form, which costs a step the least."""
    return adamw(net, fused=True)


def with_grads(net: nn.Module) -> nn.Module:
    """Return a copy of a net with copies of its gradients."""
    copied = copy.deepcopy(net)
    for own, parameter in zip(copied.parameters(), net.parameters(), strict=True):
        own.grad = None if parameter.grad is None else parameter.grad.clone()
    return copied


def train_both(
    reference: nn.Module,
    sharded: nn.Module,
    *,
    num_steps: int,
    num_microbatches: int = 1,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = fused_adamw,
) -> list[tuple[float, float]]:
    """Train both on the same global batches; return their losses, the sharded one's averaged."""
    optimizers = [make_optimizer(reference), make_optimizer(sharded)]
    losses = []
    for step in range(num_steps):
        for batch in batches(num_microbatches, seed=step):
            expected = reference(*batch) / num_microbatches
            expected.backward()
            loss = sharded(*mine(batch)) / num_microbatches
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            losses.append((mean.item(), expected.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train_bit_for_bit(reference: nn.Module, net: nn.Module, *shape: int) -> torch.Tensor:
    """Train both for three steps, and assert that gradients have the same bits; collective.

    The reference runs the ranks' batches one by one: scales of a batch are its own. Two ranks'
    gradients are halved and added, which rounds alike on both sides.

    Returns:
        The last batch: of all ranks, each of this shape.
    """
    optimizers = [adamw(reference), adamw(net)]
    for _ in range(3):
        batch = torch.randn(dist.get_world_size(), *shape)
        for part in batch:
            (reference(part).square().mean() / len(batch)).backward()
        net(batch[dist.get_rank()]).square().mean().backward()
        assert_same_grads(net, reference, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return batch


def train_on_shares(reference: nn.Module, net: nn.Module, num_shares: int, own: int) -> None:
    """Train both for three steps in fp64: one on all tokens, the other on one share of them.

    Compares gradients, norms and steps. Both return the mean over tokens of width 6.
    """
    optimizers = [adamw(reference), adamw(net)]
    generator = torch.Generator().manual_seed(1)
    near = {"rtol": 1e-9, "atol": 1e-12}
    for _ in range(3):
        shares = torch.randn(num_shares, 5, 6, dtype=torch.float64, generator=generator)
        reference(shares.flatten(0, 1)).backward()
        net(shares[own]).backward()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and p.shape == q.shape
            torch.testing.assert_close(full_tensor(p.grad), q.grad, **near)
        norm = nn.utils.get_total_norm([q.grad for q in reference.parameters()])
        found = clip_grad_norm_(net, max_norm=float("inf"))
        # Ours is in fp32.
        torch.testing.assert_close(found.double(), norm, rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(p.detach()), q.detach(), **near)
