"""Layers that every architecture is built from.

Modules that own parameters are those of :mod:`megafsdp.parallel`, and parameter names are
Megatron-core's (its local spec). The file knows nothing of data parallelism: a parameter is read
only in the forward of the module that owns it, so anything may gather it there. With tensor
parallelism a rank has whole query groups and a part of the MLP's inner width, and between the maps
of a layer its part of the sequence; nothing here depends on how many ranks there are.

Shape suffixes: B batch, T sequence, H hidden, F MLP inner width, N query heads, G query groups,
P query heads in a group, D head dim, R rotary frequencies, S rotated elements of a head (2 R). With
tp, F, N and G are this rank's, and T is its part of the sequence outside of attention and the MLP;
with context parallelism T is its part everywhere.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafsdp.errors import expected
from megafsdp.mesh.fused_parts import FusedParts, gate_and_up
from megafsdp.models.causal_attention import causal_attention
from megafsdp.models.config import ModelConfig
from megafsdp.parallel import Documents, Linear, ParallelModule, RMSNorm, RoutedBatch


def rotary_table(
    num_positions: int, rotary_dim: int, theta: float, *, device: torch.device | None = None
) -> Tensor:
    """Compute the rotation of every pair of a head's elements at every position.

    Alternatives considered: an fp32 buffer of the module, which ``module.to(torch.bfloat16)``
    rounds silently, so that far positions collapse; and separate fp32 tables of cosine and sine,
    which a policy that casts a unit's floating-point inputs rounds at each layer. A complex tensor
    computed in every forward is neither state nor floating point, and costs less than one norm.

    Args:
        num_positions: Positions 0 to ``num_positions - 1`` are computed.
        rotary_dim: Rotated elements of a head; element i is paired with i + rotary_dim / 2.
        theta: Base of the frequencies ``theta ** (-2 * i / rotary_dim)``.
        device: Where the table is wanted.

    Returns:
        exp(i * position * frequency) as ``(T, R) complex64`` with R = rotary_dim / 2.

    Source: Su et al., RoFormer (arXiv:2104.09864), section 3.4.2, with the half-split pairing of
        GPT-NeoX.
    """
    exponents_R = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    positions_T = torch.arange(num_positions, device=device).float()
    angles_TR = torch.outer(positions_T, 1.0 / theta**exponents_R)
    return torch.complex(angles_TR.cos(), angles_TR.sin())


def rotate(x_BTND: Tensor, cos_T1S: Tensor, sin_T1S: Tensor) -> Tensor:
    """Rotate the pairs (i, i + S / 2) of every head in fp32, and leave what follows them.

    Args:
        x_BTND: Queries or keys.
        cos_T1S: Cosines, given twice: for the first and the second elements of the pairs.
        sin_T1S: Sines, negative for the first elements.

    Returns:
        The rotated heads in the dtype of ``x_BTND``.
    """
    rotary_dim = cos_T1S.shape[-1]
    if rotary_dim < x_BTND.shape[-1]:
        rotated_BTNS = rotate(x_BTND[..., :rotary_dim], cos_T1S, sin_T1S)
        return torch.cat((rotated_BTNS, x_BTND[..., rotary_dim:]), dim=-1)
    first, second = x_BTND.chunk(2, dim=-1)
    swapped_BTND = torch.cat((second, first), dim=-1)
    return torch.addcmul(x_BTND * cos_T1S, swapped_BTND, sin_T1S).to(x_BTND.dtype)


def rotary_factors(rotary_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Return a rotary table as the two contiguous factors that ``rotate`` takes.

    With documents in the rows, each row has a table of its own, and factors of its own.
    """
    cos_TR, sin_TR = rotary_TR.real, rotary_TR.imag
    cos_T1S = torch.cat((cos_TR, cos_TR), dim=-1).unsqueeze(-2)
    sin_T1S = torch.cat((-sin_TR, sin_TR), dim=-1).unsqueeze(-2)
    return cos_T1S, sin_T1S


