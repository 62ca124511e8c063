"""Any element-wise torch optimizer steps the host's part, as it would step the whole."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import (
    FusedAdam,
    HybridDeviceOptimizer,
    clip_grad_norm_,
    full_tensor,
    fully_shard,
)
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.checkpoint import load, save
from megafsdp.optimizer.offload.placement import groups_of
from megafsdp.optimizer.offload.torch_optimizer import TorchBucketStep
from tests.fsdp.toy import Net, batches, mine
from tests.optimizer.offload.hybrid_runs import Case, assert_same, backward, local_bits, make_net
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
_SMALL = Case(num_blocks=1)
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"foreach": False, "eps": 1e-10}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": False, "centered": True}),
}


def _hybrid(net: Net, kind: str, fraction: float = 1.0, **options: Any) -> HybridDeviceOptimizer:
    cls, own = KINDS[kind]
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 3e-3},
    ]
    return HybridDeviceOptimizer(
        groups,
        lr=1e-2,
        offload_fraction=fraction,
        cpu_optimizer_cls=cls,
        cpu_optimizer_kwargs=own,
        **options,
    )


def _whole(net: Net, kind: str) -> torch.optim.Optimizer:
    cls, own = KINDS[kind]
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 3e-3},
    ]
    options = own | ({"weight_decay": 0.0} if kind == "adamw" else {})
    return cls(groups, lr=1e-2, **options)  # type: ignore[call-arg]


def _trains_alike(kind: str, clips: bool) -> None:
    whole_net = make_net(_SMALL)
    whole = _whole(whole_net, kind)
    net = make_net(_SMALL)
    hybrid = _hybrid(net, kind, max_grad_norm=0.5 if clips else None)
    for seed in range(4):
        assert backward(net, seed) == backward(whole_net, seed)
        if seed == 2:
            net.blocks[0].up.weight.grad = whole_net.blocks[0].up.weight.grad = None
        if clips:
            clip_grad_norm_(whole_net, 0.5)
        for optimizer in (whole, hybrid):
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.8
    hybrid.synchronize()
    for (name, a), b in zip(net.named_parameters(), whole_net.parameters(), strict=True):
        states, wanted = hybrid.state[a], whole.state[b]
        assert states.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(local_tensor(states[key]), local_tensor(value)), (name, key)
        assert torch.equal(local_tensor(a), local_tensor(b)), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_hosts_optimizer_has_the_bits_of_one_over_the_model(ranks: Ranks, kind: str) -> None:
    """Weights and states, with a gradient that is None, and rates by parameter group."""
    ranks(2).run(_trains_alike, kind, False)


def test_clipping_is_by_the_norm_of_all_gradients(ranks: Ranks) -> None:
    """In the step, and not in place: gradients are left as they are."""
    ranks(2).run(_trains_alike, "sgd", True)


def _follows_groups(kind: str) -> None:
    nets = make_net(_SMALL), make_net(_SMALL)
    whole, hybrid = _whole(nets[0], kind), _hybrid(nets[1], kind)
    for seed in range(4):
        for net, optimizer in zip(nets, (whole, hybrid), strict=True):
            groups = optimizer.param_groups
            if seed == 1:
                groups[1]["params"].append(groups[0]["params"].pop())
            elif seed == 2:
                groups.append({**groups[0], "params": [groups[0]["params"].pop(0)], "lr": 0.1})
            elif seed == 3:
                groups[1]["params"] += groups.pop(0)["params"]
            backward(net, seed)
            optimizer.step()
            optimizer.zero_grad()
    hybrid.synchronize()
    for (name, a), b in zip(nets[1].named_parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(local_tensor(a), local_tensor(b)), name


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_change_groups_take_their_rates(ranks: Ranks, kind: str) -> None:
    """Moved to another group and to a new one, and those of a group that was dropped."""
    ranks(2).run(_follows_groups, kind)


def _fills_its_rate() -> None:
    nets = make_net(_SMALL), make_net(_SMALL)
    whole = torch.optim.SGD(nets[0].parameters(), lr=torch.tensor(0.1))
    # The rate follows the groups, even if the options have one.
    hybrid = HybridDeviceOptimizer(
        nets[1].parameters(),
        lr=torch.tensor(0.1),
        cpu_optimizer_cls=torch.optim.SGD,
        cpu_optimizer_kwargs={"lr": 100.0},
    )
    may_run, inner = threading.Event(), TorchBucketStep._update

    def late(step: TorchBucketStep, scale: float) -> None:
        assert may_run.wait(120), "the gate was opened"
        inner(step, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBucketStep, "_update", late)
        try:
            for net, optimizer in zip(nets, (whole, hybrid), strict=True):
                backward(net, 0)
                optimizer.step()
                optimizer.param_groups[0]["lr"].fill_(0.7)
        finally:
            may_run.set()
        hybrid.synchronize()
    for (name, a), b in zip(nets[1].named_parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(local_tensor(a), local_tensor(b)), name


def test_a_rate_that_is_filled_in_place_counts_from_the_next_step_on(ranks: Ranks) -> None:
    """As schedulers fill it, while the host's step has not begun."""
    ranks(1).run(_fills_its_rate)


