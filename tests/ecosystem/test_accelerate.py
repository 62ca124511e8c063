"""accelerate around models that megafsdp has sharded."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from megafsdp import checkpoint, full_state_dict, full_tensor, fully_shard_model
from megafsdp.fsdp.runtime.unit import units_below
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import ROWS_PER_RANK, adamw, build, global_batch, own_rows
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

pytest.importorskip("accelerate", reason="ecosystem: accelerate is not installed")
from accelerate import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    ParallelismConfig,
    TorchDynamoPlugin,
)

from megafsdp.integrations.accelerate import ShardedAccelerator

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

MAX_NORM = 0.5
NUM_MICROBATCHES = 2
NUM_STEPS = 3


def plugin_of(**options: Any) -> FullyShardedDataParallelPlugin:
    """Return accelerate's FSDP2 plugin, with the classes that the model names."""
    given = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **options}
    return FullyShardedDataParallelPlugin(**given)


@contextlib.contextmanager
def accelerator(kind: str = "alone") -> Iterator[Accelerator]:
    """Return an accelerator of these ranks: alone, with its FSDP2 plugin, or ours."""
    with launcher_environment():
        if kind == "ours":
            yield ShardedAccelerator(
                cpu=True,
                gradient_accumulation_steps=NUM_MICROBATCHES,
                fsdp_plugin=plugin_of(reshard_after_forward=True),
            )
            return
        made = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICROBATCHES)
        if kind == "plugin":
            # accelerate ignores its plugin on CPUs, so they get it by hand.
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
            made.state.fsdp_plugin = plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            made.state.distributed_type = DistributedType.FSDP
            assert made.is_fsdp2
        yield made


def register(accelerated: Accelerator, model: PreTrainedModel) -> None:
    """Add a model to those that accelerate saves, without a wrapper: the line of set-up."""
    model._is_accelerate_prepared = True
    assert accelerated.prepare_model(model) is model


def _clip(accelerated: Accelerator, model: torch.nn.Module, reference: torch.nn.Module) -> None:
    norm = full_tensor(accelerated.clip_grad_norm_(model.parameters(), MAX_NORM))
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    assert wanted > MAX_NORM
    torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
    assert_same_grads(model, reference)


def _train(directory: Path, kind: str) -> None:
    reference = build("qwen3")
    model = copy.deepcopy(reference)
    if kind != "ours":
        fully_shard_model(model)
    batches = [global_batch(number) for number in range(NUM_STEPS * NUM_MICROBATCHES)]
    rows = [
        {n: t[i] for n, t in batch.items()}
        for batch in batches
        for i in range(len(batch["labels"]))
    ]
    with accelerator(kind) as accelerated:
        loader = DataLoader(rows, batch_size=ROWS_PER_RANK)
        if kind == "ours":
            prepared = accelerated.prepare(adamw(model), model, loader)
            optimizer, same, loader = prepared
            assert same is model and len(units_below([model])) > 1
        else:
            if kind == "plugin":
                register(accelerated, model)
            loader = accelerated.prepare(loader)
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
                    _clip(accelerated, model, reference)
                    expected_optimizer.step()
                    expected_optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
        assert accelerated.unwrap_model(model) is model
        if kind != "alone":
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


