"""What a step is said to cost, against the ledger and the counters of real steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import MixedPrecisionPolicy, clip_grad_norm_, microbatch
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.buffer.layout import FlatLayout, TensorSpec
from megafsdp.buffer.planner import plan_layout
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.fsdp.estimate.footprint import (
    NEIGHBOURS,
    Footprint,
    StepPlan,
    Traffic,
    footprint_of,
    owned_numels,
)
from megafsdp.fsdp.estimate.meta_engine import MetaEngine, PlannedUnit, fake_ranks
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.parallel_dims import DP_OUTER, DP_SHARD, ParallelDims
from tests.fsdp.runtime.test_slabs import registering
from tests.fsdp.toy import Block, Net, batches, mine, shard
from tests.pairwise import each_value, gate_of
from tests.ranks import Ranks
from tests.strategies import shape_sets, world_sizes

NUM_BLOCKS = 4
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ENGINE_CATEGORIES = [c for c in Category if c is not Category.OPTIMIZER_STATE]


class GainNet(Net):
    """The toy with a parameter that cannot be cut: it has no dimension."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the toy's loss times the gain."""
        return super().forward(tokens, labels) * self.gain


@dataclass(frozen=True)
class Case:
    """One way to run a step."""

    strategy: str = "optim_grads_params"
    prefetch: int = 1
    reshard_after_forward: bool | int | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    num_microbatches: int = 1
    in_microbatch: bool = True
    dp_outer: int = 1
    is_outer_sharded: bool = False
    is_frozen: bool = False
    nccl_user_buffers: bool = False

    @property
    def num_states(self) -> int:
        """Return 2 for AdamW, 0 for SGD where torch's AdamW refuses the gradients' dtype."""
        return 2 if self.policy.main_grads_dtype is None else 0

    @property
    def step(self) -> StepPlan:
        """Return the same for the prediction."""
        return StepPlan(
            num_microbatches=self.num_microbatches,
            in_microbatch=self.in_microbatch,
            num_states=self.num_states,
        )

    def model(self) -> GainNet:
        """Build the model on the default device."""
        net = GainNet(NUM_BLOCKS)
        for block in net.blocks:
            block.up.requires_grad_(not self.is_frozen)
        return net


@dataclass
class Measured:
    """What a real step cost."""

    ledger: ByteLedger
    record: CollectiveRecord
    state_nbytes: int
    layouts: list[list[FlatLayout]]


