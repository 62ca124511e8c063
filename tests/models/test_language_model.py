"""The frame of every model: names, logits or loss, tied weights, dtypes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megafsdp.models import ModelConfig, build_model, presets

_LAYER = {
    "input_layernorm.weight": (128,),
    "self_attention.linear_qkv.weight": (256, 128),
    "self_attention.linear_proj.weight": (128, 128),
    "pre_mlp_layernorm.weight": (128,),
    "mlp.linear_fc1.weight": (768, 128),
    "mlp.linear_fc2.weight": (128, 384),
}
_HEAD_NORMS = {
    "self_attention.q_layernorm.weight": (32,),
    "self_attention.k_layernorm.weight": (32,),
}
_GPT_LAYER = {
    "input_layernorm.weight": (128,),
    "input_layernorm.bias": (128,),
    "self_attention.linear_qkv.weight": (384, 128),
    "self_attention.linear_qkv.bias": (384,),
    "self_attention.linear_proj.weight": (128, 128),
    "self_attention.linear_proj.bias": (128,),
    "pre_mlp_layernorm.weight": (128,),
    "pre_mlp_layernorm.bias": (128,),
    "mlp.linear_fc1.weight": (512, 128),
    "mlp.linear_fc1.bias": (512,),
    "mlp.linear_fc2.weight": (128, 512),
    "mlp.linear_fc2.bias": (128,),
}


def _tokens(config: ModelConfig, num_tokens: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, config.vocab_size, (2, num_tokens), generator=generator)


@pytest.mark.parametrize(
    ("preset", "layer", "outside"),
    [
        ("qwen3-toy", _LAYER | _HEAD_NORMS, {"decoder.final_layernorm.weight": (128,)}),
        (
            "llama-toy",
            _LAYER,
            {"decoder.final_layernorm.weight": (128,), "output_layer.weight": (320, 128)},
        ),
        (
            "gpt-toy",
            _GPT_LAYER,
            {
                "embedding.position_embeddings.weight": (1024, 128),
                "decoder.final_layernorm.weight": (128,),
                "decoder.final_layernorm.bias": (128,),
            },
        ),
    ],
)
def test_parameters_have_megatron_names_and_shapes(
    preset: str, layer: dict[str, tuple[int, ...]], outside: dict[str, tuple[int, ...]]
) -> None:
    """The whole list of names, none more and none less."""
    model = build_model(presets[preset], seed=0)
    wanted = {"embedding.word_embeddings.weight": (320, 128)} | outside
    for index in range(4):
        wanted |= {f"decoder.layers.{index}.{name}": shape for name, shape in layer.items()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == wanted
    assert list(model.buffers()) == []


@pytest.mark.parametrize("preset", ["qwen3-toy", "llama-toy", "gpt-toy"])
def test_labels_turn_logits_into_the_mean_loss(preset: str) -> None:
    """With labels the model returns what cross entropy makes of its own logits."""
    model = build_model(presets[preset], seed=0)
    tokens = _tokens(model.config)
    labels, mask = tokens.roll(-1, dims=1), torch.ones(2, 16)
    mask[:, -3:] = 0
    logits = model(tokens)
    assert logits.shape == (2, 16, 320)
    wanted = F.cross_entropy(logits[:, :-3].flatten(0, 1), labels[:, :-3].flatten())
    loss = model(tokens, labels, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_no_token_sees_those_after_it() -> None:
    """Changing a token leaves the logits before it as they were and moves those from it on."""
    model = build_model(presets["qwen3-toy"], seed=0)
    tokens = _tokens(model.config)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 320
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_tied_weights_are_one_parameter() -> None:
    """The output layer shares the embedding's Parameter object and both uses reach its gradient."""
    model = build_model(presets["qwen3-toy"], seed=0)
    assert model.output_layer.weight is model.embedding.word_embeddings.weight
    untied = build_model(dataclasses.replace(model.config, tie_embeddings=False), seed=0)
    untied.load_state_dict(model.state_dict())
    tokens = _tokens(model.config)
    for each in (model, untied):
        each(tokens, tokens.roll(-1, dims=1)).backward()
    summed = untied.embedding.word_embeddings.weight.grad + untied.output_layer.weight.grad
    torch.testing.assert_close(model.output_layer.weight.grad, summed, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_output_layer_initialises_its_own_weight_only(is_tied: bool) -> None:
    """A tied weight is the embedding's to draw, or it would be drawn twice."""
    config = dataclasses.replace(ModelConfig(), tie_embeddings=is_tied)
    layer = build_model(config, seed=0).output_layer
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert torch.equal(layer.weight, before) == is_tied


def test_conversion_of_the_whole_model_keeps_the_tie() -> None:
    """to_empty() gives each module a Parameter of its own; the model shares it again."""
    with torch.device("meta"):
        model = build_model(presets["qwen3-toy"])
    model.to_empty(device="cpu")
    assert model.output_layer.weight is model.embedding.word_embeddings.weight
    model.embedding.to("meta")
    model.embedding.to_empty(device="cpu")
    assert model.output_layer.weight is not model.embedding.word_embeddings.weight
    model.tie_weights()
    assert model.output_layer.weight is model.embedding.word_embeddings.weight


@pytest.mark.parametrize("preset", ["qwen3-toy", "gpt-toy"])
def test_a_bf16_model_follows_the_fp32_one(preset: str) -> None:
    """Logits in bf16 stay within its rounding of fp32 ones, also at the last positions."""
    config = dataclasses.replace(presets[preset], init_std=0.1)
    model = build_model(config, seed=0)
    tokens = _tokens(config, 900)
    with torch.no_grad():
        wanted = model(tokens)
        rounded = model.to(torch.bfloat16)(tokens)
    assert rounded.dtype == torch.bfloat16
    # 4 layers of roundings of 2 ** -9 each, on logits of standard deviation about 1.
    error = (rounded.float() - wanted).pow(2).mean(dim=(0, 2)).sqrt() / wanted.std()
    assert error.max() < 0.05


def test_too_long_a_row_is_refused() -> None:
    """A learned table has no row for it, and rotary models were not made for it either."""
    model = build_model(dataclasses.replace(ModelConfig(), max_sequence_length=8), seed=0)
    with pytest.raises(ValueError, match="at most 8 tokens in a row, got 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))
