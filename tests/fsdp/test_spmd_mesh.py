"""Parameters that are DTensors on all axes of a mesh, some of which are data axes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megafsdp import (
    FusedAdam,
    checkpoint,
    full_state_dict,
    full_tensor,
    fully_shard,
    fully_shard_model,
    summon_full_params,
)
from tests.fsdp.toy import Net as PlainNet
from tests.ranks import Ranks

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


@dataclass(frozen=True)
class Dims:
    """Names of data axes, as torch's ``DataParallelMeshDims`` has them from 2.12 on."""

    shard_names: tuple[str, ...] = ()
    replicate_names: tuple[str, ...] = ()

    def of_torch(self) -> object:
        """Return torch's own; needs torch 2.12."""
        names = (each or None for each in (self.shard_names, self.replicate_names))
        return torch_fsdp.DataParallelMeshDims(*names)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(8, 8))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # If the input is cut over its rows, the gradient of this addend is cut as well.
        return x + self.down(torch.tanh(self.up(x + self.position)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _distribute(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make each parameter a DTensor on all axes; ``tp`` cuts the two linears of each block."""
    for name, parameter in list(net.named_parameters()):
        layer = ".".join(name.split(".")[-2:])
        cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(layer)
        placements = [
            Shard(cut) if axis == "tp" and cut is not None else Replicate()
            for axis in mesh.mesh_dim_names or ()
        ]
        owner, _, attribute = name.rpartition(".")
        whole = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(net.get_submodule(owner), attribute, nn.Parameter(whole))
    return net


def _beside_one_process(shape: dict[str, int], dims: Dims, options: dict[str, object]) -> None:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    reference = _Net().double()
    ours = _distribute(copy.deepcopy(reference), mesh)
    fully_shard_model(ours, [_Block], mesh=mesh, dp_mesh_dims=dims, **options)
    # Losses stand for the whole batch, and with average="rank" the mean over ranks is taken too.
    divisor = 1 if options.get("average") == "token" else mesh.size() // shape.get("tp", 1)
    optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-2, eps=1e-5) for n in (reference, ours)]
    placements = [Replicate() if axis == "tp" else Shard(0) for axis in shape]
    for batch in torch.randn(2, 8, 8, dtype=torch.float64):
        wanted = reference(batch).square().mean()
        wanted.backward()
        loss = ours(distribute_tensor(batch, mesh, placements)).square().mean()
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), wanted, **TOLERANCE)
        for p, q in zip(reference.parameters(), ours.parameters(), strict=True):
            p.grad /= divisor
            torch.testing.assert_close(full_tensor(q.grad), p.grad, **TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = full_state_dict(ours)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(full[name], value, **TOLERANCE)
    with summon_full_params(ours):
        for p, q in zip(reference.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.detach().full_tensor(), p.detach(), **TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "dims", "options"),
    [
        ({"dp": 2}, Dims(("dp",)), {}),
        ({"dp": 2, "tp": 2}, Dims(("dp",)), {}),
        ({"dp": 2, "tp": 2}, Dims((), ("dp",)), {}),
        ({"tp": 2, "dp": 2}, Dims(("dp",)), {"strategy": "optim", "average": "token"}),
        ({"dp": 2, "cp": 2}, Dims(("dp", "cp")), {}),
        ({"outer": 2, "dp": 2}, Dims(("dp",), ("outer",)), {}),
    ],
    ids=str,
)
def test_a_model_on_all_axes_equals_one_process(
    ranks: Ranks, shape: dict[str, int], dims: Dims, options: dict[str, object]
) -> None:
    """Losses, gradients of two steps, and the parameters after them."""
    ranks(torch.Size(shape.values()).numel()).run(_beside_one_process, shape, dims, options)


def _linears(num: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(OrderedDict(up=nn.Linear(8, 12), down=nn.Linear(12, 8)))
    return layers[:num].double()


def _beside_fsdp2(shape: dict[str, int]) -> None:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    dims = torch_fsdp.DataParallelMeshDims("dp", "outer" if "outer" in shape else None)
    # Torch takes long to plan operators on three axes: replicas show with one layer.
    num_layers = 2 if len(shape) == 2 else 1
    ours, theirs = (_distribute(_linears(num_layers), mesh) for _ in range(2))
    fully_shard(ours, mesh=mesh, dp_mesh_dims=dims)
    torch_fsdp.fully_shard(theirs, mesh=mesh, dp_mesh_dims=dims)
    batch = torch.randn(4, 8, dtype=torch.float64)
    placements = [Replicate() if axis == "tp" else Shard(0) for axis in shape]
    for net in (ours, theirs):
        net(distribute_tensor(batch, mesh, placements)).square().mean().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.placements == q.placements and p.device_mesh == q.device_mesh
        torch.testing.assert_close(full_tensor(p.grad), q.grad.full_tensor(), **TOLERANCE)


@pytest.mark.skipif(not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="of torch 2.12")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("shape", [{"dp": 2, "tp": 2}, {"outer": 2, "dp": 1, "tp": 2}], ids=str)
def test_placements_and_gradients_are_those_of_fsdp2(ranks: Ranks, shape: dict[str, int]) -> None:
    """Also the mean over ranks, of gradients that stand for the whole batch."""
    ranks(4).run(_beside_fsdp2, shape)


class _OnLocal(nn.Module):
    """A layer that computes on the local tensor of its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return x @ (weight.to_local() if isinstance(weight, DTensor) else weight)


def _on_local_tensors(is_compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    reference = _OnLocal()
    ours = _distribute(copy.deepcopy(reference), mesh)
    fully_shard(ours, mesh=mesh, dp_mesh_dims=Dims(("dp",)))
    if is_compiled:
        ours.compile(backend="aot_eager")
    x = torch.randn(2, 5, 6)
    reference(x).square().mean().backward()
    ours(x[dist.get_rank()]).square().mean().backward()
    torch.testing.assert_close(full_tensor(ours.weight.grad), reference.weight.grad)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_of_local_tensors_are_addends(ranks: Ranks, is_compiled: bool) -> None:
    """Each rank computes on its share of the batch; the mean is over ranks, as in FSDP2."""
    ranks(2).run(_on_local_tensors, is_compiled)


def _saved(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = _distribute(_Net(), mesh)
    fully_shard_model(net, [_Block], mesh=mesh, dp_mesh_dims=Dims(("dp",)))
    optimizer = FusedAdam(net.parameters(), lr=1e-2)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    checkpoint.save(folder, step=1, model=net, optimizer=optimizer)
    full = full_state_dict(net)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")


def _loaded(folder: Path) -> None:
    net = _Net()
    fully_shard_model(net, [_Block])
    optimizer = FusedAdam(net.parameters(), lr=1e-2)
    checkpoint.load(folder, model=net, optimizer=optimizer)
    wanted = torch.load(folder / "full.pt")
    for name, value in full_state_dict(net).items():
        assert torch.equal(value, wanted[name]), name


def test_a_checkpoint_does_not_depend_on_the_axes(ranks: Ranks, tmp_path: Path) -> None:
    """Saved on (dp 2, tp 2), loaded into plain parameters on two ranks: the same bits."""
    ranks(4).run(_saved, tmp_path)
    ranks(2).run(_loaded, tmp_path)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "tp", "cp"))
    wide = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plain, on_all = PlainNet(1), _distribute(_Net(), mesh)
    calls: list[tuple[nn.Module, dict[str, object], type[Exception], str]] = [
        (on_all, {"dp_mesh_dims": Dims(("dp",))}, ValueError, "of no mesh"),
        (on_all, {"dp_mesh_dims": "dp"}, TypeError, "a DataParallelMeshDims of torch, got 'dp'"),
        (on_all, {"dp_mesh_dims": Dims(("pp",))}, ValueError, r"\['pp'\] of axes \['dp', 'tp'"),
        (on_all, {"dp_mesh_dims": Dims(("dp",), ("dp",))}, ValueError, "each once"),
        (on_all, {"dp_mesh_dims": Dims()}, ValueError, "names of some of them"),
        (plain, {"dp_mesh_dims": Dims(("dp",))}, ValueError, "got a plain tensor"),
        (on_all, {"dp_mesh_dims": Dims(("dp",)), "mesh": wide}, ValueError, "got one on"),
        (
            on_all,
            {"dp_mesh_dims": Dims(("dp",)), "expert_mesh": wide["dp"]},
            NotImplementedError,
            "a full mesh for experts too",
        ),
    ]
    for net, options, error, message in calls:
        given = {"mesh": None if message == "of no mesh" else mesh, **options}
        with pytest.raises(error, match=message):
            fully_shard(net, **given)
    for placement, message in ((Shard(0), "on 'cp'"), (Partial(), "on 'cp'")):
        local = torch.randn(3, 4)
        cut = DTensor.from_local(local, mesh, [Replicate(), Replicate(), placement])
        layer = nn.Linear(4, 3, bias=False)
        layer.weight = nn.Parameter(cut)
        with pytest.raises(ValueError, match=message):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))
    fully_shard(on_all, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))


def test_axes_and_parameters_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    """With a cure, before anything is changed: the last call succeeds."""
    ranks(2).run(_refused)


def _two_model_axes() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
    net = _distribute(_Net(), mesh)
    with pytest.raises(NotImplementedError, match=r"one model axis.*\['tp', 'cp'\]"):
        fully_shard(net, mesh=mesh, dp_mesh_dims=Dims(("dp",)))
    fully_shard(net, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))


def test_two_model_axes_are_refused(ranks: Ranks) -> None:
    """An axis over which parameters are not cut can be a data axis."""
    ranks(4).run(_two_model_axes)
