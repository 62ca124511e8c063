"""What ``.data`` is of a parameter over a flat buffer, from which an assignment would cut it."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor

from megafsdp.errors import expected


def _outside_autograd(parameter: DTensor) -> torch.Tensor:
    return parameter.detach()


def _refuse_other_memory(parameter: DTensor, value: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        expected(
            "in-place changes of a sharded parameter",
            "an assignment to its .data, which would cut it from its flat buffer",
            where=f"a parameter of shape {tuple(parameter.shape)}",
            mend="Use parameter.copy_() under torch.no_grad(), then "
            "megafsdp.mark_main_weights_changed(module)",
        )
    )


FIXED_DATA = property(_outside_autograd, _refuse_other_memory)


class ReplicatedParameter(DTensor):
    """A replicated parameter over a flat buffer; its operations give plain DTensors."""

    data = FIXED_DATA  # type: ignore[assignment]
