"""A program that compares the loss's kernels with their definition in Triton's interpreter.

It needs ``TRITON_INTERPRET=1`` in its environment before triton is imported, so it is no test of a
process that may have imported it.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch

from megafsdp.models import loss, loss_kernel, masked_cross_entropy

_BLOCK = 64
# One block, several with a rest, several without.
_VOCABULARIES = (11, 201, 128)


def _compare(dtype: torch.dtype, vocabulary: int, factor: float, may_overwrite: bool) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    values = torch.randn(2, 3, vocabulary, generator=generator) * 4
    labels = torch.randint(0, vocabulary, (2, 3), generator=generator)
    # The first block of a row has no word.
    values[1, 0, : min(_BLOCK, vocabulary - 1)] = -torch.inf
    labels[1, 0] = vocabulary - 1
    labels[0, 0], labels[1, 2] = 0, vocabulary - 1
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    found, leaves = [], []
    for kernels in (None, loss_kernel):
        leaf = values.to(dtype).requires_grad_()
        with mock.patch.object(loss, "_kernels_for", lambda logits, kernels=kernels: kernels):
            total = masked_cross_entropy(
                leaf.clone(), labels, mask, may_overwrite_logits=may_overwrite
            )
        (total * factor).backward()
        found.append(total.detach())
        leaves.append(leaf.grad)
    # Another order of fp32 sums of exponentials.
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    # bf16 is rounded in forward and again by the factor, each time by at most 2**-7 here: the
    # interpreter cuts bits off where a GPU rounds to nearest.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-6}
    torch.testing.assert_close(leaves[1], leaves[0], **{"atol": 1e-7, **tolerance})
    assert torch.all(leaves[1][mask == 0] == 0)
    assert leaves[1].abs().max() > 0.1 * factor


def main() -> None:
    """Compare in all dtypes, with rows shorter and longer than a block."""
    with mock.patch.object(loss_kernel, "_BLOCK", _BLOCK):
        dtypes, choices = (torch.float32, torch.bfloat16), ((1.0, True), (1.0, False), (3.0, True))
        for dtype, vocabulary, choice in itertools.product(dtypes, _VOCABULARIES, choices):
            _compare(dtype, vocabulary, *choice)
    # A label that is no column is no read beyond the row.
    nothing = torch.zeros(1, _BLOCK)
    outside, weights = torch.tensor([2 * _BLOCK]), torch.ones(1)
    assert loss_kernel.score_rows(nothing, outside, weights, None).isnan().all()
    print("compared")


if __name__ == "__main__":
    main()
