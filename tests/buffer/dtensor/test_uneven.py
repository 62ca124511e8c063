"""The uneven DTensor as an object: whole values, copies, pickles, gradients, refusals."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.factories import make_replicated
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.model_part import ModelPart, part_of, whole_part
from tests.buffer.cuts import cut, layout_of, random, whole_mesh
from tests.ranks import Ranks

# (shape, rows before it in its sub-buffer, rows of a shard), for 3 ranks.
CASES = {
    "10 rows as 6, 4, 0": ((10, 4), 4, 10),
    "10 rows as 0, 6, 4": ((10, 4), 22, 14),
    "9 rows as 3, 3, 3": ((9, 4), 0, 3),
    "one row, on the last rank": ((1, 7), 25, 10),
    "vector": ((17,), 3, 9),
    "vector of one": ((1,), 0, 5),
    "three dimensions": ((5, 2, 3), 1, 4),
    "all on one rank": ((4, 2), 0, 8),
}


def _cut(case: str, seed: int = 0) -> tuple[UnevenDTensor, torch.Tensor]:
    shape, skipped, shard_rows = CASES[case]
    full = random(*shape, seed=seed)
    return cut(full, whole_mesh(), skipped=skipped, shard_rows=shard_rows), full


def _whole_values(case: str) -> int:
    tensor, full = _cut(case)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (full.shape, full.stride(), full.dtype)
    with record_collectives() as record:
        assert torch.equal(tensor.full_tensor(), full)
    assert record.calls == {"all_gather": 1}, "no metadata travels"
    assert torch.equal(full_tensor(nn.Parameter(tensor)), full)
    replicated = tensor.redistribute(placements=[Replicate()])
    assert type(replicated) is DTensor
    assert torch.equal(replicated.to_local(), full)
    assert tensor.redistribute(placements=[Shard(0)]) is tensor
    for dtype in (torch.bfloat16, torch.float64, torch.int32, torch.bool):
        assert torch.equal(tensor.to(dtype).full_tensor(), full.to(dtype))
    target = torch.zeros_like(tensor)
    target.copy_from_full_(full)
    assert torch.equal(target.local, tensor.local)
    return tensor.local.numel()


@pytest.mark.parametrize("case", CASES)
def test_whole_tensor_comes_back_from_any_cuts(ranks: Ranks, case: str) -> None:
    """full_tensor, redistribute and copy_from_full_ agree, with empty shards and odd shapes."""
    numels = ranks(3).run(_whole_values, case)
    shape = CASES[case][0]
    assert sum(numels) == torch.Size(shape).numel()


def _stacked_experts() -> None:
    shape, rank = (3, 4, 5), dist.get_rank()
    layout = UnevenLayout(whole_part(shape), 5, 0, 35, 2, rank)
    full = random(*shape)
    start, stop = layout.element_range()
    rows = full.reshape(-1)[start:stop].clone().view(layout.local_shape())
    tensor = UnevenDTensor.from_local_rows(rows, whole_mesh(), layout)
    assert tuple(tensor.local.shape) == ((7, 5), (5, 5))[rank]
    assert torch.equal(tensor.full_tensor(), full)
    assert torch.equal((tensor * 2 + tensor).full_tensor(), full * 2 + full)
    target = torch.zeros_like(tensor)
    target.copy_from_full_(full)
    assert torch.equal(target.local, rows)


def test_stacked_experts_are_cut_inside_an_expert(ranks: Ranks) -> None:
    """The local tensor is (rows, K) where a cut does not fall between experts."""
    ranks(2).run(_stacked_experts)


def _copies() -> None:
    tensor, full = _cut("10 rows as 6, 4, 0")
    copied = copy.deepcopy({"a": tensor, "b": tensor})
    assert copied["a"] is copied["b"]
    tensor.zero_()
    assert type(copied["a"]) is UnevenDTensor
    assert torch.equal(copied["a"].full_tensor(), full)
    parameter = nn.Parameter(copied["a"])
    parameter.grad = parameter.detach() * 2
    twin = copy.deepcopy(parameter)
    assert isinstance(twin, nn.Parameter) and isinstance(twin, UnevenDTensor)
    assert twin.requires_grad and twin.is_leaf
    parameter.grad.zero_()
    assert torch.equal(twin.grad.full_tensor(), full * 2)
    frozen = copy.deepcopy(nn.Parameter(tensor, requires_grad=False))
    assert not frozen.requires_grad


def test_deep_copies_are_independent_and_stay_parameters(ranks: Ranks) -> None:
    """Rows and gradients are copied, the layout is shared, the memo is honoured."""
    ranks(3).run(_copies)


def _pickles(case: str) -> bool:
    tensor, full = _cut(case)
    is_whole = tensor.local.numel() == full.numel()
    for value in (tensor, nn.Parameter(tensor), tensor.detach(), {"state": [tensor * 1]}):
        for save in (pickle.dumps, lambda v: torch.save(v, io.BytesIO())):
            if not is_whole:
                with record_collectives() as record, pytest.raises(RuntimeError) as caught:
                    save(value)
                assert "megafsdp.checkpoint.save()" in str(caught.value)
                assert str(tuple(full.shape)) in str(caught.value)
                assert not record.calls
    # To another process of the job.
    back = pickle.loads(ForkingPickler.dumps(tensor))
    assert isinstance(back, UnevenDTensor) and back.uneven_layout == tensor.uneven_layout
    assert torch.equal(back.local, tensor.local)
    assert torch.equal(back.full_tensor(), full)
    shown = copy.copy(tensor)
    assert torch.equal(shown.zero_().local, tensor.local) and not tensor.local.any()
    if not is_whole:
        return False
    tensor.copy_from_full_(full)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).local, full)
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save({"w": tensor}, file)
        file.seek(0)
        with torch.serialization.safe_globals([UnevenDTensor, UnevenLayout, ModelPart]):
            back = torch.load(file, weights_only=weights_only)["w"]
        assert torch.equal(back.local, full) and back.uneven_layout == tensor.uneven_layout
        assert back._spec == tensor._spec
    return True


def test_only_whole_tensors_are_pickled_and_any_sent_to_processes(ranks: Ranks) -> None:
    """A file of one rank's rows would pass for the whole; copies within the job keep the cuts."""
    assert ranks(3).run(_pickles, "10 rows as 6, 4, 0") == [False] * 3
    assert ranks(2).run(_pickles, "all on one rank") == [True, False]
    assert ranks(1).run(_pickles, "all on one rank") == [True]


