"""Layouts say where rows stand, also of models that are not built yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megafsdp.buffer.dtensor.uneven_layout import Region, whole
from megafsdp.checkpoint.huggingface.import_ import fill_region
from megafsdp.checkpoint.huggingface.mapping import Entry, MappingRow
from megafsdp.checkpoint.huggingface.row_layout import Part, RowRun, match_rows
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.errors import CheckpointError

_HIDDEN = 5


def _numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return tensors of which no two elements are equal."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + numel).reshape(shape)
        start += numel
    return tensors


def _assert_both_ways(entry: Entry, theirs: dict[str, torch.Tensor], ours: torch.Tensor) -> None:
    assert {name: tuple(t.shape) for name, t in theirs.items()} == dict(entry.theirs)
    assert torch.equal(entry.join(list(theirs.values())), ours)
    back = entry.split(ours)
    assert list(back) == list(theirs)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())
    assert all(tensor.is_contiguous() for tensor in back.values())


def test_runs_are_as_long_as_rows_stand_together() -> None:
    """Heads of one group are one run; keys of two groups are two."""
    sizes = {"groups": 2, "heads": 3, "q": 4, "k": 4}
    parts = [Part("groups(heads(q))"), Part("groups(k)")]
    rows, runs = match_rows("groups(heads(q) k)", parts, sizes, 32)
    assert rows == (24, 8)
    wanted = ((0, 0, 0, 12), (1, 0, 12, 4), (0, 12, 16, 12), (1, 4, 28, 4))
    assert runs == tuple(RowRun(*run) for run in wanted)


def test_rows_of_several_tensors_are_several_runs() -> None:
    """With one head in a group, the next rows of each tensor begin where those of another end."""
    parts = [Part("groups(heads(q))"), Part("groups(k)")]
    _, runs = match_rows("groups(heads(q) k)", parts, {"groups": 2, "heads": 1}, 16)
    wanted = ((0, 0, 0, 4), (1, 0, 4, 4), (0, 4, 8, 4), (1, 4, 12, 4))
    assert runs == tuple(RowRun(*run) for run in wanted)


def test_gated_queries_are_interleaved_by_query_group() -> None:
    """[q; gate; k; v] of each group, from queries that are stored with the gate of their head."""
    num_groups, heads, dim = 2, 3, 4
    row = MappingRow(
        "linear_qkv.weight",
        {"q": "groups(heads(q gate))", "k": "groups(k)", "v": "groups(v)"},
        "groups(heads(q) heads(gate) k v)",
    )
    num_rows = num_groups * (2 * heads + 2) * dim
    sizes = {"groups": num_groups, "heads": heads, "q": dim, "k": dim, "v": dim}
    theirs = _numbered(
        {
            "q": (num_groups * heads * 2 * dim, _HIDDEN),
            "k": (num_groups * dim, _HIDDEN),
            "v": (num_groups * dim, _HIDDEN),
        }
    )
    q, gate = theirs["q"].view(num_groups, heads, 2, dim, _HIDDEN).unbind(2)
    k, v = (theirs[name].view(num_groups, dim, _HIDDEN) for name in "kv")
    ours = torch.cat((q.flatten(1, 2), gate.flatten(1, 2), k, v), dim=1).flatten(0, 1)
    _assert_both_ways(row.entry((num_rows, _HIDDEN), sizes), theirs, ours)


def test_six_parts_of_a_gated_delta_net_come_from_two_tensors() -> None:
    """Rows q, k, v, z, beta and alpha, each flat over heads, stored by the key head."""
    num_heads, ratio, dk, dv = 2, 2, 3, 4
    row = MappingRow(
        "in_proj.weight",
        {"qkvz": "heads(q k v z)", "ba": "heads(beta alpha)"},
        "heads(q) heads(k) heads(v) heads(z) heads(beta) heads(alpha)",
    )
    sizes = {"heads": num_heads, "q": dk, "k": dk, "v": ratio * dv, "z": ratio * dv}
    sizes |= {"beta": ratio, "alpha": ratio}
    per_head = [dk, dk, ratio * dv, ratio * dv]
    theirs = _numbered(
        {
            "qkvz": (num_heads * sum(per_head), _HIDDEN),
            "ba": (num_heads * 2 * ratio, _HIDDEN),
        }
    )
    pieces = theirs["qkvz"].view(num_heads, -1, _HIDDEN).split(per_head, dim=1)
    pieces += theirs["ba"].view(num_heads, -1, _HIDDEN).split(ratio, dim=1)
    ours = torch.cat([piece.flatten(0, 1) for piece in pieces])
    _assert_both_ways(row.entry(tuple(ours.shape), sizes), theirs, ours)


def test_a_stack_of_experts_has_tensors_of_its_own_for_each(tmp_path: Path) -> None:
    """Shape (experts, gate and up, hidden) from two tensors an expert, whole or a shard of it."""
    names = {"experts.{expert}.gate.weight": "gate", "experts.{expert}.up.weight": "up"}
    row = MappingRow("experts.weight", names, "experts(gate up)")
    entry = row.entry((3, 8, _HIDDEN), {"experts": 3})
    shapes = {
        f"experts.{expert}.{part}.weight": (4, _HIDDEN)
        for part in ("gate", "up")
        for expert in range(3)
    }
    theirs = _numbered(shapes)
    gate, up = (torch.stack([t for n, t in theirs.items() if p in n]) for p in ("gate", "up"))
    ours = torch.cat((gate, up), dim=1)
    _assert_both_ways(entry, theirs, ours)
    save_file(theirs, tmp_path / "model.safetensors")
    reader, stored = SafetensorsReader(tmp_path), {name: name for name in theirs}
    for offsets, sizes in (((0, 0, 0), (3, 8, 5)), ((1, 3, 0), (2, 4, 5)), ((2, 1, 2), (1, 7, 3))):
        region = Region(offsets, sizes)
        target = torch.full(sizes, -1)
        fill_region(target, region, entry, reader=reader, stored=stored)
        assert torch.equal(target, ours[region.slices_in(whole((3, 8, 5)))])


def test_any_range_of_rows_can_be_named() -> None:
    """Rows 0 to 1 of one tensor between ranges of another, and a range that is nowhere."""
    row = MappingRow("w", {"a": "first last", "b": "middle"}, "first middle unused last")
    sizes = {"first": 2, "middle": 3, "unused": 1}
    entry = row.entry((10, 2), sizes)
    theirs = _numbered({"a": (6, 2), "b": (3, 2)})
    ours = torch.cat((theirs["a"][:2], theirs["b"], torch.zeros(1, 2), theirs["a"][2:]))
    assert entry.is_padded and entry.stored_numel == 18
    _assert_both_ways(entry, theirs, ours.long())


@pytest.mark.parametrize("num_rows", [7, 9])
def test_rows_that_do_not_add_up_are_refused(num_rows: int) -> None:
    """Two equal blocks have an even number of rows."""
    with pytest.raises(CheckpointError, match=r"rows for 'gate up'"):
        match_rows("gate up", [Part("gate"), Part("up")], {}, num_rows)
