"""Train the same model with each recipe of quantized weights, and draw the losses.

    python examples/quantized.py
    torchrun --nproc-per-node 2 examples/quantized.py --recipes mxfp8 nvfp4 --plot losses.svg \
        --weights-only --train.steps 200

Each recipe is a run of its own from the same weights on the same samples, beside one in bf16. Seeds
move the losses of so small a model more than recipes do: look for a curve that leaves the others,
not for a ranking. Any value of examples/configs/quantized.yaml can be overridden. Runs go to
runs/quantized, which is emptied first.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

from megafsdp.data import PrepOptions, prepare
from megafsdp.quantize import RECIPE_NAMES
from megafsdp.training import parse_config, train

CONFIG = Path(__file__).parent / "configs" / "quantized.yaml"
FOLDER = Path("runs/quantized")
BASE = "bf16"
COLOURS = ("#444", "#36c", "#c33", "#292", "#c80", "#83a")
WIDTH, HEIGHT, MARGIN = 720, 400, 50


def losses_of(name: str, words: list[str]) -> list[float]:
    """Train a run with a given name; return the loss of each step."""
    config = parse_config([f"--config={CONFIG}", *words, f"--run.directory={FOLDER / name}"])
    losses: list[float] = []

    def observe(step: int, result: Any) -> None:
        losses.append(result.loss)

    train(config, on_step=observe)
    return losses


def table(runs: dict[str, list[float]]) -> str:
    """Return the runs as lines: first and last losses, and the ratio of the last to bf16's."""
    base = runs[BASE][-1]
    lines = [f"{'recipe':>12} {'first':>8} {'last':>8} {'last / bf16':>12}"]
    lines += [
        f"{name:>12} {losses[0]:8.4f} {losses[-1]:8.4f} {losses[-1] / base:12.4f}"
        for name, losses in runs.items()
    ]
    return "\n".join(lines)


def svg(runs: dict[str, list[float]]) -> str:
    """Return a picture: a curve for each run, losses over steps."""
    points = [loss for losses in runs.values() for loss in losses]
    low, high = min(points), max(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        "<style>text {font: 12px sans-serif} polyline {fill: none; stroke-width: 1.5}</style>",
        f'<text x="4" y="{MARGIN}">{high:.2f}</text>',
        f'<text x="4" y="{HEIGHT - MARGIN}">{low:.2f}</text>',
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 10}">loss over steps</text>',
    ]
    for index, (name, losses) in enumerate(runs.items()):
        colour = COLOURS[index % len(COLOURS)]
        across = (WIDTH - 3 * MARGIN) / max(len(losses) - 1, 1)
        down = (HEIGHT - 2 * MARGIN) / max(high - low, 1e-9)
        line = " ".join(
            f"{MARGIN + across * step:.1f},{MARGIN + down * (high - loss):.1f}"
            for step, loss in enumerate(losses)
        )
        parts.append(f'<polyline points="{line}" stroke="{colour}"/>')
        y = MARGIN + 16 * index
        parts.append(f'<text x="{WIDTH - 2 * MARGIN + 10}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Train once for each recipe and show the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--recipes", nargs="+", choices=RECIPE_NAMES, default=list(RECIPE_NAMES))
    parser.add_argument("--weights-only", action="store_true", help="quantize no activations")
    parser.add_argument("--plot", type=Path, default=FOLDER / "losses.svg", help="an SVG file")
    options, words = parser.parse_known_args()
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        shutil.rmtree(FOLDER, ignore_errors=True)
        # Other ranks wait for this one before they read data.
        sources = str(Path(json.__file__).parents[1] / "asyncio" / "*.py")
        prepare(PrepOptions(output=str(FOLDER / "data"), inputs=(sources,), validation_every=0))
    runs = {BASE: losses_of(BASE, words)}
    for recipe in options.recipes:
        choice = [f"--precision.recipe={recipe}"]
        if options.weights_only:
            choice.append("--precision.quantize_activations=false")
        runs[recipe] = losses_of(recipe, [*words, *choice])
    if is_first:
        print(table(runs))
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        options.plot.write_text(svg(runs))
        print(f"curves: {options.plot}")


if __name__ == "__main__":
    main()
