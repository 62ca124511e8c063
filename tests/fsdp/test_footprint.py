"""What a step is said to cost, against the ledger and the counters of real steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import MixedPrecisionPolicy, clip_grad_norm_, microbatch
from megafsdp.buffer.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.uneven import local_tensor
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.fsdp.arguments import strategy_of
from megafsdp.fsdp.blueprint import PlannedUnit, ShardDegrees, plan_units
from megafsdp.fsdp.footprint import Footprint, StepPlan, Traffic, footprint_of
from megafsdp.fsdp.unit import units_below
from tests.fsdp.toy import Block, Net, batches, mine, shard
from tests.ranks import Ranks

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
    reshard_after_forward: bool | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    num_microbatches: int = 1
    is_told: bool = True
    dp_outer: int = 1
    is_frozen: bool = False

    @property
    def num_states(self) -> int:
        """Return 2 for AdamW, 0 for SGD where torch's AdamW refuses the gradients' dtype."""
        return 2 if self.policy.main_grads_dtype is None else 0

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
    layouts: list[list[object]]


def _measure(case: Case) -> Measured:
    options: dict[str, object] = {
        "strategy": case.strategy,
        "prefetch": case.prefetch,
        "reshard_after_forward": case.reshard_after_forward,
        "mp_policy": case.policy,
    }
    if case.dp_outer > 1:
        shape = (case.dp_outer, dist.get_world_size() // case.dp_outer)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    net = shard(case.model(), **options)
    trainable = [p for p in net.parameters() if p.requires_grad]
    kind = torch.optim.AdamW if case.num_states else torch.optim.SGD
    optimizer = kind(trainable, lr=1e-3)
    ledger = net._fsdp_unit().ledger
    for num_microbatches in (1, 1, case.num_microbatches):
        ledger.reset_peak()
        with record_collectives() as record:
            for k, batch in enumerate(batches(num_microbatches)):
                with microbatch(net, is_last=not case.is_told or k == num_microbatches - 1):
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


def _plan(case: Case, num_ranks: int, *, is_outer_sharded: bool = False) -> list[PlannedUnit]:
    with torch.device("meta"):
        model = case.model()
    degrees = ShardDegrees(num_ranks // case.dp_outer, case.dp_outer, is_outer_sharded)
    strategy = strategy_of(case.strategy)
    return plan_units(model, [Block], degrees, strategy=strategy, policy=case.policy)


def _predict(case: Case, num_ranks: int, *, is_outer_sharded: bool = False) -> Footprint:
    step = StepPlan(
        num_microbatches=case.num_microbatches,
        is_told=case.is_told,
        prefetch=case.prefetch,
        reshard_after_forward=case.reshard_after_forward,
        num_states=case.num_states,
    )
    degrees = ShardDegrees(num_ranks // case.dp_outer, case.dp_outer, is_outer_sharded)
    return footprint_of(_plan(case, num_ranks, is_outer_sharded=is_outer_sharded), degrees, step)


def _by_kind(traffic: dict[tuple[str, str], Traffic]) -> dict[str, tuple[int, int]]:
    """Return (calls, bytes) by kind over all axes."""
    total: dict[str, tuple[int, int]] = {}
    for (_, kind), item in traffic.items():
        calls, nbytes = total.get(kind, (0, 0))
        total[kind] = calls + item.calls, nbytes + item.nbytes
    return total


def _assert_equal(measured: list[Measured], case: Case) -> None:
    num_ranks = len(measured)
    footprint, units = _predict(case, num_ranks), _plan(case, num_ranks)
    layouts = [[group.layout for group in unit.groups] for unit in units]
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
MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16
)


@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), BF16, MIXED], ids=["fp32", "bf16", "low"]
)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_on_two_ranks_costs_what_was_said(
    ranks: Ranks, strategy: str, prefetch: int, policy: MixedPrecisionPolicy
) -> None:
    """Bytes by category, at rest and at their peak, and collectives, to the byte."""
    # The number of microbatches and the kind of loop walk with the other choices.
    told = {0: (1, True), 1: (3, True), 2: (3, False)}
    num_microbatches, is_told = told[(prefetch + STRATEGIES.index(strategy)) % 3]
    case = Case(strategy, prefetch, None, policy, num_microbatches, is_told)
    _assert_equal(ranks(2).run(_measure, case), case)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_resharding_after_forward_is_followed(
    ranks: Ranks, prefetch: int, reshard_after_forward: bool
) -> None:
    """The root is gathered twice, or nothing is."""
    case = Case(prefetch=prefetch, reshard_after_forward=reshard_after_forward)
    _assert_equal(ranks(2).run(_measure, case), case)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_groups_are_gathered_and_never_reduced(ranks: Ranks, strategy: str) -> None:
    """A frozen group has no main gradient and no state; kept weights are gathered once for all."""
    case = Case(strategy, num_microbatches=2, policy=BF16, is_frozen=True)
    _assert_equal(ranks(2).run(_measure, case), case)
    groups = [g for unit in _plan(case, 2) for g in unit.groups]
    assert sum(not g.is_trainable for g in groups) == NUM_BLOCKS


@pytest.mark.parametrize(("num_microbatches", "is_told"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED], ids=["fp32", "low"])
def test_hsdp_on_four_ranks_costs_what_was_said(
    ranks: Ranks, policy: MixedPrecisionPolicy, num_microbatches: int, is_told: bool
) -> None:
    """Inner sums wait for the last microbatch and are freed one by one."""
    case = Case(policy=policy, num_microbatches=num_microbatches, is_told=is_told, dp_outer=2)
    _assert_equal(ranks(4).run(_measure, case), case)
