"""Counter-based stochastic rounding: random numbers depend only on a seed and on the place.

Philox 4x32-10 turns the index of four neighbours and a seed into four words of 32 bits, so each
element has the same number in any order of computation and on any device. The seed comes from
torch's CPU generator, whose state is in checkpoints: a resumed run rounds like one that never
stopped. A seed is drawn in backward, once per linear. Recomputation of a forward in backward
restores the generator's state, so a layer rounds the same with activation checkpointing.

    element   0    1    2    3  |  4    5    6    7
    counter  (0, 0, stream, 0)  | (1, 0, stream, 0)          key (seed % 2**32, seed // 2**32)

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), sections 3.2 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megafsdp._native import native_module
from megafsdp.device.torch_private import is_tracing

_WORD = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
_NUM_ROUNDS = 10
_WORDS_A_COUNTER = 4
# The most bits of a fraction that fp32 holds exactly.
_FRACTION_BITS = 24


class Noise(NamedTuple):
    """A stream of uniform random numbers for rounding.

    Attributes:
        seed: A seed of 63 bits, from :func:`draw_seed`.
        stream: A number that differs for each use of a seed.
    """

    seed: int
    stream: int

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return numbers in ``[0, 1)``, multiples of 2**-24, fp32; allocates.

        Element ``i``, in row-major order, has the same number in every shape and on every device.
        """
        numel, module = math.prod(shape), native_module()
        is_native = device.type == "cpu" and not is_tracing()
        if module is not None and is_native and numel > 0:
            out = torch.empty(tuple(shape), dtype=torch.float32, device=device)
            module.fill_uniform(
                out=out.data_ptr(),
                numel=numel,
                seed=self.seed,
                stream=self.stream,
                num_threads=torch.get_num_threads(),
            )
            return out
        num_counters = -(-numel // _WORDS_A_COUNTER)
        index = torch.arange(num_counters, dtype=torch.int64, device=device)
        counter = (index & _WORD, index >> 32, self.stream, 0)
        words = philox(counter, (self.seed & _WORD, self.seed >> 32))
        fractions = torch.stack(words, dim=-1).flatten()[:numel] >> (32 - _FRACTION_BITS)
        return fractions.float().mul_(2.0**-_FRACTION_BITS).view(tuple(shape))


def draw_seed() -> int:
    """Return a seed from torch's default CPU generator, whatever the device."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def philox(
    counter: tuple[Tensor, Tensor | int, Tensor | int, Tensor | int], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of Philox 4x32-10 of each counter.

    Args:
        counter: Four words, as int64 tensors of one shape or numbers, each below 2**32.
        key: Two words.

    Returns:
        int64 tensors of that shape, below 2**32.
    """
    c0, c1, c2, c3 = (torch.as_tensor(c, device=counter[0].device) for c in counter)
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The product of two words may overflow int64, but its bits are right; the shift extends the
        # sign, and the mask removes that.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    shape = counter[0].shape
    return c0.expand(shape), c1.expand(shape), c2.expand(shape), c3.expand(shape)
