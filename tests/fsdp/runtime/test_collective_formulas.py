"""Collectives and bytes of a step are those of the table in docs/design, Schedule.

n groups that communicate, r of them kept after forward, m microbatches, of which c are complete by
themselves: one with ``microbatch()``, all m in a plain loop. Beyond the table each complete
backward makes one exchange of usage, unless there is one rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megafsdp import MixedPrecisionPolicy, clip_grad_norm_, microbatch
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from tests.end_to_end.strategy_cases import ENGINES, MIXED_ENGINES, MeshShape, Odd
from tests.fsdp.toy import Net, batches, mine
from tests.pairwise import each_value, gate_of
from tests.ranks import Ranks

NUM_BLOCKS = 3
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
KIND_OF_OP = {
    "_allgather_base_": "all_gather",
    "alltoall_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


class CountC10d(TorchDispatchMode):
    """Count the c10d operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Count and run."""
        if func.namespace == "c10d":
            kind = KIND_OF_OP[func._schema.name.removeprefix("c10d::")]
            # Two ranks gather by an all-to-all too, into a part of a buffer.
            output = args[0]
            is_part = kind == "reduce_scatter" and output.untyped_storage().nbytes() > output.nbytes
            self.calls["all_gather" if is_part else kind] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Setting:
    """The quantities of the formulas.

    Attributes:
        n: Parameter groups.
        r: Those kept after forward.
        m: Microbatches.
        c: Backwards that are complete.
        weight_nbytes: Compute weights of all groups in full, padding included; gradients before
            reduction take the same.
        kept_nbytes: Those of the groups kept after forward.
        main_grad_nbytes: Gradients in full, in the dtype of the main gradients.
        num_shards: Ranks among which buffers are gathered.
        num_exchanges: All-to-alls that one reduction of all groups takes on gloo: one for each
            sub-buffer, which count as one reduce-scatter a group; none on one rank.
        num_outer_exchanges: The same over the outer axis, where that divides main weights.
        num_sub_buffers: Sub-buffers of all groups.
        num_kept_sub_buffers: Those of the groups kept after forward.
        num_replicas: Ranks of the outer axis, 1 without one.
    """

    n: int
    r: int
    m: int
    c: int
    weight_nbytes: int
    kept_nbytes: int
    main_grad_nbytes: int
    num_shards: int
    num_exchanges: int
    num_outer_exchanges: int = 0
    num_sub_buffers: int = 0
    num_kept_sub_buffers: int = 0
    num_replicas: int = 2

    @property
    def i(self) -> int:
        """Return 1 where the inner axis exchanges anything, 0 where it is one rank."""
        return int(self.num_shards > 1)

    @property
    def o(self) -> int:
        """Return the same of the outer axis."""
        return int(self.num_replicas > 1)

    @property
    def deferred_nbytes(self) -> int:
        """Return the bytes of one full gradient that may have waited, in fp32 then."""
        return self.weight_nbytes if self.c == self.m else self.main_grad_nbytes


Table = dict[str, Callable[[Setting], tuple[int, int, int]]]

# All-gathers, reduce-scatters and all-reduces of one step that is not the first.
CALLS: Table = {
    "no_shard": lambda s: (0, 0, s.i * s.n * s.c),
    "optim": lambda s: (s.i * s.n, s.i * s.n * s.c, 0),
    "optim_grads": lambda s: (s.i * s.n, s.i * s.n * s.m, 0),
    "optim_grads_params": lambda s: (s.i * (2 * s.n - s.r) * s.m, s.i * s.n * s.m, 0),
    "hsdp": lambda s: (s.i * (2 * s.n - s.r) * s.m, s.i * s.n * s.m, s.o * s.n * s.c),
    "hfsdp": lambda s: (
        s.i * (2 * s.n - s.r) * s.m + s.o * s.n,
        s.i * s.n * s.m + s.o * s.n * s.c,
        0,
    ),
}
# Their bytes, on the full-size side.
NBYTES: Table = {
    "no_shard": lambda s: (0, 0, s.i * s.main_grad_nbytes * s.c),
    "optim": lambda s: (s.i * s.weight_nbytes, s.i * s.deferred_nbytes * s.c, 0),
    "optim_grads": lambda s: (s.i * s.weight_nbytes, s.i * s.weight_nbytes * s.m, 0),
    "optim_grads_params": lambda s: (
        s.i * (2 * s.weight_nbytes - s.kept_nbytes) * s.m,
        s.i * s.weight_nbytes * s.m,
        0,
    ),
    "hsdp": lambda s: (
        s.i * (2 * s.weight_nbytes - s.kept_nbytes) * s.m,
        s.i * s.weight_nbytes * s.m,
        s.o * s.main_grad_nbytes // s.num_shards * s.c,
    ),
    "hfsdp": lambda s: (
        s.i * (2 * s.weight_nbytes - s.kept_nbytes) * s.m + s.o * s.weight_nbytes // s.num_shards,
        s.i * s.weight_nbytes * s.m + s.o * s.main_grad_nbytes // s.num_shards * s.c,
        0,
    ),
}


def _net(engine: str, shape: MeshShape, **options: object) -> Net:
    given = (ENGINES | MIXED_ENGINES)[engine]
    return _adopted(given.with_options(**options).shard(Net(NUM_BLOCKS), shape))


def _adopted(net: nn.Module) -> nn.Module:
    """Let the units agree on their layouts, which the first forward would do."""
    net._fsdp_unit().require_context()
    return net


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def _step(
    net: nn.Module, optimizer: torch.optim.Optimizer, num_microbatches: int, in_microbatch: bool
) -> tuple[CollectiveRecord, Counter[str]]:
    with record_collectives() as record, CountC10d() as dispatched:
        for k, batch in enumerate(batches(num_microbatches)):
            with microbatch(net, is_last=k == num_microbatches - 1 or not in_microbatch):
                net(*mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return record, dispatched.calls


def _setting(net: Net, num_microbatches: int, in_microbatch: bool) -> Setting:
    units = [module._fsdp_unit() for module in (net, *net.blocks)]
    groups = [group for unit in units for group in unit.groups]
    kept = [*units[0].groups, *units[-1].groups]
    return Setting(
        n=len(groups),
        r=len(kept),
        m=num_microbatches,
        c=1 if in_microbatch else num_microbatches,
        weight_nbytes=sum(g.layout.gathered_numel * g.dtypes.compute.itemsize for g in groups),
        kept_nbytes=sum(g.layout.gathered_numel * g.dtypes.compute.itemsize for g in kept),
        main_grad_nbytes=sum(g.layout.gathered_numel * g.dtypes.grad.itemsize for g in groups),
        num_shards=groups[0].axes.group.size(),
        num_exchanges=_num_exchanges([g for g in groups if g.axes.is_sharded]),
        num_outer_exchanges=_num_outer_exchanges(groups),
        num_sub_buffers=_num_sub_buffers(groups),
        num_kept_sub_buffers=_num_sub_buffers(kept),
        num_replicas=1 if (outer := groups[0].axes.outer_group) is None else outer.size(),
    )


def _num_sub_buffers(groups: Iterable[ParameterGroup]) -> int:
    return sum(len(group.layout.sub_buffers) for group in groups)


def _num_exchanges(groups: list[ParameterGroup]) -> int:
    return _num_sub_buffers(g for g in groups if g.axes.group.size() > 1)


def _num_outer_exchanges(groups: list[ParameterGroup]) -> int:
    return _num_sub_buffers(g for g in groups if g.axes.num_pieces > 1)


def _check_step(
    engine: str, shape: MeshShape, dtype: torch.dtype, num_microbatches: int, in_microbatch: bool
) -> None:
    net = _net(engine, shape, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    optimizer = _optimizer(net)
    _step(net, optimizer, 1, False)
    setting = _setting(net, num_microbatches, in_microbatch)
    assert (setting.n, setting.r) == (NUM_BLOCKS + 1, 2)
    num_votes = _num_votes(setting)
    num_flags = len(list(net.parameters()))
    record, dispatched = _step(net, optimizer, num_microbatches, in_microbatch)
    wanted = _wanted_calls(engine, setting)
    assert tuple(record.calls[kind] for kind in KINDS) == wanted
    assert set(record.calls) <= set(KINDS)
    *nbytes, all_reduced_nbytes = NBYTES[engine](setting)
    wanted_nbytes = (*nbytes, all_reduced_nbytes + num_votes * num_flags)
    assert tuple(record.nbytes[kind] for kind in KINDS) == wanted_nbytes
    num_outer = setting.o * setting.c if engine == "hfsdp" else 0
    num_reductions = wanted[1] // setting.n - num_outer
    assert dispatched["reduce_scatter"] == (
        num_reductions * setting.num_exchanges + num_outer * setting.num_outer_exchanges
    )
    # On gloo each sub-buffer is gathered by itself.
    sub_buffers = replace(setting, n=setting.num_sub_buffers, r=setting.num_kept_sub_buffers)
    assert dispatched["all_gather"] == CALLS[engine](sub_buffers)[0]
    assert dispatched["all_reduce"] == wanted[2]


def _num_votes(setting: Setting) -> int:
    return 0 if dist.get_world_size() == 1 else setting.c


def _wanted_calls(engine: str, setting: Setting) -> tuple[int, int, int]:
    all_gathers, reduce_scatters, all_reduces = CALLS[engine](setting)
    return all_gathers, reduce_scatters, all_reduces + _num_votes(setting)


MATRIX = pytest.mark.matrix("collective-formulas")
NAMES = ("engine", "mesh", "dtype", "num_microbatches", "in_microbatch")
PRODUCT = [
    (name, shape, dtype, num_microbatches, in_microbatch)
    for name in CALLS
    for shape in ENGINES[name].meshes
    for dtype in (torch.float32, torch.bfloat16)
    for num_microbatches in (1, 3)
    for in_microbatch in (False, True)
]
# Every engine in both loops, whose formulas differ with three microbatches, and every other value;
# four ranks on one axis run one strategy.
_BY_LOOP = {
    ((engine, in_microbatch), mesh, dtype): (engine, mesh, dtype, m, in_microbatch)
    for engine, mesh, dtype, m, in_microbatch in PRODUCT
    if m == 3 and mesh != (1,) and (mesh != (4,) or engine == "optim_grads_params")
}
SELECTED = [
    *(_BY_LOOP[case] for case in each_value(list(_BY_LOOP))),
    ("optim", (2,), torch.float32, 1, False),
    ("optim_grads_params", (1,), torch.bfloat16, 1, True),
]


@pytest.mark.parametrize(NAMES, gate_of(PRODUCT, "collective-formulas", SELECTED))
def test_a_step_issues_exactly_the_collectives_of_the_formula(
    ranks: Ranks,
    engine: str,
    mesh: MeshShape,
    dtype: torch.dtype,
    num_microbatches: int,
    in_microbatch: bool,
) -> None:
    """Calls, bytes, and what torch dispatches, of the second step."""
    ranks(math.prod(mesh)).run(_check_step, engine, mesh, dtype, num_microbatches, in_microbatch)


def _first_step() -> list[int]:
    net = _net("optim_grads_params", (2,))
    optimizer = _optimizer(net)
    return [_step(net, optimizer, 1, False)[0].calls["all_gather"] for _ in range(2)]


def test_the_last_unit_keeps_its_storage_once_the_order_is_known(ranks: Ranks) -> None:
    """2n - 1 all-gathers in the first step, 2n - 2 from the second on."""
    n = NUM_BLOCKS + 1
    assert ranks(2).run(_first_step) == [[2 * n - 1, 2 * n - 2]] * 2


def _kept_by_wish() -> list[int]:
    net = _net("optim_grads_params", (2,), reshard_after_forward=False)
    optimizer = _optimizer(net)
    return [
        _step(net, optimizer, 3, in_microbatch)[0].calls["all_gather"]
        for in_microbatch in (False, True)
    ]


def test_parameters_kept_after_forward_are_gathered_once(ranks: Ranks) -> None:
    """reshard_after_forward=False takes nm all-gathers, the first step included."""
    assert ranks(2).run(_kept_by_wish) == [[3 * (NUM_BLOCKS + 1)] * 2] * 2


class Recomputing(Net):
    """The toy with its blocks' activations recomputed."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _recomputing(engine: str, shape: MeshShape) -> None:
    net = _adopted(ENGINES[engine].shard(Recomputing(NUM_BLOCKS), shape))
    optimizer = _optimizer(net)
    _step(net, optimizer, 1, False)
    record, _ = _step(net, optimizer, 2, True)
    assert tuple(record.calls[kind] for kind in KINDS) == _wanted_calls(
        engine, _setting(net, 2, True)
    )
    assert set(record.calls) <= set(KINDS)


