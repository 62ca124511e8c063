"""Held-out loss against the naive mean, and the text sample."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megafsdp import fully_shard_model
from megafsdp.data import ByteTokenizer, Loader
from megafsdp.errors import ConfigError
from megafsdp.models import LanguageModel, ModelConfig, build_model, unit_classes
from megafsdp.training.config.sections import Config
from megafsdp.training.datasets import build_datasets
from megafsdp.training.step.evaluation import (
    EvaluationResult,
    TextRequest,
    check_prompt,
    evaluate,
    sample_text,
)
from tests.ranks import Ranks
from tests.training.runs import MODEL, SEQUENCE_LENGTH, tiny, write_corpus

CPU = torch.device("cpu")


def _model() -> LanguageModel:
    # Far from uniform, so that losses of tokens differ and a wrong weighting shows.
    return build_model(ModelConfig(**MODEL, init_std=0.5), seed=5)


def _evaluate(
    config: Config, num_batches: int | None, num_before_stop: int, num_copies: int = 1
) -> object:
    model = fully_shard_model(_model(), unit_classes(ModelConfig(**MODEL)))
    held_out = build_datasets(config, vocab_size=320).validation
    assert held_out is not None
    loader = Loader(
        held_out,
        global_batch_size=12,
        micro_batch_size=2,
        dp_rank=dist.get_rank() // num_copies,
        dp_size=dist.get_world_size() // num_copies,
        pad_last=True,
    )
    asked = [0]

    def should_stop() -> bool:
        asked[0] += 1
        return asked[0] > num_before_stop

    result = evaluate(
        model,
        loader,
        device=CPU,
        tokenizer=ByteTokenizer(),
        num_batches=num_batches,
        should_stop=should_stop,
    )
    assert model.training
    return result


@pytest.mark.parametrize(("num_ranks", "num_copies"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_loss_is_the_mean_over_all_held_out_tokens(
    ranks: Ranks, tmp_path: Path, num_ranks: int, num_copies: int
) -> None:
    """Every token counts once: in a last batch of padding, and where two ranks read it."""
    write_corpus(tmp_path)
    config = tiny(tmp_path)
    held_out = build_datasets(config, vocab_size=320).validation
    assert held_out is not None
    assert len(held_out) % 12 not in (0, 11)
    nats, num_tokens, num_bytes = 0.0, 0, 0
    model = _model()
    for index in range(len(held_out)):
        tokens = torch.from_numpy(held_out[index])
        with torch.no_grad():
            scores = torch.log_softmax(model(tokens[None, :-1])[0].double(), -1)
        nats -= float(scores.gather(1, tokens[1:, None]).sum())
        num_tokens += len(tokens) - 1
        num_bytes += int((tokens[1:] < 256).sum())
    assert num_tokens % SEQUENCE_LENGTH
    for result in ranks(num_ranks).run(_evaluate, config, None, 99, num_copies):
        assert isinstance(result, EvaluationResult)
        assert result.num_tokens == num_tokens
        assert result.loss == pytest.approx(nats / num_tokens, rel=1e-6)
        assert result.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)


def test_end_of_document_stands_for_no_byte(ranks: Ranks, tmp_path: Path) -> None:
    """Its loss counts, its bytes do not: bits a byte are more than bits a token."""
    write_corpus(tmp_path, largest=256)
    (result,) = ranks(1).run(_evaluate, tiny(tmp_path), None, 99)
    num_ends = 9 - 1  # The first or last token of the file is no label.
    per_token = result.loss / math.log(2)
    num_bytes = per_token * result.num_tokens / result.bits_per_byte
    assert result.num_tokens - num_bytes == pytest.approx(num_ends, abs=1.01)
    assert num_bytes < result.num_tokens


def test_number_of_batches_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    """One global batch is 12 samples of 16 tokens, the file's short last one maybe among them."""
    write_corpus(tmp_path)
    for result in ranks(2).run(_evaluate, tiny(tmp_path), 1, 99):
        assert 176 < result.num_tokens <= 192


def test_evaluation_stops_between_batches(ranks: Ranks, tmp_path: Path) -> None:
    """A request is asked for before each batch, and ends the evaluation without a result."""
    write_corpus(tmp_path)
    assert ranks(2).run(_evaluate, tiny(tmp_path), None, 1) == [None, None]


def _sample(seed: int) -> str:
    model = fully_shard_model(_model(), unit_classes(ModelConfig(**MODEL)))
    request = TextRequest("def ", 20, SEQUENCE_LENGTH, temperature=1.0, seed=seed)
    return sample_text(model, ByteTokenizer(), request, device=CPU)


class _Endless(torch.nn.Module):
    """Writes "ab", the end of a document, and the same again."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits that single out the next of the three."""
        following = {97: 98, 98: ByteTokenizer.eod, ByteTokenizer.eod: 97}
        chosen = torch.tensor([[following[token] for token in row] for row in tokens.tolist()])
        return torch.nn.functional.one_hot(chosen, ByteTokenizer.vocab_size).float()


@pytest.mark.parametrize(("prompt"), ["a", ""])
def test_a_text_may_end_with_its_document(prompt: str) -> None:
    """At the first end behind the prompt, which may be one itself."""
    for ends_early, text in ((False, "ababab"), (True, "ab")):
        request = TextRequest(prompt, 8, 4, ends_early=ends_early)
        assert sample_text(_Endless(), ByteTokenizer(), request, device=CPU) == text


def test_ranks_write_the_same_text(ranks: Ranks) -> None:
    """The sample begins with its prompt, is the same on all ranks and follows the seed."""
    one, other = ranks(2).run(_sample, 1), ranks(2).run(_sample, 2)
    assert one[0] == one[1]
    assert one[0].startswith("def ")
    assert len(one[0]) > 4
    assert one[0] != other[0]


@pytest.mark.parametrize(("prompt", "largest"), [("", 256), ("hi", 105)])
def test_prompt_beyond_the_vocabulary_is_refused(prompt: str, largest: int) -> None:
    """An empty prompt is the end of a document, the byte tokenizer's largest token."""
    check_prompt(ByteTokenizer(), prompt, largest + 1)
    with pytest.raises(ConfigError, match=f"token {largest}\\. .*sample_prompt"):
        check_prompt(ByteTokenizer(), prompt, largest)
