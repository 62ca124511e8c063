"""The sections of a configuration for the optimizer, for Muon, and for the loss scale of fp16.

The schedule of the learning rate is in ``megafsdp.training.config.sections``; checks across values
are in ``megafsdp.training.config.validate``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megafsdp.optimizer.loss_scaler import ScaleRule

_DecayRate = Annotated[float, Field(ge=0, lt=1)]
StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]
_STATE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer.

    Attributes:
        kind: adamw, adam (weight decay is added to the gradient), sgd, or muon (matrices by Muon,
            everything else by AdamW; see the section muon).
        lr: Highest learning rate.
        lr_multipliers: Factors on the learning rate by pattern (``fnmatch``) of parameter names;
            the first that matches counts, and each must match some parameter.
        betas: Decay rates of Adam's two moments.
        eps: Added to Adam's denominator.
        momentum: Momentum of SGD.
        weight_decay: Decoupled for adamw and muon, added to the gradient for adam and sgd.
        decay_vectors: Decay parameters of one dimension too (norms, biases).
        implementation: megafsdp steps flat buffers in one pass that unscales and clips too (adamw,
            adam) or divides matrices among ranks (muon); fused, foreach and loop are torch's forms
            of adamw, adam and sgd. Null takes megafsdp, or foreach for sgd. Fused sgd supports
            neither the strategy no_shard nor, on a CPU, bf16 main weights.
        exp_avg_dtype: First moment of adamw and adam by megafsdp. fp16 and fp8 have a scale for
            each block of 128 elements; one-dimensional parameters keep fp32 then.
        exp_avg_sq_dtype: Second moment, likewise.
        store_param_remainders: Keep the 16 bits that bf16 main weights lack of fp32 beside them;
            for adamw and adam by megafsdp, with precision.main_params_dtype bf16.
        clip_norm: Largest norm of all gradients; null does not clip.
        offload_fraction: The part of main weights and moments that lives on the host and is stepped
            there, from 0 to 1, or auto; for adamw by megafsdp with fp32 states and main weights.
        offload_overlap: Whether the host's part is stepped during backward and the next forward.
        host_threads: Threads that step on the host, also for parallel.offload_parameters; null
            takes the rank's share of the machine's cores, or torch's number for a model on a CPU.
        speculate: Whether the host steps before the norm is known, which takes 12 more bytes a
            parameter there; auto does so while few steps are clipped.
    """

    kind: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    lr: PositiveFloat = 3e-4
    lr_multipliers: dict[str, NonNegativeFloat] = field(default_factory=dict)
    betas: tuple[_DecayRate, _DecayRate] = (0.9, 0.95)
    eps: NonNegativeFloat = 1e-8
    momentum: NonNegativeFloat = 0.9
    weight_decay: NonNegativeFloat = 0.1
    decay_vectors: bool = False
    implementation: Literal["megafsdp", "fused", "foreach", "loop"] | None = None
    exp_avg_dtype: StateDtype = "fp32"
    exp_avg_sq_dtype: StateDtype = "fp32"
    store_param_remainders: bool = False
    clip_norm: PositiveFloat | None = 1.0
    offload_fraction: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.0
    offload_overlap: bool = True
    host_threads: PositiveInt | None = None
    speculate: bool | Literal["auto"] = "auto"

    @property
    def form(self) -> str:
        """Return the implementation, null resolved."""
        return self.implementation or ("foreach" if self.kind == "sgd" else "megafsdp")

    @property
    def is_fused_adam(self) -> bool:
        """Return whether FusedAdam takes the steps."""
        return self.kind in ("adamw", "adam") and self.form == "megafsdp"

    @property
    def max_grad_norm(self) -> float:
        """Return clip_norm as an optimizer that clips by itself takes it; infinite for null."""
        return math.inf if self.clip_norm is None else self.clip_norm

    @property
    def state_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of FusedAdam's two moments."""
        return _STATE_DTYPES[self.exp_avg_dtype], _STATE_DTYPES[self.exp_avg_sq_dtype]


@dataclass(frozen=True)
class MuonSection:
    """What only Muon takes; it shares lr, weight_decay, betas and eps with its AdamW.

    Attributes:
        adamw: Patterns (``fnmatch``) of names of matrices that AdamW steps: embeddings, the output
            layer and short convolutions should be among them. AdamW steps vectors anyway.
        momentum: Weight of the old momentum in the average.
        nesterov: Orthogonalise the average of gradient and momentum, not the momentum.
        ns_steps: Newton-Schulz steps.
        ns_dtype: Dtype in which matrices travel and are orthogonalised; null for bf16 on GPUs and
            fp32 on CPU.
        eps: Floor of the norm that a matrix is divided by.
        adjust_lr: How the learning rate follows a matrix's shape. match_rms_adamw gives updates the
            size of AdamW's, so that one learning rate serves both; original is
            ``sqrt(max(1, rows / columns))``.
        split_fused: How a fused parameter (query, key and value; gate and up) is cut into matrices:
            one for each part, one for each part of each group (of heads), or one.
        bucket_numel: Elements of the matrices that a rank orthogonalises in one round.
    """

    adamw: list[str] = field(
        default_factory=lambda: ["*embedding*", "*output_layer*", "*conv1d*", "*gate_weight"]
    )
    momentum: _DecayRate = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    ns_dtype: Literal["fp32", "bf16"] | None = None
    eps: NonNegativeFloat = 1e-7
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    split_fused: Literal["parts", "groups", "none"] = "parts"
    bucket_numel: PositiveInt = 1 << 26


@dataclass(frozen=True)
class LossScaleSection:
    """The loss scale by Megatron-LM's rule; only for precision.param_dtype fp16.

    Steps whose gradients overflow are skipped on all ranks and do not advance the schedule.

    Attributes:
        initial: The first scale.
        minimum: The smallest scale; overflows at this scale count for train.max_skips.
        window: Finite steps in a row before the scale doubles.
        hysteresis: Overflows since the scale last grew before it halves.
        constant: A scale that never moves, instead of all of the above; null for a dynamic one.
    """

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    constant: float | None = None

    def rule(self) -> ScaleRule:
        """Return how the scale moves.

        Raises:
            ValueError: The values cannot work together.
        """
        if self.constant is not None:
            return ScaleRule.constant(self.constant)
        return ScaleRule(
            self.initial,
            min_scale=self.minimum,
            growth_window=self.window,
            hysteresis=self.hysteresis,
        )
