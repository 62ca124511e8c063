"""Pickles are read as data: values come back, calls are described and never made."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megafsdp.checkpoint.tools.safe_pickle import Foreign, read_pickle, read_record


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


_VALUES = [
    None,
    True,
    3,
    2.5,
    1 + 2j,
    "text",
    b"bytes\xff\x00",
    (1, [2, {"a": (3,)}]),
    {1, 2},
    frozenset({"a"}),
    collections.OrderedDict(b=1, a=[2]),
    torch.bfloat16,
    torch.device("cuda", 1),
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", _VALUES, ids=repr)
def test_plain_values_come_back(value: object, protocol: int) -> None:
    """Whatever the protocol of the pickle."""
    found = read_pickle(pickle.dumps(value, protocol=protocol))
    assert found == value
    if not isinstance(value, collections.OrderedDict):
        assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16]
)
def test_tensors_of_a_record_come_back(dtype: torch.dtype) -> None:
    """Views, transposed and empty ones, and two that share memory."""
    base = torch.arange(24).reshape(4, 6).to(dtype)
    value = {"view": base[1:3, ::2], "turned": base.t(), "none": base[:0], "scalar": base[1, 2]}
    found = read_record(_saved(value))
    assert isinstance(found, dict)
    for name, tensor in value.items():
        assert found[name].dtype == dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", ["uint32", "float64", ">i2", "bool"])
def test_numpy_arrays_and_scalars_come_back(dtype: str) -> None:
    """The state of numpy's generator is such a tuple."""
    array = np.arange(6).reshape(2, 3).astype(dtype)
    name, whole, turned, one = read_record(
        _saved(("MT", array, np.asfortranarray(array), array[1, 2]))
    )
    assert name == "MT" and one == array[1, 2]
    assert np.array_equal(whole, array) and np.array_equal(turned, array)


def test_namespaces_show_their_attributes() -> None:
    """Those of the command line, and those made by hand."""
    value = argparse.Namespace(a=1, b=types.SimpleNamespace(c=[torch.float16]))
    found = read_record(_saved(value))
    assert isinstance(found, Foreign) and found.name == "argparse.Namespace"
    attributes = found.attributes()
    assert attributes is not None and attributes["a"] == 1
    assert attributes["b"].attributes() == {"c": [torch.float16]}


class _Call:
    def __init__(self, function: object, *arguments: object) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.reduced


def _apply(function: Callable[[], object]) -> object:
    return function()


@pytest.mark.parametrize("protocol", range(6))
def test_calls_are_described_and_not_made(tmp_path: Path, protocol: int) -> None:
    """A command, a method of a result, an import by name."""
    trap = tmp_path / "sprung"
    touch = _Call(getattr, Path(trap), "touch")
    data = pickle.dumps([_Call(os.mkdir, f"{trap}s"), _Call(_apply, touch)], protocol)
    found = read_pickle(data)
    assert not list(tmp_path.iterdir())
    assert isinstance(found, list)
    assert found[0].describe() == f"<posix.mkdir('{trap}s')>"
    assert "getattr" in found[1].describe() and "PosixPath" in found[1].describe()
    pickle.loads(data)
    assert len(list(tmp_path.iterdir())) == 2, "the trap works"


def test_a_result_may_be_called() -> None:
    """``getattr(os, 'mkdir')('here')``, as a pickle can spell it, is one more description."""
    data = b"cbuiltins\ngetattr\n(cos\npath\nS'exists'\ntR(S'here'\ntR."
    assert pickle.loads(data) is False
    found = read_pickle(data)
    assert isinstance(found, Foreign)
    assert found.describe().endswith("'here')>") and "builtins.getattr" in found.describe()


def test_a_pickle_cannot_reach_into_this_process() -> None:
    """State set on what a name stands for goes to a stand-in, not to the class or module."""
    # argparse.Namespace, then BUILD with a dict and with slots: would set attributes on the class.
    hostile = b"cargparse\nNamespace\n(N(dS'__init__'\ncbuiltins\nprint\nsttb."
    with pytest.raises(ValueError):
        read_pickle(hostile)
    before = argparse.Namespace.__init__
    for data in (hostile, b"cos\nsystem\n(dS'x'\nI1\nsb."):
        with pytest.raises(ValueError):
            read_pickle(data)
    assert argparse.Namespace.__init__ is before and not hasattr(os.system, "x")


@pytest.mark.parametrize(
    "data",
    [b"", b"no pickle", pickle.dumps(1)[:-1], b"]\x94h\x00a."],
    ids=["empty", "text", "cut", "cyclic"],
)
def test_damage_is_one_kind_of_error(data: bytes) -> None:
    """ValueError, whatever the unpickler raises."""
    with pytest.raises(ValueError):
        read_pickle(data)


def test_a_record_in_another_format_is_refused(tmp_path: Path) -> None:
    """Torch's old format is a row of pickles; TorchScript is code."""
    old = tmp_path / "old"
    torch.save({"a": 1}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="zip"):
        read_record(old.read_bytes())
    with pytest.raises(ValueError):
        read_record(_saved(torch.ones(4))[:-40])
    with pytest.raises(ValueError, match="numpy array"):
        read_record(_saved(np.array([object], dtype=object)))
