"""Cut tensors that torch has cut by ``torch.chunk`` as a sharded parameter is cut.

``distribute_tensor(full, parameter.device_mesh, parameter.placements)`` makes such tensors, and so
does FSDP2: the placements are equal, the rows are not. They may be loaded wherever a tensor is
given for a parameter or for a state of an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.op_rules import is_cut_alike, is_even_chunk
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, wrap_like
from megafsdp.mesh.dtensor import whole_of
from megafsdp.mesh.torch_private import local_of


@torch.no_grad()
def recut(value: DTensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of torch's cuts, cut like a parameter; collective over the value's mesh.

    A parameter that is cut evenly has the rows of the value: the result aliases them then.

    Args:
        value: A DTensor of the parameter's shape, without padding.
        like: A sharded or replicated parameter, whose mesh and layout the result has.
    """
    if not isinstance(like, UnevenDTensor):
        return wrap_like(like, whole_of(value))
    if is_even_chunk(value, like):
        return like.like(local_of(value))
    return like.like(like.uneven_layout.rows_of(whole_of(value)))


def recut_state(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return an optimizer's state of a parameter with what torch has cut cut like the parameter.

    Collective if there is such a value: a DTensor of the parameter's shape, cut in another way.
    """
    return {
        name: recut(value, parameter) if _is_cut_by_torch(value, parameter) else value
        for name, value in state.items()
    }


def _is_cut_by_torch(value: object, like: torch.Tensor) -> TypeGuard[DTensor]:
    if not isinstance(value, DTensor) or value.shape != like.shape or not like.ndim:
        return False
    # Codes of torchao's optimizers have a class of their own, which is no operand of ours.
    is_of_codes = type(local_of(value)) is not torch.Tensor
    return not is_of_codes and not is_cut_alike(value, like)
