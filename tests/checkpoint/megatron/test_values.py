"""Schedules, groups and random states mean the same on both sides."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from megafsdp.checkpoint.format.rng import restore_rng_state, rng_state
from megafsdp.checkpoint.megatron.values import (
    our_groups,
    our_rng_states,
    our_schedule,
    plain_args,
    query_groups,
    their_group,
    their_rng_state,
    their_schedule,
)
from megafsdp.checkpoint.tools.safe_pickle import Foreign
from megafsdp.errors import CheckpointError
from megafsdp.training.step.lr import Schedule
from tests.checkpoint.megatron import megatron_toy as toy

_ARGS = {"lr_wsd_decay_style": "minus_sqrt", "lr_wsd_decay_iters": 3, "global_batch_size": 4}


def _megatron_rate(fields: dict, args: dict, num_samples: int) -> float:
    """Return the rate by the formula of Megatron-LM's scheduler."""
    peak, low, warmup = fields["max_lr"], fields["min_lr"], fields["lr_warmup_steps"]
    end, style = fields["lr_decay_steps"], fields["lr_decay_style"]
    if warmup > 0 and num_samples <= warmup:
        return peak * num_samples / warmup
    if style == "constant":
        return peak
    if num_samples > end:
        return low
    share = (num_samples - warmup) / (end - warmup)
    if style == "linear":
        factor = 1.0 - share
    elif style == "cosine":
        factor = 0.5 * (math.cos(math.pi * share) + 1.0)
    else:
        decay = args["lr_wsd_decay_iters"] * args["global_batch_size"]
        share = (num_samples - (end - decay)) / decay
        factor = 1.0 if share <= 0 else 1.0 - math.sqrt(share)
    return low + factor * (peak - low)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD"])
def test_a_schedule_gives_the_same_rates(style: str) -> None:
    """At every sample of the run, by our schedule and by Megatron-LM's formula; and back."""
    fields = toy.SCHEDULE | {"lr_decay_style": style}
    state = our_schedule(fields, _ARGS)
    assert state is not None
    schedule = Schedule(**state)
    for num_samples in range(60):
        wanted = _megatron_rate(fields, _ARGS, num_samples)
        assert schedule.at(num_samples) == pytest.approx(wanted, rel=1e-12)
    back, args = their_schedule(state, [{"lr": 0.5, "weight_decay": 0.1}], num_samples=16)
    assert back == fields
    assert our_schedule(back, args) == state


@pytest.mark.parametrize(
    "fields",
    [
        toy.SCHEDULE | {"lr_decay_style": "inverse-square-root"},
        toy.SCHEDULE | {"lr_decay_style": "WSD"},
        toy.SCHEDULE | {"lr_warmup_steps": None},
        {"max_lr": 1.0},
        {},
    ],
)
def test_a_schedule_without_a_counterpart_is_none(fields: dict) -> None:
    """Another kind, a WSD schedule whose decay the arguments do not tell, a part of one."""
    assert our_schedule(fields, {}) is None


def test_a_warmup_of_the_whole_run_leaves_no_decay() -> None:
    """The rate stays at its peak or falls at once; no length is below 0."""
    state = our_schedule(toy.SCHEDULE | {"lr_decay_steps": 2}, {})
    assert state is not None
    assert (state["decay_samples"], state["decay_start"], state["warmup_samples"]) == (0, 2, 4)


@pytest.mark.parametrize("name", ["wsd_decay_steps", "lr_wsd_decay_samples"])
def test_either_count_of_samples_is_the_length_of_a_decay(name: str) -> None:
    """A schedule's and an argument's; the iterations count only without them."""
    fields = toy.SCHEDULE | {"lr_decay_style": "WSD"}
    state = our_schedule(fields, _ARGS | {name: 10})
    assert state is not None and (state["decay_samples"], state["decay_start"]) == (10, 30)


def test_a_linear_decay_after_a_plateau_is_one_of_wsd() -> None:
    """Megatron-LM's linear schedule has no plateau."""
    state = our_schedule(toy.SCHEDULE | {"lr_decay_style": "linear"}, {})
    assert state is not None
    for start, style in ((4, "linear"), (5, "WSD")):
        fields, args = their_schedule(state | {"decay_start": start}, [], num_samples=0)
        assert fields["lr_decay_style"] == style
        assert args.get("lr_wsd_decay_style") == (None if style == "linear" else "linear")


def test_query_groups_are_those_of_the_arguments() -> None:
    """The number of groups counts only if heads share them; a width may follow from the others."""
    args = {"num_attention_heads": 4, "num_query_groups": 1, "hidden_size": 16}
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for shares, rows, sizes, groups in ((False, 48, (4, 4, 4), 4), (True, 24, (16, 4, 4), 1)):
        found = query_groups(name, (rows, 16), args | {"group_query_attention": shares})
        assert found is not None and (found.sizes, found.num_groups) == (sizes, groups)
        gated = args | {"group_query_attention": shares, "attention_output_gate": True}
        assert query_groups(name, (rows, 16), gated) is None
        found = query_groups(name, (rows + 16, 16), gated)
        assert found is not None and found.sizes == (sizes[0], *sizes)
    assert query_groups(name.replace("qkv", "proj"), (48, 16), args) is None
    assert query_groups(name, (48, 16), {}) is None


