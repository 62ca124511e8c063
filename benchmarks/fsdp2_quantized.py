"""Quantized parameters under torch's FSDP2: hooks, bytes, and FusedAdam's step on them.

Hooks: the median host time of the two gather hooks of a parameter after the first gather, of ours
and of torchao's float8 weight beside it, on one process. Plain FSDP2 has no hooks. Step: FusedAdam
on parameters sharded by FSDP2 in bf16, and on the same quantized, in turn. The bytes that are
gathered follow from the hooks' inputs. A figure is printed only if the step on quantized parameters
has moved main weights, and their codes are those of a fresh encoding.
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
from benchmarks.record import CheckError, spread
from megafsdp.fsdp.runtime.torch_fsdp import encode_main_weights, shard_of
from megafsdp.quantize.recipes import RECIPE_NAMES

_WARM_UP = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--width", type=int, default=256, help="of the square weights")
    parser.add_argument("--repeats", type=int, default=9)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure all recipes in this process; return the figures.

    Raises:
        CheckError: A step has changed nothing, or codes are not those of main weights.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shape = (options.parameters, options.width)
        recipes = {name: _measure(name, *shape, options.repeats) for name in RECIPE_NAMES}
        torchao_s = _torchao_hooks(options.width, options.repeats)
    finally:
        dist.destroy_process_group()
    return {
        "parameters": options.parameters,
        "width": options.width,
        "recipes": recipes,
        "torchao_hooks_us": torchao_s,
    }


def describe(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    torchao = results["torchao_hooks_us"]["median"]
    lines = [f"hooks of torchao's float8 weight: {torchao:.1f} us a parameter"]
    for name, figures in results["recipes"].items():
        lines.append(
            f"{name}: hooks {figures['hooks_us']['median']:.1f} us a parameter, gathered "
            f"{figures['gathered_ratio']:.3f} of bf16, step of {results['parameters']} "
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
        arguments: Of its first hook.
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
    # Only this case needs it, and its import takes seconds.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = nn.Sequential(nn.Linear(width, width, bias=False).bfloat16())
    convert_to_float8_training(model, config=config)
    weight = model[0].weight
    with torch.no_grad():
        return _hooks(weight.detach(), (init_device_mesh("cpu", (1,)),), repeats)


def _elapsed_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
