"""Lightning's Trainer around a model that configure_model() shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from megafsdp import (
    FSDPModule,
    checkpoint,
    full_state_dict,
    fully_shard,
    fully_shard_model,
    materialize,
)
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.fsdp.runtime.unit import units_below
from tests.ecosystem.launch import launcher_environment
from tests.ecosystem.models import (
    ROWS_PER_RANK,
    adamw,
    build,
    global_batch,
    mean_over_ranks,
)
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

pytest.importorskip("lightning", reason="ecosystem: lightning is not installed")
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from megafsdp.integrations.lightning import ShardedModule, ShardedStrategy

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

MAX_NORM = 0.5
NUM_MICROBATCHES = 2
NUM_STEPS = 3
STRATEGIES = {
    "model parallel": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    # Lightning then knows of no other ranks; units reduce their gradients by themselves.
    "single device": lambda: SingleDeviceStrategy("cpu"),
    "ddp": lambda: DDPStrategy(),
    "ours": lambda: ShardedStrategy(),
}


class Module(LightningModule):
    """A model of transformers, sharded in configure_model(), beside its oracle."""

    def __init__(self) -> None:
        super().__init__()
        # In a list, so that neither Lightning nor the optimizer takes it for a part.
        self.oracle = [build("qwen3")]
        self.oracle_optimizer = adamw(self.oracle[0])
        self.model = build("qwen3")
        self.num_compared = 0

    def configure_model(self) -> None:
        """Shard once: Lightning calls this before each of fit, validate and test."""
        if not isinstance(self.model, FSDPModule):
            fully_shard_model(self.model)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of this rank's rows, having compared their mean."""
        whole = global_batch(index)
        expected = self.oracle[0](**whole).loss
        (expected / NUM_MICROBATCHES).backward()
        loss = self.model(**batch).loss
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), rtol=1e-5, atol=0)
        self.num_compared += 1
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the oracle; Lightning calls this before it clips."""
        assert_same_grads(self.model, self.oracle[0])
        norm = torch.nn.utils.clip_grad_norm_(self.oracle[0].parameters(), MAX_NORM)
        assert norm > MAX_NORM
        self.oracle_optimizer.step()
        self.oracle_optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the sharded parameters."""
        return adamw(self.model)

    def train_dataloader(self) -> DataLoader:
        """Return this rank's rows of each global batch."""
        start = ROWS_PER_RANK * dist.get_rank()
        rows = [
            {name: tensor[row] for name, tensor in batch.items()}
            for batch in map(global_batch, range(NUM_STEPS * NUM_MICROBATCHES))
            for row in range(start, start + ROWS_PER_RANK)
        ]
        return DataLoader(rows, batch_size=ROWS_PER_RANK)


class Mixed(ShardedModule, Module):
    """The same, sharded and clipped by the mix-in."""


MODULES: dict[str, type[Module]] = {"ours": Mixed}


def trainer(strategy: Strategy, directory: Path, **options: Any) -> Trainer:
    """Return a trainer of one short epoch that writes nothing by itself."""
    return Trainer(
        accelerator="cpu",
        devices=1 if isinstance(strategy, SingleDeviceStrategy) else dist.get_world_size(),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        gradient_clip_val=MAX_NORM,
        accumulate_grad_batches=NUM_MICROBATCHES,
        # Each rank's loader gives its own rows.
        use_distributed_sampler=False,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _fit(name: str, directory: Path) -> None:
    with launcher_environment():
        module = MODULES.get(name, Module)()
        fitted = trainer(STRATEGIES[name](), directory)
        fitted.fit(module)
        assert len(units_below([module])) > 1
        if name in ("model parallel", "ours"):
            _save_and_load(name, module, fitted, directory)
        else:
            (optimizer,) = fitted.optimizers
            # This rank's rows alone would be in its file.
            with pytest.raises(RuntimeError, match=r"megafsdp\.checkpoint\.save"):
                fitted.save_checkpoint(directory / f"rank{dist.get_rank()}.ckpt")
            checkpoint.save(directory, step=NUM_STEPS, model=module.model, optimizer=optimizer)
            other = fully_shard_model(build("qwen3"))
            checkpoint.load(directory, model=other, optimizer=adamw(other))
            assert_same_parameters(other, module.oracle[0], rtol=1e-4, atol=1e-5)
    assert module.num_compared == NUM_STEPS * NUM_MICROBATCHES
    assert_same_parameters(module.model, module.oracle[0], rtol=1e-4, atol=1e-5)


def _save_and_load(name: str, module: Module, fitted: Trainer, directory: Path) -> None:
    """Save by Lightning, and let another trainer load it into another module."""
    path = directory / "last"
    fitted.save_checkpoint(path)
    other, saved = type(module)(), full_state_dict(module.model)
    resumed = trainer(STRATEGIES[name](), directory)
    # All steps have been made: it loads and ends.
    resumed.fit(other, ckpt_path=path)
    assert resumed.global_step == NUM_STEPS and other.num_compared == 0
    loaded = full_state_dict(other.model)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in saved.items())


