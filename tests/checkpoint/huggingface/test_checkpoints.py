"""Hugging Face files and checkpoints become each other without a model, exactly."""

from __future__ import annotations

import dataclasses
import functools
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel

from megafsdp import checkpoint, full_state_dict
from megafsdp.checkpoint.huggingface import output
from megafsdp.checkpoint.huggingface.checkpoints import stored_config
from megafsdp.checkpoint.huggingface.safetensors_files import write_file
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.models import build_model
from tests.checkpoint.faulty_store import FaultyStore
from tests.checkpoint.huggingface.allocator import allocated
from tests.checkpoint.huggingface.hf_models import (
    DENSE,
    MIXTURES,
    VOCABULARY,
    assert_loads,
    assert_same_files,
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
PADDING = 3


def _save(family: str, is_tied: bool, root: str) -> None:
    model = sharded(our_model(family, is_tied, padding=PADDING))
    checkpoint.save(root, step=4, model=model, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("family", "is_tied", "world_size"),
    [
        ("gpt2", False, 1),
        ("gpt2", True, 3),
        ("llama", False, 3),
        ("llama", True, 1),
        ("qwen3", False, 1),
        ("qwen3", True, 3),
    ],
)
def test_transformers_loads_an_exported_checkpoint(
    ranks: Ranks, family: str, is_tied: bool, world_size: int, tmp_path: Path
) -> None:
    """Saved by ranks with its optimizer, exported by none: weights alone, equal logits."""
    ranks(world_size).run(_save, family, is_tied, str(tmp_path / "saved"))
    made = checkpoint.export_hf_checkpoint(
        tmp_path / "saved",
        tmp_path / "exported",
        config=their_config(family, is_tied).to_dict(),
        dtype=None,
        max_shard_nbytes=40_000,
    )
    assert len(made.files) > 3
    assert_loads(tmp_path / "exported", family, is_tied)


def _assert_same_state(model: nn.Module, wanted: nn.Module) -> None:
    got, state = full_state_dict(model), wanted.state_dict()
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())


def _load_and_save_another(family: str, is_tied: bool, root: str, saved: str) -> None:
    model = sharded(build_model(our_config(family, is_tied, padding=PADDING), seed=7))
    checkpoint.load(root, model=model)
    _assert_same_state(model, our_model(family, is_tied, padding=PADDING))
    _save(family, is_tied, saved)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [
        *product(DENSE, (False, True)),
        *((family, False) for family in MIXTURES),
        *(
            pytest.param(family, True, marks=pytest.mark.matrix("round-trips"))
            for family in MIXTURES
        ),
    ],
)
def test_what_transformers_saves_becomes_a_checkpoint_and_comes_back(
    ranks: Ranks, family: str, is_tied: bool, tmp_path: Path
) -> None:
    """It loads strictly on 2 ranks, as save() would have stored it, and exports bit-equal."""
    their_model(family, is_tied).save_pretrained(tmp_path / "pretrained", max_shard_size="50KB")
    checkpoint.import_hf_checkpoint(
        tmp_path / "pretrained", tmp_path / "root", padded_vocab_size=VOCABULARY + PADDING
    )
    directories = (str(tmp_path / "root"), str(tmp_path / "saved"))
    ranks(2).run(_load_and_save_another, family, is_tied, *directories)
    with CheckpointReader(tmp_path / "root") as ours, CheckpointReader(tmp_path / "saved") as own:
        theirs = [key for key in own.keys() if key.startswith("model.")]  # noqa: SIM118
        assert sorted(ours.keys()) == sorted(theirs)
        assert ours.manifest.fused_into == {
            k: v for k, v in own.manifest.fused_into.items() if k.startswith("model.")
        }
        assert ours.manifest.aliases == own.manifest.aliases
        for key in theirs:
            assert torch.equal(ours.tensor(key), own.tensor(key)), key
            assert ours.manifest.tensors[key].fused == own.manifest.tensors[key].fused, key
    checkpoint.export_hf_checkpoint(tmp_path / "root", tmp_path / "exported", dtype=None)
    assert_same_files(tmp_path / "pretrained", tmp_path / "exported")


def test_an_import_does_not_take_a_save_root_back(tmp_path: Path) -> None:
    """The step that is meant by default is below those of a run."""
    root = FaultyStore(tmp_path / "store").root
    for step in (10, 20):
        checkpoint.save(root, step=step, model=our_model("llama"))
    their_model("llama", False).save_pretrained(tmp_path / "pretrained")
    for step in (0, 10, 20):
        with pytest.raises(CheckpointError, match=r"Give --step 21 or above"):
            checkpoint.import_hf_checkpoint(tmp_path / "pretrained", root, step=step)
    assert checkpoint.latest_step(root) == 20
    checkpoint.import_hf_checkpoint(tmp_path / "pretrained", root, step=21)
    assert checkpoint.latest_step(root) == 21


