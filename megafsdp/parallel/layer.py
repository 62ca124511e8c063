"""What all parallel layers have in common: declarations, the cut by a mesh, initial values.

The one order of calls that gives right parameters is

    construct -> set_device_mesh() -> fully_shard() -> reset_parameters() or materialize() ->
    optimizer

``set_device_mesh`` turns every parameter into a DTensor on the tp mesh, from which ``fully_shard``
(ours and torch's) learns the model axis; ``parallelize`` makes stacks of experts DTensors on the ep
mesh instead. This file issues no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from typing_extensions import Self

from megafsdp.errors import expected
from megafsdp.mesh.annotation import ParameterAnnotation, annotate
from megafsdp.mesh.model_part import ModelPart, part_of
from megafsdp.parallel.local import draw_whole, localized

_ORDER = (
    "Call in this order: construct the model, set_device_mesh(), fully_shard(), reset_parameters() "
    "or megafsdp.materialize(), then make the optimizer"
)


class ParallelModule(nn.Module):
    """A module whose parameters, or those of modules below it, tensor parallelism may cut.

    A layer with parameters says by ``declarations`` what cuts each of them, and by
    :meth:`initialize` what values the whole tensor starts from. A module that is only put together
    from such layers inherits :meth:`set_device_mesh` for all of them. Parameters without a
    declaration stay plain, and every rank of tp has them whole.

    Attributes:
        declarations: What the layer declares about its own parameters, by attribute.
        computes_on_part: The forward takes this rank's part of each parameter as a plain tensor.
        shares_heads_over_cp: Each rank of cp computes a part of the heads of a rank of tp: their
            product is a degree that :meth:`check_degree` must allow.
        tp_mesh: Mesh of the ranks that have the other parts; None before ``set_device_mesh``.
        cp_mesh: Mesh of the ranks that have the other tokens of a sequence; None before
            ``parallelize``, and where this rank has all.
        ep_mesh: Mesh of the ranks that have the other experts of a stack; None before
            ``parallelize``, and where this rank has all.
        weight_mesh: Ranks over which a quantization recipe's maxima of a weight are combined;
            None means the ranks that divide the weight, never replicas.
    """

    # Class attributes, so that a module without parameters needs no constructor for them.
    declarations: Mapping[str, ParameterAnnotation] = MappingProxyType({})
    computes_on_part = True
    shares_heads_over_cp = False
    tp_mesh: DeviceMesh | None = None
    cp_mesh: DeviceMesh | None = None
    ep_mesh: DeviceMesh | None = None
    weight_mesh: DeviceMesh | None = None

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Return the ranks to exchange with in forward; None where there are no others."""
        mesh = self.tp_mesh
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that have the other tokens; None where there are no others."""
        mesh = self.cp_mesh
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()

    def initialize(self, name: str, whole: Tensor) -> None:
        """Write the initial values of a parameter to the whole tensor, in place."""
        raise NotImplementedError(f"{type(self).__name__} has no initial values for '{name}'")

    def check_degree(self, degree: int) -> None:
        """Raise ValueError unless a tensor-parallel degree gives all ranks equal parts."""
        for name, parameter in self._own_parameters():
            declared = self.declarations[name]
            extents = [parameter.shape[declared.tp_dim]] if declared.tp_dim is not None else []
            if declared.fused is not None and declared.fused.dim == declared.tp_dim:
                groups = declared.fused.num_groups
                extents = list(declared.fused.sizes) if groups == 1 else [groups]
            if any(extent % degree for extent in extents):
                raise ValueError(
                    expected(
                        f"a tensor-parallel degree that divides {extents}",
                        degree,
                        where=f"set_device_mesh(), '{name}' of {self}",
                        hint="Choose another degree, or pad the weight",
                    )
                )

    def annotate_parameters(self) -> None:
        """Write the declarations on the parameters, where engines and checkpoints read them."""
        for name, parameter in self._own_parameters():
            declared = self.declarations[name]
            annotate(
                parameter,
                tp_dim=declared.tp_dim,
                is_expert=declared.is_expert,
                fused=declared.fused,
                sums_over_tp=declared.sums_over_tp,
                weight_mesh=self.weight_mesh,
                is_linear_weight=declared.is_linear_weight,
            )

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise this layer's own parameters again: plain ones, DTensors, sharded ones.

        Every rank draws the whole tensor from its default generator and keeps its own part, so the
        values are those of one process with the same random state.

        Args:
            defer_init: True draws nothing; a later call, or ``megafsdp.materialize()``, does.
        """
        if defer_init:
            return
        for name, parameter in self._own_parameters():

            def fill(whole: Tensor, name: str = name) -> None:
                self.initialize(name, whole)

            draw_whole(parameter, self._part_of(name, parameter.shape), fill)

    def set_device_mesh(
        self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None
    ) -> None:
        """Keep this rank's part of every parameter here and below, as a DTensor on ``tp_mesh``.

        Values that exist are cut, and so are shapes on the meta device. Parameters that modules
        below share stay shared. Local; either everything is changed or the call raises.

        Args:
            tp_mesh: 1-D mesh of the ranks that have the parts; None leaves the parameters as they
                are.
            weight_mesh: 1-D mesh of the ranks that combine a recipe's maxima of each weight, in
                place of those that divide it. It must contain all ranks of the data axis that
                divides the weight; ``fully_shard`` checks that.

        Raises:
            ValueError: A mesh has several axes, is of another device than the parameters, or does
                not contain this rank; or its size does not divide a dimension that it cuts.
            RuntimeError: The parameters have been cut or sharded before.
        """
        set_mesh_below(self, tp_mesh, weight_mesh)

    def _start(self, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None) -> None:
        """End a constructor: initial values unless on the meta device, declarations, meshes."""
        is_meta = any(parameter.is_meta for _, parameter in self._own_parameters())
        self.reset_parameters(defer_init=is_meta)
        self.annotate_parameters()
        if tp_mesh is not None or weight_mesh is not None:
            self.set_device_mesh(tp_mesh, weight_mesh)

    def _localized(self, name: str) -> Tensor:
        """Return the plain tensor of one of the layer's own parameters, for a kernel."""
        parameter = self._parameters[name]
        assert parameter is not None, f"'{name}' is a parameter of this layer"
        is_sum = self.declarations[name].sums_over_tp and self.ep_mesh is None
        return localized(parameter, sums_over_tp=is_sum)

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._parameters.items():
            if parameter is not None and name in self.declarations:
                yield name, parameter

    def _part_of(self, name: str, shape: torch.Size) -> ModelPart | None:
        """Return this rank's part of a tensor by tp, or of a stack by ep; None without a mesh."""
        declared = self.declarations[name]
        mesh, dim = self.tp_mesh, declared.tp_dim
        if self.ep_mesh is not None:
            # The experts of a stack lie along its first dim.
            mesh, dim = self.ep_mesh, 0
        if mesh is None:
            return None
        return part_of(tuple(shape), dim, mesh.size(), mesh.get_local_rank(), declared.fused)

    def _is_cut_already(self, name: str, parameter: nn.Parameter, tp_mesh: DeviceMesh) -> bool:
        """Return whether a parameter that another module owns too is cut as it must be."""
        return False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty() on a meta module makes new Parameter objects, which lose what was written on
        # the old ones; every conversion goes through here.
        super()._apply(fn, recurse)
        self.annotate_parameters()
        return self


