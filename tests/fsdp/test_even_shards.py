"""``even_shards``: the rows, operations, files and optimizers of FSDP2; torch is the oracle."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import megafsdp
from megafsdp import FusedAdam, checkpoint
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.mesh.dtensor import are_placements_exact
from megafsdp.mesh.fused_parts import gate_and_up
from megafsdp.mesh.model_part import part_of
from tests.buffer.dtensor.emulation import torch_2_11
from tests.ranks import Ranks

WIDTH = 10


class Odd(nn.Module):
    """Parameters of many shapes, none of which the ranks divide; returns a loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, 5, bias=False)
        self.stack = nn.Parameter(torch.randn(5, 5, 3))
        self.filters = nn.Parameter(torch.randn(4, 1, 2, 2))
        self.row = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over (tokens, width) of a function of the outputs."""
        y = torch.einsum("tn,enk->tk", self.last(torch.tanh(self.first(x))), self.stack)
        return (y * self.row + self.filters.sum()).square().mean()


def _batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(6, WIDTH, generator=generator)


def _pair(**options: object) -> tuple[nn.Module, nn.Module]:
    """Return a model of torch's engine and one of ours, over the same mesh."""
    theirs, ours = Odd(), Odd()
    fully_shard(theirs, mesh=options.get("mesh"))
    megafsdp.fully_shard(ours, even_shards=True, **options)
    return theirs, ours


def _assert_same_rows(theirs: nn.Module, ours: nn.Module, *, of_grads: bool = False) -> None:
    for (name, wanted), found in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if of_grads:
            wanted, found = wanted.grad, found.grad
        assert tuple(found.placements) == tuple(wanted.placements), name
        torch.testing.assert_close(found.to_local(), wanted.to_local())
        assert found.to_local().shape == wanted.to_local().shape, name
        # Programs ask torch which rows a rank has.
        mesh, placements = found.device_mesh, found.placements
        shape, offset = compute_local_shape_and_global_offset(found.shape, mesh, placements)
        regions = [(r.sizes, r.offsets) for r in found.uneven_layout.regions()]
        assert regions == ([(shape, offset)] if found.to_local().numel() else []), name


