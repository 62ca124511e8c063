"""Linear attention by the gated delta rule, in the place of attention in some layers of a hybrid.

Parameter names are Megatron-core's. With tensor parallelism a rank has whole key heads, the value
heads that they serve, and the same part of what belongs to them; the convolution and the rule then
need no exchange.

Shape suffixes: B batch, T sequence, H hidden, G key heads, N value heads, D width of a key head,
E of a value head, C channels of the convolution. With tp, G, N and C are this rank's, and T is its
part of the sequence outside of the layer's two maps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.models.common import output_init_std, require_divisor
from megafsdp.models.config import ModelConfig
from megafsdp.models.gated_delta import gated_delta_rule
from megafsdp.models.linear_attention_kernels import convolution_kernel_for
from megafsdp.parallel import Linear, ParallelModule, RMSNorm

_FASTEST_DECAY = 16.0


class CausalConvolution(ParallelModule):
    """A convolution along the sequence, each channel by itself, and SiLU.

    Args:
        sizes: Channels of queries, keys and values.
        width: Tokens that a token sees: itself and those before it.
    """

    def __init__(self, sizes: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.width = width
        self.declarations = {
            "weight": ParameterAnnotation(0, fused=_parts(_QUERY_KEY_VALUE, sizes))
        }
        self.weight = nn.Parameter(torch.empty(sum(sizes), 1, width))
        self._start(None, None)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw uniformly, so that a channel's output has about a third of its input's variance."""
        nn.init.uniform_(whole, -(self.width**-0.5), self.width**-0.5)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix each token's channels with those before it; the result has the dtype of the input."""
        weight_C1W = self._localized("weight")
        x_BCT = x_BTC.mT.to(weight_C1W.dtype)
        kernel = convolution_kernel_for(x_BCT, self.width)
        if kernel is not None:
            out_BCT = kernel(x_BCT.contiguous(), weight_C1W.squeeze(1), activation="silu")
            return out_BCT.mT.to(x_BTC.dtype)
        out_BCT = F.conv1d(x_BCT, weight_C1W, padding=self.width - 1, groups=weight_C1W.shape[0])[
            ..., : x_BCT.shape[-1]
        ]
        return F.silu(out_BCT).mT.to(x_BTC.dtype)


class GatedDeltaNet(ParallelModule):
    """Causal attention without softmax: a state a head, written by the gated delta rule.

    The rows of ``in_proj`` are those of queries, keys, values, output gates z, and two numbers a
    value head: beta, how much a token corrects, and alpha, of which its decay is made:

        exp(-exp(A_log) * softplus(alpha + dt_bias))

    Args:
        config: Sizes, initial spread and epsilon.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_key_heads = config.linear_num_key_heads
        self.key_head_dim = config.linear_key_head_dim
        self.value_head_dim = config.linear_value_head_dim
        num_heads = config.linear_num_value_heads
        keys, values = self.num_key_heads * self.key_head_dim, num_heads * self.value_head_dim
        self.sizes = (keys, keys, values, values, num_heads, num_heads)
        self.declarations = {"A_log": ParameterAnnotation(0), "dt_bias": ParameterAnnotation(0)}
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self._start(None, None)
        self.in_proj = Linear(
            config.hidden_size,
            sum(self.sizes),
            bias=False,
            init_std=config.init_std,
            parallel_mode="column",
            sequence_parallel=True,
            fused=_parts((*_QUERY_KEY_VALUE, "z", "beta", "alpha"), self.sizes),
        )
        self.conv1d = CausalConvolution((keys, keys, values), config.linear_conv_kernel)
        # The ranks of tp have different heads.
        self.out_norm = RMSNorm(self.value_head_dim, config.norm_eps, sequence_parallel=True)
        self.out_proj = Linear(
            values,
            config.hidden_size,
            bias=False,
            init_std=output_init_std(config),
            parallel_mode="row",
            sequence_parallel=True,
        )

    def initialize(self, name: str, whole: Tensor) -> None:
        """Write ones to ``dt_bias``, and decay rates spread evenly from 0 to 16 over the heads.

        The released models drew theirs uniformly from there. A draw would come before those of the
        maps below, or after them, by who initialises.
        """
        if name == "dt_bias":
            nn.init.ones_(whole)
        else:
            middles_N = torch.arange(0.5, whole.numel(), device=whole.device) / whole.numel()
            whole.copy_((_FASTEST_DECAY * middles_N).log())

    def check_degree(self, degree: int) -> None:
        """Raise ValueError unless a tensor-parallel degree divides the key heads."""
        require_divisor(
            degree, self.num_key_heads, "key heads of linear attention", "linear_num_key_heads"
        )

    def forward(self, x_BTH: Tensor, rotary_TR: Tensor | None = None) -> Tensor:
        """Let every token write to the state and read it.

        Args:
            x_BTH: Normed hidden states.
            rotary_TR: Not read: the order of tokens is that of their decays.

        Returns:
            (B, T, H), to be added to the residual stream.
        """
        del rotary_TR
        degree = 1 if self.tp_mesh is None else self.tp_mesh.size()
        keys, _, values, _, num_heads, _ = (size // degree for size in self.sizes)
        qkv_BTC, z_BTX, beta_BTN, alpha_BTN = self.in_proj(x_BTH).split(
            (2 * keys + values, values, num_heads, num_heads), dim=-1
        )
        q_BTX, k_BTX, v_BTX = self.conv1d(qkv_BTC).split((keys, keys, values), dim=-1)
        dtype = torch.promote_types(x_BTH.dtype, torch.float32)
        rate_N = self._localized("A_log").to(dtype).exp()
        step_BTN = F.softplus(alpha_BTN.to(dtype) + self._localized("dt_bias"))
        out_BTNE = gated_delta_rule(
            q_BTX.unflatten(-1, (-1, self.key_head_dim)),
            k_BTX.unflatten(-1, (-1, self.key_head_dim)),
            v_BTX.unflatten(-1, (-1, self.value_head_dim)),
            log_decay_BTN=-rate_N * step_BTN,
            beta_BTN=beta_BTN.to(dtype).sigmoid(),
        )
        gate_BTNE = F.silu(z_BTX).unflatten(-1, (-1, self.value_head_dim))
        return self.out_proj((self.out_norm(out_BTNE) * gate_BTNE).flatten(2))


_QUERY_KEY_VALUE = ("query", "key", "value")


def _parts(names: tuple[str, ...], sizes: tuple[int, ...]) -> FusedParts:
    # As in NVIDIA's checkpoints.
    stored_as = tuple("{module}.{parameter}." + name for name in names)
    return FusedParts(names, sizes, stored_as=stored_as)
