"""The loss scale moves as Megatron's, and a step that overflows on one rank is skipped on all."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.kernels.square_sum import known_square_sums, remember_square_sum
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.training.config.optimizer_sections import LossScaleSection
from tests.fsdp.toy import Net, adamw, batches, full_grads, mine, pair, shard
from tests.ranks import Ranks

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


def _step(scaler: LossScaler, is_finite: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, 1.0 if is_finite else math.inf, 1.0])
    assert scaler.step(torch.optim.SGD([parameter], lr=0.1)) == is_finite
    scaler.update()


# The scale in use at each step under Megatron-LM's rule, worked out by hand: hysteresis is refilled
# by growth alone, never by a finite step.
@pytest.mark.parametrize(
    ("window", "hysteresis", "steps", "scales"),
    [
        (3, 2, "...!!!...!", [8, 8, 8, 16, 16, 8, 4, 4, 4, 8, 8]),
        (3, 1, "!..!...", [8, 4, 4, 4, 2, 2, 2, 4]),
        (2, 3, "!.!.!.!", [8, 8, 8, 8, 8, 4, 4, 2]),
        (2, 2, "!..!..!", [8, 8, 8, 16, 16, 16, 32, 32]),
        (5, 1, "!!!!!", [8, 4, 2, 1, 1, 1]),
    ],
)
def test_the_scale_moves_as_megatrons(
    window: int, hysteresis: int, steps: str, scales: list[float]
) -> None:
    """Growth after a window, backing off after hysteresis, a floor."""
    scaler = LossScaler(ScaleRule(8.0, growth_window=window, hysteresis=hysteresis))
    seen = [scaler.current_scale]
    for step in steps:
        _step(scaler, step == ".")
        seen.append(scaler.current_scale)
    assert seen == scales


def test_the_first_scale_is_megatrons() -> None:
    """The default is dynamic and starts at 2^32."""
    assert LossScaler().current_scale == 2.0**32
    assert LossScaler().scale(torch.tensor(2.0)).item() == 2.0**33


def test_the_rule_of_a_run_is_megatrons_by_default() -> None:
    """As the scaler's: 2^32, doubled after 1000 finite steps, halved at the second overflow."""
    rule = ScaleRule()
    assert (rule.initial_scale, rule.min_scale) == (2.0**32, 1.0)
    assert (rule.growth_factor, rule.backoff_factor) == (2.0, 0.5)
    assert (rule.growth_window, rule.hysteresis) == (1000, 2)
    assert rule.is_dynamic
    section = LossScaleSection()
    assert (section.initial, section.window, section.hysteresis) == (2.0**32, 1000, 2)
    assert section.rule() == rule
    state = rule.start()
    for _ in range(999):
        state = rule.after(state, is_finite=True)
    assert state.scale == 2.0**32
    assert rule.after(state, is_finite=True).scale == 2.0**33
    state = rule.after(state, is_finite=False)
    assert state.scale == 2.0**32
    assert rule.after(state, is_finite=False).scale == 2.0**31


def test_a_constant_scale_stays_and_skips_all_the_same() -> None:
    """Neither many finite steps nor an infinite one move it."""
    scaler = LossScaler(ScaleRule.constant(128.0))
    for is_finite in [True] * 5 + [False] * 5:
        _step(scaler, is_finite)
    assert scaler.current_scale == 128.0


def test_a_scaler_resumes_where_it_was() -> None:
    """A scaler that takes over a state moves as the one it came from."""
    rule = ScaleRule(8.0, growth_window=3, hysteresis=2)
    first = LossScaler(rule)
    for step in "..!.":
        _step(first, step == ".")
    second = LossScaler(rule)
    second.load_state_dict(first.state_dict())
    scales = []
    for scaler in (first, second):
        scales.append([])
        for step in "..!!...":
            _step(scaler, step == ".")
            scales[-1].append(scaler.current_scale)
    assert scales[0] == scales[1] == [8, 16, 16, 8, 8, 8, 16]


def test_the_scale_stays_finite_in_fp32() -> None:
    """Where no step ever overflows, as without gradients, and after a load of an infinite one."""
    rule = ScaleRule(2.0**126, growth_window=1, hysteresis=1)
    scaler, loaded = LossScaler(rule), LossScaler(rule)
    for _ in range(4):
        scaler.update(is_finite=True)
    assert scaler.current_scale == 2.0**127
    loaded.load_state_dict(scaler.state_dict() | {"scale": math.inf})
    assert loaded.current_scale == 2.0**127
    loaded.update(is_finite=False)
    assert loaded.current_scale == 2.0**126


