"""Units whose gathers and reductions objects of the user's make, as torch's methods set them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard, microbatch
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from tests.fsdp.toy import (
    Net,
    assert_same_grads,
    assert_same_parameters,
    batches,
    mine,
    options_of_strategies,
    shard,
)
from tests.ranks import Ranks
from tests.user_comms import UserAllGather, UserReduceScatter, give

BF16, F32 = torch.bfloat16, torch.float32


def _give(net: torch.nn.Module) -> tuple[UserAllGather, UserReduceScatter]:
    """Set one object of each kind for all units."""
    comms = UserAllGather(), UserReduceScatter()
    give(net, *comms)
    return comms


def _two_steps(reference: Net, net: Net) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, net)]
    for step in range(2):
        for is_last, batch in zip((False, True), batches(2, seed=step), strict=True):
            reference(*batch).backward()
            with microbatch(net, is_last=is_last):
                net(*mine(batch)).backward()
        assert_same_grads(net, reference, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-9, atol=1e-12)


def _trained(options: dict[str, object], *, is_given: bool) -> tuple[CollectiveRecord, list[int]]:
    """Train; return what was issued, and how often the objects were called."""
    reference = Net().double()
    net = shard(copy.deepcopy(reference), **options)
    comms = _give(net) if is_given else (UserAllGather(), UserReduceScatter())
    with record_collectives() as record:
        _two_steps(reference, net)
    return record, [len(comm.calls) for comm in comms]


def _trains() -> None:
    more: list[dict[str, object]] = []
    if dist.get_world_size() == 2:
        more = [{"offload_policy": OffloadPolicy(params=True)}]
    elif dist.get_world_size() == 4:
        more = [{"reshard_after_forward": 2}]
    for options in [*options_of_strategies(), *more]:
        if options.get("strategy") == "no_shard":
            continue
        record, num_calls = _trained(options, is_given=True)
        # As many collectives as without, of which the objects make those over the inner axis.
        assert record.calls == _trained(options, is_given=False)[0].calls
        kinds = "all_gather", "reduce_scatter"
        if "mesh" in options:
            inner = options["mesh"].get_group("inner").group_name
            assert num_calls == [record.calls_by_group[kind, inner] for kind in kinds]
        else:
            assert num_calls == [record.calls[kind] for kind in kinds]
            assert all(num_calls)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_units_train_by_the_users_collectives(ranks: Ranks, num_ranks: int) -> None:
    """Every strategy that divides weights, HSDP, HFSDP, slices, and parameters on the host."""
    ranks(num_ranks).run(_trains)


def _same_object_in_torch() -> None:
    reference = Net().double()
    gather, scatter = UserAllGather(), UserReduceScatter()
    nets = []
    for make in (torch_fully_shard, fully_shard):
        net = copy.deepcopy(reference)
        for block in net.blocks:
            make(block)
        nets.append(make(net))
        give(net, gather, scatter)
    (batch,) = batches(1)
    reference(*batch).backward()
    for net in nets:
        num_gathers, num_sums = len(gather.calls), len(scatter.calls)
        net(*mine(batch)).backward()
        # Each block in forward and in backward, the root once.
        assert len(gather.calls) - num_gathers == 2 * len(net.blocks) + 1
        assert len(scatter.calls) - num_sums == len(net.blocks) + 1
        assert_same_grads(net, reference, rtol=1e-9, atol=1e-12)


def test_the_same_objects_serve_torchs_units(ranks: Ranks) -> None:
    """One class for both, called as often."""
    ranks(2).run(_same_object_in_torch)


def _dtypes() -> None:
    batch = mine(batches(1)[0])
    cases = [
        (MixedPrecisionPolicy(param_dtype=BF16), {BF16}, F32),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16), {BF16}, BF16),
        (MixedPrecisionPolicy(recipe="fp8_current", param_dtype=BF16), {BF16, torch.uint8}, F32),
    ]
    for policy, gathered, summed in cases:
        nets = [shard(Net(width=32), mp_policy=policy) for _ in range(2)]
        gather, scatter = _give(nets[0])
        for net in nets:
            net(*batch).backward()
        assert {dtype for _, dtype in gather.calls} == gathered
        assert {dtype for _, dtype in scatter.calls} == {summed}
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if summed == F32 else {"rtol": 0.02, "atol": 1e-4}
        for p, q in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(p.grad.to_local(), q.grad.to_local(), **tolerance)


def test_the_objects_see_compute_weights_and_the_dtype_of_the_sum(ranks: Ranks) -> None:
    """Casts, codes of quantized weights, and sums in bf16, which gloo alone would make in fp32."""
    ranks(2).run(_dtypes)


def _fails(strategy: str) -> None:
    nets = [shard(Net(), strategy=strategy) for _ in range(2)]
    gather, scatter = _give(nets[0])
    batch = mine(batches(1)[0])
    for net in nets:
        net(*batch).backward()
    breaks: list[Callable[[], None]] = [
        lambda: setattr(gather, "fails", True),
        lambda: setattr(scatter, "fails", True),
    ]
    for break_one in breaks:
        for net in nets:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        nets[0].zero_grad()
        break_one()
        with pytest.raises(ArithmeticError, match="the user's link is down"):
            nets[0](*batch).backward()
        for net in nets:
            net.zero_grad()
            net(*batch).backward()
        for p, q in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(p.grad.to_local(), q.grad.to_local())


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_step_after_a_failed_collective_is_right(ranks: Ranks, strategy: str) -> None:
    """A gather or a sum raises once: the next step gathers anew, and sums its own gradients."""
    ranks(2).run(_fails, strategy)


def _alone() -> None:
    net = shard(Net(1))
    gather, scatter = _give(net)
    net(*mine(batches(1)[0])).backward()
    assert not gather.calls and not scatter.calls


def test_one_rank_calls_nothing(ranks: Ranks) -> None:
    """As with the default, which issues no collective."""
    ranks(1).run(_alone)


def _restored() -> None:
    net = shard(Net(1))
    gather, scatter = _give(net)
    give(net, None, None)
    net(*mine(batches(1)[0])).backward()
    assert not gather.calls and not scatter.calls


def test_none_restores_the_default(ranks: Ranks) -> None:
    """The objects are not called any more."""
    ranks(2).run(_restored)


def _refused() -> None:
    unit = fully_shard(torch.nn.Linear(3, 2))
    whole = fully_shard(torch.nn.Linear(3, 2), strategy="no_shard")
    empty = fully_shard(torch.nn.Sequential(unit))
    for name, comm in (("all_gather", UserAllGather()), ("reduce_scatter", UserReduceScatter())):
        for wrong in (object(), lambda: None, "mean"):
            with pytest.raises(TypeError, match=rf"with allocate\(\).*In set_custom_{name}\(\)"):
                getattr(unit, f"set_custom_{name}")(wrong)
        with pytest.raises(ValueError, match="whose weights are divided, got one of strategy"):
            getattr(whole, f"set_custom_{name}")(comm)
        getattr(whole, f"set_custom_{name}")(None)
        # A root without parameters of its own has no collectives.
        getattr(empty, f"set_custom_{name}")(comm)


def test_an_object_that_cannot_serve_is_refused(ranks: Ranks) -> None:
    """No allocate(), not callable, or a unit that gathers nothing."""
    ranks(1).run(_refused)
