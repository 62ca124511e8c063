"""A training state as plain tensors, of each rank its rows, for a replica that cuts alike.

A replica of a sharded model that comes back, on other ranks, gets weights and optimizer states from
one that is alive: rank by rank, without a file and without a gather. Checkpoints, which any mesh
can load, are in save.py and load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.checkpoint.save import HasState
from megafsdp.checkpoint.state.canonical import persistent_buffers
from megafsdp.errors import expected, listed
from megafsdp.fsdp.grouping import is_replaced
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.fsdp.weight_sync import mark_main_weights_changed
from megafsdp.mesh.dtensor import shard_axes
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer


class ReplicaState:
    """Gives a training state to the same rank of another replica, and takes it there.

    Args:
        model: The root given to ``fully_shard``.
        optimizer: Its optimizer, itself: not torchft's wrapper.
        others: Further objects with a state, such as a scheduler, by a name for each.

    Raises:
        NotImplementedError: The optimizer steps on another thread too.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, others: Mapping[str, HasState] | None = None
    ) -> None:
        if isinstance(optimizer, HybridDeviceOptimizer):
            raise NotImplementedError(
                expected(
                    "an optimizer that changes weights within step() alone",
                    "HybridDeviceOptimizer, whose steps run on beside forward and backward",
                    where="ReplicaState()",
                    hint="Use FusedAdam, or an optimizer of torch",
                )
            )
        self._model, self._optimizer, self._others = model, optimizer, dict(others or {})

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's rows of the state, as plain tensors; local.

        Another thread may call it while forward and backward run: these change no main weight. The
        tensors are the state's own memory, to be sent before the next step.
        """
        return {
            "model": {name: local_tensor(each).detach() for name, each in self._tensors().items()},
            "optimizer": _with_rows(self._optimizer.state_dict()),
            "others": {name: each.state_dict() for name, each in self._others.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` of the same rank of another replica returned.

        Raises:
            ValueError: The replica has another model or cuts it differently.
        """
        own = {name: local_tensor(each) for name, each in self._tensors().items()}
        shapes = {name: tuple(each.shape) for name, each in own.items()}
        other_shapes = {name: tuple(each.shape) for name, each in state["model"].items()}
        if shapes != other_shapes:
            names = dict.fromkeys([*shapes, *other_shapes])
            different = [
                f"'{name}' {other_shapes.get(name, 'missing')}, here {shapes.get(name, 'missing')}"
                for name in names
                if shapes.get(name) != other_shapes.get(name)
            ]
            raise ValueError(
                expected(
                    "a replica with the same model, mesh and strategy",
                    f"rows of other shapes: {listed(different, separator='; ', limit=3)}",
                    where="load_state_dict() of a ReplicaState",
                    hint="Start all replicas with the same number of ranks and configuration",
                )
            )
        for name, rows in state["model"].items():
            own[name].copy_(rows)
        mark_main_weights_changed(self._model)
        dtensors = [each for each in self._tensors().values() if isinstance(each, DTensor)]
        meshes = {_key_of(each.device_mesh): each.device_mesh for each in dtensors}
        self._optimizer.load_state_dict(_with_dtensors(state["optimizer"], meshes))
        for name, each in self._others.items():
            each.load_state_dict(state["others"][name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return sharded parameters, even while modules show others, and the tensors of no unit."""
        found: dict[str, torch.Tensor] = {}
        for prefix, unit in units_below([self._model]).items():
            for record in (record for group in unit.groups for record in group.parameters):
                found[f"{prefix}.{record.name}".lstrip(".")] = record.sharded
        for name, parameter in self._model.named_parameters():
            if group_of(parameter) is None and not is_replaced(parameter):
                found[name] = parameter
        return found | {key: buffer for key, _, buffer in persistent_buffers(self._model)}


def _key_of(mesh: DeviceMesh) -> tuple[object, ...]:
    """Return what equal meshes of two replicas have in common: their ranks' numbers may differ."""
    return mesh.mesh_dim_names, tuple(mesh.shape)


def _with_rows(value: Any) -> Any:
    """Return a state in which DTensors are values that a process with another mesh can read."""
    if isinstance(value, list):
        return [_with_rows(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_rows(each) for key, each in value.items()}
    if not isinstance(value, DTensor):
        return value
    return {
        "rows": local_tensor(value),
        "mesh": _key_of(value.device_mesh),
        "placements": value.placements,
        "layout": value.uneven_layout if isinstance(value, UnevenDTensor) else None,
        "shape": value.shape,
        "stride": value.stride(),
    }


def _with_dtensors(value: Any, meshes: Mapping[tuple[object, ...], DeviceMesh]) -> Any:
    """Return a state in which the values of :func:`_with_rows` are DTensors again."""
    if isinstance(value, list):
        return [_with_dtensors(each, meshes) for each in value]
    if not isinstance(value, dict):
        return value
    if "rows" not in value or "layout" not in value:
        return {key: _with_dtensors(each, meshes) for key, each in value.items()}
    rows, mesh, layout = value["rows"], meshes[value["mesh"]], value["layout"]
    if layout is None:
        whole = {"shape": value["shape"], "stride": value["stride"]}
        return DTensor.from_local(rows, mesh, value["placements"], run_check=False, **whole)
    num_shard_axes = len(shard_axes(value["placements"], layout.num_model_axes))
    return UnevenDTensor.from_local_rows(rows, mesh, layout, num_shard_axes=num_shard_axes)
