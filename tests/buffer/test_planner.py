"""Planned layouts: rows whole, little padding, aligned starts, and the figures of real models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megafsdp.buffer.layout import SHARD_MULTIPLE, FlatLayout, TensorSpec
from megafsdp.buffer.planner import padding_bound, plan_layout
from megafsdp.mesh.placement import Even, Flat, Granularity, TensorAtomic
from tests.strategies import Shape, shape_sets, world_sizes

ITEMSIZES = st.sampled_from([0.5, 1, 2, 4, 8])


def _specs(shapes: Sequence[Shape], placement: Granularity | None = None) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", s, placement or Flat()) for i, s in enumerate(shapes)]


def _assert_partition(ranges: list[tuple[int, int]], numel: int) -> None:
    """Check that the non-empty ones of [start, stop) ranges tile [0, numel)."""
    end = 0
    for start, stop in sorted(r for r in ranges if r[1] > r[0]):
        assert start == end
        end = stop
    assert end == numel


def _assert_sound(layout: FlatLayout, row_numels: Sequence[int]) -> None:
    """Check everything a layout promises, from offsets and lengths alone."""
    n = layout.num_shards
    assert layout.gathered_numel == n * layout.shard_numel
    local = 0
    for sub in layout.sub_buffers:
        assert sub.shard_numel % SHARD_MULTIPLE == 0
        assert (sub.gathered_offset, sub.local_offset) == (local * n, local)
        local += sub.shard_numel
    assert local == layout.shard_numel
    tensors = []
    for index, (slot, row_numel) in enumerate(zip(layout.slots, row_numels, strict=True)):
        shard_numel = layout.sub_buffers[slot.sub_buffer].shard_numel
        start, stop = slot.offset, slot.offset + slot.spec.numel
        assert start >= 0
        assert stop <= n * shard_numel
        for cut in range(-(-start // shard_numel) * shard_numel, stop, shard_numel):
            assert (cut - start) % row_numel == 0, f"{slot.spec} is cut inside a row"
        _assert_partition([layout.owned_range(index, s) for s in range(n)], slot.spec.numel)
        tensors.append(
            (layout.gathered_offset(index), layout.gathered_offset(index) + stop - start)
        )
    _assert_partition([*tensors, *layout.gaps()], layout.gathered_numel)
    for shard in sorted({*range(min(n, 4)), n // 2, n - 1}):
        owned = []
        for index in range(len(layout.slots)):
            start, stop = layout.owned_range(index, shard)
            offset = layout.local_offset(index, shard)
            owned.append((offset, offset + stop - start))
        _assert_partition([*owned, *layout.local_gaps(shard)], layout.shard_numel)


def _assert_sound_and_tight(shapes: list[Shape], n: int, itemsize: float) -> None:
    specs = _specs(shapes)
    layout = plan_layout(specs, n, itemsize=itemsize)
    _assert_sound(layout, [math.prod(s[1:]) for s in shapes])
    assert [slot.spec for slot in layout.slots] == specs
    alignment = max(int(16 / itemsize), 1)
    assert all(layout.gathered_offset(i) % alignment == 0 for i in range(len(shapes)))
    numel = sum(math.prod(s) for s in shapes)
    least = sum(n * math.lcm(row, 32) for row in {math.prod(s[1:]) for s in shapes})
    steps = sum(math.lcm(math.prod(s[1:]), alignment) for s in shapes)
    assert padding_bound(specs, n, itemsize=itemsize) == max(0.005 * numel, least + steps)
    assert layout.padding_numel <= max(0.005 * numel, least + steps)


_RANDOM_LAYOUTS = given(
    shapes=shape_sets(with_zero_dim=False, with_empty=False), n=world_sizes(), itemsize=ITEMSIZES
)


@settings(max_examples=200)
@_RANDOM_LAYOUTS
@example(shapes=[(2, 4), (3, 3)], n=2, itemsize=4)  # A published planner cuts a row here.
@example(shapes=[(4, 6), (6, 9), (1,)], n=1, itemsize=2)
def test_random_layouts_are_sound_and_tight(shapes: list[Shape], n: int, itemsize: float) -> None:
    """No row is cut, nothing overlaps, shards are equal, and padding stays within the bound."""
    _assert_sound_and_tight(shapes, n, itemsize)


@pytest.mark.matrix("layouts")
@settings(max_examples=2000)
@_RANDOM_LAYOUTS
def test_thousands_of_random_layouts(shapes: list[Shape], n: int, itemsize: float) -> None:
    """They are as sound and tight as the few of every run."""
    _assert_sound_and_tight(shapes, n, itemsize)


@settings(max_examples=200)
@given(
    shapes=shape_sets(with_zero_dim=False, with_empty=False, max_size=8),
    n=world_sizes(16),
    num_atomic=st.integers(1, 3),
)
def test_atomic_tensors_have_one_owner(shapes: list[Shape], n: int, num_atomic: int) -> None:
    """Whole tensors lie on one shard each, aligned; the others are cut by rows as ever."""
    specs = [*_specs(shapes[:num_atomic], TensorAtomic()), *_specs(shapes[num_atomic:])]
    layout = plan_layout(specs, n)
    granules = [spec.numel for spec in specs[:num_atomic]]
    _assert_sound(layout, granules + [math.prod(s[1:]) for s in shapes[num_atomic:]])
    for index in range(min(num_atomic, len(specs))):
        lengths = [b - a for a, b in (layout.owned_range(index, s) for s in range(n))]
        assert sorted(lengths)[-1] == specs[index].numel
    assert all(layout.gathered_offset(i) % 4 == 0 for i in range(len(specs)))
    assert layout.padding_numel <= padding_bound(specs, n)


def test_atomic_tensors_are_spread_evenly() -> None:
    """Longest first to the least loaded shard: 6+1, 5+2, 4+3."""
    specs = _specs([(64 * k,) for k in (1, 2, 3, 4, 5, 6)], TensorAtomic())
    layout = plan_layout(specs, 3)
    assert layout.shard_numel == 7 * 64
    assert layout.padding_numel == 0


def test_equal_input_gives_equal_layout() -> None:
    """Every rank plans for itself, so plans must not depend on anything else."""
    specs = _specs([(9, 7), (4, 11), (6, 13), (100,), (3, 5, 2), (100,)])
    assert plan_layout(specs, 7) == plan_layout(list(specs), 7)


def test_vector_fills_slack_behind_a_matrix() -> None:
    """The shard of the matrix has room, so the vector costs nothing."""
    matrix, vector = TensorSpec("matrix", (5, 64)), TensorSpec("vector", (100,))
    layout = plan_layout([vector, matrix], 4)
    assert layout.gathered_numel == plan_layout([matrix], 4).gathered_numel == 512
    assert len(layout.sub_buffers) == 1
    assert layout.gathered_offset(0) == 320


def test_vector_fills_the_gap_between_two_matrices() -> None:
    """The second matrix starts aligned behind the cut at 1056; the gap before holds the vector."""
    specs = _specs([(3, 320), (3, 320), (100,)])
    layout = plan_layout(specs, 2)
    assert [slot.offset for slot in layout.slots] == [0, 1088, 960]
    assert layout.shard_numel == 1056


def test_only_the_tensor_over_the_cut_has_a_row_end_there() -> None:
    """Shards of two ranks need not be multiples of the long rows, all of which lie on one rank."""
    layout = plan_layout(_specs([(8, 1024), (42, 256), (256,)]), 2)
    assert layout.shard_numel == 8 * 1024 + 6 * 256  # 9.5 long rows.


def test_a_tensor_over_one_cut_needs_a_row_end_there_and_no_shards_of_whole_rows() -> None:
    """Shards of 9.6 rows: the tensor starts 64 elements behind the first one's start."""
    layout = plan_layout(_specs([(17, 40)]), 2, itemsize=2)
    assert (layout.slots[0].offset, layout.shard_numel) == (64, 384)


