"""Verify a checkpoint: check all that can be checked without a model, and list every fault.

It checks the manifest's own checksum, the files and their sizes, the checksum and the content of
every record, that the records fill their files, that the chunks of every tensor cover each element
once, that aliases and parts name stored tensors, and that ``.metadata`` agrees with the manifest.
Bytes are read once, in pieces, and no pickle can run code. Nothing is repaired.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from megafsdp.buffer.dtensor.uneven_layout import whole
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import (
    DCP_METADATA_FILE,
    MANIFEST_FILE,
    Manifest,
    Record,
    dtype_name,
    read_manifest,
    write_dcp_metadata,
)
from megafsdp.checkpoint.format.records import RecordReader
from megafsdp.checkpoint.format.regions import odd_cells
from megafsdp.checkpoint.storage.locations import Location, file_names, size_of
from megafsdp.checkpoint.tools.dcp_reader import places_of, read_metadata
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.report import Problem, Report
from megafsdp.errors import CheckpointError

# The most places that are reported for one tensor.
_MAX_ODD_CELLS = 8


@dataclass(frozen=True, slots=True)
class VerifyReport(Report):
    """What was checked, and every fault that was found.

    Attributes:
        directory: The checkpoint.
        num_tensors: Number of tensors in its manifest.
        num_records: Number of records that were read.
        nbytes: Their size.
        findings: The faults; none means that the checkpoint is sound.
    """

    directory: str
    num_tensors: int
    num_records: int
    nbytes: int
    findings: tuple[Problem, ...]

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.findings

    def verdict(self) -> dict[str, bool]:
        """Return the entries of the JSON report beside the fields."""
        return {"is_sound": self.is_sound}

    def lines(self) -> list[str]:
        """Return one line for each fault, and a summary as the last line."""
        num_faults = len(self.findings)
        verdict = f"{num_faults} fault{'s' if num_faults > 1 else ''}" if num_faults else "sound"
        summary = (
            f"{self.directory}: {verdict}; {self.num_tensors} tensors, "
            f"{self.num_records} records, {self.nbytes:,} bytes read"
        )
        return [*(finding.describe() for finding in self.findings), summary]


def verify(
    directory: str | os.PathLike[str], step: int | None = None, *, show_progress: bool = False
) -> VerifyReport:
    """Read a whole checkpoint and list its faults; local, in constant memory.

    Args:
        directory: The save root, or one checkpoint's own directory.
        step: The step; None means the latest published one.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Raises:
        CheckpointError: There is no such checkpoint.
    """
    path = save_root.find(directory, step)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return VerifyReport(str(path), 0, 0, 0, (Problem(MANIFEST_FILE, "", str(error)),))
    places = manifest.places([*manifest.tensors, *manifest.objects])
    # A record that two entries name is read for each, as each has its own description of it.
    nbytes = sum(record.nbytes for record, _ in places)
    findings = list(_odd_files(path, manifest))
    findings += _odd_layout(manifest, places)
    with bytes_bar("verify", nbytes, is_wanted=show_progress) as bar:
        findings += _odd_records(path, manifest, places, bar)
    findings += _odd_chunks(manifest)
    odd_names = [*_odd_names(manifest), *_odd_parts(manifest)]
    # .metadata cannot be compared if names refer to missing tensors.
    findings += odd_names or _odd_metadata(path, manifest)
    return VerifyReport(str(path), len(manifest.tensors), len(places), nbytes, tuple(findings))


def _odd_files(path: Location, manifest: Manifest) -> Iterator[Problem]:
    for name, nbytes in manifest.files.items():
        found = size_of(path / name)
        if found is None:
            yield Problem(name, "", f"missing; {nbytes} bytes in the manifest")
        elif found != nbytes:
            yield Problem(name, "", f"{found} bytes; {nbytes} in the manifest")
    for name in file_names(path):
        if name.endswith(".distcp") and name not in manifest.files:
            yield Problem(name, "", "not in the manifest")


def _odd_layout(manifest: Manifest, places: list[tuple[Record, str]]) -> Iterator[Problem]:
    """Find bytes in files of records that belong to no record, or to two."""
    ends = {record.file: 0 for record, _ in places}
    for record, key in places:
        end = ends[record.file]
        if record.offset != end:
            fault = "in two records" if record.offset < end else "in no record"
            low, high = sorted((record.offset, end))
            yield Problem(record.file, key, f"bytes {low} to {high} before it are {fault}")
        ends[record.file] = max(end, record.offset + record.nbytes)
    for file, end in ends.items():
        if (size := manifest.files.get(file)) != end:
            yield Problem(file, "", f"records end at byte {end}; the manifest says {size} bytes")


def _odd_records(
    path: Location, manifest: Manifest, places: list[tuple[Record, str]], bar: tqdm
) -> Iterator[Problem]:
    """Compare every record's checksum and content with the manifest, file by file."""
    missing = {
        file for file in {record.file for record, _ in places} if not (path / file).is_file()
    }
    with RecordReader(path) as reader:
        for record, key in places:
            if record.file in missing:
                yield Problem(record.file, key, "its file is missing")
            elif (problem := _fault_of_record(reader, record, manifest, key)) is not None:
                yield Problem(record.file, key, f"record at byte {record.offset}: {problem}")
            bar.update(record.nbytes)


