"""Checks of FusedAdam's inputs: hyperparameters, parameters, gradients and states.

Each raises an error that says what was expected; nothing is changed or repaired here. Muon uses
:func:`check_grad` too. State dicts are checked in states/loading.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.op_rules import is_even_chunk
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.states.formats import is_scaled
from megafsdp.optimizer.states.loading import FOREIGN_OPTIONS
from megafsdp.optimizer.states.store import STATES


def check_hyperparameters(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float | None,
) -> None:
    """Check the numbers that FusedAdam is built with.

    Raises:
        ValueError: A number is out of range.
    """
    # Written so that NaN, which compares false, is refused.
    limits = {
        "lr": (lr, lr >= 0, "of 0 or more"),
        "betas[0]": (betas[0], 0 <= betas[0] < 1, "of at least 0 and below 1"),
        "betas[1]": (betas[1], 0 <= betas[1] < 1, "of at least 0 and below 1"),
        "eps": (eps, eps >= 0, "of 0 or more"),
        "weight_decay": (weight_decay, weight_decay >= 0, "of 0 or more"),
        "max_grad_norm": (max_grad_norm, max_grad_norm is None or max_grad_norm > 0, "above 0"),
    }
    for name, (value, is_sound, what) in limits.items():
        if not is_sound:
            raise ValueError(
                expected(f"a number {what}", value, where=f"{name} of FusedAdam", hint="Change it")
            )


def check_group(group: Mapping[str, Any], *, adam_w_mode: bool) -> None:
    """Check the options and parameters of a parameter group, named as in torch's Adam and AdamW.

    Raises:
        ValueError: A number is out of range; a trainable parameter is wider than fp32, the
            precision of all steps; or an option is not supported.
    """
    numbers = {name: group[name] for name in ("betas", "eps", "weight_decay")}
    check_hyperparameters(float(group["lr"]), **numbers, max_grad_norm=None)
    # Groups from state dicts of torch have these options; they may be present if switched off.
    neutral = dict.fromkeys(FOREIGN_OPTIONS, False) | {"decoupled_weight_decay": adam_w_mode}
    asked = {
        name: group[name] for name, value in neutral.items() if group.get(name, value) != value
    }
    if asked:
        raise ValueError(
            expected(
                f"{neutral} or nothing",
                asked,
                where="a parameter group of FusedAdam",
                hint="Leave it out, set adam_w_mode for all groups, or use torch.optim.AdamW",
            )
        )
    for number, parameter in enumerate(group["params"]):
        # A frozen parameter may be of any dtype: it is never stepped.
        is_wide = parameter.dtype == torch.float64 or parameter.dtype.is_complex
        if is_wide and parameter.requires_grad:
            raise ValueError(
                expected(
                    "parameters in fp32 or narrower, in which steps are made",
                    f"{_described(parameter, _name_in(group, number))} in {parameter.dtype}",
                    where="FusedAdam",
                    hint="Cast the model, or use torch.optim.AdamW",
                )
            )


def check_loaded_decay(groups: Iterable[Mapping[str, Any]], *, adam_w_mode: bool) -> None:
    """Check that the groups of a state dict use the weight decay of the optimizer that loads them.

    Raises:
        ValueError: Their decay was decoupled (AdamW) and the optimizer's is not, or the reverse.
    """
    for group in groups:
        decoupled = group.get("decoupled_weight_decay", adam_w_mode)
        if decoupled != adam_w_mode and group.get("weight_decay"):
            raise ValueError(
                expected(
                    f"groups with decoupled_weight_decay={adam_w_mode}",
                    f"decoupled_weight_decay={decoupled} and a decay of {group['weight_decay']}",
                    where="a state dict that FusedAdam loads",
                    hint=f"Build FusedAdam(adam_w_mode={decoupled}), or change the state dict",
                )
            )


def check_remainders(group: Mapping[str, Any]) -> None:
    """Check that a parameter group's parameters are the high halves of fp32 weights.

    Raises:
        ValueError: A parameter is not bf16.
    """
    # Even fp32 parameters are refused: the flat pass supports only one kind of weight.
    for number, parameter in enumerate(group["params"]):
        if parameter.dtype != torch.bfloat16:
            raise ValueError(
                expected(
                    "bf16 parameters with store_param_remainders=True",
                    f"{_described(parameter, _name_in(group, number))} in {parameter.dtype}",
                    where="FusedAdam",
                    hint="Shard with MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                    "main_params_dtype=torch.bfloat16), or leave the option out: fp32 parameters "
                    "lack nothing",
                )
            )


def check_capturable(dtypes: Iterable[torch.dtype], has_remainders: bool) -> None:
    """Check that a step on these states can be captured.

    Raises:
        ValueError: A moment has scales, or weights have remainders.
    """
    # A capturable pass works on plain values and encodes nothing.
    if has_remainders or any(is_scaled(dtype) for dtype in dtypes):
        raise ValueError(
            expected(
                "moments in fp32 or bf16, and no remainders",
                f"{[str(dtype) for dtype in dtypes]}, remainders: {has_remainders}",
                where="FusedAdam(capturable=True)",
                hint="Leave capturable out, or keep the states in torch.float32 or torch.bfloat16",
            )
        )


def check_grad(parameter: torch.Tensor, grad: torch.Tensor, name: str | None = None) -> None:
    """Check that a gradient is dense, and cut as its parameter is.

    Args:
        parameter: The parameter.
        grad: Its gradient.
        name: The parameter's name, if the optimizer was given one.

    Raises:
        RuntimeError: It is sparse, only one of the two is a DTensor, or it has other rows, as the
            gradient of another parameter has; then on all ranks.
    """
    if grad.is_sparse:
        raise RuntimeError(
            expected(
                "a dense gradient",
                "a sparse one",
                where=_described(parameter, name),
                hint="Build the embedding with sparse=False",
            )
        )
    # The rows may be others even if the local shapes agree.
    is_one_plain = isinstance(parameter, DTensor) != isinstance(grad, DTensor)
    if is_one_plain or not _are_rows_alike(parameter, grad):
        raise RuntimeError(
            expected(
                f"a gradient kept as its parameter, a {type(parameter).__name__}",
                f"a {type(grad).__name__}"
                if is_one_plain
                else "one that is cut between other rows",
                where=_described(parameter, name),
                hint="Assign a tensor made with torch.zeros_like(parameter), filled by copy_()",
            )
        )


def _are_rows_alike(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    if not isinstance(parameter, UnevenDTensor):
        return True
    if not isinstance(grad, UnevenDTensor):
        return is_even_chunk(grad, parameter)
    return parameter.uneven_layout.cuts_as(grad.uneven_layout)


def check_scaled_state(parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
    """Check the values that a state will be set to.

    Raises:
        ValueError: The values are not fp32 or not of the parameter's local shape, or no state has
            this name.
    """
    # Values in another dtype would be rounded twice on the way into a narrow state.
    if values.dtype != torch.float32 or name not in STATES:
        raise ValueError(
            expected(
                f"fp32 values of one of {STATES}",
                f"{values.dtype} for '{name}'",
                where="FusedAdam.set_scaled_state()",
                hint="Cast the values, or set optimizer.state[parameter] directly",
            )
        )
    # Local shapes: the global ones may agree although the sharding differs.
    own, given = local_tensor(parameter).shape, local_tensor(values).shape
    if own != given:
        raise ValueError(
            expected(
                f"values like the parameter, {(*own,)} on this rank",
                (*given,),
                where="FusedAdam.set_scaled_state()",
                hint="Start from get_unscaled_state(), or torch.zeros_like(parameter)",
            )
        )


def _name_in(group: Mapping[str, Any], number: int) -> str | None:
    """Return the parameter's name that the user gave with it, or None."""
    return group["param_names"][number] if "param_names" in group else None


def _described(parameter: torch.Tensor, name: str | None) -> str:
    """Return a parameter's name, if known, and its shape."""
    # Few users give names to the optimizer; a unit always knows them.
    owner = group_of(parameter)
    if name is not None:
        who = f"parameter '{name}'"
    elif owner is not None:
        own = next((p.name for p in owner.parameters if p.sharded is parameter), "")
        who = f"parameter '{own}' of unit '{owner.label}'"
    else:
        who = "a parameter"
    return f"{who} of shape {tuple(parameter.shape)}"
