"""Plain parameters whose parts the types of ``spmd_types`` say, which layers compute on as such."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from megafsdp import (
    MixedPrecisionPolicy,
    checkpoint,
    full_state_dict,
    fully_shard,
    fully_shard_model,
    materialize,
)
from tests.fsdp import typed
from tests.fsdp.test_spmd_mesh import Dims
from tests.fsdp.toy import train_on_shares
from tests.ranks import Ranks

WIDTH, INNER = 6, 8


class Layer(nn.Module):
    """Column- and row-parallel weights, with a scale on each rank's columns and a bias after."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(INNER, WIDTH))
        self.scale = nn.Parameter(torch.empty(1))
        self.down = nn.Parameter(torch.empty(WIDTH, INNER))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.tp: DeviceMesh | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the layer's outputs (tokens, width)."""
        tp = self.tp
        assert tp is None or type(self.up) is nn.Parameter, "the plain part"
        own = _shared(x, tp)
        y = (torch.tanh(own @ self.up.T) * self.scale) @ self.down.T
        return x + _summed(y, tp) + self.bias


def _shared(x: Tensor, tp: DeviceMesh | None) -> Tensor:
    """Return x, whose gradient is a sum over the ranks that use it."""
    if tp is None:
        return x
    shown = DTensor.from_local(x, tp, [Replicate()], run_check=False)
    return shown.to_local(grad_placements=[Partial()])


def _summed(y: Tensor, tp: DeviceMesh | None) -> Tensor:
    if tp is None:
        return y
    addends = DTensor.from_local(y, tp, [Partial()], run_check=False)
    return addends.redistribute(placements=[Replicate()]).to_local()


class Net(nn.Module):
    """Two layers; the mean square of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over tokens."""
        for layer in self.layers:
            x = layer(x)
        return x.square().sum(1).mean()


def _cut(net: Net, mesh: DeviceMesh) -> None:
    """Leave this rank's parts of ``tp``, and write types on all parameters."""
    tp = mesh["tp"]
    axis = typed.MeshAxis.of(tp.get_group())
    data = [typed.MeshAxis.of(mesh.get_group(n)) for n in mesh.mesh_dim_names or () if n != "tp"]
    for layer in net.layers:
        layer.tp = tp
        types = {"up": typed.S(0), "down": typed.S(1), "scale": typed.R, "bias": typed.I}
        for name, each in types.items():
            whole = getattr(layer, name).detach()
            if name in ("up", "down"):
                whole = whole.chunk(tp.size(), each.dim)[tp.get_local_rank()].clone()
            setattr(layer, name, nn.Parameter(whole))
            # Types on data axes may be left out.
            on_data = dict.fromkeys(data, typed.R) if name == "up" else {}
            typed.assert_type(getattr(layer, name), {axis: each, **on_data})


@contextlib.contextmanager
def _imported() -> Iterator[None]:
    """Let the stand-in be ``spmd_types``, as where a program has imported that."""
    sys.modules["spmd_types"] = typed
    try:
        yield
    finally:
        del sys.modules["spmd_types"]


def _sharded(reference: Net, mesh: DeviceMesh, **options: Any) -> Net:
    net = copy.deepcopy(reference)
    _cut(net, mesh)
    dims = Dims(("dp",), tuple(n for n in mesh.mesh_dim_names or () if n == "dp_outer"))
    with _imported():
        fully_shard_model(net, [Layer], mesh=mesh, dp_mesh_dims=dims, **options)
    return net


