"""What torch may do to an unevenly cut tensor: right, or refused on every rank alike."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor
from megafsdp.device.torch_private import version_of
from tests.buffer.cuts import cut, random, whole_mesh
from tests.buffer.dtensor.emulation import torch_2_11
from tests.ranks import Ranks

Operation = Callable[..., Any]
# Rows [6, 4, 0] and [0, 6, 4]: an empty shard at either end.
CUTS = ({"skipped": 4, "shard_rows": 10}, {"skipped": 22, "shard_rows": 14})

ELEMENTWISE: dict[str, Operation] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - 2 * b,
    "add_alpha": lambda a, b: a.add(b, alpha=0.3),
    "divide": lambda a, b: 1 / a,
    "scalar tensor": lambda a, b: a * torch.tensor(3.0),
    "power": lambda a, b: a**2,
    "sqrt": lambda a, b: a.abs().sqrt(),
    "lerp": lambda a, b: a.lerp(b, 0.1),
    "addcdiv": lambda a, b: a.addcdiv(b, b.square() + 1, value=-0.2),
    "addcmul": lambda a, b: a.addcmul(b, b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 7.0),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "maximum": lambda a, b: torch.maximum(a, b),
    "comparison": lambda a, b: a < b,
    "isnan": lambda a, b: (a / 0 * 0).isnan(),
    "sign": lambda a, b: a.sign().neg(),
    "bf16": lambda a, b: a.to(torch.bfloat16),
    "double": lambda a, b: a.double(),
    "clone": lambda a, b: a.clone(),
    "detach": lambda a, b: a.detach(),
    "contiguous": lambda a, b: a.contiguous().cpu(),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "ones_like": lambda a, b: torch.ones_like(a, dtype=torch.int32),
    "full_like": lambda a, b: torch.full_like(a, 2.5),
    "empty_like": lambda a, b: torch.empty_like(a).copy_(b),
    "new_empty": lambda a, b: a.new_empty(a.shape, dtype=torch.float64).zero_(),
    "new_zeros": lambda a, b: a.new_zeros(*a.shape),
    "new_ones": lambda a, b: a.new_ones(size=a.shape, dtype=torch.int32),
    "new_full": lambda a, b: a.new_full(a.shape, 2.5),
    "in place": lambda a, b: a.add_(b).mul_(0.5).sub_(1).addcdiv_(b, b.square() + 1).lerp_(b, 0.1),
    "augmented": lambda a, b: operator.itruediv(operator.iadd(a, b), 2),
    "fill": lambda a, b: a.fill_(3.0),
    "zero": lambda a, b: a.zero_(),
    "copy": lambda a, b: a.copy_(b),
    "foreach_add": lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2)[1],
    "foreach_scalar": lambda a, b: torch._foreach_mul([a, b], 3.0)[1],
    "foreach_scalars": lambda a, b: torch._foreach_mul([a, b], [3.0, 2.0])[1],
    "foreach_tensor": lambda a, b: torch._foreach_mul([a, b], torch.tensor(3.0))[0],
    "foreach_addcdiv": lambda a, b: torch._foreach_addcdiv([a], [b], [b.square() + 1], [0.5])[0],
    "foreach_in_place": lambda a, b: (
        torch._foreach_lerp_([a, b], [b, a], 0.3),
        torch._foreach_sqrt_([a.abs_()]),
        torch._foreach_copy_([b], [a]),
        b,
    )[-1],
    "foreach_zero": lambda a, b: (torch._foreach_zero_([a, b]), a)[-1],
}

REDUCTIONS: dict[str, Operation] = {
    "sum": lambda a: a.sum(),
    "sum of columns": lambda a: a.sum(0),
    "sum over both": lambda a: a.sum((0, 1)),
    "2-norm": lambda a: a.norm(),
    "1-norm": lambda a: torch.linalg.vector_norm(a, 1),
    "foreach 2-norm": lambda a: torch._foreach_norm([a, a * 2])[1],
    "any": lambda a: (a > 1).any(),
    "all finite": lambda a: a.isfinite().all(),
    "all of columns": lambda a: (a < 1.5).all(0),
    "count_nonzero": lambda a: torch.count_nonzero(a > 0),
}

REFUSED: dict[str, Operation] = {
    "flatten": lambda a: a.view(-1),
    "reshape": lambda a: a.reshape(5, 8),
    "bytes": lambda a: a.view(torch.uint8),
    "slice": lambda a: a[2:8],
    "column": lambda a: a.select(1, 0),
    "row of a watched parameter": lambda a: torch.nn.Parameter(a)[0],
    "mask": lambda a: a[a > 0],
    "split": lambda a: a.split(5),
    "cat": lambda a: torch.cat([a, a]),
    "softmax": lambda a: a.softmax(0),
    "sort": lambda a: a.sort(0),
    "cumsum": lambda a: a.cumsum(0),
    "foreach_max": lambda a: torch._foreach_max([a]),
    "transpose": lambda a: a.t(),
    "matmul": lambda a: torch.ones(2, 10) @ a,
    "linear": lambda a: torch.nn.functional.linear(torch.ones(2, 4), a),
    "sum of rows": lambda a: a.sum(1),
    "norm of rows": lambda a: a.norm(dim=1),
    "any of rows": lambda a: (a > 0).any(1),
    "parameters_to_vector": lambda a: torch.nn.utils.parameters_to_vector([a]),
}

MIXED: dict[str, Operation] = {
    "full": lambda a, other, full: a + full,
    "full first": lambda a, other, full: full * a,
    "row": lambda a, other, full: a + full[0],
    "cut by torch": lambda a, other, full: a + distribute_tensor(full, a.device_mesh, [Shard(0)]),
    "other cuts": lambda a, other, full: a + other,
    "other cuts in place": lambda a, other, full: a.copy_(other),
    "full in place": lambda a, other, full: a.copy_(full),
    "into full": lambda a, other, full: full.copy_(a),
    "where": lambda a, other, full: torch.where(a > 0, a, full),
    "foreach": lambda a, other, full: torch._foreach_add([a, a], [a, other]),
    "foreach full": lambda a, other, full: torch._foreach_copy_([a], [full]),
}


@contextmanager
def _path(is_bypassed: bool) -> Iterator[None]:
    if not is_bypassed:
        yield
        return
    with torch_2_11():
        yield


def _elementwise_results(is_bypassed: bool) -> None:
    mesh = whole_mesh()
    full, other = random(10, 4), random(10, 4, seed=1)
    num_rows = 0
    with _path(is_bypassed):
        for name, operation in ELEMENTWISE.items():
            for cuts in CUTS:
                a, b = cut(full, mesh, **cuts), cut(other, mesh, **cuts)
                result = operation(a, b)
                wanted = operation(full.clone(), other.clone())
                assert type(result) is UnevenDTensor, f"{name}: {type(result)}"
                assert result.uneven_layout == a.uneven_layout, name
                assert result.dtype == wanted.dtype == result.local.dtype, name
                assert result._spec.tensor_meta.dtype == wanted.dtype, name
                start, stop = a.uneven_layout.element_range()
                rows = wanted.reshape(-1)[start:stop].view(result.local.shape)
                assert torch.equal(result.local, rows), name
                num_rows += len(rows)
    assert num_rows or dist.get_world_size() > 1


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_elementwise_results_are_cut_like_their_operands(
    ranks: Ranks, num_ranks: int, is_bypassed: bool
) -> None:
    """Values equal the rows of the full result bit by bit, in place, out of place and in lists."""
    ranks(num_ranks).run(_elementwise_results, is_bypassed)


def _in_place_results(is_bypassed: bool) -> None:
    with _path(is_bypassed):
        tensor = cut(random(10, 4), whole_mesh())
        address = tensor.local.data_ptr()
        assert tensor.mul_(2) is tensor
        assert tensor.zero_() is tensor
        assert tensor.copy_(tensor.clone()) is tensor
        assert tensor.local.data_ptr() == address


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_operations_in_place_return_their_operand(ranks: Ranks, is_bypassed: bool) -> None:
    """The same object over the same memory."""
    ranks(2).run(_in_place_results, is_bypassed)


def _reduced_results(is_bypassed: bool) -> None:
    mesh, full = whole_mesh(), random(10, 4)
    with _path(is_bypassed):
        for name, operation in REDUCTIONS.items():
            for cuts in CUTS:
                result = operation(cut(full, mesh, **cuts))
                assert isinstance(result, DTensor)
                # The order of the sum over ranks is not that of one process.
                torch.testing.assert_close(
                    result.full_tensor(), operation(full), msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_sums_and_norms_are_those_of_the_whole(ranks: Ranks, is_bypassed: bool) -> None:
    """What torch leaves partial becomes right when it is summed, whatever the cuts."""
    ranks(3).run(_reduced_results, is_bypassed)


def _raised(operation: Operation, *operands: torch.Tensor) -> str:
    try:
        operation(*operands)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _refusals(is_bypassed: bool) -> dict[str, str]:
    mesh = whole_mesh()
    with _path(is_bypassed):
        raised = {n: _raised(op, cut(random(10, 4), mesh)) for n, op in REFUSED.items()}
    dist.barrier()  # No operation has left a collective behind that a rank waits in.
    return raised


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_what_torch_computes_wrongly_is_refused_on_all_ranks(
    ranks: Ranks, is_bypassed: bool
) -> None:
    """Ranks with many rows, few and none raise the same, and say what to do instead."""
    first, *others = ranks(3).run(_refusals, is_bypassed)
    for name, message in first.items():
        assert message.startswith("NotImplementedError: Expected an elementwise operation"), name
        assert "(10, 4)" in message and "full_tensor()" in message
        assert all(other[name] == message for other in others), name


def _of_other_shapes(is_bypassed: bool) -> None:
    one = cut(random(10, 4), whole_mesh(), **CUTS[0])
    with _path(is_bypassed):
        empty, zeros, full = one.new_empty(3, 2), one.new_zeros((5,)), one.new_full((2, 3), 7.5)
        parts = torch.cat([empty.fill_(1.0), one.new_ones(7, 2, dtype=torch.float64)])
    for made, wanted in ((zeros, torch.zeros(5)), (full, torch.full((2, 3), 7.5))):
        assert type(made) is DTensor and made.placements == (Replicate(),)
        assert made.stride() == wanted.stride() and torch.equal(made.to_local(), wanted)
    # Operations on it are torch's; a whole of the own shape can be copied in.
    rows = parts.view(10, 2).repeat(1, 2)
    one.copy_(rows.to(one.dtype))
    assert torch.equal(full_tensor(one), torch.ones(10, 4))


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_new_tensors_of_other_shapes_are_whole_on_all_ranks(
    ranks: Ranks, is_bypassed: bool
) -> None:
    """As in torch: initialisers draw the parts of a fused parameter in such, and copy them in."""
    ranks(3).run(_of_other_shapes, is_bypassed)


def _mixtures(is_bypassed: bool) -> dict[str, str]:
    mesh, full = whole_mesh(), random(10, 4)
    one, other = (cut(full, mesh, **cuts) for cuts in CUTS)
    with _path(is_bypassed):
        raised = {n: _raised(op, one, other, full.clone()) for n, op in MIXED.items()}
        assert one.new_empty((10, 4), device="meta").is_meta
    assert torch.equal(one.local, cut(full, mesh, **CUTS[0]).local), "nothing was written"
    return raised


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_operands_cut_differently_are_refused(ranks: Ranks, is_bypassed: bool) -> None:
    """Mixing with a full tensor, a row, or other cuts is a ValueError on every rank."""
    for raised in ranks(3).run(_mixtures, is_bypassed):
        for name, message in raised.items():
            assert message.startswith("ValueError: Expected operands cut like the first"), name


def _comparisons(is_bypassed: bool) -> None:
    mesh, full = whole_mesh(), random(10, 4)
    changed = full.clone()
    changed[-1, -1] += 1
    one, other = (torch.nn.Parameter(cut(full, mesh, **cuts)) for cuts in CUTS)
    replicated = DTensor.from_local(full, mesh, [Replicate()])
    torch_cut = distribute_tensor(full, mesh, [Shard(0)])
    with _path(is_bypassed):
        for same in (one.detach(), other, full, replicated, torch_cut):
            assert torch.equal(one, same) and torch.equal(same, one)
        for differs in (*(cut(changed, mesh, **cuts) for cuts in CUTS), changed):
            assert not torch.equal(one, differs) and not torch.equal(differs, one)
        with record_collectives() as record:
            for shaped in (full[:8], full[0], full.flatten(), cut(full[:8], mesh)):
                assert not torch.equal(one, shaped) and not torch.equal(shaped, one)
        assert not record.calls


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_equality_is_that_of_the_whole_tensors(ranks: Ranks, is_bypassed: bool) -> None:
    """Whatever cuts them; those of different shapes are compared on each rank alone."""
    ranks(3).run(_comparisons, is_bypassed)


def _scaled_by_own_norm(is_bypassed: bool) -> None:
    full = random(10, 4)
    with _path(is_bypassed):
        tensor = cut(full, whole_mesh())
        torch.testing.assert_close((tensor / tensor.norm()).full_tensor(), full / full.norm())
        (scaled,) = torch._foreach_mul([tensor], tensor.sum())
        torch.testing.assert_close(scaled.full_tensor(), full * full.sum())
        assert torch.equal(tensor, tensor.clone())
        assert not torch.equal(tensor, tensor + 1)


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_partial_scalars_are_summed_before_use(ranks: Ranks, is_bypassed: bool) -> None:
    """Dividing by a norm divides by that of all ranks, not by the own rows'."""
    ranks(3).run(_scaled_by_own_norm, is_bypassed)