def test_a_shorter_window_grows_at_the_next_finite_step() -> None:
    """A loaded state may have more finite steps than the window."""
    first, second = (LossScaler(ScaleRule(8.0, growth_window=window)) for window in (9, 2))
    for _ in range(5):
        first.update(is_finite=True)
    second.load_state_dict(first.state_dict())
    second.update(is_finite=True)
    assert second.current_scale == 16.0


def test_the_state_of_torchs_scaler_is_refused() -> None:
    """With how to go on from it."""
    with pytest.raises(ValueError, match=r"ScaleRule\(initial_scale=state\['scale'\]\)"):
        LossScaler().load_state_dict(torch.amp.GradScaler("cpu").state_dict())


def test_a_constant_scale_is_not_a_stored_one() -> None:
    """What is configured stays, whatever another scaler's state says."""
    dynamic, constant = LossScaler(ScaleRule(8.0)), LossScaler(ScaleRule.constant(128.0))
    constant.load_state_dict(dynamic.state_dict())
    assert constant.current_scale == 128.0


def test_a_decision_made_elsewhere_moves_the_scale() -> None:
    """Whoever finds by other means whether a step is finite tells update()."""
    scaler = LossScaler(ScaleRule(8.0, growth_window=2, hysteresis=1))
    scales = []
    for is_finite in (False, True, True):
        scaler.update(is_finite=is_finite)
        scales.append(scaler.current_scale)
    assert scales == [4.0, 4.0, 8.0]
    with pytest.raises(RuntimeError, match="a step since the last update"):
        scaler.update()


@pytest.mark.parametrize(
    "values",
    [
        {"initial_scale": 0.5},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_window": 0},
        {"hysteresis": 0},
        {"initial_scale": math.inf},
        {"initial_scale": 2.0**128},
    ],
)
def test_rules_that_cannot_work_are_refused(values: dict[str, float]) -> None:
    """Each value out of its range raises."""
    with pytest.raises(ValueError, match="Expected 0 < min_scale"):
        ScaleRule(**values)


def test_calls_out_of_turn_are_refused() -> None:
    """Each step is unscaled once, with all its optimizers, and then updated."""
    a, b = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    scaler = LossScaler()
    with pytest.raises(RuntimeError, match="a step since the last update"):
        scaler.update()
    scaler.unscale_(a)
    with pytest.raises(RuntimeError, match="one unscale_"):
        scaler.unscale_(a)
    with pytest.raises(RuntimeError, match="whose gradients are unscaled"):
        scaler.step(b)
    scaler.update()
    scaler.unscale_(a, b)
    assert scaler.step(a)
    assert scaler.step(b)


def test_a_gradient_of_two_optimizers_is_unscaled_once() -> None:
    """Also where one optimizer is given twice."""
    shared, own = (nn.Parameter(torch.ones(2)) for _ in range(2))
    both, one = (torch.optim.SGD(params, lr=0.1) for params in ([shared, own], [shared]))
    for optimizers in ((both, one), (both, both)):
        shared.grad, own.grad = torch.full((2,), 16.0), torch.full((2,), -8.0)
        assert LossScaler(ScaleRule.constant(8.0)).unscale_(*optimizers)
        assert torch.equal(shared.grad, torch.full((2,), 2.0))
        assert torch.equal(own.grad, torch.full((2,), -1.0))


def test_gradients_of_every_dtype_are_looked_at() -> None:
    """One that is not finite counts, whichever comes first."""
    for bad in range(2):
        dtypes = (torch.float32, torch.bfloat16)
        params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        params[bad].grad[1] = math.inf
        assert not LossScaler().unscale_(torch.optim.SGD(params, lr=0.1))


def _without_parameters() -> bool:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), math.inf)
    own = [parameter] if dist.get_rank() == 1 else []
    return LossScaler().step(torch.optim.SGD([{"params": own}], lr=0.1))


def test_ranks_without_parameters_agree_with_the_others(ranks: Ranks) -> None:
    """As the last stage of a pipeline may freeze all that it has."""
    assert ranks(2).run(_without_parameters) == [False, False]


def _of_own_group() -> bool:
    groups = [dist.new_group([rank]) for rank in range(2)]
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), math.inf if dist.get_rank() == 1 else 1.0)
    scaler = LossScaler(group=groups[dist.get_rank()])
    return scaler.step(torch.optim.SGD([parameter], lr=0.1))


