"""Mixtures and hybrids on meshes with tp and ep: filled from files, computed, written again."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megafsdp import checkpoint, full_state_dict, fully_shard_model
from megafsdp.checkpoint.huggingface import export
from megafsdp.checkpoint.huggingface.plan import hub_state
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import ExpertRange, annotate
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models import LanguageModel, build_model, unit_classes
from megafsdp.parallel import parallelize
from tests.checkpoint.huggingface.allocator import allocated
from tests.checkpoint.huggingface.hf_models import (
    MIXTURES,
    assert_loads,
    assert_same_files,
    our_config,
    our_model,
    read,
    their_config,
    their_model,
    tokens,
)
from tests.ranks import Ranks

# transformers warns of its own future.
pytestmark = pytest.mark.filterwarnings("default")
PADDING = 3
SHARD_NBYTES = 40_000
# Family, number of ranks, and degrees of tp and ep.
PLACES = [
    ("qwen3_next", 2, 2, 1),
    ("qwen3_moe", 2, 1, 2),
    ("qwen3_moe", 4, 2, 2),
    ("qwen3_next", 4, 2, 2),
    *(
        pytest.param(*place, marks=pytest.mark.matrix("round-trips"))
        for place in (("qwen3_moe", 2, 2, 1), ("qwen3_next", 2, 1, 2))
    ),
]


def _divided(family: str, tp: int, ep: int) -> LanguageModel:
    """Return a model of other weights on the meshes of the degrees, a unit a layer."""
    meshes = ParallelDims(tp=tp, ep=ep).build("cpu")
    config = our_config(family, padding=PADDING)
    model = parallelize(build_model(config, seed=7), meshes)
    fully_shard_model(model, unit_classes(config), mesh=meshes.data, expert_mesh=meshes.experts)
    return model


def _there_and_back(family: str, tp: int, ep: int, source: str, target: str) -> torch.Tensor:
    model = _divided(family, tp, ep)
    checkpoint.import_hf(model, source)
    got, wanted = full_state_dict(model), our_model(family, padding=PADDING).state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    with torch.no_grad():
        logits = model.eval()(tokens())
    fields = their_config(family).to_dict()
    checkpoint.export_hf(model, target, config=fields, max_shard_nbytes=SHARD_NBYTES)
    return logits


@pytest.mark.parametrize(("family", "num_ranks", "tp", "ep"), PLACES)
def test_files_are_those_of_transformers_at_every_degree(
    ranks: Ranks, family: str, num_ranks: int, tp: int, ep: int, tmp_path: Path
) -> None:
    """Weights bit by bit in memory and in the files; logits beside transformers' to 1e-5."""
    origin = their_model(family)
    source, target = tmp_path / "saved", tmp_path / "exported"
    origin.save_pretrained(source, max_shard_size="50KB")
    found = ranks(num_ranks).run(_there_and_back, family, tp, ep, str(source), str(target))
    with torch.no_grad():
        wanted = origin(tokens()).logits
    assert wanted.std() > 0.3
    for logits in found:
        got = logits[..., : wanted.shape[-1]]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * wanted.std().item())
    assert len(list(target.glob("*.safetensors"))) > 3
    assert_same_files(source, target)
    assert_loads(target, family, False)


def _peaks(family: str, tp: int, ep: int, source: str, target: str) -> dict[str, int]:
    """Return the peaks of an export and of an import, and what they may be made of."""
    model = _divided(family, tp, ep)
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    # What is asked for beforehand is freed again at once.
    with mock.patch.object(export, "reserve", lambda *unused: torch.empty(0)):
        exporting = allocated(
            lambda: checkpoint.export_hf(model, target, max_shard_nbytes=SHARD_NBYTES)
        )
    read: list[int] = []
    rows = SafetensorsReader.rows

    def noting(self: SafetensorsReader, *args: object, **options: object) -> torch.Tensor:
        found = rows(self, *args, **options)
        read.append(found.nbytes)
        return found

    with mock.patch.object(SafetensorsReader, "rows", noting):
        checkpoint.import_hf(model, source)
    own = sum(p.detach().to_local().nbytes for p in model.parameters())
    return {
        "exporting": exporting,
        "largest": largest,
        "read at once": max(read),
        "read": sum(read),
        "own": own,
    }


