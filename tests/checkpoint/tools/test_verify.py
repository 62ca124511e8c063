"""Verifying: a sound checkpoint has no faults; each kind of damage is named by file and key."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import save
from megafsdp.checkpoint.format.manifest import (
    Chunk,
    Manifest,
    read_manifest,
    write_dcp_metadata,
    write_manifest,
)
from megafsdp.checkpoint.tools.report import Problem
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import Toy, fill, make_optimizer, shard, train, whole_mesh
from tests.checkpoint.state.fused_toy import save_fused
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

KEY = "model.embed.weight"


def _save(root: Path) -> Path:
    model = Toy()
    fill(model)
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    return save(root, step=2, model=model, optimizer=optimizer)


def _save_sharded(root: Path, num_outer: int) -> None:
    model = Toy()
    fill(model)
    shard(model, whole_mesh(num_outer))
    save(root, step=2, model=model)


def _rewrite(path: Path, manifest: Manifest) -> None:
    """Make an edited manifest look written by save(): its checksum and ``.metadata`` agree."""
    described = write_dcp_metadata(manifest, path)
    manifest.files[described.name] = described.stat().st_size
    write_manifest(manifest, path)


def test_large_tensors_are_sound(tmp_path: Path) -> None:
    """Records of any size and dtype are read and described alike."""
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.int8)):
        with CheckpointWriter(tmp_path, step) as writer:
            writer.add_tensor("model.a", torch.arange(700_000).view(7, -1).to(dtype), chunk_rows=4)
            path = writer.publish()
        report = verify(path)
        assert report.findings == () and report.nbytes > 700_000 * dtype.itemsize
        (_, last) = read_manifest(path).tensors["model.a"].chunks
        _flip(path / last.record.file, last.record.offset + last.record.nbytes // 2)
        assert [finding.key for finding in verify(path).findings] == ["model.a"]


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("num_ranks", "num_outer"), [(1, 1), (3, 1), (4, 2)])
def test_what_save_writes_is_sound(
    ranks: Ranks, tmp_path: Path, num_ranks: int, num_outer: int
) -> None:
    """No fault, whatever the number of ranks; every record is read."""
    ranks(num_ranks).run(_save_sharded, tmp_path, num_outer)
    report = verify(tmp_path)
    assert report.findings == () and report.is_sound
    manifest = read_manifest(tmp_path / "iter_0000002")
    assert report.num_tensors == len(manifest.tensors)
    assert report.nbytes == sum(n for f, n in manifest.files.items() if f.endswith(".distcp"))
    assert "sound" in report.describe()


def test_an_optimizer_and_empty_tensors_are_sound(tmp_path: Path) -> None:
    """States, scalars, objects, tied names."""
    _save(tmp_path)
    assert verify(tmp_path).findings == ()


@pytest.mark.parametrize("key", [KEY, "optimizer.state.embed.weight.exp_avg", "extra", "rng.0"])
def test_a_flipped_byte_is_found(tmp_path: Path, key: str) -> None:
    """In a tensor or in an object, at the start, in the middle, at the end."""
    path = _save(tmp_path)
    (record,) = read_manifest(path).records([key])
    for offset in (0, record.nbytes // 2, record.nbytes - 1):
        _flip(path / record.file, record.offset + offset)
        (finding,) = verify(path).findings
        assert (finding.file, finding.key) == (record.file, key)
        assert "checksum" in finding.problem
        _flip(path / record.file, record.offset + offset)


@pytest.mark.parametrize("key", [KEY, "extra"])
def test_a_truncated_file_is_found(tmp_path: Path, key: str) -> None:
    """The file, and every tensor and object that lost bytes."""
    path = _save(tmp_path)
    manifest = read_manifest(path)
    (record,) = manifest.records([key])
    os.truncate(path / record.file, record.offset + record.nbytes - 1)
    findings = verify(path).findings
    assert findings[0].file == record.file and "bytes" in findings[0].problem
    lost = {
        k
        for k in [*manifest.tensors, *manifest.objects]
        for r in manifest.records([k])
        if r.offset >= record.offset
    }
    assert key in lost and {f.key for f in findings[1:]} == lost
    assert {f.file for f in findings} == {record.file}


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    """The file, and every key that it held."""
    path = _save(tmp_path)
    manifest = read_manifest(path)
    (path / "__0_0.distcp").unlink()
    findings = verify(path).findings
    assert "missing" in findings[0].problem
    assert {f.key for f in findings} == {"", *manifest.tensors, *manifest.objects}
    assert {f.file for f in findings} == {"__0_0.distcp"}


@pytest.mark.parametrize("old", ['"step":2', '"float32"', '"rng.0"', "[321,6]"])
def test_an_edited_manifest_is_found(tmp_path: Path, old: str) -> None:
    """Without its checksum, any edit is."""
    path = _save(tmp_path)
    text = (path / "manifest.json").read_text()
    assert old in text
    (path / "manifest.json").write_text(text.replace(old, old.replace("2", "1").upper(), 1))
    (finding,) = verify(path).findings
    assert finding.file == "manifest.json" and "checksum" in finding.problem


def test_a_chunk_that_is_missing_is_found(ranks: Ranks, tmp_path: Path) -> None:
    """A manifest that forgot a chunk, with a right checksum: the elements and bytes it left."""
    ranks(3).run(_save_sharded, tmp_path, 1)
    path = tmp_path / "iter_0000002"
    manifest = read_manifest(path)
    entry = manifest.tensors[KEY]
    manifest.tensors[KEY] = replace(entry, chunks=(entry.chunks[0], *entry.chunks[2:]))
    _rewrite(path, manifest)
    gone = entry.chunks[1]
    layout, coverage = verify(path).findings
    assert layout.file == gone.record.file and "in no record" in layout.problem
    assert (coverage.file, coverage.key) == ("manifest.json", KEY)
    assert f"sizes {list(gone.region.sizes)} at {list(gone.region.offsets)}" in coverage.problem
    assert "stored never" in coverage.problem


def test_a_chunk_that_is_there_twice_is_found(ranks: Ranks, tmp_path: Path) -> None:
    """A manifest that names a chunk twice, with a right checksum."""
    ranks(3).run(_save_sharded, tmp_path, 1)
    path = tmp_path / "iter_0000002"
    manifest = read_manifest(path)
    entry = manifest.tensors[KEY]
    manifest.tensors[KEY] = replace(entry, chunks=(entry.chunks[0], *entry.chunks))
    _rewrite(path, manifest)
    layout, coverage = verify(path).findings
    file = entry.chunks[0].record.file
    assert (layout.file, layout.key) == (file, KEY) and "in two records" in layout.problem
    assert (coverage.file, coverage.key) == (file, KEY) and "2 times" in coverage.problem


def _overlapping(manifest: Manifest) -> None:
    entry = manifest.tensors[KEY]
    (chunk,) = entry.chunks
    moved = Chunk(chunk.region._replace(offsets=(1, 0)), chunk.record)
    manifest.tensors[KEY] = replace(entry, chunks=(moved,))


def _retyped(manifest: Manifest) -> None:
    manifest.tensors[KEY] = replace(manifest.tensors[KEY], dtype="int32")


def _exchanged(manifest: Manifest) -> None:
    (chunk,) = manifest.tensors[KEY].chunks
    chunk_of_object = Chunk(chunk.region, manifest.objects["rng.0"])
    manifest.tensors[KEY] = replace(manifest.tensors[KEY], chunks=(chunk_of_object,))
    manifest.objects["rng.0"] = chunk.record


def _untied(manifest: Manifest) -> None:
    manifest.aliases["model.head.weight"] = "model.nothing"


@pytest.mark.parametrize(
    ("edit", "key", "problem"),
    [
        (_overlapping, KEY, "instead of never"),
        (_overlapping, KEY, "stored never"),
        (_retyped, KEY, "float32"),
        (_exchanged, KEY, "a dict; a tensor in the manifest"),
        (lambda m: m.objects.pop("extra"), "extra", "every checkpoint has it"),
        (lambda m: m.objects.update({KEY: m.objects["extra"]}), KEY, "stored twice"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_found(
    tmp_path: Path, edit: Callable[[Manifest], object], key: str, problem: str
) -> None:
    """Each contradiction, under a right checksum, is named by key."""
    path = _save(tmp_path)
    manifest = read_manifest(path)
    edit(manifest)
    _rewrite(path, manifest)
    assert any(f.key == key and problem in f.problem for f in verify(path).findings)


def test_a_tie_to_nothing_is_found(tmp_path: Path) -> None:
    """A further name whose tensor is not stored."""
    path = _save(tmp_path)
    manifest = read_manifest(path)
    _untied(manifest)
    write_manifest(manifest, path)
    finding = Problem("manifest.json", "model.head.weight", "tied to 'model.nothing', which is not")
    assert any(
        f.key == finding.key and f.problem.startswith(finding.problem)
        for f in verify(path).findings
    )


def test_metadata_that_says_something_else_is_found(tmp_path: Path) -> None:
    """Another shape, another place and a lost key in ``.metadata`` are named."""
    path = _save(tmp_path)
    manifest = read_manifest(path)
    (chunk,) = manifest.tensors[KEY].chunks
    other = replace(manifest, tensors=dict(manifest.tensors), objects=dict(manifest.objects))
    moved = chunk._replace(record=chunk.record._replace(offset=chunk.record.offset + 64))
    other.tensors[KEY] = replace(other.tensors[KEY], chunks=(moved,))
    norm = other.tensors["model.norm.weight"]
    other.tensors["model.norm.weight"] = replace(norm, dtype="int32")
    del other.objects["rng.0"]
    manifest.files[".metadata"] = write_dcp_metadata(other, path).stat().st_size
    write_manifest(manifest, path)
    findings = verify(path).findings
    assert {f.file for f in findings} == {".metadata"}
    assert {f.key for f in findings} == {KEY, "model.head.weight", "model.norm.weight", "rng.0"}


def test_any_property_of_metadata_is_compared(tmp_path: Path) -> None:
    """Not only what this package reads of ``.metadata``: torch reads the rest."""
    path = _save(tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].properties.pin_memory = True
    metadata.planner_data["extra"] = ("other", "extra")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = read_manifest(path)
    manifest.files[".metadata"] = (path / ".metadata").stat().st_size
    write_manifest(manifest, path)
    found = {f.key: f.problem for f in verify(path).findings}
    assert set(found) == {"model.norm.weight", "extra"}
    assert "shape, dtype and chunks" in found["model.norm.weight"]
    assert "nested names" in found["extra"]


class _Dangerous:
    def __reduce__(self) -> tuple:
        return os.abort, ()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps(3), pickle.dumps(_Dangerous())])
def test_unreadable_metadata_is_found_and_not_run(tmp_path: Path, content: bytes) -> None:
    """Damage is named, and a pickle that would run code is refused."""
    path = _save(tmp_path)
    (path / ".metadata").write_bytes(content)
    manifest = read_manifest(path)
    manifest.files[".metadata"] = len(content)
    write_manifest(manifest, path)
    (finding,) = verify(path).findings
    assert finding.file == ".metadata" and "unreadable" in finding.problem


@pytest.mark.parametrize("name", [".metadata", "manifest.json"])
def test_a_missing_description_is_found(tmp_path: Path, name: str) -> None:
    """Either of the two."""
    path = _save(tmp_path)
    (path / name).unlink()
    if name == "manifest.json":
        assert verify(tmp_path).findings[0].file == name
    else:
        assert [f.file for f in verify(path).findings] == [name]


def test_a_file_of_nobody_is_found(tmp_path: Path) -> None:
    """A file of records that no entry names; other files may lie beside."""
    path = _save(tmp_path)
    (path / "notes.txt").write_text("mine")
    assert verify(path).is_sound
    (path / "__7_0.distcp").write_bytes(b"")
    (finding,) = verify(path).findings
    assert finding == Problem("__7_0.distcp", "", "not in the manifest")


def test_the_report_is_text_and_json(tmp_path: Path) -> None:
    """One line a fault with file and key, and the same as JSON."""
    path = _save(tmp_path)
    (record,) = read_manifest(path).records([KEY])
    _flip(path / record.file, record.offset + 5)
    report = verify(path)
    first, last = report.describe().splitlines()
    assert first.startswith(f"{record.file}: {KEY}: record at byte {record.offset}: checksum")
    assert "1 fault;" in last
    body = json.loads(report.to_json())
    assert body["is_sound"] is False
    assert body["findings"][0]["key"] == KEY and body["findings"][0]["file"] == record.file


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A folder without one is no faulty checkpoint."""
    with pytest.raises(CheckpointError, match="published steps"):
        verify(tmp_path)


