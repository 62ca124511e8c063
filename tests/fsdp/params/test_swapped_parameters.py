"""Sharded parameters that torch.utils.swap_tensors swaps stay over their flat buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import swap_tensors

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    OffloadPolicy,
    checkpoint,
    full_state_dict,
    fully_shard,
    local_parameters,
    summon_full_params,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.fsdp.params.parameter_group import group_of
from tests.fsdp.toy import (
    Net,
    adamw,
    assert_same_grads,
    assert_same_parameters,
    batches,
    mine,
    options_of_strategies,
    pair,
    shard,
    train_both,
)
from tests.ranks import Ranks


def _assert_trains(reference: Net, net: Net, **options: object) -> None:
    """Assert that two nets are equal, and stay equal in training."""
    assert_same_parameters(net, reference, rtol=0, atol=0)
    for batch in batches(1):
        reference(*batch).backward()
        net(*mine(batch)).backward()
        assert_same_grads(net, reference, rtol=1e-5, atol=1e-6)
    for model in (reference, net):
        model.zero_grad()
    before = reference.norm.weight.detach().clone()
    losses = train_both(reference, net, num_steps=2, **options)
    for mean, expected in losses:
        assert mean == pytest.approx(expected, rel=1e-5)
    # Adam with eps=1e-5 (adamw) turns a difference of rounding in a gradient into 1e-4 of a step.
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-6)
    assert not torch.equal(reference.norm.weight, before)


def _of_meta_tensors() -> None:
    for options in options_of_strategies():
        reference = Net(2)
        with torch.device("meta"):
            net = shard(Net(2), **options)
        parameters = dict(net.named_parameters())
        for parameter in parameters.values():
            assert parameter.is_meta
            empty = torch.empty_like(parameter, device="cpu")
            swap_tensors(parameter, nn.Parameter(empty))
            assert not parameter.is_meta and isinstance(parameter, nn.Parameter)
        assert all(parameters[name] is p for name, p in net.named_parameters())
        assert all(group_of(p) is not None for p in parameters.values())
        for name, parameter in reference.named_parameters():
            parameters[name].copy_from_full_(parameter.detach())
        _assert_trains(reference, net, make_optimizer=adamw)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_memory_that_is_swapped_into_meta_parameters_is_what_is_trained(
    ranks: Ranks, num_ranks: int
) -> None:
    """Programs give memory to meta parameters so, and write values afterwards."""
    ranks(num_ranks).run(_of_meta_tensors)


def _of_initialized_meta_tensors() -> None:
    reference = Net(2)
    with torch.device("meta"):
        net = shard(Net(2))
    for full, parameter in zip(reference.parameters(), net.parameters(), strict=True):
        new = torch.empty_like(parameter, device="cpu")
        new.copy_from_full_(full.detach())
        swap_tensors(parameter, nn.Parameter(new))
    _assert_trains(reference, net)


def test_values_that_are_swapped_into_meta_parameters_count(ranks: Ranks) -> None:
    """The first forward asks for no other initialisation."""
    ranks(2).run(_of_initialized_meta_tensors)


def _average(model: Net) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(p.detach().clone() * 0.5) for n, p in model.named_parameters()}


def _swap_all(model: Net, others: dict[str, nn.Parameter]) -> None:
    for name, parameter in model.named_parameters():
        swap_tensors(parameter, others[name])


def _of_averages(options: dict[str, object], directory: Path) -> None:
    reference, net = pair(2, **options)
    models = (reference, net)
    optimizers = [FusedAdam(each.parameters(), lr=1e-2, eps=1e-5) for each in models]
    averages = [_average(each) for each in models]
    kept = [{n: p.detach().clone() for n, p in each.items()} for each in averages]
    for step in range(3):
        batch = batches(1, seed=step)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        trained = copy.deepcopy(reference)
        for each, average in zip(models, averages, strict=True):
            _swap_all(each, average)
        # Under the averages: forward, state dict and checkpoint.
        with torch.no_grad():
            logits = net(mine(batch)[0])
            torch.testing.assert_close(logits, reference(mine(batch)[0]), rtol=1e-4, atol=1e-5)
        assert_same_parameters(net, reference, rtol=0, atol=0)
        state = full_state_dict(net)
        assert all(torch.equal(state[n], p.detach()) for n, p in reference.named_parameters())
        checkpoint.save(directory, step=step, model=net)
        for each, average in zip(models, averages, strict=True):
            _swap_all(each, average)
        assert_same_parameters(net, trained, rtol=1e-4, atol=1e-6)
        for average, values in zip(averages, kept, strict=True):
            assert all(torch.equal(p.detach(), values[n]) for n, p in average.items())
    assert len(optimizers[1].state) == len(list(net.parameters()))
    other = shard(Net(2, seed=3), **options)
    checkpoint.load(directory, model=other)
    loaded = full_state_dict(other)
    assert all(torch.equal(loaded[n], v) for n, v in state.items())


def _of_averages_in_every_strategy(directory: Path) -> None:
    for number, options in enumerate(options_of_strategies()):
        _of_averages(options, directory / str(number))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_averaged_weights_may_be_swapped_in_for_a_while(
    ranks: Ranks, num_ranks: int, tmp_path: Path
) -> None:
    """Each tensor then has the other's values, and the optimizer's states stay those of ours."""
    ranks(num_ranks).run(_of_averages_in_every_strategy, tmp_path)


def _of_gradients() -> None:
    policies = (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16),
    )
    for policy in policies:
        net = shard(Net(1), mp_policy=policy)
        batch = mine(batches(1)[0])
        net(*batch).backward()
        parameter = net.blocks[0].up.weight
        grad, dtype = parameter.grad.clone(), parameter.grad.dtype
        before = parameter.full_tensor().detach().clone()
        parameter.scale = 2.0
        called: list[torch.Tensor] = []
        parameter.register_post_accumulate_grad_hook(called.append)
        other = nn.Parameter(torch.zeros_like(parameter), requires_grad=True)
        swap_tensors(parameter, other)
        # As torch moves them in a plain model.
        assert parameter.grad is None and torch.equal(other.grad.local, grad.local)
        assert other.scale == 2.0 and not hasattr(parameter, "scale")
        assert torch.equal(other.full_tensor(), before)
        assert not bool(parameter.full_tensor().any())
        assert bool(grad.full_tensor().any())
        other.detach().fill_(7.0)
        net(*batch).backward()
        assert list(map(id, called)) == [id(parameter)], "the hook stays"
        assert parameter.grad is not None and parameter.grad.dtype is dtype
        assert not bool(parameter.full_tensor().any()), "other memory"
        # A second swap brings everything back.
        parameter.grad = None
        swap_tensors(parameter, other)
        assert torch.equal(parameter.grad.local, grad.local) and parameter.scale == 2.0
        FusedAdam(net.parameters(), lr=1e-2).step()
        assert torch.equal(parameter.full_tensor() != 7.0, grad.full_tensor() != 0.0)
        net(*batch).backward()
        assert list(map(id, called)) == [id(parameter)] * 2
        with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
            parameter.register_hook(print)


def test_gradients_and_attributes_move_as_in_a_plain_model(ranks: Ranks) -> None:
    """What ties a parameter to its unit stays, such as the dtype of its gradients."""
    ranks(2).run(_of_gradients)


def _of_frozen() -> None:
    net = shard(Net(1))
    parameter = net.blocks[0].up.weight
    swap_tensors(parameter, torch.ones_like(parameter))
    assert not parameter.requires_grad
    net(*mine(batches(1)[0])).backward()
    assert parameter.grad is None and net.norm.weight.grad is not None
    parameter.requires_grad_(True)
    net(*mine(batches(1)[0])).backward()
    assert parameter.grad is not None


def test_a_tensor_that_needs_no_gradient_freezes_the_parameter(ranks: Ranks) -> None:
    """As in a plain model."""
    ranks(2).run(_of_frozen)


def _of_two_parameters() -> None:
    for strategy in ("optim_grads_params", "no_shard"):
        nets = [shard(Net(1, seed=seed), strategy=strategy) for seed in (0, 1)]
        first, second = (dict(each.named_parameters()) for each in nets)
        for name in first:
            swap_tensors(first[name], second[name])
        for net, seed in zip(nets, (1, 0), strict=True):
            _assert_trains(Net(1, seed=seed), net)


def test_parameters_of_two_models_may_be_swapped(ranks: Ranks) -> None:
    """Each stays in its model, with the other's values."""
    ranks(2).run(_of_two_parameters)