def set_mesh_below(
    root: nn.Module,
    tp_mesh: DeviceMesh | None,
    weight_mesh: DeviceMesh | None,
    *,
    ep_mesh: DeviceMesh | None = None,
    experts: Collection[ParallelModule] = (),
) -> None:
    """Call :meth:`ParallelModule.set_device_mesh` on all parallel layers of any module at once.

    Args:
        root: The module.
        tp_mesh: As for the method.
        weight_mesh: As for the method.
        ep_mesh: Ranks that share out the stacks of ``experts``; None leaves them whole.
        experts: Layers below that ``ep_mesh`` cuts in place of ``tp_mesh``.
    """
    modules = [m for m in root.modules() if isinstance(m, ParallelModule)]
    for name, mesh in (("tp_mesh", tp_mesh), ("ep_mesh", ep_mesh), ("weight_mesh", weight_mesh)):
        if mesh is not None:
            _check_mesh(mesh, name, modules)
    axes = {module: ep_mesh if module in experts else tp_mesh for module in modules}
    if tp_mesh is not None or ep_mesh is not None:
        _check_sharding(root)
    for module, axis in axes.items():
        if axis is not None:
            _check_time(module, axis)
        if axis is not None and module not in experts:
            module.check_degree(axis.size())
    # Keyed by the old object: parameters that modules share are cut once, and stay shared.
    cut: dict[int, nn.Parameter] = {}
    for module, axis in axes.items():
        module.weight_mesh = weight_mesh
        if axis is not None:
            setattr(module, "ep_mesh" if module in experts else "tp_mesh", axis)
            _cut_parameters(module, axis, cut)
        module.annotate_parameters()


