"""Qwen3-Next: which layer is which, and the same logits as Hugging Face's model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafsdp.mesh.annotation import annotation_of
from megafsdp.models import (
    ActivationCheckpointing,
    LanguageModel,
    ModelConfig,
    build_model,
    presets,
)
from megafsdp.models.common import SelfAttention
from megafsdp.models.gated_delta_net import GatedDeltaNet
from tests.defaults import torch_defaults
from tests.parallel.cases import batch_of, build, mesh_of, wholes
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers")

_CONFIG = ModelConfig(
    architecture="qwen3_next",
    num_layers=3,
    hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    vocab_size=320,
    max_sequence_length=96,
    tie_embeddings=False,
    init_std=0.2,
    num_experts=8,
    num_experts_per_token=3,
    moe_ffn_hidden_size=24,
    shared_expert_ffn_hidden_size=16,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rotary_fraction=0.25,
)


def _hugging_face(config: ModelConfig) -> nn.Module:
    """Build transformers' model of a config, with weights that show where each is applied."""
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_query_groups,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_sequence_length,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.rotary_fraction,
            },
            linear_conv_kernel_dim=config.linear_conv_kernel,
            linear_key_head_dim=config.linear_key_head_dim,
            linear_value_head_dim=config.linear_value_head_dim,
            linear_num_key_heads=config.linear_num_key_heads,
            linear_num_value_heads=config.linear_num_value_heads,
            moe_intermediate_size=config.moe_ffn_hidden_size,
            shared_expert_intermediate_size=config.shared_expert_ffn_hidden_size,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_token,
            norm_topk_prob=config.norm_topk_prob,
            layer_types=list(config.layer_types),
            use_cache=False,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            else:
                # Wide embeddings: the norm of what linear attention reads multiplies rounding.
                nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.1)
    return model


def _in_groups(weight: Tensor, sizes: list[int], num_groups: int) -> list[Tensor]:
    """Take parts that lie group by group apart; each part's rows are joined over the groups."""
    rows = weight.unflatten(0, (num_groups, sum(sizes)))
    return [part.flatten(0, 1) for part in rows.split(sizes, dim=1)]


