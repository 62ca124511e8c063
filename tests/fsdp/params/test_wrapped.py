"""Weights of a class that wraps a plain tensor train as in one process, and as under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megafsdp import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    checkpoint,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    materialize,
)
from megafsdp.errors import ConfigError
from megafsdp.mesh.torch_private import is_arriving, local_of, wrap_part
from tests.fsdp.composed import Codes
from tests.fsdp.toy import assert_same_grads, full_tensors, options_of_strategies, train_bit_for_bit
from tests.ranks import Ranks

WIDTH = 24
STEP = 1 / 16

aten = torch.ops.aten
# Operators whose result is a wrapper again, which FSDP2 needs.
STRUCTURAL = {
    aten.detach.default,
    aten.t.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.clone.default,
    aten._to_copy.default,
}


class Rounding(torch.Tensor):
    """A weight that enters products in multiples of a step; not made for FSDP2."""

    inner: torch.Tensor
    step: float
    shown_dtype: torch.dtype | None = None

    def __new__(cls, inner: torch.Tensor, step: float) -> Rounding:
        """Make a tensor without memory of its own."""
        dtype = cls.shown_dtype or inner.dtype
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=dtype, device=inner.device
        )
        made.inner, made.step = inner, step
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute with rounded values; write, copy and view the exact ones."""
        is_exact = func in STRUCTURAL or func._schema.is_mutable

        def unwrap(value: Any) -> Any:
            if not isinstance(value, Rounding):
                return value
            return value.inner if is_exact else (value.inner / value.step).round() * value.step

        step = next(each.step for each in args if isinstance(each, Rounding))
        found = func(*map(unwrap, args), **(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        if func not in STRUCTURAL:
            return found
        return [cls(each, step) for each in found] if isinstance(found, list) else cls(found, step)

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        """Return the names of the tensors inside and the rest."""
        return ["inner"], self.step

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], step: float, shape: Any, stride: Any
    ) -> Rounding:
        """Undo it."""
        return cls(inner["inner"], step)


class Rounded(Rounding):
    """The same for FSDP2, as torchao has such classes, whose weights enter products in FP8."""

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, shape: Any, stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """Return what FSDP2 gathers."""
        return (self.inner.to(policy.param_dtype),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Rounded, tuple[torch.Tensor, ...]] | None:
        """Return what FSDP2 shows to forward."""
        return None if out is not None else (Rounded(outputs[0], self.step), outputs)


class Coded(Rounded):
    """Codes of another dtype than that of the weight."""

    shown_dtype = torch.float32


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(Rounded(layer.weight.detach(), STEP))
    # Frozen ones are gathered, but have no gradient.
    net[2].weight.requires_grad_(False)
    net[0].weight.is_mine = True
    return net


def _sharded(net: nn.Sequential, shard: Callable[..., nn.Module], **options: Any) -> nn.Sequential:
    for layer in (net[0], net[2]):
        shard(layer, **options)
    return shard(net, **options)  # type: ignore[return-value]


def _train(**options: object) -> None:
    reference, net = _net(), _sharded(_net(), fully_shard, **options)
    weight = net[0].weight
    # Optimizers and checkpoints see a plain weight, which does not keep the whole one alive.
    assert type(weight.detach().to_local()) is torch.Tensor and weight.is_mine
    assert "inner" not in vars(weight)
    train_bit_for_bit(reference, net, 3, WIDTH)
    for name, found in full_tensors(dict(net.named_parameters())).items():
        wanted = reference.get_parameter(name)
        assert torch.equal(found, wanted.inner if isinstance(wanted, Rounded) else wanted), name


def _train_each() -> None:
    for options in (*options_of_strategies(), {"offload_policy": OffloadPolicy(params=True)}):
        _train(**options)


def test_training_has_the_bits_of_one_process(ranks: Ranks) -> None:
    """Under every strategy, with shards of unequal rows."""
    ranks(2).run(_train_each)