def _refused(directory: Path) -> None:
    with launcher_environment(), pytest.raises(ValueError, match="DistributedDataParallel"):
        trainer(STRATEGIES["ddp"](), directory).fit(Module())


def test_lightnings_ddp_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Units reduce their gradients by themselves."""
    ranks(2).run(_refused, tmp_path)


@pytest.mark.parametrize("name", ["model parallel", "single device", "ours"])
def test_fit_trains_as_one_process(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Two microbatches a step, clipped by Lightning."""
    ranks(2).run(_fit, name, tmp_path)


class _Values(Mixed):
    """Children of several kinds; clips values."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.nn.CrossEntropyLoss()
        self.norm = torch.nn.LayerNorm(4)


def _refused_clipping(directory: Path) -> None:
    with launcher_environment():
        module = _Values()
        fitted = trainer(STRATEGIES["ours"](), directory)
        fitted.gradient_clip_algorithm = "value"
        with pytest.raises(NotImplementedError, match="clip_grad_value_"):
            fitted.fit(module)
        # A child without classes of units is one; one without parameters is none.
        assert isinstance(module.norm, FSDPModule) and not isinstance(module.loss, FSDPModule)


def test_clipping_by_value_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """By the mix-in, at the first step."""
    ranks(2).run(_refused_clipping, tmp_path)


class _OwnScale(Mixed):
    """Has a parameter beside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))


def _refused_parameters(directory: Path) -> None:
    with launcher_environment():
        module = _OwnScale()
        fitted = trainer(STRATEGIES["ours"](), directory)
        with pytest.raises(NotImplementedError, match=r"its own \['scale'\].*child module"):
            fitted.fit(module)
        # What no gradient reaches is equal on all ranks.
        module.scale.requires_grad_(False)
        fitted.fit(module)


def test_parameters_of_the_module_itself_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """No unit would sum their gradients."""
    ranks(2).run(_refused_parameters, tmp_path)


class _Rows(LightningModule):
    """Trains on rows of 12 numbers, by AdamW over all its parameters."""

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Return a loss of this rank's rows."""
        loss: torch.Tensor = self(rows).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return adamw(self)

    @staticmethod
    def rows(rank: int) -> torch.Tensor:
        """Return the rows of one rank, in batches of two."""
        return torch.randn(8, 2, 12, generator=torch.Generator().manual_seed(rank))

    def train_dataloader(self) -> DataLoader:
        """Return this rank's rows."""
        return DataLoader(self.rows(dist.get_rank()), batch_size=None)


class _Contained(_Rows):
    """Children in containers, of which a child may be a part of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh())
        self.alias = self.first[0]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(2))
        self.named = torch.nn.ModuleDict({"a": torch.nn.ModuleList([torch.nn.Linear(12, 12)])})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run all but the alias, which is the first of them."""
        rows = self.first(rows)
        for layer in (*self.layers, *self.named["a"]):
            rows = layer(rows)
        return rows


class _Tied(_Rows):
    """Children that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = torch.nn.Linear(12, 12)
        self.up = torch.nn.Linear(12, 12, bias=False)
        self.up.weight = self.down.weight
        self.last = torch.nn.Linear(12, 12)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run all children."""
        return self.last(self.up(self.down(rows)))


class _MixedContained(ShardedModule, _Contained):
    """The same with our mix-in."""


