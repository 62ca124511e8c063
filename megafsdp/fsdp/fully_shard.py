"""The entry points: make modules into units.

``fully_shard`` is called on each unit and then on the root, or ``fully_shard_model`` does it for a
whole model. Both change modules in place and return them; no wrapper, no key prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from megafsdp.fsdp.arguments import (
    average_of,
    check_modules,
    check_placements,
    is_divided_over_outer_axis,
    mesh_of,
    mixed_precision_of,
    offload_of,
    reshard_of,
    strategy_of,
)
from megafsdp.fsdp.fsdp_module import mix_in
from megafsdp.fsdp.grouping import (
    Division,
    build_groups,
    claim,
    device_type_of,
    find_parameters,
    find_units,
)
from megafsdp.fsdp.kept_fp32 import policies_by_module
from megafsdp.fsdp.params.policy import Average, MixedPrecisionPolicy, OffloadPolicy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.runtime.unit import FSDPUnit

M = TypeVar("M", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | int = "optim_grads_params",
    outer_strategy: str = "no_shard",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy | TorchOffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    average: str = "rank",
    prefetch: int = 1,
) -> M:
    """Make a module, or a list of modules that run one after another, into one unit.

    Call it on inner units first, on the root last, on all ranks alike. The unit owns the parameters
    below it that no inner unit owns; each becomes an uneven DTensor over fp32 main weights.
    Parameter values are taken from every rank's own copy: initialise all ranks alike. Parameters on
    the meta device have none until ``materialize`` or a load. No collective is issued before the
    first forward, except to build a default mesh.

    Args:
        module: The module or modules, changed in place.
        mesh: The ranks: 1-D, or 2-D of an outer axis and of the ranks to divide among (HSDP,
            HFSDP), with any axis names; None means one axis of all ranks.
        strategy: What is divided: ``"optim_grads_params"`` (ZeRO-3, or 3), ``"optim_grads"``
            (ZeRO-2, or 2), ``"optim"`` (ZeRO-1, or 1), or ``"no_shard"`` (DDP, or 0): nothing.
        outer_strategy: What the first axis of a 2-D mesh divides besides: ``"no_shard"``, nothing
            (HSDP), or ``"optim"``, main weights and optimizer states (HFSDP); the latter needs
            ZeRO-3 on the inner axis.
        reshard_after_forward: Free the gathered parameters between forward and backward. None frees
            all but those needed again at once: the root's and the last unit's. A number of
            neighbouring ranks, say of one node, keeps them divided among these alone, so that
            backward gathers over fewer ranks.
        shard_placement_fn: As in torch; only dimension 0 can be cut, so it may only return None or
            ``Shard(0)``.
        mp_policy: Dtypes; torch's policy is accepted.
        offload_policy: What lives on the host; torch's policy is accepted.
        ignored_params: Parameters to leave alone: neither cut nor reduced.
        average: ``"rank"``: gradients are the mean over ranks. ``"token"``: their sum.
        prefetch: How many units are gathered ahead; at most ``prefetch + 1`` are unsharded.

    Returns:
        ``module``, whose class is now also an :class:`FSDPModule`.

    Raises:
        ValueError: A module is a unit already, a parameter is tied to another unit, parameters lie
            on several devices, or an argument has no meaning.
        TypeError: A policy is of another type.
        NotImplementedError: A strategy, mesh or parameter kind that is not built.
        RuntimeError: ``torch.distributed`` is not initialised and no mesh was given.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, list) else [module]
    policy = mixed_precision_of(mp_policy)
    memory = UnitMemory(offload=offload_of(offload_policy))
    chosen = strategy_of(strategy)
    averaging = average_of(average)
    check_modules(modules, prefetch)
    found = find_parameters(modules, ignored_params or (), policy)
    check_placements(found, shard_placement_fn)
    mesh = mesh_of(mesh, device_type_of(found))
    resharding = reshard_of(reshard_after_forward, mesh)
    scale = 1.0 if averaging is Average.TOKEN else 1.0 / mesh.size()
    is_divided = is_divided_over_outer_axis(outer_strategy, chosen, mesh)
    groups = build_groups(found, policy, Division(mesh, chosen, is_divided, scale), memory)
    claim(found, type(modules[0]).__name__)
    for each in modules:
        mix_in(each)
    FSDPUnit(
        modules,
        groups,
        policy=policy,
        memory=memory,
        prefetch=prefetch,
        reshard_after_forward=resharding,
    )
    return module


def fully_shard_model(
    model: nn.Module,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    **options: Any,
) -> nn.Module:
    """Make every instance of some classes below a model, and then the model, into units.

    Args:
        model: The model, changed in place.
        fsdp_unit_modules: Classes, or their names, dotted (``package.module.Class``) or plain. None
            takes the model's ``_no_split_modules``, as Hugging Face models have it.
        mp_policy: As for :func:`fully_shard`; names in it may be those of the whole model.
        **options: Other keyword arguments of :func:`fully_shard`, the same for all units.

    Returns:
        ``model``.

    Raises:
        ValueError: No class is named, no module below the model is of a named class, or a name in
            ``mp_policy.keep_fp32`` matches nothing.
        Exception: Whatever :func:`fully_shard` raises.
    """
    units = find_units(model, fsdp_unit_modules)
    policies = policies_by_module(model, units, mixed_precision_of(mp_policy))
    for module in [*reversed(units), model]:
        fully_shard(module, mp_policy=policies[module], **options)
    return model
