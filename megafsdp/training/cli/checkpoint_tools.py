"""The commands of ``megafsdp ckpt``: one parser and one call of a tool each.

All run in one process without a GPU. Each prints text, or JSON with ``--json``; a progress bar goes
to standard error, on a terminal only. The tools themselves are in megafsdp/checkpoint; this file
adds what only the run knows: where its checkpoints are and which model they have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megafsdp.checkpoint import export_hf_checkpoint, import_hf_checkpoint
from megafsdp.checkpoint.convert import ConvertOptions, Format, convert
from megafsdp.checkpoint.huggingface.checkpoints import stored_config
from megafsdp.checkpoint.huggingface.plan import fields_of
from megafsdp.checkpoint.tools.diff import diff
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.summary import inspect
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.data.tokenizer import TOKENIZER_CONFIG_FILES, TOKENIZER_FILE
from megafsdp.errors import CheckpointError, ConfigError, expected
from megafsdp.training.metrics.cadence import cadence
from megafsdp.training.metrics.events import Event
from megafsdp.training.pictures.run_folder import read_runs
from megafsdp.training.run_folder import checkpoints_of, config_in, root_to_publish_in

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "keep": None}
_DIRECTORY = "a run's folder, save root, or one checkpoint"
# As in diff(1): 0 is equal, 1 is different.
_ODD_EXIT_CODE = 1


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", help=_DIRECTORY)
    add("target", help="the new directory")
    add("--step", type=int, help="step; the latest by default")
    add(
        "--config",
        type=os.path.expanduser,
        help="config.json of the model, where the checkpoint does not say it",
    )
    add("--vocab-size", type=int, help="rows of the vocabulary to keep; the padding goes")
    add("--dtype", choices=tuple(_DTYPES), default="keep", help="dtype of the files")
    add("--max-shard-gb", type=float, default=5.0, help="size of a file, in units of 10**9 bytes")
    add(
        "--tokenizer",
        type=os.path.expanduser,
        help="tokenizer.json to add, or its folder, with its configuration",
    )
    _add_output(parser)
    parser.set_defaults(run=_export)


def _add_import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="directory with safetensors files and config.json")
    add("directory", help="save root of the new checkpoint")
    add("--step", type=int, default=0, help="step that it is published as")
    add(
        "--padded-vocab-size", type=int, help="rows of the embedding; those of the files by default"
    )
    add("--keep-names", action="store_true", help="for a model of transformers, not one of ours")
    add("--dtype", choices=tuple(_DTYPES), default="fp32", help="dtype of the main weights")
    _add_output(parser)
    parser.set_defaults(run=_import)


@dataclass(frozen=True, slots=True)
class _TokenizerFile:
    """A tokenizers file, or its folder, to copy beside the exported model.

    The configuration that transformers wrote beside it is copied too: without it documents would
    end with another token.

    Raises:
        ConfigError: There is no such file.
    """

    path: Path

    @property
    def _file(self) -> Path:
        return self.path / TOKENIZER_FILE if self.path.is_dir() else self.path

    def __post_init__(self) -> None:
        if not self._file.is_file():
            raise ConfigError(
                expected(
                    "a tokenizers JSON file",
                    "no such file",
                    where=f"--tokenizer {self.path}",
                    hint="Name the file that the run was prepared with, or its folder",
                )
            )

    def save_pretrained(self, directory: str, /) -> None:
        shutil.copyfile(self._file, Path(directory) / TOKENIZER_FILE)
        for name in TOKENIZER_CONFIG_FILES:
            if (beside := self._file.with_name(name)).is_file():
                shutil.copyfile(beside, Path(directory) / name)


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    """Name the target where the system does not let a tool read or write a file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError.expected(
            "files that can be read and a place that can be written to",
            f"{type(error).__name__}: {error}",
            where=f"writing '{target}'",
            hint="Make room on its disk, or give another place",
        ) from error


def _export(options: argparse.Namespace) -> int:
    _check(
        "--max-shard-gb",
        options.max_shard_gb,
        1 <= options.max_shard_gb * 10**9 < math.inf,
        "a size above 0",
        "Give the size of a file, such as 5 for 5 * 10**9 bytes",
    )
    tokenizer = None if options.tokenizer is None else _TokenizerFile(Path(options.tokenizer))
    with _writing(options.target):
        made = export_hf_checkpoint(
            checkpoints_of(options.directory),
            options.target,
            step=options.step,
            config=_config(options),
            dtype=_DTYPES[options.dtype],
            max_shard_nbytes=int(options.max_shard_gb * 10**9),
            tokenizer=tokenizer,
            show_progress=not options.no_progress,
        )
    print(made.to_json() if options.json else made.describe())
    return 0


def _import(options: argparse.Namespace) -> int:
    with _writing(options.directory):
        made = import_hf_checkpoint(
            options.source,
            root_to_publish_in(options.directory),
            step=options.step,
            padded_vocab_size=options.padded_vocab_size,
            keeps_names=options.keep_names,
            dtype=_DTYPES[options.dtype],
            show_progress=not options.no_progress,
        )
    print(made.to_json() if options.json else made.describe())
    return 0


