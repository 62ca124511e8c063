"""Transformers reads what we export, bit by bit, from any sharding, in the promised memory."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from megafsdp import checkpoint, fully_shard_model
from megafsdp.checkpoint.huggingface import export as hf
from megafsdp.checkpoint.huggingface import output
from megafsdp.checkpoint.huggingface.mapping import Entry
from megafsdp.checkpoint.huggingface.output import prepare
from megafsdp.checkpoint.huggingface.plan import (
    architecture_of,
    config_fields,
    fields_of,
    hub_state,
)
from megafsdp.checkpoint.huggingface.safetensors_files import write_file
from megafsdp.errors import CheckpointError
from megafsdp.models import build_model
from tests.buffer.parts import cut_model, joined
from tests.checkpoint.huggingface.allocator import allocated
from tests.checkpoint.huggingface.hf_models import (
    CASES,
    DENSE,
    VOCABULARY,
    assert_loads,
    our_config,
    our_model,
    read,
    sharded,
    their_config,
    their_model,
)
from tests.ranks import Ranks

# transformers warns of its own future.
pytestmark = pytest.mark.filterwarnings("default")
SHARDINGS: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {
    "no_shard": ((2,), {"strategy": "no_shard"}),
    "optim": ((2,), {"strategy": "optim"}),
    "optim_grads": ((3,), {"strategy": "optim_grads"}),
    "hsdp": ((2, 2), {"outer_strategy": "no_shard"}),
    "hfsdp": ((2, 2), {"outer_strategy": "optim"}),
}


def _export(family: str, is_tied: bool, directory: str, *sharding: object) -> None:
    shape, options = sharding or ((), {})
    model = sharded(our_model(family, is_tied, padding=3), shape, **options)
    fields = their_config(family, is_tied).to_dict()
    path = checkpoint.export_hf(
        model, directory, config=fields, dtype=None, max_shard_nbytes=40_000
    )
    assert path == Path(directory)


def test_files_are_filled_in_order_and_what_one_of_ours_stores_stays_together() -> None:
    """Bytes decide where a file ends; a tensor above the limit has a file of its own."""
    model, limit = our_model("qwen3"), 40_000
    tensors = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    fields = their_config("qwen3").to_dict()
    export = output.plan_export(tensors, fields, dtype=None, max_shard_nbytes=limit)
    flat = [entry for file in export.files for entry, _ in file.entries]
    assert flat == list(export.plan.entries)
    assert max(len(entry.theirs) for entry in flat) == 3
    for entry in flat:
        assert len({export.file_of[name] for name in entry.theirs}) == 1
    sizes = [file.nbytes for file in export.files]
    assert len(sizes) > 3
    assert all(file.nbytes <= limit or len(file.entries) == 1 for file in export.files)
    for file, following in zip(export.files, export.files[1:], strict=False):
        first, dtype = following.entries[0]
        assert file.nbytes + first.stored_numel * dtype.itemsize > limit
    assert export.nbytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(("family", "is_tied", "world_size"), CASES)
def test_transformers_loads_what_we_export(
    ranks: Ranks, family: str, is_tied: bool, world_size: int, tmp_path: Path
) -> None:
    """Equal weights and logits, no key missing or unexpected; in several files, without padding."""
    target = tmp_path / "exported"
    ranks(world_size).run(_export, family, is_tied, str(target))
    assert len(list(target.glob("*.safetensors"))) > 3
    assert_loads(target, family, is_tied)


@pytest.mark.parametrize("sharding", list(SHARDINGS))
def test_every_sharding_exports_the_same_tensors(
    ranks: Ranks, sharding: str, tmp_path: Path
) -> None:
    """Strategies and meshes, replicas and shards that do not lie in the order of the ranks."""
    target = tmp_path / "exported"
    shape, options = SHARDINGS[sharding]
    world_size = torch.Size(shape).numel()
    ranks(world_size).run(_export, "qwen3", True, str(target), shape, options)
    assert_loads(target, "qwen3", True)


def _export_parts(family: str, directory: str, shape: tuple[int, ...], num_axes: int) -> None:
    model = cut_model(our_model(family, padding=3), joined(*shape), num_shard_axes=num_axes)
    fields = their_config(family).to_dict()
    checkpoint.export_hf(model, directory, config=fields, max_shard_nbytes=40_000)


@pytest.mark.parametrize(
    ("family", "shape", "num_shard_axes"),
    [("qwen3", (2, 2), 1), ("gpt2", (2, 1, 2), 1), ("qwen3", (2, 1, 2), 2), ("llama", (1, 2), 1)],
)
def test_parts_of_tensors_are_exported_whole(
    ranks: Ranks, family: str, shape: tuple[int, ...], num_shard_axes: int, tmp_path: Path
) -> None:
    """Each part comes to one rank, and from these to the writer, whichever rank that is."""
    target = tmp_path / "exported"
    world_size = torch.Size(shape).numel()
    ranks(world_size).run(_export_parts, family, str(target), shape, num_shard_axes)
    assert len(list(target.glob("*.safetensors"))) > 3
    assert_loads(target, family, False)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_plain_model_exports_without_ranks(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """In its own dtype unless another is asked for; one file without an index, its own config."""
    options = {} if dtype is None else {"dtype": dtype}
    model = our_model("llama")
    if dtype is not None:
        options["config"] = fields_of(model.config) | {"architectures": None}
        # Files are filled by the bytes that are written.
        options["max_shard_nbytes"] = 2 * sum(p.numel() for p in model.parameters())
    target = checkpoint.export_hf(model, tmp_path / "exported", **options)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    fields = json.loads((target / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"]
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    wanted_dtype = dtype or torch.float32
    assert fields["torch_dtype"] == str(wanted_dtype).removeprefix("torch.")
    wanted = their_model("llama").state_dict()
    got = read(target)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.to(wanted_dtype)), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int32}, r"a floating-point dtype or None, got torch\.int32"),
        ({"dtype": torch.bool}, r"a floating-point dtype or None, got torch\.bool"),
        ({"dtype": "bf16"}, "a floating-point dtype or None, got 'bf16'"),
        ({"max_shard_nbytes": 0}, "at least 1 byte in a file, got 0"),
        ({"max_shard_nbytes": -1}, "at least 1 byte in a file, got -1"),
    ],
)
def test_what_no_weights_can_be_written_in_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Weights below 1 would become 0 in whole numbers; nothing is left behind."""
    with pytest.raises(CheckpointError, match=message):
        checkpoint.export_hf(our_model("llama"), tmp_path / "exported", **options)
    checkpoint.save(tmp_path / "saved", step=1, model=our_model("llama"))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.export_hf_checkpoint(
            tmp_path / "saved",
            tmp_path / "exported",
            config=their_config("llama", False).to_dict(),
            **options,
        )
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_adapters_are_refused(tmp_path: Path) -> None:
    """No class of transformers has their names, and would begin with random weights."""
    adapted = nn.ModuleDict({"base_layer": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1)})
    layers = nn.ModuleDict({"q_proj": adapted})
    for model, name in (
        (layers, "q_proj.base_layer.bias"),
        (nn.ModuleDict({"base_model": nn.ModuleDict({"model": nn.Linear(2, 2)})}), "base_model"),
    ):
        with pytest.raises(CheckpointError, match=f"adapters of PEFT: .*{name}.*save_pretrained"):
            checkpoint.export_hf(model, tmp_path / "exported", config={"model_type": "llama"})
    assert not list(tmp_path.iterdir())


