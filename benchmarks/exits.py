"""Short training runs in fresh processes: how often one ends with an exit code other than 0.

Threads of collectives that outlive their process group abort a process at the interpreter's exit,
now and then. Each run trains for a few steps with gathers ahead and reductions under way, keeps its
model in a global, and exits, in four manners in turn: with its process group destroyed, with it
left open, with the model deleted first, or in the middle of a backward that an exception cut short.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import megafsdp
from benchmarks.record import CheckError
from megafsdp.models import build_model, presets
from megafsdp.models.common import TransformerLayer

MANNERS = ("destroyed", "left open", "model first", "mid step")
_TIMEOUT_S = 120
_STEPS = 3
_MAX_QUOTED = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Start the runs one after another; return their exit codes, negative for signals.

    Raises:
        CheckError: A run ended by itself before its last step.
    """
    codes: dict[str, Counter[int]] = {manner: Counter() for manner in MANNERS}
    errors: list[str] = []
    for number in range(options.runs):
        manner = MANNERS[number % len(MANNERS)]
        for code, text in _run_once(manner, options.ranks):
            codes[manner][code] += 1
            if code:
                errors.append(text)
    return {
        "num_runs": options.runs,
        "num_ranks": options.ranks,
        "num_abnormal": len(errors),
        "exit_codes": {manner: dict(counted) for manner, counted in codes.items()},
        "errors": errors,
    }


def describe(results: dict[str, object]) -> str:
    """Return the codes as lines for people."""
    codes, errors = results["exit_codes"], results["errors"]
    assert isinstance(codes, dict) and isinstance(errors, list)
    lines = [
        f"{results['num_runs']} runs of {results['num_ranks']} ranks, "
        f"{results['num_abnormal']} abnormal exits"
    ]
    lines += [f"{manner:>12}: {counted}" for manner, counted in codes.items()]
    return "\n".join([*lines, *errors])


def _run_once(manner: str, num_ranks: int) -> list[tuple[int, str]]:
    """Run all ranks; return the exit code of each and the end of what it wrote to stderr."""
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.exits", store, str(r), str(num_ranks), manner],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[1],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(num_ranks)
        ]
        ends = []
        try:
            for rank in ranks:
                output, error = rank.communicate(timeout=_TIMEOUT_S)
                if "trained" not in output:
                    raise CheckError(f"no step was made ({manner}):\n{error[-_MAX_QUOTED:]}")
                ends.append((rank.returncode, error[-_MAX_QUOTED:]))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return ends


class _Stop(Exception):
    """Cuts a step short."""


def _stop(grad: torch.Tensor) -> None:
    raise _Stop


def _train(store: str, rank: int, num_ranks: int, manner: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    model = build_model(presets["gpt-toy"], seed=0)
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    for module in [*layers, model]:
        megafsdp.fully_shard(module, prefetch=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, presets["gpt-toy"].vocab_size, (2, 17))
    for _ in range(_STEPS):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        megafsdp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # The interpreter clears this module's globals late, so their contents outlive the function.
    globals()["_kept"] = [model, optimizer, loss]
    if manner == "mid step":
        layers[1].register_forward_hook(lambda *call: call[-1].register_hook(_stop) and None)
        try:
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        except _Stop:
            pass
        else:
            raise AssertionError("no exception left the backward")
    elif manner == "model first":
        globals()["_kept"] = None
        del model, layers, module, optimizer, loss
    if manner in ("destroyed", "model first"):
        dist.destroy_process_group()
    print("trained", flush=True)


if __name__ == "__main__":
    _train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
