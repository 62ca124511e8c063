"""Host time and memory of one rank of ZeRO-3 as the world grows, with torch's ``fake`` backend.

There is one process for each world size. All are alive at once and run blocks of a few steps in
turn, so that all meet the same load of the machine. The fake backend fills every slot of a gather
from this rank and keeps this rank's slice of a reduction, with one operator a rank: while steps are
timed one operator does the same, and its time is left out. The rest of a step is Python, torch's
operators on thin layers, and our work on flat buffers; a shard has at least 32 elements, so that at
4,096 ranks every unit zeroes and pages in half a megabyte, however thin it is. The figure is the
ratio of medians to the first world's. The reductions take the path of NCCL; gloo's sum of one shard
a rank is not measured here.

With tensor and expert parallelism the ranks of a layer exchange nothing either, so gradients are
compared with those of the same cut layers without ``fully_shard``, on the same backend and the same
weights. Every world must issue the last world's collectives: those over tp, ep and all ranks
always, those over data ranks wherever there are several. A world of tp ranks has one data rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import megafsdp
from benchmarks import host_time, launch
from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm import collectives
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.device.memory import Category, tensors_nbytes
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of
from megafsdp.mesh.parallel_dims import Meshes, ParallelDims
from megafsdp.models import ModelConfig, build_model
from megafsdp.models.common import TransformerLayer
from megafsdp.parallel import parallelize

_STEPS_A_BLOCK = 5
_WARM_UP_BLOCKS = 2
_ROWS, _TOKENS, _VOCABULARY = 1, 8, 64
_LEAST_SCALE = 1e-6
_SETUP_PARTS = ("wrap", "first_step")
_STEP_PARTS = ("host", "engine")

Milliseconds = dict[str, float]
_Collective = Callable[..., dist.Work | None]


@dataclass(frozen=True)
class Shape:
    """What is trained: layers so thin that Python dominates, and rows short enough for no padding.

    Attributes:
        layers: Number of layers, each a unit.
        hidden: Hidden and feed-forward size; 8 heads.
        tp: Tensor-parallel degree.
        ep: Expert-parallel degree; above 1 each MLP is a mixture with two experts for each rank of
            ep, and two for each token.
    """

    layers: int
    hidden: int
    tp: int
    ep: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 8, 8], help="degrees, in turn")
    parser.add_argument("--ep", type=int, nargs="+", default=[1, 1, 8], help="one for each of --tp")
    parser.add_argument("--repeats", type=int, default=10, help="blocks a world after warm-up")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--tolerance", type=float, default=2e-5, help="of the check")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure all worlds in turn, with each pair of degrees; return their figures.

    Raises:
        CheckError: A world's gradients are wrong, or worlds differ in their collectives.
    """
    return {
        f"tp {tp} ep {ep}": _run_degrees(Shape(options.layers, options.hidden, tp, ep), options)
        for tp, ep in zip(options.tp, options.ep, strict=True)
    }


def describe(results: dict[str, object]) -> str:
    """Return the results as a table for people."""
    lines = ["one rank on the fake backend; ms a step without the backend"]
    for degrees, measured in results.items():
        assert isinstance(measured, dict)
        lines.append(f"{degrees}: {measured['shape']}")
        lines += [
            line for n, case in measured["worlds"].items() for line in _describe_world(n, case)
        ]
    return "\n".join(lines)


def _run_degrees(shape: Shape, options: argparse.Namespace) -> dict[str, object]:
    context = mp.get_context(launch.START_METHOD)
    ends, processes = [], []
    try:
        for world in options.worlds:
            end, other = context.Pipe()
            arguments = (other, world, shape, options.tolerance)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            ends.append(end)
            processes.append(process)
        return {
            "shape": asdict(shape),
            "repeats": options.repeats,
            "worlds": _measure(options.worlds, ends, options.repeats),
        }
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join()