def _measure(case: Case) -> Measured:
    options: dict[str, object] = {
        "strategy": case.strategy,
        "prefetch": case.prefetch,
        "reshard_after_forward": case.reshard_after_forward,
        "mp_policy": case.policy,
        "nccl_user_buffers": case.nccl_user_buffers,
    }
    if case.dp_outer > 1:
        shape = (case.dp_outer, dist.get_world_size() // case.dp_outer)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        options["outer_strategy"] = "optim" if case.is_outer_sharded else "no_shard"
    net = shard(case.model(), **options)
    # gloo registers no memory: the pools are those of the plan.
    with registering():
        net._fsdp_unit().require_context()
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = (
        torch.optim.AdamW(trainable, fused=True)
        if case.num_states
        else torch.optim.SGD(trainable, lr=1e-3)
    )
    ledger = net._fsdp_unit().ledger
    for num_microbatches in (1, 1, case.num_microbatches):
        ledger.reset_peak()
        with record_collectives() as record:
            for k, batch in enumerate(batches(num_microbatches)):
                with microbatch(net, is_last=not case.in_microbatch or k == num_microbatches - 1):
                    net(*mine(batch)).backward()
            clip_grad_norm_(net, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq") if k in s]
    state_nbytes = sum(t.numel() * t.element_size() for t in map(local_tensor, moments))
    units = units_below([net]).values()
    layouts = [[g.layout for g in u.groups] for u in units]
    # A copy: the ledger itself is credited when the net is freed.
    return Measured(copy.deepcopy(ledger), record, state_nbytes, layouts)


def _engine(
    case: Case, num_ranks: int, *, is_outer_sharded: bool = False, sums_in_library: bool = True
) -> MetaEngine:
    with torch.device("meta"):
        model = case.model()
    return MetaEngine(
        model,
        [Block],
        ParallelDims(case.dp_outer, num_ranks // case.dp_outer).build("meta"),
        sums_in_library=sums_in_library,
        strategy=case.strategy,
        outer_strategy="optim" if is_outer_sharded else "no_shard",
        mp_policy=case.policy,
        prefetch=case.prefetch,
        reshard_after_forward=case.reshard_after_forward,
        nccl_user_buffers=case.nccl_user_buffers,
    )


def _plan(case: Case, num_ranks: int, *, is_outer_sharded: bool = False) -> list[PlannedUnit]:
    with fake_ranks(num_ranks):
        return _engine(case, num_ranks, is_outer_sharded=is_outer_sharded).plan()


def _predict(case: Case, num_ranks: int, *, is_outer_sharded: bool = False) -> Footprint:
    with fake_ranks(num_ranks):
        return footprint_of(_engine(case, num_ranks, is_outer_sharded=is_outer_sharded), case.step)


def _by_kind(traffic: dict[tuple[str, str], Traffic]) -> dict[str, tuple[int, int]]:
    """Return (calls, bytes) by kind over all axes."""
    total: dict[str, tuple[int, int]] = {}
    for (_, kind), item in traffic.items():
        calls, nbytes = total.get(kind, (0, 0))
        total[kind] = calls + item.calls, nbytes + item.nbytes
    return total


def _assert_equal(measured: list[Measured], case: Case) -> None:
    num_ranks = len(measured)
    with fake_ranks(num_ranks):
        engine = _engine(
            case, num_ranks, is_outer_sharded=case.is_outer_sharded, sums_in_library=False
        )
        footprint = footprint_of(engine, case.step)
        layouts = [[group.layout for group in unit.groups] for unit in engine.plan()]
    for one in measured:
        assert one.layouts == layouts
        for category in ENGINE_CATEGORIES:
            assert footprint.peak[category] == one.ledger.peak[category], category
            assert footprint.resting[category] == one.ledger.live[category], category
        states = footprint.resting[Category.OPTIMIZER_STATE]
        assert footprint.peak_total - states == one.ledger.peak_total
        kinds = _by_kind(footprint.traffic)
        assert {k: v[0] for k, v in kinds.items()} == dict(one.record.calls)
        assert {k: v[1] for k, v in kinds.items()} == dict(one.record.nbytes)
    assert max(one.state_nbytes for one in measured) == states
    assert (states > 0) == (case.num_states > 0)


BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_fp32=("LayerNorm",)
)
NARROW_SUM = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16
)


# Block formats take the odd sizes of the toy; its head is tied and stays as it is.
CODES = MixedPrecisionPolicy(torch.bfloat16, recipe="fp8_block")

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": BF16,
    "narrow sum": NARROW_SUM,
    "low": MIXED,
    "codes": CODES,
}
LOOPS = [(1, True), (3, True), (3, False)]
PRODUCT_NAME = "footprint"
ON_ONE_AXIS = [
    (strategy, prefetch, policy, *loop, is_frozen)
    for strategy in STRATEGIES
    for prefetch in (0, 1, 2)
    for policy in ("fp32", "bf16", "low", "codes")
    for loop in LOOPS
    for is_frozen in (False, True)
]
ON_TWO_AXES = [
    (is_outer_sharded, policy, *loop)
    for is_outer_sharded in (False, True)
    for policy in ("fp32", "narrow sum", "low", "codes")
    for loop in LOOPS
]


@pytest.mark.parametrize(
    ("strategy", "prefetch", "policy", "num_microbatches", "in_microbatch", "is_frozen"),
    gate_of(ON_ONE_AXIS, PRODUCT_NAME, each_value(ON_ONE_AXIS)),
)
def test_a_step_on_two_ranks_costs_what_was_said(
    ranks: Ranks,
    strategy: str,
    prefetch: int,
    policy: str,
    num_microbatches: int,
    in_microbatch: bool,
    is_frozen: bool,
) -> None:
    """Bytes by category, at rest and at their peak, and collectives, to the byte."""
    case = Case(
        strategy,
        prefetch,
        policy=POLICIES[policy],
        num_microbatches=num_microbatches,
        in_microbatch=in_microbatch,
        is_frozen=is_frozen,
    )
    _assert_equal(ranks(2).run(_measure, case), case)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_resharding_after_forward_is_followed(
    ranks: Ranks, prefetch: int, reshard_after_forward: bool
) -> None:
    """The root is gathered twice, or nothing is."""
    case = Case(prefetch=prefetch, reshard_after_forward=reshard_after_forward)
    _assert_equal(ranks(2).run(_measure, case), case)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_slabs_of_registered_memory_are_counted(ranks: Ranks, prefetch: int) -> None:
    """At rest, too."""
    case = Case(prefetch=prefetch, policy=BF16, nccl_user_buffers=True)
    _assert_equal(ranks(2).run(_measure, case), case)
    resting = _predict(case, 2).resting[Category.UNSHARDED]
    assert resting > _predict(replace(case, nccl_user_buffers=False), 2).resting[Category.UNSHARDED]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_groups_are_planned_apart(strategy: str) -> None:
    """Each block has a group that is never reduced."""
    groups = [
        g for unit in _plan(Case(strategy, policy=BF16, is_frozen=True), 2) for g in unit.groups
    ]
    assert sum(not g.is_trainable for g in groups) == NUM_BLOCKS


