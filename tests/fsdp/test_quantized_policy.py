"""Which weights a recipe quantizes, by names, shapes and declarations, and what is refused."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import (
    FusedAdam,
    HybridDeviceOptimizer,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    fully_shard_model,
    quantize_,
)
from megafsdp.mesh.annotation import annotate
from megafsdp.parallel import Linear
from megafsdp.quantize import RECIPE_NAMES, recipe_of
from tests.fsdp.quantized import (
    Block,
    Net,
    batch,
    options_of,
    policy_for,
    quantized_parameters,
    shard,
)
from tests.ranks import Ranks

MATRICES = {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")}
HEAD = {"head.weight"}


class Kinds(nn.Module):
    """Matrices of all kinds of layers, of sizes that every format takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.linear = nn.Linear(32, 32)
        self.same = nn.Linear(32, 32)
        self.same.weight = self.linear.weight
        self.apart = nn.Linear(32, 64, bias=False)
        self.output = nn.Linear(32, 64, bias=False)
        self.output.weight = self.table.weight
        self.ours = Linear(32, 32)
        self.head = Linear(32, 64, bias=False)
        self.words = nn.Embedding(64, 32)
        self.words.weight = self.head.weight
        self.conv = nn.Conv1d(32, 32, 32)
        self.plain = nn.Parameter(torch.randn(32, 32))
        self.declared = nn.Parameter(torch.randn(2, 32, 32))
        annotate(self.declared, is_linear_weight=True)


def _kinds() -> set[str]:
    # A tied weight may be named by any of its names.
    for name in ("linear", "same"):
        policy = policy_for("nvfp4", keep_unquantized=("apart", name))
        assert set(quantized_parameters(fully_shard(Kinds(), mp_policy=policy))) == {
            "ours.weight",
            "declared",
        }
    net = fully_shard(Kinds(), mp_policy=policy_for("nvfp4", keep_unquantized=("apart",)))
    return set(quantized_parameters(net))


def test_weights_of_linears_and_declared_ones_are_quantized(ranks: Ranks) -> None:
    """Not embeddings nor what is tied to one, convolutions, other parameters and named ones."""
    assert ranks(2).run(_kinds)[0] == {"linear.weight", "ours.weight", "declared"}


def _names() -> None:
    cases: dict[tuple[str, ...], set[str]] = {
        (): MATRICES | HEAD,
        ("head",): MATRICES,
        ("blocks.1",): {n for n in MATRICES if ".1." not in n} | HEAD,
        ("*.up",): {n for n in MATRICES if "up" not in n} | HEAD,
        ("down.weight",): {n for n in MATRICES if "down" not in n} | HEAD,
        ("blocks", "LayerNorm"): HEAD,
    }
    for names, wanted in cases.items():
        net = shard(Net(), policy_for("fp8_block", keep_unquantized=names))
        assert set(quantized_parameters(net)) == wanted, names
    # What computes in fp32 is no code.
    net = shard(Net(), policy_for("fp8_block", keep_fp32=("head",)))
    assert set(quantized_parameters(net)) == MATRICES
    for names in (("blocks.7",), ("head", "lm_head")):
        with pytest.raises(
            ValueError, match=rf"\['{re.escape(names[-1])}'\] that match none.*keep_unquantized"
        ):
            shard(Net(), policy_for("fp8_block", keep_unquantized=names))
    # In a unit's own call a name counts there; one of an inner unit's would be without effect.
    net = Net()
    for block in net.blocks:
        fully_shard(block, mp_policy=policy_for("mxfp8", keep_unquantized=("up",)))
    with pytest.raises(ValueError, match=r"'blocks.1' of|'blocks.1', which is .*keep_unquantized"):
        fully_shard(net, mp_policy=policy_for("mxfp8", keep_unquantized=("blocks.1",)))
    fully_shard(net, mp_policy=policy_for("mxfp8"))
    assert set(quantized_parameters(net)) == {n for n in MATRICES if "down" in n}