def _adam(tensor: torch.Tensor) -> None:
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-5}
    states = [[tensor.clone()] for _ in range(3)]
    options = {"amsgrad": False, "maximize": False}
    torch._fused_adam_([tensor], *states, [], [torch.ones(())], **hyper, **options)


def _unscale(tensor: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([tensor], torch.zeros(1), torch.ones(1))


def _counted_in_lists(is_bypassed: bool) -> None:
    with _path(is_bypassed):
        for write in (lambda tensor: torch._foreach_mul_([tensor], 2), _adam, _unscale):
            tensor = cut(random(10, 4), whole_mesh())
            before = version_of(tensor.local)
            write(tensor)
            assert version_of(tensor.local) > before


@pytest.mark.parametrize("is_bypassed", [False, True], ids=["dispatch", "torch-2.11"])
def test_writes_to_lists_are_counted(ranks: Ranks, is_bypassed: bool) -> None:
    """By these counts casts are known to be old, and steps ahead to have read other gradients."""
    ranks(3).run(_counted_in_lists, is_bypassed)


def _facts_under_2_11() -> list[int]:
    with torch_2_11():
        tensor = cut(random(10, 4), whole_mesh())
        return [tensor.element_size(), tensor.get_device(), tensor.dim(), tensor.numel()]


def test_torch_2_11_is_asked_for_facts_of_a_tensor(ranks: Ranks) -> None:
    """What reads no element is no operation, though torch has an operator of that name."""
    assert ranks(2).run(_facts_under_2_11) == [[4, -1, 2, 40]] * 2


def _traced_under_2_11() -> list[str]:
    with torch_2_11():
        parameter = torch.nn.Parameter(cut(random(10, 4), whole_mesh()))
        assert type(torch.zeros_like(parameter)) is type(parameter.detach()) is UnevenDTensor
        with torch.no_grad():
            assert type(parameter * 2) is UnevenDTensor
        uses = (torch.Tensor.sum, torch.Tensor.norm, UnevenDTensor.to_local, torch.Tensor.clone)
        return [_raised(use, parameter) for use in (*uses, lambda p: p * 2)]


def test_torch_2_11_is_not_trusted_with_gradients(ranks: Ranks) -> None:
    """There autograd makes plain DTensors of them, whose cuts would be lost without a word."""
    for raised in ranks(2).run(_traced_under_2_11):
        assert all("within autograd" in message for message in raised)
        assert all("under torch.no_grad()" in message for message in raised[:3])


def _no_sharding_propagation() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("entered DTensor's dispatch")

    propagator = DTensor._op_dispatcher.sharding_propagator
    with pytest.MonkeyPatch.context() as patch:
        for name in ("propagate", "propagate_op_sharding_non_cached"):
            patch.setattr(propagator, name, refuse)
        mesh = whole_mesh()
        for operation in ELEMENTWISE.values():
            operation(cut(random(10, 4), mesh), cut(random(10, 4, seed=1), mesh))
        for operation in REDUCTIONS.values():
            operation(cut(random(10, 4), mesh))
        with pytest.raises(RuntimeError, match="entered"):
            torch.equal(cut(random(10, 4), mesh), cut(random(10, 4), mesh))


def test_elementwise_operations_never_enter_dtensor_dispatch(ranks: Ranks) -> None:
    """Nor do statistics: a first step over many parameters is not superlinear; equal() enters."""
    ranks(2).run(_no_sharding_propagation)


def _unscaled_over_two_axes() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    grads = [cut(torch.ones(8, 2), mesh[name]) for name in ("a", "b")]
    if (mesh.get_local_rank("a"), mesh.get_local_rank("b")) == (0, 1):
        grads[1].local.fill_(torch.inf)
    found_inf = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, torch.tensor(0.5))
    assert grads[0].to_local().eq(0.5).all()
    return found_inf.item()


def test_all_ranks_learn_of_an_infinity_in_either_cut(ranks: Ranks) -> None:
    """Gradients of one list may be divided over different axes."""
    assert ranks(4).run(_unscaled_over_two_axes) == [1.0] * 4
