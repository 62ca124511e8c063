"""Plain values: what a checkpoint stores beside tensors, loadable without any class of ours.

They are the values that ``torch.load(weights_only=True)`` accepts. All others are refused here,
before they are stored, by an error that names their place.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from megafsdp.errors import CheckpointError

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# torch.load(weights_only=True) lacks the pickle opcode for integers above 255 bytes.
_MAX_BITS = 255 * 8 - 1


def whole_number(value: object, least: int) -> int | None:
    """Return an integer of any type, such as numpy's, as an ``int``; None if below ``least``.

    Other types, such as ``True``, would print differently in a file name.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if number >= least else None


def plain(where: str, value: object) -> object:
    """Copy a structure of plain values so that it loads with ``weights_only=True``.

    Tensors are detached and copied to the CPU, numpy scalars become Python scalars, and named
    tuples become plain tuples.

    Args:
        where: Key of the value, for the message.
        value: Numbers, strings, bytes, None, dtypes, devices, plain tensors; lists, tuples and
            dicts of them.

    Raises:
        CheckpointError: There is something else inside, such as a DTensor: a rank has only a part
            of it.
    """
    if isinstance(value, DTensor):
        problem = f"a DTensor of shape {tuple(value.shape)}"
    elif isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    elif isinstance(value, np.generic) and _is_python_scalar(value):
        return value.item()
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        problem = f"an integer of {value.bit_length()} bits"
    elif type(value) in _PLAIN_TYPES:
        return value
    elif isinstance(value, dict) and type(value) in (dict, OrderedDict, Counter):
        items = {plain(where, k): plain(f"{where}.{k}", v) for k, v in value.items()}
        return type(value)(items)
    elif isinstance(value, list | tuple):
        copies = [plain(f"{where}.{i}", v) for i, v in enumerate(value)]
        return copies if isinstance(value, list) else tuple(copies)
    else:
        problem = f"a {type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError.expected(
        "plain values (numbers, strings, plain tensors, lists, tuples, dicts)",
        problem,
        where=f"'{where}'",
        hint="Store its plain content instead; a sharded tensor as its full_tensor()",
    )


def _is_python_scalar(value: np.generic) -> bool:
    """Return whether a scalar has a plain form; dates do not, as some become mere integers."""
    return value.dtype.kind not in "mM" and type(value.item()) in _PLAIN_TYPES