def test_files_become_a_checkpoint_in_a_store_and_come_back(tmp_path: Path) -> None:
    """The checkpoint lies in the store, the files on the machine."""
    root = FaultyStore(tmp_path / "store").root
    their_model("llama", False).save_pretrained(tmp_path / "pretrained")
    made = checkpoint.import_hf_checkpoint(tmp_path / "pretrained", root)
    assert made.directory == f"{root}/iter_0000000"
    assert len(made.files) == 1
    ours = list(our_model("llama").parameters())
    assert made.num_tensors == len(ours)
    assert made.nbytes == sum(parameter.nbytes for parameter in ours)
    made = checkpoint.export_hf_checkpoint(root, tmp_path / "exported", dtype=None)
    assert made.num_tensors == len(their_model("llama").state_dict())
    assert_same_files(tmp_path / "pretrained", tmp_path / "exported")


def _load_theirs(family: str, root: str) -> None:
    torch.manual_seed(5)
    model = sharded(type(their_model(family))(their_config(family, True)))
    checkpoint.load(root, model=model)
    _assert_same_state(model, their_model(family, True))
    checkpoint.save(root, step=1, model=model)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_of_transformers_goes_by_its_own_names(
    ranks: Ranks, family: str, tmp_path: Path
) -> None:
    """From its files to a checkpoint, to ranks, to a checkpoint, to files."""
    their_model(family, True).save_pretrained(tmp_path / "pretrained")
    checkpoint.import_hf_checkpoint(tmp_path / "pretrained", tmp_path / "root", keeps_names=True)
    ranks(2).run(_load_theirs, family, str(tmp_path / "root"))
    fields = json.loads((tmp_path / "pretrained" / "config.json").read_text())
    checkpoint.export_hf_checkpoint(
        tmp_path / "root", tmp_path / "exported", config=fields, dtype=None
    )
    assert_same_files(tmp_path / "pretrained", tmp_path / "exported")
    assert_loads(tmp_path / "exported", family, True)


@pytest.mark.parametrize("family", DENSE)
def test_kept_names_are_those_of_the_class_that_the_files_are_of(
    family: str, tmp_path: Path
) -> None:
    """Of a model without its head, and of one with it whose files lack the prefix, as GPT-2's."""
    whole, files = their_model(family), tmp_path / "pretrained"
    whole.base_model.save_pretrained(files)
    checkpoint.import_hf_checkpoint(files, tmp_path / "base", keeps_names=True)
    base = AutoModel.from_config(their_config(family))
    checkpoint.load(tmp_path / "base", model=base)
    _assert_same_state(base, whole.base_model)

    # A config that names no class is taken for the model with its head.
    for step, named in enumerate(([type(whole).__name__], None)):
        whole.config.architectures = named
        whole.config.save_pretrained(files)
        checkpoint.import_hf_checkpoint(files, tmp_path / "whole", keeps_names=True, step=step)
        loaded = type(whole)(their_config(family))
        checkpoint.load(tmp_path / "whole", model=loaded, allow_missing=["model.lm_head.weight"])
        _assert_same_state(loaded.base_model, whole.base_model)


def test_weights_have_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    """Main weights are fp32 if no other is; integers stay integers."""
    tensors = {"weight": torch.ones(2, dtype=torch.bfloat16), "count": torch.tensor([2**60 + 1])}
    files, root = tmp_path / "pretrained", tmp_path / "root"
    files.mkdir()
    save_file(tensors, files / "model.safetensors")
    (files / "config.json").write_text('{"model_type": "none"}')
    for step, options in enumerate(({}, {"dtype": torch.float16}, {"dtype": None})):
        checkpoint.import_hf_checkpoint(files, root, step=step, keeps_names=True, **options)
        with CheckpointReader(root, step) as stored:
            wanted = (torch.float32, torch.float16, torch.bfloat16)[step]
            assert stored.dtype("model.weight") == wanted
            assert stored.dtype("model.count") == torch.int64
            assert torch.equal(stored.tensor("model.count"), tensors["count"])
    checkpoint.export_hf_checkpoint(root, tmp_path / "exported", dtype=torch.float64)
    exported = read(tmp_path / "exported")
    assert {name: t.dtype for name, t in exported.items()} == {
        "weight": torch.float64,
        "count": torch.int64,
    }


