"""The strategies of the engine as a table, two models, and one body that trains both sides.

The oracle is one process that accumulates the losses of all ranks and microbatches, each divided by
their number. To test another strategy everywhere, add one line to :data:`ENGINES`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from megafsdp import full_tensor, fully_shard, microbatch
from tests.fsdp.toy import VOCABULARY, WIDTH, Net, assert_same_grads, full_grads

ROWS_PER_RANK = 2
SEQUENCE_LENGTH = 5
NUM_STEPS = 10
# Sums over ranks and microbatches in another order; the largest differences seen are 8e-7 of the
# loss and 2e-6 in the parameters.
LOSS_TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
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
    """Return AdamW that does not turn rounding noise in gradients of almost zero into steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


def build(name: str) -> nn.Module:
    """Return the model of a name, the same on every rank."""
    return Odd() if name == "odd" else Even()


Batch = tuple[torch.Tensor, torch.Tensor]


def batches_of_step(step: int, num_microbatches: int) -> list[Batch]:
    """Return the global batches of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (2, ROWS_PER_RANK * dist.get_world_size(), SEQUENCE_LENGTH)
    drawn = [
        torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(num_microbatches)
    ]
    return [(both[0], both[1]) for both in drawn]


def rows_of(batch: Batch, rank: int) -> Batch:
    """Return one rank's rows of a global batch."""
    rows = slice(ROWS_PER_RANK * rank, ROWS_PER_RANK * (rank + 1))
    return batch[0][rows], batch[1][rows]


def reference_backward(model: nn.Module, batches: list[Batch]) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over ranks and microbatches; return that loss."""
    world = dist.get_world_size()
    total = torch.zeros(())
    for k, batch in enumerate(batches):
        if isinstance(model, Even):
            loss = model(*batch, 0) / len(batches)
        else:
            losses = [model(*rows_of(batch, r), branch_of(r, k)) for r in range(world)]
            loss = torch.stack(losses).sum() / (world * len(batches))
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


def norm_of(grads: list[torch.Tensor | None]) -> float:
    """Return the norm of all gradients together, in fp64."""
    norms = [grad.double().norm() for grad in grads if grad is not None]
    return float(torch.stack(norms).norm())


def gradient_ratio(
    engine: Engine, shape: MeshShape, model_name: str, kind: str, num_microbatches: int
) -> float:
    """Return |g| / |g of one process| of the first step; collective."""
    reference = build(model_name)
    model = engine.shard(copy.deepcopy(reference), shape)
    batches = batches_of_step(0, num_microbatches)
    reference_backward(reference, batches)
    sharded_backward(model, batches, kind)
    wanted = norm_of([p.grad for p in reference.parameters()])
    return norm_of(list(full_grads(model).values())) / wanted


def trajectory(
    engine: Engine, shape: MeshShape, model_name: str, kind: str, num_microbatches: int
) -> float:
    """Train sharded and in one process: gradients of step 1, every loss, the final parameters.

    Returns:
        |g| / |g of one process| of the first step.
    """
    reference = build(model_name)
    start = copy.deepcopy(reference)
    model = engine.shard(copy.deepcopy(reference), shape)
    optimizers = [make_optimizer(reference), make_optimizer(model)]
    ratio, used = 0.0, set()
    for step in range(NUM_STEPS):
        batches = batches_of_step(step, num_microbatches)
        wanted_loss = reference_backward(reference, batches)
        loss = sharded_backward(model, batches, kind)
        torch.testing.assert_close(loss, wanted_loss, **LOSS_TOLERANCE)
        used |= {name for name, p in reference.named_parameters() if p.grad is not None}
        if step == 0:
            assert_same_grads(model, reference)
            wanted = norm_of([p.grad for p in reference.parameters()])
            ratio = norm_of(list(full_grads(model).values())) / wanted
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _assert_same_end(model, reference, start, used)
    return ratio


def _assert_same_end(
    model: nn.Module, reference: nn.Module, start: nn.Module, used: set[str]
) -> None:
    wanted, first = dict(reference.named_parameters()), dict(start.named_parameters())
    for name, parameter in model.named_parameters():
        full, expected = full_tensor(parameter.detach()), wanted[name].detach()
        torch.testing.assert_close(
            full, expected, **PARAMETER_TOLERANCE, msg=lambda m, n=name: f"{m}\n{n}"
        )
        has_moved = not torch.equal(full, first[name].detach())
        assert has_moved == (name in used), f"{name} moved: {has_moved}"
