"""The gated delta rule by chunks against its recurrence, and the recurrence against the paper's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megafsdp.models import gated_delta, linear_attention_kernels
from megafsdp.models.gated_delta import (
    chunked_gated_delta_rule,
    gated_delta_rule,
    recurrent_gated_delta_rule,
)

_NAMES = ("queries", "keys", "values", "log decays", "betas")
_B, _G, _N, _D, _E = 2, 2, 6, 8, 5


def _inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw queries, keys, values, log decays from slow to sudden, and betas."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(_G, _D), (_G, _D), (_N, _E), (_N,), (_N,)]
    drawn = [torch.randn(_B, length, *s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn[3] = -drawn[3].square()
    drawn[4] = drawn[4].sigmoid()
    return [x.to(dtype).requires_grad_() for x in drawn]


def _run(rule: Any, inputs: list[Tensor], **options: Any) -> Tensor:
    q, k, v, log_decay, beta = inputs
    out: Tensor = rule(q, k, v, log_decay_BTN=log_decay, beta_BTN=beta, **options)
    return out


def _with_gradients(rule: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    out = _run(rule, inputs, **options)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def _assert_equal(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("outputs", *_NAMES), got, wanted, strict=True):
        # The decay of a first token finds an empty state.
        assert a.shape == b.shape and (b.abs().max() > 0 or b.shape[1] == 1), name
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


def test_the_recurrence_is_that_of_the_paper() -> None:
    """S_t = S_(t-1) (a (I - b k k^T)) + b v k^T and o = S q, head by head, with matrices."""
    inputs = _inputs(7)
    found = _run(recurrent_gated_delta_rule, inputs)
    q, k, v, log_decay, beta = (x.detach() for x in inputs)
    for row in range(_B):
        for head in range(_N):
            state = torch.zeros(_E, _D, dtype=torch.float64)
            for t in range(7):
                # Three value heads to a key head.
                query, key = (x[row, t, head // 3] for x in (q, k))
                query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
                a, b = log_decay[row, t, head].exp(), beta[row, t, head]
                erase = torch.eye(_D, dtype=torch.float64) - b * torch.outer(key, key)
                state = a * state @ erase + b * torch.outer(v[row, t, head], key)
                wanted = state @ query / _D**0.5
                torch.testing.assert_close(found[row, t, head], wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("length", "chunk_size"),
    [(1, None), (5, 16), (16, 16), (37, 16), (64, 32), (65, 32), (70, None), (130, 64)],
)
def test_chunks_equal_the_recurrence(length: int, chunk_size: int | None) -> None:
    """Outputs and all five gradients, at lengths that are a multiple of the chunk or not."""
    inputs = _inputs(length)
    _assert_equal(
        _with_gradients(chunked_gated_delta_rule, inputs, chunk_size=chunk_size),
        _with_gradients(recurrent_gated_delta_rule, inputs),
        1e-12,
    )


@pytest.mark.parametrize("log_decay", [0.0, -1e4])
def test_states_that_last_for_ever_and_not_at_all(log_decay: float) -> None:
    """Without decay, and where a token leaves nothing: neither overflows, nor do gradients."""
    inputs = _inputs(40)
    with torch.no_grad():
        inputs[3].fill_(log_decay)
    got = _with_gradients(chunked_gated_delta_rule, inputs, chunk_size=16)
    wanted = _with_gradients(recurrent_gated_delta_rule, inputs)
    if log_decay == 0:
        _assert_equal(got, wanted, 1e-12)
        return
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_equal_keys_do_not_lose_digits() -> None:
    """The worst system that there is: every token corrects what the last one wrote."""
    inputs = _inputs(64, torch.float32)
    with torch.no_grad():
        inputs[1].copy_(inputs[1][:, :1].expand_as(inputs[1]))
        inputs[3].fill_(0.0)
        inputs[4].fill_(1.0)
    in_fp64 = [x.detach().double().requires_grad_() for x in inputs]
    got = _with_gradients(chunked_gated_delta_rule, inputs, chunk_size=64)
    wanted = _with_gradients(recurrent_gated_delta_rule, in_fp64)
    for a, b in zip(got, wanted, strict=True):
        # fp32 sums of up to 64 terms of about 1.
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("index", range(5), ids=_NAMES)
def test_gradients_of_gradients_are_refused_by_chunks(index: int) -> None:
    """Of whichever input; the recurrence has them, as its message says."""
    inputs = _inputs(20)
    out = _run(chunked_gated_delta_rule, inputs)
    with pytest.raises(NotImplementedError, match=r"Use recurrent_gated_delta_rule\(\)"):
        torch.autograd.grad(out.sum(), inputs[index], create_graph=True)
    out = _run(recurrent_gated_delta_rule, inputs)
    (grad,) = torch.autograd.grad(out.sum(), inputs[index], create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), inputs[0])
    assert again.any()


def test_memory_beside_the_inputs_is_not_read() -> None:
    """Inputs are views of larger tensors, whose other tokens, heads and elements are NaN."""
    inputs = _inputs(21)
    wanted = _with_gradients(chunked_gated_delta_rule, inputs, chunk_size=16)
    views = []
    for x in inputs:
        larger = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
        view = larger[tuple(slice(1, 1 + size) for size in x.shape)]
        views.append(view.copy_(x.detach()).requires_grad_())
    for a, b in zip(
        _with_gradients(chunked_gated_delta_rule, views, chunk_size=16), wanted, strict=True
    ):
        assert torch.equal(a, b)


def test_later_chunks_do_not_reach_back() -> None:
    """Not even a NaN of theirs."""
    inputs = [x.detach() for x in _inputs(48)]
    wanted = _run(chunked_gated_delta_rule, inputs, chunk_size=16)
    for x in inputs:
        x[:, 32:] = torch.nan
    got = _run(chunked_gated_delta_rule, inputs, chunk_size=16)
    assert torch.equal(got[:, :32], wanted[:, :32]) and bool(got[:, 32:].isnan().any())


def test_bf16_is_rounded_at_the_end_alone() -> None:
    """The arithmetic is that of fp32 copies of the inputs; the result has the values' dtype."""
    inputs = [x.detach() for x in _inputs(40, torch.bfloat16)]
    for rule in (chunked_gated_delta_rule, recurrent_gated_delta_rule):
        got, wanted = _run(rule, inputs), _run(rule, [x.float() for x in inputs])
        assert got.dtype == torch.bfloat16 and torch.equal(got, wanted.to(torch.bfloat16))


