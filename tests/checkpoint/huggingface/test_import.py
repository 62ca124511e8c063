"""What transformers saves fills our models exactly, and what does not fit is refused untouched."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from megafsdp import (
    MixedPrecisionPolicy,
    checkpoint,
    full_state_dict,
    load_full_state_dict,
    materialize,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.checkpoint.huggingface import import_
from megafsdp.checkpoint.huggingface.plan import plan_model
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.errors import CheckpointError
from megafsdp.models import LanguageModel, build_model
from tests.buffer.parts import cut_model, joined
from tests.checkpoint.huggingface.hf_models import (
    CASES,
    DENSE,
    VOCABULARY,
    assert_same_files,
    our_config,
    our_model,
    sharded,
    their_config,
    their_model,
    tokens,
)
from tests.end_to_end.strategy_cases import mesh_of_shape
from tests.ranks import Ranks

# transformers warns of its own future.
pytestmark = pytest.mark.filterwarnings("default")
PADDING = 3


def _assert_same_state(model: nn.Module, wanted: nn.Module) -> None:
    got, state = full_state_dict(model), wanted.state_dict()
    assert got.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(got[name], tensor), name


def _import_and_export(family: str, is_tied: bool, source: str, target: str) -> None:
    model = sharded(build_model(our_config(family, is_tied, padding=PADDING), seed=7))
    parameters = list(model.parameters())
    checkpoint.import_hf(model, source)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    _assert_same_state(model, our_model(family, is_tied, padding=PADDING))
    fields = their_config(family, is_tied).to_dict()
    checkpoint.export_hf(model, target, config=fields, dtype=None, max_shard_nbytes=50_000)


@pytest.mark.parametrize(("family", "is_tied", "world_size"), CASES)
def test_we_import_what_transformers_saves_and_export_it_again(
    ranks: Ranks, family: str, is_tied: bool, world_size: int, tmp_path: Path
) -> None:
    """One file or several; every tensor is bit-equal in memory and in the second export."""
    size = "50KB" if world_size > 1 else "5GB"
    their_model(family, is_tied).save_pretrained(tmp_path / "saved", max_shard_size=size)
    num_files = len(list((tmp_path / "saved").glob("*.safetensors")))
    assert (num_files > 3) == (world_size > 1)
    arguments = (str(tmp_path / "saved"), str(tmp_path / "exported"))
    ranks(world_size).run(_import_and_export, family, is_tied, *arguments)
    assert_same_files(tmp_path / "saved", tmp_path / "exported")


def _import_parts(family: str, source: str) -> None:
    config = our_config(family, True, padding=PADDING)
    model = cut_model(build_model(config, seed=7), joined(2, 2))
    checkpoint.import_hf(model, source)
    _assert_same_state(model, our_model(family, True, padding=PADDING))


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_parts_of_tensors_are_filled(ranks: Ranks, family: str, tmp_path: Path) -> None:
    """Each rank reads the rows and columns of its part, of gate and up each by itself."""
    their_model(family, True).save_pretrained(tmp_path / "saved")
    ranks(4).run(_import_parts, family, str(tmp_path / "saved"))


def _import_theirs(family: str, source: str) -> None:
    torch.manual_seed(5)
    model = sharded(type(their_model(family))(their_config(family, True)))
    checkpoint.import_hf(model, source)
    _assert_same_state(model, their_model(family, True))


@pytest.mark.parametrize("family", DENSE)
def test_a_model_of_transformers_is_filled_as_it_is(
    ranks: Ranks, family: str, tmp_path: Path
) -> None:
    """Names are the files' own."""
    their_model(family, True).save_pretrained(tmp_path, max_shard_size="50KB")
    ranks(3).run(_import_theirs, family, str(tmp_path))


def _import_head(auto: type, family: str, source: str) -> None:
    torch.manual_seed(5)
    model = sharded(auto.from_config(their_config(family)))
    checkpoint.import_hf(model, source)
    _assert_same_state(model, auto.from_pretrained(source))


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_models_without_an_output_layer_are_filled(
    ranks: Ranks, auto: type, family: str, tmp_path: Path
) -> None:
    """Those with another head, as reward models have, and the model within by itself."""
    torch.manual_seed(3)
    auto.from_config(their_config(family)).save_pretrained(tmp_path)
    ranks(2).run(_import_head, auto, family, str(tmp_path))


