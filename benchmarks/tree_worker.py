"""One rank of one checkout in the case ``trees``: builds a job and times a block of it on request.

Run as a program, by its path, with the checkout to import from as an argument. Jobs use only public
names and names of ``benchmarks`` that both checkouts have, since they run on both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Returns a block's figures by name, in milliseconds, and a number that must be equal on both sides.
Block = Callable[[], tuple[dict[str, float], float]]

_STEPS_A_BLOCK = 4
_MAX_NORM = 1.0
_SETTLING_S = 0.01
_LINK_BYTES_PER_S = 8e9
_WARM_UP_STEPS = 8


def _gpt(layers: int, hidden: int, *, vocab_size: int = 1024, tie_embeddings: bool = True) -> Any:
    from megafsdp.models import ModelConfig

    return ModelConfig(
        architecture="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        num_query_groups=8,
        head_dim=hidden // 8,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocab_size,
        max_sequence_length=128,
        tie_embeddings=tie_embeddings,
    )


def _training_step(
    layers: int, hidden: int, dtype: str, *, has_fused_adam: bool = False
) -> Callable[[], dict[str, float]]:
    """Return a step of a sharded GPT: milliseconds by phase, and the loss."""
    import torch
    import torch.distributed as dist

    import megafsdp
    from megafsdp.models import build_model
    from megafsdp.models.common import TransformerLayer

    config = _gpt(layers, hidden, tie_embeddings=False)
    model = build_model(config, seed=0)
    param_dtype = torch.bfloat16 if dtype == "bf16" else None
    policy = megafsdp.MixedPrecisionPolicy(param_dtype, torch.float32)
    for module in [m for m in model.modules() if isinstance(m, TransformerLayer)]:
        megafsdp.fully_shard(module, mp_policy=policy, reshard_after_forward=True)
    megafsdp.fully_shard(model, mp_policy=policy)
    hyper: dict[str, Any] = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 1e-2}
    optimizer: torch.optim.Optimizer
    if has_fused_adam:
        optimizer = megafsdp.FusedAdam(model.parameters(), max_grad_norm=_MAX_NORM, **hyper)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **hyper)
    generator = torch.Generator().manual_seed(dist.get_rank())
    # Fewer tokens in bf16: processors without instructions for it take ten times as long.
    shape = (1, 33) if param_dtype is torch.bfloat16 else (4, 129)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)

    def step() -> dict[str, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if not has_fused_adam:
            megafsdp.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        end, cpu_end = time.perf_counter(), time.process_time()
        return {
            "step": 1e3 * (end - start),
            "processor": 1e3 * (cpu_end - cpu_start),
            "forward": 1e3 * (forward - start),
            "backward": 1e3 * (backward - forward),
            "optimizer": 1e3 * (end - backward),
            "loss": loss.item(),
        }

    return step


def fsdp_step(layers: int, hidden: int, dtype: str, *, has_fused_adam: bool = False) -> Block:
    """Time steps as the case ``fsdp_step`` does, without FSDP2."""
    step = _training_step(layers, hidden, dtype, has_fused_adam=has_fused_adam)

    def block() -> tuple[dict[str, float], float]:
        steps = [step() for _ in range(_STEPS_A_BLOCK)][1:]
        figures = {name: statistics.median(s[name] for s in steps) for name in steps[0]}
        return figures, figures.pop("loss")

    return block


def hooks(layers: int, hidden: int) -> Block:
    """Time the host's work in hooks, by the checkout's own breakdown."""
    from benchmarks import host_time

    open_contexts = contextlib.ExitStack()
    host = open_contexts.enter_context(host_time.timed_hooks())
    step = _training_step(layers, hidden, "fp32")

    def block() -> tuple[dict[str, float], float]:
        # The contexts must stay open while the model built in them is used.
        assert open_contexts
        host.clear()
        losses = [step()["loss"] for _ in range(_STEPS_A_BLOCK)]
        ms = {part: 1e3 * s / _STEPS_A_BLOCK for part, s in host.seconds.items()}
        by_unit = {"bookkeeping a unit": ms["bookkeeping"] / (layers + 1)}
        return {**by_unit, "issuing": ms["issuing"], "packing": ms["packing"]}, losses[-1]

    return block


def optimizer_step() -> Block:
    """Time the host in FusedAdam's step over a thousand small parameters."""
    import torch
    from torch import nn

    import megafsdp

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(20))

        def forward(self, total: torch.Tensor) -> torch.Tensor:
            return total + torch.cat([weight.view(-1) for weight in self.weights]).sin().sum()

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(50)))
    for module in [*model, model]:
        megafsdp.fully_shard(module)
    optimizer = megafsdp.FusedAdam(model.parameters(), lr=1e-3, eps=1e-5)

    def block() -> tuple[dict[str, float], float]:
        times_ms = []
        for _ in range(_STEPS_A_BLOCK):
            loss = model(torch.zeros(()))
            loss.backward()
            start = time.perf_counter()
            optimizer.step()
            times_ms.append(1e3 * (time.perf_counter() - start))
            optimizer.zero_grad()
        return {"FusedAdam.step": statistics.median(times_ms)}, loss.item()

    return block


