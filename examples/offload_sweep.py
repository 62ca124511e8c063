"""Train the same model with more and more of its optimizer on the host, and compare the steps.

    python examples/offload_sweep.py
    torchrun --nproc-per-node 8 examples/offload_sweep.py --fractions 0.5 1 --plot sweep.svg \
        --config my_run.yaml --train.steps 50

Each fraction is a run of its own from the same weights on the same samples: the losses must not
change. Offload costs you the time that a step takes longer than with nothing offloaded; on a CPU
nothing hides it. Any value of examples/configs/offload_sweep.yaml can be
overridden. Runs go to runs/offload_sweep, which is emptied first.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import megafsdp
from megafsdp.data import PrepOptions, prepare
from megafsdp.training import parse_config, train

CONFIG = Path(__file__).parent / "configs" / "offload_sweep.yaml"
FOLDER = Path("runs/offload_sweep")
WARM_UP_STEPS = 3
BAR_WIDTH = 40
HEADER = (
    f"{'fraction':>8} {'ms a step':>10} {'exposed':>8} {'device MB':>10} {'host MB':>8}  losses"
)


@dataclass
class Run:
    """The results of one fraction."""

    fraction: float
    losses: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    device_nbytes: int = 0
    host_nbytes: int = 0

    @property
    def step_ms(self) -> float:
        """Return the median time between the ends of two steps."""
        ends = self.ends_s[min(WARM_UP_STEPS, len(self.ends_s) - 2) :]
        return 1e3 * statistics.median(b - a for a, b in pairwise(ends))

    def look_at(self, optimizer: torch.optim.Optimizer, *unused: object) -> None:
        """Count the bytes of main weights and states on this rank, once all are there."""
        if self.device_nbytes:
            return
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [value for p in tensors for value in optimizer.state[p].values()]
        own = [
            t.detach().to_local()
            for t in tensors
            if isinstance(t, torch.distributed.tensor.DTensor)
        ]
        nbytes = sum(tensor.nbytes for tensor in own)
        if isinstance(optimizer, megafsdp.HybridDeviceOptimizer):
            self.host_nbytes = optimizer.host_nbytes
            nbytes = round(nbytes * (1 - optimizer.offloaded_fraction))
        self.device_nbytes = nbytes


def train_with(fraction: float, words: list[str]) -> Run:
    """Train with a fraction of the optimizer on the host."""
    run = Run(fraction)
    config = parse_config(
        [
            f"--config={CONFIG}",
            *words,
            f"--optimizer.offload_fraction={fraction}",
            f"--run.directory={FOLDER / f'{fraction:g}'}",
        ]
    )

    def observe(step: int, result: Any) -> None:
        run.ends_s.append(time.perf_counter())
        run.losses.append(result.loss)

    hook = register_optimizer_step_post_hook(run.look_at)
    try:
        train(config, on_step=observe)
    finally:
        hook.remove()
    return run


def table(runs: list[Run]) -> str:
    """Return the runs as lines, with a bar for each."""
    base, longest = runs[0], max(run.step_ms for run in runs)
    lines = [HEADER]
    for run in runs:
        bar = "#" * round(BAR_WIDTH * run.step_ms / longest)
        verdict = "equal" if run.losses == base.losses else "DIFFERENT"
        lines.append(
            f"{run.fraction:8.2f} {run.step_ms:10.1f} {run.step_ms - base.step_ms:8.1f} "
            f"{run.device_nbytes / 1e6:10.1f} {run.host_nbytes / 1e6:8.1f}  {verdict:9} {bar}"
        )
    return "\n".join(lines)


def svg(runs: list[Run]) -> str:
    """Return a picture: a bar for each run, and a line at a step with nothing offloaded."""
    longest, base_ms = max(run.step_ms for run in runs), runs[0].step_ms
    width, height = 80 * len(runs) + 20, 260
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">']
    parts.append("<style>text {font: 12px sans-serif; text-anchor: middle}</style>")
    for index, run in enumerate(runs):
        x, tall = 30 + 80 * index, 200 * run.step_ms / longest
        parts.append(
            f'<rect x="{x}" y="{230 - tall:.1f}" width="50" height="{tall:.1f}" fill="#69c"/>'
        )
        parts.append(f'<text x="{x + 25}" y="{224 - tall:.1f}">{run.step_ms:.1f} ms</text>')
        parts.append(f'<text x="{x + 25}" y="246">{run.fraction:g}</text>')
    y = 230 - 200 * base_ms / longest
    parts.append(f'<line x1="20" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c33"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Train once for each fraction and show the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    options, words = parser.parse_known_args()
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        shutil.rmtree(FOLDER, ignore_errors=True)
        # Other ranks wait for this one before they read data.
        sources = str(Path(json.__file__).parents[1] / "asyncio" / "*.py")
        prepare(PrepOptions(output=str(FOLDER / "data"), inputs=(sources,), validation_every=0))
    fractions = sorted({0.0, *options.fractions})
    runs = [train_with(fraction, words) for fraction in fractions]
    if is_first:
        print(table(runs))
        if options.plot is not None:
            options.plot.write_text(svg(runs))
    if any(run.losses != runs[0].losses for run in runs):
        sys.exit("The losses differ: how much is offloaded must not change them.")


if __name__ == "__main__":
    main()
