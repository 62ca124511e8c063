"""Fused weights that torch's FSDP2 or tensor parallelism alone has cut, in checkpoints of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from megafsdp import FusedAdam
from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.tools.torch_file import to_torch
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.mesh.fused_parts import FusedParts, gate_and_up
from megafsdp.parallel import Linear
from tests.ranks import Ranks

WIDTH = 32
# Who cuts the model, data ranks, ranks of tp.
LAYOUTS = (
    ("engine", 2, 2),
    ("fsdp2", 2, 1),
    ("fsdp2", 1, 2),
    ("quantized", 2, 2),
    ("tp", 1, 2),
)


class Net(nn.Module):
    """A pair of maps that is stored in parts, and one of unequal parts that is stored whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pair = Linear(WIDTH, 2 * WIDTH, parallel_mode="column", fused=gate_and_up(WIDTH))
        uneven = FusedParts(("a", "b"), (WIDTH, 3 * WIDTH))
        self.uneven = Linear(WIDTH, 4 * WIDTH, parallel_mode="column", fused=uneven)
        for layer in (self.pair, self.uneven):
            nn.init.normal_(layer.bias)


def _build(kind: str, dp: int, tp: int) -> tuple[Net, FusedAdam]:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    net = Net()
    if tp > 1:
        for layer in (net.pair, net.uneven):
            layer.set_device_mesh(mesh["tp"])
    if kind == "engine":
        megafsdp.fully_shard(net, mesh=mesh["dp"])
    elif kind != "tp":
        torch_fully_shard(net, mesh=mesh["dp"])
    if kind == "quantized":
        megafsdp.quantize_(net, "fp8_current")
    return net, FusedAdam(net.parameters(), lr=1e-2)


def _main_weight(parameter: nn.Parameter) -> Tensor:
    shard = shard_of(parameter)
    return local_object(parameter).detach() if shard is None else shard.main.values


def _step(net: Net, optimizer: FusedAdam) -> None:
    """Step by gradients that are the weights, so that each rank knows its own of the whole."""
    for parameter in net.parameters():
        if shard_of(parameter) is None:
            parameter.grad = parameter.detach().clone()
            continue
        parameter.grad = DTensor.from_local(
            _main_weight(parameter).clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    optimizer.step()


def _own(net: Net, optimizer: FusedAdam) -> Tensor:
    """Return weights and moments of this rank."""
    found = []
    for parameter in net.parameters():
        found.append(_main_weight(parameter).clone())
        states = optimizer.state[parameter]
        found += [local_object(states[key]).clone() for key in ("exp_avg", "exp_avg_sq")]
    return torch.cat([each.flatten() for each in found])


def _saved(layout: tuple[str, int, int], root: Path) -> None:
    net, optimizer = _build(*layout)
    _step(net, optimizer)
    save(root, step=1, model=net, optimizer=optimizer)


def _loaded(layout: tuple[str, int, int], root: Path) -> None:
    net, optimizer = _build(*layout)
    _step(net, optimizer)
    wanted = _own(net, optimizer)
    _step(net, optimizer)
    assert not torch.equal(_own(net, optimizer), wanted)
    load(root, model=net, optimizer=optimizer)
    assert torch.equal(_own(net, optimizer), wanted)


def _num_ranks(layout: tuple[str, int, int]) -> int:
    return layout[1] * layout[2]


def _whole() -> dict[str, Tensor]:
    net = Net()
    _step(net, FusedAdam(net.parameters(), lr=1e-2))
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_files_have_fused_weights_in_the_order_of_the_whole(
    ranks: Ranks, tmp_path: Path, layout: tuple[str, int, int]
) -> None:
    """All layouts load them, and tools that know no model; weights and moments, bit for bit."""
    ranks(_num_ranks(layout)).run(_saved, layout, tmp_path / "saved")
    for other in LAYOUTS:
        ranks(_num_ranks(other)).run(_loaded, other, tmp_path / "saved")
    to_torch(tmp_path / "saved", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    wanted = _whole()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], whole) for name, whole in wanted.items())