class SelfAttention(ParallelModule):
    """Causal attention with grouped queries, and optionally normed heads and rotary positions.

    The rows of ``linear_qkv`` repeat [query heads of g; key head of g; value head of g] for each
    query group g, so that cutting dim 0 between groups leaves every rank whole heads. With 4 heads
    in 2 groups:

        q0 q1 k0 v0 | q2 q3 k1 v1

    With an output gate the gate heads of g stand between its query heads and its key head.

    Args:
        config: Sizes, initial spread and epsilon.
        has_bias: True if both linear maps add a bias.
        has_head_norms: True if each query and key head passes an RMSNorm.
        has_output_gate: True if a head's output is multiplied by the sigmoid of a gate head.
        has_zero_centered_norms: True if the factors of these norms are 1 plus their weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        has_bias: bool,
        has_head_norms: bool,
        has_output_gate: bool = False,
        has_zero_centered_norms: bool = False,
    ) -> None:
        super().__init__()
        self.num_query_groups = config.num_query_groups
        self.head_dim = config.head_dim
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.has_output_gate = has_output_gate
        parts = FusedParts(
            ("query", "gate", "key", "value") if has_output_gate else ("query", "key", "value"),
            self._group_rows(),
            num_groups=self.num_query_groups,
        )
        self.linear_qkv = Linear(
            config.hidden_size,
            parts.extent,
            bias=has_bias,
            init_std=config.init_std,
            parallel_mode="column",
            sequence_parallel=True,
            fused=parts,
        )
        self.q_layernorm = _head_norm(config, has_zero_centered_norms) if has_head_norms else None
        self.k_layernorm = _head_norm(config, has_zero_centered_norms) if has_head_norms else None
        self.linear_proj = Linear(
            config.query_size,
            config.hidden_size,
            bias=has_bias,
            init_std=output_init_std(config),
            parallel_mode="row",
            sequence_parallel=True,
        )

    def check_degree(self, degree: int) -> None:
        """Raise ValueError unless a tensor-parallel degree divides the query groups."""
        require_divisor(degree, self.num_query_groups, "query groups", "num_query_groups")

    def _group_rows(self) -> tuple[int, ...]:
        query_rows = self.heads_per_group * self.head_dim
        gate_rows = (query_rows,) if self.has_output_gate else ()
        return (query_rows, *gate_rows, self.head_dim, self.head_dim)

    def forward(
        self,
        x_BTH: Tensor,
        rotary_TR: Tensor | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Let every token attend to itself and those before it in its document.

        Args:
            x_BTH: Normed hidden states.
            rotary_TR: Rotary table of these tokens, with documents (B, T, R); None where positions
                are not rotations.
            documents: Documents of the rows (with cp, of the whole sequence); None for one a row.

        Returns:
            (B, T, H), to be added to the residual stream.
        """
        qkv_BTGX = self.linear_qkv(x_BTH).unflatten(-1, (-1, sum(self._group_rows())))
        q_BTGX, *gates, k_BTGD, v_BTGD = qkv_BTGX.split(self._group_rows(), dim=-1)
        q_BTND = q_BTGX.unflatten(-1, (self.heads_per_group, self.head_dim)).flatten(2, 3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_BTND, k_BTGD = self.q_layernorm(q_BTND), self.k_layernorm(k_BTGD)
        if rotary_TR is not None:
            cos_T1S, sin_T1S = rotary_factors(rotary_TR)
            q_BTND = rotate(q_BTND, cos_T1S, sin_T1S)
            k_BTGD = rotate(k_BTGD, cos_T1S, sin_T1S)
        context_BNTD = causal_attention(
            q_BTND.transpose(1, 2),
            k_BTGD.transpose(1, 2),
            v_BTGD.transpose(1, 2),
            cp_group=self.cp_group,
            documents=documents,
        )
        context_BTX = context_BNTD.transpose(1, 2).flatten(2)
        if gates:
            context_BTX = context_BTX * gates[0].flatten(2).sigmoid()
        return self.linear_proj(context_BTX)


def _head_norm(config: ModelConfig, zero_centered: bool) -> RMSNorm:
    # The ranks of tp have different heads, even if each has the whole sequence.
    return RMSNorm(
        config.head_dim, config.norm_eps, zero_centered=zero_centered, sequence_parallel=True
    )


class MLP(ParallelModule):
    """GELU (tanh form) MLP, or SwiGLU whose first matrix is [gate; up].

    Args:
        config: Sizes, initial spread, and whether the MLP is gated.
        has_bias: True if both linear maps add a bias.
        width_field: The field of the config that is the inner width.
    """

    def __init__(
        self, config: ModelConfig, *, has_bias: bool, width_field: str = "ffn_hidden_size"
    ) -> None:
        super().__init__()
        self.is_gated = config.has_gated_mlp
        self.width_field = width_field
        self.width = width = getattr(config, width_field)
        self.linear_fc1 = Linear(
            config.hidden_size,
            2 * width if self.is_gated else width,
            bias=has_bias,
            init_std=config.init_std,
            parallel_mode="column",
            sequence_parallel=True,
            fused=gate_and_up(width) if self.is_gated else None,
        )
        self.linear_fc2 = Linear(
            width,
            config.hidden_size,
            bias=has_bias,
            init_std=output_init_std(config),
            parallel_mode="row",
            sequence_parallel=True,
        )

    def check_degree(self, degree: int) -> None:
        """Raise ValueError unless a tensor-parallel degree divides the inner width."""
        require_divisor(degree, self.width, "inner elements of the MLP", self.width_field)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Map (B, T, H) through the inner width and back."""
        inner_BTF = self.linear_fc1(x_BTH)
        if self.is_gated:
            gate_BTF, up_BTF = inner_BTF.chunk(2, dim=-1)
            return self.linear_fc2(F.silu(gate_BTF) * up_BTF)
        return self.linear_fc2(F.gelu(inner_BTF, approximate="tanh"))


class TransformerLayer(ParallelModule):
    """One pre-norm transformer layer, put together from its four parts; the unit of sharding.

    Args:
        input_layernorm: Norm before attention.
        self_attention: Called with (B, T, H), the rotary table and the documents.
        pre_mlp_layernorm: Norm before the MLP.
        mlp: Called with (B, T, H); a mixture of experts also gets the forward's ``RoutedBatch``.
    """

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attention: nn.Module,
        *,
        pre_mlp_layernorm: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attention = self_attention
        self.pre_mlp_layernorm = pre_mlp_layernorm
        self.mlp = mlp

    def forward(
        self,
        x_BTH: Tensor,
        rotary_TR: Tensor | None = None,
        batch: RoutedBatch | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Add attention and then the MLP to the residual stream."""
        normed_BTH = self.input_layernorm(x_BTH)
        x_BTH = x_BTH + self.self_attention(normed_BTH, rotary_TR, documents)
        normed_BTH = self.pre_mlp_layernorm(x_BTH)
        return x_BTH + (self.mlp(normed_BTH) if batch is None else self.mlp(normed_BTH, batch))


def output_init_std(config: ModelConfig) -> float:
    """Return the initial spread of the two maps of a layer that write to the residual stream.

    Each of the 2 * num_layers writes is scaled down so that their sum keeps the variance of one.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), section
        2.3.
    """
    return config.init_std / math.sqrt(2 * config.num_layers)


def require_divisor(
    degree: int, count: int, of_what: str, name: str, *, kind: str = "a tensor-parallel degree"
) -> None:
    """Raise ValueError unless a degree of parallelism divides a count of the model's config."""
    if count % degree:
        raise ValueError(
            expected(
                f"{kind} that divides the {count} {of_what}",
                degree,
                where=f"ModelConfig.{name}",
                hint=f"Choose a degree that divides {name}",
            )
        )