def test_names_keep_weights_as_they_are(ranks: Ranks) -> None:
    """Those of parameters, modules, classes; patterns; in a model and in a unit; typos raise."""
    ranks(2).run(_names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8"}, "recipes fp8_current, fp8_delayed, fp8_block, mxfp8, nvfp4, got 'fp8'"),
        ({"recipe": "mxfp8", "keep_unquantized": ("",)}, "none of them empty, got"),
        ({"recipe": "mxfp8", "keep_unquantized": "head"}, "names in a tuple.*got 'head'"),
        ({"recipe": "mxfp8", "quantize_from": "fp32"}, "'model_dtype' or 'main', got 'fp32'"),
        ({"keep_unquantized": ("head",)}, "a recipe beside what it is to leave out, got None"),
        ({"quantize_activations": False}, "a recipe beside what it is to leave out, got None"),
        ({"keep_fp32": "*norm"}, r"names in a tuple.*got '\*norm'.*keep_fp32=\('lm_head',\)"),
        ({"keep_fp32": None}, "names in a tuple, none of them empty, got None"),
        ({"reduce_dtype": "bf16"}, "at least 16 bits, got 'bf16'. In .*reduce_dtype"),
        ({"output_dtype": torch.int32}, "at least 16 bits, got torch.int32"),
        ({"main_params_dtype": None}, "at least 16 bits, got None"),
    ],
)
def test_policies_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    """When they are made, with what there is."""
    with pytest.raises(ValueError, match=message):
        MixedPrecisionPolicy(torch.bfloat16, **options)


def test_one_string_is_no_list_of_names() -> None:
    """Of the characters of a pattern '*' would match every weight."""
    with pytest.raises(ValueError, match=r"names in a tuple.*got '\*head'. In .*quantize_\(\)"):
        quantize_(nn.Linear(32, 32), "mxfp8", keep_unquantized="*head")


def test_a_policy_takes_a_recipe_by_name_or_value() -> None:
    """Both are the same; without activations inputs and gradients stay as they are."""
    for name in RECIPE_NAMES:
        assert policy_for(name).quantization == policy_for(recipe_of(name)).quantization
        only = policy_for(name, quantize_activations=False).quantization
        assert only == recipe_of(name, quantize_activations=False)
        assert only.input is None
    assert policy_for(None).quantization is None


