"""Training steps with quantized weights, beside our own in bf16 and FSDP2's in bf16.

``python -m benchmarks fsdp_step --recipe R`` runs it. Each recipe has two sides: only weights
quantized, and all operands. All sides are in the same processes, and step on the same batches in
blocks of a few steps, in turn. The first step of a block is dropped, and so are the first blocks.
Figures are ratios of medians: over our engine in bf16, which gives the cost of quantization, and
over FSDP2.

Figures need three checks: the first gradients of our bf16 equal FSDP2's; those of each recipe
differ from them by as much as its rounding explains, neither more nor much less; and the bytes that
are gathered and that are unsharded at once follow the formula: a half or a quarter of bf16 for the
weights of linears, while vectors and embeddings stay as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.gpt_step import Shape, Side, build, draw_batches, run_step
from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm.agreement import raise_together
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.device.memory import Category
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.quantize.recipes import recipe_of

_BF16, _RIVAL = "megafsdp", "fsdp2"
_OPERANDS = ("weights", "all operands")
_WARM_UP_BLOCKS = 2
_STEPS_A_BLOCK = 4
_BF16_NBYTES = 2
# Relative differences of the gradients of all quantized weights, by bits. Below the band
# quantization is off, as bf16 alone makes 0.007; above it is wrong. Errors grow with layers: with 8
# they are 0.12 and 0.38.
_GRADIENT_BANDS = {8: (0.01, 0.20), 4: (0.04, 0.60)}
# Relative padding in bytes: shards are padded to equal sizes, and to alignments of kernels.
_PADDING = 0.01


@dataclass(frozen=True)
class _Sizes:
    """Elements that a step gathers, or that are unsharded at once.

    Attributes:
        quantized: Elements of weights that the recipe quantizes.
        others: Elements of all others.
    """

    quantized: int
    others: int

    def nbytes(self, bits: int) -> int:
        """Return the bytes without padding, with ``bits`` for each quantized element."""
        return self.quantized * bits // 8 + self.others * _BF16_NBYTES


@dataclass(frozen=True)
class _Traffic:
    """The bytes of one step of a side.

    Attributes:
        gathered: Bytes of all-gathers.
        unsharded: Largest number of bytes unsharded at once.
    """

    gathered: int
    unsharded: int


def measure(
    shape: Shape, repeats: int, tolerance: float, *, recipes: Sequence[str]
) -> dict[str, object]:
    """Check the sides, then time them; called by every rank.

    Args:
        shape: What is trained, in bf16.
        repeats: Blocks of each side after warm-up.
        tolerance: For our bf16 gradients against FSDP2's, relative to the largest of a tensor.
        recipes: Names of recipes.

    Raises:
        CheckError: Gradients or bytes are not as they should be; raised on all ranks alike.
    """
    chosen = {
        f"{name}, {operands}": recipe_of(name, quantize_activations=operands == _OPERANDS[1])
        for name in recipes
        for operands in _OPERANDS
    }
    sides = {_RIVAL: build(shape, _RIVAL), _BF16: build(shape, _BF16)}
    sides |= {name: build(shape, _BF16, recipe=recipe) for name, recipe in chosen.items()}
    bits = {name: 8 // recipe.weight.codes_per_byte for name, recipe in chosen.items()}
    check = _check_gradients(shape, sides, bits, tolerance)
    nbytes = _check_bytes(shape, sides, bits)
    return {"check": check, "bytes": nbytes, **_time_in_turns(shape, sides, repeats)}


def describe(name: str, case: dict[str, Any]) -> list[str]:
    """Return the results as lines for people."""
    medians = {side: times["median"] for side, times in case["step_ms"].items()}
    lines = [
        f"{name}: megafsdp {medians[_BF16]:.1f} ms, FSDP2 {medians[_RIVAL]:.1f} ms, "
        f"in {case['repeats']} blocks"
    ]
    for side, (low, high) in case["range_to_bf16"].items():
        nbytes = case["bytes"][side]
        lines.append(
            f"    {side}: {medians[side]:.1f} ms, {case['ratio_to_bf16'][side]:.3f} of bf16 "
            f"({low:.3f} to {high:.3f}), of processor time "
            f"{case['processor_ratio_to_bf16'][side]:.3f}, "
            f"{case['ratio_to_fsdp2'][side]:.3f} of FSDP2; gathered "
            f"{nbytes['gathered_ratio']:.3f}, unsharded {nbytes['unsharded_ratio']:.3f} of bf16 "
            f"without what stays so; gradients within {case['check']['gradients'][side]:.3f}"
        )
    return lines


def _time_in_turns(shape: Shape, sides: Mapping[str, Side], repeats: int) -> dict[str, object]:
    batches = draw_batches(shape, _STEPS_A_BLOCK)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    block_ms: dict[str, list[float]] = {name: [] for name in sides}
    for block in range(_WARM_UP_BLOCKS + repeats):
        for name in sides if block % 2 else reversed(sides):
            dist.barrier()
            steps = [run_step(sides[name], tokens) for tokens in batches][1:]
            if block >= _WARM_UP_BLOCKS:
                times[name] += steps
                block_ms[name].append(statistics.median(step["step"] for step in steps))
    step_ms = {name: spread([step["step"] for step in found]) for name, found in times.items()}
    processor_ms = {n: spread([step["processor"] for step in f]) for n, f in times.items()}
    medians, processor = (
        {name: found["median"] for name, found in by_side.items()}
        for by_side in (step_ms, processor_ms)
    )
    quantized = [name for name in sides if name not in (_RIVAL, _BF16)]
    of_blocks = {
        name: [a / b for a, b in zip(block_ms[name], block_ms[_BF16], strict=True)]
        for name in quantized
    }
    return {
        "repeats": repeats,
        "step_ms": step_ms,
        "processor_ms": processor_ms,
        "processor_ratio_to_bf16": {n: processor[n] / processor[_BF16] for n in quantized},
        "ratio_to_bf16": {name: medians[name] / medians[_BF16] for name in quantized},
        "range_to_bf16": {name: [min(r), max(r)] for name, r in of_blocks.items()},
        "ratio_to_fsdp2": {name: medians[name] / medians[_RIVAL] for name in (_BF16, *quantized)},
    }


def _check_gradients(
    shape: Shape, sides: Mapping[str, Side], bits: Mapping[str, int], tolerance: float
) -> dict[str, object]:
    """Compare gradients of a first step; return the differences.

    Raises:
        CheckError: Gradients in bf16 differ from FSDP2's, or a recipe's are outside its band.
    """
    (tokens,) = draw_batches(shape, 1)
    grads = {}
    for name, side in sides.items():
        side.model(tokens[:, :-1], tokens[:, 1:]).backward()
        grads[name] = {n: _whole(p.grad) for n, p in side.model.named_parameters()}
        side.optimizer.zero_grad()
    ours, theirs = grads[_BF16], grads[_RIVAL]
    worst = max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in ours)
    # A NaN is in no band.
    wrong = {} if worst <= tolerance else {"bf16 of FSDP2": worst}
    differences = {}
    for name, num_bits in bits.items():
        chosen = _quantized_names(sides[name])
        found, wanted = (
            torch.cat([grads[side][n].flatten() for n in chosen]) for side in (name, _BF16)
        )
        differences[name] = difference = float((found - wanted).norm() / wanted.norm())
        low, high = _GRADIENT_BANDS[num_bits]
        if not low <= difference <= high:
            wrong[name] = difference
    texts = ", ".join(f"{name} by {difference:.1e}" for name, difference in wrong.items())
    raise_together(CheckError(f"gradients differ: {texts}") if wrong else None)
    return {"tolerance": tolerance, "bf16": worst, "gradients": differences}


def _whole(grad: Tensor | None) -> Tensor:
    assert isinstance(grad, DTensor), "engines shard all parameters"
    return grad.full_tensor()


def _check_bytes(
    shape: Shape, sides: Mapping[str, Side], bits: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Compare bytes of a step with those of the formula; return the ratios to bf16.

    Raises:
        CheckError: Bytes differ by more than padding explains.
    """
    (tokens,) = draw_batches(shape, 1)
    # Each side is measured by itself, as kept weights are gathered once.
    traffic = {name: _traffic_of(side, tokens) for name, side in sides.items() if name != _RIVAL}
    plain, found, wrong = traffic[_BF16], {}, []
    for name, num_bits in bits.items():
        gathered, unsharded = _sizes_of(sides[name], plain)
        own = traffic[name]
        parts = {
            "gathered": (gathered, own.gathered, plain.gathered),
            "unsharded": (unsharded, own.unsharded, plain.unsharded),
        }
        found[name] = {}
        for part, (sizes, nbytes, plain_nbytes) in parts.items():
            others = sizes.nbytes(0)
            found[name][part] = nbytes
            found[name][f"{part}_ratio"] = (nbytes - others) / (plain_nbytes - others)
            for of, counted, wanted in (
                (name, nbytes, sizes.nbytes(num_bits)),
                ("bf16", plain_nbytes, sizes.nbytes(8 * _BF16_NBYTES)),
            ):
                if not 0 <= counted / wanted - 1 <= _PADDING:
                    wrong.append(f"{part} of {of}: {counted} bytes, by the formula {wanted}")
    raise_together(CheckError("; ".join(wrong)) if wrong else None)
    return found


