"""Checkpoints of models with quantized weights: main weights, and histories of delayed scaling."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megafsdp import FusedAdam, ParallelDims, full_state_dict, fully_shard
from megafsdp import summon_full_params as summon
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.checkpoint import async_save, load, save
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.format.save_root import find
from megafsdp.fsdp.params.quantized_weight import QuantizedWeight
from megafsdp.quantize.delayed import DelayedState
from tests.fsdp.quantized import (
    Net,
    batch,
    options_of,
    policy_for,
    quantize,
    quantized_parameters,
    recipe_for,
    shard,
)
from tests.fsdp.test_quantized_meshes import Experts
from tests.ranks import Ranks

KINDS = ("weight", "input", "grad")
NAMES = [f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")]


def _make(name: str | None, layout: str) -> tuple[nn.Module, FusedAdam]:
    recipe = None if name is None else recipe_for(name, "all")
    net = shard(Net(), policy_for(recipe), **options_of(layout))
    return net, FusedAdam(net.parameters(), lr=1e-2)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = net(batch(step, 0, dist.get_rank()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _evaluate(net: nn.Module) -> None:
    with torch.no_grad():
        net(batch(99, 0, dist.get_rank()))


def _states(net: nn.Module) -> dict[str, DelayedState]:
    found = {}
    for fqn, (group, record) in quantized_parameters(net).items():
        assert isinstance(group.compute_weight, QuantizedWeight)
        found[fqn] = group.compute_weight.scales.states[group.parameters.index(record)]
    return found


def _resumes(directory: str, layout: str, evaluates: bool, is_async: bool) -> None:
    net, optimizer = _make("fp8_delayed", layout)
    for step in range(3):
        _step(net, optimizer, step)
    if evaluates:
        # The weights of the last step are encoded before they are saved.
        _evaluate(net)
    if is_async:
        async_save(directory, step=3, model=net, optimizer=optimizer).result()
    else:
        save(directory, step=3, model=net, optimizer=optimizer)
    uninterrupted, own = _make("fp8_delayed", layout)
    for step in range(3):
        _step(uninterrupted, own, step)
    # Of another strategy, and after steps of its own.
    resumed, other = _make("fp8_delayed", "zero1")
    _step(resumed, other, 7)
    load(directory, model=resumed, optimizer=other)
    for step in range(3, 6):
        losses = [
            _step(*pair, step)
            for pair in ((net, optimizer), (uninterrupted, own), (resumed, other))
        ]
        assert torch.equal(losses[0], losses[1]), "a save changes nothing"
        assert torch.equal(losses[0], losses[2]), "a load goes on"
    states = [full_state_dict(model) for model in (net, uninterrupted, resumed)]
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]) and torch.equal(tensor, states[2][key]), key
    for fqn, state in _states(net).items():
        again = _states(resumed)[fqn]
        for kind in KINDS:
            history = getattr(state, f"{kind}_history")
            assert history.count_nonzero() >= 3
            assert torch.equal(history, getattr(again, f"{kind}_history")), (fqn, kind)


@pytest.mark.parametrize(
    ("layout", "evaluates", "is_async"),
    [
        ("zero3", False, False),
        ("zero3", True, False),
        ("zero0", False, True),
        ("hfsdp 1x2", False, False),
    ],
)
def test_delayed_scaling_resumes_bit_for_bit(
    ranks: Ranks, tmp_path: Path, layout: str, evaluates: bool, is_async: bool
) -> None:
    """Losses, weights and histories are those of a run without a save, whatever came before it."""
    ranks(2).run(_resumes, str(tmp_path), layout, evaluates, is_async)


def _stored_names(directory: str) -> None:
    net, optimizer = _make("fp8_delayed", "zero3")
    _step(net, optimizer, 0)
    with record_collectives() as record:
        save(directory, step=1, model=net, optimizer=optimizer)
    assert [label for _, label in record.events].count("maxima") == 1
    tensors = read_manifest(find(Path(directory), None)).tensors
    histories = {key: entry for key, entry in tensors.items() if key.startswith("quantize.")}
    assert set(histories) == {f"quantize.{name}.{kind}_maxima" for name in NAMES for kind in KINDS}
    assert {entry.shape for entry in histories.values()} == {(1024,)}
    assert {entry.torch_dtype for entry in histories.values()} == {torch.float32}
    plain, own = _make("mxfp8", "zero3")
    with record_collectives() as record:
        save(directory, step=2, model=plain, optimizer=own)
    assert "maxima" not in [label for _, label in record.events]


def test_histories_are_stored_by_the_names_of_weights(ranks: Ranks, tmp_path: Path) -> None:
    """Three of a fixed size a weight; the all-reduce of the next forward comes before the save."""
    ranks(2).run(_stored_names, str(tmp_path))


class _Lines(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take one."""
        self.lines.append(record.getMessage())