@pytest.mark.parametrize("kind", ["alone", "plugin", "ours"])
def test_a_model_trains_as_one_process(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """Two microbatches a step, clipped; the loader divides batches, the optimizer is wrapped."""
    ranks(2).run(_train, tmp_path, kind)


def _refused() -> None:
    model = fully_shard_model(build("qwen3"))
    with accelerator() as accelerated, pytest.raises(ValueError, match="DistributedDataParallel"):
        accelerated.prepare(model)
    with accelerator("plugin") as accelerated, pytest.raises(KeyError, match="optimizer"):
        accelerated.prepare(model, adamw(model))


def test_preparing_the_model_is_refused(ranks: Ranks) -> None:
    """By DDP without the plugin; by accelerate, which looks for memory that torch gave, with it."""
    ranks(2).run(_refused)


def _translated() -> None:
    with launcher_environment():
        plugin = plugin_of(auto_wrap_policy="NO_WRAP", reshard_after_forward=False)
        # One of mixed_precision= alone would be set by accelerate, on GPUs.
        made = ShardedAccelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
        model = build("llama")
        plugin.ignored_modules = [model.lm_head]
        model, _, again = made.prepare(model, adamw(model.model), adamw(model.model))
        (unit,) = units_below([model]).values()
        assert unit.policy.param_dtype == unit.policy.output_dtype == torch.bfloat16
        assert unit.options.reshard_after_forward is False
        assert type(model.lm_head.weight) is torch.nn.Parameter
        # Both optimizers got the sharded parameters.
        owned = {id(p) for p in model.model.parameters()}
        assert {id(p) for group in again.param_groups for p in group["params"]} == owned
    with launcher_environment():
        classes = ["LlamaMLP"]
        # As accelerate leaves it in a plugin that it has used.
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set())
        plugin = plugin_of(
            auto_wrap_policy=policy,
            transformer_cls_names_to_wrap=classes,
            ignored_modules=".*norm",
        )
        made = ShardedAccelerator(cpu=True, fsdp_plugin=plugin)
        model = build("llama")
        made.prepare(model, adamw(model))
        units = [type(unit.modules[0]).__name__ for unit in units_below([model]).values()]
        assert units == ["FSDPLlamaForCausalLM", "FSDPLlamaMLP", "FSDPLlamaMLP"]
        plain = {n for n, p in model.named_parameters() if type(p) is torch.nn.Parameter}
        assert plain == {n for n, _ in model.named_parameters() if n.endswith("norm.weight")}


def test_the_plugins_settings_are_those_of_the_units(ranks: Ranks) -> None:
    """Classes, dtypes, resharding, modules to leave alone, of which a pattern may be given."""
    ranks(2).run(_translated)


def _alone() -> None:
    with launcher_environment():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
        made, model = ShardedAccelerator(cpu=True, fsdp_plugin=plugin_of()), build("llama")
        made.prepare(model, adamw(model))
        assert len(units_below([model])) > 1


def test_one_process_without_a_launcher_shards(ranks: Ranks) -> None:
    """For accelerate such a process is no distributed one."""
    ranks(1).run(_alone)


def _on_replicas() -> None:
    degrees = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    # accelerate has degrees for several GPUs only.
    anywhere = mock.patch.object(ParallelismConfig, "_validate_accelerator")
    with launcher_environment(), anywhere:
        plugin = plugin_of(cpu_offload=True, reshard_after_forward=True)
        made = ShardedAccelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=degrees)
        model, reference = build("llama"), build("llama")
        made.prepare(model, adamw(model))
        groups = [group for unit in units_below([model]).values() for group in unit.groups]
        assert groups and all(group.lives_on_host for group in groups)
        assert {p.device_mesh.shape for p in model.parameters()} == {(2, 2)}
        # A model that is sharded already stays as it is, and is saved once.
        made.prepare(model, adamw(model))
        assert made._models == [model]
        for net, rows in ((model, own_rows(global_batch(0))), (reference, global_batch(0))):
            net(**rows).loss.backward()
        norm = full_tensor(made.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=1))
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM, norm_type=1)
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)


def test_degrees_and_offload_are_those_of_accelerate(ranks: Ranks) -> None:
    """Replicas of shards, with parameters on the host, clipped by another norm."""
    ranks(4).run(_on_replicas)


def _empty_weights(directory: Path) -> None:
    reference = build("qwen3")
    if dist.get_rank() == 0:
        reference.save_pretrained(directory)
    dist.barrier()
    with accelerator("ours") as accelerated:
        with init_empty_weights():
            model = type(reference)(reference.config)
        model.tie_weights()
        assert all(parameter.is_meta for parameter in model.parameters())
        model, optimizer = accelerated.prepare(model, adamw(model))
        checkpoint.import_hf(model, directory)
        oracle = adamw(reference)
        batch = global_batch(0)
        accelerated.backward(model(**own_rows(batch)).loss)
        (reference(**batch).loss / NUM_MICROBATCHES).backward()
        optimizer.step()
        oracle.step()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)