def _config(options: argparse.Namespace) -> dict[str, object] | None:
    """Return the fields of config.json: from a file, or from the run; None if neither is there."""
    found = _config_of_run(options) if options.config is None else _config_file(options.config)
    if found is None or options.vocab_size is None:
        return found
    return {**found, "vocab_size": options.vocab_size}


def _config_file(name: str) -> dict[str, object]:
    try:
        return dict(json.loads(Path(name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            expected(
                "the fields of a model's config in JSON",
                f"{type(error).__name__}: {error}",
                where=f"--config {name}",
                hint="Give a config.json as transformers writes it",
            )
        ) from error


def _config_of_run(options: argparse.Namespace) -> dict[str, object] | None:
    with CheckpointReader(checkpoints_of(options.directory), options.step) as reader:
        extra = reader.object("extra")
    config = config_in(extra)
    return stored_config(extra) if config is None else fields_of(config.model.resolve())


def add_ckpt_commands(parser: argparse.ArgumentParser) -> None:
    """Add the tools to the parser of ``megafsdp ckpt``; each sets ``run``."""
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    _add_inspect(tools.add_parser("inspect", help="list what a checkpoint holds"))
    _add_verify(tools.add_parser("verify", help="read a whole checkpoint and list its faults"))
    _add_diff(tools.add_parser("diff", help="compare two checkpoints"))
    _add_convert(tools.add_parser("convert", help="write a checkpoint in another format"))
    _add_export(tools.add_parser("export-hf", help="write a checkpoint's weights for transformers"))
    _add_import(tools.add_parser("import-hf", help="make a checkpoint from Hugging Face files"))
    _add_cadence(tools.add_parser("cadence", help="say how often a run should save"))


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
    parser.add_argument("left", metavar="A", help=_DIRECTORY)
    parser.add_argument("right", metavar="B", help=_DIRECTORY)
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
    parser.add_argument("source", help=f"{_DIRECTORY}, or a torch.save file")
    parser.add_argument("destination", help="file to write, or save root to publish in")
    names = [wanted.value for wanted in Format]
    parser.add_argument("--to", required=True, choices=names, help="format to write")
    parser.add_argument("--step", type=int, help="step to read, or to give to a torch file")
    parser.add_argument(
        "--fused-like",
        metavar="CKPT",
        help="split the fused parameters of a torch file as this checkpoint or run has them",
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
    parser.add_argument(
        "--separate-experts",
        action="store_true",
        help="keep the name of each expert of a Megatron-LM checkpoint, in place of a stack",
    )
    _add_output(parser)
    parser.set_defaults(run=_convert)


def _add_cadence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder",
        type=os.path.expanduser,
        metavar="RUN",
        help="a run's folder, in which it has saved",
    )
    parser.add_argument(
        "--mtbf-hours",
        type=float,
        required=True,
        help="hours between failures of the whole job: of one machine, divided by their number",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_cadence)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help=_DIRECTORY)
    parser.add_argument("--step", type=int, help="step; the latest by default")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")


def _inspect(options: argparse.Namespace) -> int:
    summary = inspect(checkpoints_of(options.directory), options.step, keys=options.keys)
    print(summary.to_json() if options.json else summary.describe())
    return 0


def _verify(options: argparse.Namespace) -> int:
    directory = checkpoints_of(options.directory)
    report = verify(directory, options.step, show_progress=not options.no_progress)
    print(report.to_json() if options.json else report.describe())
    return 0 if report.is_sound else _ODD_EXIT_CODE


def _diff(options: argparse.Namespace) -> int:
    for name, value in (("--rtol", options.rtol), ("--atol", options.atol)):
        what = "a finite number of at least 0"
        _check(name, value, 0 <= value < math.inf, what, "Give a tolerance such as 1e-6")
    report = diff(
        checkpoints_of(options.left),
        checkpoints_of(options.right),
        rtol=options.rtol,
        atol=options.atol,
        ignore=options.ignore,
        show_progress=not options.no_progress,
    )
    print(report.to_json() if options.json else report.describe())
    return 0 if report.is_equal else _ODD_EXIT_CODE


def _convert(options: argparse.Namespace) -> int:
    to, destination, like = Format(options.to), options.destination, options.fused_like
    with _writing(destination):
        written = convert(
            checkpoints_of(options.source),
            root_to_publish_in(destination) if to is Format.MEGAFSDP else destination,
            to,
            options.step,
            options=ConvertOptions(
                fused_like=None if like is None else checkpoints_of(like),
                precision=options.precision,
                transformer_impl=options.transformer_impl,
                ignore=options.ignore,
                separate_experts=options.separate_experts,
            ),
            show_progress=not options.no_progress,
        )
    print(json.dumps({"written": str(written)}) if options.json else written)
    return 0


def _cadence(options: argparse.Namespace) -> int:
    _check(
        "--mtbf-hours",
        options.mtbf_hours,
        0 < options.mtbf_hours < math.inf,
        "a number of hours above 0",
        "Give the mean time between failures of the whole job, such as 24",
    )
    (run,) = read_runs([options.run_folder])
    found = cadence(run.steps, run.events_of(Event.SAVED), mtbf_s=3600 * options.mtbf_hours)
    print(found.to_json() if options.json else found.describe())
    return 0


def _check(option: str, value: float, is_sound: bool, what: str, hint: str) -> None:
    if not is_sound:
        raise ConfigError(expected(what, value, where=option, hint=hint))
