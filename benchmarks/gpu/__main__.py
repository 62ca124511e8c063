"""``python -m benchmarks.gpu MODULE:FUNCTION``: run one part in this process."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.gpu.part import Report, Size


def main() -> None:
    """Run the function named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("function")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.rehearse:
        importlib.import_module("benchmarks.gpu.absent")
    module, _, function = options.function.partition(":")
    run = getattr(importlib.import_module(module), function)
    run(Size(options.rehearse, options.out), Report(options.report))


if __name__ == "__main__":
    main()