def test_only_the_ranks_of_a_group_agree(ranks: Ranks) -> None:
    """Others may skip a step that these make."""
    assert ranks(2).run(_of_own_group) == [True, False]


def test_a_kept_sum_of_squares_ends_with_unscaling() -> None:
    """The norm that clips is then that of the unscaled gradients."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 8.0)
    remember_square_sum(parameter.grad)
    LossScaler(ScaleRule.constant(8.0)).unscale_(torch.optim.SGD([parameter], lr=0.1))
    assert known_square_sums([parameter.grad]).tolist() == [4.0]


def test_fp16_gradients_are_refused() -> None:
    """They could not hold what the scale was for."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="gradients in fp32 or bf16"):
        LossScaler().unscale_(torch.optim.SGD([parameter], lr=0.1))


def test_decoupled_gradients_are_unscaled_and_looked_at() -> None:
    """The gradients that a step reads are those that count, wherever they are kept."""
    parameter = nn.Parameter(torch.ones(2))
    # Of an earlier pass, which the step does not read.
    parameter.grad = torch.full((2,), math.inf)
    optimizer = FusedAdam([parameter], lr=0.1, use_decoupled_grad=True)
    scaler = LossScaler(ScaleRule.constant(8.0))
    parameter.decoupled_grad = torch.tensor([math.inf, 1.0], dtype=torch.bfloat16)
    assert not scaler.step(optimizer)
    assert torch.equal(parameter.detach(), torch.ones(2))
    scaler.update()
    parameter.decoupled_grad = torch.tensor([16.0, -8.0], dtype=torch.bfloat16)
    assert scaler.step(optimizer)
    assert parameter.decoupled_grad.tolist() == [2.0, -1.0]
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9, 1.1]))


def _skip(strategy: str, bad_rank: int, value: float) -> None:
    net = Net(num_blocks=1)
    net.scale = nn.Parameter(torch.full((3,), 2.0))
    shard(net, strategy=strategy, ignored_params={net.scale})
    optimizer = adamw(net)
    scaler = LossScaler(ScaleRule(1024.0, hysteresis=1))
    for is_good in (True, False, True):
        before = full_state_dict(net)
        states = [local_tensor(optimizer.state[p]["exp_avg"]).clone() for p in optimizer.state]
        scaler.scale(net(*mine(batches(1)[0]))).backward()
        net.scale.grad = torch.full((3,), 512.0)
        if not is_good and dist.get_rank() == bad_rank:
            # The last element that this rank holds of anything that is sharded.
            grads = [p.grad for p in net.parameters() if isinstance(p, UnevenDTensor)]
            held = [g.local for g in grads if g.local.numel()] or [net.scale.grad]
            held[-1].view(-1)[-1] = value
        with record_collectives() as record:
            assert scaler.step(optimizer) == is_good
        assert record.calls["all_reduce"] == 1
        scaler.update()
        groups = {id(g): g for p in net.parameters() if (g := group_of(p)) is not None}
        assert groups
        assert {g.compute_weight.is_stale for g in groups.values()} == {is_good}
        after = full_state_dict(net)
        assert all(torch.equal(after[n], before[n]) != is_good for n in after)
        if not is_good:
            moments = [local_tensor(optimizer.state[p]["exp_avg"]) for p in optimizer.state]
            assert all(torch.equal(a, b) for a, b in zip(states, moments, strict=True))
            assert scaler.current_scale == 512.0
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@pytest.mark.parametrize(("bad_rank", "value"), [(0, math.inf), (1, math.nan)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, strategy: str, bad_rank: int, value: float
) -> None:
    """Weights, states and compute weights stay; the next step is taken again."""
    ranks(2).run(_skip, strategy, bad_rank, value)


def _unscaled_grads(strategy: str) -> None:
    _, net = pair(strategy=strategy)
    batch = mine(batches(1)[0])
    net(*batch).backward()
    wanted = full_grads(net)
    net.zero_grad()
    scaler = LossScaler()
    scaler.scale(net(*batch)).backward()
    assert scaler.unscale_(adamw(net))
    for name, grad in full_grads(net).items():
        assert torch.equal(grad, wanted[name]), name


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_unscaled_gradients_are_those_of_the_loss_itself(ranks: Ranks, strategy: str) -> None:
    """In fp32 a power of two is taken off without rounding."""
    ranks(2).run(_unscaled_grads, strategy)


def _gaps() -> tuple[int, bool]:
    _, net = pair()
    net(*mine(batches(1)[0])).backward()
    num_gap_elements = 0
    grads = [p.grad for p in net.parameters()]
    for storage in {g.local.untyped_storage().data_ptr(): g.local for g in grads}.values():
        flat = torch.empty(0, dtype=storage.dtype).set_(storage.untyped_storage())
        is_gap = torch.ones(flat.numel(), dtype=torch.bool)
        for grad in (g.local for g in grads):
            if grad.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr():
                start = grad.storage_offset()
                is_gap[start : start + grad.numel()] = False
        flat[is_gap] = math.inf
        num_gap_elements += int(is_gap.sum())
    return num_gap_elements, LossScaler().unscale_(adamw(net))


def test_gaps_of_flat_buffers_are_not_read(ranks: Ranks) -> None:
    """Infinite gaps skip nothing."""
    results = ranks(3).run(_gaps)
    assert all(is_finite for _, is_finite in results)
    assert sum(num_gap_elements for num_gap_elements, _ in results) > 0


def _fp16_trains() -> tuple[int, float]:
    reference, net = pair(mp_policy=FP16)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (reference, net)]
    scaler = LossScaler()
    num_skipped, step, errors = 0, 0, []
    while step < 6:
        batch = batches(1, seed=step)[0]
        loss = net(*mine(batch))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[1])
        clip_grad_norm_(net, 100.0)
        is_stepped = scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()
        if not is_stepped:
            num_skipped += 1
            assert num_skipped < 40
            continue
        expected = reference(*batch)
        expected.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 100.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
        dist.all_reduce(loss := loss.detach().clone(), op=dist.ReduceOp.AVG)
        errors.append(abs(loss.item() - expected.item()) / expected.item())
        step += 1
    return num_skipped, max(errors)


