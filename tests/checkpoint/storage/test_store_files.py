"""Objects of stores as files, against bytes in memory."""

from __future__ import annotations

import io
import random
from pathlib import Path

import fsspec
import pytest

from megafsdp.checkpoint import StorePath
from megafsdp.checkpoint.storage import store_files
from megafsdp.errors import CheckpointError
from tests.checkpoint.faulty_store import FaultyStore

_URL = "memory://test_store_files/object"


@pytest.mark.parametrize("seed", range(4))
def test_reads_are_those_of_a_file(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of any length from any place: within a block, over its end, and past the object's end."""
    monkeypatch.setattr(store_files, "_LEAST_NBYTES", 8)
    monkeypatch.setattr(store_files, "_RANGE_NBYTES", 20)
    content, draws = bytes(range(200)), random.Random(seed)
    StorePath(_URL).write_bytes(content)
    wanted, found = io.BytesIO(content), StorePath(_URL).open("rb")
    for _ in range(100):
        if draws.random() < 0.3:
            place = draws.randrange(220)
            assert found.seek(place) == wanted.seek(place)
        nbytes = draws.choice([0, 1, 3, 7, 8, 9, 19, 21, 60])
        assert found.read(nbytes) == wanted.read(nbytes) and found.tell() == wanted.tell()


def test_a_read_that_brings_fewer_bytes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader would take the next bytes for those that are missing."""
    StorePath(_URL).write_bytes(bytes(100))
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(type(fs), "cat_file", lambda *args, **options: bytes(99))
    with pytest.raises(CheckpointError, match="99 of 100 bytes from 0 came"):
        StorePath(_URL).open("rb").read()


def test_an_object_that_was_not_closed_does_not_appear(tmp_path: Path) -> None:
    """Its writer has failed, or was forgotten."""
    store = FaultyStore(tmp_path)
    output = StorePath(f"{store.root}/object").open("wb")
    output.write(b"a half")
    del output
    assert not store.names()
