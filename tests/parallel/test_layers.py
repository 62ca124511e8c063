"""Layers cut by tp against plain layers in one process, with the sequence cut and whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.parallel import (
    LayerNorm,
    Linear,
    OutputLayer,
    ParallelModule,
    PositionEmbedding,
    RMSNorm,
    VocabParallelEmbedding,
    cross_entropy,
    gather_vocabulary,
)
from megafsdp.parallel import loss as loss_module
from tests.parallel.cases import whole
from tests.ranks import Ranks

_B, _T, _H, _F, _V = 2, 4, 6, 8, 12
_GATE_AND_UP = FusedParts(("gate", "up"), (_F // 2, _F // 2))


class _Net(ParallelModule):
    """Every layer once; with the ranks' parts of the sequence between embedding and output."""

    def __init__(self, sequence_parallel: bool, has_bias: bool) -> None:
        super().__init__()
        cut: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        self.words = VocabParallelEmbedding(_V, _H, init_std=1.0, **cut)
        self.positions = PositionEmbedding(_T, _H, init_std=1.0, **cut)
        self.norm = LayerNorm(_H, bias=has_bias, **cut)
        self.up = Linear(
            _H, _F, bias=has_bias, init_std=0.5, parallel_mode="column", fused=_GATE_AND_UP, **cut
        )
        self.down = Linear(_F // 2, _H, bias=has_bias, init_std=0.5, parallel_mode="row", **cut)
        self.whole = Linear(_H, _H, bias=has_bias, init_std=0.5, **cut)
        self.last_norm = RMSNorm(_H, **cut)
        self.out = OutputLayer(_H, _V, init_std=0.5, **cut)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return this rank's columns of the logits."""
        x = self.words(tokens) + self.positions(tokens.shape[1])
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        x = x + self.down(gate * up)
        return self.out(self.last_norm(self.whole(x)))


def _net(sequence_parallel: bool, has_bias: bool) -> _Net:
    torch.manual_seed(0)
    net = _Net(sequence_parallel, has_bias).double()
    with torch.no_grad():
        # Norms of ones and biases of zeros would hide where they are applied.
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.1)
    return net


def _loss(net: _Net, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, _V, (2, _B, _T))
    weights = torch.rand(_B * _T, dtype=torch.float64)
    part = net(tokens)
    logits = part if group is None else gather_vocabulary(part, group)
    loss = cross_entropy(part.flatten(0, 1), labels.flatten(), weights, group)
    # The joined logits have a gradient too.
    return loss + logits.square().mean(), logits


def _run(sequence_parallel: bool, has_bias: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = _net(sequence_parallel, has_bias)
    net.set_device_mesh(tp_mesh=mesh)
    with record_collectives() as forward:
        loss, logits = _loss(net, mesh.get_group())
    with record_collectives() as backward:
        loss.backward()
    grads, facts = {}, {}
    for name, parameter in net.named_parameters():
        module, _, attribute = name.rpartition(".")
        layer = net.get_submodule(module)
        assert isinstance(layer, ParallelModule) and isinstance(parameter.grad, DTensor), name
        facts[name] = (str(parameter.placements), str(parameter.grad.placements))
        grads[name] = whole(parameter.grad, layer.declarations[attribute])
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        "grads": grads,
        "facts": facts,
        "forward": dict(forward.calls),
        "backward": dict(backward.calls),
    }


_PLACEMENTS = {
    "words.weight": Shard(0),
    "positions.weight": Replicate(),
    "norm.weight": Replicate(),
    "norm.bias": Replicate(),
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "down.bias": Replicate(),
    "whole.weight": Replicate(),
    "whole.bias": Replicate(),
    "last_norm.weight": Replicate(),
    "out.weight": Shard(0),
}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_forward_and_gradients_equal_plain_layers(
    ranks: Ranks, sequence_parallel: bool, has_bias: bool
) -> None:
    """With values, placements and gradients' placements by mode, and collectives by formula."""
    plain = _net(sequence_parallel, has_bias)
    loss, logits = _loss(plain, None)
    loss.backward()
    by_rank = ranks(2).run(_run, sequence_parallel, has_bias)
    names = [name for name in _PLACEMENTS if has_bias or not name.endswith("bias")]
    for found in by_rank:
        # fp64 sums of a dozen terms in another order.
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["logits"], logits.detach(), rtol=1e-12, atol=1e-12)
        assert list(found["grads"]) == names
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                found["grads"][name], parameter.grad, rtol=1e-11, atol=1e-12, msg=name
            )
            placement = _PLACEMENTS[name]
            is_sum = sequence_parallel and placement == Replicate()
            wanted = (str((placement,)), str((Partial() if is_sum else placement,)))
            assert found["facts"][name] == wanted, name
        # Two of the loss' one block, one that joins the logits; its gradient needs none.
        if sequence_parallel:
            assert found["forward"] == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2}
            assert found["backward"] == {"all_gather": 2, "reduce_scatter": 2}
        else:
            assert found["forward"] == {"all_gather": 1, "all_reduce": 2 + 2}
            assert found["backward"] == {"all_reduce": 2}


def _lose(block_numel: int) -> tuple[list[float], Tensor]:
    loss_module._BLOCK_NUMEL_ON_CPU = block_numel
    try:
        group = dist.group.WORLD
        assert group is not None
        logits, labels, weights = _scores()
        part = logits.chunk(group.size(), dim=1)[group.rank()].clone().requires_grad_()
        with record_collectives() as record:
            loss = cross_entropy(part, labels, weights, group)
        (grad,) = torch.autograd.grad(loss * 3, part)
        return [loss.item(), record.calls["all_reduce"]], grad
    finally:
        loss_module._BLOCK_NUMEL_ON_CPU = 2**19


