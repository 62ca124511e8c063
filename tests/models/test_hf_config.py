"""Random tiny Hugging Face models and ours compute the same numbers, in both directions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from megafsdp.errors import ConfigError
from megafsdp.models import (
    LanguageModel,
    ModelConfig,
    build_model,
    config_from_hugging_face,
    config_to_hugging_face,
    presets,
)
from tests.checkpoint.huggingface.whole_dicts import (
    weights_from_hugging_face,
    weights_to_hugging_face,
)

_CLASSES = {
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
# Widths of experts that grouped products take, and value heads in groups of three.
_EXPERTS = {"num_experts": 5, "num_experts_per_token": 2, "moe_ffn_hidden_size": 24}
_HYBRID = {
    "shared_expert_ffn_hidden_size": 40,
    "layer_types": ("linear_attention", "full_attention", "linear_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel": 3,
    "rotary_fraction": 0.25,
}
_VOCAB_SIZE = 61
_CASES = [
    (model_type, is_tied, num_query_groups)
    for model_type, groups in (
        ("gpt2", (4,)),
        ("llama", (1, 2, 4)),
        ("qwen3", (2, 4)),
        ("qwen3_moe", (2,)),
        ("qwen3_next", (2,)),
    )
    for num_query_groups in groups
    for is_tied in (False, True)
]


def _config(model_type: str, is_tied: bool, num_query_groups: int) -> ModelConfig:
    """Describe a model with distinct sizes throughout and large weights, so that errors show."""
    more = _EXPERTS if model_type in ("qwen3_moe", "qwen3_next") else {}
    return ModelConfig(
        **(more | (_HYBRID if model_type == "qwen3_next" else {})),
        architecture="gpt" if model_type == "gpt2" else model_type,  # type: ignore[arg-type]
        num_layers=3,
        hidden_size=48,
        num_attention_heads=4,
        num_query_groups=num_query_groups,
        head_dim=12 if model_type == "gpt2" else 16,
        ffn_hidden_size=80,
        vocab_size=_VOCAB_SIZE,
        max_sequence_length=64,
        rope_theta=500.0,
        norm_eps=1e-5,
        tie_embeddings=is_tied,
        init_std=0.1,
    )


def _theirs(config: ModelConfig) -> nn.Module:
    """Build Hugging Face's model with every parameter random, norms and biases included."""
    fields = config_to_hugging_face(config)
    config_class, model_class = _CLASSES[str(fields["model_type"])]
    is_hybrid = fields["model_type"] == "qwen3_next"
    torch.manual_seed(0)
    model = model_class(config_class(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Of wider weights, fp32 is off by several times the tolerance in either hybrid.
            parameter.normal_(std=0.1 if is_hybrid else 0.2)
            # A hybrid's norms multiply by 1 plus their weights, except behind linear attention,
            # whose own vectors are decays: of large ones the gradients are sums that cancel.
            is_plain = not is_hybrid or name.endswith("linear_attn.norm.weight")
            parameter.add_(1.0 if parameter.ndim == 1 and is_plain else 0.0)
    return model.eval()


def _pair(
    model_type: str, is_tied: bool, num_query_groups: int, *, padded_vocab_size: int = _VOCAB_SIZE
) -> tuple[nn.Module, LanguageModel]:
    theirs = _theirs(_config(model_type, is_tied, num_query_groups))
    config = config_from_hugging_face(theirs.config.to_dict(), padded_vocab_size=padded_vocab_size)
    ours = build_model(config, seed=1)
    ours.load_state_dict(
        weights_from_hugging_face(theirs.state_dict(), model_type, config, _VOCAB_SIZE)
    )
    return theirs, ours


def _tokens() -> Tensor:
    return torch.randint(0, _VOCAB_SIZE, (2, 33), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("model_type", "is_tied", "num_query_groups"), _CASES)
def test_logits_equal_hugging_faces(model_type: str, is_tied: bool, num_query_groups: int) -> None:
    """With mapped weights the logits agree to 1e-5 in fp32."""
    theirs, ours = _pair(model_type, is_tied, num_query_groups)
    with torch.no_grad():
        wanted, logits = theirs(_tokens()).logits, ours(_tokens())
    assert wanted.std() > 0.3
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5 * max(1.0, wanted.std().item()))


@pytest.mark.parametrize(("model_type", "is_tied", "num_query_groups"), _CASES)
def test_gradients_equal_hugging_faces(
    model_type: str, is_tied: bool, num_query_groups: int
) -> None:
    """Gradients of the same loss, mapped as the weights are, agree too."""
    theirs, ours = _pair(model_type, is_tied, num_query_groups)
    tokens = _tokens()
    theirs(tokens, labels=tokens).loss.backward()
    mask = torch.ones(tokens.shape)
    mask[:, -1] = 0
    ours(tokens, tokens.roll(-1, dims=1), mask).backward()
    gradients = {
        name: parameter.grad for name, parameter in theirs.named_parameters(remove_duplicate=False)
    }
    wanted = weights_from_hugging_face(gradients, model_type, ours.config, _VOCAB_SIZE)
    for name, parameter in ours.named_parameters():
        # fp32 sums of 64 tokens in different orders, relative to the largest gradient of the
        # tensor.
        tolerance = 1e-5 * wanted[name].abs().max().item() + 1e-7
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("model_type", "is_tied", "num_query_groups"), _CASES)
def test_our_weights_load_into_hugging_face(
    model_type: str, is_tied: bool, num_query_groups: int
) -> None:
    """The way back: our random model, exported, computes the same logits there."""
    config = _config(model_type, is_tied, num_query_groups)
    ours, theirs = build_model(config, seed=3), _theirs(config)
    state = weights_to_hugging_face(
        ours.state_dict(), model_type, config, _VOCAB_SIZE, stored=theirs.state_dict()
    )
    theirs.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(ours(_tokens()), theirs(_tokens()).logits, rtol=0, atol=1e-5)


