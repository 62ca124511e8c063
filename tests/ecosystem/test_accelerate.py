"""accelerate around models that megafsdp has sharded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from megafsdp import checkpoint, full_state_dict, full_tensor, fully_shard_model
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import ROWS_PER_RANK, adamw, build, global_batch, own_rows
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="ecosystem: accelerate is not installed")
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

MAX_NORM = 0.5
NUM_MICROBATCHES = 2
NUM_STEPS = 3


@contextlib.contextmanager
def accelerator(*, with_plugin: bool = False) -> Iterator[Accelerator]:
    """Return an accelerator of these ranks, with its FSDP2 plugin or without."""
    with launcher_environment():
        made = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICROBATCHES)
        if with_plugin:
            # accelerate ignores its plugin on CPUs, so they get it by hand.
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
            made.state.fsdp_plugin = plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            made.state.distributed_type = DistributedType.FSDP
            assert made.is_fsdp2
        try:
            yield made
        finally:
            # One state for all accelerators of a process.
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def register(accelerated: Accelerator, model: PreTrainedModel) -> None:
    """Add a model to those that accelerate saves, without a wrapper: the line of set-up."""
    model._is_accelerate_prepared = True
    assert accelerated.prepare_model(model) is model


def _train(directory: Path, with_plugin: bool) -> None:
    reference = build("qwen3")
    model = fully_shard_model(copy.deepcopy(reference))
    batches = [global_batch(number) for number in range(NUM_STEPS * NUM_MICROBATCHES)]
    rows = [
        {n: t[i] for n, t in batch.items()}
        for batch in batches
        for i in range(len(batch["labels"]))
    ]
    with accelerator(with_plugin=with_plugin) as accelerated:
        if with_plugin:
            register(accelerated, model)
        loader = accelerated.prepare(DataLoader(rows, batch_size=ROWS_PER_RANK))
        optimizer = accelerated.prepare_optimizer(adamw(model))
        expected_optimizer = adamw(reference)
        for batch, own in zip(batches, loader, strict=True):
            with accelerated.accumulate(model):
                loss = model(**own).loss
                accelerated.backward(loss)
                expected = reference(**batch).loss
                (expected / NUM_MICROBATCHES).backward()
                losses = accelerated.gather(loss.detach())
                torch.testing.assert_close(losses.mean(), expected.detach(), rtol=1e-5, atol=0)
                if accelerated.sync_gradients:
                    norm = full_tensor(accelerated.clip_grad_norm_(model.parameters(), MAX_NORM))
                    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
                    assert wanted > MAX_NORM
                    torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
                    assert_same_grads(model, reference)
                    expected_optimizer.step()
                    expected_optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
        assert accelerated.unwrap_model(model) is model
        if with_plugin:
            _save_and_load(
                model,
                optimizer,
                save=lambda: accelerated.save_state(directory),
                load=lambda: accelerated.load_state(directory),
            )
            whole = accelerated.get_state_dict(model)
            wanted = full_state_dict(model)
            assert dist.get_rank() > 0 or all(
                torch.equal(whole[key], wanted[key]) for key in wanted
            )
        else:
            register(accelerated, model)
            with pytest.raises(RuntimeError, match="invalid python storage"):
                accelerated.save_state(directory / "refused")
            _save_and_load(
                model,
                optimizer,
                save=lambda: checkpoint.save(directory, step=1, model=model, optimizer=optimizer),
                load=lambda: checkpoint.load(directory, model=model, optimizer=optimizer),
            )


def _save_and_load(
    model: PreTrainedModel,
    optimizer: AcceleratedOptimizer,
    *,
    save: Callable[[], object],
    load: Callable[[], object],
) -> None:
    """Save, change all there is, load, and find what was saved."""
    saved = copies(model, optimizer)
    save()
    model(**own_rows(global_batch(0))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    changed = copies(model, optimizer)
    assert not any(torch.equal(changed[name], tensor) for name, tensor in saved.items())
    load()
    loaded = copies(model, optimizer)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def copies(model: PreTrainedModel, optimizer: AcceleratedOptimizer) -> dict[str, torch.Tensor]:
    """Return full copies of parameters and their moments; collective."""
    found = full_state_dict(model)
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = full_tensor(optimizer.state[parameter][key]).clone()
    return found


@pytest.mark.parametrize("with_plugin", [False, True])
def test_a_model_trains_as_one_process(ranks: Ranks, with_plugin: bool, tmp_path: Path) -> None:
    """Two microbatches a step, clipped; the loader divides batches, the optimizer is wrapped."""
    ranks(2).run(_train, tmp_path, with_plugin)


def _refused() -> None:
    model = fully_shard_model(build("qwen3"))
    with accelerator() as accelerated, pytest.raises(ValueError, match="DistributedDataParallel"):
        accelerated.prepare(model)
    with accelerator(with_plugin=True) as accelerated, pytest.raises(KeyError, match="optimizer"):
        accelerated.prepare(model, adamw(model))


def test_preparing_the_model_is_refused(ranks: Ranks) -> None:
    """By DDP without the plugin; by accelerate, which looks for memory that torch gave, with it."""
    ranks(2).run(_refused)
