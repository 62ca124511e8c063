"""What the training tests share: a small corpus, a tiny configuration, and runs on rank pools."""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafsdp import FusedAdam
from megafsdp.data import IndexedDatasetWriter
from megafsdp.training import Config, config_from_dict

SEQUENCE_LENGTH = 16
GLOBAL_BATCH_SIZE = 12
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "head_dim": 16,
    "ffn_hidden_size": 48,
    "max_sequence_length": SEQUENCE_LENGTH,
}
# What makes a mixture of experts of the model, and a hybrid with linear attention.
MIXTURE = {
    "architecture": "qwen3_moe",
    "num_query_groups": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 16,
}
HYBRID = MIXTURE | {
    "architecture": "qwen3_next",
    "shared_expert_ffn_hidden_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rotary_fraction": 0.5,
}


def write_corpus(folder: Path, *, num_documents: int = 60, largest: int = 255) -> dict[str, Any]:
    """Write seeded train and validation files; return the data section that names them."""
    source = random.Random(0)
    for split, count in (("train", num_documents), ("validation", 9)):
        with IndexedDatasetWriter(folder / split, "<u2") as writer:
            for _ in range(count):
                start, length = source.randrange(64), source.randrange(20, 90)
                # Neighbouring tokens are alike, so that there is something to learn.
                writer.add_document([*((start + i // 2) % 64 for i in range(length)), largest])
    return {
        "train": [str(folder / "train")],
        "validation": [str(folder / "validation")],
        "sequence_length": SEQUENCE_LENGTH,
    }


def tiny(folder: Path, **sections: dict[str, Any]) -> Config:
    """Return a run of six steps in ``folder``, whose corpus :func:`write_corpus` wrote there.

    Args:
        folder: Holds the corpus; the run's own folder is ``run`` in it.
        **sections: Values by section, over the tiny ones.
    """
    values: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / "run"), "device": "cpu"},
        "model": dict(MODEL),
        "data": {
            "train": [str(folder / "train")],
            "validation": [str(folder / "validation")],
            "sequence_length": SEQUENCE_LENGTH,
        },
        "optimizer": {"lr": 1e-2, "eps": 1e-5},
        "schedule": {"kind": "wsd", "warmup_samples": 24},
        "train": {"steps": 6, "global_batch_size": GLOBAL_BATCH_SIZE},
        "logging": {"interval_steps": 1},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return config_from_dict(values)


def stored_tensors(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint whole, by torch's own reader."""
    path = directory / f"iter_{step:07d}"
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def numbers_read_late(is_late: bool = True) -> Iterator[None]:
    """Have runs read a step's numbers as on a GPU, where the kernels skip a step by a flag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedAdam, "skips_on_device", property(lambda optimizer: is_late))
        yield
