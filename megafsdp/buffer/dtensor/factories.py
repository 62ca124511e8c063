"""Tensors made by a sharded one: ``new_empty``, ``new_zeros``, ``new_ones`` and ``new_full``.

One of the tensor's own global shape is cut as the tensor is; staging and ``deepcopy`` make such.
One of another shape is on every rank, a replicated DTensor on the tensor's mesh, as torch makes it;
initialisers that draw the parts of a fused parameter one by one make such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megafsdp.mesh.torch_private import DTensorSpec, TensorMeta, local_of, make_dtensor, spec_of

FACTORIES = frozenset({"new_empty", "new_zeros", "new_ones", "new_full"})


def new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run one of :data:`FACTORIES` on a sharded tensor; local."""
    source: Any = args[0]
    shape, args, kwargs = _sizes_of(args, kwargs)
    local, spec = local_of(source), spec_of(source)
    if shape == tuple(source.shape):
        rows = func(local, tuple(local.shape), *args, **kwargs)
        return type(source).wrap(rows, spec, source._uneven_layout)
    return make_replicated(func(local, shape, *args, **kwargs), spec.mesh)


def make_replicated(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a tensor that is equal on all ranks as a replicated DTensor; aliases, local."""
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return make_dtensor(DTensor, local, spec)


def _sizes_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the wanted shape, and the arguments after it."""
    if "size" in kwargs:
        others = {key: value for key, value in kwargs.items() if key != "size"}
        return tuple(kwargs["size"]), args[1:], others
    # Methods also take sizes one by one: new_empty(3, 4).
    if isinstance(args[1], int):
        return args[1:], (), kwargs
    return tuple(args[1]), args[2:], kwargs
