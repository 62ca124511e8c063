"""Rows of parameters are found in every buffer that is cut as the first one is."""

from __future__ import annotations

import torch

from megafsdp.fsdp.params.group_buffers import LocalRows


def _rows() -> LocalRows:
    """Return three parameters out of order, one of them without rows, and a gap at 4."""
    flat = torch.empty(8)
    rows = [flat[5:8].view(1, 3), flat[4:4].view(0, 2), flat[:4].view(2, 2)]
    return LocalRows(rows, flat)


def test_rows_are_views_in_the_shapes_of_the_parameters() -> None:
    """A write to a view is one to the buffer, whatever its dtype."""
    rows = _rows()
    for dtype in (torch.float32, torch.float64):
        flat = torch.arange(8, dtype=dtype)
        first, none, last = rows.views(flat)
        assert first.tolist() == [[5, 6, 7]] and last.tolist() == [[0, 1], [2, 3]]
        assert none.shape == (0, 2) and none.dtype == dtype
        first.zero_()
        assert flat.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_rows_that_were_cut_in_inference_mode_can_be_written_outside() -> None:
    """Also those without elements, which are made once."""
    rows, flat = _rows(), torch.zeros(8)
    with torch.inference_mode():
        rows.views(flat)
    for view in rows.views(flat):
        view.add_(1)
    assert flat.tolist() == [1, 1, 1, 1, 0, 1, 1, 1]
