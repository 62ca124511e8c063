"""The MLP of a mixture of experts: routed ones, of which each token takes a few, and shared ones.

With tensor parallelism the sequence is cut outside of attention and MLPs, so each rank routes and
dispatches its own part of it; shared experts are cut as an MLP is. Expert parallelism sends tokens
to the ranks that have their experts.

Shape suffixes: B batch, T sequence, H hidden, N tokens, K experts a token, R rows of this rank's
experts. With tp, T is this rank's part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafsdp.device.torch_private import without_dynamo
from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.models.common import MLP, output_init_std
from megafsdp.models.config import ModelConfig
from megafsdp.parallel import GroupedExperts, ParallelModule, RoutedBatch, Router
from megafsdp.parallel.dispatch import combine, dispatch


class SharedExperts(MLP):
    """An MLP for all tokens, times a gate between 0 and 1 that each token computes.

    Args:
        config: Sizes and initial spread.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, has_bias=False, width_field="shared_expert_ffn_hidden_size")
        self.declarations = {"gate_weight": ParameterAnnotation(sums_over_tp=True)}
        self.gate_weight = nn.Parameter(torch.empty(1, config.hidden_size))
        self._start(None, None)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Write zeros, which make gates of one half.

        A draw here would come before or after those of the maps below, depending on who
        initialises.
        """
        nn.init.zeros_(whole)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Map (B, T, H) through the inner width and back, gated."""
        weight = self._localized("gate_weight")
        gate_BT1 = F.linear(x_BTH.to(weight.dtype), weight).sigmoid().to(x_BTH.dtype)
        return gate_BT1 * super().forward(x_BTH)


class MoE(ParallelModule):
    """A mixture of experts in the place of an MLP.

    Args:
        config: Sizes, initial spread, and how loads are balanced.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_token,
            norm_topk_prob=config.norm_topk_prob,
            balance=config.router_balance,
            aux_loss_coefficient=config.router_aux_loss_coefficient,
            bias_update_rate=config.router_bias_update_rate,
            init_std=config.init_std,
            sequence_parallel=True,
        )
        self.experts = GroupedExperts(
            config.num_experts,
            config.hidden_size,
            config.moe_ffn_hidden_size,
            init_std=config.init_std,
            output_init_std=output_init_std(config),
            sequence_parallel=True,
        )
        has_shared = config.shared_expert_ffn_hidden_size > 0
        self.shared_experts = SharedExperts(config) if has_shared else None

    def forward(self, x_BTH: Tensor, batch: RoutedBatch | None = None) -> Tensor:
        """Map (B, T, H) to the weighted sum of each token's experts; collective over ep and tp."""
        out_BTH = self._pass_experts(x_BTH.flatten(0, 1), batch).view_as(x_BTH)
        if self.shared_experts is None:
            return out_BTH
        return out_BTH + self.shared_experts(x_BTH)

    # Only the host knows how many rows an expert has, and they differ in each forward.
    @without_dynamo
    def _pass_experts(self, x_NH: Tensor, batch: RoutedBatch | None) -> Tensor:
        weights_NK, experts_NK = self.router(x_NH, batch)
        num_experts, group = self.router.num_experts, self.experts.ep_group
        dispatched = dispatch(x_NH, experts_NK, weights_NK, num_experts, group)
        rows_RH = self.experts(dispatched.rows_RH, dispatched.plan.load_E)
        return combine(rows_RH, dispatched)
