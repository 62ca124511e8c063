"""States that one replica of a sharded model gives to another, rank by rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megafsdp import FusedAdam, HybridDeviceOptimizer, full_state_dict, fully_shard
from megafsdp.checkpoint.replica_state import ReplicaState
from tests.fsdp.llama import Llama, parallelize
from tests.fsdp.llama import batches as llama_batches
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda net: FusedAdam(net.parameters(), lr=1e-2),
    "fp8": lambda net: FusedAdam(net.parameters(), lr=1e-2, exp_avg_dtype=torch.float8_e4m3fn),
    "torch": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
}


class _Buffered(Net):
    def __init__(self, seed: int) -> None:
        super().__init__(2, seed=seed)
        self.register_buffer("seen", torch.zeros(()))
        # As a cache that has grown: not in state dicts.
        self.register_buffer("cache", torch.zeros(seed), persistent=False)
        self.frozen = nn.Linear(2, 2)


def _sent(state: dict[str, object]) -> dict[str, object]:
    """Return what arrives in the process of another rank, which has other meshes."""
    return pickle.loads(pickle.dumps(state))


def _next_step_is_equal(options: dict[str, object], kind: str) -> None:
    replicas = []
    for seed in (0, 1):
        net = _Buffered(seed)
        ignored = set(net.frozen.parameters())
        for block in net.blocks:
            fully_shard(block, **options)
        fully_shard(net, ignored_params=ignored, **options)
        optimizer = OPTIMIZERS[kind](net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state = ReplicaState(net, optimizer, {"scheduler": scheduler})
        replicas.append((net, optimizer, scheduler, state))
    # The other one has trained too, so it has states and gathered weights of its own.
    for each, own_optimizer, _, _ in replicas:
        each(*mine(batches(1)[0])).backward()
        own_optimizer.step()
    net, _, scheduler, state = replicas[0]
    scheduler.step()
    net.seen.add_(7)
    received: dict[str, object] = {}
    # Another thread reads the state while units are at work.
    hook = net.blocks[1].register_forward_hook(
        lambda *_: received.update(_sent(state.state_dict()))
    )
    net(*mine(batches(1)[0]))
    hook.remove()
    replicas[1][3].load_state_dict(received)
    for each, own_optimizer, _, _ in replicas:
        own_optimizer.zero_grad()
        each(*mine(batches(2)[1])).backward()
        own_optimizer.step()
    other, other_optimizer, other_scheduler, _ = replicas[1]
    wanted = full_state_dict(net)
    for name, value in full_state_dict(other).items():
        assert torch.equal(value, wanted[name]), name
    assert other_optimizer.param_groups[0]["lr"] == 5e-3
    assert other_scheduler.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"strategy": "optim_grads_params"}, "fused"),
        ({"strategy": "optim_grads_params"}, "fp8"),
        ({"strategy": "optim"}, "torch"),
        ({"strategy": "no_shard"}, "fused"),
        ({"strategy": "no_shard"}, "torch"),
    ],
    ids=str,
)
def test_the_next_step_of_both_replicas_has_the_same_bits(
    ranks: Ranks, options: dict[str, object], kind: str
) -> None:
    """Weights, states, buffers, ignored parameters and a scheduler, read while units work."""
    ranks(2).run(_next_step_is_equal, options, kind)


def _cut_by_tp() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    (tokens, labels), replicas = llama_batches(1, 4)[0], []
    for scale in (1.0, 0.5):
        net = parallelize(Llama(), grid["tp"])
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(scale)
        # One stays a DTensor of torch, cut over tp alone.
        dtensors = [p for p in net.parameters() if isinstance(p, DTensor)]
        cut = next(p for p in dtensors if p.placements[0].is_shard())
        fully_shard(net, mesh=grid["data"], ignored_params={cut})
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        replicas.append((net, optimizer, ReplicaState(net, optimizer)))
    rows = slice(2 * grid["data"].get_local_rank(), 2 * grid["data"].get_local_rank() + 2)
    net, optimizer, state = replicas[0]
    net(tokens[rows], labels[rows]).backward()
    optimizer.step()
    replicas[1][2].load_state_dict(_sent(state.state_dict()))
    for each, own, _ in replicas:
        own.zero_grad()
        each(tokens[rows], labels[rows]).backward()
        own.step()
    for p, q in zip(net.parameters(), replicas[1][0].parameters(), strict=True):
        assert torch.equal(p.detach().to_local(), q.detach().to_local())


def test_parts_of_tensor_parallelism_are_given_too(ranks: Ranks) -> None:
    """A DTensor of a state is made on the mesh of the replica that takes it."""
    ranks(4).run(_cut_by_tp)


def _another_cut() -> None:
    net = shard(Net(2))
    optimizer = FusedAdam(net.parameters())
    other = shard(Net(2), strategy="no_shard")
    state = ReplicaState(other, FusedAdam(other.parameters())).state_dict()
    first, *_ = state["model"]
    del state["model"][first]
    before = copy.deepcopy(full_state_dict(net))
    words = rf"same model, mesh and strategy, got rows of other shapes: '{first}' missing, here \("
    with pytest.raises(ValueError, match=words):
        ReplicaState(net, optimizer).load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in full_state_dict(net).items())
    assert dist.get_world_size() == 2


def _steps_elsewhere() -> None:
    net = shard(Net(1))
    with pytest.raises(NotImplementedError, match=r"within step\(\) alone, got HybridDevice"):
        ReplicaState(net, HybridDeviceOptimizer(net.parameters(), offload_fraction=1.0))


def test_an_optimizer_that_steps_on_another_thread_is_refused(ranks: Ranks) -> None:
    """Its weights could be read while they change."""
    ranks(1).run(_steps_elsewhere)


def test_a_replica_that_cuts_differently_is_refused(ranks: Ranks) -> None:
    """Nothing is changed."""
    ranks(2).run(_another_cut)
