"""schedulefree steps sharded parameters, and switches them between two points."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from megafsdp import full_state_dict, fully_shard_model
from megafsdp.fsdp.keywords import StrategyChoice
from tests.ecosystem.models import build, global_batch, mean_over_ranks, own_rows
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

schedulefree = pytest.importorskip(
    "schedulefree", reason="ecosystem: schedulefree is not installed"
)

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]


def _train(name: str, options: dict[str, object], strategy: StrategyChoice) -> None:
    reference = build("qwen3")
    model = fully_shard_model(copy.deepcopy(reference), strategy=strategy)
    nets = (reference, model)
    optimizers = [getattr(schedulefree, name)(net.parameters(), **options) for net in nets]
    for step in range(3):
        batch = global_batch(step)
        for optimizer in optimizers:
            optimizer.train()
        expected, loss = reference(**batch).loss, model(**own_rows(batch)).loss
        assert_close(mean_over_ranks(loss), expected.detach(), rtol=1e-5, atol=0)
        expected.backward()
        loss.backward()
        assert_same_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        trained = full_state_dict(model)
        for optimizer in optimizers:
            optimizer.eval()
        # Evaluation is at the mean of the points that training went through.
        assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            expected, loss = reference(**batch).loss, model(**own_rows(batch)).loss
        assert_close(mean_over_ranks(loss), expected, rtol=1e-5, atol=0)
        moved = full_state_dict(model)
        assert step == 0 or not any(torch.equal(moved[key], trained[key]) for key in trained)


# Weights of "optim" stay unsharded, so a switch that no step makes must refresh them.
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        # The epsilon keeps rounding noise out of the steps.
        ("AdamWScheduleFree", {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-5}),
        ("AdamWScheduleFree", {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-5, "foreach": False}),
        ("SGDScheduleFree", {"lr": 1e-1, "warmup_steps": 2}),
    ],
)
def test_both_points_are_those_of_one_process(
    ranks: Ranks, name: str, options: dict[str, object], strategy: StrategyChoice
) -> None:
    """Losses are equal in train() and in eval() mode; each step goes through both."""
    ranks(2).run(_train, name, options, strategy)
