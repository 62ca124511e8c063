"""Steps of whole optimizers by CUDA kernels emulated on a CPU: how many launches, which bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, MixedPrecisionPolicy
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.grads.norms import total_norm
from tests.fsdp.toy import Net, batches, mine, shard
from tests.native import compiled
from tests.optimizer.kernels.emulated_cuda import emulated_cuda
from tests.optimizer.offload.host_reads import NoHostReads
from tests.ranks import Ranks

_NUM_UNITS = 4


def _groups(parameters: list[nn.Parameter], matrices: list[bool]) -> list[dict[str, object]]:
    decayed = [p for p, is_matrix in zip(parameters, matrices, strict=True) if is_matrix]
    others = [p for p, is_matrix in zip(parameters, matrices, strict=True) if not is_matrix]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}]


def _steps_in_flat_buffers(library: Path, capturable: bool) -> list[list[tuple[str, int]]]:
    """Step beside the same rows as plain tensors, one by one; return the launches of each step."""
    net = shard(Net())
    sharded = list(net.parameters())
    matrices = [p.ndim > 1 for p in sharded]
    plain = [nn.Parameter(local_tensor(p).detach().clone()) for p in sharded]
    options = {"lr": 1e-2, "eps": 1e-5, "ftz": False}
    joined = FusedAdam(_groups(sharded, matrices), capturable=capturable, **options)
    single = FusedAdam(_groups(plain, matrices), **options)
    launches = []
    for step in range(3):
        net(*mine(batches(1, seed=step)[0])).backward()
        for own, other, is_matrix in zip(sharded, plain, matrices, strict=True):
            # Then counts differ inside of flat buffers.
            if step == 1 and not is_matrix:
                own.grad = None
            other.grad = None if own.grad is None else local_tensor(own.grad).clone()
        with emulated_cuda(library) as module, NoHostReads():
            joined.step()
        launches.append(module.launches)
        single.step()
        joined.zero_grad()
    for own, other in zip(sharded, plain, strict=True):
        assert torch.equal(local_tensor(own), other)
        assert joined.state[own]["step"] == single.state[other]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(local_tensor(joined.state[own][name]), single.state[other][name])
    return launches


@pytest.mark.parametrize("capturable", [False, True])
def test_a_flat_buffer_is_one_launch_for_all_groups(
    ranks: Ranks, emulation: Path, capturable: bool
) -> None:
    """Groups with and without decay lie mixed; a captured launch even takes several counts."""
    for launches in ranks(2).run(_steps_in_flat_buffers, emulation, capturable):
        first, second, third = launches
        assert first == second == [("adam_step", 1)] * _NUM_UNITS
        assert len(third) == (_NUM_UNITS if capturable else 2 * _NUM_UNITS)


def _norm(library: Path) -> list[tuple[str, int]]:
    net = shard(Net(), mp_policy=MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))
    net(*mine(batches(1)[0])).backward()
    grads = [p.grad for p in net.parameters()]
    wanted = total_norm(grads)
    with emulated_cuda(library) as module:
        assert torch.equal(total_norm(grads), wanted) and wanted > 0
    return module.launches


@compiled
def test_the_squares_of_all_buffers_are_one_launch(ranks: Ranks, emulation: Path) -> None:
    """The norm has the bits of buffers that are summed one by one."""
    assert ranks(2).run(_norm, emulation) == [[("sums_of_squares", _NUM_UNITS)]] * 2


@pytest.mark.parametrize(
    ("dtype", "lr", "options"),
    [
        (torch.float32, torch.tensor(1e-2), {}),
        (torch.bfloat16, torch.tensor(1e-2, dtype=torch.float64), {"adam_w_mode": False}),
        (torch.float32, torch.tensor(1e-2), {"bias_correction": False}),
    ],
)
def test_a_captured_kernel_has_the_bits_of_the_definition(
    emulation: Path, dtype: torch.dtype, lr: torch.Tensor, options: dict[str, bool]
) -> None:
    """Rates in tensors, decay, a factor and found infinities, all read by the kernel; 30 steps."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(700, generator=generator)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        FusedAdam(
            [weight],
            lr=lr,
            weight_decay=0.1,
            exp_avg_dtype=dtype,
            exp_avg_sq_dtype=dtype,
            capturable=True,
            ftz=False,
            **options,
        )
        for weight in weights
    ]
    with emulated_cuda(emulation) as module:
        for step in range(30):
            lr.fill_(1e-2 / (step + 1))
            grad = torch.randn(700, generator=generator)
            for optimizer, weight in zip(optimizers, weights, strict=True):
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(step % 5 == 3))
                weight.grad = grad * (float("inf") if step % 5 == 3 else 4.0)
            version = weights[0]._version
            with NoHostReads():
                optimizers[0].step()
            assert weights[0]._version > version
            with pytest.MonkeyPatch.context() as patch:
                name = "megafsdp.optimizer.kernels.cuda.usable_module"
                patch.setattr(name, lambda device: None)
                optimizers[1].step()
            assert torch.equal(*weights), step
    states = [optimizer.state[w] for optimizer, w in zip(optimizers, weights, strict=True)]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(states[0][name], states[1][name])
    assert states[0]["step"] == 24 and not torch.equal(weights[0], start)
    # What has found infinities launches, and ends at once.
    assert [count for _, count in module.launches] == [int(i % 5 != 3) for i in range(30)]


def test_each_group_takes_its_own_rate_in_a_tensor(emulation: Path) -> None:
    """On one device too: a captured step reads every rate where it is."""
    weights = [nn.Parameter(torch.ones(700)) for _ in range(2)]
    rates = [torch.tensor(0.5), torch.tensor(0.125)]
    groups = [{"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)]
    optimizer = FusedAdam(groups, capturable=True)
    for weight in weights:
        weight.grad = torch.ones(700)
    with emulated_cuda(emulation):
        optimizer.step()
    # Adam's first step is the rate, whatever the gradient.
    for weight, rate in zip(weights, rates, strict=True):
        torch.testing.assert_close(weight.detach(), torch.ones(700) - rate)
