"""A whole model given to fully_shard_model(): it becomes units, or stays as it is."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from megafsdp import FSDPModule, fully_shard, fully_shard_model
from megafsdp.fsdp.grouping import leave_out_tied
from tests.end_to_end.strategy_cases import ENGINES, MeshShape, mesh_of_shape
from tests.fsdp.toy import (
    VOCABULARY,
    WIDTH,
    Block,
    assert_same_grads,
    assert_same_parameters,
    batches,
    fused_adamw,
    mine,
)
from tests.ranks import Ranks


class Embeddings(nn.Module):
    """Of words and of places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(6, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        return self.words(tokens) + self.places.weight


class Stage(nn.Module):
    """Two blocks that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.down.weight = self.first.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both make of x."""
        return self.second(self.first(x))


class Tied(nn.Module):
    """A decoder tied to the embeddings of words, a block, and a stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.block, self.stage = Embeddings(), Block(), Stage()
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.embeddings.words.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        logits = self.decoder(self.stage(self.block(self.embeddings(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _logged(action: Callable[[], object]) -> list[str]:
    handler, logger = _Lines(), logging.getLogger("megafsdp.fsdp")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return handler.lines


def _settings() -> list[tuple[str, MeshShape]]:
    world = dist.get_world_size()
    return [
        (engine, shape)
        for engine in ENGINES
        for shape in ([(world,)] if len(ENGINES[engine].meshes[0]) == 1 else [(1, world)])
    ]


def _tied_across_units() -> None:
    for engine, shape in _settings():
        reference = Tied()
        net = copy.deepcopy(reference)
        options = {**ENGINES[engine].options, "mesh": mesh_of_shape(shape)}
        lines = _logged(lambda: fully_shard_model(net, [Embeddings, Block, Stage], **options))  # noqa: B023
        assert len(lines) == (dist.get_rank() == 0)
        for word in ("Embeddings", "Block", "decoder.weight", "stage.second.down.weight"):
            assert all(word in line for line in lines), lines
        units = {name for name, module in net.named_modules() if isinstance(module, FSDPModule)}
        assert units == {"", "block", "stage"}
        assert net.decoder.weight is net.embeddings.words.weight
        optimizers = [fused_adamw(reference), fused_adamw(net)]
        for batch in batches(2):
            reference(*batch).backward()
            net(*mine(batch)).backward()
            assert_same_grads(net, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_unit_tied_to_parameters_outside_of_it_is_left_out(ranks: Ranks, num_ranks: int) -> None:
    """Its parameters belong to the unit around, which one line says, and the model trains."""
    ranks(num_ranks).run(_tied_across_units)


def test_a_unit_around_one_that_is_left_out_may_be_left_out_too() -> None:
    """Without the inner unit it would own what is tied to parameters outside of both."""
    inner = nn.Linear(2, 2)
    around = nn.Sequential(inner)
    beside, apart = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    model = nn.ModuleList([around, beside, apart])
    apart.weight = inner.weight
    assert leave_out_tied(model, [around, inner, beside], ()) == [beside]
    assert leave_out_tied(model, [around, inner, beside], [inner.weight]) == [around, inner, beside]
    # Tied to the inner unit alone, it keeps both.
    around.append(nn.Linear(2, 2))
    around[1].weight, apart.weight = inner.weight, nn.Parameter(torch.ones(2, 2))
    assert leave_out_tied(model, [around, inner], ()) == [around]


def _spoil_hook(net: Tied) -> Callable[[], None]:
    return net.decoder.bias.register_hook(lambda grad: grad).remove


def _spoil_complex(net: Tied) -> Callable[[], None]:
    net.stage.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return lambda: delattr(net.stage, "phase")


def _spoil_dtensor(net: Tied) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net.scale = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    return lambda: delattr(net, "scale")


def _nothing_changes() -> None:
    batch = batches(1)[0]
    for engine, shape in _settings():
        options = {**ENGINES[engine].options, "mesh": mesh_of_shape(shape)}
        for spoil in (_spoil_hook, _spoil_complex, _spoil_dtensor):
            net = Tied()
            wanted = net(*batch)
            mend = spoil(net)
            before = [(m, type(m), dict(vars(m))) for m in net.modules()]
            parameters = list(net.parameters())
            with pytest.raises((ValueError, NotImplementedError), match="Expected"):
                fully_shard_model(net, [Embeddings, Block, Stage], **options)
            assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
            assert all(type(m) is cls and vars(m) == own for m, cls, own in before)
            mend()
            assert torch.equal(net(*batch), wanted)
            fully_shard_model(net, [Embeddings, Block, Stage], **options)
            net(*mine(batch)).backward()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_model_that_cannot_be_wrapped_stays_as_it_was(ranks: Ranks, num_ranks: int) -> None:
    """Whichever unit is refused, no other has been changed, and a mended model is wrapped."""
    ranks(num_ranks).run(_nothing_changes)


def _units_made_before() -> None:
    net = Tied()
    fully_shard(net.block)
    with pytest.raises(ValueError, match="once for each unit"):
        fully_shard_model(net, [Stage, Block])
    assert not isinstance(net.stage, FSDPModule)
    fully_shard_model(net, [Stage], ignored_params=iter([net.decoder.bias]))
    assert isinstance(net.stage, FSDPModule)
    assert not isinstance(net.decoder.bias, DTensor)


def test_units_that_were_made_before_count(ranks: Ranks) -> None:
    """A second unit of a module is refused before any; ignored parameters may be an iterator."""
    ranks(2).run(_units_made_before)
