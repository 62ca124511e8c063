"""Layers against naive formulas; initial values; annotations that survive conversions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megafsdp.mesh.annotation import FusedParts, annotation_of
from megafsdp.models import ModelConfig, build_model, presets
from megafsdp.models.common import (
    MLP,
    SelfAttention,
    rotary_factors,
    rotary_table,
    rotate,
)
from megafsdp.parallel import LayerNorm, Linear, RMSNorm

_CONFIG = ModelConfig(hidden_size=24, num_attention_heads=4, num_query_groups=2, head_dim=8)


def _rotate_naively(x: Tensor, theta: float) -> Tensor:
    """Rotate pairs (i, i + D / 2) of (B, T, N, D) by complex multiplication in fp64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    for position in range(x.shape[1]):
        for pair in range(half):
            angle = position * theta ** (-pair / half)
            pairs[:, position, :, pair] *= complex(math.cos(angle), math.sin(angle))
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def _attend_naively(layer: SelfAttention, x: Tensor, theta: float) -> Tensor:
    """Attention head by head, with the rows of the fused weight picked one by one."""
    weight, head_dim = layer.linear_qkv.weight, layer.head_dim
    per_group = layer.heads_per_group * (2 if layer.has_output_gate else 1) + 2

    def projected(group: int, slot: int) -> Tensor:
        start = (group * per_group + slot) * head_dim
        return x @ weight[start : start + head_dim].T

    def rotated(head: Tensor) -> Tensor:
        return _rotate_naively(head.unsqueeze(2), theta).squeeze(2).float()

    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    heads = []
    for group in range(layer.num_query_groups):
        key = rotated(layer.k_layernorm(projected(group, per_group - 2)))
        value = projected(group, per_group - 1)
        for slot in range(layer.heads_per_group):
            query = rotated(layer.q_layernorm(projected(group, slot)))
            scores = query @ key.transpose(1, 2) / math.sqrt(head_dim)
            read = scores.masked_fill(future, -math.inf).softmax(-1) @ value
            if layer.has_output_gate:
                read = read / (1 + torch.exp(-projected(group, layer.heads_per_group + slot)))
            heads.append(read)
    return torch.cat(heads, dim=-1) @ layer.linear_proj.weight.T


def test_rotation_equals_complex_multiplication() -> None:
    """Every pair turns by position times frequency."""
    x = torch.randn(2, 9, 3, 8)
    rotated = rotate(x, *rotary_factors(rotary_table(9, 8, 100.0)))
    # fp32 angles up to 9 against fp64 ones.
    torch.testing.assert_close(rotated, _rotate_naively(x, 100.0).float(), rtol=0, atol=2e-6)


def test_rotary_table_is_not_rounded_by_a_bf16_model() -> None:
    """Far positions keep distinct angles: the arithmetic is fp32 up to the rotated head."""
    x = torch.ones(1, 3000, 1, 8, dtype=torch.bfloat16)
    rotated = rotate(x, *rotary_factors(rotary_table(3000, 8, 10_000.0)))
    assert rotated.dtype == torch.bfloat16
    wanted = _rotate_naively(x, 10_000.0).to(torch.bfloat16)
    # One bf16 rounding of numbers up to 1.42; angles rounded to bf16 would be off by 8 radians.
    torch.testing.assert_close(rotated, wanted, rtol=0, atol=2**-7)


def test_a_part_of_each_head_is_rotated() -> None:
    """The first elements, as heads of that size are; the others stay as they are, bit for bit."""
    x = torch.randn(2, 9, 3, 8)
    rotated = rotate(x, *rotary_factors(rotary_table(9, 4, 100.0)))
    wanted = _rotate_naively(x[..., :4], 100.0).float()
    torch.testing.assert_close(rotated[..., :4], wanted, rtol=0, atol=2e-6)
    assert torch.equal(rotated[..., 4:], x[..., 4:]) and rotated.shape == x.shape


@pytest.mark.parametrize("has_output_gate", [False, True])
@pytest.mark.parametrize("num_query_groups", [1, 2, 4])
def test_attention_equals_the_naive_formula(num_query_groups: int, has_output_gate: bool) -> None:
    """Grouped rows, head norms, rotation, causality and output gates, head by head."""
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=24, num_attention_heads=4, num_query_groups=num_query_groups, head_dim=8
    )
    layer = SelfAttention(
        config, has_bias=False, has_head_norms=True, has_output_gate=has_output_gate
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 6, 24)
    output = layer(x, rotary_table(6, 8, config.rope_theta))
    # fp32 sums of 24 to 32 products of numbers around 5.
    torch.testing.assert_close(
        output, _attend_naively(layer, x, config.rope_theta), rtol=1e-4, atol=1e-4
    )