def test_the_class_of_a_model_is_named(tmp_path: Path) -> None:
    """Its own, if the config that is given names none; else the one that is named."""
    model, fields = our_model("llama"), their_config("llama", False).to_dict()
    for number, (each, config, wanted) in enumerate(
        (
            (nn.Linear(2, 2), {"architectures": None}, ["Linear"]),
            (nn.Linear(2, 2), {"architectures": ["Other"]}, ["Other"]),
            (model, fields | {"architectures": ["Other"]}, ["Other"]),
        )
    ):
        target = checkpoint.export_hf(each, tmp_path / str(number), config=config)
        assert json.loads((target / "config.json").read_text())["architectures"] == wanted


class _Tokenizer:
    """Saves itself as transformers' tokenizers do."""

    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")
        # As they do with several templates.
        templates = Path(directory) / "additional_chat_templates"
        templates.mkdir()
        (templates / "rag.jinja").write_text("{{ messages }}")


def _export_theirs(family: str, directory: str) -> None:
    model = sharded(their_model(family, True))
    checkpoint.export_hf(
        model, directory, dtype=None, max_shard_nbytes=40_000, tokenizer=_Tokenizer()
    )


@pytest.mark.parametrize("family", DENSE)
def test_a_model_of_transformers_exports_as_it_is(
    ranks: Ranks, family: str, tmp_path: Path
) -> None:
    """Names, config and class are its own; generation config and tokenizer stand beside it."""
    target = tmp_path / "exported"
    ranks(2).run(_export_theirs, family, str(target))
    assert_loads(target, family, True)
    fields = json.loads((target / "config.json").read_text())
    assert fields["architectures"] == [type(their_model(family)).__name__]
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (target / "tokenizer.json").exists()


