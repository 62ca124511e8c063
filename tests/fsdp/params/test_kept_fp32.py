"""Names of what stays fp32: in the whole model, in a unit, by pattern and by class, or refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from megafsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from megafsdp.fsdp.params.parameter_group import group_of
from tests.fsdp.toy import Block, Net, shard
from tests.ranks import Ranks

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