def _first_losses(source: str, *sharding: object) -> None:
    shape, options = sharding
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain = our_model("qwen3", padding=PADDING)
    wanted = sharded(plain, shape, mp_policy=policy, **options)
    model = sharded(
        build_model(our_config("qwen3", padding=PADDING), seed=7),
        shape,
        mp_policy=policy,
        **options,
    )
    # Compute weights of the first initialisation are there, and would be stale.
    model(tokens())
    checkpoint.import_hf(model, source)
    assert torch.equal(model.eval()(tokens()), wanted(tokens()))


@pytest.mark.parametrize(
    "sharding",
    [((2,), {"strategy": "no_shard"}), ((2,), {"strategy": "optim"}), ((2, 2), {}),
     ((2, 2), {"outer_strategy": "optim"})],
)  # fmt: skip
def test_compute_weights_are_fresh_after_an_import(
    ranks: Ranks, sharding: tuple, tmp_path: Path
) -> None:
    """The next forward is that of the imported weights, in bf16, under every kind of sharding."""
    their_model("qwen3").save_pretrained(tmp_path)
    ranks(torch.Size(sharding[0]).numel()).run(_first_losses, str(tmp_path), *sharding)


def _import_into_meta(source: str) -> None:
    with torch.device("meta"):
        model = build_model(our_config("gpt2"))
    sharded(model)
    checkpoint.import_hf(model, source)
    materialize(model)
    _assert_same_state(model, our_model("gpt2"))


