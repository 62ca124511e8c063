"""Parameters that quantize_ has quantized: in a plain model, and under torch's fully_shard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from benchmarks.live_bytes import LiveBytes
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.quantize import formats, tensor
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.shard import QuantizedShard
from megafsdp.quantize.tensor import QuantizedTensor
from tests.fsdp.torch_sharded import (
    WIDTH,
    assert_codes_of,
    batch,
    mesh_of,
    new_model,
    shard,
    sharded,
    shards_of,
)
from tests.pairwise import gate_of, pairwise
from tests.ranks import Ranks

MESHES = [(1,), (2,), (2, 1), (1, 2)]
PRODUCT = [(recipe, sizes) for recipe in RECIPE_NAMES for sizes in MESHES]
# Shards and replicas of every recipe; one rank and one replica are less.
SELECTED = [case for case in PRODUCT if case[0] == "nvfp4" or case[1] in ((2,), (2, 1))]


def _losses_and_grads(model: nn.Module, num_steps: int) -> list[torch.Tensor]:
    """Return outputs and gradients of some microbatches, the same on every rank."""
    found = []
    for step in range(num_steps):
        output = model(batch(step))
        output.float().pow(2).mean().backward()
        grads = [p.grad for p in model.parameters()]
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        found += [output.detach(), *(g.float() for g in full if g is not None)]
        model.zero_grad()
    return found


def _equals_one_process(recipe: str, sizes: tuple[int, ...]) -> None:
    alone = megafsdp.quantize_(new_model(), recipe)
    model = sharded(recipe, *sizes)
    torch.manual_seed(1)
    expected = _losses_and_grads(alone, 2)
    torch.manual_seed(1)
    found = _losses_and_grads(model, 2)
    assert expected[0].abs().sum() > 0
    for ours, theirs in zip(found, expected, strict=True):
        # Two equal gradients in bf16: their sum and its half are exact.
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("recipe", "sizes"), gate_of(PRODUCT, "quantized", SELECTED))
def test_forward_and_backward_equal_one_process(
    ranks: Ranks, recipe: str, sizes: tuple[int, ...]
) -> None:
    """Bit for bit, with one rank, replicas and shards, in the first step and later."""
    ranks(sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]).run(
        _equals_one_process, recipe, sizes
    )


def _codes_are_those_of_the_whole(recipe: str, num_ranks: int) -> None:
    model = new_model()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = {name: id(p) for name, p in shard(model, mesh_of(num_ranks)).named_parameters()}
    placements = {n: (p.placements, p.device_mesh) for n, p in model.named_parameters()}
    with record_collectives() as record:
        assert megafsdp.quantize_(model, recipe) is model
    is_shared = recipe_of(recipe).weight.has_shared_scale((1, 1))
    assert record.calls == ({"all_reduce": 1} if is_shared and num_ranks > 1 else {})
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert set(shards_of(model)) == {"0.weight", "3.weight"}
    for name, parameter in model.named_parameters():
        assert (parameter.placements, parameter.device_mesh) == placements[name]
        if shard_of(parameter) is not None:
            assert_codes_of(parameter, full[name], recipe)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_codes_are_those_of_the_whole_weight(ranks: Ranks, recipe: str, num_ranks: int) -> None:
    """After one all-reduce at most; parameters, meshes and placements stay."""
    ranks(num_ranks).run(_codes_are_those_of_the_whole, recipe, num_ranks)


def _gathers_bytes(recipe: str, num_ranks: int) -> None:
    model = sharded(recipe, num_ranks)
    model(batch())
    found = shards_of(model)["3.weight"]
    mesh = mesh_of(num_ranks)
    inputs, metadata = found.fsdp_pre_all_gather(
        mesh, torch.Size((256, 256)), (256, 1), model, None
    )
    assert metadata == torch.Size((256, 256))
    assert all(type(each) is torch.Tensor and each.dtype == torch.uint8 for each in inputs)
    assert inputs[0].data_ptr() == found.codes.data_ptr()
    form = recipe_of(recipe).weight
    codes, scales = (
        each.nbytes
        for each in (
            inputs[0],
            torch.cat([inputs[0].new_empty(0), *(each.view(-1) for each in inputs[1:])]),
        )
    )
    assert codes == 256 * 256 // num_ranks // form.codes_per_byte
    tiles = 0 if form.tile is None else 256 * 256 // num_ranks // (form.tile[0] * form.tile[1])
    assert scales == tiles * (4 if recipe == "fp8_block" else 1)
    again, _ = found.fsdp_pre_all_gather(mesh, torch.Size((256, 256)), (256, 1), model, None)
    assert all(a is b for a, b in zip(inputs, again, strict=True))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_gathers_take_codes_and_scales_of_rows(ranks: Ranks, recipe: str) -> None:
    """Plain bytes, always the same tensors; the metadata is a shape."""
    ranks(2).run(_gathers_bytes, recipe, 2)


def _nothing_is_made(recipe: str, num_ranks: int) -> None:
    model = sharded(recipe, num_ranks)
    faces: list[tuple[int, int, int]] = []
    model[3].register_forward_pre_hook(
        lambda module, _: faces.append(
            (id(module.weight), id(module.weight.recipe), module.weight.codes.data_ptr())
        )
    )
    made: list[str] = []

    def counted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            made.append(name)
            return original(*args, **kwargs)

        return run

    model(batch()).sum().backward()
    original, wrapper = formats.WeightFormat.__init__, tensor.empty_wrapper
    formats.WeightFormat.__init__ = counted("format", original)  # type: ignore[method-assign]
    tensor.empty_wrapper = counted("wrapper", wrapper)
    try:
        for _ in range(3):
            model(batch()).sum().backward()
        assert made == []
        copy.deepcopy(shards_of(model)["3.weight"])
        assert made
    finally:
        formats.WeightFormat.__init__ = original  # type: ignore[method-assign]
        tensor.empty_wrapper = wrapper
    assert len({face[:2] for face in faces}) == 1
    assert faces[0][1] == id(shards_of(model)["3.weight"].recipe)


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), pairwise([(r, n) for r in RECIPE_NAMES for n in (1, 2)])
)
def test_steps_make_no_tensors_and_no_formats(ranks: Ranks, recipe: str, num_ranks: int) -> None:
    """The compute weight and the recipe are the same objects in each forward and backward."""
    ranks(num_ranks).run(_nothing_is_made, recipe, num_ranks)


def _gathers_write_buffers_alone(recipe: str, num_ranks: int) -> None:
    model = sharded(recipe, num_ranks)
    layer, own = model[3], shards_of(model)["3.weight"]
    seen: list[tuple[object, ...]] = []
    results: list[object] = []
    hook = type(own).fsdp_post_all_gather

    def noted(self: QuantizedShard, *args: Any, **kwargs: Any) -> object:
        result = hook(self, *args, **kwargs)
        results.append(result if kwargs.get("out") is not None else ())
        return result

    def look(module: nn.Module, _: object) -> None:
        weight = module.weight
        assert not _process_groups_of(weight) and weight.recipe is own.recipe
        others = {key: id(value) for key, value in vars(weight).items()}
        seen.append((id(weight), weight.codes.data_ptr(), weight.table.data_ptr(), others))

    layer.register_forward_pre_hook(look)
    QuantizedShard.fsdp_post_all_gather = noted  # type: ignore[assignment, method-assign]
    try:
        for step in range(5):
            # In backward the same object is filled again.
            model(batch(step)).sum().backward()
    finally:
        QuantizedShard.fsdp_post_all_gather = hook  # type: ignore[method-assign]
    assert len(seen) == 5 and all(each[0] == seen[0][0] for each in seen)
    assert all(each[3] == seen[0][3] for each in seen), "no attribute is another object"
    # Each of both quantized weights, in five forwards and backwards.
    assert len(results) > 10 and results.count(()) == 2 and results.count(None) == len(results) - 2
    assert not _process_groups_of(own) and not _process_groups_of(copy.deepcopy(own))


def _process_groups_of(tensor: object) -> list[object]:
    """Return the process groups among all that a tensor's attributes lead to, main weight apart."""
    found, waiting, met = [], [v for k, v in vars(tensor).items() if k != "main"], set()
    while waiting:
        each = waiting.pop()
        if id(each) in met:
            continue
        met.add(id(each))
        if isinstance(each, torch.distributed.ProcessGroup):
            found.append(each)
        elif isinstance(each, list | tuple):
            waiting += each
        else:
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [getattr(each, name) for name in slots if hasattr(each, name)]
            waiting += getattr(each, "__dict__", {}).values()
    return found


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), pairwise([(r, n) for r in RECIPE_NAMES for n in (1, 2)])
)
def test_later_gathers_write_buffers_and_return_nothing(
    ranks: Ranks, recipe: str, num_ranks: int
) -> None:
    """Over five steps the weight and all its attributes are the same, without process groups."""
    ranks(num_ranks).run(_gathers_write_buffers_alone, recipe, num_ranks)


