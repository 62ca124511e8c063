"""A user's program with all types: checkers read it, and tests/fsdp/test_typed_program.py runs it.

Lines that must not pass a checker have a ``type: ignore``, which mypy reports where it is idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megafsdp import (
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    clip_grad_norm_,
    fully_shard,
    fully_shard_model,
    register_fsdp_forward_method,
)


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the layers make of it."""
        added: torch.Tensor = self.down(self.up(x))
        return x + added

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the first layer makes of x."""
        wide: torch.Tensor = self.up(x)
        return wide


def train() -> list[float]:
    """Train a model of units for 2 steps; return the losses."""
    inner = Block()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    first: FSDPModule = fully_shard(inner, strategy="optim_grads", mp_policy=policy)
    rest: list[FSDPModule] = fully_shard([Block(), Block()], strategy=2, average="rank")
    model = fully_shard(nn.Sequential(inner, nn.Sequential(*rest)), strategy="optim_grads")
    configure(model, first, rest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        loss: torch.Tensor = model.train()(torch.ones(2, 4)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if is_last:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad(set_to_none=True)
    return losses


class Gather:
    """An all-gather of one's own, in the form of torch's."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather."""
        work: dist.Work | None
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        return work


def configure(model: FSDPModule, first: FSDPModule, rest: list[FSDPModule]) -> None:
    """Call every method of a unit."""
    model.set_is_last_backward(True)
    model.set_requires_all_reduce(True, recurse=False)
    model.set_reshard_after_forward(True, True)
    model.set_reshard_after_backward(True, recurse=True)
    model.set_modules_to_forward_prefetch([first])
    model.set_modules_to_backward_prefetch(rest)
    first.set_unshard_in_backward(True)
    first.set_gradient_divide_factor(2.0)
    first.set_reduce_scatter_divide_factor(2.0)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True, recurse=True)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_keep_unsharded_storage(False, recurse=True)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()
    end: GradientReductionHandle = model.finalize_backward(async_op=True)
    end.wait()
    model.set_manual_backward_finalization(False)
    model.reset_iter_state()
    model.load_state_dict(model.state_dict())
    handle: UnshardHandle = first.unshard(async_op=True)
    handle.wait()
    first.reshard()
    first.unshard()
    with model.no_sync():
        pass
    register_fsdp_forward_method(first, "widen")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    model.set_all_reduce_hook(print, stream=None)
    model.set_all_reduce_hook(None)
    model.set_custom_all_gather(Gather())
    model.set_custom_all_gather(None)
    model.set_custom_reduce_scatter(None)
    with contextlib.suppress(NotImplementedError):
        model.set_symm_mem_for_comm("NCCL")
    with contextlib.suppress(NotImplementedError):
        model.join_hook()
    with contextlib.suppress(NotImplementedError):
        model.set_post_optim_event(torch.Event("cpu"))


def shard_whole() -> FSDPModule:
    """Make all units by one call that spells its keywords."""
    model = fully_shard_model(
        nn.Sequential(Block(), Block()),
        [Block],
        mesh=None,
        strategy="optim_grads_params",
        outer_strategy="no_shard",
        reshard_after_forward=True,
        offload_policy=OffloadPolicy(),
        ignored_params=None,
        average="token",
        prefetch=2,
    )
    model.unshard()
    return model


def mistakes(model: FSDPModule) -> None:
    """Make the mistakes that a checker finds, each of which raises as well."""
    with contextlib.suppress(ValueError):
        fully_shard(Block(), strategy="zero3")  # type: ignore[call-overload]
    with contextlib.suppress(ValueError):
        fully_shard_model(model, outer_strategy="optimizer")  # type: ignore[arg-type]
    with contextlib.suppress(TypeError):
        fully_shard_model(model, stratgy="optim")  # type: ignore[call-arg]
    with contextlib.suppress(AttributeError):
        model.set_reshard_after(True)  # type: ignore[operator]