def _loads() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for options in options_of_strategies():
            reference, net = Net(2), shard(Net(2, seed=5), **options)
            optimizer = FusedAdam(net.parameters(), lr=0.0)
            net.load_state_dict(shard(Net(2), **options).state_dict())
            assert all(group_of(p) is not None for p in net.parameters())
            net(*mine(batches(1)[0])).backward()
            optimizer.step()
            net.zero_grad()
            _assert_trains(reference, net, make_optimizer=adamw)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_loads_that_swap_parameters_leave_them_in_their_units(ranks: Ranks, num_ranks: int) -> None:
    """With torch's flag load_state_dict() swaps a parameter with an alias of itself."""
    ranks(num_ranks).run(_loads)


def _on_the_host() -> None:
    reference, net = pair(1, offload_policy=OffloadPolicy(params=True, pin_memory=False))
    for model in (reference, net):
        _swap_all(model, _average(model))
    _assert_trains(reference, net)


def test_parameters_on_the_host_may_be_swapped(ranks: Ranks) -> None:
    """Their gathers read the new values."""
    ranks(2).run(_on_the_host)


def _of_other_dtype(parameter: DTensor) -> torch.Tensor:
    return parameter.detach().to(torch.bfloat16)


def _of_other_shape(parameter: DTensor) -> torch.Tensor:
    return fully_shard(nn.Linear(3, 5)).weight