def _translate(config: ModelConfig, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our state of their state, by hand."""
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}."
        state = {k.removeprefix(prefix): v for k, v in theirs.items() if k.startswith(prefix)}
        mixer = _delta(config, state) if kind == "linear_attention" else _attention(config, state)
        layer = {f"self_attention.{name}": weight for name, weight in mixer.items()}
        layer |= {
            "input_layernorm.weight": state["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": state["post_attention_layernorm.weight"],
            "mlp.router.weight": state["mlp.gate.weight"],
            "mlp.experts.linear_fc1.weight": state["mlp.experts.gate_up_proj"],
            "mlp.experts.linear_fc2.weight": state["mlp.experts.down_proj"],
            "mlp.shared_experts.linear_fc1.weight": torch.cat(
                [state[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up")]
            ),
            "mlp.shared_experts.linear_fc2.weight": state["mlp.shared_expert.down_proj.weight"],
            "mlp.shared_experts.gate_weight": state["mlp.shared_expert_gate.weight"],
        }
        ours |= {f"decoder.layers.{index}.{name}": weight for name, weight in layer.items()}
    return ours


def _delta(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    num_groups = config.linear_num_key_heads
    per_group = config.linear_num_value_heads // num_groups
    keys, values = config.linear_key_head_dim, per_group * config.linear_value_head_dim
    qkvz = _in_groups(
        state["linear_attn.in_proj_qkvz.weight"], [keys, keys, values, values], num_groups
    )
    beta_alpha = _in_groups(state["linear_attn.in_proj_ba.weight"], [per_group] * 2, num_groups)
    return {
        "in_proj.weight": torch.cat([*qkvz, *beta_alpha]),
        "conv1d.weight": state["linear_attn.conv1d.weight"],
        "A_log": state["linear_attn.A_log"],
        "dt_bias": state["linear_attn.dt_bias"],
        "out_norm.weight": state["linear_attn.norm.weight"],
        "out_proj.weight": state["linear_attn.out_proj.weight"],
    }


def _attention(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    dim, num_groups = config.head_dim, config.num_query_groups
    query, gate = _in_groups(
        state["self_attn.q_proj.weight"], [dim] * 2, config.num_attention_heads
    )
    parts = [query, gate, state["self_attn.k_proj.weight"], state["self_attn.v_proj.weight"]]
    return {
        "linear_qkv.weight": torch.cat(
            [
                rows
                for parts in zip(*(p.chunk(num_groups) for p in parts), strict=True)
                for rows in parts
            ]
        ),
        "linear_proj.weight": state["self_attn.o_proj.weight"],
        "q_layernorm.weight": state["self_attn.q_norm.weight"],
        "k_layernorm.weight": state["self_attn.k_norm.weight"],
    }


def _pair() -> tuple[LanguageModel, nn.Module]:
    theirs = _hugging_face(_CONFIG)
    ours = build_model(_CONFIG)
    ours.load_state_dict(_translate(_CONFIG, theirs.state_dict()))
    return ours, theirs


@pytest.mark.parametrize("length", [5, 90])
def test_logits_equal_those_of_hugging_face(length: int) -> None:
    """Every weight where theirs has it, at lengths of less than a chunk and of several."""
    ours, theirs = _pair()
    tokens = torch.randint(0, _CONFIG.vocab_size, (2, length))
    with torch.no_grad():
        wanted = theirs(input_ids=tokens).logits
        got = ours(tokens)
    assert wanted.std() > 0.5
    # fp32 sums in another order, three layers deep.
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_layers_are_as_the_config_says() -> None:
    """Linear attention and attention by ``layer_types``; without it, attention everywhere."""
    kinds = {"linear_attention": GatedDeltaNet, "full_attention": SelfAttention}
    layers = build_model(_CONFIG).decoder.layers
    assert [type(layer.self_attention) for layer in layers] == [
        kinds[kind] for kind in _CONFIG.layer_types
    ]
    fused = annotation_of(layers[1].self_attention.linear_qkv.weight).fused
    assert fused is not None and fused.num_groups == 2
    # Two query heads to a group, and a gate head for each.
    sizes = {"query": 32, "gate": 32, "key": 16, "value": 16}
    assert dict(zip(fused.names, fused.sizes, strict=True)) == sizes
    assert fused.names == tuple(sizes)
    plain = build_model(dataclasses.replace(_CONFIG, layer_types=()))
    assert all(type(layer.self_attention) is SelfAttention for layer in plain.decoder.layers)


def test_the_released_model_has_the_shape_of_its_config() -> None:
    """As transformers' defaults, which are those of Qwen3-Next-80B-A3B."""
    config, defaults = presets["qwen3-next-80b-a3b"], transformers.Qwen3NextConfig()
    pairs = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_query_groups": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
        "num_experts": "num_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "shared_expert_ffn_hidden_size": "shared_expert_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "linear_num_key_heads": "linear_num_key_heads",
        "linear_num_value_heads": "linear_num_value_heads",
        "linear_key_head_dim": "linear_key_head_dim",
        "linear_value_head_dim": "linear_value_head_dim",
        "linear_conv_kernel": "linear_conv_kernel_dim",
    }
    for name, their_name in pairs.items():
        assert getattr(config, name) == getattr(defaults, their_name), name
    assert list(config.layer_types) == defaults.layer_types
    assert config.rotary_fraction == defaults.rope_parameters["partial_rotary_factor"]


def test_initial_decays_take_no_default_dtype() -> None:
    """They are computed in fp32 where the parameter is."""
    layer = GatedDeltaNet(_CONFIG)
    found = [torch.zeros(4) for _ in range(2)]
    layer.initialize("A_log", found[0])
    with torch_defaults("cpu", torch.bfloat16):
        layer.initialize("A_log", found[1])
    assert torch.equal(*found)


def test_every_parameter_of_the_toy_gets_a_gradient() -> None:
    """Of linear attention, gated attention, norms, router, experts and the shared expert."""
    model = build_model(presets["qwen3-next-toy"], seed=0)
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def _loss_and_gradients(length: int, mode: str = "none") -> tuple[Tensor, dict[str, Tensor]]:
    model = build(_CONFIG)
    model.activation_checkpointing = ActivationCheckpointing(mode)
    if dist.is_initialized():
        model.set_device_mesh(tp_mesh=mesh_of(1, 2)[1])
    loss = model(*batch_of(2, length))
    loss.backward()
    return loss.detach(), {name: grad for name, _, grad in wholes(model)}


def test_two_ranks_of_tp_equal_one_process(ranks: Ranks) -> None:
    """Loss and gradients, of experts too, at a length that tp does not divide."""
    loss, grads = _loss_and_gradients(37)
    for found_loss, found in ranks(2).run(_loss_and_gradients, 37):
        # fp64 sums of a few hundred terms in another order.
        torch.testing.assert_close(found_loss, loss, rtol=1e-11, atol=0)
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert grad.abs().max() > 0, name
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_that_run_again_give_the_same_bits(mode: str) -> None:
    """The rule by chunks draws nothing, and its order of sums is the same each time."""
    loss, grads = _loss_and_gradients(37)
    again, found = _loss_and_gradients(37, mode)
    assert torch.equal(again, loss)
    for name, grad in grads.items():
        assert torch.equal(found[name], grad), name
