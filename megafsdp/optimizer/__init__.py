"""Optimizers, and what a step needs beside them.

The public names are exported here. The code is in sub-packages: kernels (arithmetic), states, grads
(norms and clipping), adam, muon, and offload.

Read first: adam/fused_adam.py.
"""

from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.grads.clip import clip_grad_norm_
from megafsdp.optimizer.grads.norms import num_zero_grads, param_group_norms
from megafsdp.optimizer.local_parameters import local_parameters
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.optimizer.muon.muon import Muon
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer

# A name here is a promise to users: megafsdp exports it, and tests/test_public.py lists its path.
__all__ = [
    "FusedAdam",
    "HybridDeviceOptimizer",
    "LossScaler",
    "Muon",
    "ScaleRule",
    "clip_grad_norm_",
    "local_parameters",
    "num_zero_grads",
    "param_group_norms",
]
