"""The gated delta rule, forward and backward, beside transformers' own in torch.

Both sides take the same queries, keys, values, decays and factors in fp32 and sum the squares of
their outputs; they run in one process on one thread and take turns. The figure is the ratio of
medians of processor time, ours over theirs, for each width of heads and each length of the
sequence, with the same number of tokens. There is no figure unless losses and gradients agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.record import CheckError, spread
from megafsdp.models import presets
from megafsdp.models.gated_delta import gated_delta_rule

SIDES = ("megafsdp", "transformers")
_WARM_UP_REPEATS = 2
# For fp32 sums in another order, relative to the largest element.
_TOLERANCE = 1e-4
# Key heads, value heads and their widths: those of the toy, and an eighth of the released model's.
_HEADS = {
    preset: (
        config.linear_num_key_heads // parts,
        config.linear_num_value_heads // parts,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    for preset, parts in (("qwen3-next-toy", 1), ("qwen3-next-80b-a3b", 8))
    for config in (presets[preset],)
}

Rule = Callable[[list[Tensor]], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--tokens", type=int, default=2048, help="of all sequences together")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--tolerance", type=float, default=_TOLERANCE)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Check the sides against each other and time them.

    Raises:
        CheckError: The sides disagree; no figure is given then.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            f"{heads}, T {length}": _measure(heads, length, options)
            for heads in _HEADS
            for length in options.lengths
        }
    finally:
        torch.set_num_threads(usual)


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = ["gated delta rule, forward and backward: megafsdp / transformers"]
    for name, case in results.items():
        assert isinstance(case, dict)
        ours, theirs = (case["processor_ms"][side]["median"] for side in SIDES)
        low, high = case["ratio_range"]
        lines.append(
            f"{name}: {ours:.1f} / {theirs:.1f} ms, ratio {case['ratio']:.3f} "
            f"({low:.3f} to {high:.3f})"
        )
    return "\n".join(lines)


def _sides() -> dict[str, Rule]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def ours(inputs: list[Tensor]) -> Tensor:
        q, k, v, log_decay, beta = inputs
        return gated_delta_rule(q, k, v, log_decay_BTN=log_decay, beta_BTN=beta)

    def theirs(inputs: list[Tensor]) -> Tensor:
        out: Tensor = torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)[0]
        return out

    return dict(zip(SIDES, (ours, theirs), strict=True))


def _measure(heads: str, length: int, options: argparse.Namespace) -> dict[str, object]:
    inputs = _inputs(heads, max(options.tokens // length, 1), length)
    sides = _sides()
    error = _largest_difference([_step(rule, inputs)[1] for rule in sides.values()])
    # Written so that a NaN counts as a difference.
    if not error <= options.tolerance:
        raise CheckError(
            f"{heads}, T {length}: the sides differ by {error:.1e}, more than {options.tolerance:g}"
        )
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for repeat in range(_WARM_UP_REPEATS + options.repeats):
        for name in SIDES if repeat % 2 else reversed(SIDES):
            elapsed_ms, _ = _step(sides[name], inputs)
            if repeat >= _WARM_UP_REPEATS:
                times[name].append(elapsed_ms)
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    return {
        "shape": {name: list(x.shape) for name, x in zip("qkvgb", inputs, strict=True)},
        "check": {"tolerance": options.tolerance, "difference": error},
        "processor_ms": {name: spread(times[name]) for name in SIDES},
        "ratio": statistics.median(times["megafsdp"]) / statistics.median(times["transformers"]),
        "ratio_range": [min(ratios), max(ratios)],
    }


def _inputs(heads: str, num_rows: int, length: int) -> list[Tensor]:
    num_keys, num_values, key_dim, value_dim = _HEADS[heads]
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_keys, key_dim),) * 2 + ((num_values, value_dim),) + ((num_values,),) * 2
    drawn = [torch.randn(num_rows, length, *shape, generator=generator) for shape in shapes]
    # Half-lives from a fraction of a token to many tokens, as those that a layer begins with.
    drawn[3] = -drawn[3].exp()
    drawn[4] = drawn[4].sigmoid()
    return [x.requires_grad_() for x in drawn]


def _step(rule: Rule, inputs: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Run forward and backward; return their processor time, and loss and gradients."""
    start = time.process_time()
    loss = rule(inputs).square().sum()
    grads = torch.autograd.grad(loss, inputs)
    elapsed_ms = 1e3 * (time.process_time() - start)
    return elapsed_ms, [loss.detach(), *grads]


def _largest_difference(found: list[list[Tensor]]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))
