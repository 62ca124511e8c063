"""Units whose flat buffers have several sub-buffers, as on many ranks, against those with one.

With even shards each parameter has its own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp import FusedAdam, HybridDeviceOptimizer, MixedPrecisionPolicy, clip_grad_norm_
from megafsdp.checkpoint import load, save
from megafsdp.fsdp.runtime.unit import units_below
from tests.buffer.classes_apart import classes_apart
from tests.fsdp.toy import (
    Net,
    batches,
    full_grads,
    full_tensors,
    mine,
    options_of_strategies,
    shard,
)
from tests.ranks import Ranks

# More threads than processors would only wait for one another.
_OPTIMIZERS = {
    "fused": FusedAdam,
    "offloaded": functools.partial(HybridDeviceOptimizer, host_threads=1),
}
_POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _sharded(options: dict[str, object], form: str = "joined") -> Net:
    with classes_apart() if form == "apart" else contextlib.nullcontext():
        net = shard(Net(num_blocks=1), **options, even_shards=form == "even")
    groups = [g for unit in units_below([net]).values() for g in unit.groups]
    most = {"joined": 1, "apart": 3, "even": max(len(g.parameters) for g in groups)}[form]
    assert max(len(g.layout.sub_buffers) for g in groups) == most
    return net


def _steps(
    net: Net, optimizer: torch.optim.Optimizer, seed: int
) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """Take two steps of two microbatches each; return the last gradients and their norm."""
    for step in range(2):
        optimizer.zero_grad()
        for batch in batches(2, seed + step):
            net(*mine(batch)).backward()
        optimizer.step()
    grads = full_grads(net)
    return grads, clip_grad_norm_(net, math.inf)


def _weights(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return full_tensors(dict(net.named_parameters()))


def _is_same(found: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], value) for name, value in wanted.items()
    )


def _num_replicas(options: dict[str, object]) -> int:
    if isinstance(mesh := options.get("mesh"), DeviceMesh):
        return mesh.size(0)
    return dist.get_world_size() if options["strategy"] == "no_shard" else 1


def _compare(directory: str, kind: str, form: str) -> None:
    for number, options in enumerate(options_of_strategies()):
        if _num_replicas(options) > 2:
            continue  # gloo adds their gradients in an order that depends on the place.
        if form == "even" and options.get("outer_strategy") == "optim":
            continue
        options["mp_policy"] = _POLICIES[(number + number // 2) % 2]
        nets = [_sharded(options), _sharded(options, form)]
        optimizers = [_OPTIMIZERS[kind](net.parameters(), lr=1e-2, eps=1e-5) for net in nets]
        (grads, norm), (grads_apart, norm_apart) = (
            _steps(net, optimizer, 1) for net, optimizer in zip(nets, optimizers, strict=True)
        )
        assert _is_same(grads_apart, grads)
        torch.testing.assert_close(norm_apart, norm)
        assert _is_same(_weights(nets[1]), _weights(nets[0]))
        # From several sub-buffers into one or back, and on from there.
        source, target = (1, 0) if number % 2 else (0, 1)
        path = f"{directory}/{number}"
        save(path, step=1, model=nets[source], optimizer=optimizers[source])
        _steps(nets[source], optimizers[source], 7)
        load(path, model=nets[target], optimizer=optimizers[target])
        _steps(nets[target], optimizers[target], 7)
        assert _is_same(_weights(nets[target]), _weights(nets[source]))


@pytest.mark.parametrize("form", ["apart", "even"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("fused", 3), ("fused", 4), ("offloaded", 4)])
def test_steps_and_checkpoints_do_not_depend_on_sub_buffers(
    ranks: Ranks, tmp_path: Path, kind: str, num_ranks: int, form: str
) -> None:
    """In every strategy, in fp32 and bf16: gradients, weights and resumed steps bit by bit."""
    ranks(num_ranks).run(_compare, str(tmp_path), kind, form)
