"""Quantized parameters under torch's FSDP2: host time before a forward, bytes, FusedAdam's step.

Hooks: the median host time of the two gather hooks of a parameter after the first gather, for our
weights and for torchao's float8 weight. Unshard: the host time of all that FSDP2 does for a
parameter before its unit's forward and to free it again, for plain bf16 parameters, ours and
torchao's, in turn. Step: FusedAdam on parameters sharded by FSDP2 in bf16, and on the same ones
quantized, in turn. All on one thread of one process, where FSDP2 copies instead of gathering.
The bytes that are gathered follow from the hooks' inputs; live bytes are the most that a forward
without gradients has allocated and not freed, with more and more layers.

A figure is printed only if the step on quantized parameters has moved main weights, their codes are
those of a fresh encoding, and live bytes are the same for any number of layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import megafsdp
from benchmarks.live_bytes import LiveBytes
from benchmarks.record import CheckError, spread
from megafsdp.fsdp.runtime.torch_fsdp import encode_main_weights, shard_of
from megafsdp.quantize.recipes import RECIPE_NAMES

_WARM_UP = 2
# With two layers, one is gathered while the other is still unsharded.
_NUM_LAYERS = (2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--width", type=int, default=256, help="of the square weights")
    parser.add_argument("--repeats", type=int, default=9)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure all recipes in this process; return the figures.

    Raises:
        CheckError: A step has changed nothing, codes are not those of main weights, or live bytes
            grow with the layers.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = (options.parameters, options.width)
        recipes = {name: _measure(name, *shape, options.repeats) for name in RECIPE_NAMES}
        torchao = _torchao_hooks(options.width, options.repeats)
        unshard = _unshard(options.width, options.repeats)
        live = {name: _live_nbytes(name, options.width) for name in RECIPE_NAMES}
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(num_threads)
    return {
        "parameters": options.parameters,
        "width": options.width,
        "recipes": recipes,
        "torchao_hooks_us": torchao,
        "unshard_us": unshard,
        "live_nbytes": live,
    }


def describe(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    torchao, unshard = results["torchao_hooks_us"]["median"], results["unshard_us"]
    lines = [
        f"torchao's float8 weight: hooks {torchao:.1f} us, unshard "
        f"{unshard['torchao']['median']:.1f} us a parameter",
        f"plain FSDP2: unshard {unshard['bf16']['median']:.1f} us a parameter",
    ]
    for name, figures in results["recipes"].items():
        lines.append(
            f"{name}: hooks {figures['hooks_us']['median']:.1f} us, unshard "
            f"{unshard[name]['median']:.1f} us a parameter, gathered "
            f"{figures['gathered_ratio']:.3f} of bf16, live "
            f"{results['live_nbytes'][name] / 1024:.0f} KiB with any layers, step of "
            f"{results['parameters']} "
            f"{figures['step_ms']['median']:.1f} ms, of bf16 "
            f"{figures['bf16_step_ms']['median']:.1f} ms: {figures['step_ratio']:.2f} x"
        )
    return "\n".join(lines)


def _sharded(num_parameters: int, width: int, recipe: str | None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(num_parameters)]
    model = fully_shard(nn.Sequential(*layers).bfloat16(), mesh=init_device_mesh("cpu", (1,)))
    if recipe is not None:
        megafsdp.quantize_(model, recipe)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter.detach(), 1e-3, dtype=torch.bfloat16)
    return model


def _measure(
    recipe: str, num_parameters: int, width: int, repeats: int
) -> dict[str, dict[str, float] | float]:
    plain, model = (_sharded(num_parameters, width, name) for name in (None, recipe))
    sides = {
        "bf16_step_ms": megafsdp.FusedAdam(plain.parameters(), lr=1e-2),
        "step_ms": megafsdp.FusedAdam(model.parameters(), lr=1e-2),
    }
    first = shard_of(next(model.parameters()))
    assert first is not None and first.main is not None, "quantize_() made it"
    before = first.main.values.clone()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(_WARM_UP + repeats):
        for name, optimizer in sides.items():
            elapsed = _elapsed_s(optimizer.step)
            if repeat >= _WARM_UP:
                times[name].append(1e3 * elapsed)
    codes = first.codes.clone()
    encode_main_weights([first])
    if torch.equal(before, first.main.values) or not torch.equal(codes, first.codes):
        raise CheckError(f"{recipe}: the step has moved nothing, or made other codes")
    figures: dict[str, dict[str, float] | float] = {n: spread(t) for n, t in times.items()}
    medians = [spread(times[name])["median"] for name in ("step_ms", "bf16_step_ms")]
    figures["step_ratio"] = medians[0] / medians[1]
    mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy()
    inputs, _ = first.fsdp_pre_all_gather(mesh, first.shape, first.stride(), model, policy)
    figures["gathered_ratio"] = sum(each.nbytes for each in inputs) / (2 * first.numel())
    figures["hooks_us"] = _hooks(first, (mesh, first.shape, first.stride(), model, policy), repeats)
    return figures


def _hooks(weight: Any, arguments: tuple[object, ...], repeats: int) -> dict[str, float]:
    """Return the microseconds that both hooks of a gathered parameter take.

    Args:
        weight: The parameter.
        arguments: Arguments of its first hook.
        repeats: Measurements of many calls each.
    """
    inputs, metadata = weight.fsdp_pre_all_gather(*arguments)
    outputs = tuple(each.clone() for each in inputs)
    made, _ = weight.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
    num_calls = 200

    def call() -> None:
        for _ in range(num_calls):
            _, given = weight.fsdp_pre_all_gather(*arguments)
            weight.fsdp_post_all_gather(outputs, given, torch.bfloat16, out=made)

    with torch.no_grad():
        found = [1e6 * _elapsed_s(call) / num_calls for _ in range(_WARM_UP + repeats)]
    return spread(found[_WARM_UP:])


def _torchao_hooks(width: int, repeats: int) -> dict[str, float]:
    weight = _torchao_layers(1, width)[0].weight
    with torch.no_grad():
        return _hooks(weight.detach(), (init_device_mesh("cpu", (1,)),), repeats)


def _torchao_layers(num_layers: int, width: int) -> nn.Sequential:
    # Only this case needs it, and its import takes seconds.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    layers = [nn.Linear(width, width, bias=False).bfloat16() for _ in range(num_layers)]
    model = nn.Sequential(*layers)
    convert_to_float8_training(model, config=config)
    return model


def _unshard(width: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of gathering and freeing for each parameter of a large unit."""
    num_parameters, mesh = 32, init_device_mesh("cpu", (1,))
    models = {"torchao": fully_shard(_torchao_layers(num_parameters, width), mesh=mesh)}
    for name in (None, *RECIPE_NAMES):
        models[name or "bf16"] = _sharded(num_parameters, width, name)
    times: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(_WARM_UP + repeats):
        for name, model in models.items():

            def call(model: Any = model) -> None:
                model.unshard()
                model.reshard()

            elapsed = 1e6 * _elapsed_s(call) / num_parameters
            if repeat >= _WARM_UP:
                times[name].append(elapsed)
    return {name: spread(found) for name, found in times.items()}


def _live_nbytes(recipe: str, width: int) -> int:
    """Return the most bytes that a forward has made and not freed, for any number of layers."""
    found = [_forward_peak(recipe, width, num_layers) for num_layers in _NUM_LAYERS]
    if len(set(found)) > 1:
        raise CheckError(f"{recipe}: live bytes {found} of {_NUM_LAYERS} layers differ")
    return found[0]


def _forward_peak(recipe: str, width: int, num_layers: int) -> int:
    mesh = init_device_mesh("cpu", (1,))
    layers = [nn.Linear(width, width, bias=False).bfloat16() for _ in range(num_layers)]
    model = nn.Sequential(*(fully_shard(layer, mesh=mesh) for layer in layers))
    megafsdp.quantize_(fully_shard(model, mesh=mesh), recipe)
    x = torch.ones(32, width, dtype=torch.bfloat16)
    with LiveBytes() as live, torch.no_grad():
        # The first forward allocates what later ones reuse.
        model(x)
        live.peak = 0
        model(x)
    return live.peak


def _elapsed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
