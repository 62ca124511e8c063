"""Torch 2.11 as an uneven DTensor meets it, on a later torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._pytree import tree_map

from megafsdp.buffer.dtensor import op_rules as local_ops
from megafsdp.buffer.dtensor import uneven
from megafsdp.buffer.dtensor.function_rules import rule_function
from megafsdp.buffer.dtensor.op_rules import RowShardedDTensor


def _dispatch_of_torch_2_11(
    cls: type, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
) -> Any:
    """Do what torch 2.11 does with a subclass: take it for the DTensor it says it is."""
    plain_args, plain_kwargs = tree_map(local_ops.as_plain_dtensor, (args, kwargs or {}))
    return func(*plain_args, **plain_kwargs)


@contextmanager
def torch_2_11() -> Iterator[None]:
    """Let the function path rule and bypass the dispatch path, as on torch 2.11."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (local_ops, uneven):
            patch.setattr(module, "IS_DISPATCH_BYPASSED", True)
        patch.setattr(RowShardedDTensor, "__torch_function__", classmethod(rule_function))
        patch.setattr(RowShardedDTensor, "__torch_dispatch__", classmethod(_dispatch_of_torch_2_11))
        yield
