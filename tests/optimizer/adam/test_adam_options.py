"""FusedAdam's options mean what they say: defaults, denormal numbers, bias correction, hooks."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam


def test_the_defaults_are_those_documented() -> None:
    """Nothing behind ``weight_decay`` is taken by position."""
    parameters = list(inspect.signature(FusedAdam).parameters.values())
    found = {p.name: p.default for p in parameters[1:]}
    assert list(found.items()) == list(
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "adam_w_mode": True,
            "bias_correction": True,
            "exp_avg_dtype": torch.float32,
            "exp_avg_sq_dtype": torch.float32,
            "store_param_remainders": False,
            "use_decoupled_grad": False,
            "max_grad_norm": None,
            "capturable": False,
            "ftz": True,
        }.items()
    )
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert by_position == ["params", "lr", "betas", "eps", "weight_decay"]


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("ftz", [True, False])
def test_ftz_decides_whether_moments_become_denormal(
    monkeypatch: pytest.MonkeyPatch, ftz: bool, is_native: bool
) -> None:
    """A denormal moment is gone after a step without gradients, or is nine tenths of itself."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
    weight = nn.Parameter(torch.ones(40))
    optimizer = FusedAdam([weight], ftz=ftz)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for each in (optimizer, copy.deepcopy(optimizer)):
        (parameter,) = each.param_groups[0]["params"]
        parameter.grad = torch.zeros_like(parameter)
        each.state[parameter]["exp_avg"].fill_(2.0**-130)
        each.step()
        # Denormal numbers are multiples of 2^-149.
        left = 0.0 if ftz else round(0.9 * 2**19) * 2.0**-149
        assert each.state[parameter]["exp_avg"].tolist() == [left] * 40


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_moments_are_taken_as_they_are_without_bias_correction(adam_w_mode: bool) -> None:
    """The first step and two more are those of the formula, in double."""
    lr, (beta1, beta2), eps, decay = 0.02, (0.8, 0.95), 1e-6, 0.1
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(9, 7, generator=generator))
    optimizer = FusedAdam(
        [weight],
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        adam_w_mode=adam_w_mode,
        bias_correction=False,
    )
    wanted = weight.detach().double()
    exp_avg, exp_avg_sq = torch.zeros_like(wanted), torch.zeros_like(wanted)
    for _ in range(3):
        weight.grad = torch.randn(9, 7, generator=generator)
        grad = weight.grad.double()
        if adam_w_mode:
            wanted *= 1 - lr * decay
        else:
            grad += decay * wanted
        exp_avg = beta1 * exp_avg + (1 - beta1) * grad
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
        wanted -= lr * exp_avg / (exp_avg_sq.sqrt() + eps)
        optimizer.step()
        # A dozen roundings to fp32 a step; the corrections of the first steps are 5 and 20.
        values = (weight.detach(), *(optimizer.state[weight][n] for n in ("exp_avg", "exp_avg_sq")))
        for value, exact in zip(values, (wanted, exp_avg, exp_avg_sq), strict=True):
            torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-7)
    # torch's state dicts lack the option: the optimizer keeps its own.
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer.load_state_dict(kind([weight], weight_decay=decay).state_dict())
    assert optimizer.param_groups[0]["bias_correction"] is False


def _with_hooks(kind: type[torch.optim.Optimizer]) -> tuple[list[object], torch.Tensor, dict]:
    """Return what hooks of a step and of a state dict saw, the weight and the state dict."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = kind([weight], lr=0.1, weight_decay=0.0)
    seen: list[object] = []

    def before(own: torch.optim.Optimizer, arguments: tuple, options: dict) -> Any:
        assert own is arguments[0] is optimizer and weight.grad is not None
        seen.append(("step begins", len(arguments), [*options], weight.tolist(), len(own.state)))
        weight.grad.mul_(-1.0)

    def after(own: torch.optim.Optimizer, arguments: tuple, options: dict) -> None:
        assert own is arguments[0] is optimizer
        moved = [round(value, 5) for value in weight.tolist()]
        seen.append(("step ends", len(arguments), [*options], moved, len(own.state)))

    def packs(own: torch.optim.Optimizer) -> None:
        assert own is optimizer
        seen.append(("state_dict begins", len(own.state)))

    def packed(own: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        assert own is optimizer
        seen.append(("state_dict ends", sorted(given["state"][0])))
        states = {
            index: {f"{name} in double": value.double() for name, value in state.items()}
            for index, state in given["state"].items()
        }
        return given | {"state": states}

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_pre_hook(packs)
    optimizer.register_state_dict_post_hook(packed)
    for is_with_closure in (False, True):
        weight.grad = torch.ones(4)
        optimizer.step(closure=lambda: 3.0) if is_with_closure else optimizer.step()
    return seen, weight.detach(), optimizer.state_dict()


def test_hooks_of_steps_and_state_dicts_are_called_as_torchs() -> None:
    """Before and after, in torch's order, with what may be changed there."""
    seen, weight, packed = _with_hooks(FusedAdam)
    wanted, other, torchs = _with_hooks(torch.optim.AdamW)
    assert seen == wanted
    assert [entry[0] for entry in seen] == ["step begins", "step ends"] * 2 + [
        "state_dict begins",
        "state_dict ends",
    ]
    torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)
    assert (weight > 1).all(), "the first hook has turned the gradient"
    assert packed["state"][0].keys() == torchs["state"][0].keys()
    for name, value in torchs["state"][0].items():
        assert name.endswith(" in double")
        torch.testing.assert_close(packed["state"][0][name], value, rtol=1e-6, atol=1e-7)


def test_a_backward_from_before_a_step_is_refused() -> None:
    """The step changes weights in place, and autograd counts that as any other change."""
    weight = nn.Parameter(torch.ones(40, 4))
    loss = weight.square().sum()
    weight.grad = torch.ones_like(weight)
    FusedAdam([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_in_fp64_are_rounded_to_fp32() -> None:
    """Decoupled ones may be of any dtype; the step is that of fp32."""
    found = []
    for dtype in (torch.float32, torch.float64):
        weight = nn.Parameter(torch.ones(40, 4))
        weight.decoupled_grad = torch.linspace(-1, 1, 160).view(40, 4).to(dtype)
        FusedAdam([weight], use_decoupled_grad=True).step()
        found.append(weight.detach())
    assert torch.equal(*found) and not torch.equal(found[0], torch.ones(40, 4))