def _mixes() -> None:
    """Half by SGD on the host, half by Adam on the device, each as it would step the whole."""
    sgd_net, adam_net, net = (make_net(Case()) for _ in range(3))
    hybrid = _hybrid(net, "sgd", 0.5)
    adam = FusedAdam(
        [
            {"params": [p for p in adam_net.parameters() if p.ndim > 1]},
            {"params": [p for p in adam_net.parameters() if p.ndim == 1], "lr": 3e-3},
        ],
        lr=1e-2,
    )
    for model, optimizer in ((sgd_net, _whole(sgd_net, "sgd")), (adam_net, adam), (net, hybrid)):
        backward(model, 0)
        optimizer.step()
    hybrid.synchronize()
    num_on_host = 0
    for own, by_sgd, by_adam in zip(
        net.parameters(), sgd_net.parameters(), adam_net.parameters(), strict=True
    ):
        is_on_host = "momentum_buffer" in hybrid.state[own]
        num_on_host += is_on_host
        assert torch.equal(local_tensor(own), local_tensor(by_sgd if is_on_host else by_adam))
    assert 0 < num_on_host < len(list(net.parameters()))


def test_the_device_keeps_adam(ranks: Ranks) -> None:
    """One step of each, since a second one would see the other part's weights."""
    ranks(2).run(_mixes)


