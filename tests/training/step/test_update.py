"""Norm, clipping and loss scale give the same steps in FusedAdam's pass and before it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megafsdp import FusedAdam, MixedPrecisionPolicy, full_state_dict
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.grads.clip import clip_coefficient
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.step.train_step import StepResult, TrainStep
from megafsdp.training.step.update import WeightUpdate
from tests.pairwise import gate_of
from tests.ranks import Ranks, RanksError
from tests.training.step.steps import batches_of, rows_of, sharded_model, tiny_model

CPU = torch.device("cpu")
FP32, FP16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.float16)
# So large an eps keeps the size of gradients in the steps: fp16's rounding is no step of its own.
LR, EPS = 3e-2, 1e-2
# '!' marks a step whose gradients overflow on the last rank alone.
PLAN = ".!!.!."
SCALES = [1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0]
WAYS = (
    ("optim_grads_params", "backward"),
    ("optim_grads_params", "reduced"),
    ("no_shard", "reduced"),
)
OVERFLOWS = list(itertools.product(("megafsdp", "torch"), ("fp32", "fp16"), WAYS))

Weights = dict[str, torch.Tensor]
Stepped = Callable[..., Weights]


class _Apart(FusedAdam):
    """Steps on gradients that were scaled in place before."""

    def step(self, closure: None = None) -> None:
        """Put the factors that ride in the step into the gradients first."""
        limit, self.max_grad_norm = self.max_grad_norm, None
        scale = getattr(self, "grad_scale", None)
        factor = clip_coefficient(self.grad_norm, limit) / (1.0 if scale is None else scale)
        if scale is not None:
            self.grad_scale = torch.ones(())
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_([local_tensor(g) for g in grads if g is not None], factor)
        super().step()
        self.max_grad_norm = limit


def _steps(kind: type[FusedAdam], clip_norm: float | None, scale: float | None) -> Weights:
    model = sharded_model()
    scaler = None if scale is None else LossScaler(ScaleRule.constant(scale))
    max_norm = math.inf if clip_norm is None else clip_norm
    optimizer = kind(model.parameters(), lr=LR, eps=EPS, max_grad_norm=max_norm)
    update = WeightUpdate(model, optimizer, clip_norm=clip_norm, scaler=scaler)
    for k in range(3):
        for batch in batches_of(k, dist.get_rank(), dist.get_world_size()):
            update.scale(model(batch.tokens, batch.labels, batch.loss_mask)).backward()
        assert update.measure() > 0.5
        update.take(False)
        update.settle(is_finite=True)
        assert not hasattr(optimizer, "grad_scale")
    return full_state_dict(model)


@pytest.fixture(scope="module")
def stepped(ranks: Ranks) -> Stepped:
    """Return a function for the weights after the steps; each way is trained once."""
    return functools.cache(lambda *way: ranks(2).run(_steps, *way)[0])


@pytest.mark.parametrize("scale", [None, 4096.0])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_factors_in_the_step_are_factors_before_it(
    stepped: Stepped, clip_norm: float | None, scale: float | None
) -> None:
    """Clipped and unscaled in FusedAdam's pass, or in place before it: equal to the last bit."""
    within = stepped(FusedAdam, clip_norm, scale)
    before = stepped(_Apart, clip_norm, scale)
    for name, weight in within.items():
        assert torch.equal(weight, before[name]), name
    plain = stepped(FusedAdam, clip_norm, None)
    # A power of two is taken off without rounding.
    assert all(torch.equal(within[name], plain[name]) for name in within)
    other = stepped(FusedAdam, 0.25, scale)
    assert not all(torch.equal(within[name], other[name]) for name in within)


def _make(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "megafsdp":
        options = {"weight_decay": 0.01, "max_grad_norm": 0.5}
        return FusedAdam(model.parameters(), lr=LR, eps=EPS, **options)
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.01)


def _overflow(model: torch.nn.Module, how: str, update: WeightUpdate) -> list[bool]:
    """Make gradients infinite on the last rank where the returned flag is set."""
    flag = [False]
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def in_backward(module: object, inputs: object, loss: torch.Tensor) -> None:
        if flag[0] and is_last:
            loss.register_hook(lambda grad: grad * math.inf)

    measure = update.measure

    def after_reduction() -> torch.Tensor:
        if flag[0] and is_last:
            held = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            next(grad for grad in held if grad.numel()).view(-1)[0] = math.inf
        return measure()

    if how == "backward":
        model.register_forward_hook(in_backward)
    else:
        update.measure = after_reduction  # type: ignore[method-assign]
    return flag