def _any_recipe_loads_any_checkpoint(directory: str) -> None:
    handler, logger = _Lines(), logging.getLogger("megafsdp.checkpoint")
    logger.addHandler(handler)
    recipes = ("fp8_delayed", "mxfp8", None, "nvfp4")
    layouts = ("zero3", "zero0", "hsdp 1x2", "zero2")
    try:
        for name, layout in zip(recipes, layouts, strict=True):
            net, optimizer = _make(name, layout)
            _step(net, optimizer, 0)
            save(f"{directory}/{name}", step=1, model=net, optimizer=optimizer)
            saved = full_state_dict(net)
            for other, other_layout in zip(recipes, layouts[::-1], strict=True):
                target, own = _make(other, other_layout)
                _step(target, own, 5)
                handler.lines.clear()
                load(f"{directory}/{name}", model=target, optimizer=own)
                for key, tensor in full_state_dict(target).items():
                    assert torch.equal(tensor, saved[key]), key
                is_new = other == "fp8_delayed" and name != "fp8_delayed"
                assert [line for line in handler.lines if "histories" in line] == [
                    "Delayed scaling begins with new histories, of which the checkpoint has none: "
                    + ", ".join(
                        f"quantize.blocks.*.{layer}.weight.{kind}_maxima"
                        for layer in ("up", "down")
                        for kind in KINDS
                    )
                ] * is_new
                _evaluate(target)
                with summon(target):
                    for fqn, (group, record) in quantized_parameters(target).items():
                        # A new history begins with this maximum, which an old one has as well.
                        wanted = quantize(saved[fqn].bfloat16(), group.quantization.recipe)
                        assert torch.equal(record.unsharded.codes, wanted.codes) or not is_new
                        assert torch.equal(record.unsharded.codes, wanted.codes) or other == name
                if is_new:
                    for state in _states(target).values():
                        assert state.weight_history.count_nonzero() == 1
                        assert state.input_history.count_nonzero() == 0
                _step(target, own, 1)
    finally:
        logger.removeHandler(handler)


def test_any_recipe_loads_any_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Main weights are equal, codes those of main weights; missing histories begin, with a line."""
    ranks(2).run(_any_recipe_loads_any_checkpoint, str(tmp_path))


def _other_lengths(directory: str) -> None:
    recipe = recipe_for("fp8_delayed", "all")
    nets = []
    for history in (4, 2, 6):
        policy = policy_for(dataclasses.replace(recipe, history=history))
        net = shard(Net(), policy, **options_of("zero3"))
        nets.append((history, net, FusedAdam(net.parameters(), lr=1e-2)))
    _, saved, optimizer = nets[0]
    for step in range(3):
        _step(saved, optimizer, step)
    save(directory, step=3, model=saved, optimizer=optimizer)
    handler, logger = _Lines(), logging.getLogger("megafsdp.checkpoint")
    logger.addHandler(handler)
    try:
        for history, net, own in nets[1:]:
            _step(net, own, 7)
            load(directory, model=net, optimizer=own)
            for fqn, state in _states(net).items():
                for kind in KINDS:
                    wanted = getattr(_states(saved)[fqn], f"{kind}_history")
                    assert wanted.count_nonzero() >= 3
                    wanted = functional.pad(wanted, (2, 0))[..., -history:]
                    assert torch.equal(getattr(state, f"{kind}_history"), wanted), (fqn, kind)
    finally:
        logger.removeHandler(handler)
    assert handler.lines == []


def test_histories_of_other_lengths_keep_the_newest_steps(ranks: Ranks, tmp_path: Path) -> None:
    """A recipe with fewer or more steps goes on with those that both have."""
    ranks(2).run(_other_lengths, str(tmp_path))


def _experts(ep: int) -> tuple[nn.Module, Any]:
    meshes = ParallelDims(ep=ep).build("cpu")
    net = Experts()
    if ep > 1:
        net.cut(meshes.ep)
    fully_shard(
        net,
        mesh=meshes.data,
        expert_mesh=meshes.experts,
        mp_policy=policy_for(recipe_for("fp8_delayed", "all")),
    )
    return net, FusedAdam(net.parameters(), lr=1e-2)


def _histories_of_experts(directory: str) -> None:
    net, optimizer = _experts(2)
    for _ in range(2):
        net(torch.ones(8, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(directory, step=1, model=net, optimizer=optimizer)
    tensors = read_manifest(find(Path(directory), None)).tensors
    stack = "quantize.experts.linear_fc1.weight.weight_maxima"
    assert tensors[stack].shape == (4, 1024)
    assert "quantize.first.weight.input_maxima" in tensors
    whole, own = _experts(1)
    load(directory, model=whole, optimizer=own)
    again, other = _experts(2)
    load(directory, model=again, optimizer=other)
    found, every = _states(again), _states(whole)
    for fqn, state in _states(net).items():
        assert torch.equal(found[fqn].weight_history, state.weight_history), fqn
        history = every[fqn].weight_history
        if "experts" in fqn:
            index = int(net.experts.linear_fc1.ep_mesh.get_local_rank())
            assert history.shape[0] == 4 and history[:, -1].unique().numel() == 4
            history = history[2 * index : 2 * index + 2]
        assert torch.equal(history, state.weight_history), fqn


def test_experts_have_a_history_each_by_their_index_in_the_layer(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A stack on two ranks of ep loads into the whole one, and into parts again."""
    ranks(4).run(_histories_of_experts, str(tmp_path))