def _resumes(kind: str, path: str) -> None:
    net = make_net(_SMALL)
    optimizer = _hybrid(net, kind)
    for seed in range(2):
        backward(net, seed)
        optimizer.step()
        optimizer.zero_grad()
    save(path, model=net, optimizer=optimizer, step=2)
    state_dict = optimizer.state_dict()
    restored_net, copied_net = make_net(_SMALL), make_net(_SMALL)
    restored, copied = _hybrid(restored_net, kind), _hybrid(copied_net, kind)
    backward(restored_net, 8)
    restored.step()
    restored.zero_grad()
    parameter = restored_net.embedding.weight
    name = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[kind]
    address = local_tensor(restored.state[parameter][name]).data_ptr()
    load(path, model=restored_net, optimizer=restored)
    assert local_tensor(restored.state[parameter][name]).data_ptr() == address
    copied.load_state_dict(state_dict)
    copied_net.load_state_dict(net.state_dict())
    for model, stepped in ((net, optimizer), (restored_net, restored), (copied_net, copied)):
        backward(model, 3)
        stepped.step()
        stepped.zero_grad()
    wanted = local_bits(net, optimizer)
    assert any(key.endswith(name) for key in wanted)
    assert_same(local_bits(restored_net, restored), wanted)
    assert_same(local_bits(copied_net, copied), wanted)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_states_of_the_hosts_optimizer_are_saved_and_loaded(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """By checkpoints, in the memory that is there, and by state dicts, whatever their names."""
    ranks(2).run(_resumes, kind, str(tmp_path / "saved"))


class _Scaled(nn.Module):
    """A linear times a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) * self.scale
        return output


def _resumes_a_scalar(kind: str, path: str) -> None:
    cls, own = KINDS[kind]
    models = [fully_shard(_Scaled()) for _ in range(3)]
    optimizers = [
        HybridDeviceOptimizer(m.parameters(), cpu_optimizer_cls=cls, cpu_optimizer_kwargs=own)
        for m in models
    ]

    def step(index: int, seed: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        models[index](x).square().mean().backward()
        optimizers[index].step()
        optimizers[index].zero_grad()

    for seed in range(2):
        step(0, seed)
    save(path, model=models[0], optimizer=optimizers[0], step=2)
    load(path, model=models[1], optimizer=optimizers[1])
    models[2].load_state_dict(models[0].state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for index in range(3):
        step(index, 3)
        optimizers[index].synchronize()
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        for loaded, parameter in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(local_tensor(loaded), local_tensor(parameter))
            states, wanted = optimizer.state[loaded], optimizers[0].state[parameter]
            assert states.keys() == wanted.keys() and states
            for name, value in wanted.items():
                assert states[name].shape == value.shape
                assert torch.equal(local_tensor(states[name]), local_tensor(value)), name


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_a_parameter_without_dimensions_are_loaded(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """They have the shape of a count of steps, but are not one."""
    ranks(2).run(_resumes_a_scalar, kind, str(tmp_path / "saved"))


def _made_again() -> None:
    """A second optimizer over weights that are on the host already."""
    wanted_net, net = make_net(_SMALL), make_net(_SMALL)
    HybridDeviceOptimizer(net.parameters(), offload_fraction=1.0)
    slabs = [group.host_memory for group in groups_of(net.parameters())]
    second: FusedAdam = HybridDeviceOptimizer(net.parameters(), offload_fraction=0.0)
    for group, slab in zip(groups_of(net.parameters()), slabs, strict=True):
        assert slab is not None and group.host_memory is slab
    assert second.host_nbytes > 0
    reference = FusedAdam(wanted_net.parameters())
    for model, optimizer in ((net, second), (wanted_net, reference)):
        for _ in range(2):
            model(*mine(batches(1)[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(local_bits(net, second), local_bits(wanted_net, reference))


def test_weights_on_the_host_stay_there_for_another_optimizer(ranks: Ranks) -> None:
    """Whatever its own fraction."""
    ranks(2).run(_made_again)


def _swaps_gradients() -> None:
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        if is_sharded:
            fully_shard(net)
            optimizer = HybridDeviceOptimizer(
                net.parameters(), lr=0.1, cpu_optimizer_cls=torch.optim.SGD
            )
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 6)).square().sum().backward()
        for own, other in zip(net[0].parameters(), net[1].parameters(), strict=True):
            own.grad, other.grad = other.grad, own.grad
        if is_sharded and dist.get_world_size() > 1:
            # Each rank has the rows of one layer and the gradients of the other.
            with pytest.raises(RuntimeError, match="cut between other rows"):
                optimizer.step()
            return
        optimizer.step()
        found.append([full_tensor(parameter.detach()) for parameter in net.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_gradients_that_were_swapped_are_those_of_the_host(ranks: Ranks) -> None:
    """Wherever they lie in the buffer of all gradients; of other rows they are refused."""
    for num_ranks in (1, 2):
        ranks(num_ranks).run(_swaps_gradients)


@pytest.mark.parametrize(
    "options", [{"cpu_optimizer_cls": "sgd"}, {"cpu_optimizer_kwargs": {"a": 1}}]
)
def test_what_is_no_class_of_optimizers_is_refused(options: dict[str, Any]) -> None:
    """The class itself must be given, and options only with it."""
    with pytest.raises(TypeError, match="cpu_optimizer_cls"):
        HybridDeviceOptimizer([torch.nn.Parameter(torch.zeros(2))], **options)


def _begins_again(kind: str) -> None:
    nets = [make_net(_SMALL) for _ in range(2)]
    hybrid, other = (_hybrid(net, kind) for net in nets)
    for seed in range(2):
        backward(nets[0], seed)
        hybrid.step()
        hybrid.zero_grad()
    hybrid.state.clear()
    nets[1].load_state_dict(nets[0].state_dict())
    for seed in (5, 6):
        for net, optimizer in zip(nets, (hybrid, other), strict=True):
            backward(net, seed)
            optimizer.step()
            optimizer.zero_grad()
    for own, wanted in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert hybrid.state[own].keys() == other.state[wanted].keys()
        for key, value in other.state[wanted].items():
            assert torch.equal(local_tensor(hybrid.state[own][key]), local_tensor(value)), key
        assert torch.equal(local_tensor(own.detach()), local_tensor(wanted.detach()))


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_were_cleared_begin_again_on_the_host(ranks: Ranks, kind: str) -> None:
    """As the host's optimizer has them at first, not with what it kept."""
    ranks(2).run(_begins_again, kind)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_an_optimizer_that_is_not_elementwise_is_refused(name: str) -> None:
    """When it is given, with what to use; not in the first step, half done."""
    with pytest.raises(NotImplementedError, match=rf"got torch\.optim\..*{name}\..*Use megafsdp"):
        HybridDeviceOptimizer(
            torch.nn.Linear(2, 2).parameters(), cpu_optimizer_cls=getattr(torch.optim, name)
        )
    HybridDeviceOptimizer(torch.nn.Linear(2, 2).parameters(), cpu_optimizer_cls=torch.optim.Rprop)
