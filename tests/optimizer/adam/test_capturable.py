"""A capturable step is the step, with what it depends on left on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, MixedPrecisionPolicy
from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from tests.fsdp.toy import Net, batches, mine, shard
from tests.optimizer.offload.host_reads import NoHostReads
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _optimizer(net: nn.Module, **options: object) -> FusedAdam:
    return FusedAdam(net.parameters(), **{"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1} | options)


def _trains(options: dict[str, object], grad_dtype: torch.dtype = torch.float32) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=grad_dtype)
    nets = [shard(Net(num_blocks=1), mp_policy=policy) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    lr = torch.tensor(1e-2, dtype=torch.float64)
    plain = _optimizer(nets[0], ftz=False, **options)
    captured = _optimizer(nets[1], capturable=True, **options | {"lr": lr})
    for step in range(3):
        rate = 1e-2 * (step + 1)
        plain.param_groups[0]["lr"] = rate
        lr.fill_(rate)
        for net in nets:
            net(*mine(batches(1, seed=step)[0])).backward()
            for parameter in net.parameters():
                grad = local_tensor(parameter.grad)
                assert grad.dtype == grad_dtype
                if "use_decoupled_grad" in options:
                    parameter.decoupled_grad = wrap_like(parameter, grad.bfloat16())
                    parameter.grad = None
        plain.step()
        if options.get("max_grad_norm") is None:
            with NoHostReads():
                captured.step()
        else:
            captured.step()
        plain.zero_grad()
        captured.zero_grad()
    for own, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(local_tensor(own), local_tensor(other))
        for name in ("exp_avg", "exp_avg_sq"):
            kept = [local_tensor(o.state[p][name]) for o, p in ((plain, own), (captured, other))]
            assert torch.equal(*kept)
        assert captured.state[other]["step"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adam_w_mode": False},
        {"bias_correction": False},
        {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
        {"max_grad_norm": 0.3},
    ],
    ids=str,
)
def test_a_capturable_step_has_the_bits_of_the_other(
    ranks: Ranks, options: dict[str, object]
) -> None:
    """Rates given as a tensor, clipping, narrow moments; the host reads nothing."""
    ranks(2).run(_trains, options)


@pytest.mark.parametrize(
    ("options", "grad_dtype"),
    [
        ({}, torch.bfloat16),
        ({"use_decoupled_grad": True}, torch.float32),
        ({"use_decoupled_grad": True, "max_grad_norm": 0.3}, torch.float32),
    ],
    ids=["main gradients", "decoupled", "decoupled and clipped"],
)
def test_bf16_gradients_step_fp32_weights(
    ranks: Ranks, options: dict[str, object], grad_dtype: torch.dtype
) -> None:
    """In flat buffers and tensor by tensor, with the bits of the other step."""
    ranks(2).run(_trains, options, grad_dtype)


def test_nothing_changes_where_gradients_are_not_finite() -> None:
    """Weights, moments and counts stay, without the host knowing."""
    weights = [nn.Parameter(torch.ones(5, 3)) for _ in range(2)]
    captured, plain = (
        FusedAdam([weight], lr=0.1, capturable=is_captured)
        for weight, is_captured in zip(weights, (True, False), strict=True)
    )
    for step in range(3):
        captured.grad_scale = torch.tensor(4.0)
        captured.found_inf = torch.tensor(float(step == 1))
        weights[0].grad = torch.full((5, 3), float("inf") if step == 1 else 4.0)
        with NoHostReads():
            captured.step()
        if step != 1:
            weights[1].grad = torch.ones(5, 3)
            plain.step()
        assert torch.equal(weights[0].detach(), weights[1].detach())
    assert captured.state[weights[0]]["step"] == 2


def test_a_learning_rate_may_be_a_tensor_of_one_element() -> None:
    """With or without a dimension, to the same bits."""
    weights = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    for weight, lr in zip(weights, (torch.tensor(0.1), torch.tensor([0.1])), strict=True):
        optimizer = FusedAdam([weight], lr=lr, capturable=True)
        weight.grad = torch.full((4, 6), 0.5)
        optimizer.step()
        assert optimizer.state[weight]["step"] == 1
    assert torch.equal(weights[1].detach(), weights[0].detach())
    assert not torch.equal(weights[1].detach(), torch.ones(4, 6))


def test_states_that_cannot_be_captured_are_refused() -> None:
    """Scaled moments and remainders need the host."""
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="capturable=True"):
        FusedAdam([weight], capturable=True, exp_avg_dtype=torch.float8_e4m3fn)
    narrow = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="capturable=True"):
        FusedAdam([narrow], capturable=True, store_param_remainders=True)


@pytest.mark.gpu
def test_a_graph_replays_the_step() -> None:
    """Gradients and rate change between replays of one capture."""
    weights = [nn.Parameter(torch.ones(64, 64, device="cuda")) for _ in range(2)]
    lr = torch.tensor(0.1, device="cuda")
    captured = FusedAdam([weights[0]], lr=lr, capturable=True)
    plain = FusedAdam([weights[1]], lr=0.1, ftz=False)
    grad = torch.ones(64, 64, device="cuda")
    weights[0].grad = grad
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step()
    torch.cuda.current_stream().wait_stream(side)
    weights[1].grad = torch.ones(64, 64, device="cuda")
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(3):
        grad.fill_(step + 2.0)
        lr.fill_(0.1 / (step + 1))
        graph.replay()
        weights[1].grad = torch.full((64, 64), step + 2.0, device="cuda")
        plain.param_groups[0]["lr"] = 0.1 / (step + 1)
        plain.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-6)
