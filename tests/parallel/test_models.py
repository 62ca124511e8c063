"""Models with tp against themselves in one process on the whole batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import megafsdp
from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.checkpoint import load, save
from megafsdp.device.memory import Category
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.dtensor import cut_dim
from megafsdp.models import ActivationCheckpointing, ModelConfig, TransformerLayer, sample
from megafsdp.models.common import rotary_table
from tests.parallel.cases import (
    CONFIG,
    CONFIGS,
    EPS,
    GPT,
    batch_of,
    build,
    mesh_of,
    shard_by_ours,
    shard_by_torch,
    wholes,
)
from tests.ranks import Ranks

# An odd length, which tp 2 does not divide, and one that it does.
_LENGTHS = (7, 8)
_ROWS = 4
Trajectory = tuple[list[float], dict[str, Tensor]]


def _train(model: nn.Module, rank: int, num_data: int) -> Trajectory:
    """Take three clipped AdamW steps; return losses, first whole gradients, last weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    losses, tensors = [], {}
    for step in range(3):
        batch = batch_of(_ROWS, _LENGTHS[step % 2], step)
        own = [part.chunk(num_data)[rank] for part in batch]
        loss = model(*own)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            tensors = {f"gradient of {name}": grad.clone() for name, _, grad in wholes(model)}
        # torch 2.11 scales lists of gradients that are still to be summed wrongly.
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=not IS_DISPATCH_BYPASSED)
        optimizer.step()
        if step == 2:
            tensors |= {name: weight.clone() for name, weight, _ in wholes(model)}
        optimizer.zero_grad()
    return losses, tensors


def _train_cut(config: ModelConfig, dtype: torch.dtype, num_data: int, outer: int) -> Trajectory:
    data, tp = mesh_of(num_data, 2, outer=outer)
    model = build(config, dtype)
    model.set_device_mesh(tp_mesh=tp)
    rank = 0
    if num_data * outer > 1:
        shard_by_torch(model, data)
        rank = data.get_local_rank() if outer == 1 else data.get_coordinate()[0]
    return _train(model, rank, num_data * outer)


def _train_all(cases: list[tuple[str, torch.dtype]], num_data: int, outer: int) -> list[Trajectory]:
    return [_train_cut(CONFIGS[name], dtype, num_data, outer) for name, dtype in cases]


@pytest.mark.parametrize(
    ("cases", "num_data", "outer"),
    [
        ([("gpt", torch.float64), ("llama", torch.float64), ("qwen3", torch.float32)], 1, 1),
        ([("qwen3", torch.float64)], 2, 1),
        ([("gpt", torch.float64)], 1, 2),
    ],
    ids=["alone", "fsdp2", "hsdp"],
)
def test_three_steps_equal_one_process(
    ranks: Ranks, cases: list[tuple[str, torch.dtype]], num_data: int, outer: int
) -> None:
    """Alone, under FSDP2 and its HSDP: losses, gradients and weights, tied and not.

    Under our engine tests/end_to_end/test_parallel_product.py has them.
    """
    by_rank = ranks(2 * num_data * outer).run(_train_all, cases, num_data, outer)
    for index, (name, dtype) in enumerate(cases):
        model = build(CONFIGS[name], dtype)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        losses, tensors = _train(model, 0, 1)
        # Sums over two ranks in another order, three steps on.
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        for step, loss in enumerate(losses):
            mean = sum(found[index][0][step] for found in by_rank) / len(by_rank)
            assert abs(mean - loss) < tolerance, (name, step)
        for which, expected in tensors.items():
            got = by_rank[0][index][1][which]
            torch.testing.assert_close(
                got, expected, rtol=tolerance, atol=tolerance, msg=f"{name}: {which}"
            )
        assert all(not torch.equal(before[n], tensors[n]) for n in before)