def test_padding_of_the_vocabulary_leaves_the_other_logits_alone() -> None:
    """A padded model gives the same logits for real tokens and 0 for the padding."""
    theirs, ours = _pair("qwen3", True, 2, padded_vocab_size=64)
    with torch.no_grad():
        wanted, logits = theirs(_tokens()).logits, ours(_tokens())
    assert logits.shape[-1] == 64
    torch.testing.assert_close(logits[..., :_VOCAB_SIZE], wanted, rtol=0, atol=2e-5)
    assert torch.all(logits[..., _VOCAB_SIZE:] == 0)


@pytest.mark.parametrize("preset", sorted(presets))
def test_configs_survive_the_round_trip(preset: str) -> None:
    """Through Hugging Face's own config class and back nothing is lost."""
    config = dataclasses.replace(presets[preset], init_std=0.1)
    fields = config_to_hugging_face(config)
    config_class, _ = _CLASSES[str(fields["model_type"])]
    back = config_from_hugging_face(config_class(**fields).to_dict())
    if config.architecture == "gpt":
        config = dataclasses.replace(config, rope_theta=back.rope_theta)
    assert back == config


def test_padding_is_left_out_and_put_back() -> None:
    """Hugging Face's vocabulary has no padding; ours gets it where asked."""
    config = dataclasses.replace(ModelConfig(), vocab_size=320)
    fields = config_to_hugging_face(config, vocab_size=257)
    assert fields["vocab_size"] == 257
    assert config_from_hugging_face(fields, padded_vocab_size=320) == config
    with pytest.raises(ConfigError, match="at most 256"):
        config_from_hugging_face(fields, padded_vocab_size=256)


