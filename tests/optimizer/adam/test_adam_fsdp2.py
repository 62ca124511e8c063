"""FusedAdam steps FSDP2's DTensors, rows and empty ones, as it steps the whole tensors."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from megafsdp import FusedAdam
from megafsdp._native import native_module
from megafsdp.optimizer.states.formats import dtype_for
from tests.optimizer.cases import for_each
from tests.ranks import Ranks

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
FORMATS = (FP32, BF16, FP16, FP8)
LIMIT = 0.3
_WHY_INEXACT = "without the native kernels a norm is rounded once a tensor, so it knows the cuts"


def _rows(whole: torch.Tensor) -> torch.Tensor:
    """Return the rows of a whole tensor that FSDP2 gives this rank, perhaps none."""
    parts = whole.chunk(dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows in fp32, which has all values of the other formats."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().float()


def _steps_as_whole(
    modes: tuple[torch.dtype, torch.dtype], has_remainders: bool, max_grad_norm: float | None
) -> int:
    """Return how many parameters this rank has nothing of."""
    is_exact = max_grad_norm is None or native_module() is not None
    # A factor on gradients that is rounded otherwise, by one part in 2 ** 23.
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-6, "atol": 1e-8}
    assert_same = functools.partial(torch.testing.assert_close, **tolerance)
    torch.manual_seed(0)
    # Rows are cut 4 and 3, 5 and 5, 1 and 0; columns make a short last block, or none.
    base = nn.Sequential(nn.Linear(300, 7), nn.Linear(7, 10, bias=False), nn.Linear(10, 1))
    base.to(BF16 if has_remainders else FP32)
    whole = copy.deepcopy(base)
    torch_fully_shard(base)
    ours, wanted = (
        FusedAdam(
            model.parameters(),
            lr=1e-2,
            weight_decay=0.1,
            exp_avg_dtype=modes[0],
            exp_avg_sq_dtype=modes[1],
            store_param_remainders=has_remainders,
            max_grad_norm=max_grad_norm,
        )
        for model in (base, whole)
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for sharded, plain in zip(base.parameters(), whole.parameters(), strict=True):
            # Of whole numbers the squares have one sum, in whatever order they are added.
            grad = torch.randint(-3, 4, plain.shape, generator=generator).to(plain.dtype)
            plain.grad = grad
            sharded.grad = DTensor.from_local(
                _rows(grad),
                sharded.device_mesh,
                [Shard(0)],
                run_check=False,
                shape=grad.shape,
                stride=grad.stride(),
            )
        ours.step()
        wanted.step()
        if max_grad_norm is not None:
            assert wanted.grad_norm > max_grad_norm
            assert_same(ours.grad_norm, wanted.grad_norm)
    kept_names = {"exp_avg", "exp_avg_sq"} | ({"param_remainder"} if has_remainders else set())
    for (name, sharded), plain in zip(base.named_parameters(), whole.parameters(), strict=True):
        assert_same(_local(sharded.detach()), _rows(plain.detach()).float())
        state, own = ours.state[sharded], wanted.state[plain]
        assert state.keys() == own.keys() == kept_names | {"step"}
        assert state["step"] == own["step"] == 3
        for kind in kept_names:
            assert state[kind].placements == sharded.placements
            assert state[kind].to_local().shape == sharded.to_local().shape
            assert state[kind].dtype == own[kind].dtype, (name, kind)
            assert_same(_local(state[kind]), _rows(own[kind]).float())
        for kind, mode in zip(("exp_avg", "exp_avg_sq"), modes, strict=True):
            assert state[kind].dtype == dtype_for(plain.shape, mode)
            values = ours.get_unscaled_state(sharded, kind)
            assert_same(_local(values), _rows(wanted.get_unscaled_state(plain, kind)))
        if has_remainders:
            weight = ours.canonical_weight(sharded)
            assert weight.dtype == FP32
            assert_same(_local(weight), _rows(wanted.canonical_weight(plain)))
    if has_remainders:
        assert any(state["param_remainder"].to_local().any() for state in ours.state.values())
    return sum(p.to_local().numel() == 0 for p in base.parameters())


_CASES = {
    "formats": [((a, b), False, None) for a in FORMATS for b in FORMATS],
    "remainders": [((first, FP32), True, None) for first in FORMATS],
    "norm": [((FP32, FP32), False, LIMIT)],
    "remainders and norm": [((FP8, BF16), True, LIMIT)],
}


@pytest.mark.parametrize("of", _CASES)
def test_dtensors_of_fsdp2_step_as_the_whole_tensors(ranks: Ranks, of: str) -> None:
    """Weights, states in all formats, remainders and the norm have the bits of one process."""
    if of == "remainders and norm" and native_module() is None:
        pytest.skip(_WHY_INEXACT)
    num_empty = ranks(2).run(for_each, _steps_as_whole, _CASES[of])
    assert num_empty == [[0] * len(_CASES[of]), [2] * len(_CASES[of])]