def _like_torch(*sizes: int) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    pair = theirs, ours = _pair(mesh=mesh)
    has_first_rows = mesh.get_local_rank(mesh.ndim - 1) == 0
    assert (ours.row.to_local().numel() > 0) == has_first_rows, "a rank has no rows"
    _assert_same_rows(*pair)
    # Programs write their chunks of whole tensors, as torch would cut them.
    for (name, p), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
        chunk = distribute_tensor(whole, p.device_mesh, p.placements).to_local()
        with torch.no_grad():
            p.to_local().copy_(chunk)
            other.to_local().copy_(chunk)
        assert torch.equal(p.full_tensor(), whole), name
    megafsdp.mark_main_weights_changed(ours)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, eps=1e-5) for each in pair]
    for step in range(2):
        for each in pair:
            each(_batch(step)).backward()
        _assert_same_rows(*pair, of_grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_same_rows(*pair)


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (4,)], ids=str)
def test_ranks_have_the_rows_that_torch_gives_them(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    """Of weights and gradients: stacks on their first dimension, and none if there are too few."""
    num_ranks = torch.Size(sizes).numel()
    ranks(num_ranks).run(_like_torch, *sizes)


def _beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    models = []
    for shard in (fully_shard, megafsdp.fully_shard):
        model = nn.Sequential()
        torch.manual_seed(0)
        model.first, model.last = nn.Linear(6, 12), nn.Linear(12, 6)
        # FSDP2 warns of units that return a view.
        model.end = nn.Tanh()
        parallelize_module(model, mesh["tp"], plan)
        options = {} if shard is fully_shard else {"even_shards": True}
        shard(model, mesh=mesh["dp"], **options)
        models.append(model)
    _assert_same_rows(*models)
    for model in models:
        model(torch.ones(2, 6)).square().mean().backward()
    _assert_same_rows(*models, of_grads=True)
    assert all(p.uneven_layout.is_even for p in models[1].parameters())
    # Ranks that do not divide rows twice: torch's placements do not say which rows a rank has.
    odd = nn.Linear(4, 9, bias=False)
    parallelize_module(odd, mesh["tp"], ColwiseParallel())
    megafsdp.fully_shard(odd, mesh=mesh["dp"], even_shards=True)
    assert not odd.weight.uneven_layout.is_even
    with pytest.raises(NotImplementedError, match=r"'transpose'|'matmul'"):
        odd.weight.detach() @ odd.weight.detach().mT
    # Nor do they of fused tensors, each of which is cut by itself.
    assert are_placements_exact(part_of((8, 4), 0, 2, 0), 2)
    assert not are_placements_exact(part_of((8, 4), 0, 2, 0, gate_and_up(4)), 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_rows_of_parts_are_those_of_torch(ranks: Ranks) -> None:
    """With tensor parallelism, where torch's placements can express them."""
    ranks(4).run(_beside_tensor_parallelism)


def _operations() -> None:
    model = nn.Linear(WIDTH, 7)
    megafsdp.fully_shard(model, even_shards=True)
    p = model.weight
    whole, rows = p.full_tensor().detach(), p.detach()
    torch.testing.assert_close((rows @ rows.mT).full_tensor(), whole @ whole.mT)
    torch.testing.assert_close(rows.sum(1).full_tensor(), whole.sum(1))
    assert torch.equal(rows[2:5].full_tensor(), whole[2:5])
    assert torch.equal(rows[:, 3].full_tensor(), whole[:, 3])
    assert torch.equal(rows.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    chunk = distribute_tensor(whole, p.device_mesh, p.placements)
    with torch.no_grad():
        assert p.add_(chunk) is p
        assert torch.equal(p.full_tensor(), 2 * whole)
        # Local: ranks may come one after another.
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                p.copy_(chunk)
            dist.barrier()
    assert torch.equal(p.full_tensor(), whole)
    # A row is an alias on the rank that has it, with rows of another layout.
    assert not rows[2].uneven_layout.is_even
    # Operands with other rows are moved by torch, if it knows which.
    column = distribute_tensor(whole[0], p.device_mesh, [Shard(0)])
    torch.testing.assert_close((rows * column).full_tensor(), whole * whole[0])
    backwards = DeviceMesh("cpu", p.device_mesh.mesh.flip(0))
    with pytest.raises(RuntimeError, match="mesh"), torch.no_grad():
        p.add_(distribute_tensor(whole, backwards, [Shard(0)], src_data_rank=None))
    uneven = nn.Linear(WIDTH, 7)
    megafsdp.fully_shard(uneven)
    assert uneven.weight.placements == p.placements
    with pytest.raises(ValueError, match="operands cut like the first"):
        rows + uneven.weight.detach()
    with pytest.raises(ValueError, match="operands cut like the first"):
        rows + whole
    replicated = distribute_tensor(whole, p.device_mesh, [Replicate()])
    assert torch.equal((rows + replicated).full_tensor(), 2 * whole)
    # A loss of the parameter itself.
    (p @ p.mT).full_tensor().sum().backward()
    other = whole.clone().requires_grad_()
    (other @ other.mT).sum().backward()
    torch.testing.assert_close(p.grad.full_tensor(), other.grad)
    FusedAdam(model.parameters(), lr=0.1, eps=1e-3).step()
    torch.optim.Adam([other], lr=0.1, eps=1e-3).step()
    torch.testing.assert_close(p.full_tensor().detach(), other.detach())


def test_operations_are_those_of_torch(ranks: Ranks) -> None:
    """Products, slices and other placements, which uneven rows refuse."""
    ranks(3).run(_operations)


def _emulated() -> None:
    model = nn.Linear(WIDTH, 7)
    megafsdp.fully_shard(model, even_shards=True)
    p = model.weight
    whole = p.full_tensor().detach()
    with torch_2_11():
        found = (p @ p.mT).full_tensor()
        assert torch.equal((2 * p).full_tensor(), 2 * whole)
        assert torch.equal(p.to_local(), p.local)
        with torch.no_grad():
            assert torch.equal((2 * p).full_tensor(), 2 * whole)
            assert torch.equal(p[2:5].full_tensor(), whole[2:5])
    torch.testing.assert_close(found.detach(), whole @ whole.mT)


@pytest.mark.skipif(IS_DISPATCH_BYPASSED, reason="the emulation is for later versions")
def test_operations_are_those_of_torch_with_2_11_too(ranks: Ranks) -> None:
    """There rules see functions instead of operators."""
    ranks(2).run(_emulated)


def _pickles() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(100, 100))
    megafsdp.fully_shard(model, even_shards=True)
    for tensor in (model[0].weight, model[0].weight.detach()):
        file = io.BytesIO()
        torch.save(tensor, file)
        # The rows of one parameter, not those of the whole buffer.
        assert file.tell() < 4 * tensor.to_local().numel() + 4096
        file.seek(0)
        found = torch.load(file, weights_only=False)
        assert isinstance(found, DTensor) and not isinstance(found, UnevenDTensor)
        assert isinstance(found, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert torch.equal(found.to_local(), tensor.to_local())
        assert torch.equal(found.full_tensor(), tensor.full_tensor())


def _states(directory: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shards",))
    models = [*_pair(mesh=mesh), *_pair(mesh=mesh)]
    trained = [(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-5)) for model in models]
    pair, others = trained[:2], trained[2:]
    for model, optimizer in pair:
        model(_batch()).backward()
        optimizer.step()
    path = f"{directory}/{dist.get_rank()}"
    torch.save([x.state_dict() for x in pair[1]], path)
    # Into the other engine, and into ours.
    for model, optimizer in others:
        for x, state in zip((model, optimizer), torch.load(path, weights_only=False), strict=True):
            x.load_state_dict(state)
    for model, optimizer in trained:
        optimizer.zero_grad()
        model(_batch(1)).backward()
        optimizer.step()
    for model, _ in others:
        _assert_same_rows(model, pair[1][0])


def test_a_file_of_each_rank_is_that_of_torch(ranks: Ranks, tmp_path: Path) -> None:
    """As programs write that save one pickle a rank, and load them on as many ranks."""
    ranks(3).run(_pickles)
    ranks(3).run(_states, str(tmp_path))


_STEPS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1),
    "Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.1),
}


def _stepped(make: Callable[..., torch.optim.Optimizer], shard: Callable[..., object]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False))
    shard(model)
    optimizer = make(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(_batch()).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model


def _steps(kind: str) -> None:
    make = _STEPS[kind]
    wanted = _stepped(make, fully_shard)
    found = _stepped(make, lambda model: megafsdp.fully_shard(model, even_shards=True))
    _assert_same_rows(wanted, found)
    with pytest.raises(NotImplementedError, match=r"its first step, .*even_shards=True"):
        _stepped(make, megafsdp.fully_shard)


@pytest.mark.filterwarnings("ignore:.*does not support alltoall:UserWarning")
@pytest.mark.parametrize("kind", sorted(_STEPS))
def test_optimizers_of_whole_matrices_step_as_with_fsdp2(ranks: Ranks, kind: str) -> None:
    """They are refused only for uneven rows."""
    ranks(2).run(_steps, kind)


def _checkpoints(directory: str) -> None:
    models = [Odd(), Odd(), Odd()]
    for model, is_even in zip(models, (True, False, True), strict=True):
        megafsdp.fully_shard(model, even_shards=is_even)
    optimizers = [FusedAdam(model.parameters(), lr=0.1, eps=1e-5) for model in models]
    models[0](_batch()).backward()
    optimizers[0].step()
    for k in (0, 1):
        path = f"{directory}/{k}"
        checkpoint.save(path, step=1, model=models[k], optimizer=optimizers[k])
        checkpoint.load(path, model=models[k + 1], optimizer=optimizers[k + 1])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(_batch(1)).backward()
        optimizer.step()
    for first, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(p.full_tensor(), first.full_tensor()) for p in others)


