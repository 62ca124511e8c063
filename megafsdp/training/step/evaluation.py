"""Evaluate the loss on held-out data, each token once, and sample a text from the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.data import Loader, Tokenizer
from megafsdp.models import sample
from megafsdp.training.config.sections import Config, require

_LOGGER = logging.getLogger("megafsdp.training")


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The model's loss on held-out data.

    Attributes:
        loss: Nats per token.
        bits_per_byte: Bits per byte of text, which does not depend on the vocabulary; None without
            a tokenizer.
        num_tokens: Tokens that were predicted.
    """

    loss: float
    bits_per_byte: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text for a model to continue.

    Attributes:
        prompt: What it begins with.
        num_tokens: How many tokens follow.
        max_context: The model sees at most this many of the last tokens.
        temperature: 0 takes the likeliest token.
        top_k: Draw from so many of the likeliest tokens; None for all.
        seed: Seed of the draws.
        ends_early: Whether the text ends with the first end of a document.
    """

    prompt: str
    num_tokens: int
    max_context: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    ends_early: bool = False


def warn_of_idle_options(config: Config) -> None:
    """Warn of options for evaluation and text that have no effect without data; local."""
    data, wanted = config.data, config.evaluation
    if wanted.interval_steps is not None and not data.validation and data.split is None:
        _LOGGER.warning(
            "Nothing is evaluated every %d steps: no data is held out. Set data.validation or"
            " data.split, or leave evaluation.interval_steps null.",
            wanted.interval_steps,
        )
    if wanted.sample_prompt is not None and data.tokenizer is None:
        _LOGGER.warning(
            "No text goes on from the prompt %r: there is no tokenizer. Set data.tokenizer, or"
            " leave evaluation.sample_prompt null.",
            wanted.sample_prompt,
        )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    *,
    device: torch.device,
    tokenizer: Tokenizer | None,
    num_batches: int | None,
    should_stop: Callable[[], bool],
) -> EvaluationResult | None:
    """Average the loss over held-out tokens of all ranks; collective over all ranks.

    Args:
        model: Returns the mean loss over unmasked tokens when it is given labels and a mask.
        loader: Pads its last global batch.
        device: What the model computes on.
        tokenizer: Counts the bytes of text of the tokens.
        num_batches: Global batches to read; None for all.
        should_stop: Called before each global batch; must return the same on all ranks.

    Returns:
        The result, alike on all ranks; None if it was stopped.
    """
    was_training = model.training
    model.eval()
    try:
        # Nats, tokens, bytes of text, ranks.
        sums = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=device)
        num_steps = loader.num_steps if num_batches is None else min(num_batches, loader.num_steps)
        for step in range(num_steps):
            if should_stop():
                return None
            for batch in loader.step_batch(step * loader.global_batch_size):
                mask = batch.loss_mask
                loss = model(*batch.to(device))
                num_tokens = float(mask.sum(dtype=torch.float64))
                labels = batch.labels[mask > 0].numpy()
                num_bytes = 0 if tokenizer is None else tokenizer.num_bytes(labels)
                sums[0] += loss.double() * num_tokens
                sums[1] += num_tokens
                sums[2] += num_bytes
    finally:
        model.train(was_training)
    all_reduce(sums, label="evaluation")
    # All ranks that share out a layer read the same samples and got the same loss.
    num_copies = sums[3] / loader.dp_size
    nats, num_tokens, num_bytes = (sums[:3] / num_copies).tolist()
    return EvaluationResult(
        loss=nats / num_tokens,
        bits_per_byte=nats / math.log(2) / num_bytes if num_bytes else None,
        num_tokens=int(num_tokens),
    )


def check_prompt(tokenizer: Tokenizer, prompt: str, vocab_size: int) -> None:
    """Refuse a prompt with tokens that a model's embedding has no row for.

    Raises:
        ConfigError: One is not less than ``vocab_size``.
    """
    largest = max(prompt_tokens(tokenizer, prompt))
    require(
        largest < vocab_size,
        "evaluation.sample_prompt",
        f"a prompt of tokens below the model's vocab_size {vocab_size}",
        f"token {largest}",
        "Raise model.vocab_size, set data.tokenizer to the one of the data, or sample_prompt to"
        " null",
    )


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt; for an empty one, the end-of-document token."""
    return tokenizer.encode(prompt) or [tokenizer.eod]


def sample_text(
    model: nn.Module, tokenizer: Tokenizer, request: TextRequest, *, device: torch.device
) -> str:
    """Return a text that the model continues from a prompt; collective over all ranks.

    All ranks return the same text.
    """
    was_training = model.training
    model.eval()
    context = prompt_tokens(tokenizer, request.prompt)
    try:
        tokens = sample(
            model,
            torch.tensor([context], device=device),
            num_tokens=request.num_tokens,
            max_context=request.max_context,
            temperature=request.temperature,
            top_k=request.top_k,
            vocab_size=tokenizer.vocab_size,
            generator=torch.Generator(device).manual_seed(request.seed),
        )
    finally:
        model.train(was_training)
    ids = tokens[0].tolist()
    if request.ends_early and tokenizer.eod in ids[len(context) :]:
        ids = ids[: ids.index(tokenizer.eod, len(context))]
    return tokenizer.decode(ids)