def _train(
    kind: str, strategy: str, how: str, policy: MixedPrecisionPolicy, rule: ScaleRule, plan: str
) -> tuple[list[StepResult], int, Weights]:
    model = sharded_model(strategy=strategy, mp_policy=policy)
    step = TrainStep(
        model,
        _make(kind, model),
        device=CPU,
        clip_norm=0.5,
        skips_nonfinite=False,
        max_skips=2,
        stop=StopRequest(CPU),
        scaler=LossScaler(rule),
    )
    flag = _overflow(model, how, step._update)
    results = []
    after = full_state_dict(model)
    for k, mark in enumerate(plan):
        flag[0], before = mark == "!", after
        results.append(step(batches_of(k, dist.get_rank(), dist.get_world_size())))
        after = full_state_dict(model)
        assert all(torch.equal(after[n], before[n]) for n in after) == results[-1].is_skipped
    return results, step.num_skips_in_a_row, after


@functools.cache
def _reference(num_ranks: int) -> tuple[list[float], list[float], Weights]:
    """Train in plain fp32 torch on whole batches, leaving out the steps that overflow."""
    model = tiny_model()
    optimizer = _make("torch", model)
    losses, norms = [], []
    for k, mark in enumerate(PLAN):
        rows = rows_of(k, num_ranks).flatten(0, 2)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        if mark == ".":
            optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "dtype", "way"), gate_of(OVERFLOWS, "overflows"))
def test_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, kind: str, dtype: str, way: tuple[str, str]
) -> None:
    """The scale halves once hysteresis is used up, and other steps are those of one process.

    In fp32 the tolerances are those of sums in another order over three steps of Adam. Backward in
    fp16 is wrong by about 1e-2 of a gradient, so by 1e-2 of a step of 3e-2; weights move by 8e-2.
    """
    losses, norms, weights = _reference(2)
    policy = FP32 if dtype == "fp32" else FP16
    rtol, atol = (1e-5, 1e-5) if policy is FP32 else (1e-2, 1e-3)
    rule = ScaleRule(1024.0, hysteresis=2)
    for results, num_counted, state in ranks(2).run(_train, kind, *way, policy, rule, PLAN):
        assert [r.is_skipped for r in results] == [mark == "!" for mark in PLAN]
        assert [r.loss_scale for r in results] == SCALES
        assert num_counted == 0
        for result, loss, norm in zip(results, losses, norms, strict=True):
            assert result.loss == pytest.approx(loss, rel=1e-5 if policy is FP32 else 2e-3)
            if not result.is_skipped:
                assert result.grad_norm == pytest.approx(norm, rel=rtol)
        for name, weight in weights.items():
            torch.testing.assert_close(state[name], weight, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "rule", [ScaleRule.constant(64.0), ScaleRule(64.0, min_scale=64.0)], ids=["constant", "lowest"]
)
def test_overflows_that_no_smaller_scale_mends_end_the_run(ranks: Ranks, rule: ScaleRule) -> None:
    """They are skipped, whatever the policy for NaN, and counted: a run does not skip for ever."""
    options = ("megafsdp", "optim_grads_params", "backward", FP32, rule)
    for results, num_counted, _ in ranks(2).run(_train, *options, ".!!"):
        assert [r.is_skipped for r in results] == [False, True, True]
        assert [r.loss_scale for r in results] == [64.0] * 3
        assert num_counted == 2
    with pytest.raises(RanksError, match="for 3 steps in a row") as failure:
        ranks(2).run(_train, *options, "!!!")
    assert set(failure.value.failures) == {0, 1}


def _refused(max_norm: float | None, leaves_one_out: bool) -> None:
    model = sharded_model()
    parameters = list(model.parameters())[leaves_one_out:]
    optimizer = FusedAdam(parameters, max_grad_norm=max_norm)
    match = "without this.*embedding" if leaves_one_out else "max_grad_norm=0.5, got"
    with pytest.raises(ValueError, match=match):
        WeightUpdate(model, optimizer, clip_norm=0.5, scaler=None)
    next(model.parameters()).requires_grad_(False)
    if leaves_one_out:
        WeightUpdate(model, optimizer, clip_norm=0.5, scaler=None)


@pytest.mark.parametrize(
    ("max_norm", "leaves_one_out"), [(None, False), (1.0, False), (math.inf, False), (0.5, True)]
)
def test_an_optimizer_that_clips_otherwise_is_refused(
    ranks: Ranks, max_norm: float | None, leaves_one_out: bool
) -> None:
    """By another limit, or by the norm of some of what is trained; frozen ones may be missing."""
    ranks(2).run(_refused, max_norm, leaves_one_out)


def _norms_are_reduced_once() -> list[str]:
    model = sharded_model()
    optimizer = FusedAdam(model.parameters(), max_grad_norm=0.5)
    update = WeightUpdate(model, optimizer, clip_norm=0.5, scaler=None)
    for batch in batches_of(0, dist.get_rank(), dist.get_world_size()):
        model(batch.tokens, batch.labels, batch.loss_mask).backward()
    with record_collectives() as record:
        update.measure()
        update.take(False)
    return [label for _, label in record.events]


def test_the_norm_is_reduced_once_a_step(ranks: Ranks) -> None:
    """The optimizer clips by what was measured to decide on the step."""
    assert ranks(2).run(_norms_are_reduced_once) == [["grad norm"]] * 2
