"""Model configs to and from the fields of a Hugging Face ``config.json``.

Fields are plain dicts, so nothing is imported from transformers. A field that asks for arithmetic
these models do not have is refused rather than ignored; dropout, which only training reads, is
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from megafsdp.errors import ConfigError, expected
from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig

Fields = Mapping[str, object]

# By model type: fields and the values that we have the arithmetic for, the default first.
_QWEN: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)}
)
_QWEN_MIXTURE: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **_QWEN,
        "mlp_only_layers": (None, []),
        "decoder_sparse_step": (1,),
        # Layers that predict further tokens; configs name their number in either way.
        "num_nextn_predict_layers": (0, None),
        "mtp_num_hidden_layers": (0, None),
    }
)
_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "gpt2": {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        "qwen3": _QWEN,
        "qwen3_moe": _QWEN_MIXTURE,
        "qwen3_next": _QWEN_MIXTURE,
    }
)
_CLASS_NAMES = MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
)
# Widths of a head if the config has none; for other model types heads then fill the hidden size.
_HEAD_DIMS = MappingProxyType({"qwen3": 128, "qwen3_next": 256})
# Query groups if the config names none; for other model types, or with null, one for each head.
_QUERY_GROUPS = MappingProxyType({"qwen3": 32, "qwen3_moe": 4, "qwen3_next": 2})
# Our names of the sizes of linear attention, and Hugging Face's.
_LINEAR_SIZES = MappingProxyType(
    {
        "linear_num_key_heads": "linear_num_key_heads",
        "linear_num_value_heads": "linear_num_value_heads",
        "linear_key_head_dim": "linear_key_head_dim",
        "linear_value_head_dim": "linear_value_head_dim",
        "linear_conv_kernel": "linear_conv_kernel_dim",
    }
)

_Rotary = Literal["llama", "qwen3", "qwen3_moe", "qwen3_next"]


def config_from_hugging_face(
    fields: Fields, *, padded_vocab_size: int | None = None
) -> ModelConfig:
    """Describe the model of a Hugging Face config.

    Args:
        fields: The parsed ``config.json``, or ``config.to_dict()``.
        padded_vocab_size: Rows of the embedding to build; None builds as many as Hugging Face has.

    Returns:
        The config of the same model.

    Raises:
        ConfigError: The model type is not known, a field is missing, or a field asks for arithmetic
            that these models do not have.
    """
    model_type = fields.get("model_type")
    if model_type not in _SUPPORTED:
        raise _refusal("model_type", " or ".join(_SUPPORTED), model_type)
    # Scales of quantized weights have tensors of their own, which no table of names has.
    for name, values in {"quantization_config": (None,), **_SUPPORTED[str(model_type)]}.items():
        if fields.get(name, values[0]) not in values:
            raise _refusal(name, " or ".join(map(repr, values)), fields[name])
    config = _from_gpt2(fields) if model_type == "gpt2" else _from_rotary(fields)
    if padded_vocab_size is None:
        return config
    if padded_vocab_size < config.vocab_size:
        raise _refusal(
            "vocab_size",
            f"at most {padded_vocab_size} (padded)",
            config.vocab_size,
            hint="Padding only adds rows: give as many as the config has, or more",
        )
    return replace(config, vocab_size=padded_vocab_size)


def config_to_hugging_face(
    config: ModelConfig, *, vocab_size: int | None = None
) -> dict[str, object]:
    """Spell a config as Hugging Face fields, ``model_type`` and ``architectures`` included.

    Args:
        config: The model.
        vocab_size: Rows without padding; None keeps all rows.

    Returns:
        What the config class of the model type takes: ``Qwen3Config(**fields)`` for a qwen3.

    Raises:
        ConfigError: Hugging Face's model of the type lacks what this one has: a GPT with grouped
            queries or heads that do not fill its width, a router with a bias, a Qwen3-MoE with a
            shared expert or a Qwen3-Next without.
    """
    model_type = "gpt2" if config.architecture == "gpt" else config.architecture
    common: dict[str, object] = {
        "model_type": model_type,
        "architectures": [_CLASS_NAMES[model_type]],
        "vocab_size": vocab_size or config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }
    if model_type == "gpt2":
        return common | _to_gpt2(config)
    return common | _to_rotary(config)


def _from_gpt2(fields: Fields) -> ModelConfig:
    hidden_size, num_heads = _integer(fields, "n_embd"), _integer(fields, "n_head")
    return ModelConfig(
        architecture="gpt",
        num_layers=_integer(fields, "n_layer"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_hidden_size=_integer(fields, "n_inner", default=4 * hidden_size),
        vocab_size=_integer(fields, "vocab_size"),
        max_sequence_length=_integer(fields, "n_positions"),
        norm_eps=_number(fields, "layer_norm_epsilon", default=1e-5),
        tie_embeddings=bool(fields.get("tie_word_embeddings", True)),
        init_std=_number(fields, "initializer_range", default=0.02),
    )


def _from_rotary(fields: Fields) -> ModelConfig:
    architecture: _Rotary = fields["model_type"]  # type: ignore[assignment]
    hidden_size = _integer(fields, "hidden_size")
    num_heads = _integer(fields, "num_attention_heads")
    is_left_out = "num_key_value_heads" not in fields
    num_groups = _QUERY_GROUPS.get(architecture, num_heads) if is_left_out else num_heads
    more = _mixture_sizes(fields) if architecture in ("qwen3_moe", "qwen3_next") else {}
    if architecture == "qwen3_next":
        more |= _hybrid_sizes(fields)
    return ModelConfig(
        architecture=architecture,
        num_layers=_integer(fields, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_query_groups=_integer(fields, "num_key_value_heads", default=num_groups),
        head_dim=_integer(
            fields, "head_dim", default=_HEAD_DIMS.get(architecture, hidden_size // num_heads)
        ),
        ffn_hidden_size=_integer(fields, "intermediate_size"),
        vocab_size=_integer(fields, "vocab_size"),
        max_sequence_length=_integer(fields, "max_position_embeddings"),
        rope_theta=_rotary_number(fields, "rope_theta", default=10_000.0),
        norm_eps=_number(fields, "rms_norm_eps", default=1e-6),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        init_std=_number(fields, "initializer_range", default=0.02),
        **more,
    )


def _mixture_sizes(fields: Fields) -> dict[str, Any]:
    # transformers 5 spells the number of a Qwen3-MoE's experts num_local_experts.
    num_experts = "num_experts" if "num_experts" in fields else "num_local_experts"
    return {
        "num_experts": _integer(fields, num_experts),
        "num_experts_per_token": _integer(fields, "num_experts_per_tok"),
        "moe_ffn_hidden_size": _integer(fields, "moe_intermediate_size"),
        "norm_topk_prob": bool(fields.get("norm_topk_prob", fields["model_type"] == "qwen3_next")),
        "router_balance": "aux_loss" if fields.get("output_router_logits") else "none",
        "router_aux_loss_coefficient": _number(fields, "router_aux_loss_coef", default=0.001),
    }


def _hybrid_sizes(fields: Fields) -> dict[str, Any]:
    layer_types = fields.get("layer_types")
    if layer_types is None:
        interval = _integer(fields, "full_attention_interval", default=4)
        places = range(1, _integer(fields, "num_hidden_layers") + 1)
        layer_types = [LINEAR_ATTENTION if at % interval else FULL_ATTENTION for at in places]
    known = {LINEAR_ATTENTION, FULL_ATTENTION}
    if not isinstance(layer_types, list | tuple) or not known.issuperset(layer_types):
        raise _refusal("layer_types", f"a list of {' and '.join(sorted(known))}", layer_types)
    sizes: dict[str, Any] = {
        "shared_expert_ffn_hidden_size": _integer(fields, "shared_expert_intermediate_size"),
        "rotary_fraction": _rotary_number(fields, "partial_rotary_factor", default=0.25),
    }
    if LINEAR_ATTENTION in layer_types:
        sizes["layer_types"] = tuple(layer_types)
        sizes |= {ours: _integer(fields, theirs) for ours, theirs in _LINEAR_SIZES.items()}
    return sizes


def _rotary_number(fields: Fields, key: str, *, default: float) -> float:
    """Read a number from ``rope_parameters`` (transformers 5) or the top level (4)."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise _refusal(f"{name}.rope_type", "'default'", repr(kind))
            if key in rope:
                return _number(rope, key)
    return _number(fields, key, default=default)


