"""Mixtures of experts: the layer against loops, the model against transformers, and over ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import megafsdp
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models import TransformerLayer
from megafsdp.models.common import MLP
from megafsdp.models.language_model import LanguageModel
from megafsdp.models.moe import MoE, SharedExperts
from megafsdp.parallel import Router, end_router_step, parallelize, router_metrics
from tests.parallel.cases import MOE, batch_of, build, wholes
from tests.ranks import Ranks


def _expert(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, up = (x @ first.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ second.T


@pytest.mark.parametrize("shared_width", [0, 10])
def test_the_layer_equals_the_naive_formula(shared_width: int) -> None:
    """Token by token: its experts by the router's weights, and what all tokens pass by its gate."""
    config = dataclasses.replace(MOE, shared_expert_ffn_hidden_size=shared_width)
    torch.manual_seed(0)
    layer = MoE(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.float64)
    stacks = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    wanted = torch.empty_like(x)
    for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        scores = (layer.router.weight @ x[b, t]).softmax(0)
        best = scores.topk(config.num_experts_per_token)
        out = torch.zeros(config.hidden_size, dtype=torch.float64)
        for expert, score in zip(best.indices.tolist(), best.values, strict=True):
            out += score / best.values.sum() * _expert(x[b, t], *(s[expert] for s in stacks))
        if (shared := layer.shared_experts) is not None:
            gate = (x[b, t] @ shared.gate_weight[0]).sigmoid()
            out += gate * _expert(x[b, t], shared.linear_fc1.weight, shared.linear_fc2.weight)
        wanted[b, t] = out
    torch.testing.assert_close(layer(x), wanted, rtol=1e-11, atol=1e-11)


def test_routers_are_balanced_as_the_config_says() -> None:
    """Each number of it reaches them."""
    config = dataclasses.replace(
        MOE,
        norm_topk_prob=False,
        router_balance="bias",
        router_aux_loss_coefficient=0.25,
        router_bias_update_rate=0.125,
    )
    router = MoE(config).router
    assert (router.norm_topk_prob, router.balance) == (False, "bias")
    assert (router.aux_loss_coefficient, router.bias_update_rate) == (0.25, 0.125)


def test_gates_compute_in_the_dtype_of_their_weight() -> None:
    """A policy may keep it in fp32; the result has the dtype of the input."""
    layer = SharedExperts(dataclasses.replace(MOE, shared_expert_ffn_hidden_size=10)).bfloat16()
    layer.gate_weight = nn.Parameter(torch.randn(1, MOE.hidden_size))
    x = torch.randn(2, 5, MOE.hidden_size).bfloat16()
    gate = (x.float() @ layer.gate_weight.T).sigmoid().bfloat16()
    torch.testing.assert_close(layer(x), gate * MLP.forward(layer, x), rtol=0, atol=0)


def _as_transformers(model: LanguageModel) -> Qwen3MoeForCausalLM:
    """Build the model of transformers with the same weights, copied by hand."""
    config = model.config
    theirs = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            head_dim=config.head_dim,
            moe_intermediate_size=config.moe_ffn_hidden_size,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_token,
            norm_topk_prob=config.norm_topk_prob,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    groups, width = config.num_query_groups, config.head_dim
    heads = config.num_attention_heads // groups
    ours = model.state_dict()
    copied = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
        "lm_head.weight": ours["output_layer.weight"],
    }
    for index in range(config.num_layers):
        of, to = f"decoder.layers.{index}.", f"model.layers.{index}."
        qkv = ours[of + "self_attention.linear_qkv.weight"].unflatten(0, (groups, -1))
        parts = qkv.split((heads * width, width, width), dim=1)
        for name, part in zip("qkv", parts, strict=True):
            copied[f"{to}self_attn.{name}_proj.weight"] = part.flatten(0, 1)
        for theirs_name, name in (
            ("self_attn.o_proj.weight", "self_attention.linear_proj.weight"),
            ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight"),
            ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight"),
            ("input_layernorm.weight", "input_layernorm.weight"),
            ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),
            ("mlp.gate.weight", "mlp.router.weight"),
            ("mlp.experts.gate_up_proj", "mlp.experts.linear_fc1.weight"),
            ("mlp.experts.down_proj", "mlp.experts.linear_fc2.weight"),
        ):
            copied[to + theirs_name] = ours[of + name]
    theirs.load_state_dict(copied)
    return theirs


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_logits_equal_those_of_transformers(norm_topk_prob: bool) -> None:
    """In fp32, of weights far from those that a layer begins with."""
    config = dataclasses.replace(MOE, norm_topk_prob=norm_topk_prob)
    model = build(config, torch.float32)
    theirs = _as_transformers(model)
    tokens, _, _ = batch_of(3, 11)
    with torch.no_grad():
        found, wanted = model(tokens), theirs(tokens).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


