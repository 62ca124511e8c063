"""FusedAdam begins again: states that were dropped, or that a load does not have, are zero.

The oracle is another optimizer that never stepped, or was given only the states that are left.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import FusedAdam, MixedPrecisionPolicy
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.checkpoint import load, save
from tests.fsdp.toy import Net, batches, mine, shard
from tests.optimizer.cases import for_each
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
BF16 = torch.bfloat16
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
FORMATS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (BF16, BF16),
    "fp16": (torch.float16, torch.float32),
    "fp8": (torch.float8_e4m3fn, torch.float16),
    "remainders": (torch.float32, BF16),
}
REMAINDER = "param_remainder"


def _options(strategy: str) -> dict[str, object]:
    if strategy in ("hsdp", "hfsdp"):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_outer", "dp_shard"))
        return {"mesh": mesh, "outer_strategy": "optim" if strategy == "hfsdp" else "no_shard"}
    return {"strategy": strategy}


def _run(strategy: str, kind: str) -> tuple[nn.Module, FusedAdam]:
    is_narrow = kind == "remainders"
    policy = MixedPrecisionPolicy(BF16, main_params_dtype=BF16 if is_narrow else torch.float32)
    net = shard(Net(num_blocks=1), mp_policy=policy, **_options(strategy))
    first, second = FORMATS[kind]
    optimizer = FusedAdam(
        net.parameters(),
        lr=0.01,
        weight_decay=0.1,
        exp_avg_dtype=first,
        exp_avg_sq_dtype=second,
        store_param_remainders=is_narrow,
    )
    return net, optimizer


def _steps(net: nn.Module, optimizer: FusedAdam, seeds: range) -> None:
    """Train; one parameter has no gradient for odd seeds."""
    for seed in seeds:
        net(*mine(batches(1, seed)[0])).backward()
        if seed % 2:
            net.norm.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()


def _assert_alike(
    net: nn.Module, optimizer: FusedAdam, other: nn.Module, own: FusedAdam, how: str
) -> None:
    for (name, parameter), twin in zip(net.named_parameters(), other.parameters(), strict=True):
        weights = [o.canonical_weight(p) for o, p in ((optimizer, parameter), (own, twin))]
        assert torch.equal(*map(local_tensor, weights)), (how, name)
        states = [o.canonical_state(p) for o, p in ((optimizer, parameter), (own, twin))]
        assert states[0].keys() == states[1].keys() >= {"step", "exp_avg", "exp_avg_sq"}
        for key in states[0]:
            assert torch.equal(*(local_tensor(state[key]) for state in states)), (how, name, key)


def _without_states(packed: dict, dropped: list[int], *, keeps_remainders: bool = False) -> dict:
    """Return a state dict without the states of some parameters, or without all but remainders."""
    states = {index: s for index, s in packed["state"].items() if index not in dropped}
    if keeps_remainders:
        for index in dropped:
            states[index] = {k: v for k, v in packed["state"][index].items() if k == REMAINDER}
    return packed | {"state": states}


def _begins_again(directory: Path, strategy: str, kind: str) -> None:
    net, optimizer = _run(strategy, kind)
    start = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    save(directory, step=0, model=net, optimizer=optimizer)
    everything = list(range(len(optimizer.param_groups[0]["params"])))
    for how in ("checkpoint", "load_state_dict", "clear", "pop one", "load all but one"):
        _steps(net, optimizer, range(2))
        packed = copy.deepcopy(optimizer.state_dict())
        other, own = _run(strategy, kind)
        dropped = [2] if "one" in how else everything
        if how == "checkpoint":
            load(directory, model=net, optimizer=optimizer)
        elif how == "load_state_dict":
            net.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
        elif how == "clear":
            optimizer.state.clear()
        elif how == "pop one":
            optimizer.state.pop(optimizer.param_groups[0]["params"][2])
        else:
            optimizer.load_state_dict(_without_states(packed, dropped))
        if how != "checkpoint":
            other.load_state_dict(net.state_dict())
            is_loaded = how.startswith("load")
            left = _without_states(packed, dropped, keeps_remainders=not is_loaded)
            own.load_state_dict(left)
        _steps(net, optimizer, range(10, 12))
        _steps(other, own, range(10, 12))
        _assert_alike(net, optimizer, other, own, how)


# The default suite has each strategy and each format, and remainders both replicated and sharded.
SOME = list(zip(STRATEGIES, [*FORMATS, "fp32"], strict=True))
SOME.append(("optim_grads_params", "remainders"))
OTHERS = [case for case in itertools.product(STRATEGIES, FORMATS) if case not in SOME]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropped_states_begin_at_zero(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    """After a load of step 0 or of some states, and after ``state`` was cleared by hand."""
    cases = [(tmp_path / kind, own, kind) for own, kind in SOME if own == strategy]
    ranks(2).run(for_each, _begins_again, cases)


@pytest.mark.matrix("adam-reset")
@pytest.mark.parametrize(("strategy", "kind"), OTHERS)
def test_dropped_states_of_every_format_begin_at_zero(
    ranks: Ranks, tmp_path: Path, strategy: str, kind: str
) -> None:
    """The rest of the product of strategies and formats."""
    ranks(2).run(_begins_again, tmp_path, strategy, kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_dropped_states_of_plain_parameters_begin_at_zero(kind: str) -> None:
    """Remainders stay, before the next step too: the weight is none of the states."""
    is_narrow = kind == "remainders"
    torch.manual_seed(0)
    start = torch.randn(40, 30, dtype=BF16 if is_narrow else torch.float32)

    def make() -> tuple[nn.Parameter, FusedAdam]:
        weight, (first, second) = nn.Parameter(start.clone()), FORMATS[kind]
        formats = {"exp_avg_dtype": first, "exp_avg_sq_dtype": second}
        return weight, FusedAdam([weight], store_param_remainders=is_narrow, **formats)

    weight, optimizer = make()
    other, own = make()
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    before = optimizer.canonical_weight(weight).clone()
    packed = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    assert torch.equal(optimizer.canonical_weight(weight), before)
    other.data.copy_(weight.data)
    own.load_state_dict(_without_states(packed, [0], keeps_remainders=True))
    weight.grad = torch.randn_like(weight)
    other.grad = weight.grad.clone()
    optimizer.step()
    own.step()
    assert torch.equal(optimizer.canonical_weight(weight), own.canonical_weight(other))
    assert float(optimizer.state[weight]["step"]) == 1
    for name in ("exp_avg", "exp_avg_sq"):
        wanted = own.get_unscaled_state(other, name)
        assert torch.equal(optimizer.get_unscaled_state(weight, name), wanted)


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("is_cleared_before", [False, True])
def test_a_copy_whose_states_were_dropped_keeps_remainders(
    copies: Callable[[FusedAdam], FusedAdam], is_cleared_before: bool
) -> None:
    """Dropped in the original, or in the copy before its first step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 30, dtype=BF16))
    optimizer = FusedAdam([weight], store_param_remainders=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    before = optimizer.canonical_weight(weight).clone()
    assert not torch.equal(before, weight.float())
    if is_cleared_before:
        optimizer.state.clear()
    copied = copies(optimizer)
    copied.state.clear()
    (own,) = copied.param_groups[0]["params"]
    assert torch.equal(copied.canonical_weight(own), before)


def test_a_load_that_leaves_the_model_alone_keeps_remainders(tmp_path: Path) -> None:
    """The states alone are loaded: weights keep all of their bits."""
    torch.manual_seed(0)
    model = nn.Linear(6, 8, dtype=BF16)
    optimizer = FusedAdam(model.parameters(), store_param_remainders=True)
    for seed in range(2):
        torch.manual_seed(seed)
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
        if seed == 0:
            save(tmp_path, step=1, model=model, optimizer=optimizer)
    before = optimizer.canonical_weight(model.weight).clone()
    assert not torch.equal(before, model.weight.float())
    load(tmp_path, model=model, optimizer=optimizer, ignore=["model.*"])
    assert float(optimizer.state[model.weight]["step"]) == 1
    assert torch.equal(optimizer.canonical_weight(model.weight), before)


def test_a_state_dict_without_remainders_means_zeros() -> None:
    """Those that the optimizer has belong to the weights before the load."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 30, dtype=BF16))
    optimizer = FusedAdam([weight], store_param_remainders=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert not torch.equal(optimizer.canonical_weight(weight), weight.float())
    packed = optimizer.state_dict()
    del packed["state"][0][REMAINDER]
    optimizer.load_state_dict(packed)
    assert torch.equal(optimizer.canonical_weight(weight), weight.float())


def test_a_remainder_of_a_weight_that_was_replaced_makes_no_nan() -> None:
    """Zeros written into a parameter whose states were cleared stay within half of a bf16."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, dtype=BF16))
    optimizer = FusedAdam([weight], store_param_remainders=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert (optimizer.state[weight][REMAINDER] < 0).any()
    optimizer.state.clear()
    weight.data.zero_()
    optimizer.step()
    assert weight.isfinite().all()
    assert optimizer.canonical_weight(weight).isfinite().all()
