"""Products of codes on GPUs, by stand-ins that check operands as torch's kernels do, and decode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafsdp import quantize_
from megafsdp.device.torch_private import is_tracing, scaled_product
from megafsdp.models import ActivationCheckpointing
from megafsdp.quantize import products
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from tests.quantize.emulated_cuda import emulated_cuda
from tests.quantize.weights import quantized

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CPU = torch.device("cpu")


def _checked_product(a: Tensor, b: Tensor) -> None:
    """Check what torch's scaled products want of their operands on compute capability 9.0."""
    assert a.dtype in _FLOAT8 and b.dtype in _FLOAT8
    assert not a.dtype == b.dtype == torch.float8_e5m2, "one of them is e4m3"
    assert a.is_contiguous() and b.t().is_contiguous(), "the summed dimension lies last in both"
    assert a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0


def _is_by_columns(scales: Tensor) -> bool:
    rows, cols = scales.shape
    return scales.stride() == (1, rows) or (cols == 1 and scales.stride() == (1, 1))


class _StandIns:
    """Torch's scaled products in fp32, with the calls that were made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def tensorwise(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        *,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        """Multiply with one scale each."""
        _checked_product(a, b)
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert scale_a.numel() == scale_b.numel() == 1
        self.calls.append("forward" if use_fast_accum else "gradient")
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    def blockwise(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        kind_a: object,
        scale_b: Tensor,
        kind_b: object,
        *,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Multiply with scales of 128 elements of a row, or of 128 x 128."""
        _checked_product(a, b)
        assert not is_tracing(), "for graphs torch takes multiples of 128 only"
        assert kind_a == F.ScalingType.BlockWise1x128
        blocks = -(-a.shape[1] // 128)
        assert scale_a.shape == (a.shape[0], blocks) and _is_by_columns(scale_a)
        assert a.shape[0] % 4 == 0
        of_a = scale_a.repeat_interleave(128, 1)[:, : a.shape[1]]
        if kind_b == F.ScalingType.BlockWise128x128:
            rounded = -(-blocks // 4) * 4
            assert scale_b.shape == (rounded, -(-b.shape[1] // 128)) and _is_by_columns(scale_b)
            of_b = scale_b.repeat_interleave(128, 0)[: b.shape[0]]
            of_b = of_b.repeat_interleave(128, 1)[:, : b.shape[1]]
        else:
            assert kind_b == F.ScalingType.BlockWise1x128
            assert scale_b.shape == (b.shape[1], blocks) and _is_by_columns(scale_b)
            of_b = scale_b.repeat_interleave(128, 1)[:, : b.shape[0]].t()
        self.calls.append("tiles" if kind_b == F.ScalingType.BlockWise128x128 else "rows")
        return ((a.float() * of_a) @ (b.float() * of_b)).to(output_dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[_StandIns]:
    """Let products take CPU tensors for those of a GPU of compute capability 9.0."""
    stand_ins = _StandIns()
    monkeypatch.setattr(products, "_is_on_gpu", lambda values: True)
    monkeypatch.setattr(products, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(products, "_cuda_version", lambda: (12, 9))
    monkeypatch.setattr(products, "scaled_product", stand_ins.tensorwise)
    monkeypatch.setattr(F, "scaled_mm", stand_ins.blockwise, raising=False)
    yield stand_ins
    products._log_decoding.cache_clear()


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.linspace(0.25, 4, shape[-1])).bfloat16()


def _run(
    recipe: str,
    num_tokens: int,
    bias: Tensor | None = None,
    num_outputs: int = 160,
    linear: Callable[..., Tensor] = F.linear,
) -> list[Tensor]:
    weight = quantized(_drawn(num_outputs, 288, seed=1), recipe)
    x = _drawn(num_tokens, 288).requires_grad_()
    y = linear(x, weight, bias)
    torch.manual_seed(0)
    return [y, *torch.autograd.grad(y, (x, weight), _drawn(num_tokens, num_outputs, seed=3))]


@pytest.mark.parametrize(
    ("recipe", "calls"),
    [
        ("fp8_current", ["forward", "gradient", "gradient"]),
        ("fp8_delayed", ["forward", "gradient", "gradient"]),
        ("fp8_block", ["tiles", "tiles", "rows"]),
    ],
)
@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "has_bias"),
    [(144, 160, False), (144, 160, True), (144, 512, False), (96, 112, False)],
)
def test_products_of_codes_equal_those_of_decoded_values(
    gpu: _StandIns,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    calls: list[str],
    num_tokens: int,
    num_outputs: int,
    has_bias: bool,
) -> None:
    """In the layout that the kernels want, for all three products; also of one and four tiles."""
    bias = _drawn(num_outputs, seed=4) if has_bias else None
    found = _run(recipe, num_tokens, bias, num_outputs)
    assert gpu.calls == calls
    monkeypatch.setattr(products, "_is_on_gpu", lambda values: False)
    for got, want in zip(found, _run(recipe, num_tokens, bias, num_outputs), strict=True):
        # Decoded operands are rounded to bf16 first; sums of the two differ by that.
        assert (got - want).norm() < 4e-3 * want.norm()
    assert gpu.calls == calls


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_a_compiled_graph_multiplies_the_same_codes(gpu: _StandIns, recipe: str) -> None:
    """Also of sizes that are no multiple of a block."""
    wanted = _run(recipe, 144)
    calls = list(gpu.calls)
    torch.compiler.reset()
    gpu.calls.clear()
    compiled = torch.compile(F.linear, backend="aot_eager", fullgraph=True)
    found = _run(recipe, 144, linear=compiled)
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
    # The tracer calls the stand-in for products of tensors too.
    assert set(gpu.calls) == set(calls)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_kept_by_selective_checkpointing(
    gpu: _StandIns, monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    """By torch's own product: what a layer adds to it must not change what was kept."""
    monkeypatch.setattr(products, "scaled_product", scaled_product)
    bias = _drawn(160, seed=4) if has_bias else None
    wanted = _run("fp8_current", 144, bias)
    choice, layer = ActivationCheckpointing("selective"), nn.Linear(1, 1)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer.forward = lambda x: F.linear(x, weight, bias)
        return choice.run_layer(layer, 0, x)

    found = _run("fp8_current", 144, bias, linear=linear)
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("recipe", "matrices"),
    [
        # Both ways of x; both ways of g.
        ("fp8_current", 2),
        ("fp8_delayed", 2),
        # Along features and along tokens, of x and of g.
        ("fp8_block", 4),
    ],
)
def test_operands_are_transposed_as_they_are_quantized(
    gpu: _StandIns, emulation: Path, recipe: str, matrices: int
) -> None:
    """By the CUDA kernels only the weight's codes are transposed by a pass of their own."""
    wanted = _run(recipe, 144)
    calls = list(gpu.calls)
    gpu.calls.clear()
    with emulated_cuda(emulation) as module:
        found = _run(recipe, 144)
    assert gpu.calls == calls
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
    functions = [function for function, _ in module.launches]
    assert functions.count("encode_matrix") == matrices
    assert functions.count("transpose_codes") == 1
    assert functions.count("encode_tiles") == 1, "of the weight"


@pytest.mark.parametrize(
    ("recipe", "num_tokens", "num_scaled", "reason"),
    [
        ("fp8_current", 40, 0, "sizes"),
        ("mxfp8", 144, 0, "mx32_e4m3, of which no product is built"),
        ("nvfp4", 144, 0, "nv16_e2m1, of which no product is built"),
    ],
)
def test_products_that_cannot_be_had_decode_and_say_so_once(
    gpu: _StandIns,
    caplog: pytest.LogCaptureFixture,
    recipe: str,
    num_tokens: int,
    num_scaled: int,
    reason: str,
) -> None:
    """For tokens that are no multiple of 16, and formats without a kernel."""
    with caplog.at_level(logging.WARNING, "megafsdp.quantize"):
        first, again = _run(recipe, num_tokens), _run(recipe, num_tokens)
    assert len(gpu.calls) == num_scaled and all(map(torch.equal, first, again))
    messages = [record.getMessage() for record in caplog.records]
    assert all(reason in message for message in messages)
    assert len(messages) == len(set(messages)) > 0


_FITTING = (144, 288, 160)


@pytest.mark.parametrize(
    ("recipe", "changes", "reason"),
    [
        ("fp8_current", {}, None),
        ("fp8_block", {}, None),
        ("fp8_current", {"capability": (8, 0)}, "begin at 8.9"),
        ("fp8_current", {"capability": (8, 9)}, None),
        ("fp8_current", {"capability": (10, 0)}, None),
        ("fp8_block", {"capability": (10, 0)}, "blocks of 128 need 9.0"),
        ("fp8_block", {"cuda": (12, 8)}, "blocks of 128 need 9.0"),
        ("fp8_current", {"cuda": (12, 8)}, None),
        ("fp8_current", {"dtype": torch.float32}, "products in torch.float32"),
        ("fp8_current", {"sizes": (144, 288, 168)}, "not all multiples of 16"),
        ("mxfp8", {}, "no product is built"),
        ("nvfp4", {}, "no product is built"),
    ],
)
def test_the_way_of_a_product_follows_device_and_shapes(
    monkeypatch: pytest.MonkeyPatch, recipe: str, changes: dict[str, object], reason: str | None
) -> None:
    """Nothing that ranks could differ in, as values or the number of calls."""
    monkeypatch.setattr(products, "_capability", lambda i: changes.get("capability", (9, 0)))
    monkeypatch.setattr(products, "_cuda_version", lambda: changes.get("cuda", (12, 9)))
    monkeypatch.setattr(F, "scaled_mm", lambda *args, **options: None, raising=False)
    form = recipe_of(recipe).input
    assert form is not None
    dtype, sizes = changes.get("dtype", torch.bfloat16), changes.get("sizes", _FITTING)
    found = products.reason_to_decode(_CPU, form, dtype, sizes)
    assert found is None if reason is None else reason in (found or "")


def test_blocks_decode_with_a_torch_without_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up by its name in torch.nn.functional."""
    monkeypatch.setattr(products, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(products, "_cuda_version", lambda: (12, 9))
    monkeypatch.delattr(F, "scaled_mm", raising=False)
    form = recipe_of("fp8_block").input
    assert form is not None
    assert products.reason_to_decode(_CPU, form, torch.bfloat16, _FITTING) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_graphs_and_recomputation_have_the_bits_of_eager_products_on_a_gpu(recipe: str) -> None:
    """Of sizes that are no multiple of a block, and with a bias."""
    linear = nn.Linear(288, 160, dtype=torch.bfloat16, device="cuda")
    quantize_(linear, recipe_of(recipe, quantize_activations=True))
    x = _drawn(144, 288).cuda().requires_grad_()
    choice = ActivationCheckpointing("selective")
    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        linear,
        torch.compile(linear, fullgraph=True),
        lambda x: choice.run_layer(linear, 0, x),
    )
    found = []
    for run in ways:
        y = run(x)
        gradients = torch.autograd.grad(y, (x, linear.weight), _drawn(144, 160, seed=3).cuda())
        found.append([y, *gradients])
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_cpu_never_multiplies_codes(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Torch could for some, a thousand times slower than decoding."""

    def refused(*args: object, **options: object) -> Tensor:
        raise AssertionError("a scaled product on a CPU")

    monkeypatch.setattr(products, "scaled_product", refused)
    monkeypatch.setattr(F, "scaled_mm", refused, raising=False)
    _run(recipe, 144)
