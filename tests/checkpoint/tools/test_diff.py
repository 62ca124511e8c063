"""Comparing: equal however sharded, and every kind of difference with its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import save
from megafsdp.checkpoint.tools import diff as module
from megafsdp.checkpoint.tools.diff import DiffReport, TensorDifference, compare, diff
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import Toy, fill, make_optimizer, shard, train, whole_mesh
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _save_sharded(root: Path) -> None:
    model = Toy()
    fill(model)
    shard(model, whole_mesh())
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    save(root, step=2, model=model, optimizer=optimizer)


def test_the_same_state_from_other_ranks_is_equal(ranks: Ranks, tmp_path: Path) -> None:
    """Sharding makes no difference to tensors; ranks and random states may be left out."""
    ranks(3).run(_save_sharded, tmp_path / "a")
    ranks(1).run(_save_sharded, tmp_path / "b")
    report = diff(tmp_path / "a", tmp_path / "b", ignore=["rng.*", "common"])
    assert report.is_equal and report.describe().endswith("; 18 keys are equal")
    assert replace(report, num_equal=1).describe().endswith("; 1 key is equal")
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.tensors == () and {"rng.1", "rng.2"} == set(report.only_left)
    assert report.objects["common"] == "at common['world_size']: 3 and 1"


def _write(root: Path, values: dict[str, object]) -> Path:
    with CheckpointWriter(root, step=1) as writer:
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                writer.add_tensor(key, value)
            else:
                writer.add_object(key, value)
        return writer.publish()


def _diff(tmp_path: Path, a: dict[str, object], b: dict[str, object], **how: float) -> DiffReport:
    return diff(_write(tmp_path / "a", a), _write(tmp_path / "b", b), **how)


def test_every_kind_of_difference_is_reported(tmp_path: Path) -> None:
    """Keys of one side, shapes, dtypes, values with count, size and place, objects."""
    base = torch.arange(12, dtype=torch.float32).view(3, 4)
    changed = base.clone()
    changed[1, 2] += 0.5
    changed[2, 0] -= 3
    a = {
        "model.a": base,
        "model.gone": base,
        "model.shape": base,
        "model.dtype": base,
        "model.kind": base,
        "lr_scheduler": {"epoch": 1, "rates": [0.1, 0.2]},
    }
    b = {
        "model.a": changed,
        "model.new": base,
        "model.shape": base[:2],
        "model.dtype": base.double(),
        "model.kind": 3,
        "lr_scheduler": {"epoch": 1, "rates": [0.1, 0.3]},
    }
    report = _diff(tmp_path, a, b)
    assert (report.only_left, report.only_right) == (("model.gone",), ("model.new",))
    by_key = {tensor.key: tensor for tensor in report.tensors}
    assert set(by_key) == {"model.a", "model.shape", "model.dtype"}
    assert by_key["model.a"] == TensorDifference(
        "model.a",
        shapes=((3, 4), (3, 4)),
        dtypes=("float32", "float32"),
        num_different=2,
        numel=12,
        max_abs_difference=3.0,
        first_index=(1, 2),
        first_values=(6.0, 6.5),
    )
    assert by_key["model.shape"].shapes == ((3, 4), (2, 4))
    assert by_key["model.dtype"].dtypes == ("float32", "float64")
    assert by_key["model.dtype"].num_different == 0
    assert report.objects == {
        "model.kind": "a tensor in A and an object in B",
        "lr_scheduler": "at lr_scheduler['rates'][1]: 0.2 and 0.3",
    }
    text = report.describe()
    assert (
        "model.a: 2 of 12 elements, by at most 3; first at [1, 2]: 6.0 and 6.5" in text.splitlines()
    )
    assert "only in A: model.gone" in text and "7 differences; 2 keys are equal" in text
    body = json.loads(report.to_json())
    assert body["is_equal"] is False and body["tensors"][0]["first_index"] == [1, 2]


@pytest.mark.parametrize(
    ("dtype", "is_equal_close"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.int64, False)],
)
def test_tolerances(tmp_path: Path, dtype: torch.dtype, is_equal_close: bool) -> None:
    """What is near enough is equal with a tolerance, and nothing is without one."""
    a, b = torch.ones(5), torch.ones(5)
    b[3] = 1.015625 if is_equal_close else 2
    values = [{"model.a": a.to(dtype)}, {"model.a": b.to(dtype)}]
    assert not _diff(tmp_path / "exact", *values).is_equal
    assert _diff(tmp_path / "close", *values, atol=0.02).is_equal == is_equal_close
    assert _diff(tmp_path / "near", *values, rtol=0.02).is_equal == is_equal_close
    assert not _diff(tmp_path / "strict", *values, rtol=1e-4).is_equal


def test_values_are_compared_by_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN equals NaN of the same bits, zeros of other signs differ; pieces are put together."""
    monkeypatch.setattr(module, "_PIECE_NUMEL", 3)
    a = torch.tensor([1.0, math.nan, math.inf, 0.0, 2.0, 5.0, 7.0]).view(7, 1)
    assert compare("a", a, a.clone()) is None
    b = a.clone()
    b[3], b[6] = -0.0, 9.0
    found = compare("a", a, b)
    assert found is not None and (found.num_different, found.max_abs_difference) == (2, 2.0)
    assert found.first_index == (3, 0)
    b[0] = 1.5
    assert compare("a", a, b, atol=2.0) is None
    b[4] = math.nan
    found = compare("a", a, b)
    assert found is not None and math.isnan(found.max_abs_difference or 0)
    report = DiffReport("a", "b", tensors=(found,))
    assert json.loads(report.to_json())["tensors"][0]["max_abs_difference"] == "nan"
    other_bits = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = compare("a", torch.tensor([math.nan]), other_bits)
    assert found is not None and found.num_different == 1


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.complex64]
)
def test_any_dtype_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    """One element that differs is counted and shown."""
    a, b = torch.zeros(4), torch.zeros(4)
    b[2] = 1
    (found,) = _diff(tmp_path, {"model.a": a.to(dtype)}, {"model.a": b.to(dtype)}).tensors
    assert (found.num_different, found.first_index, found.max_abs_difference) == (1, (2,), 1.0)
    assert DiffReport("a", "b", tensors=(found,)).to_json()


