"""Full state dicts, forwards with everything gathered, and state dicts at the wrong time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megafsdp import (
    MixedPrecisionPolicy,
    full_state_dict,
    full_tensor,
    fully_shard,
    load_full_state_dict,
    summon_full_params,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.mesh.annotation import ExpertRange, annotate
from tests.fsdp.toy import (
    Net,
    assert_same_grads,
    assert_same_parameters,
    batches,
    mine,
    options_of_strategies,
    pair,
    shard,
)
from tests.ranks import Ranks


def _round_trip(strategy: str) -> None:
    reference, net = pair(strategy=strategy)
    state = full_state_dict(net)
    wanted = reference.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[n], wanted[n]) for n in wanted)
    other = Net(seed=5)
    with torch.no_grad():
        net(*mine(batches(1)[0]))
    net(*mine(batches(1)[0]))  # Keeps storage, which must not be used stale.
    load_full_state_dict(net, other.state_dict())
    batch = batches(1)[0]
    rank = dist.get_rank()
    with torch.no_grad():
        expected = other(*[t[2 * rank : 2 * rank + 2] for t in batch])
        torch.testing.assert_close(net(*mine(batch)), expected)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_a_full_state_dict_round_trips_bitwise(ranks: Ranks, strategy: str) -> None:
    """Names and values are the unsharded model's, and loading refreshes kept storage."""
    ranks(3).run(_round_trip, strategy)


class _Scaled(nn.Linear):
    """A layer with a scale of no dimension."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled product."""
        return super().forward(x) * self.scale


def _copies_from_full(options: dict[str, object]) -> None:
    wanted, net = _Scaled(), fully_shard(_Scaled(), **options)
    x = torch.randn(2, 5)
    net(x)  # May keep storage, which must not be used stale.
    for sharded, full in zip(net.parameters(), wanted.parameters(), strict=True):
        assert not torch.equal(full_tensor(sharded), full)
        with record_collectives() as record:
            sharded.copy_from_full_(full)
        assert not record.calls
        assert torch.equal(full_tensor(sharded), full) and sharded.grad_fn is None
    assert torch.equal(net(x), wanted(x))
    with pytest.raises(ValueError, match=r"shape \(\), got shape \(1,\).*copy_from_full_"):
        net.scale.copy_from_full_(torch.ones(1))


def _copies_from_full_in_every_strategy() -> None:
    for options in options_of_strategies():
        _copies_from_full(options)


def test_every_parameter_copies_from_a_full_tensor(ranks: Ranks) -> None:
    """Sharded or replicated, one without a dimension too; the next forward computes with it."""
    ranks(2).run(_copies_from_full_in_every_strategy)


def _in_inference_mode(strategy: str) -> None:
    reference, net = Net(), Net()
    with torch.inference_mode():
        shard(net, strategy=strategy)
        full = full_state_dict(net)
        load_full_state_dict(net, reference.state_dict())
        net(*mine(batches(1)[0]))
        state = net.state_dict()
        loaded = full_state_dict(net)
        net.load_state_dict(state)
    assert not any(t.is_inference() for t in (*full.values(), *state.values(), *loaded.values()))
    wanted = reference.state_dict()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_models_are_sharded_and_saved_in_inference_mode(ranks: Ranks, strategy: str) -> None:
    """As trainers do that validate in it; training goes on outside."""
    ranks(2).run(_in_inference_mode, strategy)


class Counting(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, value: object) -> None:
        super().__init__(6, 6)
        self.value = value

    def get_extra_state(self) -> object:
        """Return the state."""
        return self.value

    def set_extra_state(self, state: object) -> None:
        """Keep a state."""
        self.value = state


def _extra_states() -> None:
    values = {"count": [3]}, torch.arange(4)
    net, other = (nn.Sequential(*map(Counting, given)) for given in (values, (None, None)))
    wanted = copy.deepcopy(net.state_dict())
    for model in (net, other):
        # In front of it in names, but not in state dicts.
        model[1] = checkpoint_wrapper(model[1])
        fully_shard(model[0])
        fully_shard(model)
    state = full_state_dict(net)
    assert [*state] == [*wanted]
    net[0].value["count"].append(4)
    net[1].value.zero_()
    assert state["0._extra_state"] == {"count": [3]}
    assert torch.equal(state["1._extra_state"], torch.arange(4))
    with pytest.raises(ValueError, match=r"missing '0\._extra_state'"):
        load_full_state_dict(other, {n: v for n, v in state.items() if n != "0._extra_state"})
    load_full_state_dict(other, state)
    assert other[0].value == {"count": [3]}
    assert torch.equal(other[1].value, torch.arange(4))
    found = full_state_dict(other)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert torch.equal(found[name], wanted[name])


