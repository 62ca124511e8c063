"""FusedAdam has the bits of torch.optim.AdamW(fused=True), at every length, level and rank count.

torch's kernel rounds what is short of a vector differently, so it runs on the tensor padded with
zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megafsdp import FusedAdam, full_tensor
from megafsdp._native import native_module
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
NUM_STEPS = 10
NUM_SHARDED_STEPS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")
SIZES = (1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 127, 129, 1000, 4096, 4097, 10_007)


def _ways() -> list[str]:
    native = native_module()
    return ["torch", *(() if native is None else native.simd_levels())]


@pytest.fixture(params=_ways())
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the step in torch, or compiled at each level that this processor has."""
    if request.param == "torch":
        monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    else:
        monkeypatch.setenv("MEGAFSDP_SIMD", request.param)
    return request.param


def _assert_same_bits(numel: int, weight_decay: float, num_steps: int = NUM_STEPS) -> None:
    generator = torch.Generator().manual_seed(numel)
    start = torch.randn(numel, generator=generator)
    padding = (0, -numel % 64)
    weight, wanted = nn.Parameter(start.clone()), nn.Parameter(F.pad(start, padding))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": weight_decay}
    ours = FusedAdam([weight], **options)
    theirs = torch.optim.AdamW([wanted], fused=True, **options)
    for _ in range(num_steps):
        weight.grad = torch.randn(numel, generator=generator)
        wanted.grad = F.pad(weight.grad, padding)
        ours.step()
        theirs.step()
    assert torch.equal(weight.detach(), wanted.detach()[:numel])
    for name in MOMENTS:
        assert torch.equal(ours.state[weight][name], theirs.state[wanted][name][:numel])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_have_torchs_bits(way: str, weight_decay: float) -> None:
    """Lengths around vectors and tiles."""
    for numel in SIZES:
        _assert_same_bits(numel, weight_decay)


@pytest.mark.matrix("adam-bits")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_have_torchs_bits_at_every_length(way: str, weight_decay: float) -> None:
    """Every length up to two tiles, then every 61st to 10,007, and ten million."""
    for numel in (*range(1, 258), *range(258, 10_008, 61), 10_007, 10_000_000):
        _assert_same_bits(numel, weight_decay)


def test_ten_million_elements_have_torchs_bits() -> None:
    """As compiled for this processor, with all threads."""
    _assert_same_bits(10_000_000, 0.1, num_steps=3)


def _train() -> dict[str, torch.Tensor]:
    net = shard(Net(num_blocks=1))
    optimizer = FusedAdam(net.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    net(*mine(batches(1)[0])).backward()
    for _ in range(NUM_SHARDED_STEPS):
        for parameter in net.parameters():
            # The same on every mesh, where sums over ranks would round differently.
            parameter.grad.copy_from_full_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    values = {name: full_tensor(p.detach()) for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        for kind in MOMENTS:
            values[f"{name}.{kind}"] = full_tensor(optimizer.state[parameter][kind])
    return values


def _train_with_torch() -> dict[str, torch.Tensor]:
    net = Net(num_blocks=1)
    padded = {
        name: nn.Parameter(F.pad(p.detach().flatten(), (0, -p.numel() % 64)))
        for name, p in net.named_parameters()
    }
    options = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(padded.values(), fused=True, **options)
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_SHARDED_STEPS):
        for name, parameter in net.named_parameters():
            grad = torch.randn(parameter.shape, generator=generator).flatten()
            padded[name].grad = F.pad(grad, (0, -grad.numel() % 64))
        optimizer.step()
    values = {}
    for name, parameter in net.named_parameters():
        own, state = padded[name], optimizer.state[padded[name]]
        for key, value in {name: own, **{f"{name}.{k}": state[k] for k in MOMENTS}}.items():
            values[key] = value.detach()[: parameter.numel()]
    return values


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_bits_do_not_depend_on_the_number_of_ranks(ranks: Ranks, num_ranks: int) -> None:
    """Given equal gradients, sharded fp32 main weights step as torch steps whole ones."""
    wanted = _train_with_torch()
    for found in ranks(num_ranks).run(_train):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert torch.equal(value.flatten(), wanted[name]), name