def _scores() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    # Beyond what an exponential in fp32 can take without the largest logit of all ranks.
    logits = torch.randn(10, 12, generator=generator) * 100
    labels = torch.randint(0, 12, (10,), generator=generator)
    return logits, labels, torch.rand(10, generator=generator)


@pytest.mark.parametrize(("num_ranks", "block_numel"), [(2, 2**19), (3, 12)])
def test_the_loss_of_a_cut_vocabulary_equals_the_whole_ones(
    ranks: Ranks, num_ranks: int, block_numel: int
) -> None:
    """In one block and in several, each of two all-reduces, on large logits."""
    logits, labels, weights = _scores()
    logits.requires_grad_()
    loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (grad,) = torch.autograd.grad(loss * 3, logits)
    by_rank = ranks(num_ranks).run(_lose, block_numel)
    num_blocks = -(-10 // (block_numel // (12 // num_ranks)))
    for found, _ in by_rank:
        assert abs(found[0] / loss.item() - 1) < 1e-6
        assert found[1] == 2 * num_blocks
    got = torch.cat([part for _, part in by_rank], dim=1)
    # fp32 rounding of an exponential and a division, on numbers below 3.
    torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)


class _Operators(TorchDispatchMode):
    """Write down every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _operators(layer: nn.Module, x: Tensor) -> list[str]:
    x = x.clone().requires_grad_(x.is_floating_point())
    with _Operators() as mode:
        layer(x).sum().backward()
    return mode.names


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("layer", "plain", "x"),
    [
        (lambda: Linear(_H, _F, parallel_mode="column"), lambda: nn.Linear(_H, _F), _H),
        (lambda: Linear(_H, _F, parallel_mode="row"), lambda: nn.Linear(_H, _F), _H),
        (lambda: Linear(_H, _F, bias=False), lambda: nn.Linear(_H, _F, bias=False), _H),
        (lambda: OutputLayer(_H, _V), lambda: nn.Linear(_H, _V, bias=False), _H),
        (lambda: VocabParallelEmbedding(_V, _H), lambda: nn.Embedding(_V, _H), 0),
        (lambda: RMSNorm(_H, 0.5), lambda: nn.RMSNorm(_H, 0.5), _H),
        (lambda: LayerNorm(_H, 0.5), lambda: nn.LayerNorm(_H, 0.5), _H),
    ],
)
def test_without_tp_a_layer_issues_the_operators_of_torchs(
    layer: Any, plain: Any, x: int, is_cut: bool
) -> None:
    """Forward and backward, operator by operator: no detour for a mesh that is not there."""
    made, torchs = layer(), plain()
    made.sequence_parallel = is_cut
    given = torch.randn(_B, _T, x) if x else torch.randint(0, _V, (_B, _T))
    torchs.load_state_dict(made.state_dict())
    assert torch.equal(made(given), torchs(given))
    assert _operators(made, given) == _operators(torchs, given)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Linear(_H, _F),
        lambda: Linear(_H, _F, bias=False),
        lambda: RMSNorm(_H),
        lambda: LayerNorm(_H),
        lambda: OutputLayer(_H, _V),
    ],
)
def test_weights_that_a_policy_keeps_in_fp32_compute_in_fp32(layer: Any) -> None:
    """Of bf16 inputs and beside biases in bf16; results have the input's dtype, but for logits."""
    made, x = layer(), torch.randn(_B, _T, _H).bfloat16()
    has_bias = getattr(made, "bias", None) is not None
    if has_bias:
        made.bias = nn.Parameter(torch.randn(made.bias.shape).bfloat16())
    dtype = torch.float32 if isinstance(made, OutputLayer) else torch.bfloat16
    torch.testing.assert_close(made(x), made(x.float()).to(dtype), rtol=0, atol=0)
    if has_bias:
        wanted = made.bfloat16()(x)
        made.bias = nn.Parameter(made.bias.detach().float())
        torch.testing.assert_close(made(x), wanted, rtol=0, atol=0)


def _add_a_bias_in_fp32() -> torch.dtype:
    layer = Linear(_H, _F, parallel_mode="row", tp_mesh=init_device_mesh("cpu", (2,)))
    layer.weight = nn.Parameter(layer.weight.detach().bfloat16())
    return layer(torch.ones(1, 2, _H // 2).bfloat16()).dtype


def test_a_bias_in_fp32_leaves_the_dtype_of_a_sum_over_ranks(ranks: Ranks) -> None:
    """A policy may keep biases alone."""
    assert ranks(2).run(_add_a_bias_in_fp32) == [torch.bfloat16] * 2


def test_a_sequence_that_tp_does_not_divide_is_refused(ranks: Ranks) -> None:
    """On all ranks alike, before the collective."""
    assert ranks(2).run(_embed_an_odd_sequence) == [True, True]


def _embed_an_odd_sequence() -> bool:
    layer = VocabParallelEmbedding(_V, _H, sequence_parallel=True)
    layer.set_device_mesh(tp_mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"2 ranks divide along dim 1, got shape \(1, 3, 6\)"):
        layer(torch.zeros(1, 3, dtype=torch.int64))
    return True