class _Counting(nn.Module):
    """Names of its own, and buffers of which each rank has another value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_buffer("count", torch.tensor(5 + dist.get_rank()))
        self.register_buffer("mean", torch.full((3,), float(dist.get_rank())))


def _export_buffers(directory: str) -> None:
    model = fully_shard_model(nn.Sequential(_Counting(), _Counting()), [_Counting])
    checkpoint.export_hf(
        model,
        directory,
        config={"model_type": "none"},
        dtype=torch.bfloat16,
        max_shard_nbytes=1,
    )


def test_buffers_are_rank_zeros_and_integers_stay(ranks: Ranks, tmp_path: Path) -> None:
    """Whichever rank writes them; a scalar too."""
    ranks(2).run(_export_buffers, str(tmp_path / "exported"))
    got = read(tmp_path / "exported")
    for index in range(2):
        assert torch.equal(got[f"{index}.count"], torch.tensor(5))
        assert torch.equal(got[f"{index}.mean"], torch.zeros(3))
        assert got[f"{index}.count"].dtype == torch.int64
        assert got[f"{index}.mean"].dtype == torch.bfloat16


def test_the_config_names_the_dtype_of_the_weights() -> None:
    """The first that is no integer; what the config said before is left out."""
    before = {"dtype": "float32", "torch_dtype": "float32", "n_layer": 2}
    fields = config_fields(before, iter((torch.int64, torch.bfloat16, torch.float32)))
    assert fields == {"n_layer": 2, "torch_dtype": "bfloat16"}
    assert config_fields(before, iter((torch.int64,))) == {"n_layer": 2}


class _Remembering(nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> object:
        return "a note"

    def set_extra_state(self, state: object) -> None:
        pass


def test_states_without_a_place_in_the_files_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a warning, which other models do not get."""
    for index, layer in enumerate((nn.Linear(2, 2), _Remembering(2, 2))):
        checkpoint.export_hf(nn.Sequential(layer), tmp_path / str(index), config={"a": 1})
        assert ("no place for ['model.0._extra_state']" in caplog.text) == (index == 1)
        assert ("no place" in caplog.text) == (index == 1)


def _wrapped_models() -> None:
    bare = their_model("gpt2", True)
    wanted = hub_state(bare)
    assert wanted.tied
    for wrap in (torch.compile, nn.parallel.DistributedDataParallel):
        model = wrap(bare)
        found = hub_state(model)
        assert found.tensors.keys() == wanted.tensors.keys() and found.tied == wanted.tied
        assert architecture_of(model) == type(bare).__name__


def test_wrappers_do_not_show_in_names(ranks: Ranks) -> None:
    """Those of torch.compile and DistributedDataParallel, around tied weights."""
    ranks(2).run(_wrapped_models)


def _peaks(family: str, directory: str, *sharding: object) -> dict[str, int]:
    """Return the peak of an export, and bytes of the largest file and of the largest tensor."""
    shape, options = sharding or ((), {})
    model = sharded(our_model(family, padding=3), shape, **options)
    asked: list[int] = []

    def noting(nbytes: int, device: torch.device) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(0)

    # What is asked for is compared with what is used, and is itself no use.
    with mock.patch.object(hf, "reserve", noting):
        peak = allocated(
            lambda: checkpoint.export_hf(model, directory, dtype=None, max_shard_nbytes=40_000)
        )
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    return {"peak": peak, "asked": sum(asked), "file": asked[1], "largest": largest}