def _larger_values(recipe: str, num_ranks: int) -> None:
    model, alone = sharded(recipe, num_ranks), megafsdp.quantize_(new_model(), recipe)
    model(batch()), alone(batch())
    values = {
        name: 100 * p.detach().decode(torch.float32)
        for name, p in alone.named_parameters()
        if isinstance(p, QuantizedTensor)
    }
    given = dict(values)
    for each in (model, alone):
        with record_collectives() as record:
            megafsdp.requantize_(each, given)
        assert record.calls.get("all_reduce", 0) <= 1
    torch.manual_seed(3)
    expected = alone(batch())
    torch.manual_seed(3)
    assert torch.equal(model(batch()), expected) and expected.abs().sum() > 0
    for name, parameter in model.named_parameters():
        if name in values:
            assert_codes_of(parameter, values[name], recipe)


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), pairwise([(r, n) for r in RECIPE_NAMES for n in (1, 2)])
)
def test_new_values_are_seen_by_the_next_forward(ranks: Ranks, recipe: str, num_ranks: int) -> None:
    """A hundred times larger, with scales to match, on all ranks."""
    ranks(num_ranks).run(_larger_values, recipe, num_ranks)


def _other_shards(recipe: str, num_ranks: int) -> None:
    """As after a load with ``assign=True``: other tensors are gathered into the same weight."""
    model, other = sharded(recipe, num_ranks), shard(new_model(), mesh_of(num_ranks))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(100)
    megafsdp.quantize_(other, recipe)
    model(batch())
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    for step in range(2):
        torch.manual_seed(step)
        found = model(batch(step))
        torch.manual_seed(step)
        assert torch.equal(found, other(batch(step))) and found.abs().sum() > 0


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), pairwise([(r, n) for r in RECIPE_NAMES for n in (1, 2)])
)
def test_parameters_may_be_replaced_after_the_first_forward(
    ranks: Ranks, recipe: str, num_ranks: int
) -> None:
    """Codes and scales are those of the new ones, of one rank and of two."""
    ranks(num_ranks).run(_other_shards, recipe, num_ranks)