class _MixedTied(ShardedModule, _Tied):
    """The same with our mix-in, and the tied children as one unit."""

    def configure_model(self) -> None:
        """Shard the tied children together."""
        if not isinstance(self.up, FSDPModule):
            fully_shard([self.down, self.up])
        super().configure_model()


def _fits_children(directory: Path, kind: type[_Rows], plain: type[_Rows]) -> None:
    module, reference = kind(), plain()
    with launcher_environment():
        fitted = trainer(STRATEGIES["ours"](), directory)
        fitted.fit(module)
        # As Lightning does before it validates: the module is sharded once.
        module.configure_model()
    assert all(isinstance(p, UnevenDTensor) for p in module.parameters())
    optimizer = adamw(reference)
    batches = [reference.rows(rank) for rank in range(dist.get_world_size())]
    for index in range(len(batches[0])):
        loss = reference(torch.cat([rows[index] for rows in batches])).square().mean()
        (loss / NUM_MICROBATCHES).backward()
        if index % NUM_MICROBATCHES == NUM_MICROBATCHES - 1:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(module, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "plain"), [(_MixedContained, _Contained), (_MixedTied, _Tied)])
def test_children_may_be_contained_or_tied(
    ranks: Ranks, tmp_path: Path, kind: type[_Rows], plain: type[_Rows]
) -> None:
    """Modules in lists and dicts, parts of other children, and some that share a weight."""
    ranks(2).run(_fits_children, tmp_path, kind, plain)


class _Listed(_MixedContained):
    """Has a parameter in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3))])


def _refused_modules(directory: Path) -> None:
    with launcher_environment():
        with pytest.raises(NotImplementedError, match=r"its own \['scales.0'\].*child module"):
            trainer(STRATEGIES["ours"](), directory).fit(_Listed())
        for precision in ("bf16-true", "16-true"):
            half = trainer(STRATEGIES["ours"](), directory, precision=precision)
            with pytest.raises(NotImplementedError, match=rf"'{precision}'.*bf16-mixed.*mp_policy"):
                half.fit(_MixedContained())


def test_what_is_not_translated_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Parameters in lists, which have no forward, and conversions of sharded parameters."""
    ranks(2).run(_refused_modules, tmp_path)


class _Chosen(_Contained):
    """Has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        """Run the children."""
        self(rows)

    def val_dataloader(self) -> DataLoader:
        """Return the rows of training."""
        return self.train_dataloader()


class _MixedChosen(ShardedModule, _Chosen):
    """The same with our mix-in; its first child is two units."""

    fsdp_unit_modules: ClassVar = [nn.Linear]


class _Empty(_MixedContained):
    """Without values until it is sharded."""

    def configure_model(self) -> None:
        """Shard, and fill what has no values."""
        super().configure_model()
        materialize(self)


def _beside_tensor_parallelism(directory: Path) -> None:
    with launcher_environment():
        module = _MixedChosen()
        fitted = trainer(ShardedStrategy(tensor_parallel_size=2), directory)
        fitted.gradient_clip_val = None
        fitted.fit(module)
    shapes = {p.device_mesh.shape for p in module.layers.parameters()}
    assert shapes == {(dist.get_world_size() // 2,)}
    assert len(units_below([module.first])) == 2


def test_units_and_meshes_are_those_of_the_module_and_the_strategy(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Ranks of tensor parallelism keep the same rows; without a limit nothing is clipped."""
    ranks(4).run(_beside_tensor_parallelism, tmp_path)


def _evaluates_and_fills(directory: Path) -> None:
    with launcher_environment():
        module = _MixedChosen()
        module.scale.requires_grad_()
        trainer(STRATEGIES["ours"](), directory).validate(module)
    with launcher_environment():
        with torch.device("meta"):
            empty = _Empty()
        trainer(STRATEGIES["ours"](), directory).fit(empty)
    assert not any(p.is_meta for p in empty.parameters())


def test_evaluations_and_models_without_values_are_taken(ranks: Ranks, tmp_path: Path) -> None:
    """An evaluation has no gradients to sum; values come after a model is sharded."""
    ranks(2).run(_evaluates_and_fills, tmp_path)
