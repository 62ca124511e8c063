"""The sampler appends what the model predicts, within its context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megafsdp.models import build_model, presets, sample


class _NextInteger(nn.Module):
    """Predicts the token after the last one modulo 10 and records the contexts that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits that single out the next integer."""
        self.contexts.append(tokens)
        assert not torch.is_grad_enabled()
        return nn.functional.one_hot((tokens + 1) % 10, 12).float() * 50


def test_greedy_sampling_follows_the_likeliest_token() -> None:
    """Rows go on independently and the given tokens stay in front."""
    tokens = sample(_NextInteger(), torch.tensor([[1, 2], [7, 8]]), num_tokens=3, max_context=8)
    assert tokens.tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 0, 1]]


def test_context_is_bounded_to_the_last_tokens() -> None:
    """The model never sees more than max_context tokens."""
    model = _NextInteger()
    sample(model, torch.tensor([[1, 2, 3, 4]]), num_tokens=2, max_context=3)
    assert [context.tolist() for context in model.contexts] == [[[2, 3, 4]], [[3, 4, 5]]]


def test_equal_generators_draw_equal_text() -> None:
    """Ranks with equally seeded generators agree; another seed draws other tokens."""
    model = build_model(presets["qwen3-toy"], seed=0)

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return sample(
            model,
            torch.zeros(2, 1, dtype=torch.int64),
            num_tokens=12,
            max_context=16,
            temperature=1.0,
            generator=generator,
        )

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_padding_of_the_vocabulary_is_never_produced(temperature: float) -> None:
    """Ids from vocab_size on belong to no token."""
    tokens = sample(
        _NextInteger(),
        torch.tensor([[3]]),
        num_tokens=50,
        max_context=4,
        temperature=temperature,
        vocab_size=4,
        generator=torch.Generator().manual_seed(0),
    )
    assert int(tokens.max()) < 4


def test_an_empty_context_is_refused() -> None:
    """There is nothing to predict from."""
    with pytest.raises(ValueError, match="at least 1 token of context"):
        sample(_NextInteger(), torch.zeros(1, 0, dtype=torch.int64), num_tokens=1, max_context=4)
    with pytest.raises(ValueError, match="at least 1 token of context"):
        sample(_NextInteger(), torch.zeros(1, 2).long(), num_tokens=1, max_context=0)


def test_a_number_of_tokens_below_zero_is_refused() -> None:
    """Nothing is taken away from a text; no token leaves it as it is."""
    text = torch.tensor([[3]])
    with pytest.raises(ValueError, match=r"num_tokens >= 0.*got 1, -1"):
        sample(_NextInteger(), text, num_tokens=-1, max_context=4)
    assert torch.equal(sample(_NextInteger(), text, num_tokens=0, max_context=4), text)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    """NaN would take the likeliest token, and infinity forget the model, without a word."""
    with pytest.raises(ValueError, match=f"a finite temperature >= 0,.*, got 1, 4, {temperature},"):
        sample(
            _NextInteger(),
            torch.tensor([[3]]),
            num_tokens=4,
            max_context=4,
            temperature=temperature,
        )


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_the_lowest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    """Logits divided by them are no numbers in fp32."""
    tokens = sample(
        _NextInteger(), torch.tensor([[3]]), num_tokens=2, max_context=4, temperature=temperature
    )
    assert tokens.tolist() == [[3, 4, 5]]


class _Ranked(nn.Module):
    """Likes the last of eight tokens most, and each before it a little less."""

    def __init__(self, logits: Tensor | None = None) -> None:
        super().__init__()
        self.logits = torch.arange(8) / 10 if logits is None else logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the same logits everywhere."""
        return self.logits.expand(*tokens.shape, 8)


def test_tokens_are_drawn_in_fp32() -> None:
    """Of logits in bf16, whose probabilities bf16 would round to 8 bits."""
    texts = []
    logits = (torch.arange(8) / 10).bfloat16()
    for model in (_Ranked(logits), _Ranked(logits.float())):
        generator = torch.Generator().manual_seed(0)
        begin = torch.zeros(5000, 1).long()
        options = {"temperature": 0.7, "generator": generator}
        texts.append(sample(model, begin, num_tokens=1, max_context=4, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("top_k", "seen"), [(1, {7}), (3, {5, 6, 7}), (8, {*range(8)}), (99, None)]
)
def test_tokens_are_drawn_from_the_likeliest_alone(top_k: int, seen: set[int] | None) -> None:
    """As many as there are if more are asked for; the likeliest one is taken in any case."""
    tokens = torch.zeros(200, 1, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)

    def draw(temperature: float) -> set[int]:
        drawn = sample(
            _Ranked(),
            tokens,
            num_tokens=1,
            max_context=4,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
        )
        return set(drawn[:, 1].tolist())

    assert draw(1.0) == ({*range(8)} if seen is None else seen)
    assert draw(0.0) == {7}


@pytest.mark.parametrize(
    ("option", "found"), [({"top_k": 0}, "0 and None"), ({"vocab_size": 0}, "None and 0")]
)
def test_no_token_to_draw_from_is_refused(option: dict[str, int], found: str) -> None:
    """Neither a top_k of 0 nor an empty vocabulary has a meaning."""
    message = rf"a top_k and a vocab_size of None or at least 1, got 1, 1, 0\.0, {found}"
    with pytest.raises(ValueError, match=message):
        sample(_Ranked(), torch.zeros(1, 1).long(), num_tokens=1, max_context=4, **option)
