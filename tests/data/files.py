"""What the data tests share: a writer call and an independent reader of the file format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from megafsdp.data import IndexedDataset, IndexedDatasetWriter

_STRUCT_CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


def write_dataset(
    prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2"
) -> IndexedDataset:
    """Write one sequence a document and open the result."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def read_with_struct(prefix: Path) -> tuple[list[list[float]], list[int]]:
    """Read the sequences and document boundaries from the format's description alone."""
    index = Path(f"{prefix}.idx").read_bytes()
    data = Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, num_sequences, num_boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    boundaries = struct.unpack_from(f"<{num_boundaries}q", index, 34 + 12 * num_sequences)
    assert len(index) == 34 + 12 * num_sequences + 8 * num_boundaries
    sequences = [
        list(struct.unpack_from(f"<{length}{_STRUCT_CODES[code]}", data, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return sequences, list(boundaries)
