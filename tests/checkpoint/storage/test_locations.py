"""Paths and URLs by one name: which is which, and what a path of pathlib makes of a URL."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import StorePath, export_hf_checkpoint, import_hf_checkpoint, save
from megafsdp.checkpoint.convert import Format, convert
from megafsdp.checkpoint.storage.locations import file_names, location_of, size_of
from megafsdp.errors import CheckpointError
from tests.checkpoint.faulty_store import FaultyStore


@pytest.mark.parametrize("path", ["runs/a", "/runs/a", "s3:bucket", "a:/b", Path("runs/a")])
def test_what_has_no_scheme_is_a_path(path: str | Path) -> None:
    """Local paths stay pathlib's."""
    found = location_of(path)
    assert isinstance(found, Path)
    assert found == Path(path)
    assert location_of(f"file:///{path}") == Path(f"/{path}")


def test_home_folders_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save to a path of a configuration file makes no folder of the name "~"."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save("~/run", step=1, model=torch.nn.Linear(1, 1)).parent == tmp_path / "run"
    assert location_of(Path("~/run")) == tmp_path / "run"
    assert location_of("run~") == Path("run~")


def test_a_url_is_joined_and_taken_apart_like_a_path() -> None:
    """By its slashes, of which those at the end do not count."""
    url = location_of("s3://bucket/runs/a/")
    assert isinstance(url, StorePath)
    assert os.fspath(url) == str(url) == "s3://bucket/runs/a"
    assert (url / "iter_0000001").name == "iter_0000001"
    assert (url / "iter_0000001").parent == url
    assert pickle.loads(pickle.dumps(url)) == url
    assert location_of(url) is url
    assert url.absolute() is url


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
def test_a_url_that_pathlib_has_broken_is_refused(url: str) -> None:
    """It would be a folder named after the scheme."""
    with pytest.raises(CheckpointError, match=r"Give a str, such as 's3://bucket/run'"):
        save(Path(url), step=1, model=torch.nn.Linear(2, 2))


def test_formats_of_other_libraries_stay_on_the_machine(tmp_path: Path) -> None:
    """Their writers rename or map files; the error says how to bring the files there."""
    root = FaultyStore(tmp_path / "store").root
    save(tmp_path / "disk", step=1, model=torch.nn.Linear(2, 2))
    refused = "Give a local path, and copy the files with the store's own tool"
    for to in (Format.TORCH, Format.NVIDIA):
        with pytest.raises(CheckpointError, match=refused):
            convert(tmp_path / "disk", f"{root}/converted", to)
    with pytest.raises(CheckpointError, match=refused):
        export_hf_checkpoint(tmp_path / "disk", f"{root}/exported", config={"model_type": "x"})
    with pytest.raises(CheckpointError, match=refused):
        import_hf_checkpoint(f"{root}/files", tmp_path / "imported")


def test_a_file_that_goes_while_it_is_asked_for_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had not been there at all, whatever another question has said before."""
    assert size_of(tmp_path) is None
    (tmp_path / "file").write_bytes(b"abc")
    assert size_of(tmp_path / "file") == 3
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    assert size_of(tmp_path / "gone") is None
    assert size_of(tmp_path / "file" / "below") is None


def test_a_folder_that_goes_while_it_is_listed_has_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what verifies a checkpoint says that its files are missing."""
    (tmp_path / "file").write_bytes(b"abc")
    assert file_names(tmp_path) == ["file"]
    assert file_names(tmp_path / "file") == []
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    assert file_names(tmp_path / "gone") == []


def test_objects_are_removed_beside_names_of_none() -> None:
    """As after a removal that was interrupted."""
    folder = StorePath("memory://test_locations/removed")
    for name in ("a", "b"):
        (folder / name).write_text(name)
    folder.remove(["a", "missing", "b"])
    assert folder.list_names() == ([], [])
