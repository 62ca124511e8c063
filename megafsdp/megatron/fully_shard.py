"""Entry points of Megatron-FSDP: its keywords become those of ``megafsdp.fully_shard_model``.

A keyword that means something here is translated. Any other keyword may only have values that ask
for what happens anyway; other values are refused (:mod:`megafsdp.megatron.refusals`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.errors import expected
from megafsdp.fsdp.fsdp_module import FSDPModule
from megafsdp.fsdp.fully_shard import fully_shard as shard_unit
from megafsdp.fsdp.fully_shard import fully_shard_model as shard_units
from megafsdp.fsdp.materialize import materialize
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy as OwnPolicy
from megafsdp.fsdp.weight_sync import fully_shard_optimizer as check_optimizer
from megafsdp.fsdp.weight_sync import optimizers_follow
from megafsdp.megatron.fused_layers import declare_fused
from megafsdp.megatron.keywords import (
    DEFAULTS,
    MegatronKeywords,
    MixedPrecisionPolicy,
    show_keywords,
)
from megafsdp.megatron.model_parts import declare_experts, parts_as_dtensors
from megafsdp.megatron.refusals import check_names, check_values, refuse_methods
from megafsdp.mesh.annotation import annotation_of, set_annotation
from megafsdp.optimizer.states.beginning import make_states

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOGGER = logging.getLogger("megafsdp.megatron")

_GROUPS = ("hybrid_fsdp_group", "hybrid_fsdp_expt_group")


@show_keywords
def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    **keywords: Unpack[MegatronKeywords],
) -> FSDPModule:
    """Shard a model by Megatron-FSDP's keywords; called on all ranks alike.

    Args:
        module: The model, changed in place.
        device_mesh: A mesh that has the axes named by ``dp_shard_dim`` and ``dp_outer_dim``, and
            perhaps others; None means one axis of all ranks.
        **keywords: The fields of :class:`~megafsdp.megatron.keywords.MegatronKeywords`.

    Returns:
        ``module``, whose class is now also an :class:`megafsdp.FSDPModule`.

    Raises:
        TypeError: A keyword is not one of Megatron-FSDP's.
        NotImplementedError: A keyword asks for what is not built; the error says what to do.
        ValueError: Axes or groups do not fit the mesh, or as :func:`megafsdp.fully_shard_model`.
    """
    where = "fully_shard_model() of megafsdp.megatron"
    check_names(keywords, MegatronKeywords.__annotations__, where)
    check_values(keywords, where)
    keywords = {**DEFAULTS, **keywords}
    mesh, expert_mesh = _meshes(device_mesh, keywords)
    policy = _policy_of(keywords["mixed_precision_policy"], module)
    outer = keywords["outer_dp_sharding_strategy"]
    options: dict[str, Any] = {
        "mesh": mesh,
        "expert_mesh": expert_mesh,
        "mp_policy": policy,
        "strategy": keywords["zero_dp_strategy"],
        "outer_strategy": {0: "no_shard", 1: "optim"}.get(cast(int, outer), outer),
        "average": "token" if keywords["calculate_per_token_loss"] else "rank",
        "prefetch": int(keywords["overlap_param_gather"]),
        "nccl_user_buffers": keywords["nccl_ub"],
    }
    units = keywords["fsdp_unit_modules"]
    axes = _model_axes(device_mesh, keywords)
    _prepare(module, device_mesh, keywords)
    declare_fused(module, 1 if axes[0] is None else axes[0].size())
    with parts_as_dtensors(module, *axes):
        if units:
            shard_units(module, units, **options)
        else:
            shard_unit(module, **options)
    if keywords["init_model_with_meta_device"]:
        materialize(module)
    refuse_methods(module)
    return cast(FSDPModule, module)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Check that an optimizer has sharded parameters, make its states, and return it; local.

    Args:
        optimizer: Any optimizer over the parameters of a sharded model. Its ``step`` and
            ``zero_grad`` stay its own, without Megatron-FSDP's further arguments.
        preproc_state_dict_for_dcp_ckpt: Make the states with which the first step begins, so that
            ``torch.distributed.checkpoint.load`` finds them in the ``state_dict``. If they are
            not known, a warning is logged. False leaves them to the first step.

    Raises:
        TypeError: The first argument is not an optimizer, as in Megatron-FSDP's first releases.
        ValueError: A parameter is the original that sharding has replaced.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            expected(
                "an optimizer as the first argument",
                type(optimizer).__name__,
                where="fully_shard_optimizer() of megafsdp.megatron",
                hint="Give the optimizer alone, without the model",
            )
        )
    check_optimizer(optimizer)
    if preproc_state_dict_for_dcp_ckpt:
        try:
            make_states(optimizer)
        except NotImplementedError as error:
            _LOGGER.warning("%s", error)
    return optimizer


@show_keywords
def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device_mesh: DeviceMesh | None = None,
    **keywords: Unpack[MegatronKeywords],
) -> tuple[FSDPModule, torch.optim.Optimizer]:
    """Shard a model and give its optimizer the sharded parameters; called on all ranks alike.

    Args:
        module: The model, changed in place.
        optimizer: An optimizer of its parameters that has not stepped. Its groups stay as they are;
            Megatron-FSDP would make one group of all parameters.
        device_mesh: As for :func:`fully_shard_model`.
        **keywords: Likewise.

    Returns:
        ``module`` and ``optimizer``.

    Raises:
        ValueError: The optimizer has stepped, or has parameters that are not the model's.
        Exception: Whatever :func:`fully_shard_model` raises.
    """
    with optimizers_follow(module, [optimizer]):
        model = fully_shard_model(module, device_mesh, **keywords)
    keywords = {**DEFAULTS, **keywords}
    prepares = keywords["preproc_state_dict_for_dcp_ckpt"]
    return model, fully_shard_optimizer(optimizer, prepares)


def _meshes(
    device_mesh: DeviceMesh | None, keywords: MegatronKeywords
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the data-parallel meshes of all parameters and of experts.

    Raises:
        ValueError: A mesh lacks an axis, or a group has other ranks than the axes.
    """
    inner, outer = keywords.get("dp_shard_dim"), keywords.get("dp_outer_dim")
    expert_mesh = keywords.get("expt_device_mesh")
    mesh = _data_mesh(device_mesh, inner, outer, "device_mesh")
    experts = _data_mesh(expert_mesh, inner, outer, "expt_device_mesh")
    groups = (keywords.get("hybrid_fsdp_group"), keywords.get("hybrid_fsdp_expt_group"))
    for name, group, of in zip(_GROUPS, groups, (mesh, experts), strict=True):
        if group is None:
            continue
        ranks = sorted(dist.get_process_group_ranks(group))
        wanted = None if of is None or outer is None else sorted(of.mesh.flatten().tolist())
        if ranks != wanted:
            raise ValueError(
                expected(
                    "a group of all ranks of the outer and the inner axis",
                    f"one of ranks {ranks}, where the axes have ranks {wanted or 'of no mesh'}",
                    where=f"{name} of fully_shard_model(), with dp_outer_dim={outer!r}",
                    hint="Leave it out: the group is made from the mesh",
                )
            )
    return mesh, experts