_BALANCED = {
    balance: dataclasses.replace(
        MOE,
        shared_expert_ffn_hidden_size=8,
        router_balance=balance,
        router_aux_loss_coefficient=0.5,
    )
    for balance in ("none", "aux_loss", "bias")
}


def _train(model: LanguageModel, rank: int, num_data: int, length: int = 8) -> dict[str, Tensor]:
    """Take two steps of SGD; return losses, the first gradients, and last weights and buffers."""
    found = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        loss = model(*[part.chunk(num_data)[rank] for part in batch_of(4, length, step)])
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0:
            found |= {f"gradient of {n}": grad.clone() for n, _, grad in wholes(model)}
        else:
            found |= {name: weight.clone() for name, weight, _ in wholes(model)}
        optimizer.step()
        optimizer.zero_grad()
        metrics = router_metrics(model)
        assert metrics is not None
        found[f"largest load {step}"] = metrics.max_load
        if metrics.aux_loss is not None:
            found[f"auxiliary loss {step}"] = metrics.aux_loss
        end_router_step(model)
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def _train_on_ranks(
    balances: list[str], dims: ParallelDims, is_sharded: bool, length: int
) -> list[Any]:
    meshes = dims.build("cpu")
    found = []
    for balance in balances:
        model = parallelize(build(_BALANCED[balance]), meshes)
        if is_sharded:
            megafsdp.fully_shard_model(
                model, [TransformerLayer], mesh=meshes.data, expert_mesh=meshes.experts
            )
        found.append(_train(model, meshes.data_rank, meshes.data_size, length))
    return found


@pytest.mark.parametrize(
    ("balances", "dims", "is_sharded", "length"),
    [
        (["none", "aux_loss", "bias"], ParallelDims(dp_shard=2, ep=2), True, 8),
        (["aux_loss"], ParallelDims(dp_shard=1, tp=2), True, 8),
        (["aux_loss"], ParallelDims(dp_shard=1, tp=2, ep=2), True, 8),
        (["aux_loss"], ParallelDims(dp_shard=1, tp=2, ep=2), False, 8),
        (["aux_loss"], ParallelDims(dp_shard=2, tp=2, ep=2), True, 8),
        (["none", "aux_loss", "bias"], ParallelDims(dp_shard=1, tp=2), True, 7),
        # Of 8 tokens the last rank of tp has padding alone, where that of cp has the last chunk.
        (["none", "aux_loss", "bias"], ParallelDims(dp_shard=1, cp=2, tp=2), True, 5),
    ],
    ids=["ep", "tp", "ep x tp", "ep x tp alone", "ep x tp x edp", "tp, padded", "cp x tp, padded"],
)
def test_two_steps_equal_one_process(
    ranks: Ranks, balances: list[str], dims: ParallelDims, is_sharded: bool, length: int
) -> None:
    """Losses, gradients, weights, loads and biases, in fp64, where no two scores are near."""
    num_ranks = dims.dp_shard * dims.cp * dims.tp
    by_rank = ranks(num_ranks).run(_train_on_ranks, balances, dims, is_sharded, length)
    for index, balance in enumerate(balances):
        model = build(_BALANCED[balance])
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        wanted = _train(model, 0, 1, length)
        for name, expected in wanted.items():
            found = [of_rank[index][name] for of_rank in by_rank]
            if name.startswith("loss"):
                found = [torch.stack(found).mean()]
            for tensor in found:
                # Sums over ranks in another order.
                torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9, msg=name)
        assert all(not torch.equal(before[name], wanted[name]) for name in before)
        for router in (m for m in model.modules() if isinstance(m, Router)):
            assert balance != "bias" or router.expert_bias.any()  # type: ignore[union-attr]
