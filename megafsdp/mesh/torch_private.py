"""Private names of torch.distributed: DTensors, meshes, process groups, checkpoints.

torch may change these names without notice, so no other file uses them, except
megafsdp/buffer/dtensor/uneven.py, whose class is a DTensor. Private names of torch's core are in
megafsdp/device/torch_private.py. Each function says what torch offers in public instead, and the
versions in which the private name was seen.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import io
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils, device_mesh, distributed_c10d
from torch.distributed import checkpoint as dcp
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable.replicate import DDP
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fully_shard as fully_shard_file
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Partial

# Mesh, placements and shape of a DTensor's global tensor; public: DTensor.from_local() makes them,
# through autograd and with a check of the placements. 2.11 to 2.15.
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

D = TypeVar("D", bound=DTensor)

# Mixed into a module's class by replicate(); public: none. 2.11 to 2.15.
ReplicatedModule = DDP

# The placement of rows that a later mesh axis has cut first; public: none. 2.11 to 2.15.
StridedShard = _StridedShard

# The place of a chunk in the files of torch.distributed.checkpoint; each .metadata pickles it by
# this name. Public: none. 2.11 to 2.15.
StorageInfo = filesystem._StorageInfo


@dataclass(frozen=True, slots=True)
class _BeforeEnd:
    """What torch takes for a communicator that is to be finalized."""

    finalize: Callable[[], None]


def call_before_groups_end(action: Callable[[], None]) -> None:
    """Call an action when ``destroy_process_group()`` begins, while all groups still work; local.

    torch finalizes the communicators in this list first, and then forgets them. Without the list
    the action is not called. Public: none. Seen in 2.13 and 2.15.
    """
    if (communicators := getattr(distributed_c10d._world, "comms", None)) is not None:
        communicators.append(_BeforeEnd(action))


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return a DTensor's local tensor object itself, with its version counter, outside autograd.

    Public: ``DTensor.to_local()`` makes a new view through autograd, several times as slow. 2.11 to
    2.15.
    """
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return mesh, placements and global shape of a DTensor as one object.

    Public: ``device_mesh``, ``placements`` and ``shape``, from which torch would make a new one.
    2.11 to 2.15.
    """
    return tensor._spec


def make_dtensor(
    cls: type[D], local: torch.Tensor, spec: DTensorSpec, empty: torch.Tensor | None = None
) -> D:
    """Make a DTensor of a class over a local tensor, which may lie anywhere in its storage.

    ``empty`` is a tensor without elements with the dtype and device of ``local``, if the caller has
    one: making it takes half as long as the rest.

    Public: ``DTensor.from_local()`` makes no subclass, and is several times as slow. 2.11 to 2.15.
    """
    # The wrapper, which has no memory, takes over the offset of this tensor. With an offset its
    # data_ptr() would not be 0, and torch's staging would copy it as if it had memory.
    if empty is None:
        empty = local.new_empty(0) if local.storage_offset() else local
    # DTensor.__init__ only serves export, and would take longer than the rest of this function.
    result = cast(D, cls.__new__(cls, empty, spec, requires_grad=False))
    result._local_tensor = local
    return result


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, which stays the same object.

    Public: none. 2.11 to 2.15.
    """
    tensor._local_tensor = local


