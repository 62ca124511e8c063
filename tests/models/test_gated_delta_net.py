"""Gated DeltaNet against its formula token by token, cut by tensor parallelism, and in bf16."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import megafsdp
from megafsdp import MixedPrecisionPolicy
from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.mesh.annotation import annotation_of
from megafsdp.models import ModelConfig, gated_delta_net
from megafsdp.models.gated_delta_net import CausalConvolution, GatedDeltaNet
from tests.parallel.cases import wholes
from tests.ranks import Ranks

_CONFIG = ModelConfig(
    architecture="qwen3_next",
    num_layers=2,
    hidden_size=12,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=8,
    vocab_size=24,
    max_sequence_length=16,
    init_std=0.4,
    num_experts=2,
    num_experts_per_token=1,
    moe_ffn_hidden_size=8,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
    linear_conv_kernel=3,
)
_ROWS = {"query": 6, "key": 6, "value": 20, "z": 20, "beta": 4, "alpha": 4}


def _layer(config: ModelConfig = _CONFIG, dtype: torch.dtype = torch.float64) -> GatedDeltaNet:
    torch.manual_seed(0)
    layer = GatedDeltaNet(config).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
    return layer


def _by_hand(layer: GatedDeltaNet, x: Tensor) -> Tensor:
    """The layer head by head and token by token, for one sequence (T, H)."""
    rows = dict(zip(_ROWS, layer.in_proj.weight.split(list(_ROWS.values())), strict=True))
    projected = {name: x @ weight.T for name, weight in rows.items()}
    mixed = torch.cat([projected[name] for name in ("query", "key", "value")], dim=-1)
    convolved = torch.zeros_like(mixed)
    for t in range(len(x)):
        # The last of the kernel's columns meets the token itself.
        for back in range(min(3, t + 1)):
            convolved[t] += mixed[t - back] * layer.conv1d.weight[:, 0, 2 - back]
    convolved = convolved * torch.sigmoid(convolved)
    q, k, v = convolved.split((6, 6, 20), dim=-1)
    heads = []
    for head in range(4):
        group, out = head // 2, []
        state = torch.zeros(3, 5, dtype=x.dtype)
        for t in range(len(x)):
            query, key = (y[t, 3 * group : 3 * group + 3] for y in (q, k))
            query, key = (y / (y @ y + 1e-6).sqrt() for y in (query, key))
            step = (projected["alpha"][t, head] + layer.dt_bias[head]).exp().log1p()
            state = state * (-layer.A_log[head].exp() * step).exp()
            error = v[t, 5 * head : 5 * head + 5] - key @ state
            state = state + torch.outer(key, projected["beta"][t, head].sigmoid() * error)
            out.append(query @ state / 3**0.5)
        read = torch.stack(out)
        normed = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gate = projected["z"][:, 5 * head : 5 * head + 5]
        heads.append(normed * layer.out_norm.weight * gate * torch.sigmoid(gate))
    return torch.cat(heads, dim=-1) @ layer.out_proj.weight.T


def test_the_layer_equals_its_formula() -> None:
    """Order of the rows, convolution, decay, heads of a group, norm and gate, and gradients."""
    layer, x = _layer(), torch.randn(2, 7, 12, dtype=torch.float64)
    out = layer(x)
    wanted = torch.stack([_by_hand(layer, row) for row in x])
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    got = torch.autograd.grad((out * weights).sum(), parameters)
    by_hand = torch.autograd.grad((wanted * weights).sum(), parameters)
    for name, a, b in zip(names, got, by_hand, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)


def test_names_shapes_and_declarations() -> None:
    """Names and shapes are Megatron-core's; each part is stored by itself, and cut by itself."""
    layer = _layer()
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "A_log": (4,),
        "dt_bias": (4,),
        "in_proj.weight": (60, 12),
        "conv1d.weight": (32, 1, 3),
        "out_norm.weight": (5,),
        "out_proj.weight": (12, 20),
    }
    declared = {name: annotation_of(p) for name, p in layer.named_parameters()}
    assert [a.tp_dim for a in declared.values()] == [0, 0, 0, 0, None, 1]
    assert [name for name, a in declared.items() if a.sums_over_tp] == ["out_norm.weight"]
    fused = declared["in_proj.weight"].fused
    assert fused is not None and dict(zip(fused.names, fused.sizes, strict=True)) == _ROWS
    assert fused.stored_as == tuple("{module}.{parameter}." + name for name in _ROWS)
    fused = declared["conv1d.weight"].fused
    assert fused is not None and fused.names == ("query", "key", "value")
    assert fused.stored_as == tuple("{module}.{parameter}." + name for name in fused.names)


def test_initial_values() -> None:
    """Decay rates even from 0 to 16, ``dt_bias`` and the norm ones, the convolution uniform."""
    config = dataclasses.replace(_CONFIG, linear_num_value_heads=400, linear_num_key_heads=400)
    torch.manual_seed(0)
    layer = GatedDeltaNet(config)
    rates_N = layer.A_log.exp()
    torch.testing.assert_close(rates_N, (torch.arange(400) + 0.5) * 16 / 400)
    assert torch.all(layer.dt_bias == 1) and torch.all(layer.out_norm.weight == 1)
    bound = 3**-0.5
    assert 0.99 * bound < layer.conv1d.weight.abs().max() <= bound
    assert abs(layer.in_proj.weight.std() / 0.4 - 1) < 0.02
    # Half of that of the others: two layers.
    assert abs(layer.out_proj.weight.std() / 0.2 - 1) < 0.02