def _cut_by_torch(parameter: DTensor) -> torch.Tensor:
    full = torch.zeros(parameter.shape)
    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def _replicated(parameter: DTensor) -> torch.Tensor:
    full = torch.zeros(2, 2)
    return DTensor.from_local(full, parameter.device_mesh, [Replicate()], run_check=False)


def _with_graph(parameter: DTensor) -> torch.Tensor:
    return parameter.detach().requires_grad_().mul(2.0)


REFUSED: dict[Callable[[DTensor], torch.Tensor], str] = {
    _of_other_dtype: "torch.bfloat16",
    _of_other_shape: r"\(5, 3\)",
    _cut_by_torch: r"a DTensor: \(60, 12\), \(Shard\(dim=0\),\)",
    _replicated: r"a DTensor: \(2, 2\)",
    _with_graph: "with a graph",
}


def _refuses(strategy: str) -> None:
    reference, net = pair(1, strategy=strategy)
    parameter = net.blocks[0].up.weight
    for make, got in REFUSED.items():
        if make is _with_graph and IS_DISPATCH_BYPASSED and strategy != "no_shard":
            # torch 2.11 has no graph of unevenly sharded parameters.
            continue
        other = make(parameter)
        before, values = type(other), other.detach().clone()
        with record_collectives() as record:
            for pair_ in ((parameter, other), (other, parameter)):
                with pytest.raises(RuntimeError, match=f"swap of .*'up.weight'.*got .*{got}"):
                    swap_tensors(*pair_)
        assert not record.calls
        assert type(other) is before and group_of(parameter) is not None
        assert torch.equal(other.detach().to_local(), values.to_local())
    with pytest.raises(RuntimeError, match="different slots"):
        swap_tensors(parameter, nn.Parameter(torch.zeros(60, 12)))
    (local, *_) = local_parameters(net)
    with pytest.raises(RuntimeError, match="swap of the model's parameters"):
        swap_tensors(local, nn.Parameter(torch.zeros_like(local)))
    net.blocks[0].unshard()
    _refuses_full(net, parameter)
    net.blocks[0].reshard()
    with summon_full_params(net):
        _refuses_full(net, parameter)
    _assert_trains(reference, net)


def _refuses_full(net: Net, parameter: DTensor) -> None:
    shown = net.blocks[0].up.weight
    assert shown is not parameter
    with pytest.raises(RuntimeError, match=r"full parameter 'up\.weight'"):
        swap_tensors(shown, nn.Parameter(torch.zeros(60, 12)))
    swap_tensors(copy.deepcopy(shown), nn.Parameter(torch.zeros(60, 12)))


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_other_swaps_are_refused_and_leave_both_tensors_as_they_were(
    ranks: Ranks, strategy: str
) -> None:
    """Of another shape, dtype or cut, and swaps of full and local parameters; by all ranks."""
    ranks(2).run(_refuses, strategy)
