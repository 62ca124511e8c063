"""The strategies of the engine as a table, two models, and one body that trains both sides.

The oracle is one process that accumulates the losses of all ranks and microbatches, each divided by
their number. To test another strategy everywhere, add one line to :data:`ENGINES`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from megafsdp import fully_shard, microbatch
from tests.fsdp.toy import VOCABULARY, WIDTH, Net, full_grads, full_tensors

ROWS_PER_RANK = 2
SEQUENCE_LENGTH = 5
# Sums over ranks and microbatches in another order; the largest differences seen are 8e-7 of the
# loss and 2e-6 in the parameters.
LOSS_TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
PARAMETER_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

MeshShape = tuple[int, ...]
ONE_AXIS: tuple[MeshShape, ...] = ((1,), (2,), (3,), (4,))
TWO_AXES: tuple[MeshShape, ...] = ((2, 2), (1, 4), (4, 1))


@dataclass(frozen=True)
class Engine:
    """What ``fully_shard`` is told.

    Attributes:
        meshes: Shapes of the meshes it is tested on.
        options: Options of every unit.
        root_options: Options of the root that differ.
        is_root_on_one_axis: Whether the root lies on one axis of all ranks where the blocks' mesh
            has two.
    """

    meshes: tuple[MeshShape, ...]
    options: dict[str, object] = field(default_factory=dict)
    root_options: dict[str, object] = field(default_factory=dict)
    is_root_on_one_axis: bool = False

    def with_options(self, **options: object) -> Engine:
        """Return the same with further options for every unit."""
        return replace(self, options={**self.options, **options})

    def shard(self, model: nn.Module, shape: MeshShape) -> nn.Module:
        """Make each block and then the model a unit."""
        mesh = mesh_of_shape(shape)
        root_mesh = mesh_of_shape((math.prod(shape),)) if self.is_root_on_one_axis else mesh
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **self.options)
        return fully_shard(model, mesh=root_mesh, **{**self.options, **self.root_options})


def mesh_of_shape(shape: MeshShape) -> DeviceMesh:
    """Return a mesh of one axis, or of replicas and of ranks to divide among."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


ENGINES: dict[str, Engine] = {
    "no_shard": Engine(ONE_AXIS, {"strategy": "no_shard"}),
    "optim": Engine(ONE_AXIS, {"strategy": "optim"}),
    "optim_grads": Engine(ONE_AXIS, {"strategy": "optim_grads"}),
    "optim_grads_params": Engine(ONE_AXIS, {"strategy": "optim_grads_params"}),
    "hsdp": Engine(TWO_AXES, {"outer_strategy": "no_shard"}),
    "hfsdp": Engine(TWO_AXES, {"outer_strategy": "optim"}),
}
MIXED_ENGINES: dict[str, Engine] = {
    "zero3_under_no_shard": Engine(((2,), (3,)), root_options={"strategy": "no_shard"}),
    "zero3_under_zero1": Engine(((2,), (3,)), root_options={"strategy": "optim"}),
    "zero2_under_zero3": Engine(
        ((2,), (3,)), {"strategy": "optim_grads"}, {"strategy": "optim_grads_params"}
    ),
    "no_shard_under_zero3": Engine(
        ((2,), (3,)), {"strategy": "no_shard"}, {"strategy": "optim_grads_params"}
    ),
    "hsdp_under_zero3": Engine(((2, 2), (1, 4), (4, 1)), is_root_on_one_axis=True),
    "hsdp_under_no_shard": Engine(((2, 2),), root_options={"strategy": "no_shard"}),
    "hfsdp_under_hsdp": Engine(
        ((2, 2), (4, 1)), {"outer_strategy": "optim"}, {"outer_strategy": "no_shard"}
    ),
}
# How the loop says that more microbatches follow, and how many there are; with one, no_sync() would
# cover nothing.
LOOPS = [
    ("plain", 1),
    ("microbatch", 1),
    ("plain", 3),
    ("microbatch", 3),
    ("no_sync", 3),
    ("mixed", 3),
]
MODELS = ("even", "odd")