def test_extra_states_are_part_of_full_state_dicts(ranks: Ranks) -> None:
    """Whatever their type, in reads and loads, under wrappers too."""
    ranks(2).run(_extra_states)


def _tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = full_state_dict(fully_shard(model))
    assert state["1.weight"] is state["0.weight"]


def test_names_of_a_tied_tensor_share_it(ranks: Ranks) -> None:
    """As in a plain state dict, so that savers store it once."""
    ranks(2).run(_tied)


def _ignored_on_two_axes() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    wanted = {name: value.clone() for name, value in net.state_dict().items()}
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)]):
        weight = distribute_tensor(wanted["1.weight"], grid, placements)
        net[1].weight = nn.Parameter(weight)
        fully_shard(net[0])
        found = full_state_dict(net)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        for value in wanted.values():
            value.mul_(-0.5)
        load_full_state_dict(net, wanted)
        found = full_state_dict(net)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
        net.load_state_dict(wanted)


def test_dtensors_of_the_user_are_joined_and_cut(ranks: Ranks) -> None:
    """Parameters that no unit has, on a mesh of two axes."""
    ranks(4).run(_ignored_on_two_axes)


def _mismatch() -> None:
    _, net = pair()
    before = [p.local.clone() for p in net.parameters()]
    state = Net(seed=5).state_dict()
    if dist.get_rank() == 1:
        state["extra"] = torch.zeros(1)
        state["norm.weight"] = torch.zeros(3)
        del state["norm.bias"]
    words = "missing 'norm.bias'.*unknown 'extra'.*'norm.weight' of shape"
    with pytest.raises(ValueError if dist.get_rank() == 1 else RuntimeError, match=words):
        load_full_state_dict(net, state)
    assert all(torch.equal(a, p.local) for a, p in zip(before, net.parameters(), strict=True))


def test_a_wrong_full_state_dict_raises_on_all_ranks_and_changes_nothing(ranks: Ranks) -> None:
    """One rank's bad state is every rank's error, with all names."""
    ranks(2).run(_mismatch)


def _summon() -> None:
    reference, net = pair()
    tokens, _ = batches(1)[0]
    with summon_full_params(net):
        with record_collectives() as record, torch.no_grad():
            for _ in range(dist.get_rank() + 1):
                logits = net(tokens)
        assert not record.calls, "ranks may call the model a different number of times"
        assert torch.equal(dict(net.named_parameters())["norm.weight"], reference.norm.weight)
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(tokens))
    assert not net.blocks[0]._fsdp_unit().is_unsharded
    assert all(hasattr(p, "local") for p in net.parameters())


def test_summoned_parameters_are_full_and_forwards_gather_nothing(ranks: Ranks) -> None:
    """Inside the context the model runs on one rank alone; after it, it is sharded again."""
    ranks(2).run(_summon)


def _summon_slices() -> None:
    reference, net = pair(reshard_after_forward=2)
    batch = batches(1)[0]
    reference(*batch).backward()
    with summon_full_params(net):
        loss = net(*mine(batch))
        assert torch.equal(net.blocks[0].up.weight, reference.blocks[0].up.weight)
        loss.backward()
    assert_same_grads(net, reference)


def test_summoned_parameters_stay_where_forward_would_keep_a_slice(ranks: Ranks) -> None:
    """A training forward inside the context frees nothing."""
    ranks(4).run(_summon_slices)