@pytest.mark.parametrize(
    ("family", "sharding"),
    [
        ("gpt2", ()),
        ("llama", ()),
        ("qwen3", ()),
        ("gpt2", SHARDINGS["hsdp"]),
        ("gpt2", SHARDINGS["hfsdp"]),
        *(
            pytest.param(family, SHARDINGS[name], marks=pytest.mark.matrix("round-trips"))
            for family in ("llama", "qwen3")
            for name in ("hsdp", "hfsdp")
        ),
    ],
)
def test_no_rank_needs_more_than_a_file_and_a_tensor(
    ranks: Ranks, family: str, sharding: tuple, tmp_path: Path
) -> None:
    """By the allocator, which sees everything; each rank has asked for it before."""
    num_ranks = torch.Size(sharding[0]).numel() if sharding else 2
    found = ranks(num_ranks).run(_peaks, family, str(tmp_path / "exported"), *sharding)
    for peaks in found:
        # Gloo's thread may free the output of the gather before a little late. Small objects go to
        # other ranks, a padded vocabulary is kept with its padding, and torch transposes by way of
        # a block of 60 by 60 elements.
        slack = peaks["largest"] + 2048 + 4 * 60 * 60
        assert peaks["file"] <= 40_000
        assert peaks["peak"] <= peaks["file"] + peaks["largest"] + slack, found
        assert peaks["peak"] <= peaks["asked"] + slack, found
    asked = max(peaks["file"] for peaks in found)
    assert max(peaks["peak"] for peaks in found) >= asked
    files = (tmp_path / "exported").glob("*.safetensors")
    assert asked == max(sum(t.nbytes for t in load_file(file).values()) for file in files)