def adam(num_threads: int) -> Block:
    """Time the kernel over a flat buffer beyond the caches."""
    import torch

    from benchmarks.adam import Ours

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    weight, grad = torch.randn(1 << 24), torch.randn(1 << 24)
    sides = {"fp32": Ours(weight, grad, False), "bf16": Ours(weight, grad.bfloat16(), True)}

    def block() -> tuple[dict[str, float], float]:
        figures = {}
        for name, side in sides.items():
            # Threads of the previous side spin for milliseconds.
            time.sleep(_SETTLING_S)
            times_ms = []
            for _ in range(_STEPS_A_BLOCK):
                start = time.perf_counter()
                side.step()
                times_ms.append(1e3 * (time.perf_counter() - start))
            figures[name] = statistics.median(times_ms)
        return figures, sides["fp32"].weight.sum().item()

    return block


def checkpoint(layers: int, hidden: int) -> Block:
    """Time saves, the call and copies of asynchronous saves, and loads, of model and Adam."""
    import torch
    import torch.distributed as dist

    import megafsdp
    from megafsdp import checkpoint as ckpt
    from megafsdp.models import build_model, unit_classes

    config = _gpt(layers, hidden, vocab_size=16_000)
    model = build_model(config, seed=0)
    megafsdp.fully_shard_model(model, unit_classes(config))
    optimizer = megafsdp.FusedAdam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    root = [tempfile.mkdtemp(prefix="trees-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(root)
    folder = Path(root[0])

    def timed(action: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        return 1e3 * (time.perf_counter() - start)

    def block() -> tuple[dict[str, float], float]:
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        figures = {"save": timed(lambda: ckpt.save(folder / "save", step=1, **state))}
        pending: list[Any] = []

        def start_save() -> None:
            pending.append(ckpt.async_save(folder / "async", step=1, **state))
            pending[0].wait_staged()

        figures["asynchronous save, blocking"] = timed(start_save)
        path = pending[0].result()
        figures["load"] = timed(lambda: ckpt.load(path, **state))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
        return figures, float(sum(p.detach().to_local().sum() for p in model.parameters()))

    return block


def offload(fraction: float) -> Block:
    """Time steps with a part of the optimizer on the host, beside a simulated device."""
    from benchmarks.offload_sides import AHEAD, NORM_FIRST, build_side
    from benchmarks.offload_simulated import make_setting
    from benchmarks.simulated_device import Times, keep_freed_memory

    keep_freed_memory()
    times = Times(1.5e-3, 3e-3)
    setting = make_setting(16, 256, _LINK_BYTES_PER_S, times, max_grad_norm=1e9)
    sides = {name: build_side(name, fraction, setting) for name in (NORM_FIRST, AHEAD)}
    for side in sides.values():
        side.block(setting, _WARM_UP_STEPS)

    def block() -> tuple[dict[str, float], float]:
        figures = {
            name: statistics.median(side.block(setting, _STEPS_A_BLOCK))
            for name, side in sides.items()
        }
        return figures, sides[NORM_FIRST].losses[-1].item()

    return block


# Number of ranks of each job, and the function that makes its block.
JOBS: dict[str, tuple[int, Callable[[], Block]]] = {
    "fsdp_step 8x256 fp32": (2, lambda: fsdp_step(8, 256, "fp32")),
    "fsdp_step 8x256 bf16": (2, lambda: fsdp_step(8, 256, "bf16")),
    "fsdp_step 24x64 fp32": (2, lambda: fsdp_step(24, 64, "fp32")),
    "fsdp_step 24x64 bf16": (2, lambda: fsdp_step(24, 64, "bf16")),
    "fsdp_step 24x64 bf16, FusedAdam": (
        2,
        lambda: fsdp_step(24, 64, "bf16", has_fused_adam=True),
    ),
    "hooks 24x64 fp32": (2, lambda: hooks(24, 64)),
    "optimizer_step": (2, optimizer_step),
    "adam, one thread": (1, lambda: adam(1)),
    "adam, two threads": (1, lambda: adam(2)),
    "checkpoint 6x512": (2, lambda: checkpoint(6, 512)),
    "offload 0.5": (1, lambda: offload(0.5)),
    "offload 1.0": (1, lambda: offload(1.0)),
}


def main() -> None:
    """Build a job of one checkout, then time one block for each line on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("rank", type=int)
    parser.add_argument("store", type=Path)
    options = parser.parse_args()
    # Replaces the folder of this file.
    sys.path[0] = str(options.tree)
    # Output of libraries must not be read as an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    spec = importlib.util.find_spec("megafsdp")
    found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if found is None or not found.is_relative_to(options.tree.resolve()):
        raise RuntimeError(f"Expected megafsdp of {options.tree}, got {found}.")

    import torch
    import torch.distributed as dist

    from megafsdp.device.host_memory import keep_freed_memory

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    keep_freed_memory()
    num_ranks, make = JOBS[options.job]
    store = f"file://{options.store}"
    dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=num_ranks)
    block = make()
    answers.write("ready\n")
    for _ in sys.stdin:
        answers.write(json.dumps(block()) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
