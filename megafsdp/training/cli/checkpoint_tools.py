"""The commands ``megafsdp ckpt``: ``inspect``, ``verify``, ``diff`` and ``convert``.

Those for Hugging Face files are in ``hf_cli``. All run in one process without a GPU. Each prints
text, or JSON with ``--json``; a progress bar goes to standard error, on a terminal only.
"""

from __future__ import annotations

import argparse
import json

from megafsdp.checkpoint.convert import ConvertOptions, Format, convert
from megafsdp.checkpoint.tools.diff import diff
from megafsdp.checkpoint.tools.summary import inspect
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.training.cli.hf_cli import add_hf_commands

# As of diff(1): 0 is equal, 1 is different.
_ODD_EXIT_CODE = 1


def add_ckpt_commands(parser: argparse.ArgumentParser) -> None:
    """Add the tools to the parser of ``megafsdp ckpt``; each sets ``run``."""
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    _add_inspect(tools.add_parser("inspect", help="list what a checkpoint holds"))
    _add_verify(tools.add_parser("verify", help="read a whole checkpoint and list its faults"))
    _add_diff(tools.add_parser("diff", help="compare two checkpoints"))
    _add_convert(tools.add_parser("convert", help="write a checkpoint in another format"))
    add_hf_commands(tools)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument(
        "--keys",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="list only keys like these, such as 'model.*.bias'",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_inspect)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    _add_output(parser)
    parser.set_defaults(run=_verify)


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("left", metavar="A", help="save root, or one checkpoint")
    parser.add_argument("right", metavar="B", help="save root, or one checkpoint")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance; 0 by default")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance; 0 by default")
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave out keys like these, such as 'rng.*' common",
    )
    _add_output(parser)
    parser.set_defaults(run=_diff)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="save root, one checkpoint, or a torch.save file")
    parser.add_argument("destination", help="file to write, or save root to publish in")
    names = [wanted.value for wanted in Format]
    parser.add_argument("--to", required=True, choices=names, help="format to write")
    parser.add_argument("--step", type=int, help="step to read, or to give to a torch file")
    parser.add_argument(
        "--fused-like",
        metavar="CKPT",
        help="split the fused parameters of a torch file as this checkpoint has them",
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp16", "fp32"),
        help="what the Megatron-LM job will run in; bf16 by default",
    )
    parser.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        help="its option of this name; transformer_engine by default",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave out keys like these of a Megatron-LM checkpoint",
    )
    _add_output(parser)
    parser.set_defaults(run=_convert)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="save root, or one checkpoint")
    parser.add_argument("--step", type=int, help="step; the latest by default")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")


def _inspect(options: argparse.Namespace) -> int:
    summary = inspect(options.directory, options.step, keys=options.keys)
    print(summary.to_json() if options.json else summary.describe())
    return 0


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.directory, options.step, show_progress=not options.no_progress)
    print(report.to_json() if options.json else report.describe())
    return 0 if report.is_sound else _ODD_EXIT_CODE


def _diff(options: argparse.Namespace) -> int:
    report = diff(
        options.left,
        options.right,
        rtol=options.rtol,
        atol=options.atol,
        ignore=options.ignore,
        show_progress=not options.no_progress,
    )
    print(report.to_json() if options.json else report.describe())
    return 0 if report.is_equal else _ODD_EXIT_CODE


def _convert(options: argparse.Namespace) -> int:
    written = convert(
        options.source,
        options.destination,
        Format(options.to),
        options.step,
        options=ConvertOptions(
            fused_like=options.fused_like,
            precision=options.precision,
            transformer_impl=options.transformer_impl,
            ignore=options.ignore,
        ),
        show_progress=not options.no_progress,
    )
    print(json.dumps({"written": str(written)}) if options.json else written)
    return 0
