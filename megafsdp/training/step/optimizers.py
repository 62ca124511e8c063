"""Build the configured optimizer over parameters of any sharding."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn

from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.muon.muon import Muon
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.training.config.optimizer_sections import MuonSection, OptimizerSection

# Key of a parameter group; the schedule's rate is multiplied by its value.
LR_MULTIPLIER = "lr_multiplier"

_MUON = MuonSection()
_NS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_optimizer(
    model: nn.Module, section: OptimizerSection, muon: MuonSection = _MUON
) -> torch.optim.Optimizer:
    """Return an optimizer over a model's trainable parameters; call it after sharding.

    Parameters of one dimension (norms, biases) form a group without weight decay, unless the
    section says otherwise; each factor on the learning rate has groups of its own. FusedAdam clips
    in its step; for other optimizers :mod:`megafsdp.training.step.update` clips before the step.
    """
    groups = parameter_groups(model, section, muon)
    if section.kind == "muon":
        dtype = None if muon.ns_dtype is None else _NS_DTYPES[muon.ns_dtype]
        return Muon(groups, lr=section.lr, ns_dtype=dtype, bucket_numel=muon.bucket_numel)
    if section.offload_fraction:
        return HybridDeviceOptimizer(
            groups,
            lr=section.lr,
            max_grad_norm=section.max_grad_norm,
            offload_fraction=section.offload_fraction,  # type: ignore[arg-type]
            overlap=section.offload_overlap,
            host_threads=section.host_threads,
            speculate=section.speculate,
        )
    if section.is_fused_adam:
        exp_avg_dtype, exp_avg_sq_dtype = section.state_dtypes
        return FusedAdam(
            groups,
            lr=section.lr,
            adam_w_mode=section.kind == "adamw",
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            store_param_remainders=section.store_param_remainders,
            max_grad_norm=section.max_grad_norm,
        )
    flags = {"fused": section.form == "fused", "foreach": section.form == "foreach"}
    if section.kind == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, **flags)
    kind = torch.optim.AdamW if section.kind == "adamw" else torch.optim.Adam
    return kind(groups, lr=section.lr, betas=section.betas, eps=section.eps, **flags)


def parameter_groups(
    model: nn.Module, section: OptimizerSection, muon: MuonSection = _MUON
) -> list[dict[str, Any]]:
    """Divide trainable parameters by their hyperparameters; local.

    Returns:
        Groups for an optimizer with all configured values but the learning rate, which its
        schedule sets. The same model and configuration give the same groups in the same order.
    """
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_decayed = parameter.ndim > 1 or section.decay_vectors
        options: dict[str, Any] = {
            "weight_decay": section.weight_decay if is_decayed else 0.0,
            LR_MULTIPLIER: lr_multiplier(name, section),
        }
        if section.kind == "muon":
            options["use_muon"] = is_for_muon(name, parameter.ndim, muon)
        group = groups.setdefault(tuple(options.values()), {"params": [], **options})
        group["params"].append(parameter)
    # Decayed parameters stand first, whatever the model begins with.
    ordered = sorted(groups.values(), key=lambda group: not group["weight_decay"])
    return [{**group, **_common_options(section, muon)} for group in ordered]


def _common_options(section: OptimizerSection, muon: MuonSection) -> dict[str, Any]:
    if section.kind == "sgd":
        return {"momentum": section.momentum}
    betas = (float(section.betas[0]), float(section.betas[1]))
    if section.kind != "muon":
        # torch's Adam reads this from the group, where a checkpoint of AdamW would change it.
        is_decoupled = section.kind == "adamw"
        return {"betas": betas, "eps": section.eps, "decoupled_weight_decay": is_decoupled}
    return {
        "betas": betas,
        "adamw_eps": section.eps,
        "momentum": muon.momentum,
        "nesterov": muon.nesterov,
        "ns_steps": muon.ns_steps,
        "eps": muon.eps,
        "adjust_lr_fn": muon.adjust_lr,
        "split_fused": muon.split_fused,
    }


def is_for_muon(name: str, ndim: int, muon: MuonSection) -> bool:
    """Return whether Muon, not its AdamW, steps a parameter."""
    return ndim > 1 and _first_match(name, muon.adamw) is None


def lr_multiplier(name: str, section: OptimizerSection) -> float:
    """Return the factor on a parameter's learning rate; 1 where no pattern matches its name."""
    pattern = _first_match(name, section.lr_multipliers)
    return 1.0 if pattern is None else float(section.lr_multipliers[pattern])


def _first_match(name: str, patterns: list[str] | dict[str, float]) -> str | None:
    return next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)


def apply_hyperparameters(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    section: OptimizerSection,
    muon: MuonSection = _MUON,
) -> None:
    """Write the configured hyperparameters into the groups, over those of a loaded checkpoint.

    The learning rate is not among them: its schedule sets it at every step.
    """
    fresh = parameter_groups(model, section, muon)
    for group, configured in zip(optimizer.param_groups, fresh, strict=True):
        group.update({key: value for key, value in configured.items() if key != "params"})
