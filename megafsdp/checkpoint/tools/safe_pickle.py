"""Read pickles as data: nothing that they name is imported, called or given attributes.

Pickles of other programs may name classes that do not exist here, and functions to be called while
they are read. Here every name becomes a stand-in, made for one read, which records the arguments of
the call. Plain values come back as they are, tensors and numpy arrays are built from their bytes
afterwards, and everything else becomes a ``Foreign``, which can be inspected. Our own records do
not need this: they load with ``weights_only=True``.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PLAIN_BUILTINS = {cls.__name__: cls for cls in (set, frozenset, complex)}
_NUMBER_KINDS = frozenset("biuf")
# A table, as torch's storage classes warn of their deprecation when asked for their dtype.
_DTYPE_BY_STORAGE = {
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    # Then the dtype is stored beside the storage.
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """An object in a pickle that is not a plain value.

    Attributes:
        name: Dotted name of the class or function that the pickle calls.
        arguments: The arguments of that call.
        state: Its attributes or other state; None if there are none.
        is_called: False for a class or function that is only mentioned.
    """

    name: str
    arguments: tuple
    state: object
    is_called: bool

    def attributes(self) -> dict[str, object] | None:
        """Return the attributes of an object whose state is a dict, as most have; else None."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = state[0] | (state[1] if isinstance(state[1], dict) else {})
        return state if isinstance(state, dict) else None

    def describe(self) -> str:
        """Return the object as text."""
        if not self.is_called:
            return f"<{self.name}>"
        attributes = self.attributes() or {}
        shown = [*map(_shown, self.arguments), *(f"{k}={_shown(v)}" for k, v in attributes.items())]
        return f"<{self.name}({', '.join(shown)})>"


def read_pickle(data: bytes) -> object:
    """Read a bare pickle.

    Args:
        data: The pickle.

    Returns:
        Plain values, with ``Foreign`` in place of any other object.

    Raises:
        ValueError: It is no pickle, or refers to data outside itself.
    """
    return _read(data, None)


def read_record(data: bytes) -> object:
    """Read what ``torch.save`` wrote in its zip format, tensors included.

    Args:
        data: All bytes of the file.

    Returns:
        Plain values and CPU tensors, with ``Foreign`` in place of any other object.

    Raises:
        ValueError: It is damaged, or in another format.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError(f"{len(pickles)} pickles in the archive")
            return _read(archive.read(pickles[0]), _Storages(archive, pickles[0]))
    except zipfile.BadZipFile as error:
        raise ValueError(f"no zip archive: {error}") from error


class _StandIn:
    """Replaces whatever a pickle calls; subclassed for each name in each read."""

    name = ""
    arguments: tuple = ()
    state: object = None

    def __new__(cls, *arguments: object, **keywords: object) -> _StandIn:
        made = super().__new__(cls)
        made.arguments = (*arguments, keywords) if keywords else arguments
        return made

    def __init__(self, *arguments: object, **keywords: object) -> None:
        pass

    def __call__(self, *arguments: object) -> _StandIn:
        # The result of a call, such as a bound method, may be called in turn.
        return _named("a result")(self, *arguments)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        self.arguments += (item,)

    add = append

    def extend(self, items: list) -> None:
        self.arguments += tuple(items)

    def __setitem__(self, key: object, value: object) -> None:
        self.arguments += ((key, value),)


def _named(name: str) -> type[_StandIn]:
    return type("_Named", (_StandIn,), {"name": name})


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: _Storages | None) -> None:
        super().__init__(io.BytesIO(data))
        self._storages = storages
        self._stand_ins: dict[str, type] = {}

    def find_class(self, module_name: str, global_name: str, /) -> object:
        # Old protocols use the module names of Python 2.
        module_name = "builtins" if module_name == "__builtin__" else module_name
        if module_name == "builtins" and global_name in _PLAIN_BUILTINS:
            return _PLAIN_BUILTINS[global_name]
        if module_name == "torch":
            found = torch.__dict__.get(global_name)
            if isinstance(found, torch.dtype):
                return found
        name = f"{module_name}.{global_name}"
        if name not in self._stand_ins:
            self._stand_ins[name] = _named(name)
        return self._stand_ins[name]

    def persistent_load(self, pid: object) -> object:
        if self._storages is None:
            raise ValueError(f"a reference to data outside the pickle: {pid!r}")
        return self._storages.get(pid)


@dataclass(frozen=True, slots=True)
class _Storage:
    """The elements behind a pickled tensor."""

    dtype: torch.dtype
    data: bytes


class _Storages:
    """The storages of one archive."""

    def __init__(self, archive: zipfile.ZipFile, pickle_name: str) -> None:
        self._archive = archive
        self._folder = pickle_name.removesuffix("/data.pkl")
        order = f"{self._folder}/byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ValueError("tensors in big-endian byte order")

    def get(self, pid: Any) -> _Storage:
        """Read one storage by its persistent id: a tag, the storage's class, its key."""
        is_storage = isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage"
        if not (is_storage and isinstance(pid[1], type) and issubclass(pid[1], _StandIn)):
            raise ValueError(f"an unknown reference {pid!r}")
        dtype = _DTYPE_BY_STORAGE[pid[1].name.rpartition(".")[2]]
        return _Storage(dtype, self._archive.read(f"{self._folder}/data/{pid[2]}"))


