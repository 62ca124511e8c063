"""Flat storages that come and go under their aliases, poison, and the byte ledger."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.device.memory import (
    ByteLedger,
    Category,
    FlatStorage,
    MemoryPool,
    Slabs,
    poison,
    set_poison,
    tensors_nbytes,
)

CPU = torch.device("cpu")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def _storage(
    numel: int = 8,
    dtype: torch.dtype = torch.float32,
    ledger: ByteLedger | None = None,
    category: Category = Category.UNSHARDED,
    device: torch.device = CPU,
) -> FlatStorage:
    return FlatStorage(
        numel, dtype, device=device, ledger=ledger or ByteLedger(), category=category
    )


def _assert_aliases_survive(device: torch.device) -> None:
    storage = _storage(device=device)
    view = storage.tensor.narrow(0, 2, 4).view(2, 2)
    address = storage.tensor.untyped_storage()._cdata
    storage.release()
    assert storage.tensor.untyped_storage().nbytes() == 0
    assert not storage.is_allocated
    storage.allocate()
    storage.tensor.copy_(torch.arange(8.0))
    assert storage.tensor.untyped_storage()._cdata == address, "the storage object is the same"
    assert view.tolist() == [[2.0, 3.0], [4.0, 5.0]]


def _assert_saved_tensor_survives(device: torch.device) -> None:
    storage = _storage(device=device)
    weight = storage.tensor.view(2, 4)
    values = torch.arange(8.0, device=device)
    storage.tensor.copy_(values)
    x = torch.ones(3, 2, device=device, requires_grad=True)
    out = x @ weight
    version = storage.tensor._version
    storage.release()
    storage.allocate()
    with torch.autograd._unsafe_preserve_version_counter(storage.tensor):
        storage.tensor.copy_(values)
    assert storage.tensor._version == version
    out.sum().backward()
    assert torch.equal(x.grad, values.view(2, 4).sum(1).expand(3, 2))


def test_views_stay_aliases_over_release_and_allocation() -> None:
    """A view made before a release shows what is written after the next allocation."""
    _assert_aliases_survive(CPU)


def test_tensors_saved_by_autograd_stay_aliases() -> None:
    """Backward reads the reallocated bytes, and poisoning does not look like a modification."""
    _assert_saved_tensor_survives(CPU)


@pytest.mark.gpu
def test_storage_release_frees_device_memory_and_keeps_aliases() -> None:
    """On CUDA the same holds, and the caching allocator has the bytes back."""
    device = torch.device("cuda", torch.cuda.current_device())
    _assert_aliases_survive(device)
    _assert_saved_tensor_survives(device)
    before = torch.cuda.memory_allocated(device)
    storage = _storage(1 << 20, device=device)
    assert torch.cuda.memory_allocated(device) >= before + (4 << 20)
    storage.release()
    assert torch.cuda.memory_allocated(device) == before


class _CudaPool:
    """A pool of the caching allocator, without a library that registers it."""

    def __init__(self, nbytes: int) -> None:
        self._pool = torch.cuda.MemPool()

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Return torch's context."""
        return torch.cuda.use_mem_pool(self._pool)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1 << 10, 3 << 20])