@pytest.mark.parametrize("family", MIXTURES)
def test_no_rank_needs_more_than_a_file_and_a_tensor(
    ranks: Ranks, family: str, tmp_path: Path
) -> None:
    """Parts are gathered over two meshes; an import reads a range of rows at a time."""
    source, target = tmp_path / "saved", tmp_path / "exported"
    their_model(family).save_pretrained(source)
    for peaks in ranks(4).run(_peaks, family, 2, 2, str(source), str(target)):
        largest = peaks["largest"]
        # Gloo's thread may free a sent part a little late; small objects go to other ranks.
        assert peaks["exporting"] <= SHARD_NBYTES + largest + largest // 2 + 2048, peaks
        assert 0 < peaks["read at once"] <= largest
        # Of matrices that tp cuts by columns, whole rows are read.
        padding_nbytes = 2 * PADDING * 48 * 4
        assert peaks["own"] - padding_nbytes <= peaks["read"] < 2 * peaks["own"]


def _import_packed(family: str, source: str) -> None:
    model = _divided(family, 2, 2)
    checkpoint.import_hf(model, source)
    wanted = our_model(family, padding=PADDING).state_dict()
    got = full_state_dict(model)
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def _pack(directory: Path, family: str) -> dict[str, torch.Tensor]:
    """Put each layer's experts into two tensors, as transformers has them in memory."""
    tensors = read(directory)
    packed = {n: t for n, t in their_model(family).state_dict().items() if ".experts." in n}
    kept = {n: t for n, t in tensors.items() if ".experts." not in n}
    assert len(packed) == 4 and len(tensors) - len(kept) == 2 * 4 * 3
    return kept | packed


def test_packed_experts_are_read(ranks: Ranks, tmp_path: Path) -> None:
    """Some published files have all experts of a layer in two tensors; each rank reads its own."""
    their_model("qwen3_moe").save_pretrained(tmp_path)
    save_file(_pack(tmp_path, "qwen3_moe"), tmp_path / "model.safetensors")
    ranks(4).run(_import_packed, "qwen3_moe", str(tmp_path))


def test_packed_experts_of_another_layout_are_refused(tmp_path: Path) -> None:
    """Columns in the place of rows have another shape, which is named."""
    their_model("qwen3_moe").save_pretrained(tmp_path)
    tensors = _pack(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(our_config("qwen3_moe"), seed=7)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.import_hf(model, tmp_path)
    assert f"'{name}' of shape (4, 48, 40) instead of (4, 40, 48)" in str(caught.value)


def test_some_experts_of_a_layer_go_by_a_checkpoint() -> None:
    """The files of a rank that has no others would look like those of a smaller model."""
    for count in (1, 2):
        stack = nn.ParameterDict({"weight": torch.ones(count, 3)})
        annotate(stack["weight"], experts=ExpertRange(0, count, 2))
        refusal = pytest.raises(NotImplementedError, match=r"got 1 of 2 experts.*'weight'.*Go by a")
        with refusal if count == 1 else contextlib.nullcontext():
            assert hub_state(stack).shapes == {"weight": (2, 3)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 3}, "unknown (model.layers.0.mlp.experts.3.down_proj.weight"),
        ({"num_experts": 5}, "missing (model.layers.0.mlp.experts.4.down_proj.weight"),
        (
            {"layer_types": ("full_attention", "linear_attention")},
            "missing (model.layers.0.self_attn.k_norm.weight",
        ),
    ],
)
def test_files_of_other_experts_or_layer_types_are_refused(
    change: dict, words: str, tmp_path: Path
) -> None:
    """The tensors that one side has alone are named."""
    their_model("qwen3_next").save_pretrained(tmp_path)
    config = dataclasses.replace(our_config("qwen3_next"), **change)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.import_hf(build_model(config, seed=7), tmp_path)
    assert words in str(caught.value)


def test_further_predictions_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published files of Qwen3-Next hold layers that transformers does not build either."""
    their_model("qwen3_next").save_pretrained(tmp_path)
    tensors = read(tmp_path) | {"mtp.fc.weight": torch.zeros(48, 96)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(our_config("qwen3_next"), seed=7)
    checkpoint.import_hf(model, tmp_path)
    assert "left out, as transformers does: mtp.fc.weight" in caplog.text
    wanted = our_model("qwen3_next").state_dict()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in wanted.items())
