"""The entry points: make modules into units, and say which microbatch a forward belongs to.

``fully_shard`` is called on each unit and then on the root, or ``fully_shard_model`` does it for a
whole model. Both change modules in place and return them; no wrapper, no key prefix.

The functions below the entry points turn arguments into values or refuse them, before any module is
changed; :mod:`megafsdp.fsdp.division` does so for meshes. torch's own ``MixedPrecisionPolicy``
and ``CPUOffloadPolicy`` are accepted wherever ours are. Grouping, buffers and hooks are made
elsewhere; no collective is issued here, except to build a mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from megafsdp.device.streams import device_handle
from megafsdp.errors import expected
from megafsdp.fsdp.division import UnitMeshes, division_of, mesh_of, strategy_of
from megafsdp.fsdp.eligible import check_quantization
from megafsdp.fsdp.fsdp_module import FSDPModule, mix_in
from megafsdp.fsdp.grouping import (
    FoundParameter,
    build_groups,
    claim,
    device_type_of,
    find_parameters,
    find_units,
    leave_out_tied,
    move_buffers,
)
from megafsdp.fsdp.keywords import (
    AverageChoice,
    ModelKeywords,
    OuterStrategyChoice,
    PlacementFunction,
    ShardKeywords,
    StrategyChoice,
)
from megafsdp.fsdp.params.kept_weights import check_any_is_quantized
from megafsdp.fsdp.params.policy import Average, MixedPrecisionPolicy, OffloadPolicy, Strategy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.placement_choice import choose_meshes
from megafsdp.fsdp.placing import check_meshes, place_parameters
from megafsdp.fsdp.policy_names import policies_by_module
from megafsdp.fsdp.runtime.schedule import UnitOptions
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below
from megafsdp.fsdp.weight_sync import watch_optimizer_steps
from megafsdp.mesh.spmd import DataParallelDims, spmd_mesh_of
from megafsdp.mesh.torch_private import ReplicatedModule, fully_shard_state

if TYPE_CHECKING:
    from typing_extensions import Unpack

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardKeywords]) -> FSDPModule: ...


@overload
def fully_shard(module: list[M], **options: Unpack[ShardKeywords]) -> list[FSDPModule]: ...


@overload
def fully_shard(
    module: tuple[M, ...], **options: Unpack[ShardKeywords]
) -> tuple[FSDPModule, ...]: ...


# Flat buffers made in inference mode would be tensors that autograd refuses for good.
@torch.inference_mode(mode=False)
def fully_shard(
    module: nn.Module | list[M] | tuple[M, ...],
    *,
    mesh: DeviceMesh | None = None,
    strategy: StrategyChoice = "optim_grads_params",
    outer_strategy: OuterStrategyChoice = "no_shard",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy | TorchOffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    average: AverageChoice = "rank",
    prefetch: int = 1,
    nccl_user_buffers: bool = False,
    dp_mesh_dims: DataParallelDims | None = None,
    expert_mesh: DeviceMesh | None = None,
    even_shards: bool = False,
) -> FSDPModule | list[FSDPModule] | tuple[FSDPModule, ...]:
    """Make a module, or a list or tuple of modules that run one after another, into one unit.

    Call it on inner units first, on the root last, on all ranks alike. The unit owns the parameters
    below it that no inner unit owns; each becomes an uneven DTensor over fp32 main weights. Each
    rank keeps its own values: initialise all ranks alike. Parameters on the meta device have no
    values until ``materialize`` or a load. No collective is issued, except to build a mesh.

    DTensor parameters over one axis outside the mesh, as ``parallelize_module`` makes them, are
    divided part by part; where their gradients are partial, they are summed over that axis.

    Args:
        module: The module or modules, changed in place.
        mesh: The ranks: 1-D, or 2-D with an outer axis first, then the ranks to divide among (HSDP,
            HFSDP), with any names; None: 1-D, all ranks. The module is moved to the mesh's device.
        strategy: What is divided: ``"optim_grads_params"`` (ZeRO-3, or 3), ``"optim_grads"``
            (ZeRO-2, or 2), ``"optim"`` (ZeRO-1, or 1), or ``"no_shard"`` (DDP, or 0): nothing.
        outer_strategy: What the first axis of a 2-D mesh also divides: ``"no_shard"``: nothing
            (HSDP); ``"optim"``: main weights and optimizer states (HFSDP; needs ZeRO-3).
        reshard_after_forward: Free gathered parameters between forward and backward. None: all but
            the root's and the last unit's. A number: stay divided among that many neighbours.
        shard_placement_fn: As in torch, with a mesh for experts too; only rows are cut.
        mp_policy: Dtypes; torch's policy is accepted.
        offload_policy: What lives on the host: nothing if None; torch's policy is accepted.
        ignored_params: Parameters to leave alone: neither cut nor reduced, nor by an outer unit.
        average: ``"rank"``: gradients are the mean over ranks. ``"token"``: their sum.
        prefetch: How many units are gathered ahead; at most ``prefetch + 1`` are unsharded.
        nccl_user_buffers: Gather into memory registered with NCCL: the size of a few units, which
            stays allocated. Only for ZeRO-3; without NCCL memory stays plain, with a warning.
        dp_mesh_dims: As in torch: the data axes of ``mesh``, on which all parameters are DTensors.
        expert_mesh: Ranks that divide experts' parameters; the mean is still over ``mesh``.
        even_shards: Cut each parameter by itself, as FSDP2 does: more padding and collectives.

    Returns:
        ``module``, whose class is now also an :class:`FSDPModule`.

    Raises:
        ValueError: A module is a unit already or only contains modules, a parameter is tied to
            another unit, parameters lie on several devices, or an argument has no meaning.
        TypeError: A policy, mesh, module or ignored parameter is of another type.
        NotImplementedError: A strategy, mesh or parameter kind that is not built.
        RuntimeError: ``torch.distributed`` is not initialised and no mesh was given.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, list | tuple) else [module]
    # All arguments are checked before any module is changed, so a refused call can be repeated.
    policy, memory = mixed_precision_of(mp_policy), UnitMemory(offload=offload_of(offload_policy))
    spmd = spmd_mesh_of(mesh, dp_mesh_dims)
    chosen, averaging = strategy_of(strategy, spmd), average_of(average)
    check_modules(modules, prefetch)
    check_user_buffers(nccl_user_buffers, chosen)
    meshes = UnitMeshes(mesh, expert_mesh, spmd, is_even=even_shards)
    found, meshes = _find(modules, ignored_params or (), policy, shard_placement_fn, meshes)
    mesh = mesh_of(meshes.data, device_type_of(found))
    division = division_of(mesh, meshes, chosen, outer_strategy, averaging)
    options = UnitOptions(prefetch, division.reshard_of(reshard_after_forward), nccl_user_buffers)
    groups = build_groups(found, policy, division, memory)
    claim(found, type(modules[0]).__name__)
    move_buffers(modules, device_handle(mesh.device_type).device)
    for each in modules:
        mix_in(each)
    FSDPUnit(modules, groups, policy=policy, memory=memory, options=options)
    watch_optimizer_steps()  # Last: its hooks compare ids, so sharded parameters must exist.
    return cast(FSDPModule | list[FSDPModule] | tuple[FSDPModule, ...], module)