def test_a_slab_is_the_same_memory_for_each_storage_that_takes_it(numel: int) -> None:
    """On CUDA a storage that grows takes the one block of the pool; aliases stay, as without."""
    device = torch.device("cuda", torch.cuda.current_device())
    ledger = ByteLedger()
    # The last is shorter than the slabs.
    storages = [_storage(n, ledger=ledger, device=device) for n in (numel, numel, numel * 3 // 4)]
    views = [storage.tensor.narrow(0, 1, 5) for storage in storages]
    slabs = _slabs(4 * numel, 2, ledger, _CudaPool)
    for storage in storages:
        storage.release()
        storage.slabs = slabs
    first, second, third = storages
    addresses: list[tuple[int, ...]] = []
    for step in range(3):
        first.allocate()
        second.allocate()
        first.release()
        # Not of a slab's pool, whose block is free at this moment.
        other = torch.zeros(numel, device=device)
        third.allocate()
        addresses.append(tuple(s.tensor.data_ptr() for s in (second, third)))
        for value, storage, view in ((step, second, views[1]), (step + 10, third, views[2])):
            storage.tensor.fill_(value)
            assert view.tolist() == [value] * 5
        assert not other.any()
        second.release()
        first.allocate()
        assert first.tensor.data_ptr() == addresses[0][0], "the slab that second has released"
        first.release()
        third.release()
    assert len(set(addresses)) == 1
    assert len({*addresses[0]}) == 2
    assert slabs.num_refused == 0


def test_releasing_and_allocating_twice_changes_nothing() -> None:
    """Both are idempotent, for the bytes and for the ledger."""
    ledger = ByteLedger()
    storage = _storage(ledger=ledger)
    storage.tensor.fill_(1)
    storage.allocate()
    assert storage.tensor.tolist() == [1.0] * 8, "an allocated storage keeps its content"
    storage.release()
    storage.release()
    assert (ledger.total, ledger.num_live[Category.UNSHARDED]) == (0, 0)
    storage.allocate()
    storage.allocate()
    assert (ledger.total, ledger.num_live[Category.UNSHARDED]) == (32, 1)


def test_empty_storage_counts_zero_bytes() -> None:
    """A storage without elements comes and goes like any other."""
    ledger = ByteLedger()
    storage = _storage(0, ledger=ledger)
    assert ledger.num_live[Category.UNSHARDED] == 1
    storage.release()
    storage.allocate()
    assert (ledger.total, ledger.num_live[Category.UNSHARDED]) == (0, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, *FP8]
)
def test_poison_of_floats_is_nan(dtype: torch.dtype) -> None:
    """Fresh floating-point memory is NaN; one-byte formats hold 0x7F, NaN or their largest."""
    storage = _storage(dtype=dtype)
    if dtype.itemsize == 1:
        assert storage.tensor.view(torch.uint8).tolist() == [0x7F] * 8
    else:
        assert storage.tensor.isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_poison_of_integers_is_a_large_number(dtype: torch.dtype) -> None:
    """Every byte is 0x7F."""
    assert (_storage(dtype=dtype).tensor.view(torch.uint8) == 0x7F).all()


def test_poison_comes_back_with_each_allocation() -> None:
    """Bytes of an earlier life are not seen again."""
    storage = _storage()
    storage.tensor.fill_(3)
    storage.release()
    storage.allocate()
    assert storage.tensor.isnan().all()


def test_poison_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the switch nothing is filled."""
    filled: list[torch.Tensor] = []
    monkeypatch.setattr("megafsdp.device.memory.poison", filled.append)
    set_poison(False)
    storage = _storage()
    assert filled == []
    set_poison(True)
    storage.release()
    storage.allocate()
    assert len(filled) == 1


def test_poison_is_no_modification_for_autograd() -> None:
    """The version counter stays."""
    tensor = torch.zeros(4)
    poison(tensor)
    assert tensor._version == 0
    assert tensor.isnan().all()


def test_ledger_counts_by_category_with_peaks() -> None:
    """Live bytes, peaks of each category, and the peak of the sum, which is no sum of peaks."""
    ledger = ByteLedger()
    weight = _storage(4, ledger=ledger, category=Category.MAIN_WEIGHT)
    unsharded = _storage(16, torch.bfloat16, ledger=ledger)
    assert ledger.live[Category.MAIN_WEIGHT] == 16
    assert ledger.live[Category.UNSHARDED] == 32
    unsharded.release()
    grad = _storage(4, torch.float64, ledger=ledger, category=Category.MAIN_GRAD)
    assert ledger.total == 16 + 32
    assert ledger.peak_total == 48
    assert ledger.peak[Category.UNSHARDED] == 32
    assert sum(ledger.peak.values()) == 80
    ledger.reset_peak()
    assert ledger.peak[Category.UNSHARDED] == 0
    assert ledger.peak_total == 48
    del weight, grad


def test_ledger_counts_storages_alive_at_once() -> None:
    """The largest number of live storages is what bounds unsharded units."""
    ledger = ByteLedger()
    first, second = _storage(ledger=ledger), _storage(ledger=ledger)
    first.release()
    second.release()
    first.allocate()
    assert ledger.num_live[Category.UNSHARDED] == 1
    assert ledger.peak_num_live[Category.UNSHARDED] == 2


def test_deleting_a_storage_credits_its_bytes_without_gc() -> None:
    """The last reference is what frees, not the cycle collector."""
    ledger = ByteLedger()
    gc.disable()
    try:
        storage = _storage(ledger=ledger)
        assert ledger.total == 32
        del storage
        assert ledger.total == 0
    finally:
        gc.enable()


def test_deleting_a_released_storage_credits_nothing_twice() -> None:
    """A release has already credited the bytes."""
    ledger = ByteLedger()
    storage = _storage(ledger=ledger)
    storage.release()
    del storage
    assert ledger.total == 0
    assert ledger.num_live[Category.UNSHARDED] == 0


def test_merged_ledgers_count_in_the_other_too() -> None:
    """What is alive moves over at once, later debits and credits follow, both keep their own."""
    outer, inner = ByteLedger(), ByteLedger()
    kept = _storage(ledger=inner)
    inner.merge_into(outer)
    assert outer.total == 32
    assert outer.num_live[Category.UNSHARDED] == 1
    added, own = _storage(ledger=inner), _storage(4, ledger=outer)
    assert (inner.total, outer.total, outer.peak_total) == (64, 80, 80)
    del kept, added, own
    assert (inner.total, outer.total) == (0, 0)


def test_merging_twice_or_through_another_counts_once() -> None:
    """A ledger has one way up, however often and through whom it is merged."""
    root, middle, leaf = ByteLedger(), ByteLedger(), ByteLedger()
    storage = _storage(ledger=leaf)
    leaf.merge_into(middle)
    leaf.merge_into(root)
    middle.merge_into(root)
    leaf.merge_into(root)
    root.merge_into(root)
    assert (leaf.total, middle.total, root.total) == (32, 32, 32)
    storage.release()
    assert (leaf.total, middle.total, root.total) == (0, 0, 0)


def test_bytes_of_tensors_count_shared_storages_once() -> None:
    """Views of one storage are its bytes, not theirs."""
    base = torch.zeros(10)
    assert tensors_nbytes([base, base[2:4], torch.zeros(3, dtype=torch.float64)]) == 40 + 24


class _Pool:
    """A pool that counts the allocations made in its context."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.num_entered = 0

    def allocating(self) -> contextlib.AbstractContextManager[object]:
        """Count."""
        self.num_entered += 1
        return contextlib.nullcontext()


def _slabs(
    nbytes: int, max_slabs: int, ledger: ByteLedger, new_pool: Callable[[int], MemoryPool] = _Pool
) -> Slabs:
    category = Category.UNSHARDED
    return Slabs(nbytes, max_slabs=max_slabs, new_pool=new_pool, ledger=ledger, category=category)


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 4))
def test_storages_lie_in_slabs_of_their_own_while_they_are_allocated(
    turns: list[int], max_slabs: int
) -> None:
    """No slab is in two storages, the first free one is taken, and bytes follow from the turns."""
    ledger, pools = ByteLedger(), []

    def new_pool(nbytes: int) -> _Pool:
        pools.append(_Pool(nbytes))
        return pools[-1]

    slabs = _slabs(64, max_slabs, ledger, new_pool)
    storages = [_storage(10 + i, ledger=ledger) for i in range(5)]
    for storage in storages:
        storage.release()
        storage.slabs = slabs
    placed: dict[int, int | None] = {}
    most = num_refused = 0
    for turn in turns:
        storage = storages[turn]
        entered = [pool.num_entered for pool in pools]
        if turn in placed:
            storage.release()
            del placed[turn]
            assert storage.tensor.untyped_storage().nbytes() == 0
            continue
        free = next((i for i in range(max_slabs) if i not in placed.values()), None)
        placed[turn] = free
        storage.allocate()
        storage.allocate()
        assert storage.tensor.isnan().all(), "fresh memory is poisoned"
        found = [
            i for i, pool in enumerate(pools) if pool.num_entered > (*entered, 0)[i : i + 1][0]
        ]
        assert found == ([] if free is None else [free])
        nbytes = storage.nbytes if free is None else 64
        assert storage.tensor.untyped_storage().nbytes() == nbytes
        num_refused += free is None
        most = max(most, sum(slab is not None for slab in placed.values()))
        own = sum(storages[i].nbytes for i, slab in placed.items() if slab is None)
        assert ledger.total == 64 * most + own
    assert [pool.nbytes for pool in pools] == [64] * most
    assert slabs.num_refused == num_refused
    del storages, storage
    assert ledger.total == 64 * most
    del slabs
    assert ledger.total == 0


def test_an_allocation_that_fails_leaves_its_slab_free() -> None:
    """The next one takes it."""

    class _Full(_Pool):
        def allocating(self) -> contextlib.AbstractContextManager[object]:
            if not self.num_entered:
                super().allocating()
                raise torch.OutOfMemoryError
            return super().allocating()

    storage = _storage()
    storage.release()
    storage.slabs = slabs = _slabs(64, 1, ByteLedger(), _Full)
    with pytest.raises(torch.OutOfMemoryError):
        storage.allocate()
    assert not storage.is_allocated
    storage.allocate()
    assert storage.is_allocated
    assert slabs.num_refused == 0


def test_a_deleted_storage_leaves_its_slab_free() -> None:
    """Its views keep the bytes, which the pool does not give to another as long as they are there.

    The ledger counts the slab on.
    """
    ledger = ByteLedger()
    first, second = _storage(ledger=ledger), _storage(ledger=ledger)
    slabs = _slabs(64, 1, ledger)
    for storage in (first, second):
        storage.release()
        storage.slabs = slabs
    first.allocate()
    del first, storage
    second.allocate()
    assert (slabs.num_refused, ledger.total) == (0, 64)