def _traffic_of(side: Side, tokens: Tensor) -> _Traffic:
    # The order of units is recorded in the first step, and gathers run ahead from then on.
    for _ in range(2):
        run_step(side, tokens)
    ledger = _units_of(side)[""].ledger
    ledger.reset_peak()
    with record_collectives() as record:
        run_step(side, tokens)
    return _Traffic(record.nbytes["all_gather"], ledger.peak[Category.UNSHARDED])


def _sizes_of(side: Side, plain: _Traffic) -> tuple[_Sizes, _Sizes]:
    """Return the elements that a step gathers, and that are unsharded at once, from shapes.

    Args:
        side: The side with the recipe.
        plain: Bytes of the bf16 side, which say how many layers are unsharded at once.
    """
    units = _units_of(side)
    root, *layers = [_sizes_in(unit) for unit in units.values()]
    # Layers are gathered again in backward; the root stays gathered in between.
    in_all = _Sizes(
        root.quantized + 2 * sum(layer.quantized for layer in layers),
        root.others + 2 * sum(layer.others for layer in layers),
    )
    bf16 = 8 * _BF16_NBYTES
    num_layers = round((plain.unsharded - root.nbytes(bf16)) / layers[0].nbytes(bf16))
    at_once = _Sizes(
        root.quantized + num_layers * layers[0].quantized,
        root.others + num_layers * layers[0].others,
    )
    return in_all, at_once


def _sizes_in(unit: Any) -> _Sizes:
    numels = {True: 0, False: 0}
    for group in unit.groups:
        numels[group.quantization is not None] += sum(math.prod(p.shape) for p in group.parameters)
    return _Sizes(numels[True], numels[False])


def _units_of(side: Side) -> dict[str, Any]:
    """Return the units by name, the root first."""
    units = units_below([side.model])
    return {"": units.pop(""), **units}


def _quantized_names(side: Side) -> list[str]:
    return [
        ".".join(filter(None, (prefix, record.name)))
        for prefix, unit in _units_of(side).items()
        for group in unit.groups
        if group.quantization is not None
        for record in group.parameters
    ]
