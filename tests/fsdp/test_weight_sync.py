"""Which steps mark compute weights as stale, and what the hooks on steps cost others."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

# What these leave behind is looked at below.
import megafsdp.checkpoint
import megafsdp.training  # noqa: F401
from megafsdp import FusedAdam, fully_shard
from megafsdp.fsdp import weight_sync
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from tests.fsdp.toy import (
    Net,
    assert_same_parameters,
    batches,
    mine,
    options_of_strategies,
    shard,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _hooks_before_and_after_wrapping() -> list[int]:
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    before = sum(map(len, hooks))
    fully_shard(nn.Linear(2, 2))
    return [before, sum(map(len, hooks))]


def test_an_import_registers_no_hooks_on_optimizers(ranks: Ranks) -> None:
    """They come with the first fully_shard(); fresh ranks have every import behind them."""
    pool = ranks(1)
    pool.close()
    ((before, after),) = pool.run(_hooks_before_and_after_wrapping)
    assert before == 0 < after


def _plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = nn.Linear(4, 4)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    return plain, torch.optim.SGD(plain.parameters(), lr=0.1)


def _groups_of(net: nn.Module) -> list[ParameterGroup]:
    found = (group_of(parameter) for parameter in net.parameters())
    return list(dict.fromkeys(group for group in found if group is not None))


def _foreign_steps() -> tuple[int, int]:
    groups = _groups_of(shard(Net()))
    changes = [group.num_changes for group in groups]
    _, optimizer = _plain()
    looked_at = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "group_of", lambda p: looked_at.append(p) or group_of(p))
        optimizer.step()
        first = len(looked_at)
        for _ in range(3):
            optimizer.step()
    assert [group.num_changes for group in groups] == changes
    return first, len(looked_at) - first


def test_a_foreign_optimizer_is_looked_at_once(ranks: Ranks) -> None:
    """Later steps return at once and mark nothing."""
    for first, later in ranks(2).run(_foreign_steps):
        assert first > 0 and later == 0


def _changed_parameters() -> None:
    _, optimizer = _plain()
    fully_shard(nn.Linear(2, 2))
    optimizer.step()
    net = shard(Net())
    groups = _groups_of(net)
    optimizer.step()
    changes = [group.num_changes for group in groups]
    # In place, as many as before: nothing but the objects differs.
    held = optimizer.param_groups[0]["params"]
    held[:] = list(net.parameters())[: len(held)]
    touched = {id(group_of(parameter)) for parameter in held}
    optimizer.step()
    for group, before in zip(groups, changes, strict=True):
        assert group.num_changes - before == (id(group) in touched)
    optimizer.add_param_group({"params": [groups[-1].parameters[-1].sharded]})
    before = groups[-1].num_changes
    optimizer.step()
    assert groups[-1].num_changes == before + 1


def test_parameters_that_an_optimizer_gets_later_are_marked(ranks: Ranks) -> None:
    """With or without gradients, exchanged in place or added."""
    ranks(2).run(_changed_parameters)


def _stepped_before_wrapping() -> None:
    fully_shard(nn.Linear(2, 2))
    plain, optimizer = _plain()
    optimizer.step()
    fully_shard(plain)
    with pytest.raises(ValueError, match=r"after fully_shard\(\)"):
        optimizer.step()


def test_an_optimizer_that_was_foreign_is_refused_after_wrapping(ranks: Ranks) -> None:
    """What was remembered of it does not hide that its parameters were replaced."""
    ranks(2).run(_stepped_before_wrapping)


def _fused_steps() -> list[int]:
    net = shard(Net())
    optimizer = FusedAdam(net.parameters())
    assert isinstance(optimizer, weight_sync.SelfMarkingOptimizer)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [group.num_changes for group in _groups_of(net)]
    optimizer.step()
    after = [group.num_changes for group in _groups_of(net)]
    return [b - a for a, b in zip(before, after, strict=True)]


def test_a_step_that_marks_by_itself_is_not_marked_again(ranks: Ranks) -> None:
    """A second mark would drop the casts that the step has written."""
    for changes in ranks(2).run(_fused_steps):
        assert set(changes) == {1}


def _freed_optimizer() -> bool:
    plain, optimizer = _plain()
    fully_shard(nn.Linear(2, 2))
    # As a step within backward does it.
    plain.weight.stepped_by = optimizer
    optimizer.step()
    reference = weakref.ref(optimizer)
    del plain, optimizer
    gc.collect()
    return reference() is None


def test_an_optimizer_that_its_parameters_refer_to_is_freed(ranks: Ranks) -> None:
    """What is remembered of it refers to neither."""
    assert ranks(1).run(_freed_optimizer) == [True]


def _order_of_hooks() -> list[str]:
    events = []
    net = shard(Net())
    group = _groups_of(net)[0]
    handle = register_optimizer_step_pre_hook(lambda *_: events.append("before"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterGroup, "mark_stale", lambda own, **_: events.append("marked"))
        torch.optim.SGD([group.parameters[0].sharded], lr=0.1).step()
    handle.remove()
    return events


def test_groups_are_marked_after_the_step(ranks: Ranks) -> None:
    """A parameter without a gradient marks its group too, once."""
    assert ranks(1).run(_order_of_hooks) == [["before", "marked"]]


def _follows_with_states() -> None:
    for options in options_of_strategies():
        twin = Net()
        net = copy.deepcopy(twin)
        steps = [
            torch.optim.Adagrad(model.parameters(), 0.05, initial_accumulator_value=0.1)
            for model in (twin, net)
        ]
        with weight_sync.optimizers_follow(net, steps[1:]):
            shard(net, **options)
        for parameter, state in steps[1].state.items():
            assert state["sum"].shape == parameter.shape
            assert state["sum"].to_local().shape == parameter.detach().to_local().shape
        for batch in batches(2):
            for model, step, inputs in zip((twin, net), steps, (batch, mine(batch)), strict=True):
                step.zero_grad()
                model(*inputs).backward()
                step.step()
        assert_same_parameters(net, twin, rtol=1e-4, atol=1e-5)


def test_states_that_are_made_before_the_first_step_are_cut_as_well(ranks: Ranks) -> None:
    """Adagrad makes its sums when it is built."""
    ranks(2).run(_follows_with_states)


def test_only_new_optimizers_of_the_module_follow() -> None:
    """Momentum is a state of steps too, though no step is counted beside it."""
    net = nn.Linear(2, 2)
    stepped = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    stepped.step()
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for optimizer, got in ((stepped, "states of steps"), (others, "parameters of another model")):
        with pytest.raises(ValueError, match=got), weight_sync.optimizers_follow(net, [optimizer]):
            pass
