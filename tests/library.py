"""A library that sums by itself, as NCCL does, made of gloo: for tests on CPU ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from megafsdp.buffer.comm import collectives as door

all_reduce = dist.all_reduce


class _Work:
    """A collective that runs when it is waited for: nobody may free or read what it works on."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def wait(self) -> None:
        """Run it."""
        self._run()


class Library:
    """What a backend's library does with flat buffers.

    Attributes:
        log: What happened, in order: collectives issued and waited for.
        ops: The reduction of each sub-buffer, and the factor of a premultiplied sum.
        num_launches: Reduce-scatters issued, of which a coalesced one counts once.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ops: list[tuple[str, float]] = []
        self.num_launches = 0
        self._coalesced: list[Callable[[], None]] | None = None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        wire: torch.Tensor,
        op: object = dist.ReduceOp.SUM,
        *,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> _Work | None:
        """Reduce ``wire`` in its dtype, and write this rank's shard when the result is waited for.

        Until then the output is NaN.
        """
        output.fill_(torch.nan)
        assert output.dtype == wire.dtype, "libraries do not cast"
        assert output.numel() * group.size() == wire.numel()
        self.ops.append(_name_and_factor(op))

        def run() -> None:
            total = wire.clone()
            self._reduce(total, op, group)
            output.copy_(total.chunk(group.size())[group.rank()])

        if self._coalesced is not None:
            assert not async_op, "the launch has the handle"
            self._coalesced.append(run)
            return None
        return self._launch([run])

    def _launch(self, runs: list[Callable[[], None]]) -> _Work:
        number, self.num_launches = self.num_launches, self.num_launches + 1
        self.log.append(f"issue {number}")

        def run() -> None:
            self.log.append(f"wait {number}")
            for each in runs:
                each()

        return _Work(run)

    def _reduce(self, tensor: torch.Tensor, op: object, group: dist.ProcessGroup | None) -> None:
        name, factor = _name_and_factor(op)
        assert factor == 1.0 or tensor.dtype != torch.bfloat16, "torch gives NCCL a factor of zero"
        # Multiplied before the sum and in the dtype of the tensor, as in NCCL.
        scale = 1 / dist.get_world_size(group) if name == "AVG" else factor
        all_reduce(tensor.mul_(scale) if scale != 1.0 else tensor, group=group)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: object = dist.ReduceOp.SUM,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> object:
        """Reduce in place: flat buffers when they are waited for, all else as gloo does."""
        if op not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN) and async_op and tensor.ndim == 1:
            self.ops.append(_name_and_factor(op))
            self.log.append("issue sum")

            def run() -> None:
                self.log.append("wait sum")
                self._reduce(tensor, op, group)

            return _Work(run)
        return all_reduce(tensor, op=op, group=group, async_op=async_op)

    @contextlib.contextmanager
    def coalesce(self, group: dist.ProcessGroup) -> Iterator[_Work]:
        """Launch the reduce-scatters of a context as one."""
        runs: list[Callable[[], None]] = []
        self._coalesced = runs
        yield _Work(lambda: launched.wait())
        self._coalesced = None
        launched = self._launch(runs)


def _name_and_factor(op: object) -> tuple[str, float]:
    # isinstance() takes the plain kinds for reductions too.
    if type(op) is dist.ReduceOp:
        kind, factor = op.__getstate__()
        return kind.name, factor
    return op.name, 1.0


@contextlib.contextmanager
def library_on_gloo(backend: str = "nccl") -> Iterator[Library]:
    """Let flat buffers be reduced by a library that the door takes for the one of ``backend``.

    Units that are made inside reduce by it as well.
    """
    library = Library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "backends", lambda group: {"cpu": backend})
        patch.setattr(door, "_reduce_scatter_single", library.reduce_scatter)
        patch.setattr(door, "coalesce_collectives", library.coalesce)
        patch.setattr(dist, "all_reduce", library.all_reduce)
        yield library
