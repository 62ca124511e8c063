"""Converting: the format is seen from the source, and what no converter does is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import save
from megafsdp.checkpoint.convert import Format, convert, format_of
from megafsdp.checkpoint.diff import diff
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import Toy, fill


def _save(root: Path) -> Path:
    model = Toy()
    fill(model)
    return save(root, step=4, model=model)


def test_the_format_is_seen(tmp_path: Path) -> None:
    """A root and a directory with a manifest, one without, a file; anything else is refused."""
    path = _save(tmp_path / "a")
    assert format_of(tmp_path / "a") == format_of(path) == Format.MEGAFSDP
    assert format_of(tmp_path / "a", step=4) == Format.MEGAFSDP
    torch.save({}, tmp_path / "file.pt")
    assert format_of(tmp_path / "file.pt") == Format.TORCH
    (path / "manifest.json").unlink()
    assert format_of(tmp_path / "a") == format_of(path) == Format.NVIDIA
    for nothing in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"Give a checkpoint's directory"):
            format_of(nothing)
    with pytest.raises(CheckpointError):
        format_of(tmp_path / "a", step=5)


def test_there_and_back_is_equal(tmp_path: Path) -> None:
    """To one file and to a checkpoint again."""
    _save(tmp_path / "a")
    file = convert(tmp_path / "a", tmp_path / "a.pt", Format.TORCH)
    path = convert(file, tmp_path / "b", Format.MEGAFSDP)
    assert diff(tmp_path / "a", path, ignore=["common"]).is_equal
    path = convert(file, tmp_path / "b", Format.MEGAFSDP, 7)
    assert path.name == "iter_0000007"


def test_what_no_converter_does_is_refused(tmp_path: Path) -> None:
    """From a format to itself, or between two that are not ours."""
    path = _save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="from megafsdp to megafsdp"):
        convert(path, tmp_path / "b", Format.MEGAFSDP)
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="from torch to torch"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", Format.TORCH)
    with pytest.raises(CheckpointError, match=r"a file to write, got a directory"):
        convert(path, tmp_path, Format.TORCH)
