"""Padding of whole models under the planner, beside one buffer with a least common multiple.

Units are layers, the embedding, and the final norm with the output layer; projections are separate
parameters, experts are stacks. With expert parallelism each rank has some matrices of a stack, in a
separate group that fewer ranks divide. Shapes are those of the public models.
"""

from __future__ import annotations

import argparse
import math
import time

from megafsdp.buffer.layout import TensorSpec
from megafsdp.buffer.planner import plan_layout

Unit = list[TensorSpec]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--shards", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--expert-degrees", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--timed-shards", type=int, default=4096)


def _matrix(name: str, rows: int, row: int) -> TensorSpec:
    return TensorSpec(name, (rows, row))


def _vector(name: str, numel: int) -> TensorSpec:
    return TensorSpec(name, (numel,))


def _attention(hidden: int, q: int, kv: int, o: int) -> Unit:
    return [
        _matrix("q", q, hidden),
        _matrix("k", kv, hidden),
        _matrix("v", kv, hidden),
        _matrix("o", hidden, o),
        _vector("input_norm", hidden),
        _vector("post_norm", hidden),
    ]


def _swiglu(hidden: int, ffn: int) -> Unit:
    return [_matrix("gate", ffn, hidden), _matrix("up", ffn, hidden), _matrix("down", hidden, ffn)]


def _experts(num: int, hidden: int, ffn: int) -> Unit:
    return [
        _matrix("router", num, hidden),
        TensorSpec("experts.fc1", (num, 2 * ffn, hidden), row_numel=hidden),
        TensorSpec("experts.fc2", (num, hidden, ffn), row_numel=ffn),
    ]


def _ends(hidden: int, vocabulary: int) -> list[tuple[int, Unit]]:
    head = [_vector("norm", hidden), _matrix("head", vocabulary, hidden)]
    return [(1, [_matrix("embedding", vocabulary, hidden)]), (1, head)]


def _qk_norm(size: int) -> Unit:
    return [_vector("q_norm", size), _vector("k_norm", size)]


def models() -> dict[str, list[tuple[int, Unit]]]:
    """Return for each model its distinct units with their counts."""
    linear = [
        _matrix("in_proj", 12288 + 64, 2048),
        TensorSpec("conv1d", (8192, 1, 4)),
        _vector("A_log", 32),
        _vector("dt_bias", 32),
        _vector("out_norm", 128),
        _matrix("out_proj", 2048, 4096),
        _vector("input_norm", 2048),
        _vector("post_norm", 2048),
    ]
    next_mlp = [*_experts(512, 2048, 512), *_swiglu(2048, 512), _matrix("shared_gate", 1, 2048)]
    oss = [
        _matrix("q", 4096, 2880),
        _matrix("k", 512, 2880),
        _matrix("v", 512, 2880),
        _matrix("o", 2880, 4096),
        *[_vector(n, s) for n, s in (("qb", 4096), ("kb", 512), ("vb", 512), ("ob", 2880))],
        _vector("input_norm", 2880),
        _vector("post_norm", 2880),
        _matrix("router", 128, 2880),
        _vector("router_bias", 128),
        TensorSpec("experts.fc1", (128, 2880, 5760), row_numel=5760),
        TensorSpec("experts.fc2", (128, 2880, 2880), row_numel=2880),
        _matrix("experts.fc1_bias", 128, 5760),
        _matrix("experts.fc2_bias", 128, 2880),
    ]
    qwen8 = [*_attention(4096, 4096, 1024, 4096), *_qk_norm(128), *_swiglu(4096, 12288)]
    qwen30 = [*_attention(2048, 4096, 512, 4096), *_qk_norm(128), *_experts(128, 2048, 768)]
    next_full = [*_attention(2048, 8192, 512, 4096), *_qk_norm(256), *next_mlp]
    llama = [*_attention(4096, 4096, 1024, 4096), *_swiglu(4096, 14336)]
    return {
        "Llama-3-8B": [(32, llama), *_ends(4096, 128256)],
        "Qwen3-8B": [(36, qwen8), *_ends(4096, 151936)],
        "Qwen3-30B-A3B": [(48, qwen30), *_ends(2048, 151936)],
        "Qwen3-Next-80B": [(12, next_full), (36, [*linear, *next_mlp]), *_ends(2048, 151936)],
        "GPT-OSS-120B": [(36, oss), *_ends(2880, 201088)],
    }