@pytest.mark.parametrize("engine", list(CALLS))
def test_recomputation_of_activations_adds_no_collective(ranks: Ranks, engine: str) -> None:
    """The counts of the formula with blocks under torch's checkpoint()."""
    shape = ENGINES[engine].meshes[0 if engine in ("hsdp", "hfsdp") else 1]
    ranks(math.prod(shape)).run(_recomputing, engine, shape)


def _clipped(engine: str, shape: MeshShape) -> dict[str, int]:
    net = _net(engine, shape)
    net(*mine(batches(1)[0])).backward()
    with record_collectives() as record:
        clip_grad_norm_(net, 1.0)
    return dict(record.calls)


@pytest.mark.parametrize("engine", list(CALLS))
def test_clipping_adds_one_all_reduce(ranks: Ranks, engine: str) -> None:
    """For the norm; a rank that holds everything needs none."""
    shape = ENGINES[engine].meshes[0 if engine in ("hsdp", "hfsdp") else 1]
    wanted = {} if engine == "no_shard" else {"all_reduce": 1}
    for calls in ranks(math.prod(shape)).run(_clipped, engine, shape):
        assert calls == wanted


def _odd_groups(
    num_microbatches: int, in_microbatch: bool
) -> tuple[dict[str, int], dict[str, int]]:
    net = ENGINES["optim_grads_params"].shard(Odd(), (2,))

    def step() -> None:
        for k, batch in enumerate(batches(num_microbatches)):
            with microbatch(net, is_last=k == num_microbatches - 1 or not in_microbatch):
                net(*mine(batch), 0).backward()
        net.zero_grad()

    step()
    with record_collectives() as record, CountC10d() as dispatched:
        step()
    root, first, last = (
        [group for group in module._fsdp_unit().groups if group.axes.is_sharded]
        for module in (net, *net.blocks)
    )
    gathered = [*root, *first, *last]
    reduced = [group for group in gathered if group.is_trainable]
    assert dispatched.calls["reduce_scatter"] == _num_exchanges(reduced) * num_microbatches
    num_gathers = 2 * _num_exchanges(gathered) - _num_exchanges([*root, *last])
    assert dispatched.calls["all_gather"] == num_gathers * num_microbatches
    return dict(record.calls), dict(dispatched.calls)