def _writes_within(strategy: str, param_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    _, net = pair(strategy=strategy, mp_policy=policy)
    batch = mine(batches(1)[0])
    before, loss = full_state_dict(net), net(*batch)
    own = [local_tensor(p).clone() for p in net.parameters()]
    # The rank without an error of its own quotes that of the other.
    with (
        pytest.raises(RuntimeError, match=r"writes to .* units blocks.1. In summon_full_params"),
        summon_full_params(net),
        torch.no_grad(),
    ):
        if dist.get_rank() == 1:
            net.blocks[1].up.weight[1:].zero_()
    is_main_weight = strategy == "no_shard" and param_dtype is None
    if is_main_weight:
        load_full_state_dict(net, before)
    assert all(torch.equal(a, local_tensor(p)) for a, p in zip(own, net.parameters(), strict=True))
    assert torch.equal(net(*batch), loss)
    with summon_full_params(net):
        assert torch.equal(net(*batch), loss)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_writes_to_summoned_parameters_raise_on_all_ranks_and_are_undone(
    ranks: Ranks, strategy: str, param_dtype: torch.dtype | None
) -> None:
    """One rank wrote; main weights are as before, and forwards compute with them."""
    ranks(2).run(_writes_within, strategy, param_dtype)


def _raises_within() -> None:
    _, net = pair()
    words, kind = "the prompt is empty", (ValueError, RuntimeError)[1 - dist.get_rank()]
    with pytest.raises(kind, match=words), summon_full_params(net):
        if dist.get_rank() == 1:
            raise ValueError(words)
    assert all(hasattr(p, "local") for p in net.parameters())


def _raises_beside_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in net[0].parameters():
        annotate(parameter, is_expert=True, experts=ExpertRange(dist.get_rank(), 1, 2))
    for layer in net:
        fully_shard(layer, mesh=mesh["all"], expert_mesh=mesh["alone"])
    kind = (ValueError, RuntimeError)[1 - dist.get_rank()]
    with pytest.raises(kind, match="the prompt is empty"), summon_full_params(net):
        if dist.get_rank() == 1:
            raise ValueError("the prompt is empty")


def test_an_error_on_one_rank_ends_the_context_on_all(ranks: Ranks) -> None:
    """The others would wait at its end, where all agree; experts may be on fewer ranks."""
    ranks(2).run(_raises_within)
    ranks(2).run(_raises_beside_experts)


def _steps_within(strategy: str) -> None:
    reference, net = pair(strategy=strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, net)]
    (batch,) = batches(1)
    reference(*batch).backward()
    net(*mine(batch)).backward()
    with summon_full_params(net):
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(net, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_step_within_the_context_is_no_write(ranks: Ranks, strategy: str) -> None:
    """It changes main weights, which are the full parameters where all are replicated in fp32."""
    ranks(2).run(_steps_within, strategy)


def _state_dict_inside() -> None:
    net = shard(Net())
    net.norm.register_forward_hook(lambda *_: net.state_dict())
    with pytest.raises(RuntimeError, match="outside of the unit's forward"):
        net(*mine(batches(1)[0]))


def test_state_dict_in_the_middle_of_a_forward_is_refused(ranks: Ranks) -> None:
    """It would show gathered parameters."""
    ranks(2).run(_state_dict_inside)


def _load_state_dict() -> None:
    _, net = pair()
    _, other = pair()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    net(*mine(batches(1)[0]))
    objects = [id(p) for p in net.parameters()]
    net.load_state_dict(other.state_dict())
    assert [id(p) for p in net.parameters()] == objects
    with torch.no_grad():
        assert torch.equal(net(*mine(batches(1)[0])), other(*mine(batches(1)[0])))


STRATEGIES = ["optim_grads_params", "optim_grads", "optim", "no_shard"]


def _after_unshard(strategy: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    reference, net = pair(strategy=strategy, mp_policy=policy)
    wanted = reference.state_dict()
    units = (net, *net.blocks)
    names = [*wanted]
    for get in (nn.Module.state_dict, get_model_state_dict, full_state_dict):
        for unit in units:
            unit.unshard()
        found = {name: full_tensor(tensor) for name, tensor in get(net).items()}
        assert [*found] == names
        assert all(torch.equal(found[name], wanted[name]) for name in names)
        assert all(isinstance(p, DTensor) for p in net.parameters())
    given, batch = Net(seed=5).state_dict(), mine(batches(1)[0])
    same = shard(Net(seed=5), strategy=strategy, mp_policy=policy)
    sharded = same.state_dict()
    loads: list[Callable[[], object]] = [
        lambda: net.load_state_dict(sharded),
        lambda: set_model_state_dict(net, dict(sharded)),
        lambda: load_full_state_dict(net, given),
        # As torch.distributed.checkpoint writes.
        lambda: [
            local_tensor(t).copy_(local_tensor(sharded[n])) for n, t in net.state_dict().items()
        ],
    ]
    for load in loads:
        load_full_state_dict(net, wanted)
        for unit in units:
            unit.unshard()
        load()
        assert all(torch.equal(t, given[n]) for n, t in full_state_dict(net).items())
        with torch.no_grad():
            assert torch.equal(net(*batch), same(*batch))
    # torch cuts what it was given like the parameters that it sees, and they were not sharded.
    net.blocks[0].unshard()
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"full one|mixed torch\.Tensor"):
        set_model_state_dict(net, dict(wanted), options=options)
    set_model_state_dict(net, dict(wanted), options=options)
    assert all(torch.equal(t, wanted[n]) for n, t in full_state_dict(net).items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_after_unshard_are_those_of_main_weights(ranks: Ranks, strategy: str) -> None:
    """Reads have fp32 values, and loads arrive; the sharded parameters are shown again."""
    ranks(2).run(_after_unshard, strategy)


def _while_summoned(strategy: str, dtype: torch.dtype | None) -> None:
    reference, net = pair(strategy=strategy, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    wanted, given = reference.state_dict(), Net(seed=5).state_dict()
    sharded, words = net.state_dict(), "outside of summon_full_params"
    full = StateDictOptions(full_state_dict=True)
    loads: list[Callable[[], object]] = [
        lambda: net.load_state_dict(sharded),
        lambda: net.blocks[0].up.load_state_dict(nn.Linear(12, 60).state_dict()),
        lambda: set_model_state_dict(net, dict(given), options=full),
        lambda: load_full_state_dict(net, given),
        lambda: load_full_state_dict(net.norm, nn.LayerNorm(12).state_dict()),
    ]
    with summon_full_params(net):
        for get in (nn.Module.state_dict, get_model_state_dict, full_state_dict):
            if dtype is None:
                found = get(net)
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
                continue
            with pytest.raises(RuntimeError, match=words):
                get(net)
        for load in loads:
            with pytest.raises(RuntimeError, match=words):
                load()
    assert all(torch.equal(t, wanted[n]) for n, t in full_state_dict(net).items())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_while_summoned_are_main_weights_or_refused(
    ranks: Ranks, strategy: str, dtype: torch.dtype | None
) -> None:
    """Full parameters are read where they are the main weights, and never loaded."""
    ranks(2).run(_while_summoned, strategy, dtype)


def _load_state_dict_inside() -> None:
    net = shard(Net())
    state = net.state_dict()
    net.norm.register_forward_hook(lambda *_: net.load_state_dict(state))
    with pytest.raises(RuntimeError, match="outside of the unit's forward"):
        net(*mine(batches(1)[0]))


def test_load_state_dict_in_the_middle_of_a_forward_is_refused(ranks: Ranks) -> None:
    """What it wrote into gathered parameters would be lost."""
    ranks(2).run(_load_state_dict_inside)


def _writes_where_one_rank_has_rows(directory: Path) -> None:
    net = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), strategy="optim")
    x, bias = torch.ones(2, 4), net[1].bias
    numels: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(numels, bias.local.numel())
    assert sorted(numels) == [0, 1]
    with torch.no_grad():
        without = net(x) - full_tensor(bias)
        bias.copy_from_full_(torch.full((1,), 5.0))
        assert torch.equal(net(x), without + 5.0)
        dcp.save({"1.bias": torch.full((1,), 7.0)}, checkpoint_id=directory)
        dcp.load({"1.bias": net.state_dict()["1.bias"]}, checkpoint_id=directory)
        assert torch.equal(net(x), without + 7.0)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_writes_count_on_ranks_that_have_no_rows(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks enter the gather that follows a copy of a full tensor, or torch's load."""
    ranks(2).run(_writes_where_one_rank_has_rows, tmp_path)


def _writes_into_a_state_dict(strategy: str) -> None:
    # A cast that stays in memory is made anew only after a write that was counted.
    options = {"strategy": strategy, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    net, other = (shard(Net(seed=seed), **options) for seed in (0, 5))
    batch = mine(batches(1)[0])
    with torch.no_grad():
        before = net(*batch)
        given = other.state_dict()
        for name, tensor in net.state_dict().items():
            local_tensor(tensor).copy_(local_tensor(given[name]))
        wanted = other(*batch)
        assert not torch.equal(before, wanted)
        assert torch.equal(net(*batch), wanted)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_writes_into_the_tensors_of_a_state_dict_count(
    ranks: Ranks, strategy: str, num_ranks: int
) -> None:
    """As ``torch.distributed.checkpoint`` writes, without ``load_state_dict``."""
    ranks(num_ranks).run(_writes_into_a_state_dict, strategy)


def test_load_state_dict_copies_and_refreshes(ranks: Ranks) -> None:
    """A sharded state dict of an equal model loads by copy into the same parameters."""
    ranks(2).run(_load_state_dict)


def _loads_what_fsdp2_cut_after_tp() -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for num_rows in (8, 9, 3):
        for dim in (0, 1):
            weight = torch.randn(num_rows, 6)
            theirs, ours = (nn.Linear(6, num_rows, bias=False) for _ in range(2))
            theirs.weight = nn.Parameter(distribute_tensor(weight, root["tp"], [Shard(dim)]))
            fsdp2(theirs, mesh=root["dp"])
            fully_shard(ours)
            ours.load_state_dict(theirs.state_dict())
            assert torch.equal(ours.weight.full_tensor(), weight)


def test_rows_that_tp_cut_before_fsdp2_are_loaded_in_order(ranks: Ranks) -> None:
    """Strided shards, uneven ones too, come together as the tensor that was cut."""
    ranks(4).run(_loads_what_fsdp2_cut_after_tp)
