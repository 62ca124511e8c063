"""What keeps a dtype of its own: by names of the model or of a unit, by a function, or refused."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import MixedPrecisionPolicy, full_tensor, fully_shard, fully_shard_model
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.params.parameter_group import group_of
from tests.fsdp.params.test_packed import Packed, PackedLinear
from tests.fsdp.toy import WIDTH, Block, Net, shard
from tests.ranks import Ranks

# From torch 2.15 on.
HAS_TORCH_FUNCTION = "param_dtype_override_fn" in {
    field.name for field in dataclasses.fields(TorchMixedPrecisionPolicy)
}
SHARDERS = (fully_shard, torch_fully_shard)

TABLE = {"embedding.weight"}
NORMS = {f"blocks.{i}.norm.{kind}" for i in range(3) for kind in ("weight", "bias")}
BLOCKS = NORMS | {
    f"blocks.{i}.{layer}.{kind}"
    for i in range(3)
    for layer in ("up", "down")
    for kind in ("weight", "bias")
}
KEPT = {
    "blocks.1.norm": {"blocks.1.norm.weight", "blocks.1.norm.bias"},
    "blocks.1.norm.bias": {"blocks.1.norm.bias"},
    "blocks.*.up.bias": {f"blocks.{i}.up.bias" for i in range(3)},
    # In the model, where it is the last norm, and in each unit.
    "norm": NORMS | {"norm.weight", "norm.bias"},
    "LayerNorm": NORMS | {"norm.weight", "norm.bias"},
    "blocks": BLOCKS,
    "head": TABLE,
    "embedding": TABLE,
}


def _policy(*names: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(torch.bfloat16, keep_fp32=names)


def _fp32_names(net: nn.Module) -> set[str]:
    groups = {name: group_of(p) for name, p in net.named_parameters()}
    return {name for name, g in groups.items() if g and g.dtypes.compute == torch.float32}


def _names_in_the_model() -> None:
    for name, wanted in KEPT.items():
        assert _fp32_names(fully_shard_model(Net(), [Block], mp_policy=_policy(name))) == wanted
    for names in (("blocks.1.nrom",), ("embedding", "*RMS*")):
        with pytest.raises(ValueError, match=f"'{re.escape(names[-1])}'.* that match none"):
            fully_shard_model(Net(), [Block], mp_policy=_policy(*names))


def test_names_count_in_the_whole_model(ranks: Ranks) -> None:
    """Those of parameters, modules, classes, ties; patterns; typos raise."""
    ranks(2).run(_names_in_the_model)


def _names_in_a_unit() -> None:
    assert _fp32_names(shard(Net(), mp_policy=_policy("*norm*", "up.bias", "head"))) == (
        NORMS | {"norm.weight", "norm.bias"} | {f"blocks.{i}.up.bias" for i in range(3)} | TABLE
    )
    with pytest.raises(ValueError, match=r"got 'blocks.1.norm', which is .*fully_shard_model\(\)"):
        shard(Net(), mp_policy=_policy("blocks.1.norm"))
    net = Net()
    for block in net.blocks:
        fully_shard(block, mp_policy=_policy())
    fully_shard(net, mp_policy=_policy("LayerNorm"))
    assert _fp32_names(net) == {"norm.weight", "norm.bias"}


def test_names_count_in_the_module_that_fully_shard_is_called_on(ranks: Ranks) -> None:
    """One that only an inner unit could have kept is refused; else units may differ."""
    ranks(2).run(_names_in_a_unit)


def _vectors_keep_theirs(parameter: nn.Parameter) -> torch.dtype | None:
    assert type(parameter) is nn.Parameter
    return parameter.dtype if parameter.ndim == 1 else None


def _of_torch(function: Callable[..., Any]) -> TorchMixedPrecisionPolicy:
    if HAS_TORCH_FUNCTION:
        return TorchMixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=function)
    policy = TorchMixedPrecisionPolicy(torch.bfloat16)
    object.__setattr__(policy, "param_dtype_override_fn", function)
    return policy


def _chosen_by_a_function() -> None:
    names = {name: p for name, p in Net().named_parameters() if p.ndim == 1}
    for policy in (
        MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=_vectors_keep_theirs),
        _of_torch(_vectors_keep_theirs),
    ):
        assert _fp32_names(shard(Net(), mp_policy=policy)) == set(names)
        assert _fp32_names(fully_shard_model(Net(), [Block], mp_policy=policy)) == set(names)

    # Once for each parameter, whatever its names; the answer may be the default's.
    asked: list[nn.Parameter] = []

    def ask(parameter: nn.Parameter) -> torch.dtype:
        asked.append(parameter)
        return torch.bfloat16

    net = Net()
    own = list(net.parameters())
    shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=ask))
    assert sorted(map(id, asked)) == sorted(map(id, own)) and not _fp32_names(net)

    # Neither integers nor packed bits have a dtype to compute in.
    net = nn.Sequential(PackedLinear(torch.float32))
    net.register_parameter("index", nn.Parameter(torch.arange(3), requires_grad=False))
    asked.clear()
    fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=ask))
    assert len(asked) == 4 and not {type(p) for p in asked} & {Packed}

    # Another dtype than fp32, and names go first.
    block = Block().half()
    policy = MixedPrecisionPolicy(
        torch.bfloat16, keep_fp32=("up.bias",), param_dtype_override_fn=_vectors_keep_theirs
    )
    fully_shard(block, mp_policy=policy)
    dtypes = {name: group_of(p).dtypes.compute for name, p in block.named_parameters()}
    half = {name for name, dtype in dtypes.items() if dtype == torch.float16}
    assert half == {"norm.weight", "norm.bias", "down.bias"}
    assert dtypes["up.bias"] == torch.float32 and dtypes["up.weight"] == torch.bfloat16


def test_a_function_chooses_parameters(ranks: Ranks) -> None:
    """Of a policy of ours or torch's; it is asked once for each parameter."""
    ranks(2).run(_chosen_by_a_function)


