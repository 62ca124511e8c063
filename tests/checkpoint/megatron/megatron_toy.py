"""Directories as Megatron-LM writes them with ``fsdp_dtensor``, made by plain torch alone.

Names are spelt out here a second time, on purpose: nothing of ``megafsdp.checkpoint`` is used.
"""

from __future__ import annotations

import argparse
import enum
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafsdp.models import ModelConfig, build_model

STEP = 2
SCHEDULE = {
    "max_lr": 0.01,
    "lr_warmup_steps": 4,
    "num_steps": 16,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 40,
    "min_lr": 0.001,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 40,
}
HYBRID = {
    "num_experts": 3,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 4,
    "shared_expert_ffn_hidden_size": 8,
    "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 3,
    "rotary_fraction": 0.5,
}
# Rows of the two fused parameters of a gated delta net of these sizes.
GDN_ROWS = {
    "in_proj.weight": {"query": 8, "key": 8, "value": 12, "z": 12, "beta": 4, "alpha": 4},
    "conv1d.weight": {"query": 8, "key": 8, "value": 12},
}
FIELDS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-5, "bias_correction": True}
IDENTITY = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


class Backend(enum.Enum):
    """A class of the job that nobody else has."""

    FLASH = 1


class Bomb:
    """Runs a command when it is unpickled by an unwary reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def config(architecture: str) -> ModelConfig:
    """Return the smallest model of an architecture."""
    more = HYBRID if architecture == "qwen3_next" else {}
    return ModelConfig(
        **more,
        architecture=architecture,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=4,
        ffn_hidden_size=12,
        vocab_size=33,
        max_sequence_length=16,
        tie_embeddings=architecture == "gpt",
        init_std=0.2,
    )


def build(architecture: str, seed: int) -> nn.Module:
    """Build the model with random values."""
    torch.manual_seed(seed)
    model = build_model(config(architecture))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def groups(model: nn.Module) -> list[dict]:
    """Return two parameter groups, matrices with decay and vectors without."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return torch's optimizer with the hyperparameters of ``FIELDS``."""
    return torch.optim.AdamW(groups(model), lr=0.01, betas=(0.9, 0.95), eps=1e-5)