# An attribute of torch's function too, by which programs ask whether a module is a unit.
fully_shard.state = fully_shard_state  # type: ignore[attr-defined]


def fully_shard_model(
    model: nn.Module,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    strategy: StrategyChoice = "optim_grads_params",
    outer_strategy: OuterStrategyChoice = "no_shard",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy | TorchOffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    average: AverageChoice = "rank",
    prefetch: int = 1,
    nccl_user_buffers: bool = False,
    dp_mesh_dims: DataParallelDims | None = None,
    expert_mesh: DeviceMesh | None = None,
    even_shards: bool = False,
) -> FSDPModule:
    """Make every instance of some classes below a model, and then the model, into units.

    All of them are checked before the first is changed. A module with a parameter that is tied to
    one outside of it does not become a unit, which is logged: its parameters belong to the unit
    around it.

    Args:
        model: The model, changed in place.
        fsdp_unit_modules: Classes, or their names, dotted (``package.module.Class``) or plain. None
            takes the model's ``_no_split_modules``, which Hugging Face models have. If only the
            model's own class is named, the model becomes one unit.
        mp_policy: As for :func:`fully_shard`; names in it may be relative to the whole model.
        mesh: As for :func:`fully_shard`; this and all other arguments are the same for all units.
        strategy: As for :func:`fully_shard`.
        outer_strategy: As for :func:`fully_shard`.
        reshard_after_forward: As for :func:`fully_shard`.
        shard_placement_fn: As for :func:`fully_shard`.
        offload_policy: As for :func:`fully_shard`.
        ignored_params: As for :func:`fully_shard`.
        average: As for :func:`fully_shard`.
        prefetch: As for :func:`fully_shard`.
        nccl_user_buffers: As for :func:`fully_shard`.
        dp_mesh_dims: As for :func:`fully_shard`.
        expert_mesh: As for :func:`fully_shard`.
        even_shards: As for :func:`fully_shard`.

    Returns:
        ``model``.

    Raises:
        TypeError: ``fsdp_unit_modules`` is one class or name.
        ValueError: No class is named, no module of the model is of a named class, or a name in
            ``mp_policy`` matches nothing, or its recipe quantizes nothing.
        Exception: Whatever :func:`fully_shard` raises.
    """
    ignored = list(ignored_params or ())  # Each unit iterates over it.
    options: ModelKeywords = {
        "mesh": mesh,
        "strategy": strategy,
        "outer_strategy": outer_strategy,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "offload_policy": offload_policy,
        "ignored_params": ignored,
        "average": average,
        "prefetch": prefetch,
        "nccl_user_buffers": nccl_user_buffers,
        "dp_mesh_dims": dp_mesh_dims,
        "expert_mesh": expert_mesh,
        "even_shards": even_shards,
    }
    units = leave_out_tied(model, find_units(model, fsdp_unit_modules), ignored)
    # Before the first fully_shard(): names are matched to parameters by id, and it replaces them.
    policies = policies_by_module(model, units, mixed_precision_of(mp_policy))
    # Inner units first: each takes what no unit below it owns.
    policies = {module: policies[module] for module in (*reversed(units), model)}
    meshes = UnitMeshes(mesh, expert_mesh, spmd_mesh_of(mesh, dp_mesh_dims), is_even=even_shards)
    check_units(policies, ignored, shard_placement_fn, meshes, offload_of(offload_policy))
    for module, policy in policies.items():
        fully_shard(module, mp_policy=policy, **options)
    return cast(FSDPModule, model)


