"""Model configs to and from the fields of a Hugging Face ``config.json``.

Fields are plain dicts, so nothing is imported from transformers. A field that asks for arithmetic
these models do not have is refused rather than ignored; dropout, which only training reads, is
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from megafsdp.errors import ConfigError, expected
from megafsdp.models.config import ModelConfig

Fields = Mapping[str, object]

# By model type: fields whose other values mean arithmetic that we do not have; first, the default.
_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "gpt2": {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        "llama": {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        "qwen3": {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "use_sliding_window": (False,),
        },
    }
)
_CLASS_NAMES = MappingProxyType(
    {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)


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
    for name, values in _SUPPORTED[str(model_type)].items():
        if fields.get(name, values[0]) not in values:
            raise _refusal(name, " or ".join(map(repr, values)), fields[name])
    if model_type == "gpt2":
        config = _from_gpt2(fields)
    elif model_type == "llama":
        config = _from_llama(fields)
    else:
        config = _from_qwen3(fields)
    if padded_vocab_size is None:
        return config
    if padded_vocab_size < config.vocab_size:
        raise _refusal("vocab_size", f"at most {padded_vocab_size} (padded)", config.vocab_size)
    return replace(config, vocab_size=padded_vocab_size)


def config_to_hugging_face(
    config: ModelConfig, *, vocab_size: int | None = None
) -> dict[str, object]:
    """Spell a config as Hugging Face fields, ``model_type`` and ``architectures`` included.

    Args:
        config: The model.
        vocab_size: Rows without padding; None keeps all rows.

    Returns:
        What ``GPT2Config(**fields)``, ``LlamaConfig(**fields)`` or ``Qwen3Config(**fields)`` take.

    Raises:
        ConfigError: The model is a GPT with grouped queries or heads that do not fill its width.
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
    return common | _to_llama(config)


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


def _from_llama(fields: Fields) -> ModelConfig:
    hidden_size, num_heads = (
        _integer(fields, "hidden_size"),
        _integer(fields, "num_attention_heads"),
    )
    return _from_rotary(fields, "llama", default_head_dim=hidden_size // num_heads)


def _from_qwen3(fields: Fields) -> ModelConfig:
    return _from_rotary(fields, "qwen3", default_head_dim=128)


def _from_rotary(
    fields: Fields, architecture: Literal["llama", "qwen3"], *, default_head_dim: int
) -> ModelConfig:
    num_heads = _integer(fields, "num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        num_layers=_integer(fields, "num_hidden_layers"),
        hidden_size=_integer(fields, "hidden_size"),
        num_attention_heads=num_heads,
        num_query_groups=_integer(fields, "num_key_value_heads", default=num_heads),
        head_dim=_integer(fields, "head_dim", default=default_head_dim),
        ffn_hidden_size=_integer(fields, "intermediate_size"),
        vocab_size=_integer(fields, "vocab_size"),
        max_sequence_length=_integer(fields, "max_position_embeddings"),
        rope_theta=_rope_theta(fields),
        norm_eps=_number(fields, "rms_norm_eps", default=1e-6),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        init_std=_number(fields, "initializer_range", default=0.02),
    )


def _rope_theta(fields: Fields) -> float:
    """Read the base from ``rope_parameters`` (transformers 5) or the top level (4)."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise _refusal(f"{name}.rope_type", "'default'", repr(kind))
            if "rope_theta" in rope:
                return _number(rope, "rope_theta")
    return _number(fields, "rope_theta", default=10_000.0)


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


def _to_llama(config: ModelConfig) -> dict[str, object]:
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


def _refusal(name: str, what: object, got: object) -> ConfigError:
    return ConfigError(
        expected(
            what,
            got,
            where=f"field {name!r} of the Hugging Face config",
            hint="Convert a model whose config these models can follow",
        )
    )
