"""Frozen choices of how a unit is sharded, in which dtypes it computes, and what is offloaded.

Values alone; :mod:`megafsdp.fsdp.fully_shard` makes them from what users give.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from megafsdp.errors import expected


class Strategy(Enum):
    """What is divided over the ``dp_shard`` axis."""

    # DDP, ZeRO-0: nothing; gradients are all-reduced.
    NO_SHARD = "no_shard"
    # ZeRO-1: main weights and optimizer states.
    OPTIM = "optim"
    # ZeRO-2: main gradients too.
    OPTIM_GRADS = "optim_grads"
    # ZeRO-3: compute weights too.
    OPTIM_GRADS_PARAMS = "optim_grads_params"

    @property
    def has_persistent_compute_weight(self) -> bool:
        """Return whether compute weights stay in full between uses."""
        return self is not Strategy.OPTIM_GRADS_PARAMS

    @property
    def defers_reduction(self) -> bool:
        """Return whether gradients wait in full for the last microbatch."""
        return self in (Strategy.NO_SHARD, Strategy.OPTIM)


class Average(Enum):
    """How gradients of the data-parallel ranks are combined."""

    # Mean of the ranks' gradients of their mean losses.
    RANK = "rank"
    # Sum: the loss is already divided by the global number of tokens.
    TOKEN = "token"


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit.

    Attributes:
        param_dtype: Compute weights and forward inputs; None keeps each parameter's own dtype.
        reduce_dtype: The sum of gradients over ranks; None means ``main_grads_dtype`` (torch means
            the parameters' dtype). Where the sum is made by us (gloo), gradients travel in their
            own dtype and are summed in this dtype or wider; elsewhere they travel in this one.
        output_dtype: Floating-point outputs of the unit are cast to it; None leaves them.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
        main_params_dtype: Main weights, which the optimizer sees; fp64 parameters keep fp64.
        main_grads_dtype: Main gradients; None means ``main_params_dtype``.
        keep_fp32: Parameters whose compute weights stay fp32: their names, those of modules above
            them, patterns (``fnmatch``) of either, or the class names of the modules that own
            them. ``fully_shard_model`` takes names in the model and in its units, and refuses one
            that matches nothing; ``fully_shard`` takes names in the module it is called on, and a
            unit that has no such name is unchanged. Their modules get inputs in ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype | None = None
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that every dtype is a floating-point one of at least 16 bits.

        Raises:
            ValueError: One is not.
        """
        # 8-bit dtypes need scales, which a cast has not.
        for name in ("param_dtype", "reduce_dtype", "main_params_dtype", "main_grads_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
                raise ValueError(
                    expected(
                        "a floating-point dtype of at least 16 bits",
                        dtype,
                        where=f"MixedPrecisionPolicy.{name}",
                        hint="Use torch.float32 or torch.bfloat16",
                    )
                )

    def compute_dtype(self, original: torch.dtype, *, computes_in_fp32: bool) -> torch.dtype:
        """Return the dtype of the compute weight of a parameter of dtype ``original``."""
        if computes_in_fp32:
            return torch.float32
        return self.param_dtype or original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the main weight of a parameter of dtype ``original``."""
        # Fewer bits than the user's own would lose digits with the first copy.
        return torch.float64 if original == torch.float64 else self.main_params_dtype

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the main gradient of a parameter of dtype ``original``."""
        return self.main_grads_dtype or self.main_dtype(original)


@dataclass(frozen=True)
class OffloadPolicy:
    """What lives on the host.

    Attributes:
        params: Keep sharded parameters, hence the states of any optimizer, and their gradients on
            the host. Compute weights are cast there and copied to the device at each gather;
            gradients are copied back when they are reduced.
        pin_memory: Pin that memory, so that CUDA copies from and to it beside its kernels. Without
            CUDA nothing is pinned.
    """

    params: bool = False
    pin_memory: bool = True
