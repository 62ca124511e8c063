"""What programs around FusedAdam do: zero weights, hook in, step early, set other defaults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from megafsdp import (
    FusedAdam,
    LossScaler,
    Muon,
    clip_grad_norm_,
    full_tensor,
    num_zero_grads,
)
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.checkpoint import load, save
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.defaults import torch_defaults
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import Ranks

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_set_to_zero_is_zero_beside_any_remainder(zero: float) -> None:
    """A zero with a negative low half would be NaN, in steps and in checkpoints."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    grads = torch.randn(2, 1000, generator=generator).bfloat16()
    halves = nn.Parameter(start.bfloat16())
    optimizer = FusedAdam([halves], lr=1e-2, store_param_remainders=True)
    halves.grad = grads[0].clone()
    optimizer.step()
    remainder = optimizer.state[halves]["param_remainder"].clone()
    assert (remainder < 0).any() and (remainder > 0).any()
    with torch.no_grad():
        halves.fill_(zero)
    weight = optimizer.canonical_weight(halves)
    # What is left of a positive remainder is below the least normal number.
    assert (weight.abs() < 2.0**-126).all() and torch.equal(weight.signbit(), halves.signbit())
    assert not weight[remainder <= 0].any()
    moments = [optimizer.state[halves][name].clone() for name in ("exp_avg", "exp_avg_sq")]
    whole = nn.Parameter(torch.full((1000,), zero))
    other = FusedAdam([whole], lr=1e-2, use_decoupled_grad=True)
    other.state[whole] = {"step": torch.tensor(1.0), "exp_avg": moments[0]}
    other.state[whole]["exp_avg_sq"] = moments[1]
    halves.grad, whole.decoupled_grad = grads[1].clone(), grads[1].clone()
    optimizer.step()
    other.step()
    assert torch.equal(optimizer.canonical_weight(halves), whole)


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_hooks_of_a_state_dict_have_the_last_word(kind: type[Optimizer]) -> None:
    """They see moments in fp32, and what they return is what comes out."""
    weight = nn.Parameter(torch.ones(2, 8))
    optimizer = kind([weight], **({"exp_avg_dtype": BF16} if kind is FusedAdam else {}))
    weight.grad = torch.ones(2, 8)
    optimizer.step()
    seen: list[torch.dtype] = []

    def doubles(_: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        seen.append(packed["state"][0]["exp_avg"].dtype)
        states = {i: {**s, "exp_avg": 2 * s["exp_avg"]} for i, s in packed["state"].items()}
        return packed | {"state": states}

    wanted = 2 * optimizer.state_dict()["state"][0]["exp_avg"]
    optimizer.register_state_dict_post_hook(doubles)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], wanted)
    assert seen == [torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_step_between_forward_and_backward_is_noticed(dtype: torch.dtype) -> None:
    """Autograd refuses weights that have changed since, as after a step of torch's."""
    for kind in (torch.optim.AdamW, FusedAdam):
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = kind([weight], lr=0.1)
        loss = (weight * weight).sum()
        weight.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _clips_not_a_number() -> None:
    net = shard(Net())
    optimizer = FusedAdam(net.parameters(), lr=1e-2)
    net(*mine(batches(1)[0])).backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    with torch.no_grad():
        grads[0].fill_(torch.nan)
    assert clip_grad_norm_(net, 1.0).isnan()
    assert all(full_tensor(grad).isnan().all() for grad in grads)
    with torch.no_grad():
        for grad in grads:
            grad.fill_(1.0)
    numel = sum(grad.numel() for grad in grads)
    assert clip_grad_norm_(net, 1e9).item() == pytest.approx(numel**0.5)
    optimizer.step()
    assert all(full_tensor(p.detach()).isfinite().all() for p in net.parameters())


def test_gradients_that_are_mended_after_a_clip_by_nan_are_sound(ranks: Ranks) -> None:
    """The factor is NaN for all gradients, as torch's is; what lies between them stays zero."""
    ranks(3).run(_clips_not_a_number)


@pytest.mark.parametrize("order", ["inf", "2"])
def test_orders_of_norms_may_be_text(order: str) -> None:
    """As torch takes them."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, -4.0])
    assert clip_grad_norm_([weight], 10.0, order).item() == (4.0 if order == "inf" else 5.0)


@pytest.mark.parametrize("kind", [FusedAdam, HybridDeviceOptimizer])
def test_a_bad_number_in_the_last_group_steps_no_group(kind: type[FusedAdam]) -> None:
    """The error comes before weights, states or counts change."""
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = kind([{"params": [w]} for w in weights])
    for weight in weights:
        weight.grad = torch.ones(4)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    values = [w.detach().clone() for w in weights]
    for name, value in (("lr", torch.nan), ("betas", (0.9, 1.0)), ("eps", -1.0)):
        was, optimizer.param_groups[1][name] = optimizer.param_groups[1][name], value
        with pytest.raises(ValueError, match=name):
            optimizer.step()
        optimizer.param_groups[1][name] = was
    for i, weight in enumerate(weights):
        assert torch.equal(weight, values[i])
        for name, state in optimizer.state_dict()["state"][i].items():
            assert torch.equal(state, before[i][name]), name


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}])
def test_a_bad_number_of_a_group_is_refused_with_the_group(options: dict[str, Any]) -> None:
    """At construction and by ``add_param_group``, not at the first step."""
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=next(iter(options))):
        FusedAdam([{"params": [weight], **options}])
    optimizer = FusedAdam([nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match=next(iter(options))):
        optimizer.add_param_group({"params": [weight], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [FusedAdam, HybridDeviceOptimizer, Muon])
def test_a_load_replaces_all_states_by_copies(kind: type[Optimizer]) -> None:
    """A step leaves the loaded state dict as it is, and an empty one drops the states."""
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 3))]
    optimizer = kind(weights)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    packed = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(packed["state"])
    optimizer.load_state_dict(packed)
    optimizer.step()
    for index, state in packed["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[index][name]), name
    optimizer.load_state_dict(kind(weights).state_dict())
    assert not optimizer.state


def test_a_rate_that_ends_just_below_zero_is_stepped_with() -> None:
    """Schedulers that end at zero round; torch's optimizers go on there too."""
    weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    ours, theirs = (
        FusedAdam(weights[:1], lr=1.0),
        torch.optim.AdamW(weights[1:], lr=1.0, weight_decay=0.0, fused=True),
    )
    for optimizer, weight in ((ours, weights[0]), (theirs, weights[1])):
        optimizer.param_groups[0]["lr"] = -1e-3
        weight.grad = torch.ones(64)
        optimizer.step()
    assert (weights[0] > 1).all() and torch.equal(*weights)


def _adam(net: nn.Module) -> FusedAdam:
    formats = {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16}
    return FusedAdam(net.parameters(), lr=1e-2, max_grad_norm=1.0, **formats)


def _hybrid(net: nn.Module) -> FusedAdam:
    return HybridDeviceOptimizer(net.parameters(), lr=1e-2, max_grad_norm=1.0)


def _muon(net: nn.Module) -> Muon:
    groups = [[p for p in net.parameters() if (p.ndim == 2) is flag] for flag in (True, False)]
    return Muon([{"params": groups[0], "use_muon": True}, {"params": groups[1], "use_muon": False}])


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": _adam,
    "hybrid": _hybrid,
    "muon": _muon,
}


