"""Training with quantized compute weights, against one process that quantizes whole weights."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from megafsdp import full_state_dict, load_full_state_dict, materialize, summon_full_params
from megafsdp.buffer.comm.collectives import all_reduce, record_collectives
from megafsdp.fsdp.weight_sync import roll_histories
from megafsdp.quantize.delayed import DelayedState
from tests.fsdp.quantized import (
    OPERANDS,
    RECIPES,
    WIDTH,
    Net,
    assert_equal,
    batch,
    optimizer_of,
    options_of,
    policy_for,
    quantize,
    quantize_layers,
    quantized_parameters,
    recipe_for,
    roll_layers,
    shard,
    train,
    trained_alone,
)
from tests.pairwise import each_value, gate_of, pairwise
from tests.ranks import Ranks

PRODUCT = "quantized"
NUM_STEPS = 3
# Sums over two ranks do not depend on their order.
ON_TWO = (
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero3 free",
    "zero3 keep",
    "hsdp 2x1",
    "hsdp 1x2",
    "hfsdp 2x1",
    "hfsdp 1x2",
)
ON_FOUR = ("hsdp 2x2", "hfsdp 2x2", "zero3 neighbours")
# Layouts move the bytes of all formats alike: each has every operand and loop, and some recipes.
OF_LAYOUTS = pairwise(list(itertools.product(ON_TWO, OPERANDS, (1, 3))))
SELECTED = [
    (layout, name, operands, num_microbatches)
    for (layout, operands, num_microbatches), name in zip(
        OF_LAYOUTS, itertools.cycle(RECIPES), strict=False
    )
]


def _trained(
    layout: str, name: str, operands: str, num_steps: int, num_microbatches: int
) -> dict[str, torch.Tensor]:
    policy = policy_for(recipe_for(name, operands))
    net = shard(Net(), policy, **options_of(layout))
    return train(net, num_steps, num_microbatches)


@pytest.mark.parametrize(
    ("layout", "name", "operands", "num_microbatches"),
    gate_of(list(itertools.product(ON_TWO, RECIPES, OPERANDS, (1, 3))), PRODUCT, SELECTED),
)
def test_two_ranks_train_as_one_process_that_quantizes_whole_weights(
    ranks: Ranks, layout: str, name: str, operands: str, num_microbatches: int
) -> None:
    """Main weights are equal bit by bit, whatever is gathered, kept or divided."""
    wanted = trained_alone(name, operands, NUM_STEPS, 2, num_microbatches)
    for found in ranks(2).run(_trained, layout, name, operands, NUM_STEPS, num_microbatches):
        assert_equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "operands"),
    gate_of(
        list(itertools.product(RECIPES, OPERANDS)),
        PRODUCT,
        selected=[("mxfp8", "all"), ("fp8_delayed", "all")],
    ),
)
def test_many_steps_stay_those_of_one_process(ranks: Ranks, name: str, operands: str) -> None:
    """Twenty steps, bit by bit."""
    wanted = trained_alone(name, operands, 20, 2, 1)
    for found in ranks(2).run(_trained, "zero3", name, operands, 20, 1):
        assert_equal(found, wanted)


def _gathers_codes_or_values(
    layout: str, name: str, operands: str, kind: type[nn.Module] = Net
) -> list[dict[str, torch.Tensor]]:
    recipe = recipe_for(name, operands)
    states = []
    for policy, is_engine in ((policy_for(recipe), True), (policy_for(None), False)):
        net = kind() if is_engine else quantize_layers(kind(), recipe)
        shard(net, policy, type(net.blocks[0]), **options_of(layout))
        # Not frozen ones: a step marks all that an optimizer has as changed.
        optimizer = optimizer_of([p for p in net.parameters() if p.requires_grad])
        for step in range(NUM_STEPS):
            if not is_engine:
                roll_layers(net, full_state_dict(net))
            net(batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_state_dict(net))
    if kind is Net:
        assert_equal(*states)
    return states


@pytest.mark.parametrize(
    ("layout", "name", "operands"),
    gate_of(
        list(itertools.product(ON_FOUR, RECIPES, OPERANDS)),
        PRODUCT,
        each_value(list(itertools.product(ON_FOUR, RECIPES, OPERANDS))),
    ),
)
def test_gathered_codes_are_those_of_gathered_values(
    ranks: Ranks, layout: str, name: str, operands: str
) -> None:
    """On four ranks as if bf16 was gathered, and each rank quantized the whole for itself."""
    ranks(4).run(_gathers_codes_or_values, layout, name, operands)


class HalfFrozen(Net):
    """The net with half of its linears frozen."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)