def _cut_parameters(module: ParallelModule, mesh: DeviceMesh, cut: dict[int, nn.Parameter]) -> None:
    for name, parameter in list(module._own_parameters()):
        if not isinstance(parameter, DTensor):
            part = module._part_of(name, parameter.shape)
            assert part is not None, "the mesh is set"
            if id(parameter) not in cut:
                cut[id(parameter)] = _cut(parameter, part, mesh)
            setattr(module, name, cut[id(parameter)])


def _cut(parameter: nn.Parameter, part: ModelPart, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter over this rank's part, with the attributes that users set on the old."""
    whole = parameter.detach()
    # A copy of a part, so that the whole is freed.
    own = whole if part.dim is None else part.cut(whole).clone()
    placement = Replicate() if part.dim is None else Shard(part.dim)
    dtensor = DTensor.from_local(
        own, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    made = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(made, name, value)
    return made


def _check_mesh(mesh: DeviceMesh, name: str, modules: list[ParallelModule]) -> None:
    devices = {p.device.type for m in modules for _, p in m._own_parameters()} - {"meta"}
    if mesh.ndim != 1:
        what, got = "a mesh of one axis", f"{mesh.ndim} axes of sizes {tuple(mesh.shape)}"
        hint = "Slice it by the axis's name, or flatten several axes first"
    elif mesh.get_coordinate() is None:
        what, got = "a mesh that contains this rank", f"ranks {mesh.mesh.tolist()}"
        hint = "Build the mesh with init_device_mesh() on all ranks and slice it"
    elif devices - {mesh.device_type}:
        what, got = f"a mesh of {', '.join(sorted(devices))}", f"one of {mesh.device_type}"
        hint = "Move the model to the mesh's device first"
    else:
        return
    rank = dist.get_rank()
    raise ValueError(
        expected(what, got, where=f"{name} of set_device_mesh(), rank {rank}", hint=hint)
    )


def _check_sharding(root: nn.Module) -> None:
    # Look for units, not DTensors: gathered parameters are plain, as torch leaves those of a root.
    units = [name for name, module in root.named_modules() if isinstance(module, FSDPModule)]
    if units:
        raise _wrong_time(f"the unit '{units[0]}' of fully_shard()", root)


def _check_time(module: ParallelModule, mesh: DeviceMesh) -> None:
    if module.tp_mesh is not None or module.ep_mesh is not None:
        raise _wrong_time("a second call", module)
    for name, parameter in module._own_parameters():
        if not isinstance(parameter, DTensor):
            continue
        if not module._is_cut_already(name, parameter, mesh):
            raise _wrong_time(f"'{name}' with placements {parameter.placements}", module)


def _wrong_time(got: str, module: nn.Module) -> RuntimeError:
    where = f"set_device_mesh() of {type(module).__name__}"
    return RuntimeError(
        expected("set_device_mesh() once, before fully_shard()", got, where=where, hint=_ORDER)
    )
