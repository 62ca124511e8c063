"""The sections of a configuration that say how the model is run, not what is trained.

How ranks share it, in which dtypes it computes, and what backward recomputes. Checks across values
are in ``megafsdp.training.config.validate``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models.activation_checkpointing import ActivationCheckpointing, CheckpointingMode

# jsonargparse reads the instances' __dict__, so these classes have no slots.


@dataclass(frozen=True)
class ParallelSection:
    """How ranks share the model.

    Attributes:
        dp_outer: Replicas of the sharded group.
        dp_shard: Ranks that divide parameters; -1 takes what is left.
        cp: Context parallel degree.
        tp: Tensor parallel degree.
        ep: Expert parallel degree.
        strategy: What is divided: nothing, optimizer states, and gradients, and parameters.
        outer_strategy: What is divided over dp_outer: nothing (HSDP), or optimizer states (HFSDP),
            which needs dp_outer above 1 and strategy optim_grads_params.
        prefetch: Units gathered ahead of the running one.
        reshard_after_forward: Free gathered parameters between forward and backward; null frees all
            but those needed again at once; a divisor of dp_shard keeps them divided among that
            many neighbours.
        offload_parameters: Keep main weights, gradients and optimizer states on the host and step
            there; unlike optimizer.offload_fraction for any optimizer, and without overlap.
    """

    dp_outer: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads_params"
    )
    outer_strategy: Literal["no_shard", "optim"] = "no_shard"
    prefetch: int = 1
    reshard_after_forward: bool | int | None = None
    offload_parameters: bool = False

    def dims(self) -> ParallelDims:
        """Return the degrees.

        Raises:
            ValueError: A degree is out of its range.
            NotImplementedError: A degree is reserved.
        """
        return ParallelDims(self.dp_outer, self.dp_shard, self.cp, self.tp, self.ep)


Precision = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecisionSection:
    """Dtypes.

    Attributes:
        param_dtype: Compute weights and activations; fp16 scales the loss (section loss_scale).
        reduce_dtype: The sum of gradients over ranks.
        main_params_dtype: Main weights, which the optimizer steps on, and its states.
        main_grads_dtype: Gradients that the optimizer sees; null for main_params_dtype, which
            torch's adamw and adam, and its fused sgd need.
        keep_fp32: What computes in fp32: names of parameters, of modules or of their classes, or
            patterns (``fnmatch``), each of which must match something.
    """

    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_dtype: Precision = "fp32"
    main_params_dtype: Precision = "fp32"
    main_grads_dtype: Precision | None = None
    keep_fp32: list[str] = field(default_factory=list)

    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes as sharding takes them."""
        return MixedPrecisionPolicy(
            param_dtype=_DTYPES[self.param_dtype],
            reduce_dtype=_DTYPES[self.reduce_dtype],
            main_params_dtype=_DTYPES[self.main_params_dtype],
            main_grads_dtype=_DTYPES[self.main_grads_dtype or self.main_params_dtype],
            keep_fp32=tuple(self.keep_fp32),
        )


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """What backward recomputes instead of keeping it; losses stay the same in every bit.

    Attributes:
        mode: none keeps all activations, full the input of a layer only, selective the outputs of
            matrix products and attention too.
        every: Checkpoint layers 0, every, 2 * every and so on.
        use_reentrant: torch's older implementation, for full only.
    """

    mode: CheckpointingMode = "none"
    every: int = 1
    use_reentrant: bool = False

    def resolve(self) -> ActivationCheckpointing:
        """Return what the model is given.

        Raises:
            ConfigError: A value is out of its range, or values contradict each other.
        """
        return ActivationCheckpointing(self.mode, self.every, self.use_reentrant)