@contextlib.contextmanager
def microbatch(model: nn.Module, is_last: bool = True) -> Iterator[None]:
    """Declare whether the forward and backward inside are the step's last ones; local.

    Without it every backward is complete by itself, which is always right. Inside
    ``microbatch(model, is_last=False)`` some reductions wait: replicated gradients are summed
    locally and all-reduced in the last microbatch. Inside ``microbatch(model, is_last=True)`` an
    optimizer that clips by itself may already step parameters whose gradients are complete: do not
    change these parameters or gradients before its ``step``.

    Args:
        model: The outermost module given to ``fully_shard``, or one that contains such modules.
        is_last: False for all microbatches of a step but the last.
    """
    units = list(units_below([model]).values())
    if units:
        # The outermost unit comes first and adopts the others, which would else become roots.
        units[0].require_context()
    contexts = dict.fromkeys(unit.require_context() for unit in units)
    for context in contexts:
        iteration = context.iteration
        iteration.is_last_microbatch = iteration.optimizer_may_start = is_last
    try:
        yield
    finally:
        for context in contexts:
            iteration = context.iteration
            iteration.is_last_microbatch, iteration.optimizer_may_start = True, False


def average_of(value: str) -> Average:
    """Return the averaging rule with a name.

    Raises:
        ValueError: The name is unknown.
    """
    try:
        return Average(value)
    except ValueError:
        raise ValueError(
            expected(
                "'rank' or 'token'",
                repr(value),
                where="the average of fully_shard()",
                hint="Use 'rank' when each rank's loss is a mean, 'token' when it is a share of "
                "the sum over all tokens",
            )
        ) from None


