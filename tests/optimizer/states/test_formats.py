"""Scaled states against an encoder that goes through rows and blocks one by one."""

from __future__ import annotations

import math

import pytest
import torch

from megafsdp.optimizer.states.formats import ScaledState

FP16, FP8 = torch.float16, torch.float8_e4m3fn
NUM_ROWS, BLOCK = 5, 128
# Half of what fp16 can hold; all of what FP8 can.
LARGEST = {FP16: 32752.0, FP8: 448.0}


def _values(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows whose blocks have scales of their own, all powers of two; row 1 is zero.

    Such scales divide and multiply without rounding, so that codes have one right value.
    """
    generator = torch.Generator().manual_seed(columns)
    values = torch.rand(NUM_ROWS, columns, generator=generator) * 2 - 1
    for row in range(NUM_ROWS):
        for number, start in enumerate(range(0, columns, BLOCK)):
            block = values[row, start : start + BLOCK]
            at = int(torch.randint(len(block), (), generator=generator))
            block[at] = 1.0 if row % 2 else -1.0
            block *= LARGEST[dtype] * 2.0 ** (3 * row - 4 * number - 10)
    values[1] = 0.0
    return values


def _naive(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.zeros(values.shape, dtype=dtype), []
    for row in range(len(values)):
        for start in range(0, values.size(1), BLOCK):
            block = values[row, start : start + BLOCK]
            scale = block.abs().max() / LARGEST[dtype]
            scales.append(scale)
            if scale > 0:
                codes[row, start : start + BLOCK] = (block / scale).to(dtype)
    return codes, torch.stack(scales).view(len(values), -1)


@pytest.mark.parametrize("dtype", [FP16, FP8])
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
def test_each_128_elements_of_a_row_share_a_scale(dtype: torch.dtype, columns: int) -> None:
    """Codes and scales are the naive encoder's; so is the number of scales, and the decoding."""
    values = _values(columns, dtype)
    codes, scales = _naive(values, dtype)
    assert len(scales.unique()) == (NUM_ROWS - 1) * math.ceil(columns / BLOCK) + 1
    state = ScaledState.zeros(NUM_ROWS, columns, dtype, torch.device("cpu"))
    assert state.codes.dtype == dtype and state.scales.dtype == torch.float32
    state.encode(values)
    assert state.scales.shape == (NUM_ROWS, math.ceil(columns / BLOCK))
    assert torch.equal(state.scales, scales)
    assert torch.equal(state.codes.view(torch.uint8), codes.view(torch.uint8))
    spread = torch.stack([scales[:, column // BLOCK] for column in range(columns)], dim=1)
    assert torch.equal(state.decode(), codes.float() * spread)
    assert not state.decode()[1].any() and state.decode()[0].any()