@pytest.mark.parametrize(
    ("is_outer_sharded", "policy", "num_microbatches", "in_microbatch"),
    gate_of(ON_TWO_AXES, PRODUCT_NAME, each_value(ON_TWO_AXES)),
)
def test_a_step_on_two_axes_costs_what_was_said(
    ranks: Ranks, is_outer_sharded: bool, policy: str, num_microbatches: int, in_microbatch: bool
) -> None:
    """Inner sums wait for the last microbatch and are freed one by one.

    Pieces of main weights are joined once a step, all at once, and the casts that they are made of
    freed.
    """
    case = Case(
        policy=POLICIES[policy],
        num_microbatches=num_microbatches,
        in_microbatch=in_microbatch,
        dp_outer=2,
        is_outer_sharded=is_outer_sharded,
    )
    _assert_equal(ranks(4).run(_measure, case), case)


@pytest.mark.parametrize(
    ("policy", "num_microbatches"),
    gate_of(
        [(policy, num) for policy in ("fp32", "bf16", "codes") for num in (1, 2)],
        PRODUCT_NAME,
        selected=[("fp32", 1), ("codes", 2)],
    ),
)
def test_slices_kept_among_neighbours_cost_what_was_said(
    ranks: Ranks, policy: str, num_microbatches: int
) -> None:
    """Half of every unit between forward and backward, whose gather frees it."""
    case = Case(reshard_after_forward=2, policy=POLICIES[policy], num_microbatches=num_microbatches)
    _assert_equal(ranks(4).run(_measure, case), case)


@pytest.mark.parametrize("dp_outer", [1, 8])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_step_on_256_ranks_costs_what_was_said(strategy: str, dp_outer: int) -> None:
    """The engine with memory runs as one of many ranks; only rows owned differ between them."""
    case, num_ranks = Case(strategy, num_microbatches=2, policy=BF16, dp_outer=dp_outer), 256
    with fake_ranks(num_ranks):
        measured = _measure(case)
    footprint = _predict(case, num_ranks)
    for category in ENGINE_CATEGORIES:
        assert footprint.peak[category] == measured.ledger.peak[category], category
        assert footprint.resting[category] == measured.ledger.live[category], category
    calls = {kind: value[0] for kind, value in _by_kind(footprint.traffic).items()}
    assert calls == dict(measured.record.calls)
    assert footprint.resting[Category.OPTIMIZER_STATE] >= measured.state_nbytes


def _try_in_a_process_group() -> str:
    with pytest.raises(RuntimeError, match="Expected no process group") as caught, fake_ranks(4):
        pass
    assert dist.get_world_size() == 2, "the group is untouched"
    return str(caught.value)


def test_a_process_group_is_not_replaced(ranks: Ranks) -> None:
    """Ranks of a job cannot be ranks that do not exist at the same time."""
    for message in ranks(2).run(_try_in_a_process_group):
        assert "one of 2 rank(s)" in message and "process of its own" in message


def test_neighbours_that_are_all_ranks_are_no_neighbours() -> None:
    """Two of two ranks reshard as True does; no slices are made."""
    counts = [
        {key: item.calls for key, item in _predict(case, 4).traffic.items()}
        for case in (
            Case(reshard_after_forward=2, dp_outer=2),
            Case(reshard_after_forward=True, dp_outer=2),
        )
    ]
    assert counts[0] == counts[1]
    sliced = _predict(Case(reshard_after_forward=2), 4).traffic
    assert (NEIGHBOURS, "all_gather") in sliced