def test_of_layouts_with_as_many_collectives_the_shortest_is_taken() -> None:
    """Vectors in a sub-buffer of their own: behind the matrices they would lengthen each shard."""
    shapes = [(300,), (7,), (6, 256), (4, 320), (11, 320), (15, 256)]
    layout = plan_layout(_specs(shapes), 8)
    assert [slot.sub_buffer for slot in layout.slots] == [1, 1, 0, 0, 0, 0]
    assert layout.padding_numel == 269


def test_a_collective_less_is_worth_a_quarter_more_than_the_least_padding() -> None:
    """Rows of 5 and of 64 elements share a buffer; one for each would pad 11,489 elements."""
    layout = plan_layout(_specs([(531, 5), (387, 64)]), 64)
    assert (len(layout.sub_buffers), layout.padding_numel) == (1, 13537)


@pytest.mark.parametrize(("hidden", "padding_numel", "nbytes"), [(256, 256, 256), (64, 64, 128)])
def test_layers_of_two_ranks_pad_one_half_row_a_rank(
    hidden: int, padding_numel: int, nbytes: int
) -> None:
    """Half of such a layer ends in the middle of a row: no uncut layout pads less.

    Starts are as coarsely aligned as that allows.
    """
    h = hidden
    shapes = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,)]
    shapes += [(h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    layout = plan_layout(_specs(shapes), 2, itemsize=2)
    assert layout.padding_numel == padding_numel
    assert all(2 * layout.gathered_offset(i) % nbytes == 0 for i in range(len(shapes)))


def test_starts_are_as_coarsely_aligned_as_little_padding_allows() -> None:
    """Rows of 40 elements of 2 bytes start at multiples of 128: of 256 they pad too much."""
    layout = plan_layout(_specs([(1, 40)] * 4 + [(4000, 40)]), 2, itemsize=2)
    assert [slot.offset for slot in layout.slots] == [0, 64, 128, 192, 320]


@pytest.mark.parametrize("itemsize", [0.5, 1, 2, 4])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8, 64, 1024])
def test_tensors_of_large_groups_start_on_256_bytes(num_shards: int, itemsize: float) -> None:
    """In every sub-buffer, for odd numbers of ranks and narrow dtypes too."""
    specs = _specs([(8192, 4096), (1000, 4160), (4096, 14336), (70,), (13, 4096), (99,)])
    layout = plan_layout(specs, num_shards, itemsize=itemsize)
    offsets = [layout.gathered_offset(i) * itemsize for i in range(len(specs))]
    assert [offset % 256 for offset in offsets] == [0] * len(specs)