def _losses_of_100_steps(num_tp: int) -> list[float]:
    config = dataclasses.replace(CONFIG, num_layers=1)
    model = build(config, torch.float32)
    if num_tp > 1:
        model.set_device_mesh(tp_mesh=mesh_of(1, num_tp)[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    losses = []
    for step in range(100):
        loss = model(*batch_of(2, 8, step % 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_loss_of_a_hundred_steps_is_that_without_tp(ranks: Ranks) -> None:
    """In fp32, with learning: within 1e-5 of it at every step."""
    wanted = _losses_of_100_steps(1)
    assert wanted[-1] < 0.8 * wanted[0]
    for found in ranks(2).run(_losses_of_100_steps, 2):
        assert max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True)) < 1e-5


def _collectives_of_a_layer(name: str) -> tuple[dict[str, int], dict[str, int]]:
    config = CONFIGS[name]
    model = build(config)
    model.set_device_mesh(tp_mesh=mesh_of(1, 2)[1])
    layer = model.decoder.layers[0]
    table = rotary_table(8, config.head_dim, 1e4) if config.has_rotary_positions else None
    x = torch.randn(2, 4, config.hidden_size, dtype=torch.float64, requires_grad=True)
    with record_collectives() as forward:
        out = layer(x, table)
    with record_collectives() as backward:
        out.sum().backward()
    return dict(forward.nbytes), dict(backward.nbytes)


@pytest.mark.parametrize("name", ["qwen3", "gpt"])
def test_a_layer_gathers_twice_and_reduces_twice(ranks: Ranks, name: str) -> None:
    """Four collectives forward and four backward, each of (B, T, H), and none for parameters."""
    nbytes = 2 * 8 * CONFIG.hidden_size * 8
    each = {"all_gather": 2 * nbytes, "reduce_scatter": 2 * nbytes}
    assert ranks(2).run(_collectives_of_a_layer, name) == [(each, each)] * 2


def _show(name: str) -> tuple[Tensor, Tensor, float, Tensor]:
    config = CONFIGS[name]
    model = build(config)
    if dist.is_initialized():
        model.set_device_mesh(tp_mesh=mesh_of(1, 2)[1])
    tokens, labels, mask = batch_of(2, config.max_sequence_length)
    with torch.no_grad():
        logits, loss = model(tokens), model(tokens, labels, mask).item()
    generator = torch.Generator().manual_seed(2)
    text = sample(
        model, tokens[:, :1], num_tokens=4, max_context=9, temperature=1.0, generator=generator
    )
    model.activation_checkpointing = ActivationCheckpointing("full")
    model(tokens, labels, mask).backward()
    (grad,) = [g for n, _, g in wholes(model) if n == "decoder.layers.0.mlp.linear_fc1.weight"]
    return logits, text, loss, grad


@pytest.mark.parametrize("name", ["qwen3", "gpt"])
def test_logits_text_and_loss_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    """Lengths that tp does not divide, up to the longest; layers that run again in backward."""
    wanted = _show(name)
    for found in ranks(2).run(_show, name):
        # fp64 sums of a few dozen terms in another order.
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


_KERNELS = ("embedding", "layer_norm", "linear", "rms_norm", "scaled_dot_product_attention")


def _spy_on_kernels() -> list[str]:
    seen: list[str] = []
    kernels = {name: getattr(F, name) for name in _KERNELS}
    for name, kernel in kernels.items():

        def spy(*args: Any, name: str = name, kernel: Any = kernel, **kwargs: Any) -> Any:
            assert not any(isinstance(a, DTensor) for a in (*args, *kwargs.values())), name
            seen.append(name)
            return kernel(*args, **kwargs)

        setattr(F, name, spy)
    try:
        for config in (CONFIG, GPT):
            data, tp = mesh_of(2, 2)
            for shard in (None, shard_by_torch, shard_by_ours):
                model = build(config)
                model.set_device_mesh(tp_mesh=tp)
                if shard is not None:
                    shard(model, data)
                model(*batch_of(2, 8)).backward()
    finally:
        for name, kernel in kernels.items():
            setattr(F, name, kernel)
    return sorted(set(seen))


def test_no_kernel_is_given_a_dtensor(ranks: Ranks) -> None:
    """Alone, under FSDP2 and ours: a DTensor costs a dispatch and has kernels for less."""
    assert ranks(4).run(_spy_on_kernels) == [list(_KERNELS)] * 4


def _placements(outer: int) -> None:
    data, tp = mesh_of(2 // outer, 2, outer=outer)
    found = []
    for shard in (shard_by_torch, shard_by_ours):
        model = build(GPT)
        model.set_device_mesh(tp_mesh=tp)
        shard(model, data)
        found.append({name: p.placements for name, p in model.named_parameters()})
    assert found[0] == found[1]
    weight = found[0]["decoder.layers.0.mlp.linear_fc1.weight"]
    # tp has cut the rows before data parallelism does: the order of the rows is tp's first.
    assert [cut_dim(placement) for placement in weight[-2:]] == [0, 0]
    assert type(weight[-2]) is not Shard and weight[-1] == Shard(0)


@pytest.mark.parametrize("outer", [1, 2])
def test_placements_are_those_of_fsdp2(ranks: Ranks, outer: int) -> None:
    """Of every parameter of the same model, with HSDP too: programs read them."""
    ranks(4).run(_placements, outer)


def _full_states(folder: str) -> None:
    data, tp = mesh_of(2, 2)
    for name in ("qwen3", "gpt"):
        wanted = build(CONFIGS[name]).state_dict()
        model = build(CONFIGS[name])
        model.set_device_mesh(tp_mesh=tp)
        shard_by_ours(model, data)
        found = megafsdp.full_state_dict(model)
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{name}")
        read = {key: torch.full_like(value, torch.nan) for key, value in wanted.items()}
        dcp.load(read, checkpoint_id=f"{folder}/{name}")
        for key, value in wanted.items():
            assert torch.equal(found[key], value) and torch.equal(read[key], value), key


def test_full_states_and_torchs_files_are_those_of_the_uncut_model(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Columns, rows, vocabulary, query groups, gate and up: nothing shows the degree."""
    ranks(4).run(_full_states, str(tmp_path))


def _full_states_beside_units(are_all_ignored: bool) -> None:
    data, tp = mesh_of(2, 2)
    model = build(CONFIG)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    model.set_device_mesh(tp_mesh=tp)
    ignored = [p for n, p in model.named_parameters() if are_all_ignored or ".mlp." in n]
    megafsdp.fully_shard(model, mesh=data, ignored_params=ignored)
    for _ in range(2):
        found = megafsdp.full_state_dict(model)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        for value in wanted.values():
            value.mul_(-0.5)
        megafsdp.load_full_state_dict(model, wanted)


@pytest.mark.parametrize("are_all_ignored", [False, True])
def test_full_states_of_parts_that_no_unit_has_are_those_of_the_uncut_model(
    ranks: Ranks, are_all_ignored: bool
) -> None:
    """Columns, rows, gate and up of ``ignored_params`` are joined, and cut again in a load."""
    ranks(4).run(_full_states_beside_units, are_all_ignored)


def _on_meta_beside_units(directory: str) -> None:
    data, tp = mesh_of(2, 2)

    def sharded_on_meta() -> nn.Module:
        with torch.device("meta"):
            model = megafsdp.models.build_model(CONFIG)
        model.set_device_mesh(tp_mesh=tp)
        ignored = [p for name, p in model.named_parameters() if ".mlp." in name]
        megafsdp.fully_shard(model, mesh=data, ignored_params=ignored)
        with pytest.raises(RuntimeError, match=r"linear_fc1\.weight.* without values"):
            megafsdp.full_state_dict(model)
        return model

    def draw(module: nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    torch.manual_seed(3)
    drawn = megafsdp.models.build_model(CONFIG).state_dict()
    by_materialize, by_hand, by_load, resumed = (sharded_on_meta() for _ in range(4))
    torch.manual_seed(3)
    megafsdp.materialize(by_materialize)
    by_hand.to_empty(device="cpu")
    torch.manual_seed(3)
    by_hand.apply(draw)
    megafsdp.load_full_state_dict(by_load, drawn)
    save(directory, step=1, model=by_load)
    load(directory, model=resumed)
    for model in (by_materialize, by_hand, by_load, resumed):
        found = megafsdp.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in drawn.items())
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_parts_that_no_unit_has_get_values_on_meta(ranks: Ranks, tmp_path: Path) -> None:
    """By materialize(), by hand and by loads, ``ignored_params`` that tp cuts as all others."""
    ranks(4).run(_on_meta_beside_units, str(tmp_path))


def _bytes_of_a_rank(name: str, strategy: str) -> None:
    data, tp = mesh_of(2, 2)
    model = build(CONFIGS[name], torch.float32)
    num_own = sum(
        p.numel() // (1 if annotation_of(p).tp_dim is None else 2) for p in model.parameters()
    )
    model.set_device_mesh(tp_mesh=tp)
    megafsdp.fully_shard_model(model, [TransformerLayer], mesh=data, strategy=strategy)
    units = [model._fsdp_unit(), *(layer._fsdp_unit() for layer in model.decoder.layers)]
    layouts = [group.layout for unit in units for group in unit.groups]
    assert sum(slot.spec.numel for layout in layouts for slot in layout.slots) == num_own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        units[0].ledger.reset_peak()
        model(*batch_of(2, 8, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    by_group = [4 * layout.gathered_numel for layout in layouts]
    ledger, is_sharded = units[0].ledger, strategy != "no_shard"
    assert ledger.live[Category.MAIN_WEIGHT] == sum(by_group) // (2 if is_sharded else 1)
    assert ledger.total == ledger.live[Category.MAIN_WEIGHT]
    assert ledger.peak[Category.MAIN_GRAD] == ledger.live[Category.MAIN_WEIGHT]
    # The root, the layer at work and the one prefetched are all; two wait for their reduction.
    assert ledger.peak[Category.UNSHARDED] == (sum(by_group) if is_sharded else 0)
    assert ledger.peak[Category.PARTIAL_GRAD] == sum(sorted(by_group)[-2:])


@pytest.mark.parametrize("name", ["qwen3", "gpt"])
def test_a_rank_has_the_bytes_of_its_parts(ranks: Ranks, name: str) -> None:
    """Weights, gathered weights and gradients by formula: half of what tp cuts, all of norms."""
    for strategy in ("optim_grads_params", "no_shard"):
        ranks(4).run(_bytes_of_a_rank, name, strategy)


def test_no_layer_asks_for_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers make is made where their inputs are."""

    def refuse() -> int:
        raise AssertionError("asked for the current device")

    monkeypatch.setattr(torch.cuda, "current_device", refuse)
    for config in (CONFIG, GPT):
        build(config)(*batch_of(2, 8)).backward()