def _aliases() -> None:
    tensor, full = _cut("10 rows as 6, 4, 0")
    rows = tensor.local
    detached = tensor.detach()
    parameter = nn.Parameter(tensor)
    with torch.no_grad():
        parameter.mul_(2)
    for alias in (rows, tensor.local, detached.local, parameter.local, parameter.data.local):
        assert alias.untyped_storage()._cdata == rows.untyped_storage()._cdata
    assert torch.equal(tensor.full_tensor(), full * 2)
    assert not parameter.local.requires_grad
    assert local_tensor(parameter).data_ptr() == rows.data_ptr()
    clone = tensor.clone()
    clone.zero_()
    assert torch.equal(tensor.full_tensor(), full * 2)


def test_local_rows_alias_the_shard(ranks: Ranks) -> None:
    """Writes through any face are seen by all; a clone is apart."""
    ranks(3).run(_aliases)


def _gradient_of_local_rows() -> None:
    tensor, full = _cut("10 rows as 6, 4, 0")
    parameter = nn.Parameter(tensor)
    parameter.to_local().square().sum().backward()
    assert type(parameter.grad) is UnevenDTensor
    parameter.to_local().sum().backward()
    assert torch.equal(parameter.grad.full_tensor(), 2 * full + 1)
    whole = parameter.full_tensor()
    (grad,) = torch.autograd.grad(whole.sum(), parameter, create_graph=True)
    assert torch.equal(grad.full_tensor(), torch.ones_like(full))
    for shown in (whole, parameter.to_local()):
        with pytest.raises(NotImplementedError, match="a backward without create_graph"):
            torch.autograd.grad(shown.square().sum(), parameter, create_graph=True)