def test_files_of_several_dtypes_are_read_as_into_a_model(tmp_path: Path) -> None:
    """What one of our tensors joins may be of several dtypes, and none is rounded to another's."""
    files = tmp_path / "pretrained"
    their_model("llama").save_pretrained(files)
    tensors = read(files)
    for name in tensors:
        if name.endswith(("q_proj.weight", "gate_proj.weight")):
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, files / "model.safetensors")
    checkpoint.import_hf_checkpoint(files, tmp_path / "root")
    found, wanted = (build_model(our_config("llama"), seed=seed) for seed in (7, 8))
    checkpoint.load(tmp_path / "root", model=found)
    checkpoint.import_hf(wanted, files)
    _assert_same_state(found, wanted)


@pytest.mark.parametrize("family", DENSE + MIXTURES)
def test_files_and_tensors_pass_one_by_one(family: str, tmp_path: Path) -> None:
    """A file and a few of the largest tensors are in memory, however many layers there are."""
    config = our_config(family)
    layer_types = (config.layer_types * 5)[:9]
    wide = dataclasses.replace(config, num_layers=9, layer_types=layer_types)
    model = build_model(wide, seed=0)
    nbytes = [4 * parameter.numel() for parameter in model.parameters()]
    assert sum(nbytes) > 20 * max(nbytes)
    checkpoint.save(tmp_path / "saved", step=1, model=model)
    saved, files, root = (tmp_path / name for name in ("saved", "exported", "root"))
    exporting = allocated(
        lambda: checkpoint.export_hf_checkpoint(
            saved, files, config=wide, dtype=None, max_shard_nbytes=2 * max(nbytes)
        )
    )
    importing = allocated(lambda: checkpoint.import_hf_checkpoint(files, root))
    # A file, what is read for it, and, of a fused tensor, a part of it on the way.
    assert max(nbytes) < exporting <= 4 * max(nbytes) + 4096
    # The library maps the file, which the allocator counts whole though it is read page by page.
    importing -= sum(file.stat().st_size for file in files.glob("*.safetensors"))
    assert importing <= 3 * max(nbytes) + 4096


def test_a_checkpoint_without_a_config_asks_for_one(tmp_path: Path) -> None:
    """Nothing is guessed from shapes, and nothing is left behind."""
    checkpoint.save(tmp_path / "saved", step=1, model=our_model("llama"))
    with pytest.raises(CheckpointError, match="Pass config="):
        checkpoint.export_hf_checkpoint(tmp_path / "saved", tmp_path / "exported")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    # Other tools may have stored something else in its place.
    assert stored_config("a note") is None


def test_damage_is_found_and_nothing_is_published(tmp_path: Path) -> None:
    """A flipped byte of one tensor ends the export, which leaves no directory."""
    made = checkpoint.save(tmp_path / "saved", step=1, model=our_model("llama"))
    path = next(made.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.export_hf_checkpoint(
            tmp_path / "saved", tmp_path / "exported", config=our_config("llama")
        )
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_a_full_disk_ends_the_export_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that could not be written would be missing in a directory that looks complete."""

    def failing(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if path.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")
        write_file(path, tensors)

    checkpoint.save(tmp_path / "saved", step=1, model=our_model("llama"))
    monkeypatch.setattr(output, "write_file", failing)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.export_hf_checkpoint(
            tmp_path / "saved",
            tmp_path / "exported",
            config=our_config("llama"),
            max_shard_nbytes=40_000,
        )
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_files_that_cannot_become_ours_are_refused(tmp_path: Path) -> None:
    """An unknown model, a config that is not there, files of another model; nothing is made."""
    their_model("llama").save_pretrained(tmp_path / "pretrained")
    path = tmp_path / "pretrained" / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"0 missing \(\), 9 unknown"):
        checkpoint.import_hf_checkpoint(tmp_path / "pretrained", tmp_path / "root")
    path.write_text(json.dumps({**fields, "model_type": "bert"}))
    with pytest.raises(ConfigError, match="model_type"):
        checkpoint.import_hf_checkpoint(tmp_path / "pretrained", tmp_path / "root")
    with pytest.raises(CheckpointError, match=r"a floating-point dtype or None, got torch\.int8"):
        checkpoint.import_hf_checkpoint(
            tmp_path / "pretrained", tmp_path / "root", dtype=torch.int8
        )
    texts = ("{", "[1]", "null", '"text"')
    for damage in (*(functools.partial(path.write_text, text) for text in texts), path.unlink):
        damage()
        with pytest.raises(CheckpointError, match="the fields of a model's config in JSON"):
            checkpoint.import_hf_checkpoint(tmp_path / "pretrained", tmp_path / "root")
    assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())
