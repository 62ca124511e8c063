"""The commands ``megafsdp ckpt export-hf`` and ``import-hf``.

A run's checkpoint says which model it is of; others are told by ``--config``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from megafsdp.checkpoint import export_hf_checkpoint, import_hf_checkpoint
from megafsdp.checkpoint.huggingface.checkpoints import stored_config
from megafsdp.checkpoint.huggingface.plan import fields_of
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.errors import ConfigError, expected
from megafsdp.training.config.sections import ModelSection

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "keep": None,
}


def add_hf_commands(tools: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to those of ``megafsdp ckpt``."""
    _add_export(tools.add_parser("export-hf", help="write a checkpoint's weights for transformers"))
    _add_import(tools.add_parser("import-hf", help="make a checkpoint from Hugging Face files"))


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", help="save root, or one checkpoint")
    add("target", help="the new directory")
    add("--step", type=int, help="step; the latest by default")
    add("--config", help="config.json of the model, where the checkpoint does not say it")
    add("--vocab-size", type=int, help="rows of the vocabulary to keep; the padding goes")
    add("--dtype", choices=tuple(_DTYPES), default="bf16", help="dtype of the files")
    add("--max-shard-gb", type=float, default=5.0, help="size of a file, in units of 10**9 bytes")
    add("--tokenizer", help="tokenizers JSON file to add, as tokenizer.json")
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


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-progress", action="store_true", help="draw no progress bar")


@dataclass(frozen=True, slots=True)
class _TokenizerFile:
    """A tokenizers file that goes beside the model."""

    path: Path

    def save_pretrained(self, directory: str, /) -> None:
        shutil.copyfile(self.path, Path(directory) / "tokenizer.json")


def _export(options: argparse.Namespace) -> int:
    tokenizer = None if options.tokenizer is None else _tokenizer_file(Path(options.tokenizer))
    made = export_hf_checkpoint(
        options.directory,
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
    made = import_hf_checkpoint(
        options.source,
        options.directory,
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
        return dict(json.loads(Path(name).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            expected(
                "the fields of a model's config in JSON",
                f"{type(error).__name__}: {error}",
                where=f"--config {name}",
                mend="Give a config.json as transformers writes it",
            )
        ) from error


def _config_of_run(options: argparse.Namespace) -> dict[str, object] | None:
    with CheckpointReader(options.directory, options.step) as reader:
        extra = reader.object("extra")
    run = extra.get("config") if isinstance(extra, Mapping) else None
    section = run.get("model") if isinstance(run, Mapping) else None
    if not isinstance(section, Mapping):
        return stored_config(extra)
    known = {field.name for field in fields(ModelSection)}
    model = ModelSection(**{k: v for k, v in section.items() if k in known})
    return fields_of(model.resolve())


def _tokenizer_file(path: Path) -> _TokenizerFile:
    if not path.is_file():
        raise ConfigError(
            expected(
                "a tokenizers JSON file",
                "no such file",
                where=f"--tokenizer {path}",
                mend="Name the file that the run was prepared with",
            )
        )
    return _TokenizerFile(path)