def test_stacked_experts_are_cut_between_rows_of_an_expert() -> None:
    """(E, N, K) with rows of K: 128 experts on 1,024 shards pad nothing, cut as experts 8 times."""
    shape = (128, 5760, 2880)
    rows = TensorSpec("experts", shape, row_numel=2880)
    layout = plan_layout([rows], 1024)
    _assert_sound(layout, [2880])
    assert layout.padding_numel == 0
    assert layout.owned_range(0, 1) == (720 * 2880, 2 * 720 * 2880)
    assert plan_layout([TensorSpec("experts", shape)], 1024).padding_numel == 7 * rows.numel


def test_every_rank_of_4096_finds_its_part() -> None:
    """A layer over 4,096 shards: ranges of all ranks join, and each fits its local buffer."""
    specs = _specs([(4096, 4096), (1024, 4096), (4096, 14336), (4096,), (7, 4096)])
    layout = plan_layout(specs, 4096, itemsize=2)
    _assert_sound(layout, [4096, 4096, 14336, 1, 4096])
    assert layout.owned_range(4, 4095) == (7 * 4096, 7 * 4096), "some rank owns nothing of it"


@pytest.mark.parametrize(
    ("shapes", "num_shards", "message"),
    [
        ([(4, 4), ()], 2, r"shape \(\).*'t1'"),
        ([(3, 0)], 2, r"shape \(3, 0\).*'t0'"),
        ([], 2, "0 tensors"),
        ([(4, 4)], 0, "got 0 shards"),
    ],
)
def test_what_cannot_be_cut_is_refused(shapes: list[Shape], num_shards: int, message: str) -> None:
    """The message names the tensor, or says what is missing."""
    with pytest.raises(ValueError, match=message):
        plan_layout(_specs(shapes), num_shards)


