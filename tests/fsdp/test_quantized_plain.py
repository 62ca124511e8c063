"""Plain models that quantize_ has quantized: compiled, copied, moved, pickled, wrapped by DDP."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megafsdp
from megafsdp import FusedAdam
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from tests.defaults import torch_defaults
from tests.fsdp.torch_sharded import batch, new_model, shards_of
from tests.ranks import Ranks


def _train(model: nn.Module, optimizer: FusedAdam, steps: range) -> list[Tensor]:
    """Return the losses of steps, and the codes and main weights after them."""
    found = []
    for step in steps:
        torch.manual_seed(step)
        loss = (model(batch(step)).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    for shard in shards_of(model).values():
        assert shard.main is not None
        found += [shard.codes.clone(), shard.table.clone(), shard.main.values.clone()]
    return found


def _trained(recipe: str) -> tuple[nn.Module, FusedAdam]:
    model = megafsdp.quantize_(new_model(), recipe)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    _train(model, optimizer, range(3))
    return model, optimizer


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_default_device_and_dtype_change_nothing(recipe: str) -> None:
    """Histories, random numbers and transforms have those of the weights."""
    models = [new_model() for _ in range(2)]
    batches = [batch(step) for step in range(3)]
    found = []
    for model, context in zip(
        models, (nullcontext(), torch_defaults("meta", torch.float16)), strict=True
    ):
        torch.manual_seed(0)
        with context:
            megafsdp.quantize_(model, recipe_of(recipe, quantize_activations=True))
            optimizer = FusedAdam(model.parameters(), lr=1e-2)
            for x in batches:
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([shard.main.values for shard in shards_of(model).values()])
    assert all(map(torch.equal, *found))


Both = tuple[nn.Module, FusedAdam]


def _pickled(both: Both) -> Both:
    stream = io.BytesIO()
    torch.save(both, stream)
    stream.seek(0)
    found: Both = torch.load(stream, weights_only=False)
    return found


def _moved(both: Both) -> Both:
    """As ``model.cuda()`` moves a model, of which an optimizer has states."""
    # Kept, or the second move might take the memory that the first has left.
    codes = {name: each.codes for name, each in shards_of(both[0]).items()}
    for _ in range(2):
        both[0]._apply(lambda tensor: tensor.to("cpu", copy=True))
    now = {name: each.codes for name, each in shards_of(both[0]).items()}
    assert now.keys() == codes.keys()
    assert all(now[name].data_ptr() != codes[name].data_ptr() for name in codes)
    return both


def _copied_model(both: Both) -> Both:
    model, optimizer = copy.deepcopy(both[0]), both[1]
    other = FusedAdam(model.parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    return model, other


_COPIES: list[Callable[[Both], Both]] = [copy.deepcopy, _copied_model, _pickled, _moved]


@functools.cache
def _trained_on(recipe: str) -> list[Tensor]:
    return _train(*_trained(recipe), range(3, 6))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("copied", _COPIES)
def test_copies_of_a_plain_model_train_on_as_it_does(
    recipe: str, copied: Callable[[Both], Both]
) -> None:
    """Bit for bit, with the fp32 weights and by themselves: the other one is left as it is."""
    expected = _trained_on(recipe)
    source = _trained(recipe)
    model, optimizer = copied(source)
    assert all(map(torch.equal, _train(model, optimizer, range(3, 6)), expected))
    if model is not source[0]:
        assert all(map(torch.equal, _train(*source, range(3, 6)), expected))


def _quantized_here(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return megafsdp.quantize_(model, "fp8_delayed")


def _copied_here(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return copy.deepcopy(megafsdp.quantize_(model, "fp8_delayed"))


def _loaded_here(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(megafsdp.quantize_(model, "fp8_delayed"), stream)
    stream.seek(0)
    with torch.inference_mode():
        # Its codes are of this mode, and like other parameters of it cannot be trained; a copy can.
        return copy.deepcopy(torch.load(stream, weights_only=False))


@pytest.mark.parametrize("make", [_quantized_here, _copied_here, _loaded_here])
def test_parameters_that_are_made_in_inference_mode_train_as_others(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    """They have main weights and codes whose writes are counted."""
    results = []
    for each in (lambda model: megafsdp.quantize_(model, "fp8_delayed"), make):
        torch.manual_seed(0)
        model = each(nn.Linear(64, 64, bias=False).bfloat16())
        results.append(_train(model, FusedAdam(model.parameters(), lr=1e-2), range(3)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("copied", _COPIES)
def test_values_that_a_copy_is_given_are_kept_by_its_next_step(
    copied: Callable[[Both], Both],
) -> None:
    """Also where the optimizer's states are still those from before a move."""
    model, optimizer = copied(_trained("fp8_block"))
    values = torch.full((256, 256), 0.5)
    megafsdp.requantize_(model, {"3.weight": values})
    optimizer.param_groups[0]["lr"] = 0.0
    _train(model, optimizer, range(1))
    main = optimizer.state[model[3].weight]["main_param"]
    assert torch.equal(main, values) and shards_of(model)["3.weight"].main.values is main


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _moved])
def test_codes_that_were_loaded_are_copied_as_values_too(copied: Callable[[Both], Both]) -> None:
    """Before the copy, which is made of what was loaded, and after it."""
    other = shards_of(_trained("fp8_block")[0])["3.weight"].detach()
    for is_before in (True, False):
        fresh = megafsdp.quantize_(new_model(), "fp8_block")
        both = fresh, FusedAdam(fresh.parameters(), lr=0.0)
        if is_before:
            both[0].load_state_dict({"3.weight": other}, strict=False)
        model, optimizer = copied(both)
        if not is_before:
            model.load_state_dict({"3.weight": other}, strict=False)
        _train(model, optimizer, range(1))
        assert torch.equal(model[3].weight.detach().decode(), other.decode())
        main = optimizer.state[model[3].weight]["main_param"]
        assert torch.equal(main, other.decode(torch.float32))