def _fail_on_rank_one(directory: str) -> str:
    model = sharded(our_model("llama"))
    # Later files could be written.
    errors = [OSError(28, "No space left on device")] if dist.get_rank() == 1 else []

    def failing(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if errors:
            raise errors.pop()
        write_file(path, tensors)

    with (
        mock.patch.object(output, "write_file", failing),
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoint.export_hf(model, directory, max_shard_nbytes=20_000)
    return str(caught.value)


def test_a_failure_on_one_rank_is_everyones_and_leaves_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Other ranks finish their gathers and learn of it; there is no half directory."""
    for message in ranks(3).run(_fail_on_rank_one, str(tmp_path / "exported")):
        assert "No space left on device" in message
        assert "raised on 1 of 3 ranks" in message
    assert list(tmp_path.iterdir()) == []


def _without_memory_on_rank_one(directory: str) -> str:
    model = sharded(our_model("llama"))

    def failing(nbytes: int, device: torch.device) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("no room")
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    with mock.patch.object(hf, "reserve", failing), pytest.raises(CheckpointError) as caught:
        checkpoint.export_hf(model, directory, max_shard_nbytes=20_000)
    return str(caught.value)


def test_a_rank_without_memory_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    """It is asked for before the first gather, so no rank is left waiting in one."""
    args = (str(tmp_path / "exported"),)
    for message in ranks(2).run(_without_memory_on_rank_one, *args, timeout_s=20):
        assert "no room" in message and "first on rank 1" in message
    assert list(tmp_path.iterdir()) == []


def _with_large_buffers() -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = {"model_type": "none"}
    # Each has a file of its own, and rank 1 writes that of the larger one.
    model.register_buffer("first", torch.ones(6000))
    model.register_buffer("second", torch.ones(7000))
    return model


def _allocated_and_asked_for(
    directory: str, shape: tuple[int, ...], options: dict[str, str] | None
) -> tuple[int, int]:
    if options == {}:
        model = _with_large_buffers()
    elif options is None:
        model = cut_model(our_model("llama", padding=3), joined(*shape))
    else:
        model = sharded(our_model("llama", padding=3), shape, **options)
    asked, used = 0, 0
    nbytes_to_gather, gather_to = hf.nbytes_to_gather, hf.gather_to

    def asking(*args: object, **kwargs: object) -> int:
        nonlocal asked
        found = nbytes_to_gather(*args, **kwargs)
        asked = max(asked, found)
        return found

    def gathering(*args: object, **kwargs: object) -> torch.Tensor | None:
        nonlocal used
        result = []
        used = max(used, allocated(lambda: result.append(gather_to(*args, **kwargs))))
        return result[0]

    with (
        mock.patch.object(hf, "nbytes_to_gather", asking),
        mock.patch.object(hf, "gather_to", gathering),
    ):
        # A copy in another dtype takes memory even where nothing is gathered.
        checkpoint.export_hf(model, directory, dtype=torch.bfloat16, max_shard_nbytes=20_000)
    return asked, used


@pytest.mark.parametrize(
    "sharding",
    [*SHARDINGS.values(), ((2, 2), None), ((2,), {})],
    ids=[*SHARDINGS, "parts", "buffers"],
)
def test_the_memory_asked_for_is_the_memory_used(
    ranks: Ranks, sharding: tuple, tmp_path: Path
) -> None:
    """The formula is that of the gathers, in every sharding."""
    num_ranks = torch.Size(sharding[0]).numel()
    directory = str(tmp_path / "exported")
    for asked, used in ranks(num_ranks).run(_allocated_and_asked_for, directory, *sharding):
        assert 0 < used <= asked


def _asked_for_a_buffer() -> list[int]:
    buffer, dtype = torch.ones(5), torch.float32
    return [
        hf.nbytes_to_gather(writer, buffer, dtype, is_rank_zeros=is_rank_zeros)
        for writer in range(2)
        for is_rank_zeros in (True, False)
    ]


def _asked_of_this_rank() -> tuple[list[int], int, int]:
    tensor = next(iter(hub_state(sharded(our_model("llama"))).tensors.values()))
    asked = [
        hf.nbytes_to_gather(0, tensor, dtype, is_rank_zeros=False)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return asked, tensor.numel(), tensor.detach().to_local().numel()


def test_ranks_that_do_not_write_need_no_memory(ranks: Ranks) -> None:
    """They send what they have, or a copy of it in another dtype."""
    writer, other = ranks(2).run(_asked_of_this_rank)
    assert writer[0] == [4 * writer[1], 2 * writer[1] + 2 * writer[2]]
    assert other[0] == [0, 2 * other[2]]
    # Only a rank that writes the buffer of another one receives it.
    assert ranks(2).run(_asked_for_a_buffer) == [[0, 0, 0, 0], [0, 0, 20, 0]]


def test_a_gathered_tensor_is_gone_before_the_next_one_is_gathered(tmp_path: Path) -> None:
    """Of one that is stored transposed, only what goes to the file is kept."""
    model = our_model("gpt2")
    tensors = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    fields = their_config("gpt2").to_dict()
    export = output.plan_export(tensors, fields, dtype=None, max_shard_nbytes=10**9)
    gathered: list[weakref.ref[torch.Tensor]] = []

    def gather(_: int, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        assert all(reference() is None for reference in gathered)
        tensor = model.get_parameter(entry.ours).detach().clone()
        if entry.is_transposed:
            gathered.append(weakref.ref(tensor))
        return tensor

    assert output.write_files(export, tmp_path, gather) is None
    assert len(gathered) == 8


def _interrupted(*unused: object) -> None:
    raise KeyboardInterrupt


def _unlike(directory: str) -> None:
    model = sharded(our_model("llama"))
    dtype = torch.bfloat16 if dist.get_rank() else None
    with pytest.raises(CheckpointError, match="the same tensors on all ranks"):
        checkpoint.export_hf(model, directory, dtype=dtype)


def test_ranks_that_ask_for_different_files_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Before anything is gathered."""
    ranks(2).run(_unlike, str(tmp_path / "exported"))
    assert list(tmp_path.iterdir()) == []


def _with_other_heads(directory: str) -> None:
    model = sharded(our_model("llama"))
    fields = their_config("llama").to_dict()
    if dist.get_rank():
        # The tensors have the same names and shapes, and their rows another order.
        fields |= {"num_attention_heads": 4 * 16 // 8, "num_key_value_heads": 4, "head_dim": 8}
    with pytest.raises(CheckpointError, match="the same tensors on all ranks"):
        checkpoint.export_hf(model, directory, config=fields, max_shard_nbytes=20_000)


def test_ranks_that_would_order_rows_differently_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Each writes some of the files, so these would be of two models."""
    ranks(2).run(_with_other_heads, str(tmp_path / "exported"))
    assert list(tmp_path.iterdir()) == []


def _without_values(directory: str) -> None:
    with torch.device("meta"):
        model = build_model(our_config("llama"))
    with pytest.raises(CheckpointError, match=r"export_hf\(\)"):
        checkpoint.export_hf(sharded(model), directory)


def test_a_model_without_values_is_not_exported(ranks: Ranks, tmp_path: Path) -> None:
    """Its memory holds anything."""
    ranks(2).run(_without_values, str(tmp_path / "exported"))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    """Errors that no rank agrees on, too, are followed by the removal of the directory."""
    with mock.patch.object(hf, "_write", _interrupted), pytest.raises(KeyboardInterrupt):
        checkpoint.export_hf(our_model("llama"), tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_when_the_directory_appears(tmp_path: Path) -> None:
    """Each file and the names of all files; then the directory's own name."""
    flushed: list[int] = []
    flush = os.fsync

    def recording(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    with mock.patch.object(os, "fsync", recording):
        target = checkpoint.export_hf(
            our_model("llama"),
            tmp_path / "exported",
            max_shard_nbytes=40_000,
            tokenizer=_Tokenizer(),
        )
    paths = [*target.rglob("*"), target]
    assert len(paths) > 8
    assert {path.stat().st_ino for path in paths} <= set(flushed)
    assert flushed[-1] == tmp_path.stat().st_ino


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """So is a file. An empty one is taken; what a killed export left beside it goes."""
    model = our_model("llama")
    (tmp_path / "exported").mkdir()
    (tmp_path / ".tmp-exported-0a1b2c3d").mkdir()
    checkpoint.export_hf(model, tmp_path / "exported")
    assert [p.name for p in tmp_path.iterdir()] == ["exported"]
    for taken in (tmp_path / "exported", tmp_path / "exported" / "config.json"):
        with pytest.raises(CheckpointError, match="does not exist or is empty"):
            checkpoint.export_hf(model, taken)


def test_a_target_by_another_name_is_the_directory_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links to an empty directory and to none yet, and the current directory."""
    model = our_model("llama")
    places = [tmp_path / name for name in ("empty", "new", "here")]
    for made in (places[0], places[2]):
        made.mkdir()
    for place in places[:2]:
        (tmp_path / f"to-{place.name}").symlink_to(place)
    monkeypatch.chdir(places[2])
    for target, place in zip(
        (tmp_path / "to-empty", tmp_path / "to-new", "."), places, strict=True
    ):
        checkpoint.export_hf(model, target)
        assert sorted(p.name for p in place.iterdir()) == ["config.json", "model.safetensors"]
        with pytest.raises(CheckpointError, match="does not exist or is empty"):
            checkpoint.export_hf(model, place)
    names = {"empty", "new", "here", "to-empty", "to-new"}
    assert {p.name for p in tmp_path.iterdir()} == names


def test_an_export_below_a_save_root_survives_a_save_and_other_exports(tmp_path: Path) -> None:
    """Neither takes for a leftover what somebody else is writing."""
    model = our_model("llama")
    write = hf._write

    def with_others(*args: Any) -> Exception | None:
        checkpoint.save(tmp_path, step=1, model=model)
        prepare(tmp_path / "llama")
        return write(*args)

    with mock.patch.object(hf, "_write", with_others):
        checkpoint.export_hf(model, tmp_path / "llama-2", dtype=None)
    fresh = our_model("llama")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    checkpoint.import_hf(fresh, tmp_path / "llama-2")
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    """The message says what to pass."""
    with pytest.raises(CheckpointError, match="Pass config="):
        checkpoint.export_hf(nn.Linear(2, 2), tmp_path / "exported")


def test_a_config_of_another_model_is_refused(tmp_path: Path) -> None:
    """Tensors that the config does not have are named, as are those that it has beyond."""
    fields = {**their_config("llama").to_dict(), "num_hidden_layers": 3}
    with pytest.raises(CheckpointError, match=r"missing \(decoder.layers.2"):
        checkpoint.export_hf(our_model("llama"), tmp_path / "exported", config=fields)
    fields = {**their_config("llama").to_dict(), "vocab_size": VOCABULARY + 1}
    with pytest.raises(CheckpointError, match="vocab_size"):
        checkpoint.export_hf(our_model("llama"), tmp_path / "exported", config=fields)
    assert list(tmp_path.iterdir()) == []