def test_fp16_training_follows_fp32(ranks: Ranks) -> None:
    """From 2^32 the scale finds its range by skipping; losses then stay within 1e-3 of fp32's.

    fp16 rounds by 5e-4 and errors of weights add up over six steps of SGD, which follows the size
    of gradients; steps of another size move the loss by more than 1e-1.
    """
    for num_skipped, error in ranks(2).run(_fp16_trains):
        assert num_skipped > 5
        assert error < 1e-3, error


def test_checkpoints_carry_the_scaler(tmp_path: Path) -> None:
    """What ``save`` stores of a scaler, ``load`` gives to another."""
    model = nn.Linear(2, 2)
    rule = ScaleRule(8.0, growth_window=3, hysteresis=2)
    saved, loaded = LossScaler(rule), LossScaler(rule)
    for step in "..!.":
        _step(saved, step == ".")
    checkpoint.save(tmp_path, step=1, model=model, loss_scaler=saved)
    checkpoint.load(tmp_path, model=model, loss_scaler=loaded)
    assert loaded.state_dict() == saved.state_dict() != LossScaler(rule).state_dict()


class _TensorParallel(nn.Module):
    """Layers of which tensor parallelism cuts one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.cut = nn.Linear(6, 8), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a loss is made of."""
        return self.cut(self.whole(x))


def _torchs_scale(kind: str) -> tuple[float, list[bool]]:
    net = _TensorParallel()
    if kind == "tp":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net.cut, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        fully_shard(net, mesh=mesh["dp"])
    else:
        # Their gradients come first, and all ranks have all of them.
        fully_shard(net.whole, strategy=kind)
        fully_shard(net)
    optimizer, scaler = adamw(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(net(torch.ones(2, 6)).sum()).backward()
    rows = local_tensor(net.cut.weight.grad)
    if dist.get_rank() == 1:
        rows.view(-1)[-1] = math.inf
    before = {name: local_tensor(p).clone() for name, p in net.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    stayed = [torch.equal(local_tensor(p), before[name]) for name, p in net.named_parameters()]
    return scaler.get_scale(), stayed


@pytest.mark.parametrize("kind", ["no_shard", "optim", "tp"])
def test_torchs_scaler_skips_on_all_ranks_whatever_cuts_the_first_gradient(
    ranks: Ranks, kind: str
) -> None:
    """Torch asks the ranks of the first gradient alone; the infinite one is of others."""
    assert ranks(2).run(_torchs_scale, kind) == [(2.0, [True] * 4)] * 2
