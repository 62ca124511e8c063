"""Scores and choices against the formula; loads, and the two ways to even them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.models import ActivationCheckpointing, build_model
from megafsdp.models.language_model import LanguageModel
from megafsdp.parallel import (
    RoutedBatch,
    Router,
    end_router_step,
    router_metrics,
    scale_auxiliary_losses,
)
from tests.parallel.cases import MOE, batch_of, build
from tests.ranks import Ranks

_H, _E, _K = 6, 5, 2


def _router(dtype: torch.dtype = torch.float64, **options: object) -> Router:
    torch.manual_seed(0)
    return Router(_H, _E, _K, init_std=1.0, **options).to(dtype)  # type: ignore[arg-type]


def _tokens(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    # Not centred, so that loads are uneven.
    return torch.randn(num, _H, generator=generator, dtype=torch.float64) + 0.5


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_weights_equal_the_formula(norm_topk_prob: bool) -> None:
    """Softmax over all experts, the best K of it, over their sum where asked; best first."""
    router, x = _router(norm_topk_prob=norm_topk_prob), _tokens(7)
    weights, experts = router(x)
    exponentials = (x @ router.weight.T).exp()
    scores = exponentials / exponentials.sum(1, keepdim=True)
    for n in range(len(x)):
        best = sorted(range(_E), key=lambda e, n=n: -scores[n, e].item())[:_K]
        assert experts[n].tolist() == best
        chosen = scores[n, best]
        wanted = chosen / chosen.sum() if norm_topk_prob else chosen
        torch.testing.assert_close(weights[n], wanted, rtol=1e-12, atol=0)


def test_scores_are_fp32_of_the_weight_as_given() -> None:
    """A bf16 weight is not multiplied in bf16, where near scores would be equal."""
    router, x = _router(torch.bfloat16), _tokens(3000).to(torch.bfloat16)
    weights, experts = router(x)
    scores = (x.float() @ router.weight.float().T).softmax(-1)
    assert weights.dtype == torch.float32
    assert torch.equal(experts, scores.topk(_K).indices)
    # In bf16 some choices would be others.
    assert not torch.equal(experts, (x @ router.weight.T).float().softmax(-1).topk(_K).indices)


def test_all_experts_may_be_chosen() -> None:
    """With K = E the weights are the softmax."""
    router = Router(_H, 3, 3).double()
    weights, experts = router(_tokens(4))
    scores = (_tokens(4) @ router.weight.T).softmax(-1)
    torch.testing.assert_close(weights, scores.gather(1, experts))
    assert all(sorted(row) == [0, 1, 2] for row in experts.tolist())


def test_a_token_is_counted_once_and_not_in_evaluation() -> None:
    """Over microbatches; a new step begins at zero."""
    router = _router()
    for num in (3, 4):
        router(_tokens(num))
    assert router.load_E is not None and router.load_E.sum() == 7 * _K
    wanted = torch.bincount(router(_tokens(4))[1].flatten(), minlength=_E)
    counted = router.load_E
    router.eval()
    router(_tokens(9))
    assert router.load_E is counted
    end_router_step(router)
    assert router.load_E is None
    router.train()
    router(_tokens(4))
    assert torch.equal(router.load_E, wanted)


_CHECKPOINTING = (
    ActivationCheckpointing(),
    ActivationCheckpointing("full"),
    ActivationCheckpointing("full", use_reentrant=True),
    ActivationCheckpointing("selective"),
)


def _train_once(model: LanguageModel, divisor: float = 1.0) -> dict[str, Tensor]:
    """Take one backward; return loads and gradients."""
    tokens, labels, mask = batch_of(2, 8)
    (model(tokens, labels, mask) / divisor).backward()
    found = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    loads = {n: m.load_E for n, m in model.named_modules() if isinstance(m, Router)}
    assert all(load is not None and load.sum() == 16 * 2 for load in loads.values())
    return found | loads  # type: ignore[return-value]


def test_recomputation_changes_nothing() -> None:
    """Loads are counted once, and the auxiliary loss has one gradient, the same bits."""
    config = dataclasses.replace(MOE, router_balance="aux_loss", router_aux_loss_coefficient=1.0)
    wanted: dict[str, Tensor] = {}
    for choice in _CHECKPOINTING:
        model = build_model(config, seed=0)
        model.activation_checkpointing = choice
        found = _train_once(model)
        wanted = wanted or found
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), (choice, name)


def _aux_gradient(num_ranks: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    router = _router(balance="aux_loss", aux_loss_coefficient=0.3)
    # Ranks of unlike loads and as many tokens.
    x = _tokens(12).sort(0).values.chunk(num_ranks)[rank]
    weights, _ = router(x)
    (0.0 * weights).sum().backward()
    assert router.weight.grad is not None
    return router.weight.grad


def _aux_gradient_under_tp() -> Tensor:
    router = _router(balance="aux_loss", aux_loss_coefficient=0.3)
    router.set_device_mesh(tp_mesh=init_device_mesh("cpu", (2,)))
    weights, _ = router(_tokens(12).sort(0).values)
    (0.0 * weights).sum().backward()
    assert isinstance(router.weight.grad, DTensor)
    return router.weight.grad.to_local()


def test_the_auxiliary_gradient_is_that_of_transformers() -> None:
    """Which is K times as much, of one layer."""
    router = _router()
    logits = _tokens(12).sort(0).values @ router.weight.T
    loss = load_balancing_loss_func((logits,), _E, _K)
    assert isinstance(loss, Tensor)
    (wanted,) = torch.autograd.grad(0.3 * loss / _K, router.weight)
    # transformers computes probabilities in fp64 here, but adds them up in fp32.
    torch.testing.assert_close(_aux_gradient(1), wanted, rtol=1e-5, atol=1e-8)


def test_padding_has_no_part_in_loads_and_their_loss() -> None:
    """Loads, scores and the auxiliary gradient are those of the tokens without it."""
    found = []
    for num_padding in (0, 3):
        router = _router(balance="aux_loss", aux_loss_coefficient=0.3)
        x = torch.cat((_tokens(12), _tokens(num_padding)))
        weights, _ = router(x, RoutedBatch(torch.arange(len(x)) >= 12))
        (0.0 * weights).sum().backward()
        found.append((router.load_E, router.score_E, router.weight.grad))
        # Sums with a graph would keep the activations of all microbatches.
        assert router.score_E is not None and not router.score_E.requires_grad
    for wanted, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, wanted, rtol=1e-12, atol=1e-14)


def test_the_auxiliary_gradient_is_that_of_the_whole_batch(ranks: Ranks) -> None:
    """The mean over data ranks, with the loads of all of them."""
    found = ranks(2).run(_aux_gradient, 2)
    wanted = _aux_gradient(1)
    torch.testing.assert_close(sum(found) / 2, wanted, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(found[0], found[1])
    # Ranks of tp that have the same tokens have the same gradient.
    for found_under_tp in ranks(2).run(_aux_gradient_under_tp):
        torch.testing.assert_close(found_under_tp, wanted, rtol=1e-12, atol=1e-14)


def test_the_auxiliary_loss_is_scaled_as_the_loss_is() -> None:
    """By what divides it for microbatches, or multiplies it for fp16."""
    config = dataclasses.replace(MOE, router_balance="aux_loss", router_aux_loss_coefficient=1.0)
    whole, half = (_train_once(build_model(config, seed=0), d) for d in (1.0, 2.0))
    plain = _train_once(build_model(dataclasses.replace(config, router_balance="none"), seed=0))
    name = "gradient of decoder.layers.1.mlp.router.weight"
    torch.testing.assert_close(half[name], whole[name] / 2)
    assert (whole[name] - plain[name]).abs().max() > 0.1 * plain[name].abs().max()


@pytest.mark.parametrize("choice", _CHECKPOINTING)
def test_the_auxiliary_loss_is_scaled_as_the_loss_of_its_forward_is(
    choice: ActivationCheckpointing,
) -> None:
    """A loss that is made of logits has a factor of 1, before, beside and after one of labels."""
    config = dataclasses.replace(MOE, router_balance="aux_loss", router_aux_loss_coefficient=1.0)
    model = build(config)
    model.activation_checkpointing = choice
    (x, labels, _), (others, targets, _) = batch_of(2, 8, 0), batch_of(2, 8, 1)

    def of_labels() -> Tensor:
        return 64 * model(x, labels)

    def of_logits() -> Tensor:
        return torch.nn.functional.cross_entropy(model(others).flatten(0, 1), targets.flatten())

    def grads(*losses: Callable[[], Tensor]) -> list[Tensor]:
        model.zero_grad()
        torch.stack([loss() for loss in losses]).sum().backward()
        return [router.weight.grad for router in model.modules() if isinstance(router, Router)]

    alone = grads(of_logits)
    scaled = grads(of_labels)
    for found, wanted in zip(grads(of_logits), alone, strict=True):
        assert torch.equal(found, wanted)
    # Of gradients that pass a loss in fp32.
    for both in ((of_labels, of_logits), (of_logits, of_labels)):
        for found, one, other in zip(grads(*both), scaled, alone, strict=True):
            torch.testing.assert_close(found, one + other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_recomputed_router_takes_part_in_the_loss_of_its_forward(has_batches: bool) -> None:
    """With batches that the model gives, also where another forward came in between."""

    def gradient(is_recomputed: bool) -> Tensor:
        router = _router(balance="aux_loss", aux_loss_coefficient=1.0)
        batches = (RoutedBatch(), RoutedBatch()) if has_batches else (None, None)

        def forward(index: int) -> Tensor:
            given = _tokens(6 + index).requires_grad_(), batches[index]
            if is_recomputed:
                return checkpoint(router, *given, use_reentrant=True)[0]
            return router(*given)[0]

        first = 8 * scale_auxiliary_losses(forward(0).square().sum(), router)
        if has_batches:
            second = forward(1)
            first.backward()
            first = 4 * scale_auxiliary_losses(second.square().sum(), router)
        first.backward()
        assert router.weight.grad is not None
        return router.weight.grad

    assert torch.equal(gradient(True), gradient(False))


def test_each_backward_through_a_loss_scales_the_auxiliary_loss_anew() -> None:
    """By its own factor, where the graph is kept for a second one."""
    router = _router(balance="aux_loss", aux_loss_coefficient=1.0)
    loss = scale_auxiliary_losses(router(_tokens(6))[0].square().sum(), router)
    (once,) = torch.autograd.grad(loss, router.weight, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, router.weight)
    torch.testing.assert_close(thrice, 3 * once, rtol=1e-12, atol=1e-14)


def test_a_bias_moves_choices_and_not_weights() -> None:
    """The best K of score plus bias, weighted by their scores."""
    router, x = _router(balance="bias", norm_topk_prob=False), _tokens(7)
    plain = _router(norm_topk_prob=False)
    assert router.expert_bias is not None
    assert torch.equal(router(x)[1], plain(x)[1])
    router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0, 8.0]))
    weights, experts = router(x)
    assert all(row == [3, 4] for row in experts.tolist())
    torch.testing.assert_close(weights, (x @ router.weight.T).softmax(-1)[:, 3:])


def _move_bias(num_ranks: int) -> tuple[Tensor, dict[str, int], float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    layers = [Router(_H, _E, _K, init_std=1.0, balance="bias", bias_update_rate=0.01)] * 1
    layers.append(Router(_H, _E, 1, init_std=1.0, balance="bias", bias_update_rate=0.02))
    model = torch.nn.ModuleList(layers)
    x = _tokens(12).float().sort(0).values
    for _ in range(3):
        for layer in layers:
            layer(x.chunk(num_ranks)[rank])
        metrics = router_metrics(model)
        with record_collectives() as record:
            end_router_step(model)
    assert metrics is not None and metrics.aux_loss is None
    biases = torch.stack([layer.expert_bias for layer in layers])  # type: ignore[misc]
    return biases, dict(record.calls), metrics.max_load.item()


def test_a_step_moves_each_bias_against_the_error_of_its_load() -> None:
    """By the rate, up where the load is below the mean; nothing without tokens."""
    router, x = _router(torch.float32, balance="bias", bias_update_rate=0.01), _tokens(12).float()
    _, experts = router(x)
    loads = torch.bincount(experts.flatten(), minlength=_E).float()
    end_router_step(router)
    wanted = 0.01 * torch.sign(loads.mean() - loads)
    assert router.expert_bias is not None and len(set(wanted.tolist())) > 1
    torch.testing.assert_close(router.expert_bias, wanted)
    end_router_step(router)
    torch.testing.assert_close(router.expert_bias, wanted)


@pytest.mark.parametrize("found_inf", [True, torch.tensor(1.0), torch.tensor(0.0)], ids=str)
def test_a_step_that_was_skipped_moves_no_bias(found_inf: Tensor | bool) -> None:
    """Its loads are forgotten all the same."""
    router = _router(torch.float32, balance="bias", bias_update_rate=0.01)
    router(_tokens(12).float())
    end_router_step(router, found_inf=found_inf)
    assert router.load_E is None and router.expert_bias is not None
    assert bool(router.expert_bias.any()) is not bool(found_inf)


def test_biases_are_those_of_the_whole_batch_on_all_ranks(ranks: Ranks) -> None:
    """Three steps, two layers, one all-reduce a step, the same bits as one process."""
    wanted, calls, max_load = _move_bias(1)
    assert not calls and wanted.count_nonzero() > 4
    for found, calls, found_load in ranks(2).run(_move_bias, 2):
        assert torch.equal(found, wanted) and calls == {"all_reduce": 1}
        assert found_load == max_load


def test_a_bias_stays_fp32_and_is_stored() -> None:
    """Steps of 0.001 would be lost in bf16; reset_parameters() sets it to zero."""
    router = _router(torch.float32, balance="bias")
    assert router.expert_bias is not None
    router.expert_bias.fill_(1.001)
    router.to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert torch.equal(router.state_dict()["expert_bias"], torch.full((_E,), 1.001))
    router.reset_parameters(defer_init=True)
    assert router.expert_bias.all()
    router.reset_parameters()
    assert not router.expert_bias.any()
    for balance in ("none", "aux_loss"):
        assert "expert_bias" not in _router(balance=balance).state_dict()
    with torch.device("meta"):
        late = Router(_H, _E, _K, balance="bias")
    late.to_empty(device="cpu").reset_parameters()
    assert late.expert_bias is not None and not late.expert_bias.any()


def test_metrics_equal_the_formula() -> None:
    """The worst layer's largest load over the mean, and the mean auxiliary loss of the layers."""
    assert router_metrics(torch.nn.Linear(2, 2)) is None
    before = router_metrics(_router())
    assert before is not None and before.max_load == 0, "no token has come"
    first, second = _router(balance="aux_loss"), _router(balance="aux_loss")
    with torch.no_grad():
        second.weight[0].add_(1.0)
    losses, loads = [], []
    for layer in (first, second):
        scores = (_tokens(20) @ layer.weight.T).softmax(-1)
        counts = torch.bincount(scores.topk(_K).indices.flatten(), minlength=_E).double()
        loads.append((counts.max() / counts.mean()).item())
        losses.append(_E * (counts / counts.sum() * scores.mean(0)).sum().item())
        # An earlier step is not counted.
        layer(_tokens(5))
        end_router_step(layer)
        for part in _tokens(20).split(7):
            layer(part)
    metrics = router_metrics(torch.nn.ModuleList([first, second]))
    assert metrics is not None and metrics.aux_loss is not None
    assert metrics.max_load.item() == max(loads) and loads[0] != loads[1]
    assert metrics.aux_loss.item() == pytest.approx(sum(losses) / 2, rel=1e-12)


@pytest.mark.parametrize("balance", ["none", "aux_loss", "bias"])
def test_loads_become_even_where_something_evens_them(balance: str) -> None:
    """Of the same tokens in 60 steps, the largest load comes down towards the mean."""
    router, x = (
        _router(balance=balance, aux_loss_coefficient=1.0, bias_update_rate=0.01),
        _tokens(200),
    )
    optimizer = torch.optim.SGD(router.parameters(), lr=1.0)
    loads = []
    for _ in range(60):
        weights, _ = router(x)
        (0.0 * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = router_metrics(router)
        assert metrics is not None
        loads.append(metrics.max_load.item())
        end_router_step(router)
    assert loads[0] == 1.75
    # Biases move by whole steps, so that choices go to and fro in the end.
    assert loads[-1] <= {"none": 1.75, "aux_loss": 1.1, "bias": 1.3}[balance]
