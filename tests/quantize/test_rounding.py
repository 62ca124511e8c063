"""Numbers by counter: known words of Philox, uniform, and rounding that is right on average."""

from __future__ import annotations

import pytest
import torch

from megafsdp._native import native_module
from megafsdp.quantize.elements import E2M1
from megafsdp.quantize.hadamard import transform_tokens
from megafsdp.quantize.rounding import Noise, draw_seed, philox

_ONES = 0xFFFF_FFFF
# Counter, key and words of philox4x32-10, as the authors of Random123 publish them.
_KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_ONES,) * 4, (_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
_CPU = torch.device("cpu")


def _words(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Return what Philox makes of a counter, in integers of any size."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & _ONES,
            (first >> 32) ^ c[3] ^ k[1],
            first & _ONES,
        ]
        k = [(k[0] + 0x9E3779B9) & _ONES, (k[1] + 0xBB67AE85) & _ONES]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "words"), _KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """For counters and keys of zeros, of ones, and of digits of pi."""
    found = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(word.item() for word in found) == words == _words(counter, key)


def test_an_elements_number_is_a_word_of_its_counter() -> None:
    """Element i has word i % 4 of counter (i // 4, 0, stream, 0), in 24 bits; key is the seed."""
    seed = 0x7234_5678_9ABC_DEF0
    found = Noise(seed, 1).uniform((5, 7), _CPU).flatten()
    for index in range(35):
        words = _words((index // 4, 0, 1, 0), (seed & _ONES, seed >> 32))
        assert found[index].item() == (words[index % 4] >> 8) / 2**24


@pytest.mark.native
def test_compiled_numbers_and_transforms_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every instruction set, with threads, and where a range ends within a counter or block."""
    module = native_module()
    if module is None:
        pytest.skip("native: not built")
    shapes = [(1,), (7,), (511, 3), (300, 301)]
    values = [torch.randn(t, c) for t, c in ((1, 3), (37, 65), (160, 600))]
    values += [v.to(dtype) for v in values for dtype in (torch.bfloat16, torch.float16)]

    def made() -> list[torch.Tensor]:
        noise = Noise(0x7234_5678_9ABC_DEF0, 1)
        uniform = [noise.uniform(shape, _CPU) for shape in shapes]
        return uniform + [transform_tokens(v) for v in values]

    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    wanted = made()
    monkeypatch.delenv("MEGAFSDP_NATIVE")
    num_threads = torch.get_num_threads()
    for level in module.simd_levels():
        monkeypatch.setenv("MEGAFSDP_SIMD", level)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                found = made()
            finally:
                torch.set_num_threads(num_threads)
            assert all(map(torch.equal, found, wanted)), (level, threads)


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("fill_uniform", {"out": 0}, "out: expected an address"),
        ("fill_uniform", {"out": 6}, "out: expected an address aligned"),
        ("fill_uniform", {"numel": 0}, "numel: expected a positive number"),
        ("fill_uniform", {"stream": 2**32}, "stream: expected a number of 32 bits"),
        ("fill_uniform", {"num_threads": 0}, "num_threads: expected a positive number"),
        ("transform_rows", {"values": 0}, "values: expected an address"),
        ("transform_rows", {"values": 65}, "values: expected an address aligned"),
        ("transform_rows", {"out": 64}, "out: expected memory apart"),
        ("transform_rows", {"num_rows": 0}, "num_rows: expected a positive number"),
        ("transform_rows", {"num_cols": -1}, "num_cols: expected a positive number"),
        ("transform_rows", {"dtype": "float64"}, "dtype: expected float32"),
    ],
)
def test_arguments_of_the_kernels_are_checked(
    name: str, changes: dict[str, object], match: str
) -> None:
    """Each error names the argument, before anything is read or written."""
    module = native_module()
    if module is None:
        pytest.skip("native: not built")
    uniform = {"out": 4096, "numel": 4, "seed": 1, "stream": 0, "num_threads": 1}
    rows = {"values": 64, "dtype": "bfloat16", "num_rows": 3, "num_cols": 5, "out": 4096}
    arguments = uniform if name == "fill_uniform" else {**rows, "num_threads": 1}
    with pytest.raises(ValueError, match=match):
        getattr(module, name)(**{**arguments, **changes})


def test_numbers_do_not_depend_on_the_shape() -> None:
    """An element counted by rows has one number, so parts can be made apart."""
    whole = Noise(3, 0).uniform((6, 8), _CPU).flatten()
    assert torch.equal(Noise(3, 0).uniform((48,), _CPU), whole)
    assert torch.equal(Noise(3, 0).uniform((7, 3), _CPU).flatten(), whole[:21])
    assert Noise(3, 0).uniform((0, 4), _CPU).shape == (0, 4)


def test_numbers_are_uniform_and_streams_independent() -> None:
    """Bins, mean and correlations of 2**18 numbers, within five standard deviations."""
    count = 2**18
    first = Noise(11, 0).uniform((count,), _CPU).double()
    assert first.min() >= 0 and first.max() < 1
    bins = torch.histc(first, 64, 0, 1)
    # Chi-square of 63 degrees of freedom: mean 63, variance 126.
    chi_square = ((bins - count / 64) ** 2 / (count / 64)).sum()
    assert abs(chi_square - 63) < 5 * 126**0.5
    for other in (
        Noise(11, 1).uniform((count,), _CPU).double(),
        Noise(12, 0).uniform((count,), _CPU).double(),
        first.roll(1),
    ):
        correlation = ((first - 0.5) * (other - 0.5)).mean() * 12
        assert abs(correlation) < 5 / count**0.5


def test_rounding_by_chance_is_right_on_average() -> None:
    """The mean of many roundings is the value; a value that has a code keeps it."""
    values = torch.tensor([0.0, 0.1, -0.3, 0.5, 1.2, 1.9, -2.3, 3.7, -4.0, 5.5, 6.0, 9.0])
    num_draws = 40_000
    repeated = values.expand(num_draws, -1).contiguous()
    noise = Noise(5, 0).uniform(repeated.shape, _CPU)
    decoded = E2M1.decode(E2M1.encode_stochastically(repeated, noise)).double()
    clamped = values.double().clamp(-6, 6)
    # Two neighbours at most 2 apart: the deviation of one rounding is at most 1.
    assert (decoded.mean(0) - clamped).abs().max() < 5 / num_draws**0.5
    has_code = torch.isin(clamped.abs(), E2M1.decode(torch.arange(8, dtype=torch.uint8)).double())
    assert has_code.sum() == 5
    assert torch.equal(decoded[:, has_code], clamped[has_code].expand(num_draws, -1))
    # Nothing is rounded beyond a neighbour.
    assert ((decoded - clamped).abs() < 2).all()


def test_a_seed_follows_the_generators_state() -> None:
    """Another seed each time; the same ones from the same state, which checkpoints have."""
    state = torch.get_rng_state()
    seeds = [draw_seed() for _ in range(4)]
    torch.set_rng_state(state)
    assert [draw_seed() for _ in range(4)] == seeds
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**32