def _describe_world(world: str, case: dict[str, Any]) -> list[str]:
    parts = {part: case["step_ms"][part]["median"] for part in _STEP_PARTS}
    setup = {part: case["setup_ms"][part]["median"] for part in _SETUP_PARTS}
    low, high = case["ratio_range"]
    peaks = ", ".join(f"{n} {b / 1e3:.0f}" for n, b in case["peak_nbytes"].items() if b)
    return [
        f"{world:>5} ranks: step {parts['host']:.1f}, ratio {case['ratio']:.3f} ({low:.3f} to "
        f"{high:.3f}); of it hooks {parts['engine']:.1f}, ratio {case['engine_ratio']:.3f}",
        f"      set-up {setup['wrap']:.0f} and first step {setup['first_step']:.0f}; "
        f"peak kB: {peaks}; padding {case['padding_percent']:.0f} %",
    ]


def _measure(worlds: list[int], ends: list[Connection], repeats: int) -> dict[str, object]:
    facts = [_ask(end, "facts") for end in ends]
    _compare_collectives(worlds, facts)
    setups = _blocks(ends, "set_up", repeats)
    steps = _blocks(ends, "steps", repeats)
    return {
        str(world): {
            **facts[i],
            "setup_ms": {p: spread([block[p] for block in setups[i]]) for p in _SETUP_PARTS},
            "step_ms": {p: spread([block[p] for block in steps[i]]) for p in _STEP_PARTS},
            "parts_ms": {
                p: statistics.median(b.get(p, 0.0) for b in steps[i]) for p in steps[i][0]
            },
            **_ratios(steps[i], steps[0]),
        }
        for i, world in enumerate(worlds)
    }


def _compare_collectives(worlds: list[int], facts: list[dict[str, Any]]) -> None:
    """Raise CheckError unless all worlds issue the last one's; a single data rank has none."""
    for world, fact in zip(worlds, facts, strict=True):
        wanted = facts[-1] if fact["num_data_ranks"] > 1 else facts[-1] | {"calls": {}}
        for name in ("calls", "model_calls", "model_nbytes"):
            if fact[name] != wanted[name]:
                raise CheckError(
                    f"{world} ranks issue {name} {fact[name]}, {worlds[-1]} issue {wanted[name]}"
                )


def _blocks(ends: list[Connection], request: str, repeats: int) -> list[list[Milliseconds]]:
    """Ask all worlds in turn, in alternating order; return the blocks of each after warm-up."""
    blocks: list[list[Milliseconds]] = [[] for _ in ends]
    for number in range(_WARM_UP_BLOCKS + repeats):
        order = range(len(ends)) if number % 2 else reversed(range(len(ends)))
        for i in order:
            block = _ask(ends[i], request)
            if number >= _WARM_UP_BLOCKS:
                blocks[i].append(block)
    return blocks


def _ratios(blocks: list[Milliseconds], base: list[Milliseconds]) -> dict[str, object]:
    by_block = [own["host"] / other["host"] for own, other in zip(blocks, base, strict=True)]

    def ratio(part: str) -> float:
        return statistics.median(b[part] for b in blocks) / statistics.median(b[part] for b in base)

    return {
        "ratio": ratio("host"),
        "ratio_range": [min(by_block), max(by_block)],
        "engine_ratio": ratio("engine"),
    }


def _ask(end: Connection, request: str) -> dict[str, float]:
    end.send(request)
    answer = end.recv()
    if isinstance(answer, CheckError):
        raise answer
    assert isinstance(answer, dict), answer
    return answer


def _serve(end: Connection, world: int, shape: Shape, tolerance: float) -> None:
    """Answer the requests of :func:`run` until it closes its end."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world)
    backend = _Backend()
    try:
        with backend.patched(), host_time.timed_hooks() as hooks:
            rank = _Rank(shape, hooks, backend)
            answers: dict[str, Callable[[], dict[str, object]]] = {
                "facts": lambda: rank.facts(tolerance),
                "set_up": rank.set_up,
                "steps": rank.steps,
            }
            while True:
                request = end.recv()
                try:
                    end.send(answers[request]())
                except CheckError as error:
                    end.send(error)
    except EOFError:
        pass
    finally:
        dist.destroy_process_group()


class _Backend:
    """The fake backend, or one operator that gives rank 0 the same as the fake backend does.

    Attributes:
        is_short: Whether the operator takes the place of the backend.
    """

    def __init__(self) -> None:
        self.is_short = False

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Stand between megafsdp and torch's collectives."""
        with (
            self._replaced("_all_gather_single", _gather_alone),
            self._replaced("_reduce_scatter_single", _reduce_alone),
            mock.patch.object(dist, "all_to_all_single", _exchange_alone),
        ):
            yield

    def _replaced(self, name: str, short: _Collective) -> contextlib.AbstractContextManager[object]:
        whole: _Collective = getattr(collectives, name)

        def call(out: torch.Tensor, own: torch.Tensor, **options: object) -> dist.Work | None:
            return (short if self.is_short else whole)(out, own, **options)

        return mock.patch.object(collectives, name, call)


