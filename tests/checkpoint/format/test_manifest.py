"""The manifest: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import json
import pickle
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.format.manifest import (
    MANIFEST_FILE,
    Chunk,
    Manifest,
    Record,
    TensorEntry,
    joining,
    path_of,
    read_manifest,
    section_of,
    write_dcp_metadata,
    write_manifest,
)
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import FusedParts


def _manifest() -> Manifest:
    chunks = (
        Chunk(Region((0, 0), (3, 2)), Record("__0_0.distcp", 0, 100, 1)),
        Chunk(Region((3, 0), (1, 2)), Record("__1_0.distcp", 8, 90, 2)),
    )
    return Manifest(
        step=7,
        world_size=2,
        versions={"torch": "2.13.0"},
        tensors={
            "model.a": TensorEntry(
                (4, 2), "bfloat16", chunks, FusedParts(("x", "y"), (1, 1), 0, 2)
            ),
            "model.\N{SNOWMAN}": TensorEntry((), "float32", (), None),
        },
        objects={"extra": Record("__0_0.distcp", 100, 5, 3)},
        aliases={"model.b": "model.a"},
        files={"__0_0.distcp": 105, "__1_0.distcp": 98},
        fused_into={"model.c": {"parts": ["model.c_w", "model.c_v"], "dim": 1}},
    )


def test_a_manifest_survives_its_file(tmp_path: Path) -> None:
    """Everything comes back equal, names outside ASCII included."""
    write_manifest(_manifest(), tmp_path)
    assert read_manifest(tmp_path) == _manifest()


def test_a_whole_that_lacks_a_part_is_not_described(tmp_path: Path) -> None:
    """Torch finds what is there; the rest of a damaged manifest stays readable."""
    path = write_dcp_metadata(_manifest(), tmp_path)
    described = pickle.loads(path.read_bytes()).state_dict_metadata
    assert "model.a" in described and "model.c" not in described


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_whole_is_described_if_its_parts_follow_one_another(
    tmp_path: Path, num_groups: int
) -> None:
    """Torch cannot be told that pieces of the parts take turns: it would read another order."""
    manifest = _manifest()
    parts = {"model.c_w": manifest.tensors["model.a"], "model.c_v": manifest.tensors["model.a"]}
    fused = {"model.c": joining(list(parts), 0, num_groups)}
    manifest = replace(manifest, tensors=manifest.tensors | parts, fused_into=fused)
    described = pickle.loads(write_dcp_metadata(manifest, tmp_path).read_bytes())
    assert "model.c_w" in described.state_dict_metadata
    assert ("model.c" in described.state_dict_metadata) == (num_groups == 1)
    if num_groups == 1:
        whole = described.state_dict_metadata["model.c"]
        assert tuple(whole.size) == (8, 2)
        assert [tuple(c.offsets) for c in whole.chunks] == [(0, 0), (3, 0), (4, 0), (7, 0)]


def test_a_manifest_of_an_earlier_release_does_not_say_its_order(tmp_path: Path) -> None:
    """One without the entry is not taken for one in the order of the whole."""
    path = write_manifest(_manifest(), tmp_path)
    body = json.loads(path.read_text())
    del body["crc32"], body["has_whole_order"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(body | {"crc32": zlib.crc32(text.encode())}))
    assert read_manifest(tmp_path) == replace(_manifest(), has_whole_order=False)


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    """Any JSON reader sees step, shapes and dtypes."""
    body = json.loads(write_manifest(_manifest(), tmp_path).read_text())
    assert body["step"] == 7
    assert body["tensors"]["model.a"]["shape"] == [4, 2]
    assert body["tensors"]["model.a"]["fused"]["names"] == ["x", "y"]


@pytest.mark.parametrize(
    ("old", "new"),
    [('"shape":[4,2]', '"shape":[4,3]'), ("bfloat16", "float16"), ("}\n", "}}\n"), ("{", "[")],
)
def test_an_edited_manifest_is_not_believed(tmp_path: Path, old: str, new: str) -> None:
    """Any change is found, whether the file is still JSON or not."""
    path = write_manifest(_manifest(), tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=MANIFEST_FILE):
        read_manifest(tmp_path)


def test_binary_garbage_is_not_believed(tmp_path: Path) -> None:
    """Bytes that are no text are refused like any other damage."""
    (tmp_path / MANIFEST_FILE).write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(CheckpointError, match="a manifest in JSON"):
        read_manifest(tmp_path)


def test_keys_are_split_at_parameter_names() -> None:
    """The nested path of a key keeps the parameter's own dots together."""
    assert path_of("model.a.b.weight") == ("model", "a.b.weight")
    assert path_of("optimizer.state.a.b.exp_avg") == ("optimizer", "state", "a.b", "exp_avg")
    assert path_of("optimizer.param_groups") == ("optimizer", "param_groups")
    assert path_of("rng.0") == ("rng", "0")
    assert path_of("common") == ("common",)
    assert section_of("optimizer.state.a.exp_avg") == "optimizer"