def test_gated_mlp_takes_gate_first() -> None:
    """SwiGLU is silu of the first half of the rows times the second."""
    layer = MLP(_CONFIG, has_bias=False)
    x = torch.randn(2, 3, 24)
    gate, up = layer.linear_fc1.weight.split(_CONFIG.ffn_hidden_size)
    wanted = (x @ gate.T * torch.sigmoid(x @ gate.T) * (x @ up.T)) @ layer.linear_fc2.weight.T
    torch.testing.assert_close(layer(x), wanted)


def test_parameters_declare_what_cuts_them() -> None:
    """Column-parallel dim 0, row-parallel dim 1, fused parts by group; norms stay whole."""
    model = build_model(ModelConfig(architecture="gpt", num_query_groups=2, num_layers=1), seed=0)
    declared = {name: annotation_of(p) for name, p in model.named_parameters()}
    qkv = FusedParts(("query", "key", "value"), (64, 32, 32), num_groups=2)
    layer = "decoder.layers.0"
    assert declared["embedding.word_embeddings.weight"].tp_dim == 0
    assert declared["embedding.position_embeddings.weight"].tp_dim is None
    for name in ("weight", "bias"):
        assert declared[f"{layer}.self_attention.linear_qkv.{name}"].tp_dim == 0
        assert declared[f"{layer}.self_attention.linear_qkv.{name}"].fused == qkv
    assert declared[f"{layer}.self_attention.linear_proj.weight"].tp_dim == 1
    assert declared[f"{layer}.self_attention.linear_proj.bias"].tp_dim is None
    assert declared[f"{layer}.mlp.linear_fc1.weight"].fused is None
    assert declared[f"{layer}.input_layernorm.weight"].tp_dim is None
    summed = {name for name, annotation in declared.items() if annotation.sums_over_tp}
    assert summed == {name for name, annotation in declared.items() if annotation.tp_dim is None}
    gated = build_model(ModelConfig(num_layers=1), seed=0).decoder.layers[0].mlp.linear_fc1
    stored_as = ("{module}.{parameter}_w", "{module}.{parameter}_v")
    gate_and_up = FusedParts(("gate", "up"), (384, 384), stored_as=stored_as)
    assert annotation_of(gated.weight).fused == gate_and_up


@pytest.mark.parametrize("convert", ["to_empty", "to"])
def test_annotations_survive_conversion(convert: str) -> None:
    """to_empty() makes new Parameter objects, which must carry the declarations too."""
    fused = FusedParts(("a", "b"), (2, 4))
    layer = Linear(4, 6, parallel_mode="column", fused=fused).to("meta")
    before = annotation_of(layer.weight)
    converted = layer.to_empty(device="cpu") if convert == "to_empty" else layer.to(torch.bfloat16)
    assert before.fused is not None
    assert annotation_of(converted.weight) == before
    assert annotation_of(converted.bias).fused == before.fused


@pytest.mark.parametrize("norm", [RMSNorm(8), LayerNorm(8)])
def test_a_norm_kept_in_fp32_computes_in_fp32(norm: torch.nn.Module) -> None:
    """With an fp32 weight a bf16 input is rounded once, at the end, and stays bf16."""
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    output = norm(x)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, norm(x.float()).to(torch.bfloat16))


def test_a_zero_centered_norm_is_not_rounded_beside_one() -> None:
    """Its factor is 1 + w, of zeros at first; unlike 1 + w, a small w is not lost in bf16."""
    norm = RMSNorm(8, zero_centered=True)
    assert torch.all(norm.weight == 0)
    x = torch.randn(5, 8)
    assert torch.equal(norm(x), RMSNorm(8)(x))
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8) / 1024)
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + torch.arange(8) / 1024)
    torch.testing.assert_close(norm(x), wanted)
    norm.bfloat16()
    torch.testing.assert_close(norm(x), wanted)
    output = norm(x.bfloat16())
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, norm(x.bfloat16().float()).bfloat16())
    norm(x).sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(architecture="gpt", num_query_groups=4, init_std=0.05),
        dataclasses.replace(presets["qwen3-moe-toy"], init_std=0.05),
    ],
    ids=["gpt", "experts"],
)
def test_initial_values_have_the_stated_spread(config: ModelConfig) -> None:
    """Output projections are scaled by 1 / sqrt(2 L), norms are 1, biases 0, the rest init_std."""
    for name, parameter in build_model(config, seed=1).named_parameters():
        if "layernorm.weight" in name:
            assert torch.all(parameter == 1), name
        elif name.endswith("bias"):
            assert torch.all(parameter == 0), name
        else:
            is_output = "linear_proj" in name or "linear_fc2" in name
            wanted = 0.05 / math.sqrt(2 * config.num_layers) if is_output else 0.05
            # The spread of a sample's standard deviation is 1 / sqrt(2 n); five of them.
            tolerance = 5 / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() / wanted - 1) < tolerance, name
            assert abs(parameter.mean().item()) / wanted < 2 * tolerance, name