def mixed_precision_of(
    policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy,
) -> MixedPrecisionPolicy:
    """Return a policy of ours or torch's as ours; an unset ``reduce_dtype`` takes our default.

    Raises:
        TypeError: The value is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
            # torch 2.15 has it.
            param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),
        )
    raise TypeError(
        expected(
            "a MixedPrecisionPolicy of megafsdp or of torch",
            type(policy).__name__,
            where="mp_policy of fully_shard()",
            hint="Build megafsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        )
    )


def offload_of(policy: OffloadPolicy | TorchOffloadPolicy | None) -> OffloadPolicy:
    """Return an offload policy of ours or torch's as ours; None offloads nothing, as in torch.

    Raises:
        TypeError: The value is none of these.
    """
    # Test torch's CPU policy first: its class is a subclass of the one that offloads nothing.
    if isinstance(policy, TorchCPUOffloadPolicy):
        return OffloadPolicy(params=True, pin_memory=policy.pin_memory)
    if policy is None or isinstance(policy, TorchOffloadPolicy):
        return OffloadPolicy()
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            expected(
                "an OffloadPolicy of megafsdp or of torch",
                type(policy).__name__,
                where="offload_policy of fully_shard()",
                hint="Build megafsdp.OffloadPolicy()",
            )
        )
    return policy


def check_units(
    policies: Mapping[nn.Module, MixedPrecisionPolicy],
    ignored: Sequence[nn.Parameter],
    placement_fn: PlacementFunction | None,
    meshes: UnitMeshes,
    offload: OffloadPolicy,
) -> None:
    """Check everything that could refuse one of several units, so that all are made or none.

    Args:
        policies: The policy of each module that will be a unit; inner modules first, the model
            last.
        ignored: Parameters to leave alone.
        placement_fn: As for :func:`fully_shard`.
        meshes: The meshes given to it.
        offload: Its ``offload_policy``.

    Raises:
        ValueError: A recipe quantizes nothing of the model.
        Exception: Whatever :func:`fully_shard` raises for one of the modules.
    """
    check_modules(list(policies))
    taken: dict[nn.Module, list[nn.Parameter]] = {}
    *_, model = policies
    fqns = {module: name for name, module in model.named_modules()}
    reasons: dict[str, str] = {}
    for module, policy in policies.items():
        of_inner = [p for m in module.modules() if m in taken for p in taken[m]]
        found, _ = _find([module], [*ignored, *of_inner], policy, placement_fn, meshes)
        check_quantization(found, policy, offload)
        device_type_of(found)
        taken[module] = [item.parameter for item in found]
        for record in (item.record for item in found):
            reasons[f"{fqns[module]}.{record.name}".lstrip(".")] = record.kept_because
    recipes = [p.quantization for p in policies.values() if p.quantization is not None]
    check_any_is_quantized(recipes, reasons, where="fully_shard_model()")


def _find(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    policy: MixedPrecisionPolicy,
    placement_fn: PlacementFunction | None,
    meshes: UnitMeshes,
) -> tuple[list[FoundParameter], UnitMeshes]:
    """Return the checked and placed parameters of one unit, and its meshes."""
    check_even_shards(meshes.is_even, policy)
    found = find_parameters(modules, ignored, policy)
    check_meshes(meshes.mesh, meshes.experts)
    meshes = choose_meshes(found, placement_fn, meshes)
    place_parameters(found, modules, meshes)
    return found, meshes


def check_modules(modules: Sequence[nn.Module], prefetch: int = 1) -> None:
    """Check that the modules can become one unit, or one unit each.

    Raises:
        TypeError: One is no module.
        ValueError: The list is empty, a module comes twice, is a unit already, contains a unit of
            torch or only contains modules, or ``prefetch`` is no whole number from 0 on.
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                expected(
                    "a module, or a list or tuple of modules",
                    type(module).__name__,
                    where="fully_shard()",
                    hint="Give the modules themselves: a generator is not read",
                )
            )
    refuse_units_of_torch(modules)
    # Two units over one module would both gather, and both end its backward.
    for module in modules:
        if unit_of(module) is not None:
            raise ValueError(
                expected(
                    "a module that is not a unit yet",
                    f"{type(module).__name__}, which was given to fully_shard() before",
                    where="fully_shard()",
                    hint="Call it once for each unit, on the root last",
                )
            )
        if modules.count(module) > 1:
            raise ValueError(
                expected(
                    "each module of a list once",
                    f"{type(module).__name__} more than once",
                    where="fully_shard()",
                    hint="Give it once: a unit may run it any number of times",
                )
            )
        if is_container(module):
            raise ValueError(
                expected(
                    "a module with a forward, around which it can be gathered",
                    f"{type(module).__name__}, which only contains modules",
                    where="fully_shard()",
                    hint="Give the modules in it: one call for each, or a list of them as one unit",
                )
            )
    if not modules:
        raise ValueError(
            expected("a module", "an empty list", where="fully_shard()", hint="Give the unit")
        )
    if not isinstance(prefetch, Integral) or prefetch < 0:
        raise ValueError(
            expected(
                "a whole number of units, 0 or more",
                prefetch,
                where="prefetch of fully_shard()",
                hint="Use 1; 0 gathers each unit when it runs",
            )
        )


