"""Codes and tables of quantized weights: of the whole, on all ranks, in the same memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megafsdp import full_tensor, fully_shard, fully_shard_model, mark_main_weights_changed
from megafsdp import summon_full_params as summon
from megafsdp.fsdp.runtime import agreement
from megafsdp.quantize import QuantizationRecipe
from megafsdp.quantize.tensor import QuantizedTensor
from tests.fsdp.quantized import (
    OPERANDS,
    RECIPES,
    Net,
    batch,
    options_of,
    policy_for,
    quantize,
    quantized_parameters,
    recipe_for,
    shard,
)
from tests.ranks import Ranks

# Whatever a format takes of these: one row, fewer rows than ranks, one column of tiles, tiles that
# end early in both directions, a cut within every kind of tile.
SHAPES = ((1, 64), (3, 40), (16, 16), (96, 32), (160, 64), (130, 7), (288, 160))


class Products(nn.Module):
    """Linears of many shapes, each applied to ones."""

    def __init__(self, shapes: tuple[tuple[int, int], ...] = SHAPES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(k, m, bias=False) for m, k in shapes)
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                # Tiles of one weight differ in their scales, and the largest value is in one row.
                rows = torch.arange(layer.out_features).remainder(7) - 3
                layer.weight.mul_(torch.exp2(rows.float())[:, None])
                layer.weight[-1] *= 2**i

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all products."""
        parts = [layer(x.expand(2, layer.in_features)) for layer in self.layers]
        return torch.stack([part.float().square().mean() for part in parts]).sum()


def _check_all(net: nn.Module, recipe: QuantizationRecipe, through: torch.dtype) -> int:
    """Compare what forward reads with the quantized whole; return how many were compared."""
    found = quantized_parameters(net)
    weights = {name: full_tensor(p.detach()) for name, p in net.named_parameters()}
    with summon(net):
        for name, (_, record) in found.items():
            shown = record.unsharded
            wanted = quantize(weights[name].to(through), recipe)
            assert isinstance(shown, QuantizedTensor)
            assert torch.equal(shown.codes, wanted.codes), name
            assert torch.equal(shown.table, wanted.table), name
            assert torch.equal(shown.decode(), wanted.decode()), name
    return len(found)


def _codes_of_the_whole(layout: str, name: str) -> list[int]:
    recipe, counts = recipe_for(name, "weights"), []
    for source, through in (("model_dtype", torch.bfloat16), ("main", torch.float32)):
        policy = policy_for(recipe, quantize_from=source)
        net = fully_shard(Products(), mp_policy=policy, **options_of(layout))
        counts.append(_check_all(net, recipe, through))
        # Another state of the same model: every rank's rows change their scales.
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(100.0)
        mark_main_weights_changed(net)
        _check_all(net, recipe, through)
    return counts


def _num_eligible(name: str) -> int:
    reason_against = recipe_for(name, "weights").weight.reason_against
    return sum(reason_against(shape) is None for shape in SHAPES)


# Delayed scaling takes the maximum of the step before, which its own tests have.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp8_delayed"])
@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [("zero3", 1), ("zero3", 2), ("zero3", 3), ("zero0", 2), ("hfsdp 2x2", 4)],
)
def test_codes_and_scales_are_those_of_the_whole_weight(
    ranks: Ranks, name: str, layout: str, num_ranks: int
) -> None:
    """For rows fewer than ranks, one row, short tiles, a cut anywhere; after a change in place."""
    num = _num_eligible(name)
    assert ranks(num_ranks).run(_codes_of_the_whole, layout, name) == [[num, num]] * num_ranks
    assert num >= 3