def _not_quantized() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    kept = net[1].weight
    fully_shard(
        net,
        mp_policy=MixedPrecisionPolicy(
            torch.bfloat16,
            recipe="mxfp8",
            param_dtype_override_fn=lambda p: p.dtype if p is kept else None,
        ),
    )
    assert _fp32_names(net) == {"1.weight"}
    first, second = (group_of(layer.weight) for layer in net)
    assert first.quantization is not None and second.quantization is None


def test_what_a_function_keeps_is_not_quantized(ranks: Ranks) -> None:
    """Its dtype is that of its values; other weights have codes."""
    ranks(2).run(_not_quantized)


def _wrong_answers() -> None:
    for answer in (torch.float16, "float32"):
        block = Block()
        before = list(block.parameters())
        policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda _, a=answer: a)
        words = rf"torch.float32, which is .*, or torch.bfloat16, got {answer!r}.*'norm.weight'"
        with record_collectives() as record, pytest.raises(ValueError, match=words):
            fully_shard(block, mp_policy=policy)
        assert not record.calls
        assert all(a is b for a, b in zip(block.parameters(), before, strict=True))
    with pytest.raises(TypeError, match=r"a function of a parameter.*param_dtype_override_fn"):
        MixedPrecisionPolicy(param_dtype_override_fn="norm")


def test_wrong_answers_of_a_function_are_refused(ranks: Ranks) -> None:
    """Before a collective, and with nothing changed."""
    ranks(2).run(_wrong_answers)


class _Scaled(nn.Module):
    """A product in the weight's dtype, scaled in that of the scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled product, in the dtype of the scales."""
        return (x @ self.weight).to(self.scale.dtype) * self.scale


def _matches_torch() -> None:
    torch.manual_seed(0)
    reference = _Scaled()
    policy = dataclasses.replace(_of_torch(_vectors_keep_theirs), reduce_dtype=torch.float32)
    nets = [shard_one(copy.deepcopy(reference), mp_policy=policy) for shard_one in SHARDERS]
    x = torch.randn(2, 3, WIDTH)[dist.get_rank()]
    outputs = [net(x) for net in nets]
    assert torch.equal(*outputs) and outputs[0].dtype == torch.float32
    for output in outputs:
        output.square().mean().backward()
    for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(full_tensor(ours.grad), theirs.grad.full_tensor())


@pytest.mark.skipif(not HAS_TORCH_FUNCTION, reason="such functions came with torch 2.15")
def test_gradients_are_those_of_fsdp2_with_the_same_policy(ranks: Ranks) -> None:
    """One program under both, with matrices in bf16 and vectors in fp32."""
    ranks(2).run(_matches_torch)
