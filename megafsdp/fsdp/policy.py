"""Frozen choices of how a unit is sharded, in which dtypes it computes, and what is offloaded.

torch's own ``MixedPrecisionPolicy`` and ``CPUOffloadPolicy`` are accepted wherever ours are. This
file holds values and their checks; nothing here touches a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from megafsdp.errors import expected


class Strategy(Enum):
    """What is divided over the ``dp_shard`` axis."""

    NO_SHARD = "no_shard"  # Nothing; gradients are all-reduced (DDP, ZeRO-0).
    OPTIM = "optim"  # Main weights and optimizer states (ZeRO-1).
    OPTIM_GRADS = "optim_grads"  # And main gradients (ZeRO-2).
    OPTIM_GRADS_PARAMS = "optim_grads_params"  # And compute weights (ZeRO-3).


class Average(Enum):
    """How gradients of the data-parallel ranks are combined."""

    RANK = "rank"  # Mean of the ranks' gradients of their mean losses.
    TOKEN = "token"  # Sum: the loss is already divided by the global number of tokens.


_BUILT = (Strategy.NO_SHARD, Strategy.OPTIM_GRADS_PARAMS)
_STAGES = tuple(Strategy)


def strategy_of(value: str | int) -> Strategy:
    """Return the strategy of a Megatron name or a ZeRO stage 0 to 3.

    Raises:
        ValueError: The name is unknown.
        NotImplementedError: The strategy is known and not built.
    """
    names = {s.value: s for s in Strategy} | dict(enumerate(_STAGES))
    if value not in names:
        raise ValueError(
            expected(
                f"one of {[s.value for s in Strategy]} or a ZeRO stage 0 to 3",
                repr(value),
                where="the strategy of fully_shard()",
                mend="Use 'optim_grads_params' for ZeRO-3",
            )
        )
    strategy = names[value]
    if strategy not in _BUILT:
        raise NotImplementedError(
            expected(
                f"one of {[s.value for s in _BUILT]}",
                repr(value),
                where="the strategy of fully_shard()",
                mend="Use 'optim_grads_params', which needs less memory",
            )
        )
    return strategy


def average_of(value: str) -> Average:
    """Return the averaging rule of a name.

    Raises:
        ValueError: The name is unknown.
    """
    try:
        return Average(value)
    except ValueError:
        raise ValueError(
            expected(
                "'rank' or 'token'",
                repr(value),
                where="the average of fully_shard()",
                mend="Use 'rank' when each rank's loss is a mean, 'token' when it is a share of "
                "the sum over all tokens",
            )
        ) from None


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit.

    Attributes:
        param_dtype: Compute weights and forward inputs; None keeps each parameter's own dtype.
        reduce_dtype: The sum of gradients over ranks; None means ``main_grads_dtype`` (torch means
            the parameters' dtype). Where the sum is made by us (gloo), gradients travel in their
            own dtype and are summed in this dtype or wider.
        output_dtype: Floating-point outputs of the unit are cast to it; None leaves them.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
        main_params_dtype: Main weights, which the optimizer sees; fp64 parameters keep fp64.
        main_grads_dtype: Main gradients; None means ``main_params_dtype``.
        keep_fp32: FQNs of parameters or modules, or module class names, whose compute weights stay
            fp32.
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
        for name in ("param_dtype", "reduce_dtype", "main_params_dtype", "main_grads_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
                raise ValueError(
                    expected(
                        "a floating-point dtype of at least 16 bits",
                        dtype,
                        where=f"MixedPrecisionPolicy.{name}",
                        mend="Use torch.float32 or torch.bfloat16",
                    )
                )

    def compute_dtype(self, original: torch.dtype, *, is_kept_fp32: bool) -> torch.dtype:
        """Return the dtype of the compute weight of a parameter of dtype ``original``."""
        if is_kept_fp32:
            return torch.float32
        return self.param_dtype or original

    def main_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the main weight of a parameter of dtype ``original``."""
        return torch.float64 if original == torch.float64 else self.main_params_dtype

    def grad_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the main gradient of a parameter of dtype ``original``."""
        return self.main_grads_dtype or self.main_dtype(original)


@dataclass(frozen=True)
class OffloadPolicy:
    """What lives on the host.

    Attributes:
        params: Keep compute weight shards on the host and gather from there.
    """

    params: bool = False


def mixed_precision_of(
    policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy,
) -> MixedPrecisionPolicy:
    """Return our policy for ours or torch's; torch's unset ``reduce_dtype`` takes our default.

    Raises:
        TypeError: The value is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
        )
    raise TypeError(
        expected(
            "a MixedPrecisionPolicy of megafsdp or of torch",
            type(policy).__name__,
            where="mp_policy of fully_shard()",
            mend="Build megafsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        )
    )


def offload_of(policy: OffloadPolicy | TorchOffloadPolicy) -> OffloadPolicy:
    """Return our policy for ours or torch's.

    Raises:
        TypeError: The value is neither.
        NotImplementedError: The policy asks for offloaded parameters.
    """
    if isinstance(policy, TorchOffloadPolicy):
        policy = OffloadPolicy(params=isinstance(policy, TorchCPUOffloadPolicy))
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            expected(
                "an OffloadPolicy of megafsdp or of torch",
                type(policy).__name__,
                where="offload_policy of fully_shard()",
                mend="Build megafsdp.OffloadPolicy()",
            )
        )
    if policy.params:
        raise NotImplementedError(
            expected(
                "OffloadPolicy(params=False)",
                "params=True",
                where="offload_policy of fully_shard()",
                mend="Leave the parameters on the device",
            )
        )
    return policy