def _memory_over_steps(layout: str) -> None:
    policy = policy_for("mxfp8")
    net = shard(Net(), policy, **options_of(layout))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    seen: list[list[tuple[int, ...]]] = []
    values: list[Tensor] = []
    for step in range(4):
        net(batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        with summon(net):
            shown = [record.unsharded for _, record in quantized_parameters(net).values()]
            seen.append(
                [
                    (id(p), id(p.table), p.table.data_ptr(), p.codes.untyped_storage()._cdata)
                    for p in shown
                ]
            )
            values.append(torch.cat([p.decode().flatten() for p in shown]))
            assert values[-1].isfinite().all(), "tables are filled"
    assert seen[0] and seen == [seen[0]] * 4
    assert not torch.equal(values[0], values[-1]), "what linears read follows the steps"


@pytest.mark.parametrize("layout", ["zero0", "zero1", "zero3", "hfsdp 2x1"])
def test_parameters_and_tables_are_refilled_in_place(ranks: Ranks, layout: str) -> None:
    """Objects, tables and the storages of codes stay for good; their bytes follow the weights."""
    ranks(2).run(_memory_over_steps, layout)


def _not_finite(layout: str, name: str) -> None:
    recipe = recipe_for(name, "weights")
    values = ((torch.nan, 0), (torch.nan, 1), (torch.inf, 0), (-torch.inf, 1))
    # A backend that loses a NaN of one rank does so in one half of what it reduces.
    for (bad, owner), place in itertools.product(values, range(2)):
        net = fully_shard(
            Products(((64, 64),) * 2), mp_policy=policy_for(recipe), **options_of(layout)
        )
        weight = list(net.parameters())[place]
        net(torch.ones(1))
        with torch.no_grad():
            # A row of one rank; under zero0 both ranks have it.
            full = full_tensor(weight).clone()
            full[40 * owner, 3] = bad
            weight.copy_from_full_(full) if layout != "zero0" else weight.to_local().copy_(full)
        mark_main_weights_changed(net)
        assert net(torch.ones(1)).isnan(), (bad, owner)
        with summon(net):
            _, record = quantized_parameters(net)[f"layers.{place}.weight"]
            decoded = record.unsharded.decode()
        # The scales of nvfp4 are in units of one that the whole weight has.
        tile = None if name == "nvfp4" else recipe.weight.tile
        rows, cols = tile or (64, 64)
        row = 40 * owner // rows * rows
        assert decoded[row : row + rows, :cols].isnan().all(), "the tile that has it"
        assert decoded.isnan().sum() == min(rows, 64) * min(cols, 64)


@pytest.mark.parametrize("name", RECIPES)
def test_a_value_that_is_not_finite_makes_its_tile_nan_on_every_rank(
    ranks: Ranks, name: str
) -> None:
    """Whichever rank had it, and never a finite code."""
    for layout in ("zero3", "zero0"):
        ranks(2).run(_not_finite, layout, name)


def _attempts() -> None:
    net = shard(Net(), policy_for("fp8_block"))
    x = batch(0, 0, dist.get_rank())
    attempts: dict[str, Callable[[nn.Parameter], object]] = {
        "add_": lambda p: p.detach().add_(1),
        "mul_": lambda p: p.detach().mul_(2),
        "elements": lambda p: p.detach().__setitem__(0, 1.0),
        "data": lambda p: setattr(p, "data", torch.zeros(p.shape, dtype=p.dtype)),
    }
    before = net(x).detach()
    for attempt in attempts.values():
        with summon(net), torch.no_grad():
            parameter = net.blocks[1].up.weight
            with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight.*FusedAdam"):
                attempt(parameter)
    with summon(net):
        parameter = net.blocks[1].up.weight
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.weight'.*FusedAdam"):
            optimizer.step()
    assert torch.equal(net(x).detach(), before)


def test_writes_to_a_quantized_parameter_are_refused(ranks: Ranks) -> None:
    """In-place arithmetic, elements, .data and optimizers; the message names the sharded one."""
    ranks(2).run(_attempts)


def _in_small_pieces() -> None:
    full = agreement.MAX_PIECE_NBYTES
    try:
        # A piece ends within a group, and in the middle of a weight.
        agreement.MAX_PIECE_NBYTES = 4 * 3
        recipe = recipe_for("nvfp4", "weights")
        net = fully_shard(Products(), mp_policy=policy_for(recipe))
        assert _check_all(net, recipe, torch.bfloat16) > 3
    finally:
        agreement.MAX_PIECE_NBYTES = full


def test_maxima_travel_in_pieces(ranks: Ranks) -> None:
    """Many maxima take several all-reduces, with the same result."""
    ranks(2).run(_in_small_pieces)


class Attention(nn.Module):
    """A module that reads the weights of its linears by other operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32, bias=False)
        self.second = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by both at once, and by one again."""
        both = torch.cat([self.first.weight, self.second.weight])
        return (F.linear(x, both) @ both * self.first.weight.norm()).float().square().mean()


def _other_operators() -> None:
    recipe = recipe_for("mxfp8", "all")
    net = fully_shard(Attention(), mp_policy=policy_for(recipe))
    reference = Attention().bfloat16()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(quantize(parameter, recipe).decode())
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss, wanted = net(x), reference(x)
    assert torch.equal(loss, wanted)
    loss.backward()
    wanted.backward()
    for parameter, plain in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full_tensor(parameter.grad), plain.grad.float())


def test_other_operators_read_decoded_values(ranks: Ranks) -> None:
    """Forward and gradients are those of plain torch on the decoded weights."""
    ranks(2).run(_other_operators)


def _frozen(strategy: int) -> None:
    net, recipe = Net(), recipe_for("mxfp8", "all")
    for block in net.blocks:
        block.up.requires_grad_(False)
    before = [block.up.weight.detach().clone() for block in net.blocks]
    net = fully_shard_model(net, ["Block"], mp_policy=policy_for(recipe), strategy=strategy)
    assert {g.is_trainable for g, _ in quantized_parameters(net).values()} == {True, False}
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        net(batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _check_all(net, recipe, torch.bfloat16) == 4
    for block, weight in zip(net.blocks, before, strict=True):
        assert torch.equal(full_tensor(block.up.weight), weight)


@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_frozen_weights_are_quantized_apart(ranks: Ranks, strategy: int) -> None:
    """They keep their codes while those of the others follow the steps."""
    ranks(2).run(_frozen, strategy)


def _backward_after_a_refresh(layout: str) -> None:
    grads = []
    for is_refreshed in (False, True):
        net = shard(Net(), policy_for("mxfp8"), **options_of(layout))
        net.blocks[0].compile(backend="aot_eager")
        losses = []
        for _ in range(2):
            losses.append(net(batch(0, 0, dist.get_rank())))
            if is_refreshed:
                mark_main_weights_changed(net)
        torch.stack(losses).sum().backward()
        grads.append([full_tensor(p.grad) for p in net.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("layout", ["zero0", "zero3"])
def test_graphs_of_earlier_forwards_survive_a_refresh(
    ranks: Ranks, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled ones save codes and tables, and take no refill for a change of theirs."""
    # Torch counts writes of its own operators, and none of compiled kernels.
    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    ranks(2).run(_backward_after_a_refresh, layout)


def test_every_recipe_and_operand_has_a_name() -> None:
    """The lists that the tests go through are those of the package."""
    assert RECIPES == ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
    assert {recipe_for(n, o).input is None for n in RECIPES for o in OPERANDS} == {True, False}