class Even(Net):
    """The toy: every rank and microbatch uses every parameter."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, branch: int) -> torch.Tensor:
        """Return the mean cross entropy."""
        return super().forward(tokens, labels)


class OddBlock(nn.Module):
    """Parameters of every odd kind, and branches of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(3, WIDTH, 5) * 0.3)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3, requires_grad=False)
        self.branches = nn.ModuleList(nn.Linear(5, WIDTH) for _ in range(3))
        self.never = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        """Return x plus what one branch makes of it."""
        mixed = torch.einsum("btw,kwn->btn", x @ self.frozen, self.cube)
        return x + self.branches[branch](torch.tanh(mixed + self.shift)) * self.scale


class Odd(nn.Module):
    """Embedding with a tied head, and odd blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.never = nn.Parameter(torch.randn(3, 5))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, branch: int) -> torch.Tensor:
        """Return the mean cross entropy."""
        x = self.embedding(tokens) + self.frozen
        for block in self.blocks:
            x = block(x, branch)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def branch_of(rank: int, k: int) -> int:
    """Return the branch that a rank takes in microbatch k.

    Branch 1 is taken by rank 1 alone, in the first microbatch; branch 2 by rank 0 alone, in the
    second. So with one microbatch no rank takes branch 2, and with three the last microbatch, which
    reduces, sees branch 0 alone.
    """
    return {(1, 0): 1, (0, 1): 2}.get((rank, k), 0)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW that does not turn rounding noise in gradients of almost zero into steps.

    The odd model's is torch's default form, an operation at a time for each parameter.
    """
    is_fused = True if isinstance(model, Even) else None
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=is_fused)


def build(name: str) -> nn.Module:
    """Return the model of a name, the same on every rank."""
    return Odd() if name == "odd" else Even()


Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of_step(step: int, num_microbatches: int, world_size: int) -> list[Batch]:
    """Return the global batches of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (2, ROWS_PER_RANK * world_size, SEQUENCE_LENGTH)
    drawn = [
        torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(num_microbatches)
    ]
    return [(both[0], both[1]) for both in drawn]


def rows_of(batch: Batch, rank: int) -> Batch:
    """Return one rank's rows of a global batch."""
    rows = slice(ROWS_PER_RANK * rank, ROWS_PER_RANK * (rank + 1))
    return batch[0][rows], batch[1][rows]


@dataclass(frozen=True)
class OneProcess:
    """What one process that trains on the global batches sees.

    Attributes:
        losses: The mean loss of each step.
        grads: Gradients of the first step by name; None where it makes none.
        start: Parameters before the first step by name.
        end: Parameters after the last step by name.
        used: Names of the parameters that some step gives a gradient.
    """

    losses: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]
    used: set[str]


