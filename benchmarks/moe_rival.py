"""The mixture of experts that ours is compared with, made of torch's public API only.

The same Qwen3-MoE in plain torch under FSDP2, with expert parallelism by all-to-all in the manner
of torchtitan: stacks of experts are DTensors cut on dim 0 over the ep axis, sharded as units of
their own if several ranks have the same experts; copies of tokens are sorted by expert, exchanged
by counts, sorted again, multiplied by ``grouped_mm``, and brought back. If torch has several ways
to a result, the one that was the fastest on a CPU is used. Only the description of the model is
imported from megafsdp.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.steps_in_turn import Side, adamw
from megafsdp.models import ModelConfig


class _Attention(nn.Module):
    """Grouped queries, normed heads, rotary positions; rows of ``qkv`` repeat [q; k; v] a group."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_queries = config.num_attention_heads // config.num_query_groups
        width = config.query_size + 2 * config.key_size
        self.qkv = nn.Linear(config.hidden_size, width, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
        self.proj = nn.Linear(config.query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.num_queries + 2, self.head_dim))
        q, k, v = heads.split((self.num_queries, 1, 1), dim=3)
        q = _rotate(self.q_norm(q.flatten(2, 3)), cos, sin)
        k = _rotate(self.k_norm(k.flatten(2, 3)), cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.flatten(2, 3).transpose(1, 2)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(context.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


class _Experts(nn.Module):
    """Stacks (E, 2I, H), gate above up, and (E, H, I).

    Attributes:
        grad_divisor: What the gradients are divided by here; 1 if FSDP2 divides them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        self.fc1 = nn.Parameter(torch.empty(config.num_experts, 2 * width, hidden))
        self.fc2 = nn.Parameter(torch.empty(config.num_experts, hidden, width))
        self.grad_divisor = 1

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        fc1, fc2 = _local(self.fc1), _local(self.fc2)
        if self.grad_divisor > 1:
            for weight in (fc1, fc2):
                weight.register_hook(lambda grad: grad / self.grad_divisor)
        gate, up = F.grouped_mm(rows, fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, fc2.transpose(1, 2), offs=ends)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Mixture(nn.Module):
    """Router, dispatch and experts.

    Attributes:
        ep: The ranks that share out the experts; set by :func:`cut_experts`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_choices = config.num_experts_per_token
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = _Experts(config)
        self.ep: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, H) to the weighted sum of each token's experts; collective over ep."""
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.num_choices)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.gate.out_features)
        rows = self._exchange(_rows(flat, order // self.num_choices), counts)
        copies = _rows(rows, _inverse(order)).view(len(flat), self.num_choices, -1)
        return torch.bmm(weights.unsqueeze(1), copies).view_as(x)

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Pass rows in the order of experts through the ranks that have them."""
        assert self.ep is not None, "cut_experts() comes first"
        num_ranks = self.ep.size()
        with torch.no_grad():
            arriving = funcol.all_to_all_single(counts, None, None, self.ep)
            arriving = funcol.wait_tensor(arriving).view(num_ranks, -1)
            sent = counts.view(num_ranks, -1).sum(1).tolist()
            received = arriving.sum(1).tolist()
            own = torch.arange(arriving.shape[1], device=rows.device).repeat(num_ranks)
            order = own.repeat_interleave(arriving.flatten()).argsort(stable=True)
        rows = funcol.all_to_all_single_autograd(rows, received, sent, self.ep)
        rows = self.experts(_rows(rows, order), arriving.sum(0))
        rows = _rows(rows, _inverse(order))
        return funcol.all_to_all_single_autograd(rows, sent, received, self.ep)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(0, index.unsqueeze(1).expand(-1, x.shape[1]))


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = _Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mixture = Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mixture(self.norm2(x))


class TorchMoE(nn.Module):
    """The model of a config in torch's own modules, in the order of our parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the labels."""
        cos, sin = self._rotary_factors(tokens)
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _rotary_factors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (T, 1, head_dim), the sines of first halves negated."""
        head_dim = self.config.head_dim
        exponents = torch.arange(0, head_dim, 2, device=tokens.device) / head_dim
        places = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(places, self.config.rope_theta**-exponents)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def build(model: TorchMoE, num_ep: int, device_type: str) -> Side:
    """Cut the experts over ep, shard all under FSDP2, and make the optimizer; collective."""
    num_ranks = dist.get_world_size()
    data = init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("dp",))
    shape = (num_ranks // num_ep, num_ep)
    experts = init_device_mesh(device_type, shape, mesh_dim_names=("edp", "ep"))
    alone: set[nn.Parameter] = set()
    for layer in model.layers:
        assert isinstance(layer, _Layer)
        cut_experts(layer.mixture, experts["ep"])
        stacks = layer.mixture.experts
        # The gradients of an expert sum the tokens of all ranks.
        if shape[0] > 1:
            fully_shard(stacks, mesh=experts["edp"]).set_gradient_divide_factor(num_ranks)
            # gloo cannot sum with a factor.
            stacks.set_force_sum_reduction_for_comms(True)
        else:
            # FSDP2 would copy them to a buffer and back, though one rank has nothing to gather.
            stacks.grad_divisor = num_ranks
            alone.update(stacks.parameters())
    for module in (*model.layers, model):
        fully_shard(module, mesh=data, ignored_params=alone)
    optimizer = adamw([{"params": group} for group in _by_mesh(model.parameters())])
    return Side(model, optimizer, _clip_grad_norm)


def cut_experts(mixture: Mixture, ep: DeviceMesh) -> None:
    """Turn the stacks of a mixture into DTensors cut over ep; collective."""
    mixture.ep = ep.get_group()
    for name, weight in list(mixture.experts.named_parameters()):
        cut = nn.Parameter(distribute_tensor(weight.detach(), ep, [Shard(0)]))
        setattr(mixture.experts, name, cut)


def _clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip by the norm of all gradients; each rank has parts that no other rank has."""
    groups = _by_mesh(parameters)
    grads = [_local(p.grad) for group in groups for p in group if p.grad is not None]
    square = nn.utils.get_total_norm(grads) ** 2
    dist.all_reduce(square)
    norm = square.sqrt()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group sharded parameters by mesh, as torch's foreach operators do not mix meshes."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor), "FSDP2 has sharded it"
        groups.setdefault(parameter.device_mesh, []).append(parameter)
    return list(groups.values())