def _nan_is_not_lost(recipe: str, rank_with_nan: int) -> None:
    model = shard(new_model(), mesh_of(2))
    weight = model[3].weight
    assert isinstance(weight, DTensor)
    if torch.distributed.get_rank() == rank_with_nan:
        with torch.no_grad():
            weight.to_local()[0, 0] = torch.nan
    megafsdp.quantize_(model, recipe)
    decoded = shards_of(model)["3.weight"].decode()
    # One scale for all rows: the others cannot be told from wrong ones.
    is_here = torch.distributed.get_rank() == rank_with_nan
    is_shared = recipe_of(recipe).weight.has_shared_scale((1, 1))
    assert bool(decoded.isnan().any()) == (is_here or is_shared)
    assert model(batch()).isnan().any()


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_of_any_rank_reaches_the_output_of_all(ranks: Ranks, recipe: str, rank: int) -> None:
    """Though some backends lose it in a maximum of numbers."""
    ranks(2).run(_nan_is_not_lost, recipe, rank)


def _evaluates_first(recipe: str) -> None:
    alone, model = megafsdp.quantize_(new_model(), recipe), sharded(recipe, 2)
    for step in range(3):
        with torch.inference_mode():
            found = model(batch(step))
        with torch.no_grad():
            assert torch.equal(found, alone(batch(step))) and found.abs().sum() > 0


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_evaluations_in_inference_mode_may_come_first(ranks: Ranks, recipe: str) -> None:
    """Where torch makes the unsharded parameters in this mode, and gathers into them again."""
    # On one rank torch fails with plain parameters too.
    ranks(2).run(_evaluates_first, recipe)


