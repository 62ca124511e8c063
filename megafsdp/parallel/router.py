"""Which experts a token goes to, how their loads are counted, and what balances them.

A router scores experts by the softmax of a linear map, in fp32 or wider, and picks the best K. Each
token counts once for the loads, not again when backward recomputes a layer. What balances them:

    none       nothing
    aux_loss   a loss besides the model's, whose gradient enters at the scores in backward
    bias       a number for each expert is added to the scores where experts are picked, and moved
               a fixed step at a time against the error of the load; the weights do not see it

The loss of a layer is ``coefficient * E * sum over experts of f * P`` with f the expert's share of
all copies of tokens and P its mean score, over the tokens of one forward on all ranks; it is
``coefficient`` where loads are even, and only P has a gradient. transformers'
``load_balancing_loss_func`` is K times as much, and takes the tokens of all layers together.

A training loop calls :func:`router_metrics` where it wants numbers and :func:`end_router_step`
after each optimizer step. Tokens that pad a sequence are routed but not counted.

Sources: Fedus et al., Switch Transformers (arXiv:2101.03961), equations 4 to 6, over the global
batch as in Qiu et al., Demons in the Detail (arXiv:2501.11873); Wang et al., Auxiliary-Loss-Free
Load Balancing Strategy for Mixture-of-Experts (arXiv:2408.15664), algorithm 1.

Shape suffixes: N tokens, H hidden, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.device.torch_private import is_backward_running, without_dynamo
from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.parallel.dispatch import count_by_expert
from megafsdp.parallel.layer import ParallelModule

Balance = Literal["none", "aux_loss", "bias"]


class RoutedBatch:
    """What routers know of the forward that they are in, also when backward recomputes it.

    One is made for each forward: several forwards may come before a backward. It is not a
    dataclass: engines copy dataclasses when they cast the inputs of a layer.

    Args:
        is_padding_N: Whether each of this rank's tokens pads its sequence; None if none does.

    Attributes:
        is_padding_N: As given.
        loss_grad: The gradient of the model's own loss, noted in backward; None for 1.
    """

    __slots__ = ("is_padding_N", "loss_grad")

    def __init__(self, is_padding_N: Tensor | None = None) -> None:
        self.is_padding_N = is_padding_N
        self.loss_grad: Tensor | None = None


class Router(ParallelModule):
    """The map from a token to its experts and their weights.

    Args:
        hidden_size: Size of the last dim of the input.
        num_experts: E, on all ranks of ep together.
        num_experts_per_token: K.
        norm_topk_prob: Whether the K weights of a token are divided by their sum.
        balance: What balances the loads.
        aux_loss_coefficient: Factor of the auxiliary loss.
        bias_update_rate: How far a step moves each expert's bias.
        init_std: Standard deviation of the initial weight.
        sequence_parallel: Whether the ranks of tp route different tokens.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the weight is made.

    Attributes:
        expert_bias: ``(E,)`` fp32, a buffer that checkpoints have; None unless ``balance`` is
            ``bias``. Conversions of the module's dtype leave it as it is.
        load_E: Copies of this rank's tokens for each expert since the step began; None before the
            first. Counted in training mode only.
        score_E: The sum of each expert's scores likewise; with an auxiliary loss only.
        batch: The batch of the last forward; None before the first.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        norm_topk_prob: bool = True,
        balance: Balance = "none",
        aux_loss_coefficient: float = 0.001,
        bias_update_rate: float = 0.001,
        init_std: float = 0.02,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.norm_topk_prob = norm_topk_prob
        self.balance = balance
        self.aux_loss_coefficient = aux_loss_coefficient
        self.bias_update_rate = bias_update_rate
        self.init_std = init_std
        self.sequence_parallel = sequence_parallel
        self.load_E: Tensor | None = None
        self.score_E: Tensor | None = None
        self.batch: RoutedBatch | None = None
        self.declarations = {"weight": ParameterAnnotation(sums_over_tp=sequence_parallel)}
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device))
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("expert_bias", bias if balance == "bias" else None)
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw the weight from a normal distribution."""
        nn.init.normal_(whole, std=self.init_std)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weight, and set the bias of experts to zero."""
        super().reset_parameters(defer_init)
        if self.expert_bias is not None and not defer_init:
            self.expert_bias.zero_()

    def forward(self, x_NH: Tensor, batch: RoutedBatch | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts and their indices, both ``(N, K)``.

        Weights have the dtype of the scores, the widest of fp32, the input's and the weight's.
        Local; with an auxiliary loss backward sums loads over all ranks.

        Args:
            x_NH: The tokens of this rank.
            batch: The batch of the forward, the same one when backward recomputes it. If None, a
                forward makes one, and a recomputation takes the last forward's.
        """
        is_recomputed = is_backward_running()
        if batch is None:
            batch = self.batch if is_recomputed and self.batch is not None else RoutedBatch()
        if not is_recomputed:
            self.batch = batch
        weight = self._localized("weight")
        dtype = torch.promote_types(torch.promote_types(x_NH.dtype, weight.dtype), torch.float32)
        score_NE = F.linear(x_NH.to(dtype), weight.to(dtype)).softmax(-1)
        ranked_NE = score_NE if self.expert_bias is None else score_NE + self.expert_bias
        experts_NK = ranked_NE.detach().topk(self.num_experts_per_token).indices
        weights_NK = score_NE.gather(1, experts_NK)
        if self.norm_topk_prob:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        if not self.training:
            return weights_NK, experts_NK
        load_E = self._load_of(experts_NK, batch.is_padding_N)
        # A recomputation would count the tokens of its forward again.
        if not is_recomputed:
            self._count(load_E, _without_padding(score_NE.detach(), batch))
        if self.balance == "aux_loss":
            weights_NK = _add_auxiliary_loss(weights_NK, score_NE, load_E, self, batch)
        return weights_NK, experts_NK

    def _load_of(self, experts_NK: Tensor, is_padding_N: Tensor | None) -> Tensor:
        if is_padding_N is None:
            return count_by_expert(experts_NK, self.num_experts)
        # Padding counts for one more expert, so that the host does not wait for a number of rows.
        counted_NK = experts_NK.masked_fill(is_padding_N.unsqueeze(1), self.num_experts)
        return count_by_expert(counted_NK, self.num_experts + 1)[:-1]

    def _count(self, load_E: Tensor, score_NE: Tensor) -> None:
        self.load_E = load_E if self.load_E is None else self.load_E + load_E
        if self.balance == "aux_loss":
            score_E = score_NE.sum(0)
            self.score_E = score_E if self.score_E is None else self.score_E + score_E

    def _score_grad(self, load_E: Tensor, loss_grad: Tensor | None) -> Tensor:
        """Return the gradient of the auxiliary loss with respect to each token's scores, ``(E,)``.

        Collective over all ranks.
        """
        total_E = load_E.double()
        all_reduce(total_E, label="loads of experts")
        num_copies = total_E.sum()
        # Gradients are averaged over data ranks, and summed over ranks of tp with different tokens:
        # so this gradient, of the whole batch, is divided by the tokens of one data rank.
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.sequence_parallel and self.tp_mesh is not None:
            num_ranks //= self.tp_mesh.size()
        num_tokens = num_copies / (self.num_experts_per_token * num_ranks)
        grad_E = self.aux_loss_coefficient * self.num_experts * total_E / (num_copies * num_tokens)
        return grad_E if loss_grad is None else grad_E * loss_grad

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        # Steps of the update rate would be lost in bf16.
        if (
            bias is not None
            and self.expert_bias is not None
            and self.expert_bias.dtype != bias.dtype
        ):
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        """Describe the sizes for ``repr``."""
        return f"{self.num_experts} experts, top {self.num_experts_per_token}, {self.balance}"


class _AuxiliaryLoss(torch.autograd.Function):
    """Return the weights unchanged; in backward add the gradient of a loss that has no value.

    A value would be a second output of the layer. Backward might then begin at it, before the
    layer's parameters are gathered, and a recomputed layer would make it twice.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        weights_NK: Tensor,
        score_NE: Tensor,
        load_E: Tensor,
        router: Router,
        batch: RoutedBatch,
    ) -> Tensor:
        ctx.save_for_backward(load_E)
        ctx.router, ctx.batch = router, batch  # type: ignore[attr-defined]
        ctx.scores, ctx.dtype = score_NE.shape, score_NE.dtype  # type: ignore[attr-defined]
        return weights_NK.view_as(weights_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_NK: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (load_E,) = ctx.saved_tensors  # type: ignore[attr-defined]
        router, batch = ctx.router, ctx.batch  # type: ignore[attr-defined]
        grad_E = router._score_grad(load_E, batch.loss_grad).to(ctx.dtype)  # type: ignore[attr-defined]
        grad_NE = _without_padding(grad_E.expand(ctx.scores), batch)  # type: ignore[attr-defined]
        return grad_NK, grad_NE, None, None, None


# A compiled layer ends its graph here: the gradient needs a collective, which the host issues.
@without_dynamo
def _add_auxiliary_loss(
    weights_NK: Tensor, score_NE: Tensor, load_E: Tensor, router: Router, batch: RoutedBatch
) -> Tensor:
    weights: Tensor = _AuxiliaryLoss.apply(weights_NK, score_NE, load_E, router, batch)
    return weights


class _LossGradient(torch.autograd.Function):
    """Return a loss unchanged; in backward note its gradient for routers."""

    @staticmethod
    def forward(ctx: FunctionCtx, loss: Tensor, batches: set[RoutedBatch]) -> Tensor:
        ctx.batches = batches  # type: ignore[attr-defined]
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        for batch in ctx.batches:  # type: ignore[attr-defined]
            batch.loss_grad = grad
        return grad, None


@without_dynamo
def scale_auxiliary_losses(loss: Tensor, model: nn.Module) -> Tensor:
    """Return the loss; in backward its gradient becomes the factor of a model's auxiliary losses.

    It acts on the losses of the model's last forward: call it before the next one. Dividing the
    loss by the number of microbatches, or scaling it for fp16, then applies to them too. Backward
    must reach the loss before the layers, as it does if the loss is made of their output.
    ``LanguageModel`` calls it if it makes the loss itself. Local.
    """
    batches = {
        router.batch
        for router in _routers(model)
        if router.balance == "aux_loss" and router.batch is not None
    }
    if not batches or not loss.requires_grad:
        return loss
    scaling: Tensor = _LossGradient.apply(loss, batches)
    return scaling


@dataclass(frozen=True, slots=True)
class RouterMetrics:
    """How evenly experts were used since the step began, on all ranks; scalars on the device.

    Attributes:
        max_load: The largest load of an expert over the mean load, in the layer where it is worst.
        aux_loss: The auxiliary loss without its coefficient, the mean over layers: 1 where loads
            are even; None unless the model has one.
    """

    max_load: Tensor
    aux_loss: Tensor | None


def router_metrics(model: nn.Module) -> RouterMetrics | None:
    """Return how evenly a model's experts were used; None for a model without routers.

    Collective over all ranks, which must call it alike: one all-reduce. Call it before
    :func:`end_router_step`.
    """
    routers = _routers(model)
    if not routers:
        return None
    sums = _summed([[_or_zeros(r, r.load_E), _or_zeros(r, r.score_E)] for r in routers])
    loads = torch.stack([(load.max() / load.mean().clamp(min=1e-9)) for load, _ in sums])
    losses = [
        router.num_experts * torch.dot(load / load.sum(), score / score.sum())
        for router, (load, score) in zip(routers, sums, strict=True)
        if router.balance == "aux_loss"
    ]
    return RouterMetrics(loads.max(), torch.stack(losses).mean() if losses else None)


@torch.no_grad()
def end_router_step(model: nn.Module, *, found_inf: Tensor | bool = False) -> None:
    """Move the biases of a model's experts by the loads of a step, and begin to count the next.

    Every rank calls it alike, after each optimizer step. Collective over all ranks where there are
    biases: one all-reduce for all layers. Biases are equal on all ranks, bit by bit. Without tokens
    since the last call it changes nothing.

    Args:
        model: The model.
        found_inf: Whether the optimizer skipped its step, alike on all ranks: then biases stay. As
            a 0-dim tensor on the device, zero for a step that was taken, the host does not read it.
    """
    routers = _routers(model)
    biased = [router for router in routers if router.expert_bias is not None]
    if biased:
        is_taken = found_inf == 0
        for router, (load,) in zip(
            biased, _summed([[_or_zeros(r, r.load_E)] for r in biased]), strict=True
        ):
            assert router.expert_bias is not None, "chosen above"
            error = torch.sign(load.mean() - load).to(router.expert_bias.dtype) * is_taken
            router.expert_bias.add_(error, alpha=router.bias_update_rate)
    for router in routers:
        router.load_E = router.score_E = None


def _without_padding(x_NE: Tensor, batch: RoutedBatch) -> Tensor:
    """Return values of tokens with zeros for those that pad a sequence."""
    if batch.is_padding_N is None:
        return x_NE
    return x_NE.masked_fill(batch.is_padding_N.unsqueeze(1), 0)


def _routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def _or_zeros(router: Router, counted: Tensor | None) -> Tensor:
    if counted is None:
        return torch.zeros(router.num_experts, dtype=torch.float64, device=router.weight.device)
    return counted.double()


def _summed(by_router: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return the sums over all ranks of tensors of the routers, by one all-reduce."""
    flat = torch.cat([each for tensors in by_router for each in tensors])
    all_reduce(flat, label="loads of experts")
    pieces = iter(flat.split([len(each) for tensors in by_router for each in tensors]))
    return [[next(pieces) for _ in tensors] for tensors in by_router]
