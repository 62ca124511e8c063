"""What tests of single steps share: a tiny model, seeded global batches, and configured steps."""

from __future__ import annotations

import torch
from torch import nn

from megafsdp import MixedPrecisionPolicy, fully_shard_model
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.data import Batch
from megafsdp.models import LanguageModel, ModelConfig, build_model, unit_classes
from megafsdp.parallel import parallelize
from megafsdp.training import Config
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.optimizers import build_optimizer
from megafsdp.training.step.train_step import TrainStep
from tests.training.runs import MODEL, SEQUENCE_LENGTH

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


def train_configured(
    config: Config,
) -> tuple[nn.Module, torch.optim.Optimizer, CollectiveRecord]:
    """Take two steps as the loop does; collective.

    Returns:
        The model, whose ledger has the second step's peaks, its optimizer, and what that step sent.
    """
    parallel, model_config = config.parallel, config.model.resolve()
    meshes = parallel.dims().build("cpu")
    model = fully_shard_model(
        parallelize(build_model(model_config, seed=0), meshes),
        unit_classes(model_config),
        mesh=meshes.data,
        expert_mesh=meshes.experts,
        strategy=parallel.strategy,
        outer_strategy=parallel.outer_strategy,
        prefetch=parallel.prefetch,
        reshard_after_forward=parallel.reshard_after_forward,
        nccl_user_buffers=parallel.nccl_user_buffers,
        mp_policy=config.precision.policy(),
    )
    device = torch.device("cpu")
    optimizer = build_optimizer(model, config.optimizer, config.muon)
    step = TrainStep(
        model,
        optimizer,
        device=device,
        clip_norm=config.optimizer.clip_norm,
        skips_nonfinite=False,
        max_skips=0,
        stop=StopRequest(device),
    )
    ledger = model._fsdp_unit().ledger
    micro_size = config.micro_batch_size(meshes.data_size)
    share = config.train.global_batch_size // meshes.data_size
    tokens = torch.arange(micro_size * SEQUENCE_LENGTH).view(micro_size, -1) % 64
    ids = torch.arange(micro_size)
    batch = Batch(tokens, tokens, torch.ones(tokens.shape), ids)
    for _ in range(2):
        ledger.reset_peak()
        with record_collectives() as record:
            step([batch] * (share // micro_size))
    return model, optimizer, record
