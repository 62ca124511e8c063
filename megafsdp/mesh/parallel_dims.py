"""Degrees of parallelism and the device meshes they make.

Only this file spells mesh axes: ``dp_outer`` (replicas of a sharded group, the slow network),
``dp_shard`` (ranks that divide parameters), ``cp`` (context), ``tp`` (tensor), ``ep`` (expert) and
``edp`` (ranks that divide the same experts).

Ranks are numbered with tp innermost, then cp. Expert parallelism has no ranks of its own: the
experts are shared out among ``ep`` neighbours, first ranks of tp, then of cp and dp_shard. Eight
ranks with dp_shard 4, tp 2 and ep 4::

    rank        0 1   2 3   4 5   6 7
    dp_shard     0     1     2     3
    tp          0 1   0 1   0 1   0 1
    edp             0           1
    ep          0 1   2 3   0 1   2 3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafsdp.errors import expected
from megafsdp.mesh.torch_private import default_store, flatten_mesh, new_group_options

DP_OUTER = "dp_outer"
DP_SHARD = "dp_shard"
CP = "cp"
TP = "tp"
EP = "ep"
EDP = "edp"
_FILL = -1
_IS_DEFAULT = "_megafsdp_is_default"


@dataclass(frozen=True, slots=True)
class Meshes:
    """The device meshes of a run, each as seen by this rank.

    Attributes:
        data: Ranks among which parameters, gradients and states are divided or replicated: 1-D
            (dp_shard) or 2-D (dp_outer, dp_shard). Its dp_shard includes the ranks of cp.
        tp: The ranks that share out a layer's tensors; None for degree 1.
        cp: The ranks that share out a sequence; None for degree 1.
        experts: Like ``data``, for the experts of one rank of ``ep``: 1-D (edp) or 2-D (dp_outer,
            edp). Its edp includes the ranks of tp that ep does not take, since tensor parallelism
            cuts no expert. None if it equals ``data``, because tp and ep are 1.
        ep: The ranks that share out a layer's experts; None for degree 1.
        data_rank: Which share of a global batch this rank reads; ranks that differ only in cp or tp
            read the same share.
        data_size: Number of shares of a global batch.
    """

    data: DeviceMesh
    tp: DeviceMesh | None
    cp: DeviceMesh | None
    experts: DeviceMesh | None
    ep: DeviceMesh | None
    data_rank: int
    data_size: int


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism, whose product without ``ep`` is the number of ranks.

    Attributes:
        dp_outer: Replicas of the sharded group (HSDP, HFSDP).
        dp_shard: Ranks that divide parameters, gradients and optimizer states; -1 takes all that
            are left.
        cp: Context parallel degree.
        tp: Tensor parallel degree.
        ep: Expert parallel degree, a divisor of dp_shard x cp x tp.
    """

    dp_outer: int = 1
    dp_shard: int = _FILL
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Check each degree by itself.

        Raises:
            ValueError: A degree is not a positive whole number nor, for ``dp_shard``, -1.
        """
        for name in (DP_OUTER, DP_SHARD, CP, TP, EP):
            degree = getattr(self, name)
            is_filled = name == DP_SHARD and degree == _FILL
            if not (isinstance(degree, Integral) and int(degree) >= 1) and not is_filled:
                also = " or -1" if name == DP_SHARD else ""
                raise ValueError(
                    expected(
                        f"a positive whole number{also}",
                        repr(degree),
                        where=f"mesh axis '{name}' of ParallelDims",
                        hint="Give a number of ranks, 1 for no parallelism of this kind",
                    )
                )

    def resolve(self, world_size: int) -> ParallelDims:
        """Return the same dims with ``dp_shard`` filled in.

        Raises:
            ValueError: The degrees do not multiply to ``world_size``, or the experts cannot be
                shared out among ``ep`` neighbours.
        """
        others = self.dp_outer * self.cp * self.tp
        shard = self.dp_shard
        if shard == _FILL:
            shard = max(world_size // others, 1)
        if shard * others != world_size:
            hint = f"Start {shard * others} processes, or set {DP_SHARD} to -1"
            if self.dp_shard == _FILL:
                hint = f"Start a multiple of {others} processes, or choose other degrees"
            raise ValueError(
                expected(
                    f"degrees that multiply to the world size {world_size}",
                    f"{DP_OUTER} {self.dp_outer} x {DP_SHARD} {shard} x {CP} {self.cp} x {TP}"
                    f" {self.tp}",
                    where="ParallelDims",
                    hint=hint,
                )
            )
        inner = world_size // self.dp_outer
        if inner % self.ep:
            raise ValueError(
                expected(
                    f"a divisor of {DP_SHARD} x {CP} x {TP} = {inner}",
                    self.ep,
                    where=f"mesh axis '{EP}' of ParallelDims",
                    hint="Experts are shared out within a sharded group: choose a smaller degree",
                )
            )
        return replace(self, dp_shard=shard)

    @property
    def data_size(self) -> int:
        """Return the number of shares of a global batch; the dims must be resolved."""
        assert self.dp_shard != _FILL, "resolve() comes first"
        return self.dp_outer * self.dp_shard

    def build(self, device_type: str) -> Meshes:
        """Make the meshes; collective over all ranks of the default process group.

        A mesh of one axis over all ranks uses that group. With NCCL the groups of other meshes run
        their collectives on streams of high priority.

        Raises:
            ValueError: The degrees do not fit the world size, or differ between ranks.
        """
        _require_same(self)
        dims = self.resolve(dist.get_world_size())
        outer = {} if dims.dp_outer == 1 else {DP_OUTER: dims.dp_outer}
        data_axes, expert_axes = (*outer, DP_SHARD), (*outer, EDP)
        inner_size = dims.dp_shard * dims.cp
        tp = {} if dims.tp == 1 else {TP: dims.tp}
        # Data axes and tp share one root mesh, on all of which main weights lie.
        dense = _root(device_type, outer | {DP_SHARD: inner_size} | tp)
        cp = experts = None
        if dims.cp > 1:
            cp = _root(device_type, {"dp": dims.data_size, CP: dims.cp, TP: dims.tp})
        ep = {} if dims.ep == 1 else {EP: dims.ep}
        if tp or ep:
            edp_size = inner_size * dims.tp // dims.ep
            experts = _root(device_type, outer | {EDP: edp_size} | ep)
        return Meshes(
            data=dense[data_axes] if tp else dense,
            tp=dense[TP] if tp else None,
            cp=None if cp is None else cp[CP],
            experts=experts[expert_axes] if experts is not None and ep else experts,
            ep=experts[EP] if experts is not None and ep else None,
            data_rank=dist.get_rank() // (dims.cp * dims.tp),
            data_size=dims.data_size,
        )


def _require_same(dims: ParallelDims) -> None:
    """Check through the rendezvous store that all ranks make the same meshes.

    Ranks with different dims would make process groups in different orders, and wait for each
    other.

    Raises:
        ValueError: The dims differ; on all ranks.
    """
    size = dist.get_world_size()
    # Nothing to check in a fake group: its other ranks do not exist.
    if size == 1 or dist.get_backend() == "fake":
        return
    base = dist.PrefixStore("megafsdp/dims", default_store())
    # Number the calls: no rank enters a second time before all have entered the first time.
    store = dist.PrefixStore(str((base.add("entered", 1) - 1) // size), base)
    own, first = repr(dims), store.compare_set("first", "", repr(dims)).decode()
    if own != first:
        store.set("other", own)
    if store.add("arrived", 1) == size:
        has_other = store.check(["other"])
        store.set("answer", store.get("other").decode() if has_other else first)
    # get() waits for the last rank.
    if (other := store.get("answer").decode()) != first:
        raise ValueError(
            expected(
                "the same degrees on all ranks",
                f"{first} on some, {other} on others",
                where="ParallelDims.build()",
                hint="Start all ranks with the same configuration",
            )
        )


def _root(device_type: str, degrees: dict[str, int]) -> DeviceMesh:
    """Make a mesh of all ranks with the given size of each axis, the last one innermost."""
    options: dict[int | str, Any] = {}
    if len(degrees) > 1:
        # torch writes a group's name into its options, so each axis needs its own options.
        for name in degrees:
            if made := new_group_options():
                options[name] = (None, made["pg_options"])
    return init_device_mesh(
        device_type,
        tuple(degrees.values()),
        mesh_dim_names=tuple(degrees),
        backend_override=options or None,
    )


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh, in row-major order.

    Collective on first use with a mesh of several axes; for equal meshes torch makes one group.
    """
    return mesh.get_group() if mesh.ndim == 1 else flatten_mesh(mesh).get_group()


def default_mesh(device_type: str) -> DeviceMesh:
    """Make a 1-D mesh of all ranks; collective over all ranks of the default process group."""
    mesh = _root(device_type, {DP_SHARD: dist.get_world_size()})
    setattr(mesh, _IS_DEFAULT, True)
    return mesh


def is_default(mesh: DeviceMesh) -> bool:
    """Return whether :func:`default_mesh` made a mesh, since the user gave none."""
    # By a mark: a mesh of the user's may be equal.
    return getattr(mesh, _IS_DEFAULT, False)
