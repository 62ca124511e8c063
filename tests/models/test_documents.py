"""Documents in one row: each has the numbers that it has alone, whatever lies before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafsdp.models import LanguageModel
from tests.parallel.cases import CONFIGS, MOE, NEXT, batch_of, build

# A row of one document, and documents of one token first, last and between others.
LENGTHS = [[4, 1, 6], [11], [1, 3, 7], [5, 5, 1]]
MODELS = CONFIGS | {"qwen3_moe": MOE, "qwen3_next": NEXT}


def _weighted(logits: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return logits * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)


def _alone(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the logits of each document as a row of its own, laid end to end."""
    rows = [
        [model(document.unsqueeze(0)).squeeze(0) for document in row.split(lengths)]
        for row, lengths in zip(tokens, LENGTHS, strict=True)
    ]
    return torch.stack([torch.cat(documents) for documents in rows])


@pytest.mark.parametrize("name", MODELS)
def test_a_document_has_the_numbers_that_it_has_alone(name: str) -> None:
    """Logits and gradients of every architecture; without lengths others are found."""
    model, reference = build(MODELS[name]), build(MODELS[name])
    tokens, _, _ = batch_of(4, 11)
    logits, wanted = model(tokens, document_lengths=LENGTHS), _alone(reference, tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-11)
    for side in (logits, wanted):
        _weighted(side).sum().backward()
    for (which, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None and own.grad.any(), which
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11, msg=which)
    together = model(tokens)
    # What lies before a row's second document is read; its first does not know of it.
    torch.testing.assert_close(together[0, :4], wanted[0, :4], rtol=1e-11, atol=1e-11)
    assert (together[0, 4:] - wanted[0, 4:]).abs().amin(0).max() > 1e-4


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([[4, 7]] * 3, r"4 rows.*got \[\[4, 7\], \[4, 7\], \[4, 7\]\]"),
        ([[4, 6]] + [[11]] * 3, "a sum of 11"),
        ([[4, 0, 7]] + [[11]] * 3, "lengths of at least 1"),
        ([[12, -1]] + [[11]] * 3, "lengths of at least 1"),
        ([[]] + [[11]] * 3, "a sum of 11"),
    ],
)
def test_lengths_that_do_not_fill_the_rows_are_refused(lengths: Any, found: str) -> None:
    """By all of them, before a layer runs."""
    model = build(MODELS["qwen3"])
    with pytest.raises(ValueError, match=found):
        model(batch_of(4, 11)[0], document_lengths=lengths)


# The tracer asks every input for .grad, and torch warns where it is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
# It makes an object of a function's class, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["gpt", "qwen3_next"])
def test_other_lengths_do_not_compile_layers_again(name: str) -> None:
    """Graphs end at what goes document by document."""
    torch._dynamo.reset()
    model, plain = build(MODELS[name]), build(MODELS[name])
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph

    for layer in model.decoder.layers:
        layer.compile(backend=backend)
    tokens, _, _ = batch_of(4, 11)
    counts = []
    for lengths in (LENGTHS, [[11]] * 4, [[2, 9]] * 4, LENGTHS[::-1]):
        found = model(tokens, document_lengths=lengths)
        torch.testing.assert_close(found, plain(tokens, document_lengths=lengths))
        counts.append(num_graphs)
    assert counts[0] == counts[-1] > 0