def _lost_part(manifest: Manifest) -> None:
    manifest.fused_into["model.across.weight"]["parts"].append("model.nothing")


def _other_dim(manifest: Manifest) -> None:
    manifest.fused_into["model.across.weight"]["dim"] = 0


def _stored_whole_too(manifest: Manifest) -> None:
    manifest.fused_into["model.plain.weight"] = manifest.fused_into.pop("model.across.weight")


@pytest.mark.parametrize(
    ("edit", "key", "problem"),
    [
        (_lost_part, "model.across.weight", "'model.nothing' is not stored"),
        (_other_dim, "model.across.weight", "cannot be joined along dim 0"),
        (_stored_whole_too, "model.plain.weight", "both whole and in parts"),
    ],
)
def test_parts_that_make_no_whole_are_found(
    tmp_path: Path, edit: Callable[[Manifest], None], key: str, problem: str
) -> None:
    """A fused parameter whose parts are missing or do not fit is named; others are sound."""
    save_fused(tmp_path)
    assert verify(tmp_path).is_sound
    path = tmp_path / "iter_0000002"
    manifest = read_manifest(path)
    edit(manifest)
    write_manifest(manifest, path)
    (finding,) = verify(path).findings
    assert (finding.file, finding.key) == ("manifest.json", key) and problem in finding.problem
