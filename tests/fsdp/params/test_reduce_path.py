"""The way of gradients where a backend's library sums them: bytes, values, memory and overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp import MixedPrecisionPolicy, fully_shard, microbatch
from megafsdp.buffer.comm import collectives as door
from megafsdp.device.memory import Category, set_poison
from megafsdp.fsdp.estimate.meta_engine import fake_ranks
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from tests.end_to_end.strategy_cases import mesh_of_shape
from tests.fsdp.toy import (
    Net,
    assert_same_grads,
    batches,
    full_grads,
    mine,
    options_of_strategies,
    pair,
    shard,
)
from tests.library import library_on_gloo
from tests.ranks import Ranks

BF16, F32 = torch.bfloat16, torch.float32


class CountBytes(TorchDispatchMode):
    """Count the bytes that operators read and write; collectives and single numbers are left out.

    Attributes:
        nbytes: Their sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Count and run."""
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        makes_views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        makes_memory = schema.name.startswith(("aten::empty", "aten::new_"))
        if func.namespace == "c10d" or makes_views or makes_memory:
            return result
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments if kwargs and a.name in kwargs]
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # What a copy or an operator with out= writes, it does not read.
            is_overwritten = is_written and (argument.is_out or "copy" in schema.name)
            nbytes = sum(t.nbytes for t in _tensors(value) if t.numel() > 1)
            self.nbytes += nbytes * (2 if is_written and not is_overwritten else 1)
        if not any(r.alias_info for r in schema.returns):
            self.nbytes += sum(t.nbytes for t in _tensors(result) if t.numel() > 1)
        return result


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, torch.Tensor):
            yield each


def _reduce(group: ParameterGroup) -> tuple[float, float]:
    """Reduce gradients of a group, and return the bytes a parameter before and after the sum."""
    for parameter in group.parameters:
        parameter.unsharded.grad = torch.ones(parameter.shape, dtype=group.dtypes.compute)
    with CountBytes() as into:
        reduction = group.gradients.start_reduce(is_final=True)
    with CountBytes() as after:
        group.gradients.advance(reduction)
    numel = sum(parameter.shape.numel() for parameter in group.parameters)
    assert numel == group.layout.gathered_numel, "no gaps"
    return into.nbytes / numel, after.nbytes / numel


@pytest.mark.parametrize("backend", ["nccl", "another"])
@pytest.mark.parametrize("reduce_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_reduction_moves_the_bytes_of_the_formula(
    num_ranks: int, reduce_dtype: torch.dtype, backend: str
) -> None:
    """From bf16 gradients to fp32 main gradients, of the first microbatch and of later ones.

    One pass into the wire, and after it none where NCCL sums straight into the main gradient, else
    one. On one rank there is no wire: gradients are packed as they are.
    """
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    wire = reduce_dtype.itemsize if num_ranks > 1 else BF16.itemsize
    is_direct = num_ranks > 1 and reduce_dtype is F32
    with fake_ranks(num_ranks), pytest.MonkeyPatch.context() as patch:
        set_poison(False)
        patch.setattr(door, "backends", lambda group: {"cpu": backend})
        net = fully_shard(nn.Sequential(nn.Linear(64, 64, bias=False)), mp_policy=policy)
        (group,) = net._fsdp_unit().groups
        first, later = _reduce(group), _reduce(group)
    assert first[0] == later[0] == 2 + wire
    assert first[1] == (0 if is_direct and backend == "nccl" else (wire + 4) / num_ranks)
    assert later[1] == (wire + 4 + 4) / num_ranks
    if num_ranks == 8:
        assert first[0] <= 6 and first[1] <= 1


def _equal_one_process(backend: str) -> None:
    with library_on_gloo(backend) as library:
        for options in options_of_strategies():
            reference, net = pair(1, **options)
            # The first sum overwrites, and the last one is added, after a microbatch that waits.
            for k, batch in enumerate(batches(3)):
                reference(*batch).backward()
                with microbatch(net, is_last=k != 1):
                    net(*mine(batch)).backward()
                if k != 1:
                    assert_same_grads(net, reference)
    assert bool(library.log) == (dist.get_world_size() > 1)


@pytest.mark.parametrize(
    ("num_ranks", "backend"), [(1, "nccl"), (2, "another"), (3, "nccl"), (4, "nccl")]
)
def test_gradients_are_those_of_one_process(ranks: Ranks, num_ranks: int, backend: str) -> None:
    """In every strategy, over one axis and over two: then the divisor is that of both."""
    ranks(num_ranks).run(_equal_one_process, backend)


class _CutShortError(Exception):
    """An error that only a test raises."""


def _raise(*unused: object) -> None:
    raise _CutShortError


def _cut_short() -> None:
    first, second = batches(2)
    with library_on_gloo() as library:
        for options in options_of_strategies():
            reference, net = pair(2, **options)
            reference(*second).backward()
            # The last block's sum is under way: first to a new main gradient, then to be added.
            for is_added in (False, True):
                if is_added:
                    net(*mine(first)).backward()
                hook = net.blocks[0].up.register_full_backward_pre_hook(_raise)
                with pytest.raises(_CutShortError):
                    net(*mine(first)).backward()
                hook.remove()
                net.zero_grad()
                net(*mine(second)).backward()
                assert_same_grads(net, reference)
    done = Counter(event.split()[0] for event in library.log)
    assert done["issue"] == done["wait"] > 0, "memory that a library works on is not freed"


def test_a_backward_that_was_cut_short_leaves_nothing(ranks: Ranks) -> None:
    """The next one gives the gradients of one process, whatever a library has written by then."""
    ranks(2).run(_cut_short)


def _ops_of_sums(force_sum: bool) -> set[str]:
    with library_on_gloo() as library:
        reference, net = pair(1)
        for module in (net, *net.blocks):
            module.set_force_sum_reduction_for_comms(force_sum)
        batch = batches(1)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference)
    return {name for name, _ in library.ops}


def test_the_user_may_keep_nccl_from_scaling(ranks: Ranks) -> None:
    """As torch's switch, for collectives that only sum."""
    assert ranks(2).run(_ops_of_sums, False) == [{"AVG"}] * 2
    assert ranks(2).run(_ops_of_sums, True) == [{"SUM"}] * 2


