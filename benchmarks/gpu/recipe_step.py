"""Part 12: training steps of Qwen3-1.7B's layers whose products take 8-bit codes, beside bf16.

Few layers, and a small vocabulary so that the head weighs little. One rank: the cost of quantizing,
and the gain of products. A recipe and bf16 are in memory together and their blocks of steps
alternate.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any

import torch
from torch import nn

import megafsdp
from benchmarks.gpu.group import one_rank
from benchmarks.gpu.part import Report, Size
from benchmarks.record import spread
from megafsdp.models import ModelConfig, build_model, presets
from megafsdp.models.common import TransformerLayer

_BF16 = "bf16"
# The least ratio of tokens a second to bf16's.
TARGETS = {"fp8_current": 1.15, "fp8_block": 1.05}
_CHECKED_STEPS, _STEPS_A_BLOCK, _BLOCKS = 3, 4, 5
# The first losses, near 9, differ by the rounding of 8-bit operands. Then the tokens are learned by
# heart: the loss falls by four in three steps, and nearly as far with quantized gradients, as a
# first step of Adam is as large for a gradient that is only rounding errors.
_LOSS_TOLERANCE, _LEAST_FALL = 0.02, 0.95
_HYPER: dict[str, Any] = {"lr": 1e-4, "eps": 1e-5, "weight_decay": 1e-2, "max_grad_norm": 1.0}


class Side:
    """A model in one precision with its optimizer; ``losses`` grows by each step.

    Args:
        name: ``"bf16"`` or a recipe.
        config: The model.
        tokens: ``(batch, sequence + 1)``.
        is_compiled: Whether each layer is compiled.
    """

    def __init__(
        self, name: str, config: ModelConfig, tokens: torch.Tensor, *, is_compiled: bool
    ) -> None:
        with tokens.device:
            model: nn.Module = build_model(config, seed=0)
        policy = megafsdp.MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, recipe=None if name == _BF16 else name
        )
        for layer in [m for m in model.modules() if isinstance(m, TransformerLayer)]:
            if is_compiled:
                layer.compile(backend="inductor" if tokens.is_cuda else "aot_eager")
            megafsdp.fully_shard(layer, mp_policy=policy)
        # The head is not quantized, as is usual.
        plain = megafsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        megafsdp.fully_shard(model, mp_policy=plain)
        self.model, self.tokens = model, tokens
        self.optimizer = megafsdp.FusedAdam(model.parameters(), **_HYPER)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Train one step; returns before the device is done."""
        loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def block_ms(self) -> float:
        """Return the milliseconds of a step, measured over a block of steps."""
        gc.collect()
        _synchronize(self.tokens)
        begin_s = time.perf_counter()
        for _ in range(_STEPS_A_BLOCK):
            self.step()
        _synchronize(self.tokens)
        return 1e3 * (time.perf_counter() - begin_s) / _STEPS_A_BLOCK


def run(size: Size, report: Report) -> None:
    """Measure eager layers, then compiled ones."""
    full = dataclasses.replace(presets["qwen3-1.7b"], num_layers=4, vocab_size=8192)
    config = size.either(full, presets["qwen3-toy"])
    batch, sequence = size.either((4, 4096), (1, 16))
    generator = torch.Generator().manual_seed(1)
    shape = (batch, sequence + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    with one_rank(size) as device:
        for is_compiled in (False, True):
            _measure(config, tokens.to(device), report, is_compiled=is_compiled)


def _measure(
    config: ModelConfig, tokens: torch.Tensor, report: Report, *, is_compiled: bool
) -> None:
    """Measure recipes one by one beside bf16, so that finished ones count if time runs out."""
    way = "compiled" if is_compiled else "eager"
    plain = _started(_BF16, config, tokens, is_compiled=is_compiled)
    report.figure(f"{way}, {_BF16}: losses", _first_losses(plain).tolist())
    for name, target in TARGETS.items():
        side = _started(name, config, tokens, is_compiled=is_compiled)
        losses, wanted_losses = _first_losses(side), _first_losses(plain)
        report.figure(f"{way}, {name}: losses", losses.tolist())
        difference = (losses[0] - wanted_losses[0]).abs().item()
        fall, wanted = (each[0] - each[-1] for each in (losses, wanted_losses))
        # Equal losses would mean that nothing was quantized.
        is_met = 0 < difference <= _LOSS_TOLERANCE and bool(fall >= _LEAST_FALL * wanted)
        detail = f"differ by {difference:.1e}, and fall by {fall / wanted:.3f} of bf16's"
        report.check(f"{way}, {name}: losses", is_met, detail)
        times = _in_turns({_BF16: plain, name: side})
        report.figure(f"{way}, {name} beside {_BF16}: step_ms", times)
        numel = tokens[:, 1:].numel()
        rates = {which: 1e3 * numel / each["median"] for which, each in times.items()}
        report.figure(f"{way}, {name} beside {_BF16}: tokens a second", rates)
        ratio = rates[name] / rates[_BF16]
        report.mark(f"{way}, {name}: tokens a second over bf16", ratio, at_least=target)
        # Freed before the next side is built.
        del side


def _started(name: str, config: ModelConfig, tokens: torch.Tensor, *, is_compiled: bool) -> Side:
    side = Side(name, config, tokens, is_compiled=is_compiled)
    for _ in range(_CHECKED_STEPS):
        side.step()
    return side


def _first_losses(side: Side) -> torch.Tensor:
    return torch.stack(side.losses[:_CHECKED_STEPS]).float().cpu()


def _in_turns(sides: dict[str, Side]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step of each side, whose blocks alternate."""
    times_ms: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for block in range(1 + _BLOCKS):
        for name in names if block % 2 else names[::-1]:
            elapsed_ms = sides[name].block_ms()
            # The first block warms up.
            if block:
                times_ms[name].append(elapsed_ms)
    return {name: spread(times) for name, times in times_ms.items()}


def _synchronize(beside: torch.Tensor) -> None:
    if beside.is_cuda:
        torch.cuda.synchronize(beside.device)