def _read(data: bytes, storages: _Storages | None) -> object:
    try:
        return _resolve(_Unpickler(data, storages).load())
    except RecursionError as error:
        raise ValueError("a structure that contains itself") from error
    # A damaged or hostile pickle can raise anything.
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _resolve(value: Any) -> Any:
    """Turn stand-ins into values, after unpickling, where the pickle can no longer interfere."""
    if isinstance(value, _StandIn):
        make = _MAKERS.get(value.name)
        if make is not None:
            return make(value)
        arguments = tuple(_resolve(v) for v in value.arguments)
        return Foreign(value.name, arguments, _resolve(value.state), is_called=True)
    if isinstance(value, type) and issubclass(value, _StandIn):
        return Foreign(value.name, (), None, is_called=False)
    if isinstance(value, dict):
        return {_resolve(k): _resolve(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_resolve(v) for v in value)
    return value


def _tensor(made: _StandIn) -> torch.Tensor:
    storage, offset, size, stride = made.arguments[:4]
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    named = [value for value in made.arguments[6:] if isinstance(value, torch.dtype)]
    dtype = named[0] if named else storage.dtype
    shape = tuple(_resolve(size))
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    elements = torch.frombuffer(bytearray(storage.data), dtype=dtype)
    return elements.as_strided(shape, tuple(stride), offset).clone()


def _numpy_dtype(value: Any) -> np.dtype:
    name = value.arguments[0] if isinstance(value, _StandIn) and value.arguments else None
    dtype = np.dtype(name) if isinstance(name, str) else np.dtype(object)
    if dtype.kind not in _NUMBER_KINDS:
        raise ValueError(f"a numpy array of {name!r}")
    order = value.state[1] if isinstance(value.state, tuple) else "|"
    return dtype.newbyteorder(">") if order == ">" else dtype


def _array(made: _StandIn) -> np.ndarray:
    state = made.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("a numpy array without contents")
    _, shape, dtype, is_fortran, data = state
    flat = np.frombuffer(_resolve(data), dtype=_numpy_dtype(dtype))
    return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def _scalar(made: _StandIn) -> object:
    dtype, data = made.arguments
    return np.frombuffer(_resolve(data), dtype=_numpy_dtype(dtype))[0].item()


def _encoded(made: _StandIn) -> bytes:
    text, encoding = made.arguments
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _ordered(made: _StandIn) -> dict:
    # The pickle passes the items either to the call, as one list of pairs, or one by one.
    pairs = made.arguments
    if len(pairs) == 1 and isinstance(pairs[0], list):
        pairs = tuple(pairs[0])
    return {_resolve(k): _resolve(v) for k, v in pairs}


_MAKERS: dict[str, Callable[[_StandIn], object]] = {
    "torch.Size": lambda made: tuple(_resolve(made.arguments[0])),
    "torch.device": lambda made: torch.device(*made.arguments),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": lambda made: _resolve(made.arguments[0]),
    "collections.OrderedDict": _ordered,
    "_codecs.encode": _encoded,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}


def _shown(value: object) -> str:
    return value.describe() if isinstance(value, Foreign) else repr(value)