def test_one_shard_holds_scalars_and_empty_tensors() -> None:
    """Replicated groups are laid out too, where nothing is cut."""
    layout = plan_layout(_specs([(), (3, 0), (0,), (5,), ()]), 1)
    _assert_sound(layout, [1] * 5)
    assert layout.owned_range(0, 0) == (0, 1)


def _dense_layer(hidden: int, ffn: int, query: int, key_value: int, head: int) -> list[Shape]:
    """Return separate projections, norms, and with ``head`` the query and key norms."""
    attention = [(query, hidden), (key_value, hidden), (key_value, hidden), (hidden, query)]
    norms: list[Shape] = [(hidden,), (hidden,)] + [(head,)] * (2 * (head > 0))
    return [*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn), *norms]


def _model(
    num_layers: int, layer: list[Shape], hidden: int, vocabulary: int
) -> list[tuple[int, list[Shape]]]:
    """Return units with their counts: layers, embedding, norm with head."""
    return [
        (num_layers, layer),
        (1, [(vocabulary, hidden)]),
        (1, [(hidden,), (vocabulary, hidden)]),
    ]


LLAMA_8B = _model(32, _dense_layer(4096, 14336, 4096, 1024, 0), 4096, 128256)
QWEN3_8B = _model(36, _dense_layer(4096, 12288, 4096, 1024, 128), 4096, 151936)


def _percent(units: list[tuple[int, list[Shape]]], gathered_numels: list[int]) -> float:
    numels = [count * sum(math.prod(s) for s in shapes) for count, shapes in units]
    gathered = sum(count * g for (count, _), g in zip(units, gathered_numels, strict=True))
    return 100 * (gathered / sum(numels) - 1)