@functools.cache
def one_process(
    model_name: str, num_microbatches: int, world_size: int, num_steps: int
) -> OneProcess:
    """Train in one process; once for all the cases of a rank that have this oracle."""
    model = build(model_name)
    start = _parameters_of(model)
    optimizer = make_optimizer(model)
    losses, first_grads, used = [], {}, set()
    for step in range(num_steps):
        batches = batches_of_step(step, num_microbatches, world_size)
        losses.append(_reference_backward(model, batches, world_size))
        grads = {name: p.grad for name, p in model.named_parameters()}
        first_grads = first_grads or grads
        used |= {name for name, grad in grads.items() if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return OneProcess(losses, first_grads, start, _parameters_of(model), used)


def _parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _reference_backward(model: nn.Module, batches: list[Batch], world_size: int) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over ranks and microbatches; return that loss."""
    total = torch.zeros(())
    for k, batch in enumerate(batches):
        if isinstance(model, Even):
            loss = model(*batch, 0) / len(batches)
        else:
            losses = [model(*rows_of(batch, r), branch_of(r, k)) for r in range(world_size)]
            loss = torch.stack(losses).sum() / (world_size * len(batches))
        loss.backward()
        total += loss.detach()
    return total


@contextlib.contextmanager
def told(model: nn.Module, kind: str, k: int, num_microbatches: int) -> Iterator[None]:
    """Say in one of the loops' manners whether more microbatches follow microbatch k.

    The mixed manner tells of the first by no_sync() and of others by microbatch().
    """
    is_last = k == num_microbatches - 1
    if kind == "mixed":
        kind = "plain" if is_last else "microbatch" if k else "no_sync"
    if kind == "microbatch":
        with microbatch(model, is_last=is_last):
            yield
    elif kind == "no_sync" and not is_last:
        with model.no_sync():
            yield
    else:
        yield


def sharded_backward(model: nn.Module, batches: list[Batch], kind: str) -> torch.Tensor:
    """Run a step's microbatches of this rank; return the mean loss over ranks."""
    rank = dist.get_rank()
    total = torch.zeros(())
    for k, batch in enumerate(batches):
        with told(model, kind, k, len(batches)):
            loss = model(*rows_of(batch, rank), branch_of(rank, k)) / len(batches)
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total


def ratio_of_norms(
    grads: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None]
) -> float:
    """Return the norm of all gradients together divided by that of the wanted ones, in fp64."""
    norms = [
        torch.stack([grad.double().norm() for grad in side.values() if grad is not None]).norm()
        for side in (grads, wanted)
    ]
    return float(norms[0] / norms[1])


def gradient_ratio(
    engine: Engine, shape: MeshShape, model_name: str, kind: str, num_microbatches: int
) -> float:
    """Return |g| / |g of one process| of the first step; collective."""
    model = engine.shard(build(model_name), shape)
    sharded_backward(model, batches_of_step(0, num_microbatches, dist.get_world_size()), kind)
    wanted = one_process(model_name, num_microbatches, dist.get_world_size(), num_steps=1)
    return ratio_of_norms(full_grads(model), wanted.grads)


def trajectory(
    engine: Engine,
    shape: MeshShape,
    model_name: str,
    kind: str,
    num_microbatches: int,
    num_steps: int = 10,
) -> float:
    """Train sharded and in one process: gradients of step 1, every loss, the final parameters.

    Returns:
        |g| / |g of one process| of the first step.
    """
    world_size = dist.get_world_size()
    wanted = one_process(model_name, num_microbatches, world_size, num_steps)
    model = engine.shard(build(model_name), shape)
    optimizer = make_optimizer(model)
    ratio = 0.0
    for step in range(num_steps):
        loss = sharded_backward(model, batches_of_step(step, num_microbatches, world_size), kind)
        torch.testing.assert_close(loss, wanted.losses[step], **LOSS_TOLERANCE)
        if step == 0:
            grads = full_grads(model)
            _assert_same_tensors(grads, wanted.grads, GRADIENT_TOLERANCE)
            ratio = ratio_of_norms(grads, wanted.grads)
        optimizer.step()
        optimizer.zero_grad()
    end = full_tensors({name: p.detach() for name, p in model.named_parameters()})
    _assert_same_tensors(end, wanted.end, PARAMETER_TOLERANCE)
    moved = {name for name, full in end.items() if not torch.equal(full, wanted.start[name])}
    assert moved == wanted.used
    return ratio


def _assert_same_tensors(
    found: dict[str, torch.Tensor | None],
    wanted: dict[str, torch.Tensor | None],
    tolerance: dict[str, float],
) -> None:
    """Assert that both have the same names, None in the same places, and else close tensors."""
    assert {name for name in found if found[name] is None} == {
        name for name in wanted if wanted[name] is None
    }
    torch.testing.assert_close(
        {name: tensor for name, tensor in found.items() if tensor is not None},
        {name: tensor for name, tensor in wanted.items() if tensor is not None},
        **tolerance,
    )
