"""When units are gathered, in which order, and what is left unsharded."""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafsdp import MixedPrecisionPolicy, fully_shard
from megafsdp.buffer import dbuffer
from megafsdp.buffer.comm import collectives
from megafsdp.buffer.comm.collectives import Pending, record_collectives
from megafsdp.device.memory import Category
from megafsdp.fsdp.params.gathered_weight import GatheredWeight
from megafsdp.fsdp.runtime.recorded_order import RecordedOrder
from tests.fsdp.toy import WIDTH, Net, adamw, assert_same_grads, batches, mine, pair, shard
from tests.ranks import Ranks

NUM_BLOCKS = 4


def _net(**options: object) -> Net:
    return shard(Net(NUM_BLOCKS), **options)


def _no_grad_counts() -> list[int]:
    net = _net()
    tokens, _ = mine(batches(1)[0])
    counts = []
    with torch.no_grad():
        for _ in range(2):
            with record_collectives() as record:
                net(tokens)
            counts.append(record.calls["all_gather"])
    live = net._fsdp_unit().ledger.live[Category.UNSHARDED]
    assert live == 0, "nothing stays unsharded after a forward without a graph"
    return counts


def test_forward_without_graph_gathers_each_unit_once(ranks: Ranks) -> None:
    """N all-gathers each time, and nothing is left unsharded."""
    assert ranks(2).run(_no_grad_counts) == [[NUM_BLOCKS + 1] * 2] * 2


def _inner_unit_alone() -> None:
    net = _net(reshard_after_forward=False)
    net(*mine(batches(1)[0])).backward()
    block = net.blocks[1]
    with torch.no_grad():
        block(torch.ones(1, WIDTH))
    assert not block._fsdp_unit().is_unsharded
    block(torch.ones(1, WIDTH))
    assert block._fsdp_unit().is_unsharded, "kept for backward"


def test_an_inner_unit_run_alone_without_graph_is_not_kept(ranks: Ranks) -> None:
    """Whatever was chosen for the time between forward and backward."""
    ranks(2).run(_inner_unit_alone)


def _overlap() -> list[tuple[str, str]]:
    net = _net()
    events: list[tuple[str, str]] = []
    net(*mine(batches(1)[0])).backward()

    original = collectives.all_gather

    class Delayed(Pending):
        def __init__(self, inner: Pending, label: str) -> None:
            super().__init__()
            self.inner, self.label = inner, label

        def wait(self) -> None:
            time.sleep(0.01)
            self.inner.wait()
            events.append(("arrived", self.label))

    def delayed(output, shards, *, group, label):  # noqa: ANN001, ANN202
        events.append(("issued", label))
        return Delayed(original(output, shards, group=group, label=label), label)

    for k, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, k=k: events.append(("computed", f"blocks.{k}")))
    dbuffer.all_gather, kept = delayed, dbuffer.all_gather
    try:
        net(*mine(batches(1)[0]))
    finally:
        dbuffer.all_gather = kept
    return events


def test_the_next_gather_is_in_flight_while_a_unit_computes(ranks: Ranks) -> None:
    """In forward, gather i + 1 is issued before unit i computes and arrives after it."""
    events = ranks(2).run(_overlap)[0]
    for k in range(NUM_BLOCKS - 1):
        following = f"blocks.{k + 1}"
        issued, arrived = events.index(("issued", following)), events.index(("arrived", following))
        assert issued < events.index(("computed", f"blocks.{k}")) < arrived


def _loss_and_gathers() -> list[tuple[str, int]]:
    reference = Net(NUM_BLOCKS)
    net = copy.deepcopy(reference)
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(net)
    events: list[tuple[str, int]] = []
    ledger = net._fsdp_unit().ledger

    def note(what: str) -> None:
        events.append((what, ledger.num_live[Category.UNSHARDED]))

    for batch in batches(2):
        reference.zero_grad()
        net.zero_grad()
        reference(*batch).backward()
        loss = net(*mine(batch))
        operator = loss.grad_fn
        operator.register_prehook(lambda _: note("loss"))
        operator.next_functions[0][0].register_prehook(lambda _: note("operator before"))
        loss.backward()
        assert_same_grads(net, reference)
    return events


