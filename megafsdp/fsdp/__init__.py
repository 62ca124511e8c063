"""Units: what is gathered, computed, reduced, and when.

Read first: fully_shard.py, then params and runtime.
"""

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
from megafsdp.fsdp.weight_sync import fully_shard_optimizer, mark_main_weights_changed

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "full_state_dict",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "load_full_state_dict",
    "mark_main_weights_changed",
    "materialize",
    "microbatch",
    "register_fsdp_forward_method",
    "summon_full_params",
]