@pytest.mark.parametrize("in_microbatch", [False, True])
def test_frozen_groups_gather_and_whole_groups_all_reduce(
    ranks: Ranks, in_microbatch: bool
) -> None:
    """Two blocks and a root, each with a trainable and a frozen group; the blocks own a scalar."""
    m = 3
    c = 1 if in_microbatch else m
    num_sharded, num_kept, num_trainable, num_whole = 6, 4, 3, 2
    for calls, dispatched in ranks(2).run(_odd_groups, m, in_microbatch):
        assert calls == {
            "all_gather": (2 * num_sharded - num_kept) * m,
            "reduce_scatter": num_trainable * m,
            "all_reduce": (num_whole + 1) * c,
        }
        assert dispatched["all_reduce"] == calls["all_reduce"]


def _mixed(
    engine: str, shape: MeshShape, num_microbatches: int, in_microbatch: bool
) -> dict[str, int]:
    net = _net(engine, shape)
    optimizer = _optimizer(net)
    _step(net, optimizer, 1, False)
    return dict(_step(net, optimizer, num_microbatches, in_microbatch)[0].calls)


@pytest.mark.parametrize(
    ("engine", "mesh", "blocks", "root", "in_microbatch"),
    [
        ("zero3_under_no_shard", (2,), "optim_grads_params", "no_shard", False),
        ("zero3_under_no_shard", (2,), "optim_grads_params", "no_shard", True),
        ("zero3_under_zero1", (2,), "optim_grads_params", "optim", False),
        ("zero3_under_zero1", (2,), "optim_grads_params", "optim", True),
        ("hsdp_under_zero3", (2, 2), "hsdp", "optim_grads_params", True),
        ("hsdp_under_no_shard", (2, 2), "hsdp", "no_shard", False),
        pytest.param("hsdp_under_zero3", (2, 2), "hsdp", "optim_grads_params", False, marks=MATRIX),
        pytest.param("hsdp_under_no_shard", (2, 2), "hsdp", "no_shard", True, marks=MATRIX),
    ],
)
def test_mixed_strategies_add_their_formulas(
    ranks: Ranks, engine: str, mesh: MeshShape, blocks: str, root: str, in_microbatch: bool
) -> None:
    """The blocks' formula, one of them kept, and the root's; one exchange of usage for both."""
    m = 3
    c = 1 if in_microbatch else m
    parts = (
        CALLS[blocks](Setting(NUM_BLOCKS, 1, m, c, 0, 0, 0, 2, 0)),
        CALLS[root](Setting(1, 1, m, c, 0, 0, 0, 2, 0)),
    )
    all_gathers, reduce_scatters, all_reduces = (sum(kind) for kind in zip(*parts, strict=True))
    for calls in ranks(math.prod(mesh)).run(_mixed, engine, mesh, m, in_microbatch):
        assert [calls[kind] for kind in KINDS] == [all_gathers, reduce_scatters, all_reduces + c]
