"""Build a torch optimizer from the configuration, over parameters of any sharding."""

from __future__ import annotations

import torch
from torch import nn

from megafsdp.training.config import OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Return an optimizer over a model's trainable parameters; call it after sharding.

    Parameters of one dimension (norms, biases) form a group without weight decay, unless the
    section says otherwise.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim > 1 or section.decay_vectors]
    vectors = [p for p in trainable if not (p.ndim > 1 or section.decay_vectors)]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, section.weight_decay), (vectors, 0.0))
        if params
    ]
    flags = {
        "fused": section.implementation == "fused",
        "foreach": section.implementation == "foreach",
    }
    if section.kind == "adamw":
        return torch.optim.AdamW(
            groups, lr=section.lr, betas=section.betas, eps=section.eps, **flags
        )
    return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, **flags)


def apply_hyperparameters(optimizer: torch.optim.Optimizer, section: OptimizerSection) -> None:
    """Write the configured hyperparameters into the groups, over those that a checkpoint brought.

    The learning rate is not among them: its schedule sets it at every step.
    """
    for group in optimizer.param_groups:
        is_decayed = any(p.ndim > 1 or section.decay_vectors for p in group["params"])
        group["weight_decay"] = section.weight_decay if is_decayed else 0.0
        if section.kind == "adamw":
            group["betas"], group["eps"] = tuple(section.betas), section.eps
        else:
            group["momentum"] = section.momentum