def test_a_model_on_the_meta_device_is_filled(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing was initialised before, and nothing is initialised over it afterwards."""
    their_model("gpt2").save_pretrained(tmp_path)
    ranks(2).run(_import_into_meta, str(tmp_path))


def _import_theirs_into_meta(source: str) -> None:
    with torch.device("meta"):
        model = type(their_model("llama"))(their_config("llama"))
    sharded(model)
    checkpoint.import_hf(model, source)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.model.rotary_emb.inv_freq.is_meta


def test_buffers_that_no_file_holds_stay_on_the_meta_device(ranks: Ranks, tmp_path: Path) -> None:
    """Memory without values would be taken for values."""
    their_model("llama").save_pretrained(tmp_path)
    ranks(2).run(_import_theirs_into_meta, str(tmp_path))


def _rows_read(source: str) -> tuple[int, int]:
    model = sharded(build_model(our_config("llama"), seed=7))
    numel = 0
    original = SafetensorsReader.rows

    def counting(self: SafetensorsReader, *args: object, **options: object) -> torch.Tensor:
        nonlocal numel
        rows = original(self, *args, **options)
        numel += rows.numel()
        return rows

    with mock.patch.object(SafetensorsReader, "rows", counting):
        checkpoint.import_hf(model, source)
    return numel, sum(p.detach().to_local().numel() for p in model.parameters())


def test_each_rank_reads_only_what_it_holds(ranks: Ranks, tmp_path: Path) -> None:
    """As many elements as its shards have, of every tensor."""
    their_model("llama").save_pretrained(tmp_path)
    found = ranks(3).run(_rows_read, str(tmp_path))
    assert [read for read, _ in found] == [held for _, held in found]
    assert sum(held for _, held in found) == sum(p.numel() for p in our_model("llama").parameters())


def _collectives(directory: str) -> tuple[dict[str, int], dict[str, int], int]:
    model = sharded(our_model("llama"))
    with record_collectives() as exporting:
        checkpoint.export_hf(model, directory, max_shard_nbytes=40_000)
    with record_collectives() as importing:
        checkpoint.import_hf(model, directory)
    return dict(exporting.calls), dict(importing.calls), len(list(model.parameters()))


def test_collectives_are_one_a_tensor_on_export_and_two_on_import(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Beside its gathers an export agrees twice and announces two directories."""
    for exporting, importing, num_tensors in ranks(2).run(_collectives, str(tmp_path / "exported")):
        assert exporting == {
            "all_to_all": num_tensors,
            "all_gather_objects": 2,
            "broadcast_object": 2,
        }
        assert importing == {"all_gather_objects": 2}


class _Halves(nn.Module):
    """A matrix cut by columns, another by rows, and a vector, as torch's own DTensors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        mesh = mesh_of_shape((2,))
        self.columns = nn.Parameter(distribute_tensor(torch.randn(3, 4), mesh, [Shard(1)]))
        self.rows = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
        self.vector = nn.Parameter(distribute_tensor(torch.randn(3), mesh, [Replicate()]))


def _round_trip_of_dtensors(directory: str) -> None:
    source, target = _Halves(1), _Halves(2)
    checkpoint.export_hf(source, directory, config={}, dtype=None, max_shard_nbytes=1)
    checkpoint.import_hf(target, directory)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name].full_tensor(), tensor.full_tensor()), name


def test_dtensors_of_torch_go_there_and_back(ranks: Ranks, tmp_path: Path) -> None:
    """Cut along any dimension; the model needs no units and no config."""
    ranks(2).run(_round_trip_of_dtensors, str(tmp_path / "exported"))


def test_published_names_of_gpt2_are_taken(tmp_path: Path) -> None:
    """Files of the bare model have no prefix, and old ones hold masks."""
    their_model("gpt2", True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    for model in (build_model(our_config("gpt2", True), seed=7), their_model("gpt2", True)):
        nn.init.zeros_(next(model.parameters()))
        wanted = our_model("gpt2", True) if isinstance(model, LanguageModel) else None
        checkpoint.import_hf(model, tmp_path)
        _assert_same_state(model, wanted or their_model("gpt2", True))


def _refused(source: str, is_tied: bool) -> str:
    model = sharded(build_model(our_config("qwen3", is_tied), seed=7))
    before = full_state_dict(model)
    # Each rank compares its rows in several pieces.
    with (
        mock.patch.object(import_, "_PIECE_NUMEL", 100),
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoint.import_hf(model, source)
    after = full_state_dict(model)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    return str(caught.value)


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(1)


def _with_other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(16, 48)


def _with_larger_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCABULARY + 1, 48)


def _with_other_output(tensors: dict[str, torch.Tensor]) -> None:
    # Of the two ranks, only the last one sees it.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1] += 1


def _with_shorter_output(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without, "1 missing (model.norm.weight)"),
        (_with_another, "1 unknown (model.layers.0.mlp.gate.weight)"),
        (_with_other_shape, "k_proj.weight' of shape (16, 48) instead of (32, 48)"),
        (_with_larger_vocabulary, f"at most {VOCABULARY} rows, got {VOCABULARY + 1}"),
        (_with_other_output, "tie_embeddings=False"),
        (_with_shorter_output, "tie_embeddings=False"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    ranks: Ranks, change: object, words: str, tmp_path: Path
) -> None:
    """On all ranks alike, before the model is touched."""
    their_model("qwen3", True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    for message in ranks(2).run(_refused, str(tmp_path), True):
        assert words in message


def test_the_output_layer_of_a_tied_model_may_be_stored(tmp_path: Path) -> None:
    """A second copy of the embedding that equals it is no reason to refuse."""
    their_model("qwen3", True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(our_config("qwen3", True), seed=7)
    checkpoint.import_hf(model, tmp_path)
    _assert_same_state(model, our_model("qwen3", True))


def test_buffers_of_a_module_with_two_names_may_be_stored_twice(tmp_path: Path) -> None:
    """Equal values are taken, as for tied parameters; two values are refused."""
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": norm, "b": norm})
    for value in (5.0, 6.0):
        stored = {name: torch.full_like(t, 5) for name, t in model.state_dict().items()}
        stored["b.running_mean"] = torch.full((3,), value)
        save_file(stored, tmp_path / "model.safetensors")
        refusal = pytest.raises(CheckpointError, match=r"'b.running_mean' equal to 'a.running_mean")
        with refusal if value == 6 else contextlib.nullcontext():
            checkpoint.import_hf(model, tmp_path)
        assert all(torch.equal(t, torch.full_like(t, 5)) for t in norm.state_dict().values())


def test_fractions_are_not_cut_off(tmp_path: Path) -> None:
    """Integers, as quantized layers have them, are not filled from numbers with a fraction."""
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("codes", torch.tensor([3, 4], dtype=torch.int8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for dtype, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
        stored = {"weight": torch.ones(2, 2), "codes": torch.ones(2, dtype=dtype)}
        save_file(stored, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"'codes' of {name} for torch\.int8"):
            checkpoint.import_hf(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    stored = {"weight": torch.ones(2, 2, dtype=torch.int8), "codes": torch.ones(2).to(torch.int32)}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint.import_hf(model, tmp_path)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert torch.equal(model.codes, torch.ones(2, dtype=torch.int8))
    model.codes = torch.zeros(2, dtype=torch.complex64)
    checkpoint.import_hf(model, tmp_path)
    assert torch.equal(model.codes, torch.ones(2, dtype=torch.complex64))
    save_file(stored | {"codes": torch.ones(2) / 2}, tmp_path / "model.safetensors")
    checkpoint.import_hf(model, tmp_path)
    assert torch.equal(model.codes, torch.full((2,), 0.5, dtype=torch.complex64))


def test_tied_tensors_without_dimensions_are_compared(tmp_path: Path) -> None:
    """Equal ones are taken, two values are refused."""
    plan = plan_model({"a": ()}, {"b": "a"}, {})
    for value in (1.0, 2.0):
        stored = {"a": torch.tensor(1.0), "b": torch.tensor(value)}
        save_file(stored, tmp_path / "model.safetensors")
        refusal = pytest.raises(CheckpointError, match="'b' equal to 'a'")
        with refusal if value == 2 else contextlib.nullcontext():
            import_.match_stored(plan, SafetensorsReader(tmp_path))


def _load_another_form(source: str) -> None:
    model = sharded(type(their_model("qwen3_moe"))(their_config("qwen3_moe")))
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*megafsdp.load_full_state_dict\(\)"):
        checkpoint.import_hf(model, source)
    loaded = AutoModelForCausalLM.from_pretrained(source)
    load_full_state_dict(model, loaded.state_dict())
    _assert_same_state(model, their_model("qwen3_moe"))
    _assert_same_state(sharded(loaded), their_model("qwen3_moe"))


def test_models_that_are_stored_in_another_form_have_a_cure(ranks: Ranks, tmp_path: Path) -> None:
    """Experts are one stack in memory alone; either advice of the message works."""
    their_model("qwen3_moe").save_pretrained(tmp_path)
    ranks(2).run(_load_another_form, str(tmp_path))


def _truncate(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])


def _remove(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def _misname(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = names[0]
    path.write_text(json.dumps(index))


def _garble(text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors.index.json").write_text(text)


def _empty(directory: Path) -> None:
    for path in directory.glob("*"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_truncate, "model-00002-of-"),
        (_remove, "model-00002-of-"),
        (_misname, "an index of the tensors that the files hold"),
        *(
            (_garble(text), "an index in JSON with a weight_map")
            for text in ("{}", "{", "[]", '{"weight_map": []}')
        ),
        (_empty, "model.safetensors or model.safetensors.index.json"),
    ],
)
def test_damaged_directories_are_refused(change: object, words: str, tmp_path: Path) -> None:
    """The message names the file."""
    their_model("qwen3").save_pretrained(tmp_path, max_shard_size="50KB")
    change(tmp_path)
    model = build_model(our_config("qwen3"), seed=7)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.import_hf(model, tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("library", ["safetensors", "huggingface_hub"])
def test_a_missing_library_is_named(tmp_path: Path, library: str) -> None:
    """The message says what to install, and a failed export leaves nothing."""
    model = our_model("llama")
    checkpoint.export_hf(model, tmp_path / "there")
    words = r"pip install megafsdp\[hf\]"
    with mock.patch.dict(sys.modules, {library: None}):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.export_hf(model, tmp_path / "exported")
        if library == "safetensors":
            with pytest.raises(CheckpointError, match=words):
                checkpoint.import_hf(model, tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_tied_tensors_are_compared_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank compares its share in pieces, here of two rows; a difference shows on one rank."""
    monkeypatch.setattr(import_, "_PIECE_NUMEL", 6)
    tensors = {f"{row}": torch.zeros(7, 3) for row in range(8)}
    for row in range(7):
        tensors[f"{row}"][row, 1] = 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    for name in tensors:
        found = [import_._is_equal(reader, name, "7", (rank, 2)) for rank in range(2)]
        assert found.count(False) == (name != "7"), name
