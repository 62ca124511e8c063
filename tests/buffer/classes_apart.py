"""Layouts of several sub-buffers on few ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

from megafsdp.buffer import planner
from megafsdp.buffer.layout import FlatLayout, TensorSpec


@contextlib.contextmanager
def classes_apart() -> Iterator[None]:
    """Plan a sub-buffer for each row class and one for vectors, as on hundreds of ranks.

    On few ranks the planner finds one sub-buffer that pads little for every toy.
    """
    with mock.patch.object(planner, "_plan", _plan_apart):
        yield


def _plan_apart(specs: Sequence[TensorSpec], num_shards: int, itemsize: float) -> FlatLayout:
    alignment = max(int(16 / itemsize), 1)
    one_for_each = planner._Packer(specs, num_shards, alignment).candidates()[1]
    return one_for_each.freeze(specs, num_shards)
