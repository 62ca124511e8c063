"""The user ends a step's backwards: gradients, storage, the handle, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed import fsdp as torch_fsdp

from megafsdp import GradientReductionHandle
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.device.memory import Category
from tests.fsdp.toy import (
    adamw,
    assert_same_grads,
    batches,
    mine,
    options_of_strategies,
    pair,
)
from tests.ranks import Ranks

NUM_MICROBATCHES, NUM_STEPS = 3, 2


def _ends_by_hand(is_synced: bool, is_last: bool, async_op: bool) -> None:
    """Train beside one process, with the mean over ranks and the sum over microbatches."""
    for options in options_of_strategies():
        reference, net = pair(num_blocks=2, **options)
        optimizers = adamw(reference), adamw(net)
        units = [net._fsdp_unit(), *(block._fsdp_unit() for block in net.blocks)]
        net.set_is_last_backward(is_last)
        net.set_manual_backward_finalization(True)
        for step in range(NUM_STEPS):
            net.set_requires_gradient_sync(is_synced)
            net.set_reshard_after_backward(False)
            for batch in batches(NUM_MICROBATCHES, seed=1 + step):
                reference(*batch).backward()
                net(*mine(batch)).backward()
            if not is_synced and step == 0:
                assert all(p.grad is None for p in net.parameters())
            net.set_requires_gradient_sync(True)
            net.set_reshard_after_backward(True)
            if async_op:
                handle = net.finalize_backward(async_op=True)
                assert isinstance(handle, GradientReductionHandle)
                handle.wait()
                handle.wait()
            else:
                assert net.finalize_backward() is None
            assert_same_grads(net, reference)
            assert not any(unit.is_unsharded or unit.is_at_work for unit in units)
            assert not net._fsdp_unit().context.has_backward_begun
            for optimizer in optimizers if step > 0 else ():
                optimizer.step()
                optimizer.zero_grad()
        net.set_is_last_backward(True)
        # The next step's backward ends by itself again.
        net.set_manual_backward_finalization(False)
        batch = batches(1, seed=9)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("is_synced", "is_last"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_are_those_of_one_process(
    ranks: Ranks, num_ranks: int, is_synced: bool, is_last: bool, async_op: bool
) -> None:
    """In every strategy, reduced in each backward or only at the end; two ends add up."""
    ranks(num_ranks).run(_ends_by_hand, is_synced, is_last, async_op)


def _reduces_at_the_end() -> None:
    _, net = pair(num_blocks=2)
    net.set_manual_backward_finalization(True)
    net.set_requires_gradient_sync(False)
    for batch in batches(2):
        with record_collectives() as record:
            net(*mine(batch)).backward()
        assert record.calls["reduce_scatter"] == 0
    net.set_requires_gradient_sync(True)
    with record_collectives() as record:
        handle = net.finalize_backward(async_op=True)
    # Each unit's reduction is issued before the wait, which brings the agreement on usage.
    assert record.calls == {"reduce_scatter": 3}
    with record_collectives() as record:
        handle.wait()
    assert record.calls == {"all_reduce": 1}
    with record_collectives() as record:
        handle.wait()
    assert not record.calls


def test_reductions_are_issued_when_the_end_begins(ranks: Ranks) -> None:
    """Once a unit, whatever the number of microbatches."""
    ranks(2).run(_reduces_at_the_end)


def _defers_again() -> None:
    _, net = pair(num_blocks=2, strategy="optim")
    net.set_manual_backward_finalization(True)
    net.set_is_last_backward(False)
    for batch in batches(2):
        with record_collectives() as record:
            net(*mine(batch)).backward()
        assert record.calls["reduce_scatter"] == 0
        with record_collectives() as record:
            net.finalize_backward()
        assert record.calls["reduce_scatter"] == 3
        net.zero_grad()


def test_an_end_leaves_other_choices(ranks: Ranks) -> None:
    """A strategy that waits for the last backward waits again in the next step."""
    ranks(2).run(_defers_again)


def _nothing_to_end() -> None:
    _, net = pair(num_blocks=1)
    with record_collectives() as record:
        assert net.finalize_backward() is None
        net.finalize_backward(async_op=True).wait()
    assert not record.calls
    net.set_manual_backward_finalization(True)
    batch = mine(batches(1)[0])
    logits = net(batch[0]).detach().requires_grad_()
    logits.sum().backward()
    net.finalize_backward()
    assert all(p.grad is None for p in net.parameters())
    if hasattr(torch_fsdp, "GradientReductionHandle"):
        assert issubclass(GradientReductionHandle, torch_fsdp.GradientReductionHandle)


def test_an_end_without_a_backward_changes_nothing(ranks: Ranks) -> None:
    """Before the first forward, and after a backward that reached no unit."""
    ranks(2).run(_nothing_to_end)


def _refused(call: Callable[[], object], words: str) -> None:
    with record_collectives() as record, pytest.raises(RuntimeError, match=words):
        call()
    assert not record.calls


def _refusals() -> None:
    reference, net = pair(num_blocks=2)
    batch = batches(1)[0]
    net(*mine(batch)).backward()
    for call in (
        net.blocks[0].finalize_backward,
        lambda: net.blocks[0].set_manual_backward_finalization(True),
    ):
        _refused(call, r"the root, whose backwards end together.*unit 'blocks\.0'")
    _refused(net.finalize_backward, r"end by themselves.*set_manual_backward_finalization\(True\)")
    net.zero_grad()

    net.set_manual_backward_finalization(True)
    net.set_requires_gradient_sync(False)
    net(*mine(batch)).backward()
    net.set_manual_backward_finalization(True)
    _refused(lambda: net.set_manual_backward_finalization(False), "one that has not been ended")
    # Within a backward.
    loss = net(*mine(batch))
    loss.register_hook(lambda grad: net.finalize_backward())
    with pytest.raises(RuntimeError, match="a call within a backward"):
        loss.backward()
    net.reset_iter_state()

    net(*mine(batch)).backward()
    later = net(*mine(batch))
    net.set_requires_gradient_sync(True)
    handle = net.finalize_backward(async_op=True)
    for call in (lambda: net(*mine(batch)), later.backward, net.finalize_backward):
        _refused(call, r"wait\(\) of the handle of finalize_backward\(\) first")
    handle.wait()
    reference(*batch).backward()
    assert_same_grads(net, reference)

    # A step that is dropped may be followed by one that ends by itself.
    net.zero_grad()
    reference.zero_grad()
    net(*mine(batch)).backward()
    net.reset_iter_state()
    net.set_manual_backward_finalization(False)
    net.zero_grad()
    net(*mine(batch)).backward()
    reference(*batch).backward()
    assert_same_grads(net, reference)
    net.set_manual_backward_finalization(True)

    # Gradients that are cleared before the wait are lost, and the next step has none of them.
    net.zero_grad()
    reference.zero_grad()
    net(*mine(batch)).backward()
    handle = net.finalize_backward(async_op=True)
    net.zero_grad()
    _refused(handle.wait, r"none: zero_grad\(\), reset_iter_state\(\) or an exception")
    net.set_manual_backward_finalization(False)
    net(*mine(batch)).backward()
    reference(*batch).backward()
    assert_same_grads(net, reference)


def test_wrong_calls_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """Before any collective; afterwards the model trains as before."""
    ranks(2).run(_refusals)


def _keeps_storage() -> None:
    reference, net = pair(num_blocks=3)
    optimizers = adamw(reference), adamw(net)
    # The last unit is kept for backward by the engine; this one is freed and gathered again.
    first = net.blocks[0]
    first.set_keep_unsharded_storage(True)
    addresses = set()
    first.register_forward_pre_hook(lambda block, _: addresses.add(block.up.weight.data_ptr()))
    counts = []
    for step in range(4):
        batch = batches(1, seed=1 + step)[0]
        reference(*batch).backward()
        with record_collectives() as record:
            net(*mine(batch)).backward()
        counts.append(record.calls["all_gather"])
        assert_same_grads(net, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert not first._fsdp_unit().is_unsharded
    assert len(addresses) == 1
    # It is gathered as often as without: in forward and in backward. The first step has no record.
    assert set(counts[1:]) == {_num_gathers()}
    ledger = net._fsdp_unit().ledger
    storages = [s for g in first._fsdp_unit().groups for s in g.compute_weight.gathered_storages]
    assert ledger.live[Category.UNSHARDED] == sum(storage.nbytes for storage in storages) > 0
    first.set_keep_unsharded_storage(False)
    assert ledger.live[Category.UNSHARDED] == 0
    batch = batches(1, seed=8)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)


def _num_gathers() -> int:
    _, net = pair(num_blocks=3)
    for _ in range(2):
        with record_collectives() as record:
            net(*mine(batches(1)[0])).backward()
    return record.calls["all_gather"]


def test_kept_storage_is_gathered_into_again(ranks: Ranks) -> None:
    """Addresses stay the same over steps, as a CUDA graph needs, and values are current."""
    ranks(2).run(_keeps_storage)