def _data_mesh(
    mesh: DeviceMesh | None, inner: str | None, outer: str | None, keyword: str
) -> DeviceMesh | None:
    """Return the part of a mesh that has the named axes; None if there is no mesh to name them."""
    names = tuple(name for name in (outer, inner) if name is not None)
    if mesh is None and (outer is None or keyword == "expt_device_mesh"):
        return None
    if mesh is not None and mesh.ndim == 1 and not names:
        return mesh
    if mesh is not None and inner is not None:
        # torch finds flattened axes too, and says which axes there are.
        return mesh[names]
    axes = None if mesh is None else mesh.mesh_dim_names
    raise ValueError(
        expected(
            "the axes that divide and replicate parameters",
            f"dp_shard_dim={inner!r}, dp_outer_dim={outer!r} and a mesh of axes {axes}",
            where=f"{keyword} of fully_shard_model()",
            hint="Name the axes of device_mesh by dp_shard_dim and, for HSDP, dp_outer_dim",
        )
    )


def _model_axes(
    device_mesh: DeviceMesh | None, keywords: MegatronKeywords
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the axes of tensor parallelism of all parameters and of experts; None without one.

    Raises:
        ValueError: The mesh has no such axis, or it is one of data parallelism.
    """
    name, of_experts = keywords["tp_dim"], keywords["expt_device_mesh"]
    if device_mesh is None or name is None:
        return None, None
    axes = device_mesh.mesh_dim_names or ()
    if name not in axes or name in (keywords["dp_shard_dim"], keywords["dp_outer_dim"]):
        raise ValueError(
            expected(
                "an axis of device_mesh beside those of data parallelism",
                f"tp_dim={name!r} and a mesh of axes {axes}",
                where="fully_shard_model()",
                hint="Leave tp_dim out without tensor parallelism",
            )
        )
    if of_experts is None or name not in (of_experts.mesh_dim_names or ()):
        return device_mesh[name], None  # Experts may be whole where other weights are cut.
    return device_mesh[name], of_experts[name]


def _policy_of(policy: object, module: nn.Module) -> Any:
    """Translate a policy of Megatron-FSDP's class; ``megafsdp.fully_shard`` checks others.

    Raises:
        ValueError: Main weights are to have the model's dtype, but it has several.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        return policy
    main = policy.main_params_dtype
    if main is None:
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if len(dtypes) != 1:
            raise ValueError(
                expected(
                    "a model of one dtype",
                    sorted(map(str, dtypes)),
                    where="MixedPrecisionPolicy(main_params_dtype=None) of fully_shard_model()",
                    hint="Give a dtype, or shard the parts by fully_shard() of megafsdp",
                )
            )
        main = dtypes.pop()
    return OwnPolicy(
        reduce_dtype=policy.grad_comm_dtype,
        main_params_dtype=main,
        main_grads_dtype=policy.main_grads_dtype,
    )


def _prepare(module: nn.Module, device_mesh: DeviceMesh | None, keywords: MegatronKeywords) -> None:
    """Move a model, and declare its experts, as Megatron-core marks or Megatron-FSDP names them.

    Raises:
        ValueError: A mesh of experts is given, but no parameter belongs to an expert, or the device
            is of another type than the mesh.
    """
    device = keywords.get("device")
    if device is not None and device_mesh is not None:
        _check_device(torch.device(device), device_mesh)
    has_mesh = keywords.get("expt_device_mesh") is not None
    num_experts = 0
    for name, parameter in module.named_parameters():
        known = annotation_of(parameter)
        # Megatron-FSDP knows experts by their names.
        is_named = has_mesh and ".experts." in f".{name}"
        if known.is_expert or is_named or not getattr(parameter, "allreduce", True):
            num_experts += 1
            set_annotation(parameter, replace(known, is_expert=True))
    declare_experts(module)
    if has_mesh and not num_experts:
        raise ValueError(
            expected(
                "parameters of experts: below a module named 'experts', with allreduce=False, or "
                "with annotate(parameter, is_expert=True)",
                "none",
                where=f"fully_shard_model() on {type(module).__name__}, with expt_device_mesh",
                hint="Name or mark them, or leave expt_device_mesh out",
            )
        )
    if device is not None and not keywords.get("init_model_with_meta_device"):
        module.to(device)


def _check_device(device: torch.device, mesh: DeviceMesh) -> None:
    if device.type != mesh.device_type:
        raise ValueError(
            expected(
                f"a device of the mesh's type, {mesh.device_type}",
                f"{device}",
                where="device of fully_shard_model()",
                hint="Leave it out: the model is moved to the mesh's device",
            )
        )