def tokens(step: int) -> torch.Tensor:
    """Return a batch of two rows."""
    return torch.randint(0, 33, (2, 9), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps on whole batches."""
    for step in steps:
        batch = tokens(step)
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(architecture: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a plain model and its optimizer after ``STEP`` steps."""
    model = build(architecture, 0)
    optimizer = adamw(model)
    train(model, optimizer, range(STEP))
    return model, optimizer


def te_name(name: str, architecture: str) -> str:
    """Return the name that a Transformer Engine layer gives a norm."""
    is_hybrid = architecture == "qwen3_next"
    linear = "in_proj" if is_hybrid and ".layers.0." in name else "linear_qkv"
    name = re.sub(r"\.input_layernorm\.", f".self_attention.{linear}.layer_norm_", name)
    # A layer of experts has no map that could hold the norm.
    return (
        name if is_hybrid else re.sub(r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_", name)
    )


def of_experts(name: str, tensor: torch.Tensor, is_te: bool) -> dict[str, torch.Tensor]:
    """Return a tensor, or that of each expert if it is a stack; a scalar is every expert's."""
    if ".experts.linear_fc" not in name:
        return {name: tensor}
    at, _, leaf = name.rpartition(".experts.")
    count = HYBRID["num_experts"]
    names = (f"{leaf}{i}" if is_te else f"local_experts.{i}.{leaf}" for i in range(count))
    tensors = tensor if tensor.ndim else [tensor] * count
    return {f"{at}.experts.{n}": t for n, t in zip(names, tensors, strict=True)}


def split(
    name: str, tensor: torch.Tensor, architecture: str, is_te: bool = True
) -> dict[str, torch.Tensor]:
    """Return a tensor by name, or its parts if it is SwiGLU's, a gated delta net's or a stack."""
    for end, rows in GDN_ROWS.items():
        if name.endswith(end):
            pieces = tensor.split(list(rows.values())) if tensor.ndim else [tensor] * len(rows)
            return {f"{name}.{part}": p for part, p in zip(rows, pieces, strict=True)}
    found = of_experts(name, tensor, is_te)
    if "linear_fc1" not in name or architecture == "gpt" or "layer_norm" in name:
        return found
    halves = {n: t.chunk(2, dim=0) if t.ndim else (t, t) for n, t in found.items()}
    return {
        f"{n}{end}": t
        for n, pair in halves.items()
        for end, t in zip(("_w", "_v"), pair, strict=True)
    }


def arguments(**more: object) -> argparse.Namespace:
    """Return the arguments of a job."""
    return argparse.Namespace(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=4,
        consumed_train_samples=16,
        params_dtype=torch.bfloat16,
        untie_embeddings_and_output_weights=False,
        **more,
    )


def rng(seed: int) -> dict[str, object]:
    """Return random states as a job gathers them."""
    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
        "cuda_rng_state": torch.arange(16, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(8, dtype=torch.uint8)},
    }


def their_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    architecture: str,
    *,
    wrappers: int = 3,
    is_te: bool = True,
    has_step_in_group: bool = True,
) -> dict:
    """Return the nested dict that a job hands to torch DCP."""
    states: dict[str, dict] = {}
    meta: dict[str, dict] = {}
    names = {
        parameter: te_name(name, architecture) if is_te else name
        for name, parameter in model.named_parameters()
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            key = "module." * wrappers + names[parameter]
            fields = FIELDS | IDENTITY | {"weight_decay": group["weight_decay"]}
            fields["wd_mult"] = 1.0 if group["weight_decay"] else 0.0
            if has_step_in_group:
                fields["step"] = STEP
            meta |= {one: dict(fields) for one in of_experts(key, parameter, is_te)}
            for state, value in optimizer.state[parameter].items():
                if state == "step" and has_step_in_group:
                    continue
                for part, tensor in split(key, value, architecture, is_te).items():
                    states.setdefault(part, {})[state] = tensor.clone()
    weights: dict[str, object] = {}
    for parameter, name in names.items():
        value = parameter.detach()
        # Norms of a job with zero-centred ones are stored less 1; our others are as well.
        value = value - 1 if name.endswith("out_norm.weight") else value
        parts = split(f"module.{name}", value, architecture, is_te)
        weights |= {part: tensor.clone() for part, tensor in parts.items()}
    if is_te:
        weights["module.decoder.layers.0.mlp.linear_fc1._extra_state"] = b"scales"
    return {
        "model": weights,
        "optimizer": {"state": states, "param_to_group_meta": meta},
        "args": arguments(apply_layernorm_1p=True, moe_grouped_gemm=is_te)
        if architecture == "qwen3_next"
        else arguments(),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "num_floating_point_operations_so_far": 1.5e9,
        "opt_param_scheduler": dict(SCHEDULE),
        "rng_state": {"(0, 0)": [rng(1), rng(2)]},
    }


def without_extra_state(state: dict) -> None:
    """Take out what no other program can use."""
    for key in [key for key in state["model"] if key.endswith("_extra_state")]:
        del state["model"][key]


def quietly(function: Callable[..., None], *arguments: object, **options: object) -> None:
    """Call torch DCP in one process without its warning that this is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        function(*arguments, **options)


def save(state: dict, root: Path) -> Path:
    """Write the dict by torch DCP alone, with the tracker file; return the root."""
    quietly(dcp.save, state, checkpoint_id=root / f"iter_{STEP:07d}", no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    return root


def load(state: dict, directory: Path) -> dict:
    """Fill a nested dict by torch DCP alone."""
    quietly(dcp.load, state, checkpoint_id=directory, no_dist=True)
    return state


def make(
    root: Path, architecture: str, **options: object
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train, write the directory, and return what was written."""
    model, optimizer = trained(architecture)
    save(their_state(model, optimizer, architecture, **options), root)
    return model, optimizer


def read(directory: Path) -> dict[str, Any]:
    """Read every key of a directory by torch DCP alone."""
    metadata = FileSystemReader(directory).read_metadata()
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    return load(state, directory)