@pytest.mark.skipif(IS_DISPATCH_BYPASSED, reason="torch 2.11 loses the cuts of gradients")
def test_gradient_of_local_rows_is_cut_like_the_parameter(ranks: Ranks) -> None:
    """A loss on to_local() leaves a gradient that any optimizer can use, accumulated."""
    ranks(3).run(_gradient_of_local_rows)


def _gradient_of_a_statistic() -> None:
    tensor, full = _cut("10 rows as 6, 4, 0")
    parameter, weights = nn.Parameter(tensor), tensor.clone()
    (parameter * weights).sum().backward()
    assert type(parameter.grad) is UnevenDTensor
    parameter.square().mean().full_tensor().backward()
    parameter.sum(0).full_tensor().norm().backward()
    plain = nn.Parameter(full.clone())
    ((plain * full).sum() + plain.square().mean() + plain.sum(0).norm()).backward()
    torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad)
    whole_one = make_replicated(full, whole_mesh())
    assert torch.equal((whole_one - tensor).full_tensor(), torch.zeros_like(full))
    with pytest.raises(ValueError, match="operands cut like the first"):
        whole_one.add_(tensor)
    assert torch.equal(whole_one.to_local(), full)


@pytest.mark.skipif(IS_DISPATCH_BYPASSED, reason="torch 2.11 loses the cuts of gradients")
def test_gradient_of_a_statistic_is_cut_like_the_parameter(ranks: Ranks) -> None:
    """Autograd has its gradient whole on all ranks, of which each takes its rows."""
    ranks(3).run(_gradient_of_a_statistic)


def _wrong_uses() -> dict[str, str]:
    tensor, full = _cut("10 rows as 6, 4, 0")
    parameter = nn.Parameter(tensor)
    raised = {}
    for name, use in {
        "data": lambda: setattr(parameter, "data", tensor.clone()),
        "plain grad": lambda: setattr(parameter, "grad", parameter.local.clone()),
        "redistribute": lambda: tensor.redistribute(placements=[Shard(1)]),
        "copy of a part": lambda: tensor.copy_from_full_(full[:4]),
        "rows": lambda: UnevenDTensor.from_local_rows(
            torch.zeros(5, 4), tensor.device_mesh, tensor.uneven_layout
        ),
        "chunk": lambda: tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size((1, 0)))),
    }.items():
        try:
            use()
            raised[name] = "nothing"
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    return raised


def test_wrong_uses_are_refused_on_all_ranks(ranks: Ranks) -> None:
    """Each is an error on the rank with many rows, with few and with none."""
    for raised in ranks(3).run(_wrong_uses):
        assert raised["data"].startswith("RuntimeError: Expected in-place changes")
        assert "mark_main_weights_changed" in raised["data"]
        assert raised["plain grad"].startswith("RuntimeError")
        assert raised["redistribute"].startswith("NotImplementedError: Expected Replicate()")
        assert raised["copy of a part"].startswith("ValueError: Expected a full tensor of shape")
        assert raised["rows"].startswith("ValueError: Expected a local tensor of shape")
        assert raised["chunk"].startswith("ValueError: Expected an offset among")


def _in_a_module() -> None:
    full = random(10, 4)
    module = nn.Linear(4, 10, bias=False)
    module.weight = nn.Parameter(cut(full, whole_mesh()))
    state = module.state_dict()
    assert type(state["weight"]) is UnevenDTensor
    other = random(10, 4, seed=1)
    module.load_state_dict({"weight": cut(other, whole_mesh())})
    assert torch.equal(state["weight"].full_tensor(), other), "loading copies in place"
    assert type(module.to(torch.bfloat16).weight) is UnevenDTensor
    assert torch.equal(module.weight.full_tensor(), other.bfloat16())
    averaged = torch.optim.swa_utils.AveragedModel(module)
    assert torch.equal(averaged.module.weight.full_tensor(), other.bfloat16())
    module.weight.grad = module.weight.detach().clone()
    module.zero_grad(set_to_none=False)
    assert module.weight.grad.local.count_nonzero() == 0