def _delays_of_frozen_layers() -> None:
    found, wanted = _gathers_codes_or_values("zero3", "fp8_delayed", "all", HalfFrozen)
    for key, initial in HalfFrozen().state_dict().items():
        assert torch.equal(found[key], wanted[key]), key
        assert torch.equal(found[key], initial) == (".up." in key), key


def test_frozen_layers_scale_inputs_by_what_all_ranks_recorded(ranks: Ranks) -> None:
    """Delayed scaling goes on though their weights do not change: inputs and gradients do."""
    ranks(2).run(_delays_of_frozen_layers)


class FewRows(nn.Module):
    """Linears of one row and of three, beside one of five: less than one for each of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 3), (3, 5), (5, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squared outputs less one."""
        for block in self.blocks:
            x = block(x)
        return (x.float() - 1).square().mean()


def _few_rows(operands: str) -> list[list[tuple[str, str]]]:
    found, wanted = _gathers_codes_or_values("zero3", "fp8_block", operands, FewRows)
    for key, initial in FewRows().state_dict().items():
        assert torch.equal(found[key], wanted[key]) and not torch.equal(found[key], initial), key
    net = shard(FewRows(), policy_for(recipe_for("fp8_block", operands)), nn.Linear)
    assert len(quantized_parameters(net)) == 3
    num_rows = [p.detach().to_local().shape[0] for p in net.parameters()]
    assert 0 in num_rows if dist.get_rank() == 3 else sum(num_rows) > 0
    optimizer, events = optimizer_of(list(net.parameters())), []
    for step in range(3):
        with record_collectives() as record:
            net(batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        events.append(record.events)
    assert ("all_reduce", "maxima") in events[1] and events[1] == events[2]
    return events


@pytest.mark.parametrize("operands", OPERANDS)
def test_ranks_without_rows_take_part_in_every_collective(ranks: Ranks, operands: str) -> None:
    """Rows fewer than ranks train as where bf16 is gathered; all ranks issue the same each step."""
    first, *others = ranks(4).run(_few_rows, operands)
    assert all(other == first for other in others)


def _rounds_by_chance(layout: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(7 + dist.get_rank())
    return train(shard(Net(), policy_for("nvfp4"), **options_of(layout)), NUM_STEPS)


def test_stochastic_rounding_is_the_same_under_every_strategy(ranks: Ranks) -> None:
    """Each rank draws by its own generator, whatever is gathered when."""
    first, *others = [ranks(2).run(_rounds_by_chance, kind)[0] for kind in ("zero3", *ON_TWO[:3])]
    for other in others:
        assert_equal(other, first)
    plain = ranks(2).run(_trained, "zero3", "nvfp4", "all", NUM_STEPS, 1)[0]
    assert any(not torch.equal(first[name], plain[name]) for name in first), "it rounds by chance"


class Recomputed(Net):
    """The net with its blocks' activations recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return (self.head(x).float() - 1).square().mean()


def _variants(name: str) -> list[dict[str, torch.Tensor]]:
    policy = policy_for(recipe_for(name, "all"))
    states = [train(shard(Recomputed(), policy), NUM_STEPS)]
    net = shard(Net(), policy)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    states.append(train(net, NUM_STEPS))
    with torch.device("meta"):
        net = Net()
    shard(net, policy)
    materialize(net)
    load_full_state_dict(net, Net().state_dict())
    states.append(train(net, NUM_STEPS))
    return states


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "mxfp8" else pytest.mark.matrix(PRODUCT)) for n in RECIPES],
)
def test_recomputed_compiled_and_meta_models_train_alike(ranks: Ranks, name: str) -> None:
    """Activations that run again, blocks under the compiler, and parameters without values."""
    wanted = trained_alone(name, "all", NUM_STEPS, 2, 1)
    for states in ranks(2).run(_variants, name):
        for found in states:
            assert_equal(found, wanted)


def _is_quantized(name: str) -> tuple[int, bool]:
    net = shard(Net(), policy_for(recipe_for(name, "weights")))
    plain = shard(Net(), policy_for(None))
    x = batch(0, 0, 0)
    return len(quantized_parameters(net)), bool(torch.equal(net(x), plain(x)))


def test_the_weights_of_linears_are_quantized_and_count(ranks: Ranks) -> None:
    """Those of a format that takes them; the loss is another than that of bf16."""
    for name in RECIPES:
        num = 5 if name == "fp8_block" else 4
        assert ranks(2).run(_is_quantized, name) == [(num, False)] * 2


def _by_load(net: nn.Module, values: dict[str, torch.Tensor]) -> None:
    load_full_state_dict(net, values)


def _by_torch(net: nn.Module, values: dict[str, torch.Tensor]) -> None:
    set_model_state_dict(net, values, options=StateDictOptions(full_state_dict=True))


def _by_hand(net: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(100)


def _takes_larger_weights(layout: str, name: str) -> None:
    recipe = recipe_for(name, "all")
    for write in (_by_load, _by_torch, _by_hand):
        net = shard(Net(), policy_for(recipe), **options_of(layout))
        # Histories of the weights that are discarded, the last of which no forward has read.
        train(net, 2)
        values = {key: 100 * value for key, value in full_state_dict(net).items()}
        write(net, dict(values))
        with torch.no_grad():
            net(batch(9, 0, dist.get_rank()))
        with summon_full_params(net):
            for key, (_, record) in quantized_parameters(net).items():
                wanted = quantize(values[key].bfloat16(), recipe)
                assert torch.equal(record.unsharded.codes, wanted.codes), (write, key)


@pytest.mark.parametrize(
    ("layout", "name"), [("zero3", "fp8_delayed"), ("hfsdp 1x2", "fp8_delayed"), ("zero3", "mxfp8")]
)
def test_weights_that_no_step_has_made_are_not_clamped(
    ranks: Ranks, layout: str, name: str
) -> None:
    """Set by us, by torch or by hand, they are a hundred times larger, and so are their scales."""
    ranks(2).run(_takes_larger_weights, layout, name)


def _histories(net: nn.Module) -> dict[str, DelayedState]:
    found = {}
    for name, (group, record) in quantized_parameters(net).items():
        found[name] = group.compute_weight.scales.states[group.parameters.index(record)]
    return found


def _frozen_weights_roll(layout: str) -> None:
    net = Net()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("norm" in name)
    net = shard(net, policy_for("fp8_delayed"), **options_of(layout))
    optimizer = optimizer_of([p for p in net.parameters() if p.requires_grad])
    states = _histories(net)
    assert states
    recorded: dict[str, list[torch.Tensor]] = {name: [] for name in states}
    for step in range(3):
        with record_collectives() as record:
            for microbatch in range(2):
                net(batch(step, microbatch, dist.get_rank())).backward()
        assert [label for _, label in record.events].count("maxima") == 1
        for name, state in states.items():
            pending = state.pending().clone()
            all_reduce(pending, op="max")
            assert pending.count_nonzero() == 2
            recorded[name].append(pending.view(torch.float32))
        optimizer.step()
        optimizer.zero_grad()
    # As a save does, whose file has what the next forward scales by.
    roll_histories(net)
    with record_collectives() as record, torch.no_grad():
        net(batch(3, 0, dist.get_rank()))
    assert "maxima" not in [label for _, label in record.events]
    for name, state in states.items():
        wanted = torch.stack(recorded[name], dim=1)
        assert torch.equal(state.input_history[-4:], torch.cat((torch.zeros(1), wanted[0])))
        assert torch.equal(state.grad_history[-4:], torch.cat((torch.zeros(1), wanted[1])))
        assert state.weight_history.count_nonzero() == 1, "the weight does not change"


@pytest.mark.parametrize("layout", ["zero3", "hfsdp 1x2"])
def test_histories_of_frozen_weights_roll_once_a_step(ranks: Ranks, layout: str) -> None:
    """Of all quantized weights, where a step changes others: as adapters are trained."""
    ranks(2).run(_frozen_weights_roll, layout)
