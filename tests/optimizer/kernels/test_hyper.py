"""Hyperparameters of Adam and the constants that follow from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper, round_to_fp32


def test_large_steps_leave_bias_correction_behind() -> None:
    """At step 1 the correction is the whole of the moments' weights; later it tends to one."""
    hyper = AdamHyper(1e-3, (0.9, 0.999))
    first, late = AdamConstants.rounded(hyper, 1), AdamConstants.rounded(hyper, 100_000)
    assert first.step_size == round_to_fp32(1e-3 / (1 - 0.9))
    assert first.root == round_to_fp32(math.sqrt(1 - 0.999))
    assert (late.step_size, late.root) == (round_to_fp32(1e-3), 1.0)
    without = AdamConstants.rounded(AdamHyper(1e-3, (0.9, 0.999), bias_correction=False), 1)
    assert (without.step_size, without.root) == (round_to_fp32(1e-3), 1.0)


def test_complements_of_betas_are_not_taken_in_fp32() -> None:
    """1 - 0.999 in fp32 is 1.3e-5 too small, relatively, and so would every second moment be."""
    square = AdamConstants.rounded(AdamHyper(betas=(0.9, 0.999)), 1).square
    assert square == np.float32(1 - 0.999) != np.float32(1) - np.float32(0.999)


def test_both_decays_are_told_apart() -> None:
    """Decoupled decay scales the weight; L2 regularisation adds to the gradient."""
    decoupled = AdamConstants.rounded(AdamHyper(1e-2, weight_decay=0.1), 1)
    assert (decoupled.decay, decoupled.l2) == (round_to_fp32(1 - 1e-3), 0.0)
    l2 = AdamConstants.rounded(AdamHyper(1e-2, weight_decay=0.1, adam_w_mode=False), 1)
    assert (l2.decay, l2.l2) == (1.0, round_to_fp32(0.1))


@pytest.mark.parametrize(
    ("value", "wanted"), [(1e39, math.inf), (-1e39, -math.inf), (1e-46, 0.0), (1.5, 1.5)]
)
def test_rounding_to_fp32_covers_all_doubles(value: float, wanted: float) -> None:
    """Values beyond the range of fp32 round as a cast would."""
    assert round_to_fp32(value) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -math.inf}, "lr of AdamHyper"),
        ({"eps": math.nan}, "nan.*eps"),
        ({"weight_decay": -0.1}, "-0.1.*weight_decay"),
        ({"betas": (1.0, 0.9)}, r"1.0.*betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"-0.1.*betas\[1\]"),
    ],
)
def test_wrong_hyperparameters_are_named(changes: dict[str, float], message: str) -> None:
    """A number that Adam has no meaning for is refused when it is given."""
    with pytest.raises(ValueError, match=message):
        AdamHyper(**changes)  # type: ignore[arg-type]


def test_numbers_that_are_tensors_are_read_each_time() -> None:
    """A tensor that is changed in place does not find the constants of its old value."""
    group = {name: torch.tensor(1.0) for name in ("lr", "eps", "weight_decay")}
    group |= {"betas": (0.9, 0.99), "bias_correction": True}
    before = AdamConstants.rounded(AdamHyper.of(group, adam_w_mode=False), 1)
    for name in ("eps", "weight_decay"):
        group[name].fill_(3.0)
    after = AdamConstants.rounded(AdamHyper.of(group, adam_w_mode=False), 1)
    assert (before.eps, before.l2) == (1.0, 1.0)
    assert (after.eps, after.l2) == (3.0, 3.0)
