"""The loss and its gradient equal torch's cross entropy, with less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megafsdp.models import masked_cross_entropy
from megafsdp.parallel import loss as loss_module


def _problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, 11, generator=generator) * 4
    labels = torch.randint(0, 11, (3, 7), generator=generator)
    mask = (torch.rand(3, 7, generator=generator) < 0.6).float()
    assert 0 < mask.sum() < mask.numel()
    return logits.to(dtype).requires_grad_(), labels, mask


def _reference(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


@pytest.mark.parametrize("block_numel", [11 * 4, 2**22, 1])
def test_loss_and_gradient_equal_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, block_numel: int
) -> None:
    """Whatever the block, masked tokens count nothing and the rest are averaged."""
    monkeypatch.setattr(loss_module, "_BLOCK_NUMEL_ON_CPU", block_numel)
    logits, labels, mask = _problem()
    loss = masked_cross_entropy(logits, labels, mask)
    (gradient,) = torch.autograd.grad(loss * 3, logits)
    wanted = _reference(logits, labels, mask)
    (wanted_gradient,) = torch.autograd.grad(wanted * 3, logits)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    # fp32 rounding of an exponential and a division, on numbers below 1.
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-7)
    assert torch.all(gradient[mask == 0] == 0)


def test_gradients_of_gradients_are_refused() -> None:
    """Softmax is not linear: without its graph they would be too small, or zero."""
    logits, labels, mask = _problem()
    with pytest.raises(NotImplementedError, match=r"torch.nn.functional.cross_entropy\(\)"):
        torch.autograd.grad(masked_cross_entropy(logits, labels, mask), logits, create_graph=True)


def test_no_mask_counts_every_token() -> None:
    """Without a mask the loss is the plain mean."""
    logits, labels, _ = _problem()
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(masked_cross_entropy(logits, labels), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_part_of_the_tokens_is_divided_by_the_number_of_all(has_mask: bool) -> None:
    """Parts that are scored one by one add up to the mean over all tokens."""
    logits, labels, mask = _problem()
    whole = (logits, labels, mask if has_mask else None)
    total = torch.tensor(mask.sum().item() if has_mask else 21.0)
    parts = [[None if x is None else x[row : row + 1] for x in whole] for row in range(3)]
    found = sum(masked_cross_entropy(*part, num_counted=total) for part in parts)
    torch.testing.assert_close(found, masked_cross_entropy(*whole), rtol=1e-6, atol=0)


def test_a_fully_masked_batch_has_loss_and_gradient_zero() -> None:
    """A microbatch of padding must not poison the step with NaN."""
    logits, labels, mask = _problem()
    loss = masked_cross_entropy(logits, labels, torch.zeros_like(mask))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bf16_logits_are_summed_in_fp32() -> None:
    """The loss equals fp32 arithmetic on the rounded logits; the gradient is rounded once."""
    logits, labels, mask = _problem(torch.bfloat16)
    loss = masked_cross_entropy(logits, labels, mask)
    wanted = _reference(logits, labels, mask)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(loss, logits)
    upcast = logits.detach().float().requires_grad_()
    (wanted_gradient,) = torch.autograd.grad(_reference(upcast, labels, mask), upcast)
    assert gradient.dtype == torch.bfloat16
    # One rounding to 8 bits of mantissa.
    torch.testing.assert_close(gradient.float(), wanted_gradient, rtol=2**-8, atol=1e-8)


def test_a_bf16_mask_counts_past_256() -> None:
    """A mask cast to bf16 by a policy holds exact ones, of which the sum must be exact too."""
    logits = torch.zeros(1, 1001, 2)
    labels = torch.zeros(1, 1001, dtype=torch.int64)
    loss = masked_cross_entropy(logits, labels, torch.ones(1, 1001, dtype=torch.bfloat16))
    torch.testing.assert_close(loss, torch.tensor(2.0).log(), rtol=1e-6, atol=0)


def test_backward_keeps_no_fp32_copy_of_the_logits() -> None:
    """What autograd saves is the logits themselves and numbers per token."""
    logits, labels, mask = _problem(torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        masked_cross_entropy(logits, labels, mask)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]
