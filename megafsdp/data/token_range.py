"""The range of a dataset's tokens, to refuse a model with too small a vocabulary at the start.

A file is scanned once; the result is kept in ``<prefix>.range.json`` and trusted for as long as
size and time of the ``.bin`` file are those of the scan.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megafsdp.data.indexed import IndexedDataset
from megafsdp.data.output_files import replace_text
from megafsdp.errors import DataError, expected

_LOGGER = logging.getLogger("megafsdp.data")
_PIECE_NUM_TOKENS = 1 << 24


def token_range(dataset: IndexedDataset) -> tuple[int, int]:
    """Return the smallest and the largest token; (0, -1) if there is none.

    The first call for a file reads all of it, in pieces; where the folder is writable later calls
    read the side file.
    """
    path = Path(f"{dataset.prefix}.range.json")
    state = dataset.data_path.stat()
    stamp = {"bin_nbytes": state.st_size, "bin_mtime_ns": state.st_mtime_ns}
    try:
        record = json.loads(path.read_text())
        if stamp.items() <= record.items():
            return int(record["smallest"]), int(record["largest"])
    except (OSError, ValueError, KeyError, AttributeError):
        _LOGGER.debug("scanning '%s' for its token range", dataset.data_path)
    smallest, largest = _scan(dataset)
    try:
        replace_text(path, json.dumps({**stamp, "smallest": smallest, "largest": largest}))
    except OSError as error:
        _LOGGER.debug("'%s' is not kept: %s", path, error)
    return smallest, largest


def check_vocabulary(dataset: IndexedDataset, vocab_size: int) -> None:
    """Refuse a dataset with tokens that a model's embedding has no row for.

    Args:
        dataset: The tokens.
        vocab_size: Rows of the embedding.

    Raises:
        DataError: A token is negative, or not less than ``vocab_size``.
    """
    smallest, largest = token_range(dataset)
    if smallest < 0 or largest >= vocab_size:
        token = smallest if smallest < 0 else largest
        hint = "Use the tokenizer that the data was prepared with and its vocab_size, "
        raise DataError(
            expected(
                f"tokens from 0 to below the model's vocab_size {vocab_size}",
                f"token {token}",
                where=f"file '{dataset.data_path}'",
                hint=hint + f"at least {max(largest, 0) + 1}, or prepare the data again",
            )
        )


def _scan(dataset: IndexedDataset) -> tuple[int, int]:
    smallest, largest = 0, -1
    for start in range(0, dataset.num_tokens, _PIECE_NUM_TOKENS):
        piece = dataset.tokens[start : start + _PIECE_NUM_TOKENS]
        low, high = int(piece.min()), int(piece.max())
        smallest = low if start == 0 else min(smallest, low)
        largest = max(largest, high)
    return smallest, largest
