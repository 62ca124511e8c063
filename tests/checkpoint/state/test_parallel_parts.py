"""Stacks of experts and linear attention in parts on disk: saved at tp 2 and ep 2, loaded anywhere.

What the parts are called is spelt out here a second time, on purpose.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megafsdp import fully_shard_model
from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.errors import CheckpointError
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models import ModelConfig, build_model, unit_classes
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.parallel import parallelize
from tests.checkpoint.sharding import differences, full
from tests.ranks import Ranks
from tests.training.runs import stored_tensors

CONFIG = ModelConfig(
    architecture="qwen3_next",
    num_layers=2,
    hidden_size=20,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=10,
    vocab_size=322,
    max_sequence_length=16,
    num_experts=4,
    num_experts_per_token=2,
    moe_ffn_hidden_size=12,
    shared_expert_ffn_hidden_size=6,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
    rotary_fraction=0.2,
)
STEP = 2
# End of a name -> names of the parts on disk, the dim along which they lie, and their sizes.
GDN = ("query", "key", "value", "z", "beta", "alpha")
PARTS: dict[str, tuple[tuple[str, ...], int, tuple[int, ...]]] = {
    "mlp.experts.linear_fc1.weight": (("_w", "_v"), 1, (12, 12)),
    "mlp.shared_experts.linear_fc1.weight": (("_w", "_v"), 0, (6, 6)),
    "in_proj.weight": (tuple(f".{name}" for name in GDN), 0, (6, 6, 20, 20, 4, 4)),
    "conv1d.weight": (tuple(f".{name}" for name in GDN[:3]), 0, (6, 6, 20)),
}
Tensors = dict[str, torch.Tensor]


def _build(tp: int, ep: int, seed: int) -> tuple[nn.Module, FusedAdam]:
    meshes = ParallelDims(tp=tp, ep=ep).build("cpu")
    model = parallelize(build_model(CONFIG, seed=seed), meshes)
    units = unit_classes(CONFIG)
    fully_shard_model(model, units, mesh=meshes.data, expert_mesh=meshes.experts)
    return model, FusedAdam(model.parameters(), lr=0.01)


def _wholes(model: nn.Module, optimizer: FusedAdam) -> Tensors:
    """Return whole weights and states by key; collective."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = full(parameter)
        for state, value in optimizer.state[parameter].items():
            found[f"optimizer.state.{name}.{state}"] = full(value)
    return found


def _train_and_save(root: str) -> Tensors:
    model, optimizer = _build(2, 2, 0)
    for step in range(STEP):
        tokens = torch.randint(0, 322, (4, 13), generator=torch.Generator().manual_seed(step))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(root, step=STEP, model=model, optimizer=optimizer)
    return _wholes(model, optimizer)


def _load_and_save(tp: int, ep: int, source: str, target: str) -> Tensors:
    model, optimizer = _build(tp, ep, 5)
    load(source, model=model, optimizer=optimizer)
    save(target, step=STEP, model=model, optimizer=optimizer)
    return _wholes(model, optimizer)


def _on_disk(key: str, tensor: torch.Tensor) -> Tensors:
    """Cut a whole tensor by plain slicing to what a checkpoint has of it."""
    prefix = "optimizer.state." if key.startswith("optimizer.state.") else ""
    name, dot, state = key.removeprefix(prefix).rpartition(".") if prefix else (key, "", "")
    ending = dot + state
    for end, (parts, dim, sizes) in PARTS.items():
        if name.endswith(end):
            pieces = tensor.split(sizes, dim) if tensor.ndim else [tensor] * len(parts)
            return {
                f"{prefix}{name}{part}{ending}": piece
                for part, piece in zip(parts, pieces, strict=True)
            }
    return {key: tensor}


def test_parts_saved_at_tp_and_ep_are_loaded_at_every_degree(ranks: Ranks, tmp_path: Path) -> None:
    """Keys and slices are those of one process; weights and flat states come back bit by bit."""
    source = str(tmp_path / "source")
    wholes, *others = ranks(4).run(_train_and_save, source)
    assert all(differences(other, wholes) == [] for other in others)
    assert len(wholes) == 4 * len(list(build_model(CONFIG).parameters()))
    wanted = {k: t for key, whole in wholes.items() for k, t in _on_disk(key, whole).items()}
    with CheckpointReader(source) as reader:
        assert set(reader.keys()) == set(wanted)
        assert differences({key: reader.tensor(key) for key in wanted}, wanted) == []
        assert differences({key: reader.tensor(key) for key in wholes}, wholes) == []
    at = "decoder.layers.0"
    assert wanted[f"optimizer.state.{at}.mlp.experts.linear_fc1.weight_v.exp_avg"].any()
    assert wanted[f"optimizer.state.{at}.self_attention.in_proj.weight.alpha.exp_avg_sq"].any()
    for num_ranks, tp, ep in ((1, 1, 1), (3, 1, 1), (4, 1, 4), (4, 2, 1)):
        target = str(tmp_path / f"{num_ranks}-{tp}-{ep}")
        for loaded in ranks(num_ranks).run(_load_and_save, tp, ep, source, target):
            assert differences(loaded, wholes) == []
        assert (
            differences(stored_tensors(Path(target), STEP), stored_tensors(Path(source), STEP))
            == []
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 3}, "mlp.experts.linear_fc1.weight_w"),
        (
            {"layer_types": ("full_attention", "linear_attention")},
            "model.decoder.layers.0.self_attention.linear_qkv.weight",
        ),
    ],
)
def test_a_checkpoint_of_other_experts_or_layer_types_is_refused(
    change: dict, words: str, tmp_path: Path
) -> None:
    """What differs is named, and the model keeps its values."""
    save(tmp_path, step=STEP, model=build_model(CONFIG, seed=0))
    model = build_model(replace(CONFIG, **change), seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, model=model)
    assert words in str(caught.value)
    assert differences(dict(model.state_dict()), before) == []