@pytest.mark.parametrize(
    ("a", "b", "how"),
    [
        ({"x": 1, "y": 2}, {"x": 1}, "at o: ['y'] only in A"),
        ({"x": 1}, {"x": 1.0}, "at o['x']: 1 and 1.0"),
        ([1, 2], [1, 2, 3], "at o: 2 and 3 items"),
        ({"t": torch.ones(2)}, {"t": torch.zeros(2)}, "o['t']: 2 of 2 elements"),
        ({"t": torch.ones(2)}, {"t": torch.ones(3)}, "at o['t']: a float32 tensor of shape [2]"),
        (math.nan, math.nan, None),
        ({"a": ["b", None, 0.5]}, {"a": ["b", None, 0.5]}, None),
    ],
)
def test_objects_are_compared_inside(tmp_path: Path, a: object, b: object, how: str | None) -> None:
    """The first place that differs is named with both values."""
    report = _diff(tmp_path, {"o": a}, {"o": b})
    assert (how is None) == report.is_equal
    assert how is None or how in report.objects["o"]


def test_a_tied_tensor_is_reported_once(tmp_path: Path) -> None:
    """Under its first name, and under its second one too if only one side ties it."""
    model = Toy()
    save(tmp_path / "a", step=1, model=model)
    model.embed.weight.data += 1
    save(tmp_path / "b", step=1, model=model)
    keys = [tensor.key for tensor in diff(tmp_path / "a", tmp_path / "b").tensors]
    assert keys == ["model.embed.weight"]
    model.head.weight = torch.nn.Parameter(model.embed.weight + 1)
    save(tmp_path / "c", step=1, model=model)
    keys = [tensor.key for tensor in diff(tmp_path / "b", tmp_path / "c").tensors]
    assert keys == ["model.head.weight"]


def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path) -> None:
    """Nothing is said of values that cannot be trusted."""
    for name in "ab":
        save(tmp_path / name, step=1, model=Toy())
    file = tmp_path / "b/iter_0000001/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        diff(tmp_path / "a", tmp_path / "b")