def _bits(policy: MixedPrecisionPolicy) -> None:
    batch, grads = mine(batches(1)[0]), []
    for is_library in (False, True):
        with pytest.MonkeyPatch.context() if not is_library else library_on_gloo():
            net = shard(Net(), mp_policy=policy)
            net(*batch).backward()
        grads.append(full_grads(net))
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


@pytest.mark.parametrize("param_dtype", [F32, BF16], ids=str)
def test_two_ranks_get_the_bits_that_gloo_gives(ranks: Ranks, param_dtype: torch.dtype) -> None:
    """Gradients are packed into fp32 exactly, and the half of their sum is rounded once."""
    ranks(2).run(_bits, MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=F32))


def _inputs_alive(num_buffers: int, shape: tuple[int, ...]) -> tuple[int, int, int]:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    with library_on_gloo():
        net = shard(Net(4), mesh=mesh_of_shape(shape), mp_policy=policy)
        net.set_reduce_scatter_max_input_buffers(num_buffers)
        net(*mine(batches(1)[0])).backward()
    units = [module._fsdp_unit() for module in (net, *net.blocks)]
    largest = max(group.layout.gathered_numel for unit in units for group in unit.groups)
    ledger = units[0].ledger
    partials = Category.PARTIAL_GRAD
    return ledger.peak_num_live[partials], ledger.peak[partials], 4 * largest


def test_the_older_input_is_freed_before_the_next_is_packed(ranks: Ranks) -> None:
    """One input is alive at a time, in the dtype of the sum, or as many as the user allows."""
    for shape in ((2,), (1, 2)):
        for num_live, peak_nbytes, largest_nbytes in ranks(2).run(_inputs_alive, 1, shape):
            assert num_live == 1 and peak_nbytes == largest_nbytes
        for num_live, *_ in ranks(2).run(_inputs_alive, 3, shape):
            assert num_live == 3


def _sums_of_microbatches() -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=F32, reduce_dtype=BF16)
    net = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh_of_shape((2, 2)), mp_policy=policy)
    for value in (256.0, 1.0, 1.0, 1.0, 1.0):
        with microbatch(net, is_last=False):
            net(torch.full((1, 1), value)).sum().backward()
    net(torch.zeros(1, 1)).sum().backward()
    grad = net.weight.grad.to_local()
    assert torch.equal(grad, torch.full_like(grad, 260.0))


def test_sums_that_wait_for_an_outer_axis_have_the_dtype_of_gradients(ranks: Ranks) -> None:
    """Only what is sent is in bf16, in which a large sum would absorb small addends."""
    ranks(4).run(_sums_of_microbatches)


def _inner_sums_alive() -> tuple[int, int]:
    with library_on_gloo():
        net = shard(Net(4), mesh=mesh_of_shape((2, 2)))
        for batch in batches(2):
            net(*mine(batch)).backward()
    ledger, (group,) = net._fsdp_unit().ledger, net.blocks[0]._fsdp_unit().groups
    waiting = ledger.peak[Category.MAIN_GRAD] - ledger.live[Category.MAIN_GRAD]
    return waiting, 4 * group.layout.shard_numel


def test_two_sums_over_the_inner_axis_are_alive(ranks: Ranks) -> None:
    """That of the group at work, and the one that is being summed over the outer axis."""
    for waiting_nbytes, nbytes in ranks(4).run(_inner_sums_alive):
        assert waiting_nbytes == 2 * nbytes


def _events(shape: tuple[int, ...]) -> list[str]:
    """Return issues and waits of sums, and the backwards of blocks, of one backward."""
    with library_on_gloo() as library:
        net = shard(Net(4), mesh=mesh_of_shape(shape))
        for index, block in enumerate(net.blocks):
            block.down.register_full_backward_hook(
                lambda *_, name=f"block {index}": library.log.append(name)
            )
        net(*mine(batches(1)[0])).backward()
    return library.log


def test_reductions_run_beside_the_next_units_backward(ranks: Ranks) -> None:
    """A sum is waited for when the next unit's backward has ended, before that one is packed."""
    expected = ["block 3", "issue 0"]
    for number, block in enumerate((2, 1, 0)):
        expected += [f"block {block}", f"wait {number}", f"issue {number + 1}"]
    # The root's, and what is left at the end of the backward.
    expected += ["wait 3", "issue 4", "wait 4"]
    assert ranks(2).run(_events, (2,)) == [expected] * 2


def test_sums_over_the_outer_axis_run_beside_the_next_units_backward(ranks: Ranks) -> None:
    """Those over an inner axis of one rank end at once; the outer ones wait a unit longer."""
    log = ranks(2).run(_events, (2, 1))[0]
    assert log[:6] == ["block 3", "block 2", "issue sum", "block 1", "issue sum", "wait sum"]
