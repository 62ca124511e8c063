"""The definition of the update against torch's fused optimizer and against exact arithmetic."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper, round_to_fp32

# torch's fused kernel computes whole vectors of 16 elements in our order, and rounds the rest
# differently.
NUMEL = 32 * 40


def _values(numel: int, seed: int, spread: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 2.0**exponents


def _train_both(
    hyper: AdamHyper, num_steps: int, numel: int = NUMEL, **options: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return weight and moments after some steps, ours and torch's."""
    parameter = torch.nn.Parameter(_values(numel, seed=0))
    ours = [parameter.detach().clone(), torch.zeros(numel), torch.zeros(numel)]
    make = torch.optim.AdamW if hyper.adam_w_mode else torch.optim.Adam
    optimizer = make(
        [parameter],
        lr=hyper.lr,
        betas=hyper.betas,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        **options,
    )
    for step in range(1, num_steps + 1):
        grad = _values(numel, seed=step)
        parameter.grad = grad.clone()
        optimizer.step()
        constants = AdamConstants.rounded(hyper, step)
        ours = list(reference.update(ours[0], grad, ours[1], ours[2], constants))
    state = optimizer.state[parameter]
    return ours, [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]


@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.3, 0.0])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_update_has_the_bits_of_torch_fused(
    adam_w_mode: bool, weight_decay: float, beta1: float
) -> None:
    """Weights and moments equal the vector body of torch's fused kernel in every bit."""
    hyper = AdamHyper(3e-2, (beta1, 0.95), 1e-8, weight_decay, adam_w_mode)
    ours, theirs = _train_both(hyper, num_steps=6, fused=True)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(mine, wanted)
    assert not torch.equal(ours[0], _values(NUMEL, seed=0))


def test_update_is_near_torch_fused_where_that_has_other_bits() -> None:
    """In the last elements, short of a vector, torch rounds the second moment once more."""
    ours, theirs = _train_both(AdamHyper(1e-2, (0.9, 0.95), 1e-8, 0.1), 1, numel=15, fused=True)
    # One rounding of v apart: 1 unit in the last place, which the root halves.
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_update_is_near_torch_foreach(adam_w_mode: bool) -> None:
    """The foreach form divides in another order; six steps stay within rounding."""
    hyper = AdamHyper(3e-2, (0.9, 0.95), 1e-8, 0.1, adam_w_mode)
    ours, theirs = _train_both(hyper, num_steps=6, foreach=True)
    # A step is at most about lr, and differs by a few roundings of 2**-24 relative to it; each
    # addition to a weight w rounds by 2**-24 |w|. Six steps: 6 * 2**-23 covers both.
    torch.testing.assert_close(ours[0], theirs[0], rtol=6 * 2.0**-23, atol=6 * 2.0**-23 * 3e-2 * 8)
    # Moments cancel: their error is relative to the largest gradient, 2**10 here, not to them.
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=2.0**10 * 2.0**-23)


def test_fused_multiply_add_rounds_once() -> None:
    """The sum of an exact product equals exact rational arithmetic, rounded once to fp32."""
    tiny = 2.0**-23
    edges = [1.0, 1 + tiny, 1 - tiny / 2, 3.0, 2.0**-60, 2.0**-100, 2.0**-126, 2.0**-149, 0.0]
    edges += [2.0**24 + 2, 2.0**100, 1 / 3]
    # The product of the first two, added to the third, is in double the middle of two fp32 values.
    edges += [64 * (1 + 2.0**-15), 1 - 2.0**-15, 2.0**30 + 128]
    edges = [sign * round_to_fp32(value) for value in edges for sign in (1, -1)]
    triples = np.array(list(itertools.product(edges, repeat=3)))
    a, b, c = (torch.from_numpy(column).float() for column in triples.T)
    got = reference._fma(a, b, c).tolist()
    for index, (x, y, z) in enumerate(triples):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert got[index] == _nearest_fp32(exact), (x, y, z)


def _nearest_fp32(exact: Fraction) -> float:
    """Round to nearest even at the precision, and not below the smallest exponent, of fp32."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = float(round(magnitude / unit) * unit)
    rounded = rounded if rounded < 2.0**128 else math.inf
    return math.copysign(rounded, exact)


def test_fused_multiply_add_carries_what_is_not_finite() -> None:
    """Infinities and NaN come through; opposite infinities give NaN."""
    inf, nan = math.inf, math.nan
    a, c = torch.tensor([inf, inf, nan, 1.0, 3e38]), torch.tensor([1.0, -inf, 0.0, nan, 3e38])
    got = reference._fma(a, torch.tensor([2.0, 1.0, 1.0, 1.0, 2.0]), c)
    assert got[[0, 4]].tolist() == [inf, inf] and got[1:4].isnan().all()


def test_halves_keep_every_bit() -> None:
    """High and low halves give back the same bits: every low half beside many high ones."""
    low = torch.arange(65536, dtype=torch.int32)
    special = [0, 0x8000, 0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x3F80, 0x7FC0, 0x7FFF, 0xFFFF, 0x4049]
    for high in special:
        bits = low + ((high << 16) - (high >> 15 << 32))
        values = bits.to(torch.int32).view(torch.float32)
        upper, rest = reference.fp32_to_halves(values)
        assert upper.dtype == torch.bfloat16 and rest.dtype == torch.int16
        assert torch.equal(reference.halves_to_fp32(upper, rest).view(torch.int32), bits)
        is_tie = low == 0x8000
        plain = values.isfinite() & ~is_tie
        assert torch.equal(upper[plain], values[plain].bfloat16())


def test_denormal_mode_is_put_back() -> None:
    """Flushing is on inside only, whatever it was outside, an exception included."""
    small = torch.full((4,), 2.0**-120)

    def is_flushed() -> bool:
        return bool((small * 2.0**-20 == 0).all())

    for before in (False, True):
        torch.set_flush_denormal(before)
        try:
            for inside in (False, True):
                with pytest.raises(KeyError), reference.denormal_mode(inside):
                    assert is_flushed() == inside
                    raise KeyError
                assert is_flushed() == before
        finally:
            torch.set_flush_denormal(False)


def test_sum_of_squares_is_the_written_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes, blocks and runs, here of two, are added as a plain loop over elements adds them."""
    monkeypatch.setattr(reference, "_RUN", 2)
    values = _values(4 * 4096 + 77, seed=6, spread=24)
    sums = []
    for block in values.split(4096):
        lanes = [0.0] * 16
        for i, value in enumerate(block.tolist()):
            lanes[i % 16] += value * value
        total = 0.0
        for lane in lanes:
            total += lane
        sums.append(total)
    first, second, third, fourth, fifth = sums
    total = ((first + second) + (third + fourth)) + fifth
    assert total != first + second + third + fourth + fifth, "values whose order shows"
    assert reference.sum_of_squares(values).item() == total