def _refuse() -> None:
    layer = _layer(dataclasses.replace(_CONFIG, linear_num_key_heads=1))
    with pytest.raises(ValueError, match=r"divides the 1 key heads.*linear_num_key_heads"):
        layer.set_device_mesh(tp_mesh=init_device_mesh("cpu", (2,)))
    assert type(layer.A_log.data) is Tensor


def test_a_degree_that_does_not_divide_the_key_heads_is_refused(ranks: Ranks) -> None:
    """Named as the config has them, before anything is cut."""
    ranks(2).run(_refuse)


def _run(length: int) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, int]]:
    """Return output, gradients by parameter, that of the input, and collectives."""
    layer = _layer()
    x = torch.randn(2, length, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = x.flip(1)
    rank, size = 0, 1
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        layer.set_device_mesh(tp_mesh=init_device_mesh("cpu", (size,)))
    # With tp each rank has its part of the sequence outside of the layer.
    own, own_weights = (y.chunk(size, dim=1)[rank] for y in (x, weights))
    own = own.clone().requires_grad_()
    with record_collectives() as calls:
        out = layer(own)
        (out * own_weights).sum().backward()
    assert own.grad is not None
    return out.detach(), {n: grad for n, _, grad in wholes(layer)}, own.grad, dict(calls.calls)


def test_two_ranks_of_tp_equal_one_process(ranks: Ranks) -> None:
    """Outputs, the input's gradient and all parameters'; a gather and a reduce-scatter each way."""
    out, grads, of_input, _ = _run(10)
    by_rank = ranks(2).run(_run, 10)
    # fp64 sums of a few dozen terms in another order.
    for index, whole in ((0, out), (2, of_input)):
        joined = torch.cat([found[index] for found in by_rank], dim=1)
        torch.testing.assert_close(joined, whole, rtol=1e-9, atol=1e-11)
    for _, found, _, calls in by_rank:
        assert calls == {"all_gather": 2, "reduce_scatter": 2}
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-11, msg=name)


def _run_in_bf16(keep_fp32: tuple[str, ...]) -> tuple[Tensor, set[str]]:
    layer = _layer(dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, keep_fp32=keep_fp32)
    megafsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    seen = set()

    def look(module: GatedDeltaNet, *_: object) -> None:
        seen.update(n for n, p in module.named_parameters() if p.dtype == torch.float32)

    layer.conv1d.register_forward_hook(lambda *_: look(layer))
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))
    return layer(x.bfloat16()).detach(), seen


def test_decays_compute_in_fp32_where_the_policy_says(ranks: Ranks) -> None:
    """In bf16 the layer is near that of fp32; parameters stay fp32 if ``keep_fp32`` asks."""
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = _layer(dtype=torch.float32)(x.float())
    for keep_fp32 in ((), ("A_log", "dt_bias"), ("conv1d.weight",)):
        for out, kept in ranks(2).run(_run_in_bf16, keep_fp32):
            assert kept == set(keep_fp32) and out.dtype == torch.bfloat16
            # Weights and activations are rounded to 8 bits.
            error = (out.float() - wanted).abs().max() / wanted.abs().max()
            assert 0 < error < 0.05


def test_decays_and_corrections_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16 numbers: a rounded decay would be off by as much in each of many tokens."""
    layer, x, given = _layer(dtype=torch.bfloat16), torch.randn(2, 7, 12).bfloat16(), {}
    rule = gated_delta_net.gated_delta_rule

    def look(*args: Tensor, **named: Tensor) -> Tensor:
        given.update(named)
        return rule(*args, **named)

    monkeypatch.setattr(gated_delta_net, "gated_delta_rule", look)
    layer(x)
    beta, alpha = (part.float() for part in layer.in_proj(x)[..., -8:].chunk(2, dim=-1))
    steps = torch.nn.functional.softplus(alpha + layer.dt_bias)
    assert torch.equal(given["log_decay_BTN"], -layer.A_log.float().exp() * steps)
    assert torch.equal(given["beta_BTN"], beta.sigmoid())


def test_the_convolution_calls_a_kernel_as_its_package_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Channels before tokens, a weight of two dims, and SiLU inside."""
    torch.manual_seed(0)
    layer, x = CausalConvolution((2, 2, 3), 4), torch.randn(2, 5, 7)
    wanted = layer(x)

    def kernel(x: Tensor, weight: Tensor, activation: str) -> Tensor:
        assert x.shape == (2, 7, 5) and x.is_contiguous() and activation == "silu"
        padded = torch.nn.functional.pad(x, (3, 0))
        out = sum(padded[..., i : i + 5] * weight[:, i, None] for i in range(4))
        return torch.nn.functional.silu(out)

    monkeypatch.setattr(gated_delta_net, "convolution_kernel_for", lambda x, width: kernel)
    torch.testing.assert_close(layer(x), wanted)
    # A policy may keep the weight in fp32 alone.
    torch.testing.assert_close(layer(x.bfloat16()), layer(x.bfloat16().float()).bfloat16())
