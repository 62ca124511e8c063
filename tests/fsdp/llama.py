"""A small Llama-like model with tied embeddings, and torch's plan to parallelise it.

The plan is the usual one: column- then row-parallel matrices, a vocabulary-parallel embedding and
head, and norms over each rank's part of the sequence. Activations between blocks are DTensors.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

VOCABULARY, WIDTH, HEAD_DIM, LENGTH = 32, 16, 4, 8


class Attention(nn.Module):
    """Causal attention over as many heads as its weights have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend; (batch, length, width) to the same."""
        heads = [p(x).unflatten(2, (-1, HEAD_DIM)) for p in (self.query, self.key, self.value)]
        q, k, v = (h.transpose(1, 2) for h in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it; the shape stays."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed = Attention(width), Feed(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it; the shape stays."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and a tied head; returns the mean loss of next tokens."""

    def __init__(self, num_blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Cut a model over a tensor-parallel mesh, as torch's users do."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    # torch cuts each module's own parameters, which unties them.
    model.head.weight = model.embedding.weight
    for block in model.blocks:
        cut = ColwiseParallel
        gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(
            block,
            mesh,
            {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attention": gather,
                "attention.query": cut(),
                "attention.key": cut(),
                "attention.value": cut(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "feed": gather,
                "feed.gate": cut(),
                "feed.up": cut(),
                "feed.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def batches(num: int, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return global batches of (tokens, labels)."""
    generator = torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(0, VOCABULARY, (num_rows, LENGTH + 1), generator=generator)
        for _ in range(num)
    ]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]