def test_a_config_of_transformers_4_is_read() -> None:
    """There the rotary base stands at the top level, and sizes of heads may be missing."""
    fields = dict(config_to_hugging_face(_config("llama", False, 2)), rope_scaling=None)
    del fields["rope_parameters"], fields["head_dim"], fields["num_key_value_heads"]
    config = config_from_hugging_face(fields)
    assert config.rope_theta == 500.0
    assert (config.head_dim, config.num_query_groups) == (12, 4)
    for key in ("type", "rope_type"):
        with pytest.raises(ConfigError, match=r"'default', got 'linear'.*rope_scaling\.rope_type"):
            config_from_hugging_face(fields | {"rope_scaling": {key: "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (GPT2Config(activation_function="relu"), "activation_function"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (GPT2Config(scale_attn_weights=False), "scale_attn_weights"),
        (GPT2Config(add_cross_attention=True), "add_cross_attention"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (LlamaConfig(mlp_bias=True), "mlp_bias"),
        (LlamaConfig(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act"),
        (Qwen3Config(use_sliding_window=True), "use_sliding_window"),
        (Qwen3MoeConfig(use_sliding_window=True), "use_sliding_window"),
        (Qwen3MoeConfig(attention_bias=True), "attention_bias"),
        (Qwen3MoeConfig(hidden_act="gelu"), "hidden_act"),
        (Qwen3MoeConfig(mlp_only_layers=[1]), "mlp_only_layers"),
        (Qwen3NextConfig(decoder_sparse_step=2), "decoder_sparse_step"),
        (Qwen3NextConfig(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (Qwen3NextConfig(mtp_num_hidden_layers=1), "mtp_num_hidden_layers"),
        (
            Qwen3NextConfig(
                rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7}
            ),
            "rope_type",
        ),
        (
            LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            "rope_type",
        ),
        (PretrainedConfig(), "model_type"),
    ],
)
def test_arithmetic_that_we_lack_is_refused_by_name(theirs: PretrainedConfig, field: str) -> None:
    """A model is never converted to one that computes something else."""
    with pytest.raises(ConfigError, match=field):
        config_from_hugging_face(theirs.to_dict())


def test_fewer_padded_rows_than_rows_are_refused() -> None:
    """Padding never cuts a vocabulary."""
    fields = config_to_hugging_face(ModelConfig())
    with pytest.raises(ConfigError, match=r"at most 100 \(padded\), got \d+.*only adds rows"):
        config_from_hugging_face(fields, padded_vocab_size=100)


def test_a_missing_field_is_refused_by_name() -> None:
    """A size is never guessed, and a text is no number."""
    fields = config_to_hugging_face(ModelConfig())
    for name in ("intermediate_size", "rms_norm_eps"):
        with pytest.raises(ConfigError, match=name):
            config_from_hugging_face(fields | {name: "80"})
    del fields["intermediate_size"]
    with pytest.raises(ConfigError, match="intermediate_size"):
        config_from_hugging_face(fields)


# What a config.json may lack, as classes of transformers have it by themselves.
_LEFT_OUT = {
    *("n_inner", "layer_norm_epsilon", "rms_norm_eps", "rope_theta", "rope_parameters", "head_dim"),
    *("tie_word_embeddings", "initializer_range", "layer_types", "partial_rotary_factor"),
    *("norm_topk_prob", "output_router_logits", "router_aux_loss_coef"),
}


@pytest.mark.parametrize("model_type", sorted(_CLASSES))
def test_what_a_config_leaves_out_is_what_hugging_face_has(model_type: str) -> None:
    """Old and handwritten files name only what differs from their class."""
    groups = 4 if model_type == "gpt2" else 2
    fields = config_to_hugging_face(_config(model_type, False, groups))
    fields = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    config_class, _ = _CLASSES[model_type]
    filled = config_class(**fields).to_dict()
    config = config_from_hugging_face(fields)
    assert config == config_from_hugging_face(filled)
    # Without a number GPT-2's MLP is four times as wide as the model.
    assert config.ffn_hidden_size == (4 * 48 if model_type == "gpt2" else 80)
    assert config.head_dim == {"qwen3": 128, "qwen3_next": 256}.get(model_type, 48 // 4)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_query_groups_that_a_config_leaves_out_are_those_of_hugging_face(model_type: str) -> None:
    """Each class has its own number."""
    fields = config_to_hugging_face(_config(model_type, False, 2)) | {"num_attention_heads": 64}
    del fields["num_key_value_heads"]
    config_class, _ = _CLASSES[model_type]
    wanted = config_class(**fields).num_key_value_heads
    assert config_from_hugging_face(fields).num_query_groups == wanted


def test_a_gpt_with_grouped_queries_has_no_hugging_face_form() -> None:
    """Hugging Face's GPT-2 knows neither groups nor heads of another width."""
    config = _config("gpt2", False, 4)
    for changes in ({"num_query_groups": 2}, {"head_dim": 16}):
        with pytest.raises(ConfigError, match="grouped queries"):
            config_to_hugging_face(dataclasses.replace(config, **changes))


def test_the_published_config_of_a_hybrid_is_read() -> None:
    """Names of transformers 4: an interval for the layer types, the rotary fraction on top."""
    fields = config_to_hugging_face(_config("qwen3_next", False, 2)) | {
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "rope_scaling": None,
    }
    del fields["layer_types"], fields["rope_parameters"]
    config = config_from_hugging_face(fields)
    assert config.layer_types == (*["linear_attention"] * 3, "full_attention") * 2
    assert (config.rope_theta, config.rotary_fraction) == (500.0, 0.25)
    assert (config.num_experts, config.shared_expert_ffn_hidden_size) == (5, 40)
    for other in (["chunked_attention"] * 8, 8):
        with pytest.raises(ConfigError, match="layer_types"):
            config_from_hugging_face(fields | {"layer_types": other})


def test_a_hybrid_of_attention_alone_needs_no_sizes_of_linear_attention() -> None:
    """All layers of one type have no list here, and come back so."""
    config = dataclasses.replace(_config("qwen3_next", True, 2), layer_types=())
    config = dataclasses.replace(config, **{name: 0 for name in _HYBRID if "linear_num" in name})
    config = dataclasses.replace(config, linear_key_head_dim=0, linear_value_head_dim=0)
    config = dataclasses.replace(config, linear_conv_kernel=4)
    fields = config_to_hugging_face(config)
    assert fields["layer_types"] == ["full_attention"] * 3
    assert config_from_hugging_face(Qwen3NextConfig(**fields).to_dict()) == config


def test_the_balance_of_a_router_is_a_loss_there() -> None:
    """A loss beside that of the model has a field; a bias has none, and is refused."""
    config = _config("qwen3_moe", False, 2)
    config = dataclasses.replace(
        config, router_balance="aux_loss", router_aux_loss_coefficient=0.25, norm_topk_prob=False
    )
    fields = config_to_hugging_face(config)
    assert (fields["output_router_logits"], fields["router_aux_loss_coef"]) == (True, 0.25)
    assert config_from_hugging_face(Qwen3MoeConfig(**fields).to_dict()) == config
    with pytest.raises(ConfigError, match="router_balance"):
        config_to_hugging_face(dataclasses.replace(config, router_balance="bias"))


@pytest.mark.parametrize(("model_type", "width"), [("qwen3_moe", 8), ("qwen3_next", 0)])
def test_a_shared_expert_that_hugging_face_lacks_is_refused(model_type: str, width: int) -> None:
    """Qwen3-MoE has none, Qwen3-Next always one."""
    config = _config(model_type, False, 2)
    with pytest.raises(ConfigError, match="shared expert"):
        config_to_hugging_face(dataclasses.replace(config, shared_expert_ffn_hidden_size=width))
