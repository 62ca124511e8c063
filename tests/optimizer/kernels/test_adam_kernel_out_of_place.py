"""Adam out of place: the bits of a step in place, and nothing else written."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch

from megafsdp._native import native_module
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamSegment, adam_step
from megafsdp.optimizer.kernels.hyper import AdamHyper
from tests.native import compiled
from tests.optimizer.adam.flat_buffers import (
    ALIGNED_GUARD,
    BF16,
    FP16,
    FP32,
    GUARD,
    HYPER,
    L2_HYPER,
    assert_guards_hold,
    assert_same_bits,
    copy_of,
    guarded,
    make_buffers,
    spread_subnormals,
)

NEW = ("new_weight", "new_exp_avg", "new_exp_avg_sq")
OLD = ("weight", "exp_avg", "exp_avg_sq")
MASTERS = ("fp32", "fp32 to bf16", "fp32 to fp16")
# A multiple of nothing; with 28 bytes each more than any cache that is spared from streaming.
STREAMED_NUMEL = (1 << 20) + (1 << 18) + 77


def _poison(numel: int) -> torch.Tensor:
    return torch.full((numel,), 0x7F7F7F7F, dtype=torch.int32).view(FP32)


def _apart(buffers: AdamBuffers, *guards: int) -> AdamBuffers:
    """Return a copy with poisoned room for the new weights and moments, guarded by so much each."""
    numel = buffers.weight.numel()
    guards = guards or (GUARD,) * 3
    room = {name: guarded(_poison(numel), guard) for name, guard in zip(NEW, guards, strict=True)}
    return dataclasses.replace(copy_of(buffers, guards[0]), **room)


def _in_place(buffers: AdamBuffers) -> AdamBuffers:
    """Return buffers without room."""
    return dataclasses.replace(buffers, **dict.fromkeys(NEW))


def _new_face(buffers: AdamBuffers) -> AdamBuffers:
    """Return buffers as a step in place would have left them."""
    return dataclasses.replace(_in_place(buffers), **dict(zip(OLD, buffers.outputs, strict=True)))


def _assert_step_apart(
    buffers: AdamBuffers, wanted: AdamBuffers, guards: tuple[int, ...] = (), **options: object
) -> None:
    """Step a copy out of place: it equals what a step in place gave, and the old stays."""
    apart = _apart(buffers, *guards)
    hyper = options.pop("hyper", HYPER)
    adam_step(apart, hyper, **({"step": 2, "grad_scale": 1 / 3} | options))  # type: ignore[arg-type]
    assert_same_bits(_new_face(apart), wanted)
    # What was read has kept its bytes.
    unchanged = dataclasses.replace(_in_place(apart), copy_out=None)
    assert_same_bits(unchanged, buffers)
    if not guards:
        assert_guards_hold(apart)


def _stepped(buffers: AdamBuffers, **options: object) -> AdamBuffers:
    result = copy_of(buffers)
    hyper = options.pop("hyper", HYPER)
    adam_step(result, hyper, **({"step": 2, "grad_scale": 1 / 3} | options))  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("grad_dtype", [FP32, BF16, FP16])
def test_every_layout_has_the_bits_of_a_step_in_place(
    level: str, grad_dtype: torch.dtype, master: str
) -> None:
    """Any gradient and copy, AdamW and L2; and the weights did move."""
    buffers = make_buffers(1000, (grad_dtype, FP32, master))
    for hyper, step in itertools.product((HYPER, L2_HYPER), (1, 1000)):
        wanted = _stepped(buffers, hyper=hyper, step=step)
        _assert_step_apart(buffers, wanted, hyper=hyper, step=step)
        assert not torch.equal(wanted.weight, buffers.weight)


@pytest.mark.parametrize("flush_denormals", [True, False])
def test_fallback_has_the_bits_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, flush_denormals: bool
) -> None:
    """Without native code a step out of place gives the same, chunk by chunk, gaps included."""
    numel = (1 << 14) + 4096
    buffers = make_buffers(numel, (BF16, FP32, "fp32 to bf16"))
    spread_subnormals(buffers.narrow(0, 4096))
    segments = [AdamSegment(3, numel - 500, HYPER), AdamSegment(numel - 400, numel, L2_HYPER)]
    options = {"hyper": segments, "flush_denormals": flush_denormals}
    apart = _apart(buffers)
    adam_step(apart, segments, step=2, grad_scale=1 / 3, flush_denormals=flush_denormals)
    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    _assert_step_apart(buffers, _new_face(apart), **options)


def test_every_length_has_the_bits_of_a_step_in_place(level: str) -> None:
    """Tails of vectors and of tiles write nothing beyond the end, at any alignment."""
    for numel in (*range(71), 127, 128, 129, 257):
        buffers = make_buffers(numel, (BF16, FP32, "fp32 to bf16"))
        wanted = _stepped(buffers)
        _assert_step_apart(buffers, wanted)
        aligned = _apart(buffers, *(ALIGNED_GUARD,) * 3)
        adam_step(aligned, HYPER, step=2, grad_scale=1 / 3)
        assert_same_bits(_new_face(aligned), wanted)
        assert_guards_hold(aligned, ALIGNED_GUARD)


_RANGES = ((1, 30, HYPER), (30, 31, L2_HYPER), (77, 700_001, L2_HYPER))
_SEGMENTS = [AdamSegment(*r) for r in (*_RANGES, (700_040, STREAMED_NUMEL - 3, HYPER))]


@functools.cache
def _streamed(level: str) -> tuple[AdamBuffers, AdamBuffers]:
    """Return large buffers, and a step of their segments in place at a level that is forced."""
    buffers = make_buffers(STREAMED_NUMEL, (BF16, FP32, "fp32 to bf16"))
    return buffers, _stepped(buffers, hyper=_SEGMENTS, num_threads=1)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "guards", [(64, 64, 64), (3, 3, 3), (16, 16, 16), (1, 64, 7), (31, 2, 64)], ids=str
)
def test_streamed_outputs_equal_cached_ones(
    level: str, guards: tuple[int, ...], num_threads: int
) -> None:
    """Buffers too large for any cache, at addresses alike and unlike in a line, begun anywhere."""
    buffers, wanted = _streamed(level)
    result = _apart(buffers, *guards)
    adam_step(result, _SEGMENTS, step=2, grad_scale=1 / 3, num_threads=num_threads)
    is_stepped = torch.zeros(STREAMED_NUMEL, dtype=torch.bool)
    for segment in _SEGMENTS:
        is_stepped[segment.start : segment.stop] = True
    for name, output in zip(OLD, result.outputs, strict=True):
        there = torch.where(is_stepped, getattr(wanted, name), _poison(STREAMED_NUMEL))
        assert torch.equal(output.view(torch.int32), there.view(torch.int32)), name
        assert torch.equal(getattr(result, name), getattr(buffers, name)), name
    assert result.copy_out is not None and wanted.copy_out is not None
    assert torch.equal(result.copy_out, wanted.copy_out)
    for guard, output in zip(guards, result.outputs, strict=True):
        whole = torch.empty(0).set_(output.untyped_storage()).view(torch.int32)
        assert (whole[:guard] == 0x7F7F7F7F).all() and (whole[-guard:] == 0x7F7F7F7F).all()


@pytest.mark.parametrize("is_native", [True, False])
def test_elements_of_no_segment_are_not_written(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    """Between, before and behind segments the room keeps its poison."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
    buffers = make_buffers(1000, (BF16, FP32, "fp32 to bf16"))
    apart = _apart(buffers)
    ranges = ((5, 300), (301, 301), (340, 999))
    adam_step(apart, [AdamSegment(*r, HYPER) for r in ranges], step=2)
    is_written = torch.zeros(1000, dtype=torch.bool)
    for start, stop in ranges:
        is_written[start:stop] = True
    for output in apart.outputs:
        assert torch.equal(output.view(torch.int32) != 0x7F7F7F7F, is_written)
    assert apart.copy_out is not None and not apart.copy_out[~is_written].any()


