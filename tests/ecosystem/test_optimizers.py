"""Optimizers of pytorch-optimizer step sharded parameters as whole ones, or are refused."""

from __future__ import annotations

import pytest
import torch

from megafsdp.fsdp.keywords import StrategyChoice
from tests.fsdp.toy import (
    assert_same_grads,
    assert_same_parameters,
    batches,
    full_tensors,
    mine,
    pair,
    train_both,
)
from tests.ranks import Ranks

pytorch_optimizer = pytest.importorskip(
    "pytorch_optimizer", reason="ecosystem: pytorch-optimizer is not installed"
)

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

# Epsilons keep rounding noise out of the steps.
STEPPING: dict[str, dict[str, object]] = {
    "ADOPT": {"lr": 1e-3, "eps": 1e-5},
    "AdEMAMix": {"lr": 1e-3, "eps": 1e-5},
    "Adan": {"lr": 1e-3, "eps": 1e-5},
    "Lamb": {"lr": 1e-2, "eps": 1e-5},
    "StableAdamW": {"lr": 1e-2, "eps": 1e-5},
}


def _trains(name: str, strategy: StrategyChoice) -> None:
    reference, net = pair(1, strategy=strategy)
    make = getattr(pytorch_optimizer, name)
    train_both(
        reference,
        net,
        num_steps=3,
        make_optimizer=lambda model: make(model.parameters(), **STEPPING[name]),
    )
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@pytest.mark.parametrize("name", STEPPING)
def test_steps_are_those_of_one_process(ranks: Ranks, name: str, strategy: StrategyChoice) -> None:
    """Also where a step scales by the norms of whole parameters and gradients."""
    ranks(3).run(_trains, name, strategy)


def _refused(name: str) -> None:
    reference, net = pair(1)
    (batch,) = batches(1)
    reference(*batch).backward()
    net(*mine(batch)).backward()
    optimizer = getattr(pytorch_optimizer, name)(net.parameters())
    before = full_tensors({n: p.detach().clone() for n, p in net.named_parameters()})
    with pytest.raises(NotImplementedError, match="an optimizer that steps each element by itself"):
        optimizer.step()
    assert_same_grads(net, reference)
    for key, value in full_tensors(dict(net.named_parameters())).items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_optimizers_of_whole_matrices_are_refused(ranks: Ranks, name: str) -> None:
    """Before anything is stepped, and with what to use instead."""
    ranks(2).run(_refused, name)
