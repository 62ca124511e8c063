"""Quantized parameters of torch's FSDP2 or of a plain model, and their fp32 main weights.

Codes are too coarse to be stepped: an update far below the distance of two codes would be lost. So
the state ``main_param`` is an fp32 weight like the parameter, in the memory that ``quantize_``
kept. A step changes it like any fp32 weight, and then makes all codes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megafsdp.buffer.dtensor.uneven import local_object, local_tensor, wrap_like
from megafsdp.errors import expected
from megafsdp.fsdp.runtime.torch_fsdp import (
    adopt_loaded_codes,
    encode_main_weights,
    require_main_weight,
    shard_of,
)

MAIN_WEIGHT = "main_param"


def main_weight_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the fp32 weight of a quantized parameter, a tensor like it; aliases. Else None.

    If only codes were loaded, the weight has their values.
    """
    shard = shard_of(parameter)
    if shard is None:
        return None
    adopt_loaded_codes([shard])
    return wrap_like(parameter, require_main_weight(shard).values)


def prepare_main_weight(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Show the main weight of a quantized parameter among its states, or adopt a loaded one; local.

    Raises:
        ValueError: The main weight in ``state`` does not have the parameter's local shape.
    """
    shard, current = shard_of(parameter), state.get(MAIN_WEIGHT)
    if shard is None:
        return
    main = require_main_weight(shard)
    if current is None:
        state[MAIN_WEIGHT] = main_weight_of(parameter)
        return
    own = local_object(current)
    if own is main.values or main.was(own):
        adopt_loaded_codes([shard])
        # In most steps it is shown already; to wrap it again would take as long as a small update.
        if own is not main.values:
            state[MAIN_WEIGHT] = wrap_like(parameter, main.values)
        return
    # A load has replaced the main weight.
    if own.shape != main.values.shape:
        raise ValueError(
            expected(
                f"a main weight of shape {tuple(main.values.shape)} on this rank",
                tuple(own.shape),
                where=f"state '{MAIN_WEIGHT}' of parameter '{shard.fqn}'",
                hint="Load states of the same mesh, or by torch.distributed.checkpoint",
            )
        )
    values = local_tensor(current).to(torch.float32).contiguous()
    main.replace(values)
    state[MAIN_WEIGHT] = wrap_like(parameter, values)


def update_main_weight(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Give a shown main weight the values of codes that were loaded since; local.

    Otherwise a copy of the states would undo that load. The main weight of a copied parameter is
    left as it is.
    """
    shard = shard_of(parameter)
    if MAIN_WEIGHT in state and shard is not None and shard.main is not None:
        prepare_main_weight(parameter, state)


def encode_quantized(parameters: Iterable[torch.Tensor]) -> None:
    """Make the codes of all stepped quantized parameters; at most one all-reduce.

    Collective over the ranks that have rows of them, in the same order.
    """
    shards = [shard for parameter in parameters if (shard := shard_of(parameter)) is not None]
    if shards:
        encode_main_weights(shards, is_step=True)
