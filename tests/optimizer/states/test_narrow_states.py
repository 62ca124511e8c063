"""States in fp16 and FP8: what rounding may not do to a step, whose rows are cut, who owns them."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from megafsdp import FusedAdam
from megafsdp.optimizer.states.formats import ScaledState
from tests.ranks import Ranks

CPU = torch.device("cpu")
FP16, FP32, FP8 = torch.float16, torch.float32, torch.float8_e4m3fn
NARROW = {FP16: (32752.0, 2.0**-24), FP8: (448.0, 2.0**-9)}


@pytest.mark.parametrize("dtype", NARROW)
def test_positive_values_are_rounded_up_where_the_format_has_none_so_small(
    dtype: torch.dtype,
) -> None:
    """To its smallest one; zeros stay zero, others round as ever, and the codes are stable."""
    largest, smallest = NARROW[dtype]
    values = torch.tensor([[1.0, 0.5, 0.0, 1e-20, 1e-38, 0.0]])
    state = ScaledState.zeros(1, 6, dtype, CPU, keeps_positive=True)
    state.encode(values)
    least = smallest / largest
    torch.testing.assert_close(state.decode(), torch.tensor([[1.0, 0.5, 0.0, least, least, 0.0]]))
    codes = state.codes.view(torch.uint8).clone()
    state.encode(state.decode())
    assert torch.equal(state.codes.view(torch.uint8), codes)
    state.encode(torch.full((1, 6), 1e-44))
    assert not state.decode().any() and not state.codes.view(torch.uint8).any()
    signed = ScaledState.zeros(1, 6, dtype, CPU)
    signed.encode(values)
    assert not signed.decode()[0, 3:].any()


@pytest.mark.parametrize("dtype", [FP16, FP8])
@pytest.mark.parametrize("small", [1e-2, 1e-3, 1e-5, 1e-12])
def test_small_gradients_beside_a_large_one_make_no_large_step(
    dtype: torch.dtype, small: float
) -> None:
    """A second moment that rounded to zero would make the step its first moment over eps."""
    weight = nn.Parameter(torch.zeros(2, 200))
    optimizer = FusedAdam([weight], lr=1e-3, exp_avg_sq_dtype=dtype)
    for step in range(6):
        weight.grad = torch.zeros(2, 200)
        weight.grad[:, 0] = 1.0
        weight.grad[:, 1] = small if step == 0 else 0.0
        optimizer.step()
    # Adam itself moves it by 3.5e-3.
    assert 0 < weight[0, 1].abs() < 5e-3
    assert not weight[:, 2:].any()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("beta", [0.9, 0.99])
def test_values_beside_a_larger_one_decay_to_zero(dtype: torch.dtype, beta: float) -> None:
    """Each step makes them smaller, whatever their sign; zeros and the largest stay."""
    state = ScaledState.zeros(1, 128, dtype, CPU)
    values = torch.logspace(0, -6, 128).unsqueeze(0)
    values[0, 1::2] *= -1
    values[0, 126] = 0.0
    state.encode(values)
    before = state.decode()
    assert before[0, 1:100].all()
    # fp16 has 2^39 between its largest and smallest, of which 0.99 takes 2700 steps.
    for _ in range(5000):
        values = before * beta
        values[0, 0] = 1.0
        state.encode(values, is_step=True)
        after = state.decode()
        assert after[0, 0] == before[0, 0] and (after * before >= 0).all()
        fallen = (after.abs() < before.abs()) | (before == 0)
        assert fallen[0, 1:].all()
        before = after
        if not before[0, 1:].any():
            break
    assert not before[0, 1:].any()


@pytest.mark.parametrize("sq_dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [FP16, FP8])
def test_weights_whose_gradients_end_beside_others_come_to_rest(
    dtype: torch.dtype, sq_dtype: torch.dtype
) -> None:
    """A first moment that stayed would be divided by the root of an ever smaller second one."""
    weight = nn.Parameter(torch.zeros(2, 128))
    optimizer = FusedAdam([weight], lr=1e-3, exp_avg_dtype=dtype, exp_avg_sq_dtype=sq_dtype)
    generator = torch.Generator().manual_seed(0)
    moved = []
    for step in range(600):
        grad = torch.randn(2, 128, generator=generator)
        grad[:, 64:] *= 1e-4 if step < 50 else 0.0
        weight.grad = grad
        optimizer.step()
        if step in (49, 399, 599):
            moved.append(weight.detach()[:, 64:].clone())
    assert moved[0].abs().min() > 0
    # Adam itself moves none of them by more than 0.03.
    assert moved[1].abs().max() < 0.03
    assert torch.equal(moved[2], moved[1])
    assert not optimizer.get_unscaled_state(weight, "exp_avg")[:, 64:].any()


@pytest.mark.parametrize("dtype", NARROW)
def test_an_infinite_second_moment_leaves_its_block_finite(dtype: torch.dtype) -> None:
    """It stays infinite, no other becomes so or zero, and the codes are stable."""
    values = torch.tensor([[1e-4, float("inf"), 0.0, 1e38, 3.2e38]])
    state = ScaledState.zeros(1, 5, dtype, CPU, keeps_positive=True)
    state.encode(values)
    decoded = state.decode()
    assert 0 < decoded[0, 0] < 1e34
    # FP8 has a sign, 4 bits of exponent and 3 of mantissa.
    torch.testing.assert_close(decoded[0, 1:], values[0, 1:], rtol=2**-4, atol=0)
    codes = state.codes.view(torch.uint8).clone()
    state.encode(decoded)
    assert torch.equal(state.codes.view(torch.uint8), codes)
    assert torch.equal(state.decode(), decoded)


@pytest.mark.parametrize("dtype", [FP16, FP8])
def test_a_gradient_whose_square_overflows_makes_no_large_step(dtype: torch.dtype) -> None:
    """Neither of its own weight, which fp32 states leave alone too, nor of those beside it."""
    weight = nn.Parameter(torch.zeros(2, 128))
    optimizer = FusedAdam([weight], lr=1e-3, exp_avg_sq_dtype=dtype)
    for step in range(4):
        weight.grad = torch.full((2, 128), 0.01 if step < 2 else 0.0)
        if step == 1:
            weight.grad[0, 0] = 1e21
        optimizer.step()
    # Adam itself moves them by 3.4e-3.
    assert weight.abs().min() > 0 and weight.abs().max() < 5e-3


def _keeps_cut_rows_whole() -> None:
    torch.manual_seed(0)
    whole, cut = nn.Linear(300, 6, bias=False), nn.Linear(300, 6, bias=False)
    cut.load_state_dict(whole.state_dict())
    torch_fully_shard(cut, shard_placement_fn=lambda _: Shard(1))
    options = {"lr": 1e-2, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP16}
    optimizer = FusedAdam(cut.parameters(), **options)
    wanted = FusedAdam(whole.parameters(), lr=1e-2)
    for seed in range(3):
        batch = torch.randn(4, 300, generator=torch.Generator().manual_seed(seed))
        for model, stepped in ((cut, optimizer), (whole, wanted)):
            model(batch).square().sum().backward()
            stepped.step()
            stepped.zero_grad()
    assert isinstance(cut.weight, DTensor)
    assert torch.equal(cut.weight.full_tensor(), whole.weight)
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[cut.weight][name].dtype == FP32
        values = optimizer.get_unscaled_state(cut.weight, name)
        assert torch.equal(values.full_tensor(), wanted.state[whole.weight][name])
    assert dist.get_world_size() == 2


def test_rows_that_a_mesh_cuts_keep_fp32_states(ranks: Ranks) -> None:
    """Blocks would end where ranks do, and values depend on their number."""
    ranks(2).run(_keeps_cut_rows_whole)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, FP16, FP8])
def test_values_that_a_state_is_set_to_are_copied(dtype: torch.dtype) -> None:
    """They are what the next step decodes, and nobody else's; other shapes are refused."""
    weights = [nn.Parameter(torch.zeros(2, 8)) for _ in range(2)]
    optimizer = FusedAdam(weights, exp_avg_dtype=dtype, weight_decay=0.0)
    for weight in weights:
        weight.grad = torch.ones(2, 8)
    optimizer.step()
    values = torch.full((2, 8), -3.0)
    for weight in weights:
        optimizer.set_scaled_state(weight, "exp_avg", values)
        assert torch.equal(optimizer.get_unscaled_state(weight, "exp_avg"), values)
    # Also those that a load or a user puts in the place of the state.
    optimizer.state[weights[1]]["exp_avg"] = values.clone().neg_()
    assert torch.equal(optimizer.get_unscaled_state(weights[1], "exp_avg"), -values)
    optimizer.set_scaled_state(weights[1], "exp_avg", values)
    before = weights[0].detach().clone()
    optimizer.step()
    assert torch.equal(values, torch.full((2, 8), -3.0))
    assert torch.equal(weights[0], weights[1])
    # 0.9 * -3 + 0.1 * 1 is negative, so weights that went down go up.
    assert (weights[0] > before).all()
    for shape in ((1,), (2, 1), (4, 4), (16,)):
        with pytest.raises(ValueError, match=r"values like the parameter, \(2, 8\)"):
            optimizer.set_scaled_state(weights[0], "exp_avg", torch.ones(shape))


def test_scales_go_with_their_parameter() -> None:
    """An optimizer whose parameters are replaced keeps nothing of the old ones."""
    optimizer = FusedAdam([nn.Parameter(torch.zeros(2, 8))], exp_avg_dtype=FP8)
    for _ in range(5):
        weight = nn.Parameter(torch.zeros(2, 8))
        weight.grad = torch.ones(2, 8)
        optimizer.param_groups[0]["params"] = [weight]
        optimizer.state.clear()
        optimizer.step()
    gc.collect()
    assert len(optimizer._store._scaled) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_decoupled_gradients_are_cleared(set_to_none: bool) -> None:
    """Or the next step would take them again."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([weight], use_decoupled_grad=True)
    weight.decoupled_grad = given = torch.ones(3)
    weight.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none)
    if set_to_none:
        assert weight.decoupled_grad is None and weight.grad is None
        optimizer.step()
        assert torch.equal(weight, torch.ones(3))
    else:
        assert weight.decoupled_grad is given and not given.any() and not weight.grad.any()