def test_a_kernel_is_called_as_its_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What flash-linear-attention takes by position, and that it normalises queries and keys."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool
    ) -> tuple[Tensor, None]:
        assert use_qk_l2norm_in_kernel
        return _run(recurrent_gated_delta_rule, [q, k, v, g, beta]), None

    inputs = _inputs(9)
    wanted = _run(gated_delta_rule, inputs)
    monkeypatch.setattr(gated_delta, "rule_kernel_for", lambda v: kernel)
    assert not torch.equal(_run(gated_delta_rule, inputs), wanted)
    torch.testing.assert_close(_run(gated_delta_rule, inputs), wanted, rtol=1e-12, atol=1e-12)


@pytest.fixture
def no_kernels_known() -> Any:
    """Have packages looked for again, now and afterwards."""
    lookups = (linear_attention_kernels._rule_kernel, linear_attention_kernels._convolution_kernel)
    for lookup in lookups:
        lookup.cache_clear()
    yield
    for lookup in lookups:
        lookup.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, rule: Any, convolution: Any, version: str) -> None:
    """Have packages with these kernels; without a version of fla-core if it is empty."""
    packages = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": rule},
        "causal_conv1d": {"causal_conv1d_fn": convolution},
    }
    for name, attributes in packages.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def version_of(distribution: str) -> str:
        assert distribution == "fla-core"
        if not version:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)


def _on_cuda(dtype: torch.dtype) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype)


@pytest.mark.usefixtures("no_kernels_known")
def test_kernels_are_used_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, in dtypes and widths that they have; of a CPU's tensors no package is looked for."""
    rule, convolution = SimpleNamespace(), SimpleNamespace()
    _install(monkeypatch, rule, convolution, "0.5.0")
    rule_for = linear_attention_kernels.rule_kernel_for
    convolution_for = linear_attention_kernels.convolution_kernel_for
    assert rule_for(_on_cuda(torch.bfloat16)) is rule
    assert rule_for(_on_cuda(torch.float32)) is None
    assert convolution_for(_on_cuda(torch.float32), 4) is convolution
    assert convolution_for(_on_cuda(torch.float64), 4) is None
    assert convolution_for(_on_cuda(torch.float32), 5) is None
    on_cpu = torch.zeros(1, dtype=torch.bfloat16)
    assert rule_for(on_cpu) is None and convolution_for(on_cpu, 4) is None


@pytest.mark.usefixtures("no_kernels_known")
@pytest.mark.parametrize(
    ("version", "num_key_heads"),
    [("", _N), ("0.3.2", _N), ("0.4.1", _N), ("0.5", _G), ("0.10.0.dev1", _G), ("1", _G)],
)
def test_older_kernels_get_a_key_head_for_each_value_head(
    monkeypatch: pytest.MonkeyPatch, version: str, num_key_heads: int
) -> None:
    """Those of flash-linear-attention before 0.5 would read other heads, and raise nothing."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool
    ) -> tuple[Tensor, None]:
        assert q.shape[2] == k.shape[2] == num_key_heads and use_qk_l2norm_in_kernel
        return _run(recurrent_gated_delta_rule, [q, k, v, g, beta]), None

    _install(monkeypatch, kernel, None, version)
    found = linear_attention_kernels.rule_kernel_for(_on_cuda(torch.bfloat16))
    monkeypatch.setattr(gated_delta, "rule_kernel_for", lambda v: found)
    inputs = _inputs(9)
    wanted = _with_gradients(recurrent_gated_delta_rule, inputs)
    _assert_equal(_with_gradients(gated_delta_rule, inputs), wanted, 1e-12)


@pytest.mark.usefixtures("no_kernels_known")
def test_a_missing_kernel_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the package to install; torch's operators take its place."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="megafsdp.models"):
        for _ in range(2):
            assert linear_attention_kernels.rule_kernel_for(_on_cuda(torch.bfloat16)) is None
            assert (
                linear_attention_kernels.convolution_kernel_for(_on_cuda(torch.float16), 4) is None
            )
    first, second = (record.getMessage() for record in caplog.records)
    assert "flash-linear-attention" in first and "causal-conv1d" in second


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 64, 100])
def test_flash_linear_attention_equals_the_recurrence(length: int) -> None:
    """Outputs and gradients in bf16, with three value heads to a key head."""
    pytest.importorskip("fla")
    inputs = [x.detach().cuda().requires_grad_() for x in _inputs(length, torch.bfloat16)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got = _with_gradients(gated_delta_rule, inputs)
    for a, b in zip(got, _with_gradients(recurrent_gated_delta_rule, exact), strict=True):
        # Products of bf16 numbers.
        torch.testing.assert_close(a.double(), b, rtol=0.05, atol=0.05 * b.abs().max().item())