def test_without_a_schedule_the_rate_of_the_groups_stays() -> None:
    """Some other scheduler's state says nothing that Megatron-LM knows."""
    groups = [{"lr": torch.tensor(0.25)}, {"lr": 0.125, "weight_decay": 0.5}]
    fields, args = their_schedule({"last_epoch": 3}, groups, num_samples=7)
    assert (fields["max_lr"], fields["lr_decay_style"], args) == (0.25, "constant", {})
    assert type(fields["max_lr"]) is float
    assert (fields["start_wd"], fields["end_wd"], fields["num_steps"]) == (0.5, 0.5, 7)
    assert set(fields) == set(toy.SCHEDULE)


def test_groups_gather_equal_fields_and_set_steps_apart() -> None:
    """Three parameters in two groups; a rate of its own is a multiplier here."""
    base = {"lr": 0.1, "betas": (0.9, 0.99), "step": 5}
    fields = {"a": base, "b": base | {"lr_mult": 2.0}, "c": base | {"step": 6}}
    groups, steps = our_groups(fields, str)
    assert groups == [
        {"names": ["a", "c"], "lr": 0.1, "betas": (0.9, 0.99)},
        {"names": ["b"], "lr": 0.1, "betas": (0.9, 0.99), "lr_mult": 2.0, "lr_multiplier": 2.0},
    ]
    assert steps == {"a": 5, "b": 5, "c": 6}


def test_a_group_gets_the_fields_by_which_megatron_tells_groups_apart() -> None:
    """Where it has them already they stay; a tensor rate becomes a number."""
    group = {"names": ["a"], "lr": torch.tensor(0.5), "weight_decay": 0.0, "lr_multiplier": 3.0}
    fields = their_group(group, {"max_lr": 1.0, "min_lr": 0.1})
    # A tensor would be equal too.
    assert type(fields["lr"]) is float
    assert fields == {
        "lr": 0.5,
        "weight_decay": 0.0,
        "lr_mult": 3.0,
        "wd_mult": 0.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "max_lr": 1.0,
        "min_lr": 0.1,
    }
    decays = their_group(group | {"weight_decay": torch.tensor(0.5)}, toy.SCHEDULE)
    assert type(decays["weight_decay"]) is float and decays["wd_mult"] == 1.0
    stale = their_group(group | {"lr_mult": 2.0}, toy.SCHEDULE)
    assert stale["lr_mult"] == 3.0, "the multiplier that counts here"
    kept = their_group(group | {"is_expert_parallel": True, "max_lr": 7.0}, toy.SCHEDULE)
    assert kept["is_expert_parallel"] is True and kept["max_lr"] == 7.0


def _draws() -> list[object]:
    return [random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn()]


def test_random_states_draw_the_same_numbers() -> None:
    """Ours to theirs and back, restored, and theirs set by hand."""
    before = rng_state()
    try:
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(5)
        np.random.randn()
        ours = rng_state()
        wanted = _draws()
        theirs = their_rng_state(ours)
        (back,), unused = our_rng_states([("rng_state.(0, 0)", [theirs])])
        assert unused == []
        restore_rng_state(back)
        assert _draws() == wanted
        random.setstate(theirs["random_rng_state"])
        np.random.set_state(theirs["np_rng_state"])
        torch.set_rng_state(theirs["torch_rng_state"])
        assert _draws() == wanted
    finally:
        restore_rng_state(before)


def test_random_states_of_other_cells_are_named() -> None:
    """Of pipeline and tensor parallel ranks only the first cell has a counterpart."""
    cells = ("(0, 0)", "(0, 1)", "(1, 0)")
    stored = [(f"rng_state.{cell}", [toy.rng(seed)]) for seed, cell in enumerate(cells)]
    states, unused = our_rng_states(stored)
    assert len(states) == 1 and unused == ["rng_state.(0, 1)", "rng_state.(1, 0)"]
    assert torch.equal(states[0]["torch"], toy.rng(0)["torch_rng_state"])
    assert torch.equal(states[0]["trackers"]["model-parallel-rng"], torch.arange(8).byte())
    with pytest.raises(CheckpointError, match=r"np_rng_state"):
        our_rng_states([("rng_state.(0, 0).0.random_rng_state", (3, (1, 2), None))])


def test_arguments_become_plain_and_what_cannot_is_named() -> None:
    """Nested namespaces are dicts, sets lists, the rest texts."""
    nested = Foreign("argparse.Namespace", (), {"inner": {1, 2}}, is_called=True)
    other = Foreign("job.Thing", (3,), {"a": nested}, is_called=True)
    value = {"nested": nested, "things": [other, 1], "array": np.arange(2), "function": print}
    plain, foreign = plain_args(value)
    assert plain["nested"] == {"inner": [1, 2]} and plain["array"] == [0, 1]
    assert plain["things"][0].startswith("<job.Thing(3, a=") and plain["things"][1] == 1
    assert foreign == ["function", "things"]
    with pytest.raises(ValueError, match="a namespace expected"):
        plain_args(3)