def _gather_alone(out: torch.Tensor, own: torch.Tensor, **options: object) -> None:
    out.view(-1, own.numel()).copy_(own)


def _reduce_alone(out: torch.Tensor, own: torch.Tensor, **options: object) -> None:
    out.copy_(own[: out.numel()])


def _exchange_alone(out: torch.Tensor, own: torch.Tensor, *splits: object, **_: object) -> None:
    """Receive from each rank what is sent to it; the fake backend repeats what goes to rank 0."""
    out.copy_(own)


class _Rank:
    """Rank 0 of one world: its model, and the facts about it."""

    def __init__(self, shape: Shape, hooks: host_time.HostTime, backend: _Backend) -> None:
        self._shape = shape
        self._backend = backend
        self._hooks = hooks
        self._meshes = ParallelDims(tp=shape.tp, ep=shape.ep).build("cpu")
        self._model = _shard(_new_model(shape), self._meshes)
        self._optimizer = _new_optimizer(self._model)

    def facts(self, tolerance: float) -> dict[str, object]:
        """Check the gradients; return the collectives and the bytes of a step."""
        difference = self._compare_gradients(tolerance)
        _step(self._model, self._optimizer)
        root = unit_of(self._model)
        assert root is not None, "the model is a unit"
        root.ledger.reset_peak()
        with record_collectives() as record:
            _step(self._model, self._optimizer)
        state = [local_tensor(v) for s in self._optimizer.state.values() for v in s.values()]
        optimizer = {Category.OPTIMIZER_STATE.value: tensors_nbytes([t for t in state if t.ndim])}
        layouts = [group.layout for unit in _units(self._model) for group in unit.groups]
        numel = sum(layout.gathered_numel - layout.padding_numel for layout in layouts)
        return {
            "check": {"tolerance": tolerance, "gradient": difference},
            "num_data_ranks": self._meshes.data_size,
            **self._count(record),
            "num_parameters": numel,
            "padding_percent": 100 * sum(layout.padding_numel for layout in layouts) / numel,
            "resting_nbytes": {c.value: n for c, n in root.ledger.live.items()} | optimizer,
            "peak_nbytes": {c.value: n for c, n in root.ledger.peak.items()} | optimizer,
        }

    def _count(self, record: CollectiveRecord) -> dict[str, dict[str, int]]:
        """Return the collectives over data ranks, and calls and bytes of those over other ranks."""
        data = {self._meshes.data.get_group().group_name}
        if self._shape.ep > 1:
            assert self._meshes.experts is not None, "the degree is above 1"
            data.add(self._meshes.experts.get_group().group_name)
        calls, model_calls, model_nbytes = Counter[str](), Counter[str](), Counter[str]()
        for (kind, group), num_calls in record.calls_by_group.items():
            if group in data:
                calls[kind] += num_calls
            else:
                model_calls[kind] += num_calls
                # Bytes of all_to_all are not compared: the router chooses the ranks of a token by
                # weights that the fake backend repeats more often in larger worlds.
                if kind != "all_to_all":
                    model_nbytes[kind] += record.nbytes_by_group[kind, group]
        by_name = {"calls": calls, "model_calls": model_calls, "model_nbytes": model_nbytes}
        return {name: dict(counted) for name, counted in by_name.items()}

    def _compare_gradients(self, tolerance: float) -> float:
        """Compare this rank's rows with those of plain layers on what the fake gather brought.

        Raises:
            CheckError: They differ.
        """
        num_data = self._meshes.data_size
        plain = parallelize(_new_model(self._shape), self._meshes)
        for unit in _units(self._model):
            unit.require_context().start_unshard(unit)
            unit.finish_unshard()
        full = {
            id(parameter.sharded): parameter.unsharded.detach()
            for unit in _units(self._model)
            for group in unit.groups
            for parameter in group.parameters
        }
        with torch.no_grad():
            for ours, theirs in zip(self._model.parameters(), plain.parameters(), strict=True):
                local_tensor(theirs).copy_(full[id(ours)])
        for unit in _units(self._model):
            unit.release()
        for model in (self._model, plain):
            model(*_batch()).backward()
        worst, num_compared = 0.0, 0
        pairs = zip(self._model.named_parameters(), plain.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert isinstance(ours, UnevenDTensor) and theirs.grad is not None, name
            start, stop = ours.uneven_layout.element_range()
            rows = local_tensor(theirs.grad).reshape(-1)[start:stop] / num_data
            if start < stop:
                assert ours.grad is not None, name
                scale = rows.abs().max().clamp(min=_LEAST_SCALE / num_data)
                error = float((local_tensor(ours.grad).reshape(-1) - rows).abs().max() / scale)
                worst = max(worst, math.inf if math.isnan(error) else error)
                num_compared += 1
        self._optimizer.zero_grad()
        if not num_compared or not worst <= tolerance:
            raise CheckError(
                f"gradients of {num_compared} shards on {dist.get_world_size()} ranks differ by "
                f"{worst:.1e}, more than {tolerance:g}"
            )
        return worst

    def set_up(self) -> dict[str, object]:
        """Wrap and step a fresh model; return milliseconds, the fake backend's left out."""
        model = _new_model(self._shape)
        wrap, _ = self._timed(lambda: _shard(model, self._meshes))
        optimizer = _new_optimizer(model)
        first_step, _ = self._timed(lambda: _step(model, optimizer))
        return {"wrap": wrap, "first_step": first_step}

    def steps(self) -> dict[str, object]:
        """Run a block; return the medians of its milliseconds."""
        blocks = []
        for _ in range(_STEPS_A_BLOCK):
            host, parts = self._timed(lambda: _step(self._model, self._optimizer))
            parts.pop(host_time.ISSUING, None)
            blocks.append({"host": host, "engine": sum(parts.values())} | parts)
        return {p: statistics.median(b[p] for b in blocks[1:]) for p in blocks[1]}

    def _timed(self, call: Callable[[], object]) -> tuple[float, Milliseconds]:
        """Return the thread's milliseconds without the backend's, and those of parts of hooks."""
        gc.collect()
        self._hooks.clear()
        self._backend.is_short = True
        start_s = time.thread_time()
        call()
        spent_s = time.thread_time() - start_s
        self._backend.is_short = False
        parts = {part: 1e3 * s for part, s in self._hooks.seconds.items()}
        return 1e3 * spent_s - parts.get(host_time.ISSUING, 0.0), parts


def _new_model(shape: Shape) -> nn.Module:
    config = ModelConfig(
        architecture="gpt",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=8,
        num_query_groups=8,
        head_dim=shape.hidden // 8,
        ffn_hidden_size=shape.hidden,
        vocab_size=_VOCABULARY,
        max_sequence_length=_TOKENS,
        tie_embeddings=False,
    )
    if shape.ep > 1:
        config = replace(
            config,
            architecture="qwen3_moe",
            num_experts=2 * shape.ep,
            num_experts_per_token=2,
            moe_ffn_hidden_size=shape.hidden,
        )
    return build_model(config, seed=0)


def _shard(model: nn.Module, meshes: Meshes) -> nn.Module:
    parallelize(model, meshes)
    for module in [*(m for m in model.modules() if isinstance(m, TransformerLayer)), model]:
        megafsdp.fully_shard(module, mesh=meshes.data, expert_mesh=meshes.experts)
    return model


def _new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)


def _batch() -> Sequence[torch.Tensor]:
    tokens = torch.arange(_ROWS * (_TOKENS + 1)).view(_ROWS, -1) % _VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(*_batch()).backward()
    megafsdp.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _units(model: nn.Module) -> list[FSDPUnit]:
    units = (unit_of(module) for module in model.modules())
    return [unit for unit in units if unit is not None]