def _trains(kind: str, folder: Path, device: str | None, dtype: torch.dtype) -> list[torch.Tensor]:
    net = shard(Net(num_blocks=1))
    optimizer, scaler = MAKERS[kind](net), LossScaler()
    inputs = [mine(batches(1, seed=seed)[0]) for seed in range(2)]

    def steps(part: slice) -> None:
        for arguments in inputs[part]:
            net(*arguments).backward()
            clip_grad_norm_(net, 0.5)
            num_zero_grads(net)
            optimizer.step()
            optimizer.zero_grad()

    def everything() -> None:
        steps(slice(0, 1))
        save(folder, step=1, model=net, optimizer=optimizer, loss_scaler=scaler)
        load(folder, step=1, model=net, optimizer=optimizer, loss_scaler=scaler)
        steps(slice(1, 2))

    if device is None:
        everything()
    else:
        with torch_defaults(device, dtype):
            everything()
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize()
    return [local_tensor(p).clone() for p in net.parameters()]


@pytest.mark.parametrize("kind", MAKERS)
def test_default_device_and_dtype_change_nothing(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """A program may have set them for its own tensors: steps, saves and loads are the same."""
    wanted = ranks(2).run(_trains, kind, tmp_path / "plain", None, torch.float32)
    for dtype in (FP16, torch.float64):
        found = ranks(2).run(_trains, kind, tmp_path / str(dtype), "meta", dtype)
        for ours, theirs in zip(found, wanted, strict=True):
            assert all(map(torch.equal, ours, theirs))


def _counts_on() -> set[float]:
    net = shard(Net(num_blocks=1))
    optimizer = FusedAdam(net.parameters())
    net(*mine(batches(1)[0])).backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = 2049.0
    with torch_defaults("cpu", FP16):
        optimizer.step()
    return {float(state["step"]) for state in optimizer.state.values()}


def test_a_count_that_is_set_as_a_number_takes_no_default_dtype(ranks: Ranks) -> None:
    """In fp16 an odd number above 2048 would be rounded."""
    assert ranks(1).run(_counts_on) == [{2050.0}]


def test_probing_for_denormals_takes_no_default_dtype() -> None:
    """In fp16 the probe would find zero, and leave the thread flushing."""
    with torch_defaults("cpu", FP16), reference.denormal_mode(True):
        pass
    assert torch.full((1,), 2.0**-120).mul_(2.0**-20).item() != 0


def _steps_in_parts(num_parts: int) -> None:
    whole, divided = shard(Net()), shard(Net())
    wanted = FusedAdam(whole.parameters(), lr=1e-2)
    parameters = list(divided.parameters())
    parts = [FusedAdam(parameters[i::num_parts], lr=1e-2) for i in range(num_parts)]
    for seed in range(3):
        for net, optimizers in ((whole, [wanted]), (divided, parts)):
            net(*mine(batches(1, seed=seed)[0])).backward()
            for optimizer in optimizers:
                optimizer.step()
            net.zero_grad()
    for ours, theirs in zip(parameters, whole.parameters(), strict=True):
        assert torch.equal(local_tensor(ours), local_tensor(theirs))
    moments = [
        local_tensor(state[name]).untyped_storage()
        for part in parts
        for state in part.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    nbytes = sum({s.data_ptr(): s.nbytes() for s in moments if s.nbytes()}.values())
    own = sum(local_tensor(p).nbytes for p in parameters)
    # A part that has half of a unit has states for all of it.
    assert nbytes <= 2 * own * (1.1 if num_parts == len(parameters) else 2)


@pytest.mark.parametrize("num_parts", [2, 3, 21])
def test_optimizers_that_share_units_have_states_of_their_own_alone(
    ranks: Ranks, num_parts: int
) -> None:
    """As where each parameter is stepped in backward by an optimizer of its own."""
    ranks(2).run(_steps_in_parts, num_parts)
