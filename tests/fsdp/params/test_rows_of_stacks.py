"""Stacks of matrices are cut between the rows of any of them: values, states, old checkpoints."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafsdp import FusedAdam, checkpoint, full_state_dict, full_tensor, fully_shard
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.buffer.layout import TensorSpec, row_numel_of
from megafsdp.buffer.planner import plan_layout
from megafsdp.fsdp.params import managed_parameter
from tests.fsdp.toy import adamw
from tests.ranks import Ranks


class Stack(nn.Module):
    """A stack of matrices, a convolution's weight and a matrix, all used by every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 16, 40) / 6)
        self.conv = nn.Parameter(torch.randn(16, 1, 4))
        self.out = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the sum of all matrices' outputs."""
        y = torch.einsum("enk,tk->tn", self.experts, x) * self.conv.sum((1, 2))
        return (self.out(torch.tanh(y)) + x).square().mean()


def test_a_stack_pads_little_on_more_ranks_than_matrices() -> None:
    """128 experts on 1,024 ranks pad less than 0.3 %, where whole experts pad several times all."""
    shapes = [(128, 1536, 2048), (128, 2048, 768)]
    planned = {
        rows is None: plan_layout(
            [TensorSpec("experts", s, row_numel=rows and row_numel_of(s)) for s in shapes],
            1024,
            itemsize=2,
        )
        for rows in (True, None)
    }
    numel = sum(spec[0] * spec[1] * spec[2] for spec in shapes)
    assert planned[False].padding_numel < 0.003 * numel
    assert planned[True].padding_numel > numel, "whole experts as rows"
    assert [row_numel_of(s) for s in [(5, 4), (6, 1, 4), (2, 3, 4, 5), (7,), ()]] == [
        4,
        4,
        60,
        1,
        1,
    ]


@contextmanager
def _whole_matrices_as_rows() -> Iterator[None]:
    """Cut stacks as versions before did."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(managed_parameter, "row_numel_of", lambda shape: math.prod(shape[1:]))
        yield


def _sharded(options: dict[str, object]) -> Stack:
    net = Stack()
    fully_shard(net, **options)
    return net


def _batches() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, dist.get_world_size(), 5, 40, generator=generator)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in _batches():
        net(batch[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _equal_one_process(options: dict[str, object]) -> None:
    # In fp64 the sides differ by the order of sums alone.
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    reference = Stack().double()
    net = fully_shard(Stack().double(), **options)
    assert local_tensor(net.experts).shape[1:] == (40,)
    optimizers = [adamw(reference), adamw(net)]
    for batch in _batches().double():
        reference(batch.flatten(0, 1)).backward()
        net(batch[dist.get_rank()]).backward()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            close(full_tensor(p.grad), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        close(full_tensor(p.detach()), q.detach())


def test_stacks_train_as_in_one_process(ranks: Ranks) -> None:
    """With cuts inside of a matrix, the rows of the main weight gathered or kept in full."""
    for strategy in ("optim_grads_params", "optim"):
        ranks(4).run(_equal_one_process, {"strategy": strategy})


def _narrow_states(directory: str) -> dict[str, Tensor]:
    """Train with FP8 states, save, load where nothing is cut, and return all in full."""
    found = []
    for strategy in ("optim_grads_params", "no_shard"):
        net = _sharded({"strategy": strategy})
        optimizer = FusedAdam(
            net.parameters(),
            1e-2,
            exp_avg_dtype=torch.float8_e4m3fn,
            exp_avg_sq_dtype=torch.float16,
        )
        if not found:
            _train(net, optimizer)
            checkpoint.save(directory, step=1, model=net, optimizer=optimizer)
        else:
            checkpoint.load(directory, model=net, optimizer=optimizer)
        states = optimizer.state[net.experts]
        found.append({n: full_tensor(t).float() for n, t in states.items() if t.ndim})
        assert states["exp_avg"].dtype == torch.float8_e4m3fn
    assert found[0].keys() == found[1].keys() and found[0]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    return found[0]


def test_narrow_states_of_a_stack_have_the_same_scales_on_any_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Saved where matrices are cut, loaded where they are whole: bit for bit."""
    values = ranks(4).run(_narrow_states, str(tmp_path / "saved"))
    assert all(value.count_nonzero() for value in values[0].values())


def _from_before(directory: str) -> None:
    with _whole_matrices_as_rows():
        old = _sharded({})
    assert local_tensor(old.experts).shape[1:] == (16, 40)
    optimizer = adamw(old)
    _train(old, optimizer)
    checkpoint.save(directory, step=1, model=old, optimizer=optimizer)
    new = _sharded({})
    other = adamw(new)
    assert not torch.equal(full_state_dict(new)["experts"], full_state_dict(old)["experts"])
    checkpoint.load(directory, model=new, optimizer=other)
    for name, value in full_state_dict(old).items():
        assert torch.equal(full_state_dict(new)[name], value)
    for p, q in zip(old.parameters(), new.parameters(), strict=True):
        for name, value in optimizer.state[p].items():
            assert torch.equal(full_tensor(value), full_tensor(other.state[q][name]))


def test_checkpoints_of_whole_matrices_as_rows_load(ranks: Ranks, tmp_path: Path) -> None:
    """A file does not know how a stack was cut."""
    ranks(3).run(_from_before, str(tmp_path / "saved"))