@pytest.mark.parametrize(("num_microbatches", "in_microbatch"), LOOPS)
def test_collectives_follow_the_formulas(num_microbatches: int, in_microbatch: bool) -> None:
    """N groups that communicate, r of them kept after forward, m microbatches."""
    n, r, m = NUM_BLOCKS + 1, 2, num_microbatches
    final = 1 if in_microbatch else m
    everywhere = f"{DP_OUTER} x {DP_SHARD}"
    options = {"num_microbatches": m, "in_microbatch": in_microbatch}

    def calls(case: Case, **how: bool) -> dict[tuple[str, str], int]:
        return {k: t.calls for k, t in _predict(case, 64, **how).traffic.items()}

    def on_shards(*, gathers: int, scatters: int) -> dict[tuple[str, str], int]:
        return {(DP_SHARD, "all_gather"): gathers, (DP_SHARD, "reduce_scatter"): scatters}

    # The gain is a replicated group of its own; usage is exchanged once a finalised backward.
    small = (2 * final) + 1
    assert calls(Case("no_shard", **options)) == {(DP_SHARD, "all_reduce"): (n + 2) * final}
    for strategy, gathers, scatters in (
        ("optim", n, n * final),
        ("optim_grads", n, n * m),
        ("optim_grads_params", (2 * n - r) * m, n * m),
    ):
        expected = on_shards(gathers=gathers, scatters=scatters)
        assert calls(Case(strategy, **options)) == {**expected, (DP_SHARD, "all_reduce"): small}
    zero3 = on_shards(gathers=(2 * n - r) * m, scatters=n * m)
    hybrid = Case(dp_outer=4, **options)
    assert calls(hybrid) == {
        **zero3,
        (DP_OUTER, "all_reduce"): n * final,
        (DP_SHARD, "all_reduce"): 1,
        (everywhere, "all_reduce"): 2 * final,
    }
    assert calls(hybrid, is_outer_sharded=True) == {
        **zero3,
        (DP_OUTER, "all_gather"): n,
        (DP_OUTER, "reduce_scatter"): n * final,
        (everywhere, "all_reduce"): small,
    }


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_main_weights_cut_over_both_axes_cost_the_formula(num_microbatches: int) -> None:
    """Main weight 1/(NM), compute weight 1/N at rest, inner sums 1/N while accumulating."""
    case = Case(policy=BF16, dp_outer=4, num_microbatches=num_microbatches)
    footprint = _predict(case, 32, is_outer_sharded=True)
    plan = _plan(case, 32, is_outer_sharded=True)
    groups = [g for unit in plan for g in unit.groups if g.is_sharded]
    whole = [g for unit in plan for g in unit.groups if not g.is_sharded]
    assert {g.layout.num_shards for g in groups} == {32}
    numel = sum(g.layout.gathered_numel for g in groups)
    computed = sum(g.layout.gathered_numel * g.dtypes.compute.itemsize for g in groups)
    scalar_nbytes = sum(4 * g.layout.shard_numel for g in whole)
    scalar_weight_nbytes = sum(2 * g.layout.shard_numel for g in whole)
    assert footprint.resting[Category.MAIN_WEIGHT] == 4 * numel // 32 + scalar_nbytes
    assert footprint.resting[Category.COMPUTE_WEIGHT] == computed // 8 + scalar_weight_nbytes
    assert footprint.resting[Category.MAIN_GRAD] == 0
    traffic = footprint.traffic
    assert traffic[DP_OUTER, "all_gather"].nbytes == computed // 8
    assert traffic[DP_OUTER, "reduce_scatter"].nbytes == 4 * numel // 8
    grads = footprint.peak[Category.MAIN_GRAD] - scalar_nbytes
    if num_microbatches > 1:
        first = max(g.layout.gathered_numel for g in groups)
        assert 4 * numel // 8 < grads <= 4 * (numel // 8 + numel // 32)
        assert grads >= 4 * (numel // 8 + first // 32)
    else:
        assert 4 * numel // 32 <= grads < 4 * numel // 8


@settings(max_examples=30)
@given(shape_sets(with_zero_dim=False, with_empty=False), world_sizes())
def test_owned_elements_are_those_of_the_owned_ranges(
    drawn: list[tuple[int, ...]], num_shards: int
) -> None:
    """Each shard's elements without gaps, as the layout itself tells them."""
    layout = plan_layout([TensorSpec(f"t{i}", s) for i, s in enumerate(drawn)], num_shards)
    expected = []
    for rank in range(num_shards):
        ranges = [layout.owned_range(i, rank) for i in range(len(layout.slots))]
        expected.append(sum(stop - start for start, stop in ranges))
    assert owned_numels(layout) == expected