def test_modules_treat_it_as_any_parameter(ranks: Ranks) -> None:
    """state_dict, load_state_dict, .to, AveragedModel, zero_grad."""
    ranks(3).run(_in_a_module)


def _shown() -> str:
    tensor, _ = _cut("10 rows as 6, 4, 0")
    with record_collectives() as record:
        text = repr(tensor)
    assert not record.calls
    return text


def test_representation_shows_shape_and_own_range(ranks: Ranks) -> None:
    """One rank may print without the others."""
    assert ranks(3).run(_shown)[1] == (
        "UnevenDTensor(shape=(10, 4), own=(24, 40), mesh=(3,), dtype=torch.float32)"
    )


def _on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
    full = random(10, 4)
    tensor = cut(full, mesh, skipped=0, shard_rows=7)
    assert tensor.placements == (Replicate(), Shard(0))
    assert tensor.local.shape[0] == (7, 3)[mesh.get_local_rank("dp_shard")]
    assert torch.equal(tensor.full_tensor(), full)
    with pytest.raises(NotImplementedError, match="Replicate"):
        tensor.redistribute(placements=[Shard(0), Replicate()])
    replicated = tensor.redistribute(placements=[Replicate(), Replicate()])
    assert torch.equal(replicated.to_local(), full)
    torch.testing.assert_close(tensor.norm().full_tensor(), full.norm())


def test_replicas_over_an_outer_axis(ranks: Ranks) -> None:
    """The last mesh axis holds the shards; norms count every element once."""
    ranks(4).run(_on_two_axes)


def _tensor_parallel_part() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = random(8, 6)
    tp = mesh.get_local_rank("tp")
    part = whole[:, 3 * tp : 3 * tp + 3]
    shard = mesh.get_local_rank("dp_shard")
    layout = UnevenLayout(part_of((8, 6), 1, 2, tp), 3, 0, 15, 2, shard, num_model_axes=1)
    start, stop = layout.element_range()
    rows = part.reshape(-1)[start:stop].clone().view(layout.local_shape())
    tensor = UnevenDTensor.from_local_rows(rows, mesh, layout)
    assert tensor.shape == (8, 6)
    for chunk in tensor.__create_chunk_list__():
        region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        stored = tensor.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
        assert torch.equal(stored, whole[region])
    target = torch.zeros_like(tensor)
    target.copy_from_full_(whole)
    assert torch.equal(target.local, rows)
    assert torch.equal((tensor * 2).local, rows * 2)
    assert torch.equal(tensor.full_tensor(), whole)


def test_tensor_parallel_part_knows_its_place(ranks: Ranks) -> None:
    """A region of a larger tensor: chunks, copies and what is gathered are those of the whole."""
    ranks(4).run(_tensor_parallel_part)


def _replicated() -> Any:
    local = random(3, 2)
    tensor = make_replicated(local, whole_mesh())
    assert tensor.placements == (Replicate(),)
    assert local_tensor(tensor).data_ptr() == local.data_ptr()
    assert torch.equal(full_tensor(tensor), local)
    return full_tensor(local).data_ptr() == local.data_ptr()


def test_replicated_and_plain_tensors_are_whole_already(ranks: Ranks) -> None:
    """full_tensor takes any kind of parameter."""
    assert ranks(2).run(_replicated) == [True, True]


def test_layout_helper_cuts_as_the_cases_say() -> None:
    """The cases have empty shards where their names say so."""

    class _Mesh:
        ndim = 1

        def size(self, axis: int) -> int:
            return 3

        def get_local_rank(self, axis: int) -> int:
            return 0

    layout = layout_of((10, 4), _Mesh(), skipped=4, shard_rows=10)
    assert [layout.local_shape(s)[0] for s in range(3)] == [6, 4, 0]
    layout = layout_of((10, 4), _Mesh(), skipped=22, shard_rows=14)
    assert [layout.local_shape(s)[0] for s in range(3)] == [0, 6, 4]