def _expert_padding(unit: Unit, num_ranks: int, ep: int) -> int:
    """Return the elements that all ranks pad for a unit whose stacks ``ep`` ranks share out."""
    if ep == 1:
        return plan_layout(unit, num_ranks, itemsize=2).padding_numel
    dense = [spec for spec in unit if not _is_stack(spec)]
    stacks = [
        TensorSpec(s.name, (s.shape[0] // ep, *s.shape[1:]), row_numel=s.row_numel)
        for s in unit
        if _is_stack(s)
    ]
    padding = plan_layout(dense, num_ranks, itemsize=2).padding_numel
    if stacks:
        padding += ep * plan_layout(stacks, num_ranks // ep, itemsize=2).padding_numel
    return padding


def _is_stack(spec: TensorSpec) -> bool:
    return spec.row_numel is not None


def _lcm_numel(unit: Unit, num_shards: int) -> int:
    """Return the elements of one buffer whose shards are multiples of all row sizes."""
    chunk = math.lcm(*(spec.granule for spec in unit))
    return -(-sum(s.numel for s in unit) // (num_shards * chunk)) * num_shards * chunk


def run(options: argparse.Namespace) -> dict[str, object]:
    """Plan every model for every number of shards; HFSDP over 8 x 128 ranks has 1,024 shards."""
    table: dict[str, dict[str, object]] = {}
    experts: dict[str, dict[str, float]] = {}
    planning_s = {}
    for name, units in models().items():
        numel = sum(count * sum(s.numel for s in unit) for count, unit in units)
        row: dict[str, object] = {"num_parameters": numel}
        for num_shards in options.shards:
            layouts = [(count, plan_layout(unit, num_shards, itemsize=2)) for count, unit in units]
            padding = sum(count * layout.padding_numel for count, layout in layouts)
            single = sum(count * _lcm_numel(unit, num_shards) for count, unit in units) - numel
            row[str(num_shards)] = {
                "padding_percent": 100 * padding / numel,
                "single_buffer_percent": 100 * single / numel,
                "max_sub_buffers": max(len(layout.sub_buffers) for _, layout in layouts),
            }
        table[name] = row
        if any(_is_stack(spec) for _, unit in units for spec in unit):
            experts[name] = {
                f"{n} ranks, ep {ep}": 100
                * sum(count * _expert_padding(unit, n, ep) for count, unit in units)
                / numel
                for n in options.shards
                for ep in options.expert_degrees
                if n % ep == 0
            }
        start = time.perf_counter()
        for count, unit in units:
            for _ in range(count):
                plan_layout(unit, options.timed_shards, itemsize=2)
        planning_s[name] = time.perf_counter() - start
    return {
        "padding": table,
        "experts": experts,
        "timed_shards": options.timed_shards,
        "planning_s": planning_s,
    }


def describe(results: dict[str, object]) -> str:
    """Return the table as lines for people: ours / one buffer, percent."""
    padding, planning = results["padding"], results["planning_s"]
    assert isinstance(padding, dict) and isinstance(planning, dict)
    lines = ["padding in percent, sub-buffers / one buffer"]
    for name, row in padding.items():
        cells = [
            f"{n}: {cell['padding_percent']:.2f} / {cell['single_buffer_percent']:.2f}"
            for n, cell in row.items()
            if isinstance(cell, dict)
        ]
        lines.append(f"{name:>15}  {'   '.join(cells)}   planned in {planning[name]:.2f} s")
    experts = results["experts"]
    assert isinstance(experts, dict)
    for name, cells in experts.items():
        worst = max(cells, key=cells.__getitem__)
        lines.append(f"{name:>15}  with ep: at most {cells[worst]:.2f}, of {worst}")
    return "\n".join(lines)
