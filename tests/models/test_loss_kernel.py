"""The loss with its gradient written in forward: its kernels, and what autograd sees of them."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megafsdp.models import loss as loss_module
from megafsdp.models import masked_cross_entropy
from megafsdp.parallel import cross_entropy
from tests.training.step.steps import rows_of, tiny_model


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_equal_their_definition_in_tritons_interpreter() -> None:
    """Losses and gradients, fp32 and bf16, whatever the vocabulary, the mask and the factor."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.models.interpreted_loss"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "compared\n", ran.stderr


class _Kernels:
    """Stands in for the kernels, in torch."""

    def score_rows(
        self, logits: Tensor, labels: Tensor, weights: Tensor, grads: Tensor | None
    ) -> Tensor:
        """Write gradients by address, as a kernel does: autograd counts nothing."""
        scores = logits.float().log_softmax(dim=-1)
        picked = labels[:, None]
        if grads is not None:
            grad = scores.exp().scatter_add_(1, picked, -torch.ones_like(picked).float())
            grads.data.copy_(grad * weights[:, None])
        return -scores.gather(1, picked).squeeze(1)

    def scale_in_place(self, values: Tensor, factor: Tensor) -> None:
        """Scale without a count."""
        values.data.mul_(factor)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every loss computed by the stand-in."""
    monkeypatch.setattr(loss_module, "_kernels_for", lambda logits: _Kernels())


def _problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, 11, generator=generator) * 4
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    return logits.requires_grad_(), labels, (torch.rand(3, 7, generator=generator) < 0.6).float()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("may_overwrite", [False, True])
def test_the_gradient_takes_the_logits_place_where_it_may(
    may_overwrite: bool, is_transposed: bool
) -> None:
    """Elsewhere logits stay as they are; logits that are not contiguous are copied anyway."""
    leaf, labels, mask = _problem()
    logits = leaf.clone()
    logits = logits.transpose(0, 1).contiguous().transpose(0, 1) if is_transposed else logits
    loss = masked_cross_entropy(logits, labels, mask, may_overwrite_logits=may_overwrite)
    wanted = cross_entropy(leaf.flatten(0, 1), labels.flatten(), mask.flatten() / mask.sum())
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    assert torch.equal(logits, leaf) is (is_transposed or not may_overwrite)
    (gradient,) = torch.autograd.grad(loss * 3, leaf, retain_graph=True)
    (wanted_gradient,) = torch.autograd.grad(wanted * 3, leaf)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-7)
    # The gradient was scaled in place: a second time would scale it again.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss * 3, leaf)


@pytest.mark.usefixtures("kernels")
def test_logits_that_an_operator_has_saved_are_not_overwritten_unseen() -> None:
    """Autograd refuses the backward that would read them."""
    leaf, labels, mask = _problem()
    logits = leaf.clone()
    squares = logits.square().mean()
    masked_cross_entropy(logits, labels, mask, may_overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.usefixtures("kernels")
def test_gradients_of_gradients_are_refused() -> None:
    """The gradient is written in forward, without a graph."""
    logits, labels, mask = _problem()
    with pytest.raises(NotImplementedError, match=r"torch.nn.functional.cross_entropy\(\)"):
        torch.autograd.grad(masked_cross_entropy(logits, labels, mask), logits, create_graph=True)


@pytest.mark.usefixtures("kernels")
def test_a_cut_vocabulary_is_not_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They see a rank's own columns alone."""
    monkeypatch.setattr(loss_module, "cross_entropy", lambda *given: given)
    group = SimpleNamespace()
    assert masked_cross_entropy(*_problem(), tp_group=group)[-1] is group


@pytest.mark.usefixtures("kernels")
def test_an_evaluation_writes_no_gradient() -> None:
    """Without autograd the logits stay, also where they may be overwritten."""
    leaf, labels, mask = _problem()
    with torch.no_grad():
        logits = leaf.clone()
        masked_cross_entropy(logits, labels, mask, may_overwrite_logits=True)
    assert torch.equal(logits, leaf)


def test_a_model_has_the_same_gradients_when_its_logits_are_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in the model reads the logits after the loss."""
    tokens, found = rows_of(0, 1).flatten(0, 2), []
    for kernels in (None, _Kernels()):
        monkeypatch.setattr(loss_module, "_kernels_for", lambda logits, use=kernels: use)
        model = tiny_model()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-5, atol=1e-7)


def test_kernels_are_for_cuda_and_dtypes_that_do_not_underflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fp16 gradients wait for the loss scale, which comes with backward."""
    there = object()
    monkeypatch.setattr(loss_module, "_kernels", lambda: there)

    def chosen(is_cuda: bool, dtype: torch.dtype) -> bool:
        return loss_module._kernels_for(SimpleNamespace(is_cuda=is_cuda, dtype=dtype)) is there

    assert chosen(True, torch.bfloat16) and chosen(True, torch.float32)
    assert not chosen(True, torch.float16) and not chosen(False, torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not chosen(True, torch.bfloat16)


def test_a_missing_triton_is_named_once_with_its_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss of each step falls back; the log says so in one line."""
    loss_module._kernels.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "megafsdp.models"):
        assert loss_module._kernels() is None and loss_module._kernels() is None
    loss_module._kernels.cache_clear()
    (record,) = caplog.records
    assert "Expected triton" in record.getMessage() and "512 MiB" in record.getMessage()