def _state_dicts(both: Both) -> Both:
    stream = io.BytesIO()
    torch.save([each.state_dict() for each in both], stream)
    stream.seek(0)
    model = megafsdp.quantize_(new_model(), "fp8_block")
    made = model, FusedAdam(model.parameters(), lr=0.0)
    for each, state in zip(made, torch.load(stream, weights_only=True), strict=True):
        each.load_state_dict(state)
    return made


@pytest.mark.parametrize("copied", [*_COPIES, _state_dicts])
def test_copies_after_codes_were_loaded_are_not_undone(copied: Callable[[Both], Both]) -> None:
    """The optimizer has main weights of before, which no copy of it brings back."""
    best = copy.deepcopy(_trained("fp8_block")[0].state_dict())
    both = _trained("fp8_block")
    _train(*both, range(3, 9))
    both[0].load_state_dict(best)
    model, optimizer = copied(both)
    optimizer.param_groups[0]["lr"] = 0.0
    _train(model, optimizer, range(1))
    for name, each in shards_of(model).items():
        wanted = best[name].decode(torch.float32)
        assert torch.equal(each.main.values, wanted), name
        assert torch.equal(each.decode(torch.float32), wanted), name


def test_state_dicts_have_no_main_weights() -> None:
    """Files of them have a byte an element and the scales, not five."""
    model = megafsdp.quantize_(new_model(), "mxfp8")
    sizes = []
    for value in (model, model.state_dict()):
        stream = io.BytesIO()
        torch.save(value, stream)
        sizes.append(stream.tell())
    numel = 256 * 256 + 256 * 64
    assert sizes[1] < 1.5 * numel and sizes[0] > 5 * numel


# The tracer asks every input for .grad, and torch warns where it is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_compiled_model_computes_what_it_does_without(recipe: str) -> None:
    """Outputs and gradients, bit for bit; in one graph without histories and random numbers."""
    model = megafsdp.quantize_(new_model(), recipe)
    made = recipe_of(recipe)
    is_whole = not made.history and not made.has_stochastic_rounding
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=is_whole)
    for step in range(2):
        results = []
        for each in (model, compiled):
            torch.manual_seed(step)
            output = each(batch(step))
            output.float().square().mean().backward()
            results.append([output.detach(), *(p.grad for p in each.parameters())])
            each.zero_grad()
        assert results[0][0].abs().sum() > 0
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_one_graph_is_refused_for_histories_and_random_numbers(recipe: str) -> None:
    """The error names the recipe; of weights alone there is one graph."""
    torch._dynamo.reset()
    model = megafsdp.quantize_(nn.Linear(64, 64, bias=False), recipe)
    x = torch.ones(16, 64)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"linear of the recipe '{recipe}'"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    alone = recipe_of(recipe, quantize_activations=False)
    model = megafsdp.quantize_(nn.Linear(64, 64, bias=False), alone)
    found = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(found, model(x))


def _ddp() -> None:
    def build(*, is_quantized: bool) -> tuple[nn.Module, FusedAdam]:
        model = new_model()
        if is_quantized:
            megafsdp.quantize_(model, "fp8_current")
            model = DistributedDataParallel(model, init_sync=False)
        else:
            megafsdp.quantize_(model, "fp8_current")
        return model, FusedAdam(model.parameters(), lr=1e-2)

    model = new_model()
    before = [p.detach().clone() for p in model.parameters()]
    wrapped = DistributedDataParallel(model)
    for target in (wrapped, model):
        with pytest.raises(RuntimeError, match=r"'(module\.)?0\.weight' in .*init_sync=False"):
            megafsdp.quantize_(target, "fp8_current")
        assert shards_of(model) == {}
        assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(RuntimeError, match="give DistributedDataParallel init_sync=False"):
        DistributedDataParallel(megafsdp.quantize_(new_model(), "fp8_current"))
    model, optimizer = build(is_quantized=True)
    alone, other = build(is_quantized=False)
    # Every rank has the same batch: the mean of gradients is the gradient.
    found, expected = _train(model, optimizer, range(3)), _train(alone, other, range(3))
    assert all(map(torch.equal, found, expected))
    assert dist.get_world_size() == 2


def test_ddp_takes_quantized_models_of_equal_ranks_and_is_refused_else(ranks: Ranks) -> None:
    """Before anything is changed; with ``init_sync=False`` it trains as one process."""
    ranks(2).run(_ddp)


def test_parameters_that_a_graph_has_are_left_as_they_are() -> None:
    """All of them, though torch raises at the first that it cannot exchange."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    output = model(batch(dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"'1\.weight' in .*drop outputs of earlier forwards"):
        megafsdp.quantize_(model, "mxfp8")
    assert not any(shard_of(p) for p in model.parameters())
    output.sum().backward()
    del output
    megafsdp.quantize_(model, "mxfp8")
    assert len(shards_of(model)) == 2