def _single_buffer_numel(shapes: list[Shape], num_shards: int) -> int:
    """Return the size of one buffer whose shards are multiples of the common row multiple."""
    step = num_shards * math.lcm(*(math.prod(s[1:]) for s in shapes))
    return -(-sum(math.prod(s) for s in shapes) // step) * step


def test_row_classes_share_a_buffer_only_where_that_pads_little() -> None:
    """Rows of 4096 and 14336 join at 8 ranks and part at 1,024, where joining pads 7 %."""
    layer = _specs(LLAMA_8B[0][1])
    assert len(plan_layout(layer, 8, itemsize=2).sub_buffers) == 1
    query, down = (plan_layout(layer, 1024, itemsize=2).slots[i] for i in (0, 6))
    assert query.sub_buffer != down.sub_buffer


def test_classes_share_a_buffer_if_its_shortened_shards_pad_little() -> None:
    """A layer of Qwen3-0.6B; shards of 8 ranks need not be multiples of rows of 2048 and 3072."""
    shapes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
    layout = plan_layout(_specs([*shapes, (1024,), (1024,), (128,), (128,)]), 8, itemsize=2)
    assert (len(layout.sub_buffers), layout.padding_numel) == (1, 5888)


@pytest.mark.parametrize(
    ("model", "num_shards", "single", "ours"),
    [
        (LLAMA_8B, 64, 0.10, 0.005),
        (LLAMA_8B, 1024, 6.76, 0.09),
        (QWEN3_8B, 64, 0.23, 0.005),
        (QWEN3_8B, 1024, 3.75, 0.08),
    ],
    ids=["llama-64", "llama-1024", "qwen3-64", "qwen3-1024"],
)
def test_padding_of_real_models_is_a_fraction_of_a_single_buffers(
    model: list[tuple[int, list[Shape]]], num_shards: int, single: float, ours: float
) -> None:
    """Percent of the whole model: one buffer with a common row multiple, and row classes."""
    naive = [_single_buffer_numel(shapes, num_shards) for _, shapes in model]
    assert round(_percent(model, naive), 2) == single
    layouts = [plan_layout(_specs(shapes), num_shards, itemsize=2) for _, shapes in model]
    assert _percent(model, [layout.gathered_numel for layout in layouts]) <= ours


@pytest.mark.parametrize(
    ("name", "specs", "num_shards", "percent"),
    [
        (
            "Qwen3-30B-A3B layer",
            [
                *_specs([*_dense_layer(2048, 0, 4096, 512, 128)[:4], (2048,), (128, 2048)]),
                TensorSpec("fc1", (128, 2 * 768, 2048), row_numel=2048),
                TensorSpec("fc2", (128, 2048, 768), row_numel=768),
            ],
            1024,
            0.3,
        ),
        (
            "GPT-OSS-120B layer",
            [
                *_specs([(4096, 2880), (512, 2880), (512, 2880), (2880, 4096), (2880,), (4096,)]),
                TensorSpec("fc1", (128, 2880, 5760), row_numel=5760),
                TensorSpec("fc2", (128, 2880, 2880), row_numel=2880),
                *_specs([(128, 5760), (128, 2880)]),
            ],
            1024,
            0.4,
        ),
        ("odd sizes", _specs(_dense_layer(1000, 2730, 1000, 1000, 0)), 64, 0.7),
    ],
)
def test_padding_of_hard_layers(
    name: str, specs: list[TensorSpec], num_shards: int, percent: float
) -> None:
    """Stacked experts, where one buffer pads several times the parameters, and odd row sizes."""
    layout = plan_layout(specs, num_shards, itemsize=2)
    numel = sum(spec.numel for spec in specs)
    assert layout.padding_numel <= percent / 100 * numel, layout.describe()


@settings(max_examples=60)
@given(shapes=shape_sets(with_zero_dim=False, with_empty=False), n=world_sizes(16))
def test_even_shards_are_the_chunks_of_torch(shapes: list[Shape], n: int) -> None:
    """Each tensor has a sub-buffer of its own, which starts aligned, also of merged shards."""
    specs = _specs(shapes, Even())
    layout = plan_layout(specs, n, itemsize=2)
    assert [slot.sub_buffer for slot in layout.slots] == list(range(len(specs)))
    ends = [(0, 0)]
    for index, (spec, sub) in enumerate(zip(specs, layout.sub_buffers, strict=True)):
        rows = torch.arange(spec.shape[0]).chunk(n)
        firsts = [int(own[0]) * spec.granule for own in rows]
        found = [layout.owned_range(index, shard) for shard in range(len(rows))]
        assert found == list(zip(firsts, [*firsts[1:], spec.numel], strict=True))
        assert all(layout.owned_range(index, s) == (spec.numel,) * 2 for s in range(len(rows), n))
        assert sub.local_offset % SHARD_MULTIPLE == sub.gathered_offset % SHARD_MULTIPLE == 0
        assert ends[-1] == (sub.local_offset, sub.gathered_offset)
        length = sub.shard_numel + sub.gap_numel
        ends.append((sub.local_offset + length, sub.gathered_offset + n * length))
    assert ends[-1] == (layout.shard_numel, layout.gathered_numel)
    tensors = [(o := layout.gathered_offset(i), o + s.numel) for i, s in enumerate(specs)]
    _assert_partition([*tensors, *layout.gaps()], layout.gathered_numel)
    for form in (layout, *([layout.merged(n // 2)] if n % 2 == 0 else [])):
        assert form.gathered_numel == layout.gathered_numel
        for shard in range(form.num_shards):
            owned = [form.owned_range(i, shard) for i in range(len(specs))]
            places = [
                (o := form.local_offset(i, shard), o + stop - start)
                for i, (start, stop) in enumerate(owned)
            ]
            _assert_partition([*places, *form.local_gaps(shard)], form.shard_numel)