def _fault_of_record(
    reader: RecordReader, record: Record, manifest: Manifest, key: str
) -> str | None:
    found, num_left = reader.checksum(record)
    if num_left:
        return f"the file ends {num_left} bytes before it does"
    if found != record.crc32:
        return f"checksum {found}; {record.crc32} in the manifest"
    try:
        value = reader.read_description(record)
    except Exception as error:
        # torch can raise anything on a stream that it did not write.
        return f"not loadable: {type(error).__name__}: {error}"
    entry = manifest.tensors.get(key)
    if entry is None:
        return None
    wanted = [(entry.dtype, chunk.region.sizes) for chunk in entry.chunks if chunk.record == record]
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}; a tensor in the manifest"
    content = (dtype_name(value.dtype), tuple(value.shape))
    return None if content in wanted else f"{content}; {wanted[0]} in the manifest"


def _odd_chunks(manifest: Manifest) -> Iterator[Problem]:
    for key, entry in manifest.tensors.items():
        odd = odd_cells(entry.shape, [chunk.region for chunk in entry.chunks])
        for cell, count in odd[:_MAX_ODD_CELLS]:
            # A cell lies wholly inside or wholly outside the tensor and each chunk.
            files = [c.record.file for c in entry.chunks if cell.intersect(c.region) is not None]
            is_inside = cell.intersect(whole(entry.shape)) is not None
            stored = "never" if not count else "once" if count == 1 else f"{count} times"
            wanted = "once" if is_inside else "never: they lie outside"
            yield Problem(
                ", ".join(dict.fromkeys(files)) or MANIFEST_FILE,
                key,
                f"elements of sizes {list(cell.sizes)} at {list(cell.offsets)} of shape "
                f"{list(entry.shape)} are stored {stored} instead of {wanted}",
            )
        if len(odd) > _MAX_ODD_CELLS:
            yield Problem("", key, f"{len(odd) - _MAX_ODD_CELLS} more such places")


def _odd_names(manifest: Manifest) -> Iterator[Problem]:
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors:
            yield Problem(MANIFEST_FILE, alias, f"tied to '{target}', which is not stored")
    for key in sorted(
        (manifest.tensors.keys() & manifest.objects.keys())
        | (manifest.aliases.keys() & (manifest.tensors.keys() | manifest.objects.keys()))
    ):
        yield Problem(MANIFEST_FILE, key, "stored twice")
    for key in ("extra", "common"):
        if key not in manifest.objects:
            yield Problem(MANIFEST_FILE, key, "not stored, but every checkpoint has it")


def _odd_parts(manifest: Manifest) -> Iterator[Problem]:
    """Find fused parameters whose parts are not stored or cannot be joined."""
    for key, fused in manifest.fused_into.items():
        parts = [manifest.aliases.get(part, part) for part in fused["parts"]]
        entries = [manifest.tensors[part] for part in parts if part in manifest.tensors]
        for part in parts:
            if part not in manifest.tensors:
                yield Problem(MANIFEST_FILE, key, f"its part '{part}' is not stored")
        if key in manifest.tensors:
            yield Problem(MANIFEST_FILE, key, "stored both whole and in parts")
        dim = fused["dim"]
        others = {
            (entry.dtype, entry.shape[:dim], entry.shape[dim + 1 :], len(entry.shape))
            for entry in entries
        }
        if len(others) > 1 or any(0 < len(entry.shape) <= dim for entry in entries):
            shapes = [[entry.dtype, list(entry.shape)] for entry in entries]
            yield Problem(MANIFEST_FILE, key, f"parts {shapes} cannot be joined along dim {dim}")


def _odd_metadata(path: Location, manifest: Manifest) -> Iterator[Problem]:
    """Compare ``.metadata`` with a new one that is derived from the manifest."""
    if not (path / DCP_METADATA_FILE).is_file():
        if DCP_METADATA_FILE not in manifest.files:
            yield Problem(DCP_METADATA_FILE, "", "missing")
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted = _metadata_facts(write_dcp_metadata(manifest, Path(folder)))
    try:
        found = _metadata_facts(path / DCP_METADATA_FILE)
    except Exception as error:
        # A damaged pickle can raise anything.
        yield Problem(DCP_METADATA_FILE, "", f"unreadable: {type(error).__name__}: {error}")
        return
    for what in wanted:
        for key in dict.fromkeys([*wanted[what], *found[what]]):
            if wanted[what].get(key) != found[what].get(key):
                yield Problem(DCP_METADATA_FILE, key, f"{what} differ from the manifest's")


def _metadata_facts(path: Location) -> dict[str, dict[str, str]]:
    """Return what a ``.metadata`` file says about each key, as strings to compare."""
    facts = read_metadata(path)
    # By key and offsets: a MetadataIndex also has a hint, the chunk's index in a list.
    places: dict[str, dict] = {}
    for (key, offsets), place in places_of(facts).items():
        places.setdefault(key, {})[offsets] = place
    by_subject = {
        "shape, dtype and chunks": facts["state_dict_metadata"],
        "nested names": facts["planner_data"],
        "places of records": places,
    }
    return {
        subject: {key: repr(value) for key, value in by_key.items()}
        for subject, by_key in by_subject.items()
    }
