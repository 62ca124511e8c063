"""Checks of Muon's inputs: the options of parameter groups, and their parameters.

Gradients are checked as FusedAdam's are, state dicts in states/loading.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.muon.matrices import SPLITS, is_for_muon
from megafsdp.optimizer.muon.newton_schulz import LR_RULES

# Dtypes in which torch multiplies matrices on any device; None chooses by device.
_NS_DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_rounds(ns_dtype: torch.dtype | None, bucket_numel: int) -> None:
    """Check the options of the exchange, which are the same for all groups.

    Raises:
        ValueError: An option is out of range.
    """
    limits: dict[str, tuple[object, bool, str]] = {
        "ns_dtype": (ns_dtype, ns_dtype in _NS_DTYPES, f"one of {_NS_DTYPES}"),
        "bucket_numel": (bucket_numel, bucket_numel >= 1, "a number of at least 1"),
    }
    _require(limits, "Muon")


def check_group(group: dict[str, Any], index: int) -> None:
    """Check the options and parameters of a parameter group that is added.

    Raises:
        ValueError: An option is out of range, or Muon cannot step a parameter.
        NotImplementedError: A parameter is a DTensor that megafsdp did not cut.
    """
    check_options(group, index)
    for parameter in group["params"]:
        _check_parameter(parameter, group, index)


def check_options(group: dict[str, Any], index: int, *, is_new: bool = True) -> None:
    """Check the options of a parameter group.

    Args:
        group: The group.
        index: Its number.
        is_new: False in a step: then a rate on a device is not read, and a rate may be negative, as
            schedulers that end at 0 may end slightly below it by rounding.

    Raises:
        ValueError: An option is out of range.
    """
    lr = group["lr"]
    is_late = isinstance(lr, torch.Tensor) and lr.device.type != "cpu" and not is_new
    lr = 0.0 if is_late else float(lr)
    betas, coefficients, num_steps = (group[n] for n in ("betas", "ns_coefficients", "ns_steps"))
    are_betas = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    are_finite = len(coefficients) == 3 and all(map(math.isfinite, coefficients))
    # Written so that NaN, which compares false, is refused.
    limits: dict[str, tuple[object, bool, str]] = {
        "lr": (lr, math.isfinite(lr) and (lr >= 0 or not is_new), "a finite number of at least 0"),
        "momentum": (group["momentum"], 0 <= group["momentum"] < 1, "a number in [0, 1)"),
        "betas": (betas, are_betas, "two numbers in [0, 1)"),
        "ns_coefficients": (coefficients, are_finite, "three finite numbers"),
        "ns_steps": (
            num_steps,
            isinstance(num_steps, int) and num_steps >= 1,
            "a whole number of at least 1",
        ),
    }
    for name in ("weight_decay", "eps", "adamw_eps"):
        is_sound = 0 <= group[name] < math.inf
        limits[name] = (group[name], is_sound, "a finite number of at least 0")
    for name, choices in (("adjust_lr_fn", LR_RULES), ("split_fused", SPLITS)):
        limits[name] = (group[name], group[name] in choices, f"one of {choices}")
    _require(limits, f"param group {index} of Muon")


def _require(limits: dict[str, tuple[object, bool, str]], where: str) -> None:
    """Raise for the first unsound option.

    Args:
        limits: Value, whether it is sound, and what would be, by name.
        where: Owner of the options, for the message.

    Raises:
        ValueError: An option is not sound.
    """
    for name, (value, is_sound, what) in limits.items():
        if not is_sound:
            raise ValueError(
                expected(
                    what,
                    value,
                    where=f"{name} of {where}",
                    hint="Leave out what you do not want to change",
                )
            )


def _check_parameter(parameter: torch.Tensor, group: dict[str, Any], index: int) -> None:
    where = f"a parameter of shape {tuple(parameter.shape)} in param group {index} of Muon"
    if is_for_muon(parameter, group) and parameter.ndim > 3:
        raise ValueError(
            expected(
                "matrices or stacks of matrices",
                f"{parameter.ndim} dimensions",
                where=where,
                hint="Put it into a group with use_muon=False",
            )
        )
    # The parameters of a group are DTensors: a plain tensor with a group is a local parameter.
    is_local = not isinstance(parameter, DTensor) and group_of(parameter) is not None
    if group["use_muon"] and is_local:
        raise ValueError(
            expected(
                "parameters in their own shapes",
                "one of local_parameters(), in which no matrix is to be found",
                where=where,
                hint="Give Muon model.parameters(), or put it into a group with use_muon=False",
            )
        )
    # Other DTensors are not cut along rows of a flat buffer.
    is_ours = not isinstance(parameter, DTensor) or all(
        placement.is_replicate() for placement in parameter.placements
    )
    if not (is_ours or isinstance(parameter, UnevenDTensor)):
        raise NotImplementedError(
            expected(
                "parameters that are whole, or divided by fully_shard()",
                "another DTensor",
                where=where,
                hint="Give it to another optimizer",
            )
        )
