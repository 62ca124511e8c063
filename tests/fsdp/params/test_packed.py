"""Frozen weights of bits train as in one process; no bit changes on any way through the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from megafsdp import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    checkpoint,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    summon_full_params,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.params.parameter_group import group_of
from tests.fsdp.toy import options_of_strategies, train_bit_for_bit
from tests.ranks import Ranks

WIDTH = 64
STORAGES = (torch.bfloat16, torch.float32, torch.uint8)


class Packed(nn.Parameter):
    """Codes of 8 bits in a storage of any dtype, with their scale, as bitsandbytes has them."""


class PackedLinear(nn.Linear):
    """A linear over a packed weight, as bitsandbytes' reads class and attributes, with adapters."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        # Of all bytes, so of every kind of NaN.
        codes = torch.randint(-128, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = Packed(codes.view(storage), requires_grad=False)
        self.weight.scale = torch.rand(WIDTH, 1) / 512
        self.adapters = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Decode the weight and multiply."""
        assert type(self.weight) is Packed and not self.weight.requires_grad
        codes = self.weight.detach().view(torch.int8)
        decoded = (codes * self.weight.scale).to(x.dtype)
        return nn.functional.linear(x, decoded) + self.adapters(x)


def _net(storage: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(PackedLinear(storage), nn.Tanh(), PackedLinear(storage))


def _sharded(net: nn.Sequential, **options: object) -> nn.Sequential:
    for block in (net[0], net[2]):
        fully_shard(block, **options)
    return fully_shard(net, **options)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _weights(state: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    for name in ("0.weight", "2.weight"):
        yield _bits(state[name])


def _assert_same_weights(net: nn.Module, expected: nn.Module) -> None:
    found, wanted = full_state_dict(net), dict(expected.named_parameters())
    for own, whole in zip(_weights(found), _weights(wanted), strict=True):
        assert torch.equal(own, whole)


def _train(storage: torch.dtype, **options: object) -> None:
    # Built twice, because a copy of a parameter has no attributes.
    reference, net = _net(storage), _sharded(_net(storage), **options)
    batch = train_bit_for_bit(reference, net, 3, WIDTH)
    _assert_same_weights(net, reference)
    with summon_full_params(net):
        assert torch.equal(net(batch[0]), reference(batch[0]))


def _train_each() -> None:
    storages = itertools.cycle((torch.bfloat16, torch.uint8))
    for options in (*options_of_strategies(), {"offload_policy": OffloadPolicy(params=True)}):
        _train(next(storages), **options)


def test_training_over_packed_weights_has_the_bits_of_one_process(ranks: Ranks) -> None:
    """Under every strategy; the gathered weight has its class and its scale."""
    ranks(2).run(_train_each)


def _policies() -> Iterator[MixedPrecisionPolicy]:
    yield MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_fp32=("weight",))
    for recipe in (None, "fp8_current"):
        yield MixedPrecisionPolicy(param_dtype=torch.bfloat16, recipe=recipe)


def _dtypes() -> None:
    for storage, policy in itertools.product(STORAGES, _policies()):
        layer = fully_shard(_net(storage)[0], mp_policy=policy)
        layer(torch.randn(3, WIDTH)).float().square().mean().backward()
        assert layer.adapters[0].weight.grad is not None
        assert torch.equal(_bits(layer.weight.full_tensor()), _bits(_net(storage)[0].weight))
        group = group_of(layer.weight)
        assert set(vars(group.dtypes).values()) == {storage}
        # Integers too, which are whole on every rank if they are not packed.
        assert layer.weight.to_local().numel() * 2 == layer.weight.numel()


def test_no_policy_casts_or_quantizes_packed_weights(ranks: Ranks) -> None:
    """A cast would make other bits of a NaN, and a recipe would take codes for values."""
    ranks(2).run(_dtypes)


def _save(directory: Path) -> None:
    for storage in STORAGES:
        net = _sharded(_net(storage))
        checkpoint.save(directory / str(storage), step=1, model=net)


def _load(directory: Path) -> None:
    for storage in STORAGES:
        expected, nets = _net(storage), [_sharded(_net(storage, seed=1)) for _ in range(2)]
        assert not torch.equal(_bits(nets[0][0].weight.full_tensor()), _bits(expected[0].weight))
        checkpoint.load(directory / str(storage), model=nets[0])
        # Layers of one process may add scales to their state dicts, which sharded ones do not.
        state = {name: p.detach() for name, p in expected.named_parameters()}
        assert full_state_dict(nets[1]).keys() == state.keys()
        load_full_state_dict(nets[1], state)
        for net in nets:
            _assert_same_weights(net, expected)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_checkpoints_and_full_states_have_every_bit(
    ranks: Ranks, num_ranks: int, tmp_path: Path
) -> None:
    """NaN and negative zero too, loaded by any number of ranks."""
    ranks(2).run(_save, tmp_path)
    ranks(num_ranks).run(_load, tmp_path)


def _elsewhere() -> None:
    with torch.device("meta"):
        net = _net(torch.bfloat16)
    before = dict(net.named_parameters())
    with (
        record_collectives() as record,
        pytest.raises(ValueError, match=r"mesh, cpu, got '0.weight' on meta.*Load or move"),
    ):
        fully_shard(net)
    assert not record.calls and dict(net.named_parameters()).items() == before.items()


def test_packed_weights_on_another_device_are_refused(ranks: Ranks) -> None:
    """The engine would move their bits, but not their scales."""
    ranks(2).run(_elsewhere)
