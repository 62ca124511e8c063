"""A training step with a part of the optimizer on the host: what it costs, and what it hides.

Without a GPU the device is simulated (see benchmarks/simulated_device.py): layers take time, and
copies go over a link of a given speed; every record says so. With one the same table is made of a
real GPT, beside torch FSDP2 with its CPU offload.

Each fraction is measured by itself: HybridDeviceOptimizer stepping after the norm is known, the
same stepping before, and a hybrid with one torch optimizer for each parameter, beside both kinds
with nothing offloaded. All train the same model on the same inputs in blocks of steps that
alternate, and must give the same losses and weights; on CUDA, where sums change from run to run,
losses within 0.01. *Exposed* is the extra time of a step over one with nothing offloaded; the
*overlap* is the part of copies and host's kernel that does not show.

A simulated device is measured at two speeds. At ``free`` the layers take ``--room`` times as long
as the host needs for its 32 bytes an element, by a probe of the host's memory in the same run; at
``tight`` half as long.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from benchmarks import offload_cuda, offload_simulated
from benchmarks.host_bandwidth import PROBE_OF
from benchmarks.launch import launch
from benchmarks.offload_sides import AHEAD, Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument(
        "--device",
        choices=("auto", "simulated", "cuda"),
        default="auto",
        help="auto: CUDA if there",
    )
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--repeats", type=int, default=5, help="blocks a side after warm-up")
    parser.add_argument("--steps", type=int, default=4, help="of a block; the first is not timed")
    parser.add_argument("--layers", type=int, default=16, help="of the simulated model")
    parser.add_argument("--hidden", type=int, default=448, help="a multiple of 64; simulated")
    parser.add_argument("--room", type=float, default=10.0, help="of the size free; simulated")
    parser.add_argument("--link-gb-per-s", type=float, default=8.0, help="each way; simulated")
    parser.add_argument("--preset", default="gpt2-small", help="model on CUDA")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step on CUDA")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a row; 0: the longest")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Check the sides against each other, then time every fraction; return the results.

    Raises:
        Exception: The sides' losses or weights differ; no figure is given then.
    """
    load = os.getloadavg()[0]
    shared = Options(tuple(options.fractions), options.repeats, options.steps)
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "simulated"
    if kind == "cuda":
        shape = offload_cuda.Shape(options.preset, options.batch, options.sequence)
        measured = launch(offload_cuda.measure, shape, shared, num_ranks=1)
    else:
        simulated = offload_simulated.Shape(
            options.layers, options.hidden, options.room, 1e9 * options.link_gb_per_s
        )
        measured = launch(offload_simulated.measure, simulated, shared, num_ranks=1)
    assert isinstance(measured, dict)
    return measured | {"targets": _targets(measured), "load_average_before": load}


def _targets(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the targets at the first size with the largest fraction, and the results."""
    fractions = next(iter(results["sizes"].values()))["fractions"]
    ours = fractions[max(fractions, key=float)][AHEAD]
    speeds = {name: speed["beside transfers"] for name, speed in results["gb_per_s"].items()}
    kernel_share = min(speeds[kernel] / speeds[probe] for kernel, probe in PROBE_OF.items())
    got = {
        "exposed share of a step": (ours["exposed_share"], "at most", 0.10),
        "exposed by one optimizer a parameter, over ours": (ours["rival_to_ours"], "at least", 5.0),
        "kernel over its probe, beside transfers": (kernel_share, "at least", 0.90),
    }
    return {
        name: {
            "wanted": f"{relation} {limit:g}",
            "got": value,
            "is_met": value <= limit if relation == "at most" else value >= limit,
        }
        for name, (value, relation, limit) in got.items()
    }


def describe(results: dict[str, Any]) -> str:
    """Return the results as lines for people."""
    what = results["device"]
    if results["is_simulated"]:
        what = (
            f"SIMULATED device on a {what}: compute is time that passes, the link moves "
            f"{results['link_gb_per_s']:.1f} GB/s each way"
        )
    lines = [
        f"{what}; {results['num_parameters'] / 1e6:.1f} M parameters; load of the machine before: "
        f"{results['load_average_before']:.1f}"
    ]
    for name, speeds in results["gb_per_s"].items():
        lines.append(
            f"    {name}: {speeds['alone']:.1f} GB/s alone, {speeds['beside transfers']:.1f} "
            "beside transfers"
        )
    for size, case in results["sizes"].items():
        lines += _describe_size(size, case)
    for name, target in results["targets"].items():
        met = "met" if target["is_met"] else "NOT met"
        lines.append(f"{name}: {target['got']:.2f}, wanted {target['wanted']}: {met}")
    return "\n".join(lines)


def _describe_size(size: str, case: dict[str, Any]) -> list[str]:
    times = case["layers_ms"]
    if times is not None:
        size += f", layers {times['forward']:.1f} + {times['backward']:.1f} ms"
    lines = [f"{size}: ms a step, exposed, overlap, MB on device and host"]
    for fraction, sides in case["fractions"].items():
        for name, side in sides.items():
            line = f"    {fraction} {name}: {side['step_ms']['median']:.1f}"
            if "exposed_ms" in side:
                line += (
                    f", {side['exposed_ms']:.1f} ({side['exposed_share']:.1%}), "
                    f"{side['overlap']:.0%}"
                )
            if "host_nbytes" in side:
                line += f", {side['device_nbytes'] / 1e6:.0f}, {side['host_nbytes'] / 1e6:.0f}"
            lines.append(line if side["are_losses_equal"] else f"{line}; LOSSES DIFFER")
    return lines