def check_user_buffers(is_wanted: bool, strategy: Strategy) -> None:
    """Check that gathered weights are freed between uses, if registered memory is wanted.

    Raises:
        ValueError: The strategy keeps compute weights in full between uses.
    """
    if is_wanted and strategy.has_persistent_compute_weight:
        raise ValueError(
            expected(
                "strategy 'optim_grads_params', which gathers for each use",
                repr(strategy.value),
                where="fully_shard() with nccl_user_buffers",
                hint="Leave nccl_user_buffers out: this strategy gathers at most once a step",
            )
        )


def check_even_shards(is_wanted: bool, policy: MixedPrecisionPolicy) -> None:
    """Check that no recipe quantizes weights that are to be cut evenly.

    Raises:
        NotImplementedError: One does: its blocks of rows would be cut.
    """
    if is_wanted and policy.quantization is not None:
        raise NotImplementedError(
            expected(
                "compute weights that are not quantized",
                f"recipe {policy.recipe!r}",
                where="fully_shard() with even_shards=True",
                hint="Leave one of them out",
            )
        )


def is_container(module: nn.Module) -> bool:
    """Return whether a module is torch's list or dict, with no forward or other method to run."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    if not isinstance(module, kinds) or type(module).forward is not nn.Module.forward:
        return False
    # A user's subclass with other methods is no mere container: register_fsdp_forward_method()
    # can serve these.
    classes = [c for c in type(module).__mro__ if not c.__module__.startswith("torch.")]
    return not any(
        callable(value)
        for cls in classes
        for name, value in vars(cls).items()
        if not name.startswith("__")
    )


def refuse_units_of_torch(modules: Iterable[nn.Module]) -> None:
    """Raise if torch shards or replicates one of the modules or a part of it.

    Raises:
        ValueError: It does.
    """
    for root in modules:
        for name, module in root.named_modules():
            # Our units pass this test too: FSDPModule is a subclass of torch's.
            is_of_torch = isinstance(module, TorchFSDPModule | ReplicatedModule)
            if is_of_torch and not isinstance(module, FSDPModule):
                raise ValueError(
                    expected(
                        "modules that torch neither shards nor replicates",
                        f"{type(module).__name__} at '{name}' of {type(root).__name__}",
                        where="fully_shard()",
                        hint="Give all units to megafsdp's fully_shard(), inner ones first",
                    )
                )
