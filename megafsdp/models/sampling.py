"""A small sampler that shows what a model has learned.

It keeps no key-value cache and recomputes the context for every token: right for a line of text in
a training log, too slow for anything else.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megafsdp.errors import expected

# Below it logits / temperature overflow fp32; only the likeliest token would be left anyway.
_LOWEST_TEMPERATURE = 1e-30


@torch.no_grad()
def sample(
    model: nn.Module,
    tokens_BT: Tensor,
    *,
    num_tokens: int,
    max_context: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append tokens to each row, one at a time.

    Collective if the model's forward is: all ranks call it with the same arguments and run the same
    number of forwards. Equally seeded generators give all ranks the same text.

    Args:
        model: Called with the token ids; returns logits (B, T, V).
        tokens_BT: What to continue, at least one token a row.
        num_tokens: How many to append; never fewer, so no rank stops early.
        max_context: The model sees at most this many of the last tokens.
        temperature: 0 takes the likeliest token; above 0 the logits are divided by it and a token
            drawn.
        top_k: Draw from so many of the likeliest tokens; None for all. Tokens as likely as the last
            of them are drawn too.
        vocab_size: Only ids below it are produced, at least 1; None allows the padding of the
            vocabulary too.
        generator: Source of the draws, on the tokens' device; None is torch's default one.

    Returns:
        (B, T + num_tokens) ids.

    Raises:
        ValueError: The context is empty, or a number is out of its range.
    """
    smallest = min(tokens_BT.shape[1], max_context)
    is_sound = num_tokens >= 0 and 0 <= temperature < math.inf
    counts = (top_k, vocab_size)
    if smallest < 1 or not is_sound or any(n is not None and n < 1 for n in counts):
        raise ValueError(
            expected(
                "at least 1 token of context, num_tokens >= 0, a finite temperature >= 0, and a"
                " top_k and a vocab_size of None or at least 1",
                f"{smallest}, {num_tokens}, {temperature}, {top_k} and {vocab_size}",
                where="sample()",
                hint="Begin with one token at least, such as the end-of-document one",
            )
        )
    for _ in range(num_tokens):
        logits_BV = model(tokens_BT[:, -max_context:])[:, -1, :vocab_size].float()
        if top_k is not None and top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        if temperature > 0:
            probabilities_BV = torch.softmax(
                logits_BV / max(temperature, _LOWEST_TEMPERATURE), dim=-1
            )
            next_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
        else:
            next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
    return tokens_BT
