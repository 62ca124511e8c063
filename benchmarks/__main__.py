"""``python -m benchmarks CASE``: run a case, show it, and write its record."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import (
    adam,
    checkpoint,
    exits,
    fsdp2_quantized,
    fsdp_step,
    gated_delta,
    host,
    layout,
    moe_step,
    offload,
    optimizer_step,
    quantize,
    scale,
    tp_step,
    trees,
)
from benchmarks.record import RECORDS, write

CASES = {
    "adam": adam,
    "checkpoint": checkpoint,
    "exits": exits,
    "fsdp2_quantized": fsdp2_quantized,
    "fsdp_step": fsdp_step,
    "gated_delta": gated_delta,
    "host": host,
    "layout": layout,
    "moe_step": moe_step,
    "offload": offload,
    "optimizer_step": optimizer_step,
    "quantize": quantize,
    "scale": scale,
    "tp_step": tp_step,
    "trees": trees,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the case named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record")
    cases = parser.add_subparsers(dest="case", required=True)
    for name, case in CASES.items():
        case.add_arguments(cases.add_parser(name, description=case.__doc__))
    options = parser.parse_args(arguments)
    case = CASES[options.case]
    results = case.run(options)
    print(case.describe(results))
    print(f"record: {write(options.case, results, directory=options.records)}")


if __name__ == "__main__":
    main()
