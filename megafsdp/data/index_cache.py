"""A folder of arrays that are costly to build, found again by what they were built from.

Each entry is a folder of ``.npy`` files, named by a hash of its description and published by one
rename, so ranks and jobs that build the same entry at once cannot harm each other. Loaded arrays
are memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LOGGER = logging.getLogger("megafsdp.data")
_DESCRIPTION = "description.json"

Arrays = dict[str, NDArray[np.integer]]


def cached_arrays(
    cache_dir: str | os.PathLike[str] | None,
    description: Mapping[str, str | int | bool | None],
    build: Callable[[], Arrays],
) -> Arrays:
    """Load arrays from the cache, or build and store them.

    Args:
        cache_dir: Folder of the cache, made if missing; None builds without a cache.
        description: Everything the arrays depend on.
        build: Makes the arrays, by name.

    Returns:
        The arrays: memory-mapped and read-only when they were found in the cache.
    """
    if cache_dir is None:
        return build()
    text = json.dumps(dict(description), sort_keys=True, indent=1)
    entry = Path(cache_dir) / hashlib.sha256(text.encode()).hexdigest()[:32]
    if entry.is_dir():
        try:
            return _load(entry, text)
        except (OSError, ValueError, EOFError) as error:
            _LOGGER.warning("Cached index '%s' cannot be read and is built again: %s", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
    arrays = build()
    _publish(entry, text, arrays)
    return arrays


def lengths_digest(lengths: NDArray[np.int32]) -> str:
    """Return a hash of document lengths, which stands for the documents in a description."""
    return hashlib.sha256(np.ascontiguousarray(lengths).data).hexdigest()


def _load(entry: Path, text: str) -> Arrays:
    stored = json.loads((entry / _DESCRIPTION).read_text())
    if stored.get("built_from") != json.loads(text):
        raise ValueError("its description differs from the one its name was made from")
    return {name: np.load(_file(entry, name), mmap_mode="r") for name in stored["arrays"]}


def _publish(entry: Path, text: str, arrays: Arrays) -> None:
    temporary = entry.with_name(f".{entry.name}.{uuid.uuid4().hex}")
    try:
        # With the umask's permissions: mkdtemp() would keep other users out of a shared cache.
        temporary.mkdir(parents=True)
        _write(temporary, text, arrays)
        os.rename(temporary, entry)
    except OSError as error:
        # Another process may have published the same entry first, which serves as well.
        if not entry.is_dir():
            _LOGGER.warning("Index '%s' is not cached: %s", entry, error)
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, text: str, arrays: Arrays) -> None:
    stored = {"built_from": json.loads(text), "arrays": list(arrays)}
    (folder / _DESCRIPTION).write_text(json.dumps(stored, indent=1))
    for name, array in arrays.items():
        np.save(_file(folder, name), array)
    # Otherwise the rename may reach the disk before the content, and the power fail in between.
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"