def test_beside_the_loss_only_the_root_is_gathered(ranks: Ranks) -> None:
    """Nothing comes ahead of the last block's own backward, also when the order is known."""
    events = [("loss", 1), ("operator before", 1)]
    assert ranks(2).run(_loss_and_gathers) == [[*events, *events]] * 2


def _changing_order() -> None:
    reference, net = pair()
    for order in ([0, 1, 2], [2, 0, 1], [0, 1], [0, 1, 2], [1, 1, 0]):
        batch = batches(1, seed=len(order))[0]
        for model, (tokens, labels) in ((reference, batch), (net, mine(batch))):
            loss = _Reordered(model)(tokens, labels, order)
            loss.backward()
        assert_same_grads(net, reference)
        for unit in (net, *net.blocks):
            assert not unit._fsdp_unit().is_unsharded
        reference.zero_grad()
        net.zero_grad()


class _Reordered:
    """Run a net's blocks in a given order by swapping its list for one forward."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def __call__(
        self, tokens: torch.Tensor, labels: torch.Tensor, order: list[int]
    ) -> torch.Tensor:
        modules = self.net.blocks._modules
        kept = dict(modules)
        try:
            modules.clear()
            modules.update({str(k): kept[str(index)] for k, index in enumerate(order)})
            return self.net(tokens, labels)
        finally:
            modules.clear()
            modules.update(kept)


def _units_ahead_that_do_not_run() -> int:
    net = _net()
    tokens, labels = mine(batches(1)[0])
    run = _Reordered(net)
    for _ in range(2):
        run(tokens, labels, [0, 1, 2, 3]).backward()
    ledger = net._fsdp_unit().ledger
    ledger.reset_peak()
    # Block 1 is gathered ahead and waits; backward must not gather block 3 beside it.
    run(tokens, labels, [0]).backward()
    peak = ledger.peak_num_live[Category.UNSHARDED]
    with torch.no_grad():
        run(tokens, labels, [0, 1, 2, 3])
        run(tokens, labels, [0])
    assert ledger.live[Category.UNSHARDED] == 0, "leftovers go at the end of the forward"
    return peak


def test_units_gathered_ahead_that_do_not_run_count_and_are_released(ranks: Ranks) -> None:
    """The root, the running block and the waiting one are all that is unsharded."""
    assert ranks(2).run(_units_ahead_that_do_not_run) == [3, 3]


def test_a_changing_order_of_units_is_followed_safely(ranks: Ranks) -> None:
    """Skipped, repeated and reordered units give right gradients and leave nothing unsharded."""
    ranks(2).run(_changing_order)


class _Unit:
    """Stands for a unit in an order."""


def test_a_run_that_departs_from_the_record_follows_it_no_more() -> None:
    """Nothing is gathered ahead then, nor kept as the last, also where the record agrees again."""
    first, second, third = units = [_Unit(), _Unit(), _Unit()]
    order: RecordedOrder[_Unit] = RecordedOrder()
    for _ in range(2):
        order.start()
        found = [(order.arrive(unit, 2), order.is_last(unit)) for unit in units]
    assert found == [([second, third], False), ([third], False), ([], True)]
    order.start()
    assert order.arrive(first, 1) == [second]
    for _ in range(2):
        assert (order.arrive(third, 1), order.is_last(third)) == ([], False)


def _refreshes(strategy: str) -> list[int]:
    counts: Counter[int] = Counter()
    original = GatheredWeight.refresh

    def counting(self: GatheredWeight, *args: torch.Tensor) -> None:
        counts[id(self)] += 1
        original(self, *args)

    GatheredWeight.refresh = counting
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        net = _net(strategy=strategy, mp_policy=policy)
        optimizer = adamw(net)
        net(*mine(batches(1)[0])).backward()
        seen = []
        for _ in range(2):
            counts.clear()
            optimizer.step()
            with torch.no_grad():
                net(*mine(batches(1)[0]))
                net(*mine(batches(1)[0]))
            seen.append(sum(counts.values()))
        return seen
    finally:
        GatheredWeight.refresh = original


def test_a_replicated_group_is_refreshed_once_after_a_step(ranks: Ranks) -> None:
    """One cast a group after each step, none in a second forward."""
    assert ranks(2).run(_refreshes, "no_shard") == [[NUM_BLOCKS + 1] * 2] * 2


def _kept_storage_is_regathered() -> None:
    reference, net = pair()
    optimizers = [adamw(reference), adamw(net)]
    batch = batches(1)[0]
    for model, own in ((reference, batch), (net, mine(batch))):
        model(*own).backward()
    for _ in range(2):
        # A forward whose graph is dropped keeps the root and the last unit unsharded.
        net(*mine(batch))
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        expected = reference(batch[0])
        rank = dist.get_rank()
        logits = net(mine(batch)[0])
    torch.testing.assert_close(logits, expected[2 * rank : 2 * rank + 2], rtol=1e-4, atol=1e-5)


def test_kept_storage_is_gathered_again_after_a_step(ranks: Ranks) -> None:
    """Weights that stayed unsharded over an optimizer step are not used stale."""
    ranks(2).run(_kept_storage_is_regathered)


def _free_without_gc() -> int:
    gc.disable()
    try:
        net = _net()
        optimizer = adamw(net)
        for _ in range(2):
            net(*mine(batches(1)[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
        ledger = net._fsdp_unit().ledger
        assert ledger.total > 0
        del optimizer, net
        return ledger.total
    finally:
        gc.enable()


def test_deleting_the_model_frees_every_byte_without_the_cycle_collector(ranks: Ranks) -> None:
    """No reference cycle holds a buffer."""
    assert ranks(2).run(_free_without_gc) == [0, 0]


def _keeps_units_after_backward() -> list[int]:
    reference, net = pair(reshard_after_forward=False)
    net.set_reshard_after_backward(False)
    optimizers = [adamw(reference), adamw(net)]
    gathers = []
    for step in range(2):
        for k in range(2):
            batch = batches(1, seed=2 * step + k)[0]
            reference(*batch).backward()
            with record_collectives() as record:
                net(*mine(batch)).backward()
            gathers.append(record.calls["all_gather"])
            assert all(isinstance(p, DTensor) for p in net.parameters())
        assert_same_grads(net, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gathers


def test_units_may_stay_gathered_after_backward(ranks: Ranks) -> None:
    """Further microbatches gather nothing; after a step everything is gathered anew."""
    assert ranks(2).run(_keeps_units_after_backward) == [[4, 0, 4, 0]] * 2


def _skips_what_was_gathered_ahead(strategy: str) -> None:
    reference, net = pair(strategy=strategy)
    optimizers = [adamw(reference), adamw(net)]
    for step, num_blocks in enumerate((3, 2, 3)):
        batch = batches(1, seed=step)[0]
        for model, rows in ((reference, batch), (net, mine(batch))):
            # The last block is gathered ahead by the order of the pass before.
            blocks, model.blocks = model.blocks, model.blocks[:num_blocks]
            model(*rows).backward()
            model.blocks = blocks
        assert_same_grads(net, reference)
        for optimizer in optimizers:
            optimizer.step()
            # A gradient of zero, not of None: the optimizer moves what did not run.
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_unit_that_did_not_run_is_gathered_again_after_a_step(
    ranks: Ranks, strategy: str
) -> None:
    """What was gathered ahead for it holds the weights before the step."""
    ranks(2).run(_skips_what_was_gathered_ahead, strategy)