def test_checkpoints_load_whatever_the_shards(ranks: Ranks, tmp_path: Path) -> None:
    """From even shards into uneven ones, and back."""
    ranks(3).run(_checkpoints, str(tmp_path))


def _undivided() -> None:
    model = megafsdp.fully_shard(Odd(), strategy="no_shard", even_shards=True)
    (group,) = model._fsdp_unit().groups
    assert len(group.layout.sub_buffers) == 1
    model(_batch()).backward()
    assert all(p.grad.placements == (Replicate(),) for p in model.parameters())


def test_what_is_not_divided_has_one_buffer(ranks: Ranks) -> None:
    """Even shards would only add collectives."""
    ranks(2).run(_undivided)


def _gaps(sizes: tuple[int, ...], offload_policy: megafsdp.OffloadPolicy | None) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    model = megafsdp.fully_shard(Odd(), mesh=mesh, even_shards=True, offload_policy=offload_policy)
    (group,) = model._fsdp_unit().groups
    assert any(sub.gap_numel for sub in group.layout.sub_buffers)
    model(_batch()).backward()
    (flat,) = megafsdp.local_parameters(model)
    assert flat.grad.any()
    for p in model.parameters():
        p.grad.to_local().zero_()
    assert not flat.grad.any()


@pytest.mark.parametrize("offload_policy", [None, megafsdp.OffloadPolicy()], ids=["device", "host"])
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_gaps_between_chunks_are_zero_in_gradients(
    ranks: Ranks, sizes: tuple[int, ...], offload_policy: megafsdp.OffloadPolicy | None
) -> None:
    """What reads a rank's whole buffer sees the chunks alone, with an outer axis too."""
    ranks(4).run(_gaps, sizes, offload_policy)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    policy = megafsdp.MixedPrecisionPolicy(recipe="fp8_current")
    for options in ({"mesh": mesh, "outer_strategy": "optim"}, {"mp_policy": policy}):
        for shard in (megafsdp.fully_shard, megafsdp.fully_shard_model):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            units = {} if shard is megafsdp.fully_shard else {"fsdp_unit_modules": [nn.Linear]}
            with pytest.raises(NotImplementedError, match="even_shards=True"):
                shard(model, even_shards=True, **units, **options)
            assert not any(isinstance(p, DTensor) for p in model.parameters())
    model = Odd()
    with pytest.raises(NotImplementedError, match=r"Expected Shard\(0\), got .*'stack'"):
        megafsdp.fully_shard(
            model,
            even_shards=True,
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0),
        )


def test_what_would_cut_chunks_again_is_refused(ranks: Ranks) -> None:
    """A second axis that divides main weights, and blocks that a recipe scales."""
    ranks(2).run(_refused)
