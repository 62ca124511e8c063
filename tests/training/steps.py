"""What tests of single steps share: a tiny model, sharded and not, and seeded global batches."""

from __future__ import annotations

import torch
from torch import nn

from megafsdp import MixedPrecisionPolicy, fully_shard_model
from megafsdp.data import Batch
from megafsdp.models import LanguageModel, ModelConfig, build_model, unit_classes
from tests.training.runs import MODEL

NUM_MICROBATCHES, ROWS, LENGTH = 2, 3, 16
_FP32 = MixedPrecisionPolicy()


def rows_of(step: int, num_ranks: int) -> torch.Tensor:
    """Return the tokens of a global batch, as (microbatches, ranks, rows, length + 1)."""
    generator = torch.Generator().manual_seed(step)
    shape = (NUM_MICROBATCHES, num_ranks, ROWS, LENGTH + 1)
    return torch.randint(0, 64, shape, generator=generator)


def batches_of(step: int, rank: int, num_ranks: int) -> list[Batch]:
    """Return a rank's microbatches of a global batch."""
    rows = rows_of(step, num_ranks)[:, rank]
    ids = torch.arange(NUM_MICROBATCHES * num_ranks * ROWS).view(-1, num_ranks, ROWS)[:, rank]
    return [
        Batch(r[:, :-1], r[:, 1:], torch.ones(ROWS, LENGTH), i)
        for r, i in zip(rows, ids, strict=True)
    ]


def tiny_model() -> LanguageModel:
    """Build the model, with the same weights every time."""
    return build_model(ModelConfig(**MODEL), seed=5)


def sharded_model(
    *,
    strategy: str = "optim_grads_params",
    mp_policy: MixedPrecisionPolicy = _FP32,
) -> nn.Module:
    """Build and shard the model; collective."""
    units = unit_classes(ModelConfig(**MODEL))
    return fully_shard_model(tiny_model(), units, strategy=strategy, mp_policy=mp_policy)
