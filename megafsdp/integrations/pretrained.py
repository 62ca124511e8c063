"""Models that transformers distributes itself, sharded by this package in place of FSDP2.

    with replacing_fsdp2():
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)

transformers cuts a model by tensor and expert parallelism, calls ``fully_shard`` for its units, and
then reads of each file what this rank needs. Within the context ``fully_shard`` is megafsdp's, and
rows of files are those of the uneven shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.distributed import fsdp, mixin

from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.buffer.dtensor.unwritten import mark_written
from megafsdp.errors import expected
from megafsdp.fsdp.fully_shard import fully_shard
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.mesh.model_part import part_of

# What transformers has, by name.
_ORIGINALS: dict[str, Any] = {
    "fully_shard": fsdp.fully_shard,
    "apply_fully_sharded_data_parallelism": mixin.apply_fully_sharded_data_parallelism,
    "DtensorShardOperation": core_model_loading.DtensorShardOperation,
    "set_param_for_module": core_model_loading.set_param_for_module,
    "_move_missing_keys_from_meta_to_device": (
        PreTrainedModel._move_missing_keys_from_meta_to_device
    ),
}


@contextlib.contextmanager
def replacing_fsdp2(**options: Any) -> Iterator[None]:
    """Let ``from_pretrained(distributed_config=...)`` shard models by megafsdp while it is open.

    Open it on all ranks alike, in one thread. The model is an :class:`megafsdp.FSDPModule` like any
    other, with transformers' units, meshes and policies.

    Args:
        **options: Keywords of :func:`megafsdp.fully_shard` for all units, which come before those
            that transformers gives.

    Raises:
        TypeError: A mesh is among the options.
    """
    if meshes := options.keys() & {"mesh", "expert_mesh", "dp_mesh_dims"}:
        raise TypeError(
            expected(
                "options of fully_shard() beside its meshes",
                sorted(meshes),
                where="replacing_fsdp2()",
                hint="DistributedConfig says how many ranks each mesh has",
            )
        )

    def shard(module: nn.Module | list[nn.Module], **given: Any) -> Any:
        if "strategy" in options:
            given.pop("reshard_after_forward", None)  # The strategy decides it.
        return fully_shard(module, **{**given, **options})

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (fsdp, "fully_shard", shard),
        (mixin, "apply_fully_sharded_data_parallelism", _shard_tied_together),
        (core_model_loading, "DtensorShardOperation", _reader_of),
        (core_model_loading, "set_param_for_module", _set_parameter),
        (PreTrainedModel, "_move_missing_keys_from_meta_to_device", _give_memory),
    ]
    before = [getattr(owner, name) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), replaced in zip(replacements, before, strict=True):
            setattr(owner, name, replaced)


class _Reader:
    """Reads of a stored tensor what this rank needs of a sharded parameter; local."""

    def __init__(self, layout: UnevenLayout) -> None:
        self._layout = layout

    def shard_tensor(
        self,
        source: Any,
        tensor_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """Return this rank's rows, or its model part if the tensor is yet to be converted.

        Args:
            source: A tensor, or a slice of a file that is not read yet.
            tensor_idx: Which of a list it is that becomes one parameter, such as the matrices of
                experts; None if it is the parameter itself.
            device: Where to copy it.
            dtype: Its dtype there.

        Returns:
            None for a matrix of an expert that this rank does not have.
        """
        part, shape = self._layout.part, _shape_of(source)
        if tensor_idx is None and shape == part.shape:
            found = self._layout.rows_of(source)
        elif shape == part.shape:
            found = part.cut(source[...])
        elif tensor_idx is None or part.dim is None:
            # A tensor of another shape is read whole, and reported as mismatched.
            found = source[...]
        elif part.dim == 0 and len(shape) < len(part.shape):
            index = tensor_idx % part.shape[0]
            if not any(first <= index < first + length for first, length in part.pieces):
                return None
            found = source[...]
        else:
            # A matrix of a stack lacks the stack's first dim.
            dim = part.dim - len(part.shape) + len(shape)
            found = part_of(shape, dim, part.num_ranks, part.rank).cut(source[...])
        return found.to(device=device, dtype=dtype)


def _shape_of(source: Any) -> tuple[int, ...]:
    return tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())


def _reader_of(parameter: torch.Tensor) -> Any:
    if isinstance(parameter, UnevenDTensor):
        return _Reader(parameter.uneven_layout)
    return _ORIGINALS["DtensorShardOperation"](parameter)


@torch.no_grad()
def _set_parameter(
    model: PreTrainedModel, target_name: str, param_value: torch.Tensor, *others: Any
) -> None:
    """Write what was read into the sharded parameter, which stays the object that it is."""
    parameter = _sharded(model, target_name)
    if parameter is None:
        _ORIGINALS["set_param_for_module"](model, target_name, param_value, *others)
        return
    loading_info, own = others[0], local_tensor(parameter)
    loading_info.missing_keys.discard(target_name)
    wanted = own.shape
    if isinstance(parameter, UnevenDTensor):
        wanted = torch.Size(parameter.uneven_layout.part.local_shape)
        if param_value.shape == wanted:
            param_value = parameter.uneven_layout.rows_of_part(param_value)
    if param_value.shape != own.shape:
        loading_info.mismatched_keys.add((target_name, param_value.shape, wanted))
        return
    own.copy_(param_value)
    mark_written(parameter)
    # Without the mark transformers would initialise it again.
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _sharded(model: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter by its name if it is one of a unit."""
    path, _, attribute = name.rpartition(".")
    parameter = model.get_submodule(path)._parameters.get(attribute)
    return None if parameter is None or group_of(parameter) is None else parameter


def _give_memory(
    model: PreTrainedModel, missing_keys: Collection[str], *args: Any, **kwargs: Any
) -> None:
    """Leave out sharded parameters, which have memory: transformers initialises them in place."""
    others = {name for name in missing_keys if _sharded(model, name) is None}
    _ORIGINALS["_move_missing_keys_from_meta_to_device"](model, others, *args, **kwargs)


def _shard_tied_together(
    model: PreTrainedModel,
    mesh_manager: Any,
    fsdp_plan: Mapping[str, str],
    ep_plan: Mapping[str, str],
) -> nn.Module:
    """Shard a model by its plan, with tied parameters in the unit that has all of their modules.

    transformers ties parameters after it has sharded them, in separate units.
    """
    model.tie_weights()
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)

    def has_all_owners(name: str) -> bool:
        inside = set(model.get_submodule(name).modules())
        return all(inside.issuperset(owners[id(p)]) for m in inside for p in m.parameters(False))

    plan = {name: style for name, style in fsdp_plan.items() if has_all_owners(name)}
    sharded: nn.Module = _ORIGINALS["apply_fully_sharded_data_parallelism"](
        model, mesh_manager, plan, ep_plan
    )
    return sharded