def test_a_model_without_weights_reads_them_after_it_is_prepared(
    ranks: Ranks, tmp_path: Path
) -> None:
    """As the refusal of ``cpu_ram_efficient_loading`` says, with tied weights too."""
    ranks(2).run(_empty_weights, tmp_path)


def _beside_a_teacher(directory: Path) -> None:
    reference, teacher = build("qwen3"), build("llama").eval()
    with accelerator("ours") as accelerated:
        accelerated.prepare_model(build("qwen3"), evaluation_mode=True)
        model = copy.deepcopy(reference)
        model, optimizer = accelerated.prepare(model, adamw(model))
        accelerated.prepare_model(teacher, evaluation_mode=True)
        batch = global_batch(0)
        accelerated.backward(model(**own_rows(batch)).loss)
        (reference(**batch).loss / NUM_MICROBATCHES).backward()
        _clip(accelerated, model, reference)
        optimizer.step()
    with accelerator("ours") as accelerated:
        model = build("qwen3")
        model, optimizer = accelerated.prepare(model, adamw(model))
        accelerated.prepare_model(teacher, evaluation_mode=True)
        accelerated.backward(model(**own_rows(batch)).loss)
        optimizer.step()
        _save_and_load(
            model,
            optimizer,
            save=lambda: accelerated.save_state(directory),
            load=lambda: accelerated.load_state(directory),
        )


def test_a_model_trains_beside_one_that_is_evaluated(ranks: Ranks, tmp_path: Path) -> None:
    """Clipped; saved and loaded if the other one was prepared later."""
    ranks(2).run(_beside_a_teacher, tmp_path)


def _plugin_of_the_environment() -> None:
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    variables |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    with launcher_environment():
        os.environ |= variables
        made, model = ShardedAccelerator(cpu=True), build("qwen3")
        made.prepare(model, adamw(model))
        (unit,) = units_below([model]).values()
        assert unit.options.reshard_after_forward is False
    with launcher_environment():
        os.environ |= variables
        plugin = plugin_of()
        assert ShardedAccelerator(cpu=True, fsdp_plugin=plugin).state.fsdp_plugin is plugin


def test_the_launchers_plugin_is_taken_from_the_environment(ranks: Ranks) -> None:
    """On CPUs too, where accelerate ignores it; one that is given stays."""
    ranks(2).run(_plugin_of_the_environment)


def _refused_plugins() -> None:
    compiled = {"dynamo_plugin": TorchDynamoPlugin(backend=DynamoBackend.EAGER)}
    cases: list[tuple[dict[str, Any] | None, str]] = [
        (None, r"fsdp_version to be 2, got None.*fsdp_version=2\)"),
        ({"fsdp_version": 1}, "fsdp_version to be 2, got 1"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "auto_wrap_policy.*'size_based.*NO_WRAP"),
        ({"activation_checkpointing": True}, "gradient_checkpointing_enable"),
        ({"cpu_ram_efficient_loading": True}, r"init_empty_weights.*tie_weights.*import_hf"),
    ]
    for options, text in cases:
        # A plugin writes into the environment.
        with launcher_environment(), pytest.raises(NotImplementedError, match=text):
            plugin = None if options is None else plugin_of(**options)
            ShardedAccelerator(cpu=True, fsdp_plugin=plugin)
    with launcher_environment(), pytest.raises(NotImplementedError, match=r"layer\.compile"):
        ShardedAccelerator(cpu=True, fsdp_plugin=plugin_of(), **compiled)
    with accelerator("ours") as accelerated:
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"Sequential.*transformer_cls_names_to_wrap.*NO_WRAP"):
            accelerated.prepare(layers, adamw(layers))
        model = build("qwen3")
        optimizer = adamw(model)
        model(**own_rows(global_batch(0))).loss.backward()
        optimizer.step()
        with pytest.raises(ValueError, match="states of steps"):
            accelerated.prepare(model, optimizer)


def test_plugins_that_are_not_translated_are_refused(ranks: Ranks) -> None:
    """By the setting's name, with what to do; so is an optimizer that has stepped."""
    ranks(2).run(_refused_plugins)