def _equal_one_process(
    shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    reference = Net().double()
    net = _sharded(reference, mesh, **options)
    # What forward reads has types on data axes too, where nothing said otherwise.
    for record in net.layers[1]._fsdp_unit().groups[0].parameters:
        axes = typed.get_local_type(record.unsharded)
        assert math.prod(axis.size() for axis in axes) == mesh.size(), record.name
    train_on_shares(reference, net, mesh.size() // 2, dist.get_rank() // 2)


@pytest.mark.parametrize(
    ("shape", "names", "options"),
    [
        ((2, 2), ("dp", "tp"), {}),
        ((2, 1, 2), ("dp_outer", "dp", "tp"), {"strategy": "optim"}),
        ((2, 2), ("dp", "tp"), {"strategy": "no_shard"}),
    ],
    ids=str,
)
def test_typed_parameters_train_as_in_one_process(
    ranks: Ranks, shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Cut, repeated with addends of a gradient, and repeated with equal ones."""
    ranks(4).run(_equal_one_process, shape, names, options)


def _saved(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    reference = Net()
    net = _sharded(reference, mesh)
    checkpoint.save(folder, step=1, model=net)
    plain = Net()
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    checkpoint.load(folder, model=fully_shard(plain))
    wanted = reference.state_dict()
    for name, value in full_state_dict(plain).items():
        assert torch.equal(value, wanted[name]), name


def test_checkpoints_have_whole_tensors(ranks: Ranks, tmp_path: Path) -> None:
    """Saved from parts of tp, loaded without it."""
    ranks(2).run(_saved, tmp_path)


def _materialized() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        reference = Net()
    net = _sharded(reference, mesh)
    torch.manual_seed(0)
    materialize(net)
    wanted = Net().state_dict()
    for name, value in full_state_dict(net).items():
        assert torch.equal(value, wanted[name]), name


def test_initialisers_draw_whole_tensors(ranks: Ranks) -> None:
    """From the meta device: each rank keeps its part of what one process draws."""
    ranks(2).run(_materialized)


def _folded() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_outer", "dp", "tp"))
    folded, dp = typed.MeshAxis((0, 1, 2, 3)), typed.MeshAxis.of(mesh.get_group("dp"))
    outer = typed.MeshAxis.of(mesh.get_group("dp_outer"))
    dims = Dims(("dp",), ("dp_outer",))
    for types, wanted in (({folded: typed.R}, {folded}), ({dp: typed.R}, {dp, outer})):
        layer = nn.Linear(3, 4, bias=False)
        with _imported():
            typed.assert_type(layer.weight, types)
            fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
        (group,) = layer._fsdp_unit().groups
        assert set(typed.get_local_type(group.parameters[0].unsharded)) == wanted


def test_data_axes_may_be_typed_as_one(ranks: Ranks) -> None:
    """And a model axis of one rank may have no type."""
    ranks(4).run(_folded)


class _Seen(nn.Linear):
    """Notes the types of its inputs, and whether checks run in forward and while it is cast."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = typed.get_local_type(x), typed.is_type_checking()
        y = super().forward(x)
        typed.assert_type(y, self.seen[0])
        return y


def _under_checks() -> None:
    layer = _Seen(3, 4)
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    fully_shard(layer, mp_policy=policy)
    group = layer._fsdp_unit().groups[0]
    gather, was_checking = group.start_unshard, []

    def start_unshard(**options: bool) -> None:
        was_checking.append(typed.is_type_checking())
        gather(**options)

    group.start_unshard = start_unshard
    x, types = torch.ones(2, 3, requires_grad=True), {typed.MeshAxis((0, 1)): typed.R}
    typed.assert_type(x, types)
    with _imported(), typed.typecheck():
        y = layer(x)
    assert layer.seen == (types, True) and was_checking == [False]
    # The cast input and the cast output are other tensors, of the same types.
    assert y.dtype == torch.float64 and typed.get_local_type(y) == types
    y.sum().backward()
    assert layer.weight.grad is not None


def test_checks_pause_in_hooks_and_tensors_keep_their_types(ranks: Ranks) -> None:
    """What the engine does with buffers has no types."""
    ranks(2).run(_under_checks)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (typed.MeshAxis.of(mesh.get_group(name)) for name in ("dp", "tp"))
    cases = [
        ({dp: typed.S(0), tp: typed.R}, "R on all data axes"),
        ({typed.MeshAxis((1, 0)): typed.I, tp: typed.R}, "R on all data axes"),
        ({dp: typed.R}, r"R, I or S\(dim\) on 'tp', got None"),
        ({tp: typed.V}, r"R, I or S\(dim\) on 'tp', got Type\(name='V'\)"),
        ({tp: typed.P}, r"got Type\(name='P'\).*the spmd_types of 'weight', with dp_mesh_dims"),
    ]
    layer = nn.Linear(3, 4, bias=False)
    with _imported():
        for types, words in cases:
            vars(layer.weight).clear()
            typed.assert_type(layer.weight, types)
            with pytest.raises(ValueError, match=words):
                fully_shard(layer, mesh=mesh, dp_mesh_dims=Dims(("dp",)))
        with pytest.raises(ValueError, match=r"a full mesh for parameters with types.*'weight'"):
            fully_shard(layer, mesh=mesh["dp"])
        vars(layer.weight).clear()
        typed.assert_type(layer.weight, {tp: typed.S(-1)})
        fully_shard(layer, mesh=mesh, dp_mesh_dims=Dims(("dp",)))
    assert tuple(layer.weight.shape) == (4, 6)


def test_types_that_no_parameter_can_have_are_refused(ranks: Ranks) -> None:
    """With a cure, before anything is changed: the last call succeeds."""
    ranks(2).run(_refused)
