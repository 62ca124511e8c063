"""An object store in a local folder, shared by processes, whose requests fail as a test plans it.

Objects appear when they are complete, replace what had their name, and cannot be renamed, as in
real stores. A folder is there while it has objects. The faults stand in a file, so that all ranks
go by the same; so do the requests that were made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

SCHEME = "faulty"
# The folder of the objects; what a test plans and what was asked for lie beside it.
_OBJECTS = "objects"
EXIT_CODE = 17


@dataclass(frozen=True)
class Fault:
    """What happens to requests.

    Attributes:
        verb: ``info``, ``list``, ``read``, ``write`` or ``remove``.
        kind: ``denied``, ``full``, ``broken``; ``torn``: of a write half arrives, and it fails;
            ``cut``: half arrives, and no error comes; ``killed``: the process ends, and half of
            what went in several requests arrives.
        match: A part of the path.
        after: How many requests like this one pass before.
        count: How many fail then.
    """

    verb: str
    kind: str
    match: str = ""
    after: int = 0
    count: int = 1_000_000


class FaultyStore:
    """A store in a folder.

    Args:
        base: The folder.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.objects = base / _OBJECTS
        self.objects.mkdir(parents=True, exist_ok=True)
        register()

    @classmethod
    def of(cls, path: str) -> FaultyStore:
        """Return the store in which an object lies."""
        return cls(Path(path[: path.index(f"/{_OBJECTS}")]))

    @property
    def root(self) -> str:
        """Return the URL of a folder for one run."""
        return f"{SCHEME}://{self.objects}/run"

    def plan(self, *faults: Fault) -> None:
        """Have these faults happen from here on, and forget what was asked for."""
        (self.base / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        (self.base / "requests").unlink(missing_ok=True)

    def freeze_listings(self) -> None:
        """Have all listings from here on show what there is now."""
        names = [str(path) for path in self.objects.rglob("*") if path.is_file()]
        (self.base / "listing.json").write_text(json.dumps(names))

    def thaw_listings(self) -> None:
        """Have listings show what there is."""
        (self.base / "listing.json").unlink(missing_ok=True)

    def names(self) -> set[str]:
        """Return the objects there are, as paths below the run's folder."""
        root = self.objects / "run"
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def requests(self, verb: str) -> list[list[Any]]:
        """Return the requests of a kind so far: path, first byte, number of bytes."""
        log = self.base / "requests"
        lines = log.read_text().splitlines() if log.exists() else []
        return [entry[1:] for entry in map(json.loads, lines) if entry[0] == verb]

    def listed(self, folder: str) -> dict[str, str]:
        """Return the names that a listing of a folder shows, with their kinds."""
        frozen = self.base / "listing.json"
        paths = (
            [Path(path) for path in json.loads(frozen.read_text())]
            if frozen.exists()
            else [path for path in self.objects.rglob("*") if path.is_file()]
        )
        found = {}
        for path in paths:
            if path.is_relative_to(folder) and str(path) != folder:
                first, *rest = path.relative_to(folder).parts
                found[first] = "directory" if rest else "file"
        return found

    def ask(self, verb: str, path: str, offset: int = 0, nbytes: int = 0) -> Fault | None:
        """Log a request; raise, or return the fault that the caller is to carry out."""
        with (self.base / "requests").open("a+") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            log.seek(0)
            before = [json.loads(line) for line in log]
            log.write(json.dumps([verb, path, offset, nbytes]) + "\n")
        plan = self.base / "faults.json"
        for values in json.loads(plan.read_text()) if plan.exists() else []:
            fault = Fault(**values)
            if fault.verb != verb or fault.match not in path:
                continue
            number = sum(entry[0] == verb and fault.match in entry[1] for entry in before)
            if not fault.after <= number < fault.after + fault.count:
                continue
            if fault.kind == "denied":
                raise PermissionError(errno.EACCES, "Access Denied", path)
            if fault.kind == "full":
                raise OSError(errno.ENOSPC, "no space left in the store", path)
            if fault.kind == "broken":
                raise ConnectionError(f"connection reset while '{path}' was under way")
            if fault.kind == "killed" and verb != "write":
                os._exit(EXIT_CODE)
            return fault
        return None


class FaultyFileSystem(AbstractFileSystem):
    """The driver of ``faulty://`` URLs."""

    protocol = SCHEME
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix(f"{SCHEME}://").rstrip("/")

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        """Return size and kind."""
        path = self._strip_protocol(path)
        store = FaultyStore.of(path)
        store.ask("info", path)
        if os.path.isfile(path):
            return {"name": path, "size": os.path.getsize(path), "type": "file"}
        if store.listed(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(errno.ENOENT, "no such object", path)

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
        """List a folder."""
        path = self._strip_protocol(path)
        store = FaultyStore.of(path)
        store.ask("list", path)
        found = store.listed(path)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        facts = [{"name": f"{path}/{n}", "size": 0, "type": kind} for n, kind in found.items()]
        return facts if detail else [entry["name"] for entry in facts]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: object
    ) -> bytes:
        """Return a range of an object."""
        path = self._strip_protocol(path)
        store = FaultyStore.of(path)
        first = start or 0
        nbytes = (
            os.path.getsize(path) if end is None and os.path.exists(path) else end or 0
        ) - first
        store.ask("read", path, first, nbytes)
        with open(path, "rb") as stream:
            stream.seek(first)
            return stream.read(nbytes)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        """Write an object at once."""
        path = self._strip_protocol(path)
        fault = FaultyStore.of(path).ask("write", path, 0, len(value))
        if fault is not None and fault.kind == "killed":
            # What goes with one request arrives whole or not at all.
            os._exit(EXIT_CODE)
        _put(path, value, fault)

    def rm(self, path: list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove objects, the manifest last: a store promises no order within a request."""
        for one in sorted(path):
            self.rm_file(one)

    def rm_file(self, path: str) -> None:
        """Remove an object."""
        path = self._strip_protocol(path)
        FaultyStore.of(path).ask("remove", path)
        os.unlink(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> AbstractBufferedFile:
        return _Upload(self, path, mode, **kwargs)


class _Upload(AbstractBufferedFile):
    """A multipart upload: parts go to a file elsewhere, which the last one moves."""

    def _initiate_upload(self) -> None:
        self._parts = FaultyStore.of(self.path).base / f"parts-{uuid4().hex}"

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()
        fault = FaultyStore.of(self.path).ask("write", self.path, self.offset, len(data))
        if fault is not None:
            whole = self._parts.read_bytes() if self._parts.exists() else b""
            _put(self.path, whole + data, fault)
            return True
        with self._parts.open("ab") as stream:
            stream.write(data)
        if final:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            os.replace(self._parts, self.path)
        return True

    def discard(self) -> None:
        """Give up the parts."""
        if (parts := getattr(self, "_parts", None)) is not None:
            parts.unlink(missing_ok=True)


def _put(path: str, value: bytes, fault: Fault | None) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Complete at once for readers in other processes.
    part = FaultyStore.of(path).base / f"object-{uuid4().hex}"
    part.write_bytes(value if fault is None else value[: len(value) // 2])
    os.replace(part, path)
    if fault is not None and fault.kind == "killed":
        os._exit(EXIT_CODE)
    if fault is not None and fault.kind == "torn":
        raise ConnectionError(f"connection reset while '{path}' was under way")


def register() -> None:
    """Have fsspec know the scheme in this process, and in those that import this file."""
    fsspec.register_implementation(SCHEME, FaultyFileSystem, clobber=True)


register()