def _outputs() -> None:
    ours, theirs = MixedPrecisionPolicy, TorchMixedPrecisionPolicy
    nets = [
        _sharded(_net(), fully_shard, mp_policy=ours(param_dtype=torch.bfloat16)),
        _sharded(_net(), torch_fully_shard, mp_policy=theirs(param_dtype=torch.bfloat16)),
    ]
    batch = torch.randn(3, WIDTH)
    found, wanted = (net(batch) for net in nets)
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
    quantized = _sharded(_net(), fully_shard, mp_policy=ours(recipe="fp8_current"))
    with pytest.raises(ConfigError, match=r"got computed with by its own class: \*.weight;"):
        quantized(batch)


def test_outputs_in_bf16_are_those_of_fsdp2(ranks: Ranks) -> None:
    """Casts come before the wrapper; a recipe leaves such weights to their class."""
    ranks(2).run(_outputs)


def _part(tp: DeviceMesh) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    part = layer.weight.detach().chunk(2)[tp.get_local_rank()]
    layer.weight = nn.Parameter(DTensor.from_local(Rounded(part, STEP), tp, [Shard(0)]))
    return layer


def _parts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, WIDTH, bias=False)
    whole.weight = nn.Parameter(Rounded(whole.weight.detach(), STEP))
    torch.manual_seed(0)
    layer = fully_shard(_part(mesh["tp"]), mesh=mesh["dp"])
    batch = torch.randn(3, WIDTH)
    found = layer(DTensor.from_local(batch, mesh["tp"], run_check=False))
    wanted = whole(batch)
    assert torch.equal(found.full_tensor(), wanted)
    found.full_tensor().square().mean().backward()
    wanted.square().mean().backward()
    assert_same_grads(layer, whole, rtol=0, atol=0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    values = layer.weight.detach().clone()
    cut = distribute_tensor(values, mesh["tp"], [Shard(0)])
    layer.weight = nn.Parameter(cut.redistribute(placements=[Replicate()], async_op=True))
    assert is_arriving(local_of(layer.weight))
    fully_shard(layer, mesh=mesh["dp"])
    assert torch.equal(layer.weight.full_tensor(), values)
    with pytest.raises(NotImplementedError, match=r"'weight', a tests.*Codes.*ignored_params"):
        odd = nn.Linear(2, 2, bias=False)
        codes = Codes(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1))
        odd.weight = nn.Parameter(wrap_part(codes, mesh["tp"], (Shard(0),), (4, 2)))
        fully_shard(odd, mesh=mesh["dp"])


def _others() -> None:
    for cls, dtype in ((Rounding, torch.float32), (Coded, torch.int8)):
        layer = nn.Linear(2, 2, bias=False)
        weight = cls(torch.zeros(2, 2, dtype=dtype), STEP)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(NotImplementedError, match=rf"'weight', a tests.*{cls.__name__}\."):
            fully_shard(layer)


def test_other_wrappers_are_refused(ranks: Ranks) -> None:
    """By name: rows of what they wrap may not be rows of the weight."""
    ranks(1).run(_others)


def test_parts_of_a_model_axis_are_wrapped_too(ranks: Ranks) -> None:
    """A DTensor over another class is refused by that class, unless it is torch's for arrivals."""
    ranks(4).run(_parts)


def _states(directory: Path) -> None:
    expected, batch = _net(), torch.randn(3, WIDTH)
    checkpoint.save(directory, step=1, model=_sharded(_net(), fully_shard))
    with torch.device("meta"):
        net = _sharded(_net(seed=1), fully_shard)
    materialize(net)
    assert not torch.equal(net(batch), expected(batch))
    checkpoint.load(directory, model=net)
    assert torch.equal(net(batch), expected(batch))
    state = full_state_dict(net)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    with torch.device("meta"):
        ignoring = _net()
    fully_shard(ignoring, ignored_params=[ignoring[2].weight])
    materialize(ignoring)
    left = ignoring[2].weight
    assert type(left) is Rounded and not left.inner.is_meta and not left.inner.isnan().any()
    other = _sharded(_net(seed=1), fully_shard)
    load_full_state_dict(other, state)
    assert torch.equal(other(batch), expected(batch))


def test_checkpoints_and_full_states_have_plain_tensors(ranks: Ranks, tmp_path: Path) -> None:
    """Loaded into weights that came on the meta device, where ignored ones keep their class."""
    ranks(2).run(_states, tmp_path)