def _to_gpt2(config: ModelConfig) -> dict[str, object]:
    is_plain = config.num_query_groups == config.num_attention_heads
    if not is_plain or config.query_size != config.hidden_size:
        raise ConfigError(
            expected(
                f"as many query groups as heads, together {config.hidden_size} wide, for GPT-2",
                f"{config.num_query_groups} groups, {config.num_attention_heads} heads of "
                f"{config.head_dim}",
                where="the ModelConfig to be written as a Hugging Face config",
                hint="Hugging Face's GPT-2 has no grouped queries; keep this model in our format",
            )
        )
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_positions": config.max_sequence_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _to_rotary(config: ModelConfig) -> dict[str, object]:
    fields: dict[str, object] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_hidden_size,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        # transformers 4 reads the first of these two, transformers 5 the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    if config.architecture == "llama":
        fields["mlp_bias"] = False
    if config.has_experts:
        fields |= _to_mixture(config)
    if config.architecture == "qwen3_next":
        fields |= _to_hybrid(config)
    return fields


def _to_mixture(config: ModelConfig) -> dict[str, object]:
    has_shared_expert = config.shared_expert_ffn_hidden_size > 0
    if config.router_balance == "bias":
        what, got = "a router_balance of 'none' or 'aux_loss'", "'bias'"
    elif has_shared_expert != (config.architecture == "qwen3_next"):
        what = "a shared expert in qwen3_next, and none in qwen3_moe"
        got = f"shared_expert_ffn_hidden_size {config.shared_expert_ffn_hidden_size}"
    else:
        return {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.moe_ffn_hidden_size,
            "norm_topk_prob": config.norm_topk_prob,
            "output_router_logits": config.router_balance == "aux_loss",
            "router_aux_loss_coef": config.router_aux_loss_coefficient,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    raise ConfigError(
        expected(
            what,
            got,
            where=f"the ModelConfig of a {config.architecture} to be written as a Hugging Face "
            "config",
            hint="Hugging Face's model lacks this; keep the model in our format",
        )
    )


def _to_hybrid(config: ModelConfig) -> dict[str, object]:
    fraction = config.rotary_fraction
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    fields: dict[str, object] = {
        "shared_expert_intermediate_size": config.shared_expert_ffn_hidden_size,
        "layer_types": list(config.layer_types or (FULL_ATTENTION,) * config.num_layers),
        "partial_rotary_factor": fraction,
        "rope_parameters": rope | {"partial_rotary_factor": fraction},
    }
    if config.has_linear_attention:
        fields |= {theirs: getattr(config, ours) for ours, theirs in _LINEAR_SIZES.items()}
    return fields


def _integer(fields: Fields, name: str, *, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise _refusal(name, "an integer", repr(value))
    return value


def _number(fields: Fields, name: str, *, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise _refusal(name, "a number", repr(value))
    return float(value)


def _refusal(
    name: str,
    what: object,
    got: object,
    *,
    hint: str = "Convert a model whose config these models can follow",
) -> ConfigError:
    return ConfigError(
        expected(
            what,
            got,
            where=f"field {name!r} of the Hugging Face config",
            hint=hint,
        )
    )
