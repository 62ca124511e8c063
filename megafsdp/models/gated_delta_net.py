"""Linear attention by the gated delta rule, in the place of attention in some layers of a hybrid.

Parameter names are Megatron-core's. With tensor parallelism a rank has whole key heads, the value
heads that they serve, and the same part of what belongs to them; the convolution and the rule then
need no exchange. With context parallelism they need all tokens in their order: ranks exchange their
tokens for a part of the heads before the convolution, and back after the rule.

Shape suffixes: B batch, T sequence, H hidden, G key heads, N value heads, D width of a key head,
E of a value head, C channels of the convolution. With tp, G, N and C are this rank's, and T is its
part of the sequence outside of the layer's two maps. Between those exchanges T is the whole
sequence, and G, N and C are the rank's part in cp too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.models.common import output_init_std, require_divisor
from megafsdp.models.config import ModelConfig
from megafsdp.models.gated_delta import gated_delta_rule
from megafsdp.models.linear_attention_kernels import convolution_kernel_for
from megafsdp.parallel import Documents, Linear, ParallelModule, RMSNorm
from megafsdp.parallel.context import heads_of, tokens_of

_FASTEST_DECAY = 16.0


class CausalConvolution(ParallelModule):
    """A convolution along the sequence, each channel by itself, and SiLU.

    Args:
        sizes: Channels of queries, keys and values.
        width: Tokens that a token sees: itself and those before it.
    """

    def __init__(self, sizes: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.sizes, self.width = sizes, width
        self.declarations = {
            "weight": ParameterAnnotation(0, fused=_parts(_QUERY_KEY_VALUE, sizes))
        }
        self.weight = nn.Parameter(torch.empty(sum(sizes), 1, width))
        self._start(None, None)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw uniformly, so that a channel's output has about a third of its input's variance."""
        nn.init.uniform_(whole, -(self.width**-0.5), self.width**-0.5)

    def forward(self, x_BTC: Tensor, documents: Documents | None = None) -> Tensor:
        """Mix each token's channels with those of tokens before it, in the dtype of the input.

        Args:
            x_BTC: Channels of all tokens; with cp, this rank's part of queries, keys and values.
            documents: Documents of the rows, each of which is mixed by itself.
        """
        weight_C1W = _own_heads(self._localized("weight"), self.sizes, self.cp_group)
        if documents is None:
            return self._mix(x_BTC, weight_C1W)
        return documents.each_alone(lambda x: self._mix(x, weight_C1W), x_BTC)

    def _mix(self, x_BTC: Tensor, weight_C1W: Tensor) -> Tensor:
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
    """Causal attention without softmax: one state for each head, written by the gated delta rule.

    The rows of ``in_proj`` are those of queries, keys, values, output gates z, and two numbers for
    each value head: beta, how much a token corrects, and alpha, from which its decay is computed:

        exp(-exp(A_log) * softplus(alpha + dt_bias))

    Args:
        config: Sizes, initial spread and epsilon.
    """

    shares_heads_over_cp = True

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

        The released models drew theirs uniformly from that range. A draw here would come before or
        after those of the maps below, depending on who initialises.
        """
        if name == "dt_bias":
            nn.init.ones_(whole)
        else:
            middles_N = torch.arange(
                0.5, whole.numel(), dtype=torch.float32, device=whole.device
            ).div_(whole.numel())
            whole.copy_((_FASTEST_DECAY * middles_N).log())

    def check_degree(self, degree: int) -> None:
        """Raise ValueError unless a degree of tp, or of tp x cp, divides the key heads."""
        require_divisor(
            degree,
            self.num_key_heads,
            "key heads of linear attention",
            "linear_num_key_heads",
            kind="a tensor-parallel degree, times the context-parallel one,",
        )

    def forward(
        self,
        x_BTH: Tensor,
        rotary_TR: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Let every token write to the state of its document and read it.

        Args:
            x_BTH: Normed hidden states.
            rotary_TR: Not read: decays express the order of tokens.
            documents: Documents of the rows (with cp, of the whole sequence); None for one a row.

        Returns:
            (B, T, H), to be added to the residual stream.
        """
        del rotary_TR
        degree, group = 1 if self.tp_mesh is None else self.tp_mesh.size(), self.cp_group
        keys, _, values, _, num_heads, _ = (size // degree for size in self.sizes)
        qkv_BTC, z_BTX, beta_BTN, alpha_BTN = self.in_proj(x_BTH).split(
            (2 * keys + values, values, num_heads, num_heads), dim=-1
        )
        rate_N, bias_N = self._localized("A_log"), self._localized("dt_bias")
        if group is not None:
            by_head = (*qkv_BTC.split((keys, keys, values), dim=-1), beta_BTN, alpha_BTN)
            keys, values, num_heads = (n // group.size() for n in (keys, values, num_heads))
            qkv_BTC, beta_BTN, alpha_BTN = _heads_of_all(by_head, group).split(
                (2 * keys + values, num_heads, num_heads), dim=-1
            )
            rate_N, bias_N = (_own_heads(x, (1,), group) for x in (rate_N, bias_N))
            # A slice would keep all of the map's output for backward.
            z_BTX = z_BTX.contiguous()
        qkv_BTC = self.conv1d(qkv_BTC, documents)
        q_BTX, k_BTX, v_BTX = qkv_BTC.split((keys, keys, values), dim=-1)
        dtype = torch.promote_types(x_BTH.dtype, torch.float32)
        rate_N = rate_N.to(dtype).exp()
        step_BTN = F.softplus(alpha_BTN.to(dtype) + bias_N)
        inputs = (
            q_BTX.unflatten(-1, (-1, self.key_head_dim)),
            k_BTX.unflatten(-1, (-1, self.key_head_dim)),
            v_BTX.unflatten(-1, (-1, self.value_head_dim)),
            -rate_N * step_BTN,
            beta_BTN.to(dtype).sigmoid(),
        )
        out_BTNE = _attend(*inputs) if documents is None else documents.each_alone(_attend, *inputs)
        if group is not None:
            own_BTX = tokens_of(out_BTNE.flatten(2), group)
            out_BTNE = own_BTX.unflatten(-1, (-1, self.value_head_dim))
        gate_BTNE = F.silu(z_BTX).unflatten(-1, (-1, self.value_head_dim))
        return self.out_proj((self.out_norm(out_BTNE) * gate_BTNE).flatten(2))


def _attend(
    q_BTGD: Tensor, k_BTGD: Tensor, v_BTNE: Tensor, log_decay_BTN: Tensor, beta_BTN: Tensor
) -> Tensor:
    return gated_delta_rule(q_BTGD, k_BTGD, v_BTNE, log_decay_BTN=log_decay_BTN, beta_BTN=beta_BTN)


def _heads_of_all(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads of several tensors at once; each has all heads, (B, T, X)."""
    by_rank = [part.unflatten(-1, (group.size(), -1)) for part in parts]
    return heads_of(torch.cat(by_rank, dim=-1).flatten(-2), group)


def _own_heads(weight: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return, from each part along dim 0, what belongs to this rank's heads in cp.

    Args:
        weight: A parameter with all heads of this rank of tp.
        sizes: The proportions of its parts along dim 0.
        group: The ranks of cp; None for all heads.
    """
    if group is None:
        return weight
    lengths = [size * weight.shape[0] // sum(sizes) for size in sizes]
    parts = weight.split(lengths)
    return torch.cat([part.chunk(group.size())[group.rank()] for part in parts])


_QUERY_KEY_VALUE = ("query", "key", "value")


def _parts(names: tuple[str, ...], sizes: tuple[int, ...]) -> FusedParts:
    # As in NVIDIA's checkpoints.
    stored_as = tuple("{module}.{parameter}." + name for name in names)
    return FusedParts(names, sizes, stored_as=stored_as)
