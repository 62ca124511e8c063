"""The console entry ``megafsdp``: train, prep, generate, report, doctor, ckpt.

Errors in the caller's configuration, data and checkpoints, and missing ranks, end the process with
one message and a nonzero code; other errors keep their traceback. Under torchrun the message also
appears below "Root Cause".
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from megafsdp.checkpoint.state.merge import library_versions
from megafsdp.data import PrepOptions, prepare
from megafsdp.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RankError
from megafsdp.training.cli.checkpoint_tools import add_ckpt_commands
from megafsdp.training.config.parse import parse_config
from megafsdp.training.dry_run.dry_run import dry_run, split_options
from megafsdp.training.generate import GenerateOptions, generate
from megafsdp.training.loop import train
from megafsdp.training.metrics.terminal import escape_controls
from megafsdp.training.metrics.tracker import check_trackers
from megafsdp.training.pictures.dry_run_page import write_dry_run
from megafsdp.training.pictures.page import require_library
from megafsdp.training.pictures.run_report import write_report
from megafsdp.training.process.doctor import examine
from megafsdp.training.process.failure import describe, is_recorded, report_failure

_CONFIG_EXIT_CODE = 2
_FAILURE_EXIT_CODE = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit code.

    Args:
        arguments: Words after the program's name; None takes the process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _configure_logging()
    try:
        # None means success too: the command has no code, or it exited with 0.
        return (record(_run) if is_recorded() else _run)(words) or 0
    except (ConfigError, NotImplementedError) as error:
        report_failure(describe(error))
        return _CONFIG_EXIT_CODE
    except (DataError, CheckpointError, NonFiniteError, RankError) as error:
        report_failure(describe(error))
        return _FAILURE_EXIT_CODE


def _run(words: Sequence[str]) -> int | None:
    if words[:1] == ["train"]:
        # The options of train are the configuration's and have their own --help.
        _train(words[1:])
        return None
    options = _parser().parse_args(words)
    # Only tools that look for something return a code.
    return options.run(options)


def _train(words: Sequence[str]) -> None:
    wanted, rest = split_options(words)
    config = parse_config(rest)
    if wanted is None:
        train(config)
        return
    if wanted.html_path is not None:
        require_library()
    check_trackers(config)
    report = dry_run(config, wanted.world_size)
    if not _is_first():
        return
    print(report.to_json() if wanted.as_json else report.describe())
    if wanted.html_path is not None:
        nbytes = write_dry_run(report, Path(wanted.html_path).expanduser())
        # Standard output may be read as JSON.
        print(f"wrote {wanted.html_path} ({nbytes / 1e6:.1f} MB)", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megafsdp", description="Fully sharded data parallelism.")
    own, *others = (f"{name} {version}" for name, version in library_versions().items())
    said = f"{own} ({', '.join(others)})"
    parser.add_argument("--version", action="version", version=said)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("train", help="pretrain a model; see megafsdp train --help", add_help=False)
    _add_prep(commands.add_parser("prep", help="turn text into token files"))
    _add_generate(commands.add_parser("generate", help="let the model of a run go on with a text"))
    _add_report(commands.add_parser("report", help="draw runs as one HTML file"))
    doctor = commands.add_parser("doctor", help="list what works on this machine and what is lost")
    doctor.set_defaults(run=_doctor)
    add_ckpt_commands(commands.add_parser("ckpt", help="look at checkpoints and convert them"))
    return parser


def _add_prep(parser: argparse.ArgumentParser) -> None:
    default = PrepOptions(output="")
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        default=[],
        type=os.path.expanduser,
        help="text, .jsonl or .json (also .gz, .xz, .zst), .parquet, folders or glob patterns",
    )
    # A shell expands no ~ within --option=~/path.
    add("--output", required=True, type=os.path.expanduser, help="folder of the token files")
    add("--stdlib", action="store_true", help="read the sources of Python's standard library")
    add("--docstrings", action="store_true", help="take only the docstrings of Python files")
    add("--suffixes", nargs="+", default=default.suffixes, help="endings to read in folders")
    add("--json-key", default=default.json_key, help="key, or column, of the text")
    add("--encoding-errors", choices=("strict", "replace"), default=default.encoding_errors)
    add(
        "--tokenizer",
        default=default.tokenizer,
        type=os.path.expanduser,
        help="byte, or tokenizer.json or its folder",
    )
    add(
        "--no-eod",
        dest="append_eod",
        action="store_false",
        help="do not end documents with a token",
    )
    add(
        "--validation-every",
        type=int,
        default=default.validation_every,
        help="every how many documents one goes to validation; 0 for none",
    )
    add("--seed", type=int, default=default.seed, help="seed of the order of files")
    add("--workers", type=int, default=default.workers, help="processes that tokenize")
    add("--no-progress", action="store_true", help="draw no progress bar")
    add("--force", action="store_true", help="prepare again even if the results are there")
    parser.set_defaults(run=_prep)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    default = GenerateOptions(run="", prompt="")
    add = parser.add_argument
    add("run_folder", metavar="RUN", help="a run's folder, save root, or one checkpoint")
    add("--prompt", required=True, help="what the text begins with; may be empty")
    add("--step", type=int, help="step of the checkpoint; the latest by default")
    add("--tokens", type=int, default=default.tokens, help="length of what follows")
    add("--temperature", type=float, default=default.temperature, help="0 takes the likeliest")
    add("--top-k", type=int, help="draw from so many of the likeliest tokens; from all by default")
    add("--seed", type=int, default=default.seed, help="seed of the draws")
    add(
        "--tokenizer",
        type=os.path.expanduser,
        help="in place of the run's: byte, or tokenizer.json or its folder",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default=default.device)
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    given = {f.name: getattr(options, f.name) for f in fields(GenerateOptions) if f.name != "run"}
    text = generate(GenerateOptions(run=options.run_folder, **given))
    if _is_first():
        print(escape_controls(text))


def _prep(options: argparse.Namespace) -> None:
    given = {f.name: getattr(options, f.name) for f in fields(PrepOptions)}
    lists = {name: tuple(given[name]) for name in ("inputs", "suffixes")}
    record = prepare(PrepOptions(**{**given, **lists}))
    print(f"{options.output}: {record.describe()}")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=os.path.expanduser,
        metavar="RUN",
        help="folder of a run; several are overlaid",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=lambda word: Path(word).expanduser(),
        help="HTML file; report.html in the first run's folder by default",
    )
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    path, nbytes = write_report(options.runs, options.output)
    print(f"wrote {path} ({nbytes / 1e6:.1f} MB)")


def _doctor(options: argparse.Namespace) -> None:
    for finding in examine():
        print(finding.describe())


def _configure_logging() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Only the first rank logs what all ranks would log.
    is_first = _is_first()
    logging.getLogger("megafsdp").setLevel(logging.WARNING if is_first else logging.ERROR)
    # megafsdp.fsdp logs which weights a recipe leaves unquantized.
    for name in ("megafsdp.training", "megafsdp.fsdp"):
        logging.getLogger(name).setLevel(logging.INFO if is_first else logging.ERROR)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
