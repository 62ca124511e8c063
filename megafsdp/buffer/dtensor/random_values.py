"""Random values of sharded tensors: each rank keeps its rows of a draw of the whole tensor.

Each rank draws the whole tensor, which is freed at once, and takes its own rows. So with equal
random states the values are those of one process, for any number of ranks and any strategy, and the
states stay equal. If ranks with equal states drew only their own rows, these would be equal.

Initialisers of ``torch.nn.init`` that draw or fill element by element work through these rules.
Initialisers that read the whole tensor use an operation that op_rules.py refuses.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.collectives import require_equal
from megafsdp.buffer.dtensor.busy_memory import wait_for_writer
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.torch_private import local_of

# Draws in place, element by element; torch tags none of them pointwise.
DRAWS_IN_PLACE = frozenset(
    {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
)
DRAWS = DRAWS_IN_PLACE | frozenset({"rand_like", "randn_like"})
_INITIAL_DTYPE = "_megafsdp_initial_dtype"


def draw_rows(
    tensor: DTensor,
    layout: UnevenLayout | None,
    draw: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw a whole tensor, and return this rank's rows of it, in the local shape.

    Local, but collective over ranks that have the same rows, if any: they must draw alike.
    Allocates the whole tensor.

    Args:
        tensor: The sharded or replicated tensor.
        layout: How it is cut; None for a replicated one.
        draw: Fills its argument, the whole tensor, and returns it, or returns another one.
        dtype: Dtype of the whole tensor: :func:`initial_dtype` for a draw into ``tensor``.
        generator: The generator that ``draw`` uses; None for the default ones.

    Raises:
        ValueError: The random states of ranks with the same rows differ.
    """
    _require_equal_states(tensor, generator)
    rows = local_of(tensor)
    shape = rows.shape if layout is None else layout.shape
    drawn = draw(torch.empty(shape, dtype=dtype, device=rows.device))
    return drawn if layout is None else layout.rows_of(drawn)


def write_rows(target: DTensor, rows: torch.Tensor) -> None:
    """Copy rows into a sharded or replicated tensor, and count the write; local."""
    wait_for_writer(local_of(target))
    local_of(target).copy_(rows)
    # Count it on the wrapper too, for callers below autograd's layer, which would count it.
    written = [t for t in (local_of(target), target) if not t.is_inference()]
    if written:
        torch.autograd.graph.increment_version(written)


def initial_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which an unsharded model would draw a tensor's values."""
    dtype: torch.dtype = getattr(tensor, _INITIAL_DTYPE, tensor.dtype)
    return dtype


def set_initial_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Set the dtype that :func:`initial_dtype` returns for a tensor."""
    setattr(tensor, _INITIAL_DTYPE, dtype)


def copy_initial_dtype(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the dtype of :func:`set_initial_dtype` from a tensor to an alias of it."""
    if hasattr(source, _INITIAL_DTYPE):
        setattr(target, _INITIAL_DTYPE, getattr(source, _INITIAL_DTYPE))


def random_state_digest(device: torch.device, generator: torch.Generator | None = None) -> str:
    """Return a digest of a generator, or of the default ones that a draw on a device may use."""
    states = [torch.get_rng_state() if generator is None else generator.get_state()]
    if device.type == "cuda" and generator is None:
        states.append(torch.cuda.get_rng_state(device))
    digest = hashlib.sha256()
    for state in states:
        digest.update(state.numpy().tobytes())
    return digest.hexdigest()


def _require_equal_states(tensor: DTensor, generator: torch.Generator | None) -> None:
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        # Sharded axes need no check: their ranks have no replicas that could come to differ.
        if placement.is_replicate() and mesh.size(axis) > 1:
            require_equal(
                random_state_digest(local_of(tensor).device, generator),
                what="random state",
                group=mesh.get_group(axis),
                where=f"a draw into a replicated tensor of shape {tuple(tensor.shape)}",
                hint="Call torch.manual_seed(), or manual_seed() of the generator, with the same "
                "seed on all ranks just before",
            )


def _drawing_as_one_process(name: str) -> Callable[..., torch.Tensor]:
    """Return a method that draws into a replicated parameter as into a plain one."""
    draw = getattr(torch.Tensor, name)

    @functools.wraps(draw)
    def method(self: DTensor, *args: object, **kwargs: Any) -> torch.Tensor:
        # torch refuses to write to a leaf that autograd watches.
        if self.requires_grad and torch.is_grad_enabled():
            refused: torch.Tensor = draw(self, *args, **kwargs)
            return refused
        generator, dtype = kwargs.get("generator"), initial_dtype(self)
        rows = draw_rows(self, None, lambda full: draw(full, *args, **kwargs), dtype, generator)
        write_rows(self, rows)
        return self

    return method


class DrawsAsOneProcess:
    """Draws into a replicated parameter as into a plain one.

    torch's draws into DTensors advance the random state differently, so methods replace them: an
    override of the dispatch would take each operation of each step off torch's fast path.
    """

    __slots__ = ()


for _name in DRAWS_IN_PLACE:
    setattr(DrawsAsOneProcess, _name, _drawing_as_one_process(_name))