def _few_rows() -> None:
    """Rank 2 has fewer rows than the others, which travel filled up."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(32, 16, bias=False)).bfloat16(), mesh_of(3)
    alone = megafsdp.quantize_(copy.deepcopy(model), "fp8_current")
    fully_shard(model, mesh=mesh)
    megafsdp.quantize_(model, "fp8_current")
    optimizer = megafsdp.FusedAdam(model.parameters(), lr=1e-2)
    other = megafsdp.FusedAdam(alone.parameters(), lr=1e-2)
    x = batch()[:, :32]
    for _ in range(3):
        results = []
        for each, steps in ((model, optimizer), (alone, other)):
            output = each(x)
            output.float().sum().backward()
            steps.step()
            steps.zero_grad()
            results.append(output)
        assert torch.equal(*results)
    assert shards_of(model)["0.weight"].shape[0] == (6, 6, 4)[torch.distributed.get_rank()]


def test_one_scale_allows_uneven_rows(ranks: Ranks) -> None:
    """Also after FSDP2 has replaced what a short rank has by its own, filled up."""
    ranks(3).run(_few_rows)


def _keeps_no_shadow(recipe: str) -> None:
    """After the first forward nothing has the bytes of the parameter's own dtype."""
    model = sharded(recipe, 2)
    model(batch())
    weight = model[3].weight
    state = fully_shard.state(model[3])  # type: ignore[attr-defined]
    (parameter,) = [p for p in state._fsdp_param_group.fsdp_params if p.sharded_param is weight]
    kept = parameter._sharded_param_data
    assert isinstance(kept, QuantizedShard) and kept.shape == (256 * 128,)
    assert kept.codes.data_ptr() == shards_of(model)["3.weight"].codes.data_ptr()
    assert kept.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_no_copy_in_the_old_dtype_stays(ranks: Ranks, recipe: str) -> None:
    """Torch keeps a flat alias of each parameter for good."""
    ranks(2).run(_keeps_no_shadow, recipe)


def _live_bytes(recipe: str, num_layers: int, num_ranks: int) -> tuple[int, int, int]:
    """Return the peak of a forward, what one keeps for backward, and the peak of that."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(num_layers)]).bfloat16()
    megafsdp.quantize_(shard(model, mesh_of(num_ranks)), recipe)
    x = torch.ones(32, 256, dtype=torch.bfloat16)
    with LiveBytes() as live:
        with torch.no_grad():
            model(x)
            live.peak = 0
            model(x)
        peak = live.peak
        assert live.total() == 0
        for _ in range(2):
            output, kept = model(x), live.total()
            live.peak = 0
            output.sum().backward()
            of_backward = live.peak
            del output
            model.zero_grad()
            assert live.total() == 0
    return peak, kept, of_backward


def _bytes_by_layers(recipe: str, num_ranks: int) -> None:
    found = {n: _live_bytes(recipe, n, num_ranks) for n in (2, 3, 4)}
    assert found[2][0] == found[3][0] == found[4][0] > 0
    if num_ranks > 1:
        # When torch frees what it has exchanged depends on the other rank.
        return
    # Quantized inputs of each layer, and its gradient in bf16.
    form = recipe_of(recipe).input
    assert form is not None
    inputs = found[4][1] - found[3][1]
    assert found[3][1] - found[2][1] == inputs and inputs < 2 * 32 * 256
    gradient = 2 * 256 * 256
    assert found[4][2] - found[3][2] == found[3][2] - found[2][2] == gradient


@pytest.mark.parametrize(
    ("recipe", "num_ranks"), [*((r, 1) for r in RECIPE_NAMES), ("fp8_block", 2), ("nvfp4", 2)]
)
def test_what_lives_does_not_grow_with_layers(ranks: Ranks, recipe: str, num_ranks: int) -> None:
    """Nothing stays of a gather; a backward has quantized inputs and gradients besides."""
    ranks(num_ranks).run(_bytes_by_layers, recipe, num_ranks)


def _mixed_precision() -> None:
    """fp32 parameters, computed in bf16 and gathered as codes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = new_model(torch.float32)
    fully_shard(model, mesh=mesh_of(2), mp_policy=policy)
    megafsdp.quantize_(model, "fp8_block", ("0",))
    assert set(shards_of(model)) == {"3.weight"}
    seen = []
    model[3].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    output = model(batch())
    output.sum().backward()
    assert output.dtype == torch.bfloat16 and seen == [torch.bfloat16]
    assert model[3].weight.dtype == torch.float32 and model[3].weight.grad.dtype == torch.float32


def test_the_policy_of_torch_says_what_is_computed_in(ranks: Ranks) -> None:
    """The compute weight has its dtype, parameter and gradient their own."""
    ranks(2).run(_mixed_precision)


def _misaligned() -> None:
    model = nn.Sequential(nn.Linear(128, 192), nn.Linear(192, 256)).bfloat16()
    shard(model, mesh_of(2))
    before = [p.full_tensor() for p in model.parameters()]
    with record_collectives() as record, pytest.raises(ValueError) as raised:
        megafsdp.quantize_(model, "fp8_block")
    assert record.calls == {} and shards_of(model) == {}
    for part in ("'0.weight'", "a multiple of 256", "fp8_current or fp8_delayed"):
        assert part in str(raised.value)
    assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()]))
    megafsdp.quantize_(model, "fp8_current")


def test_parts_of_tiles_are_refused_before_anything_is_exchanged(ranks: Ranks) -> None:
    """On all ranks, naming the divisor and the recipes that need none."""
    ranks(2).run(_misaligned)


