"""Megatron-style fully sharded data parallelism for PyTorch."""

from megafsdp import checkpoint
from megafsdp.buffer.dtensor.uneven import full_tensor
from megafsdp.fsdp.forward_method import register_fsdp_forward_method
from megafsdp.fsdp.fsdp_module import FSDPModule
from megafsdp.fsdp.full_params import (
    full_state_dict,
    load_full_state_dict,
    summon_full_params,
)
from megafsdp.fsdp.fully_shard import fully_shard, fully_shard_model, microbatch
from megafsdp.fsdp.handles import GradientReductionHandle, UnshardHandle
from megafsdp.fsdp.materialize import materialize
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, OffloadPolicy
from megafsdp.fsdp.quantized_model import quantize_, requantize_
from megafsdp.fsdp.weight_sync import fully_shard_optimizer, mark_main_weights_changed
from megafsdp.mesh.annotation import ExpertRange, annotate
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.grads.clip import clip_grad_norm_
from megafsdp.optimizer.grads.norms import num_zero_grads, param_group_norms
from megafsdp.optimizer.local_parameters import local_parameters
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.optimizer.muon.muon import Muon
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer

__version__ = "0.2.0"

__all__ = [
    "ExpertRange",
    "FSDPModule",
    "FusedAdam",
    "FusedParts",
    "GradientReductionHandle",
    "HybridDeviceOptimizer",
    "LossScaler",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "ParallelDims",
    "ScaleRule",
    "UnshardHandle",
    "annotate",
    "checkpoint",
    "clip_grad_norm_",
    "full_state_dict",
    "full_tensor",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "load_full_state_dict",
    "local_parameters",
    "mark_main_weights_changed",
    "materialize",
    "microbatch",
    "num_zero_grads",
    "param_group_norms",
    "quantize_",
    "register_fsdp_forward_method",
    "requantize_",
    "summon_full_params",
]