class OddNet(Net):
    """A net of which no matrix has sizes that mxfp8 takes."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = nn.Linear(64, 30), nn.Linear(30, 64)


def _state(net: nn.Module) -> list[tuple[type, int]]:
    return [(type(m), len(m._parameters)) for m in net.modules()]


def _refused() -> None:
    bf16 = policy_for(None)
    cases: list[tuple[nn.Module, MixedPrecisionPolicy, dict[str, Any], type[Exception], str]] = [
        (
            OddNet(),
            policy_for("mxfp8"),
            {},
            ValueError,
            r"mxfp8 can quantize, got not the weight of a linear layer: .*norm.*; mxfp8 takes rows "
            r"and columns that are multiples of 32: blocks.\*.up.weight, .*head.weight",
        ),
        (
            Net().double(),
            MixedPrecisionPolicy(recipe="mxfp8"),
            {},
            ValueError,
            r"fp32, bf16 or fp16 to quantize, got 'up.weight' of torch.float64, 'down.weight'",
        ),
        (
            Net(),
            policy_for("mxfp8"),
            {"offload_policy": OffloadPolicy(params=True)},
            NotImplementedError,
            r"on the device.*OffloadPolicy\(params=True\), with up.weight, down.weight.*'mxfp8'",
        ),
    ]
    integers = Net()
    for block in integers.blocks:
        codes = torch.zeros(64, 160, dtype=torch.int8)
        block.down.weight = nn.Parameter(codes, requires_grad=False)
    cases.append(
        (integers, policy_for("mxfp8"), {}, ValueError, "got 'down.weight' of torch.int8.*keep_un")
    )
    for net, policy, options, error, message in cases:
        before, parameters = _state(net), list(net.parameters())
        with pytest.raises(error, match=message):
            fully_shard_model(net, [Block], mp_policy=policy, **options)
        assert _state(net) == before and list(map(id, net.parameters())) == list(
            map(id, parameters)
        )
        if error is not ValueError or "fp32" in message or "int8" in message:
            with pytest.raises(error):
                fully_shard(net.blocks[0], mp_policy=policy, **options)
            assert _state(net) == before
    # Integers that are named stay as they are.
    kept = policy_for("mxfp8", keep_unquantized=("down",))
    assert set(quantized_parameters(shard(integers, kept))) == {n for n in MATRICES if "up" in n}
    assert not quantized_parameters(shard(Net(), bf16))


def test_what_cannot_be_quantized_is_refused_before_anything_changes(ranks: Ranks) -> None:
    """Recipes that fit nothing, dtypes that no format takes, parameters on the host."""
    ranks(2).run(_refused)


def _nothing_by_single_calls() -> None:
    net, policy = OddNet(), policy_for("mxfp8")
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    with pytest.raises(ValueError, match=r"mxfp8 can quantize, got .*first forward of"):
        net(batch(0, 0, 0))


def test_calls_unit_by_unit_that_quantize_nothing_are_refused(ranks: Ranks) -> None:
    """When the model first runs, on all ranks: before that no call sees the whole."""
    ranks(2).run(_nothing_by_single_calls)


def _ranks_differ(kind: str) -> None:
    is_first = dist.get_rank() == 0
    policies = {
        "recipe": policy_for("mxfp8" if is_first else "fp8_block"),
        "none": policy_for("mxfp8" if is_first else None),
        "activations": policy_for("mxfp8", quantize_activations=is_first),
        "source": policy_for("mxfp8", quantize_from="main" if is_first else "model_dtype"),
        "names": policy_for("mxfp8", keep_unquantized=("blocks.0.up",) if is_first else ()),
        "dtype": policy_for(None) if is_first else MixedPrecisionPolicy(torch.float16),
    }
    for layout in ("zero3", "zero0"):
        net = shard(Net(), policies[kind], **options_of(layout))
        with pytest.raises(
            ValueError, match=r"parameters, shapes, dtypes and recipes on all ranks"
        ):
            net(batch(0, 0, 0))


@pytest.mark.parametrize("kind", ["recipe", "none", "activations", "source", "names", "dtype"])
def test_ranks_with_different_recipes_are_refused_together(ranks: Ranks, kind: str) -> None:
    """One ValueError on every rank at the first forward, where they would mix or hang."""
    ranks(2).run(_ranks_differ, kind)


def _optimizers_on_the_host() -> None:
    net = shard(Net(), policy_for("mxfp8"))
    before = [p.detach().to_local().data_ptr() for p in net.parameters()]
    for fraction in (1.0, 0.25, "auto"):
        with pytest.raises(NotImplementedError, match=r"offload_fraction 0 .*'Block' under mxfp8"):
            HybridDeviceOptimizer(net.parameters(), offload_fraction=fraction)
        groups = [g for unit in (*net.blocks, net) for g in unit._fsdp_unit().groups]
        assert all(g.host_memory is None for g in groups)
        assert [p.detach().to_local().data_ptr() for p in net.parameters()] == before
    optimizers = [HybridDeviceOptimizer(net.parameters(), offload_fraction=0.0)]
    optimizers.append(FusedAdam(net.parameters()))
    for step, optimizer in enumerate(optimizers):
        net(batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_optimizers_that_offload_are_refused(ranks: Ranks) -> None:
    """Any fraction but 0, before a group has moved."""
    ranks(2).run(_optimizers_on_the_host)


class _Lines(logging.Handler):
    """Collects messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take one."""
        self.lines.append(record.getMessage())


def _logged() -> list[str]:
    handler, logger = _Lines(), logging.getLogger("megafsdp.fsdp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        net = shard(Net(), policy_for("mxfp8", keep_unquantized=("*.up",)))
        for step in range(2):
            net(batch(step, 0, 0)).backward()
    finally:
        logger.removeHandler(handler)
    return [line for line in handler.lines if "mxfp8" in line]


def test_what_stays_as_it_is_is_said_once(ranks: Ranks) -> None:
    """In one line of one rank: how many are quantized, and all others by their reasons."""
    first, second = ranks(2).run(_logged)
    assert second == []
    (line,) = first
    assert "2 weights in codes of mxfp8" in line
    assert "named in keep_unquantized: blocks.*.up.weight" in line
    assert "mxfp8 takes rows and columns that are multiples of 32: head.weight" in line
    assert "not the weight of a linear layer: head.bias, blocks.*.norm.weight" in line


def _other_dtypes() -> None:
    for dtype in (torch.float32, torch.float16, None):
        net = shard(Net(), MixedPrecisionPolicy(dtype, recipe="mxfp8"))
        net(batch(0, 0, dist.get_rank())).backward()
        for _, record in quantized_parameters(net).values():
            assert record.unsharded.dtype == (dtype or torch.float32)
        assert all(p.grad is not None for p in net.parameters())


def test_models_in_other_dtypes_are_quantized_too(ranks: Ranks) -> None:
    """In fp32 and fp16 as in bf16."""
    ranks(2).run(_other_dtypes)