def exchange_forms(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the classes, local tensors and specs of two DTensors; attributes stay.

    Public: ``torch.utils.swap_tensors``, which swaps all else too. 2.11 to 2.15.
    """
    _exchange(first, second, ("__class__", "_local_tensor", "_spec"))


def _exchange(first: Any, second: Any, names: tuple[str, ...]) -> None:
    """Exchange attributes of two tensors. Public: none. 2.11 to 2.15."""
    for name in names:
        if hasattr(first, name):
            of_first = getattr(first, name)
            setattr(first, name, getattr(second, name))
            setattr(second, name, of_first)


@functools.cache
def call_after_swaps(settle: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Make ``torch.utils.swap_tensors`` end with a call of ``settle`` on its two tensors.

    Installed once per process and function. If ``settle`` raises, the swap is undone; it must have
    changed nothing then. Public: none; the function that is wrapped has no other caller, and finds
    also those who imported ``swap_tensors`` before. 2.11 to 2.15.
    """
    swap = torch._C._swap_tensor_impl

    @functools.wraps(swap)
    def swap_and_settle(first: torch.Tensor, second: torch.Tensor) -> None:
        # swap_tensors() has swapped classes, attributes and slots before this call.
        swap(first, second)
        try:
            settle(first, second)
        except BaseException:
            _exchange(first, second, ("_local_tensor", "_spec", "__class__", "__dict__"))
            swap(first, second)
            raise

    torch._C._swap_tensor_impl = swap_and_settle  # type: ignore[assignment]


def wrap_part(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> DTensor:
    """Return a DTensor of a shape whose part on this rank of a mesh is ``local``; aliases.

    Public: ``DTensor.from_local()``, which makes a view; not all subclasses support views. 2.11 to
    2.15.
    """
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    return make_dtensor(DTensor, local, DTensorSpec(mesh, placements, tensor_meta=meta))


def is_arriving(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the result of a collective of torch that may still run.

    Public: none. 2.11 to 2.15.
    """
    return isinstance(tensor, AsyncCollectiveTensor)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that may still run, waited for; other tensors as given.

    The result is an alias that no graph contains yet.

    Public: none; any operator on such a tensor waits, but not a view. 2.11 to 2.15.
    """
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    result = tensor.trigger_wait()
    return result.view_as(result)


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users and layers set on a tensor, without what it is made of.

    Public: ``vars()``, which includes a DTensor's fields and what wraps a tensor. 2.11 to 2.15.
    """
    fields = ["_local_tensor", "_spec"]
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, DTensor):
        fields = tensor.__tensor_flatten__()[0]
    return {name: value for name, value in vars(tensor).items() if name not in fields}


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was sliced from; the mesh itself if it was not sliced.

    Public: none. 2.11 to 2.15.
    """
    return mesh._get_root_mesh()


def norm_placement(order: float) -> Partial:
    """Return the placement of a norm whose ranks have norms of their elements: powers are added.

    Public: none; ``Partial`` adds the norms themselves. 2.11 to 2.15.
    """
    return _NormPartial(order)


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh of all ranks of a mesh, in row-major order.

    Collective on first use. Public: none. 2.11 to 2.15.
    """
    return mesh._flatten()


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh | None:
    """Return a mesh of the axes of several meshes, over their groups; None if torch cannot join.

    torch can from 2.12 on, for named slices of one root. Public: none. 2.12 to 2.15.
    """
    if not hasattr(DeviceMesh, "_concatenate") or not all(m.mesh_dim_names for m in meshes):
        return None
    try:
        return DeviceMesh._concatenate(meshes)
    # The meshes have two roots, whose ranks torch compares.
    except RuntimeError:
        return None


def forget_dtensor_meshes() -> None:
    """Empty DTensor's caches, whose lookup by equality could return meshes of destroyed groups.

    For a process that makes process groups one after another. Public: none; torch's own functions
    for this import the compiler. 2.11 to 2.15.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


@contextlib.contextmanager
def meta_devices_counted() -> Iterator[None]:
    """Let operators of DTensors run on meshes of meta devices.

    torch 2.14 estimates the cost of redistributing their inputs, and asks the handle of the mesh's
    device how many devices a machine has; meta has no such handle. If nothing is redistributed, the
    answer has no effect. Public: none. 2.11 to 2.15.
    """
    asked: Any = device_mesh._mesh_resources
    count = asked.num_devices_per_host
    asked.num_devices_per_host = lambda kind: 1 if kind == "meta" else count(kind)
    try:
        yield
    finally:
        del asked.num_devices_per_host


def register_as_fully_sharded(module: nn.Module) -> None:
    """Register a module as torch's own ``fully_shard`` does, for torch functions that look it up.

    ``replicate()`` refuses such a module, and ignores its parameters below another module. Public:
    none. 2.11 to 2.15.
    """
    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def set_fully_shard_state(module: nn.Module, state: object) -> None:
    """Set the object that ``torch.distributed.fsdp.fully_shard.state(module)`` returns.

    Public: none; ``torch.distributed.pipelining`` asks for it. 2.11 to 2.15.
    """
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(torch_fully_shard)] = state


def fully_shard_state(module: nn.Module) -> object:
    """Return what torch's ``fully_shard.state(module)`` returns; None for no unit.

    Public: none. 2.11 to 2.15.
    """
    return torch_fully_shard.state(module)  # type: ignore[attr-defined]


@functools.cache
def check_before_torch_shards(check: Callable[[nn.Module], None]) -> None:
    """Make torch call ``check`` on each module given to its ``fully_shard`` or ``replicate``.

    Installed once per process and function; called before torch changes a parameter. Public: none;
    torch would take our DTensor parameters for tensor-parallel ones. 2.11 to 2.15.
    """
    find = fully_shard_file._get_modules_and_states

    @functools.wraps(find)
    def checked(module: Any, *args: Any, **kwargs: Any) -> Any:
        for each in (module,) if isinstance(module, nn.Module) else module:
            check(each)
        return find(module, *args, **kwargs)

    fully_shard_file._get_modules_and_states = checked
    replicate_with_fsdp._get_modules_and_states = checked


def run_split_backwards_within(
    context: Callable[[nn.Module], AbstractContextManager[None]],
) -> None:
    """Make torch's pipelines run the parts of a split backward within a context.

    They compute the gradients of a stage's inputs first, and later those of the weights that its
    module shows then. ``context`` is called with the module of the stage, before each part. Nothing
    happens unless pipelining is imported, which takes a second. Public: none; a stage calls no
    method of its module that would tell the parts from a whole backward. 2.11 to 2.15.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is not None:
        _run_parts_within(stages, context)


@functools.cache
def _run_parts_within(
    stages: Any, context: Callable[[nn.Module], AbstractContextManager[None]]
) -> None:
    """Enter the context in the backward of a stage. Public: none. 2.11 to 2.15."""
    run = stages._PipelineStageBase.backward_maybe_with_nosync

    @functools.wraps(run)
    def run_part(self: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        is_part = backward_type in ("input", "weight")
        with context(self.submod) if is_part else contextlib.nullcontext():
            return run(self, backward_type, *args, **kwargs)

    stages._PipelineStageBase.backward_maybe_with_nosync = run_part


@dataclass(frozen=True, slots=True)
class TorchShard:
    """How torch's ``fully_shard`` has cut one parameter.

    Attributes:
        shape: Shape before the cut: of the parameter, or of this rank's part on a model axis.
        dim: The dimension along which it is cut.
        group: The ranks among which it is divided; None if it is not.
        rank: This rank's number in ``group``.
        num_ranks: The number of ranks in ``group``.
        replicas: The ranks that have the same shard; None without replicas.
        model_mesh: The mesh of the model axes that cut or repeat it; None without one.
        model_placements: Its placements on ``model_mesh``.
        has_inner_mesh: Whether it is kept on fewer ranks between forward and backward.
        is_on_host: Whether it is offloaded.
        has_begun: Whether the first forward has begun.
    """

    shape: tuple[int, ...]
    dim: int
    group: dist.ProcessGroup | None
    rank: int
    num_ranks: int
    replicas: dist.ProcessGroup | None
    model_mesh: DeviceMesh | None
    model_placements: tuple[Placement, ...]
    has_inner_mesh: bool
    is_on_host: bool
    has_begun: bool


def torch_shards(model: nn.Module) -> dict[nn.Parameter, TorchShard]:
    """Return the parameters that torch's ``fully_shard`` has cut, while they are sharded; local.

    Public: the DTensors' meshes and placements, which do not say which axes existed before.
    2.11 to 2.15.
    """
    found: dict[nn.Parameter, TorchShard] = {}
    for module in model.modules():
        state = _get_module_fsdp_state(module)
        groups = [] if state is None else _torch_groups(state)
        for each in (parameter for group in groups for parameter in group.fsdp_params):
            mesh_info = each.mesh_info
            # 2.11 has the second name, and only for DTensors.
            before = getattr(each, "_unsharded_dtensor_spec", getattr(each, "_tp_spec", None))
            is_divided = isinstance(mesh_info, FSDPMeshInfo)
            found[each.sharded_param] = TorchShard(
                shape=tuple(each._orig_size),
                dim=each.fsdp_placement.dim,
                group=mesh_info.shard_process_group if is_divided else None,
                rank=mesh_info.shard_mesh_rank if is_divided else 0,
                num_ranks=mesh_info.shard_mesh_size if is_divided else 1,
                replicas=mesh_info.replicate_process_group
                if isinstance(mesh_info, DDPMeshInfo)
                else None,
                model_mesh=None if before is None else before.mesh,
                model_placements=() if before is None else tuple(before.placements),
                has_inner_mesh=each.post_forward_mesh_info is not None
                and each.post_forward_mesh_info is not mesh_info,
                is_on_host=each.offload_to_cpu,
                has_begun=state is not None and state._is_root is not None,
            )
    return found


def _torch_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a module of torch's FSDP2; one or none in 2.11.

    Public: none. 2.11 to 2.15.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def coalesce_collectives(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Return a context that launches the collectives issued in it together.

    It yields the handle to wait for. Public: none; FSDP2 uses the same. 2.11 to 2.15.
    """
    context: AbstractContextManager[Any] = dist._coalescing_manager(group=group, async_ops=True)
    return context


def premultiplied_sum(factor: float) -> dist.ReduceOp:
    """Return the reduction that multiplies each addend by a factor; only NCCL has it.

    For bf16 torch up to 2.13 gives NCCL a factor of zero. Public: none in 2.11; then
    ``dist.ReduceOp.PREMUL_SUM``. 2.11 to 2.15.
    """
    return dist._make_nccl_premul_sum(factor)


def high_priority_options(timeout: datetime.timedelta) -> Any:
    """Return options of an NCCL group whose collectives go before other waiting kernels.

    Public: the class, but not the timeout, which must equal that of the call with the options. 2.11
    to 2.15.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def new_group_options() -> dict[str, Any]:
    """Return arguments of ``dist.new_group`` for a group beside the default one.

    With NCCL its stream has a high priority, or a gather would wait behind full waves of other
    kernels; its timeout is the default group's. Empty without NCCL. Public: none for the timeout.
    2.11 to 2.15.
    """
    world = dist.group.WORLD
    if world is None or "cuda:nccl" not in dist.get_backend_config(world).split(","):
        return {}
    timeout = world._get_backend(torch.device("cuda")).options._timeout
    return {"timeout": timeout, "pg_options": high_priority_options(timeout)}


def default_store() -> dist.Store:
    """Return the rendezvous store of the default group.

    Public: none; a program that makes its own store has it. 2.11 to 2.15.
    """
    return dist.distributed_c10d._get_default_store()


class DeviceBackend(Protocol):
    """The part of ``ProcessGroupNCCL`` that allocates and registers memory. 2.11 to 2.15."""

    @property
    def mem_allocator(self) -> Any:
        """Return the library's allocator, for ``torch.cuda.MemPool``."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether the allocator can be used: the device must support multicast."""

    def register_mem_pool(self, pool: torch.cuda.MemPool) -> None:
        """Register the memory of a pool with the communicator."""

    def deregister_mem_pool(self, pool: torch.cuda.MemPool) -> None:
        """Undo :meth:`register_mem_pool`."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> DeviceBackend:
    """Return the backend that serves a device in a process group.

    Public: none; torch's documentation of ``torch.cuda.MemPool`` uses the same. 2.11 to 2.15.
    """
    return cast(DeviceBackend, group._get_backend(device))


def file_view(stream: IO[bytes], offset: int, nbytes: int) -> io.IOBase:
    """Return a part of a file as a file object, as ``torch.distributed.checkpoint`` reads records.

    Public: none. 2.11 to 2.15.
    """
    # A BinaryIO is an IOBase; the stubs do not say so.
    return _create_file_view(stream, offset, nbytes)  # type: ignore[arg-type]


def planned_writer() -> dcp.StorageWriter | None:
    """Return the storage writer of the ``torch.distributed.checkpoint`` save that plans; local.

    None outside of the planning of a save on this thread.

    Public: none; planners and tensors are not given the writer. 2.11 to 2.15.
    """
    # Every sharded tensor of every save asks: traceback.walk_stack() would take several times as
    # long, and f_locals is made for the one frame only.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "local_step" and "storage_writer" in frame.f_code.co_freevars:
            writer = frame.f_locals["storage_writer"]
            return writer if isinstance(writer, dcp.StorageWriter) else None
        frame = frame.f_back
    return None


@functools.cache
def write_full_states_by(write: Callable[[DTensor, torch.Tensor], bool]) -> None:
    """Make torch's setters of full states call ``write`` with each DTensor and its full tensor.

    ``set_model_state_dict`` and ``set_optimizer_state_dict`` with ``full_state_dict`` cut a full
    tensor as ``torch.chunk`` does, unless ``write`` has written it and returns True. Installed once
    per process and function; ``write`` gets torch's own DTensors too.

    Public: none; the setters read only attributes that other code reads too, so the tensor cannot
    give them its own cut. 2.11 to 2.15.
    """
    write_chunks = _state_dict_utils._distribute_tensors
    broadcast = dcp_state_dict._broadcast_state_dict
    distribute = dcp_state_dict._distribute_state_dict

    @functools.wraps(write_chunks)
    def distribute_tensors(
        local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> None:
        for key in keys:
            # A pair is a DTensor and its full tensor; any other value needs no cut.
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and write(*pair):
                local_state_dict[key] = pair[0]
        write_chunks(local_state_dict, keys, *args, **kwargs)

    @functools.wraps(distribute)
    def distribute_state_dict(
        full_state_dict: dict[str, Any],
        local_state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        rest = {
            key: value
            for key, value in full_state_dict.items()
            if not (
                isinstance(own := local_state_dict.get(key), DTensor)
                and isinstance(value, torch.Tensor)
                and write(own, value)
            )
        }
        distribute(rest, local_state_dict, *args, **kwargs)

    @functools.wraps(broadcast)
    def broadcast_state_dict(
        full_state_dict: dict[str, Any],
        local_state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        own = {k: v for k, v in local_state_dict.items() if isinstance(v, DTensor) and not v.ndim}
        broadcast(full_state_dict, local_state_dict, *args, **kwargs)
        # torch puts a plain number in place of each of these 0-dim DTensors.
        for key, tensor in own.items():
            value = local_state_dict.get(key)
            if type(value) is torch.Tensor and write(tensor, value):
                local_state_dict[key] = tensor

    # The first two are for states that rank 0 broadcasts, the third for states that all ranks give.
    _state_dict_utils._distribute_tensors = distribute_tensors
    dcp_state_dict._broadcast_state_dict = broadcast_state_dict
    dcp_state_dict._distribute_state_dict = distribute_state_dict