def _no_rows() -> None:
    model = shard(nn.Sequential(nn.Linear(32, 16)), mesh_of(1))
    megafsdp.quantize_(model, "fp8_current")
    model = fully_shard(nn.Sequential(nn.Linear(32, 16)), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="names of parameters, modules"):
        megafsdp.quantize_(model, "fp8_current", ("2",))
    with pytest.raises(ValueError, match="one of the recipes"):
        megafsdp.quantize_(model, "fp8")
    with pytest.raises(ValueError, match="weights of linear layers"):
        megafsdp.quantize_(model, "mxfp8", ("Linear",))


def _wrong_times() -> None:
    model = sharded("mxfp8", 1)
    with pytest.raises(RuntimeError, match=r"requantize_\(model, values\)"):
        megafsdp.quantize_(model, "mxfp8")
    model = shard(new_model(), mesh_of(1))
    model(batch())
    with pytest.raises(RuntimeError, match="before the first forward"):
        megafsdp.quantize_(model, "mxfp8")
    ours = megafsdp.fully_shard(new_model(), mesh=mesh_of(1))
    with pytest.raises(RuntimeError, match=r"MixedPrecisionPolicy\(recipe="):
        megafsdp.quantize_(ours, "mxfp8")
    plain = megafsdp.quantize_(new_model(), "mxfp8")
    with pytest.raises(RuntimeError, match="Shard the model first"):
        fully_shard(plain, mesh=mesh_of(1))
    model = sharded("mxfp8", 1)
    codes = shards_of(model)["3.weight"].codes.clone()
    with pytest.raises(ValueError, match="names of quantized parameters"):
        megafsdp.requantize_(model, {"1.weight": torch.zeros(256)})
    with pytest.raises(ValueError, match="a DTensor like the parameter"):
        megafsdp.requantize_(model, {"3.weight": torch.zeros(128, 256)})
    with pytest.raises(ValueError, match=r"a floating-point dtype, got torch.int32.*'3.weight'"):
        megafsdp.requantize_(model, {"3.weight": torch.zeros(256, 256, dtype=torch.int32)})
    assert torch.equal(shards_of(model)["3.weight"].codes, codes)
    for unit in (each for each in model.modules() if isinstance(each, FSDPModule)):
        unit.unshard()
    optimizer = torch.optim.SGD([model.get_parameter("3.weight")], lr=0.1)
    with pytest.raises(RuntimeError, match=r"sharded parameter '3\.weight'.*outside of forward"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"shows none.*megafsdp.quantize_\(\) first"):
        megafsdp.requantize_(new_model(), {"3.weight": torch.zeros(256, 256)})


def test_wrong_names_are_refused(ranks: Ranks) -> None:
    """Recipes and parameters that there are not, and a model without a weight to quantize."""
    ranks(1).run(_no_rows)


def test_calls_at_the_wrong_time_name_the_right_one(ranks: Ranks) -> None:
    """A second time, after the first forward, on units of megafsdp, before torch shards."""
    ranks(1).run(_wrong_times)


def test_a_plain_model_keeps_its_parameter_objects() -> None:
    """Tied ones too, and what was written on them."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    model[1].weight = model[0].weight
    weight = model[0].weight
    weight.mark = "kept"
    plain = weight.detach().clone()
    megafsdp.quantize_(model, "mxfp8")
    assert model[0].weight is weight and model[1].weight is weight
    assert isinstance(weight, QuantizedShard) and isinstance(weight, nn.Parameter)
    assert weight.mark == "kept" and weight.requires_grad and weight.fqn == "0.weight"
    assert_codes_of(weight, plain, "mxfp8")
    assert len(list(model.parameters())) == 1


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("change", ["requantize", "load", "step"])
def test_values_that_change_before_backward_are_refused(recipe: str, change: str) -> None:
    """In a plain model, where backward would multiply with other weights than forward did."""
    model = megafsdp.quantize_(new_model(), recipe)
    optimizer = megafsdp.FusedAdam(model.parameters(), lr=1e-3)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    x = batch().requires_grad_()

    def changes() -> None:
        if change == "requantize":
            megafsdp.requantize_(model, {"3.weight": torch.zeros(WIDTH, WIDTH)})
        elif change == "load":
            model.load_state_dict(saved)
        else:
            optimizer.step()

    model(x).sum().backward()
    loss = model(x).sum()
    changes()
    with pytest.raises(
        RuntimeError, match=r"codes at version \d+.*'3.weight'.*Run backward before"
    ):
        loss.backward()
    optimizer.zero_grad()
    model(x).sum().backward()
