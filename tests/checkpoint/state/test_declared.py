"""Fused weights that torch's FSDP2 or tensor parallelism alone has cut, in checkpoints of ours."""

from __future__ import annotations

from dataclasses import replace
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
from megafsdp.checkpoint.format.manifest import read_manifest, write_manifest
from megafsdp.checkpoint.huggingface.plan import hub_state
from megafsdp.checkpoint.state.declared import declare_parts
from megafsdp.checkpoint.tools.torch_file import to_torch
from megafsdp.errors import CheckpointError
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.mesh.fused_parts import FusedParts, gate_and_up
from megafsdp.parallel import Linear
from tests.ranks import Ranks

WIDTH = 32
# Who cuts the model, data ranks, ranks of tp.
LAYOUTS = (
    ("engine", 2, 2),
    ("engine later", 2, 2),
    ("fsdp2", 2, 1),
    ("fsdp2", 1, 2),
    ("quantized", 2, 2),
    ("tp", 1, 2),
)


class Net(nn.Module):
    """A pair of maps that is stored in parts, and unequal parts that are stored whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pair = Linear(WIDTH, 2 * WIDTH, parallel_mode="column", fused=gate_and_up(WIDTH))
        uneven = FusedParts(("a", "b"), (WIDTH, 3 * WIDTH))
        self.uneven = Linear(WIDTH, 4 * WIDTH, parallel_mode="column", fused=uneven)
        repeated = FusedParts(("a", "b"), (WIDTH // 2, 3 * WIDTH // 2), num_groups=2)
        self.groups = Linear(WIDTH, 4 * WIDTH, parallel_mode="column", fused=repeated)
        self.rows = Linear(WIDTH, 4 * WIDTH, parallel_mode="row", fused=uneven)
        for layer in self.children():
            nn.init.normal_(layer.bias)


def _build(kind: str, dp: int, tp: int) -> tuple[Net, FusedAdam]:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    net = Net()
    if tp > 1:
        for layer in net.children():
            layer.set_device_mesh(mesh["tp"])
    if kind == "engine later":
        # As a save of the model before does, which is in the order of the ranks.
        declare_parts(net)
    if kind.startswith("engine"):
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
    """Another layout loads them, and tools that know no model; weights and moments, bit for bit."""
    ranks(_num_ranks(layout)).run(_saved, layout, tmp_path / "saved")
    # Itself and the next one: that the files are the whole's, whoever saved, is compared below.
    for other in (layout, LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]):
        ranks(_num_ranks(other)).run(_loaded, other, tmp_path / "saved")
    to_torch(tmp_path / "saved", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    wanted = _whole()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], whole) for name, whole in wanted.items())


def _of_linears() -> nn.Module:
    """The same names and shapes without parts, as a model of plain layers has them."""
    whole, plain = Net(), nn.Module()
    for name, layer in whole.named_children():
        setattr(plain, name, nn.Linear(layer.in_features, layer.out_features))
    plain.load_state_dict({name: 2 * value for name, value in whole.state_dict().items()})
    return plain


def _loaded_and_saved(layout: tuple[str, int, int], root: Path, to: Path) -> None:
    net, _ = _build(*layout)
    load(root, model=net)
    save(to, step=1, model=net)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_that_were_saved_whole_are_put_in_the_order_of_the_ranks(
    ranks: Ranks, tmp_path: Path, layout: tuple[str, int, int]
) -> None:
    """Those of plain layers, which know no parts."""
    wanted = {name: value.detach() for name, value in _of_linears().named_parameters()}
    save(tmp_path / "whole", step=1, model=_of_linears())
    ranks(_num_ranks(layout)).run(_loaded_and_saved, layout, tmp_path / "whole", tmp_path / "again")
    to_torch(tmp_path / "again", tmp_path / "again.pt")
    found = torch.load(tmp_path / "again.pt", weights_only=True)["model"]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def _refused(layout: tuple[str, int, int], root: Path) -> None:
    net, _ = _build(*layout)
    kept = [local_object(p).detach().clone() for p in net.parameters()]
    with pytest.raises(CheckpointError, match="one of an earlier release"):
        load(root, model=net)
    assert all(torch.equal(local_object(p), k) for p, k in zip(net.parameters(), kept, strict=True))


def test_checkpoints_that_do_not_say_their_order_are_refused_where_it_matters(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Earlier releases wrote the order of the ranks; what our engine has cut loads them."""
    engine = LAYOUTS[0]
    ranks(_num_ranks(engine)).run(_saved, engine, tmp_path)
    directory = tmp_path / "iter_0000001"
    manifest = read_manifest(directory)
    assert manifest.has_whole_order
    write_manifest(replace(manifest, has_whole_order=False), directory)
    for layout in LAYOUTS:
        is_known = layout[0].startswith("engine") or layout[2] == 1
        ranks(_num_ranks(layout)).run(_loaded if is_known else _refused, layout, tmp_path)


def _to_hub() -> None:
    net, _ = _build("tp", 1, 2)
    with pytest.raises(NotImplementedError, match=r"'pair\.weight'.*Go by a checkpoint"):
        hub_state(net)


def test_files_of_hugging_face_go_by_a_checkpoint(ranks: Ranks) -> None:
    """Rows in the order of ranks would be exported, and imported, as if they were the whole's."""
    ranks(2).run(_to_hub)