@pytest.mark.parametrize("flush_denormals", [True, False])
def test_denormals_are_treated_as_in_place(level: str, flush_denormals: bool) -> None:
    """Subnormal inputs and results are kept, or become zero in what is written only."""
    buffers = make_buffers(4096, (FP32, FP32, "fp32 to bf16"))
    spread_subnormals(buffers)
    gentle = AdamHyper(1e-3, eps=1e-30, weight_decay=0.5)
    for hyper, grad_scale in ((gentle, 1 / 3), (L2_HYPER, 1 / 3), (gentle, 2.0**20)):
        options = {"hyper": hyper, "grad_scale": grad_scale, "flush_denormals": flush_denormals}
        _assert_step_apart(buffers, _stepped(buffers, **options), **options)


def test_a_step_again_from_the_old_states_begins_anew() -> None:
    """A second step with another factor overwrites the first without a trace of it."""
    buffers = make_buffers(1000, (BF16, FP32, "fp32 to bf16"))
    apart = _apart(buffers)
    for grad_scale in (1.0, 1 / 3):
        adam_step(apart, HYPER, step=2, grad_scale=grad_scale)
    assert_same_bits(_new_face(apart), _stepped(buffers))


@pytest.mark.parametrize("is_native", [True, False])
def test_found_infinity_leaves_the_room_as_it_is(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    """Nothing is written, not even what was there before."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
    apart = _apart(make_buffers(100))
    before = copy_of(apart)
    adam_step(apart, HYPER, step=1, found_inf=torch.ones(()))
    assert_same_bits(apart, before)


def test_a_part_steps_out_of_place_too() -> None:
    """Narrowed buffers write their own elements of the room."""
    buffers = make_buffers(1000)
    apart = _apart(buffers)
    adam_step(apart.narrow(10, 500), HYPER, step=2, grad_scale=1 / 3)
    wanted = _stepped(buffers)
    assert torch.equal(apart.outputs[0][10:500], wanted.weight[10:500])
    assert torch.equal(apart.weight, buffers.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_exp_avg": None}, "only new_weight, new_exp_avg_sq"),
        ({"new_weight": None, "new_exp_avg_sq": None}, "all of new_weight.*only new_exp_avg"),
        ({"exp_avg_sq": torch.zeros(4, dtype=BF16)}, "fp32 moments.*bfloat16"),
        (
            {
                "weight": torch.zeros(4, dtype=BF16),
                "remainder": torch.zeros(4, dtype=torch.int16),
            },
            "bf16 weights and a remainder",
        ),
        ({"new_exp_avg": torch.zeros(5)}, r"\(5,\).*new_exp_avg"),
        ({"new_weight": torch.zeros(4, dtype=BF16)}, "bfloat16.*new_weight"),
        ({"new_exp_avg_sq": torch.zeros(8)[::2]}, r"strides \(2,\)"),
        ({"new_weight": torch.zeros(4, device="meta")}, "meta"),
    ],
)
def test_wrong_buffers_are_named(changes: dict[str, torch.Tensor | None], message: str) -> None:
    """What does not go with a step out of place is told."""
    right = {name: torch.zeros(4) for name in (*OLD, "grad", *NEW)}
    with pytest.raises(ValueError, match=message):
        AdamBuffers(**(right | changes))  # type: ignore[arg-type]


def test_a_step_out_of_place_is_for_cpus() -> None:
    """Buffers elsewhere are refused where they are put together."""
    elsewhere = {name: torch.zeros(4, device="meta") for name in (*OLD, "grad", *NEW)}
    with pytest.raises(ValueError, match="tensors on a CPU, got tensors on meta"):
        AdamBuffers(**elsewhere)


@compiled
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({name: 0}, f"{name}: expected an address") for name in NEW],
        *[({name: 6}, f"{name}: .*aligned") for name in NEW],
        ({"state_dtype": "bfloat16"}, "state_dtype: expected float32 beside new_weight"),
        ({"remainder": 2, "copy_out": 0}, "new_weight: expected null"),
    ],
)
def test_kernel_names_a_wrong_argument(changes: dict[str, object], message: str) -> None:
    """The native entry takes all three or none, aligned, beside fp32."""
    tensor = torch.zeros(4)
    arguments = dict.fromkeys((*OLD, "grad", "copy_out", *NEW), tensor.data_ptr()) | {
        "remainder": 0,
        "numel": 4,
        "grad_dtype": "float32",
        "state_dtype": "float32",
        "copy_out_dtype": "bfloat16",
        "segments": [],
        "grad_scale": 1.0,
        "flush_denormals": True,
        "num_threads": 1,
    }
    native = native_module()
    assert native is not None
    native.adam_step(**arguments)
    with pytest.raises(ValueError, match=message):
        native.adam_step(**(arguments | changes))
