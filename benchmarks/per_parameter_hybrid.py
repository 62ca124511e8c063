"""A rival for comparisons: an offloaded Adam with one torch optimizer for each host parameter.

It follows what is known of Megatron's hybrid optimizer: the first parameters up to a fraction go to
the host, each has an optimizer of its own there over an fp32 clone, and a step copies gradients to
the host, steps those optimizers in turn and copies weights back, while later copies run. Everything
happens inside ``step()``, after clipping. Each optimizer is ``torch.optim.AdamW(fused=True)``, the
fastest of torch's forms on a CPU. Gradients cross the link in their own dtype, weights in fp32,
straight into the main weights on the device. FusedAdam steps the parameters that stay there.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megafsdp import FusedAdam
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.host_copies import CopyLink, Transfer
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.optimizer.grads.clip import clip_coefficient
from megafsdp.optimizer.grads.norms import total_norm


@dataclass
class _HostParameter:
    """One offloaded parameter and its memory."""

    sharded: torch.Tensor
    weight: nn.Parameter
    optimizer: torch.optim.AdamW
    host_grad: torch.Tensor

    @property
    def host_nbytes(self) -> int:
        assert self.weight.grad is not None, "it is made with the parameter"
        state = [value.nbytes for value in self.optimizer.state[self.weight].values()]
        tensors = (self.weight, self.weight.grad, self.host_grad)
        return sum(tensor.nbytes for tensor in tensors) + sum(state)


class PerParameterHybrid:
    """FusedAdam for some parameters, one torch AdamW each for those at the front.

    Args:
        parameters: Sharded parameters, in forward order, with fp32 main weights.
        offload_fraction: Parameters at the front are offloaded until they hold this part of all
            elements.
        link: Makes the copies; closed with the optimizer.
        max_grad_norm: The norm that clips.
        dtype: Dtype of the gradients that cross the link.
        **hyper: Hyperparameters of both optimizers.

    Attributes:
        host_numel: Elements on the host.
        host_s: Seconds that the host computed in the last step.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        *,
        offload_fraction: float,
        link: CopyLink,
        max_grad_norm: float,
        dtype: torch.dtype = torch.bfloat16,
        **hyper: Any,
    ) -> None:
        self._parameters, self._link = parameters, link
        weakref.finalize(self, link.close)
        self._max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        wanted = offload_fraction * sum(p.numel() for p in parameters)
        numel, kept = 0, []
        self._on_host: list[_HostParameter] = []
        for parameter in parameters:
            if numel < wanted:
                self._on_host.append(_to_host(parameter, dtype, hyper))
            else:
                kept.append(parameter)
            numel += parameter.numel()
        self.host_numel = sum(own.weight.numel() for own in self._on_host)
        self.host_s = 0.0
        self._rest = FusedAdam(kept, **hyper) if kept else None

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step all; when it returns all weights are on the device."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        self.grad_norm = total_norm(grads)
        factor = clip_coefficient(self.grad_norm, self._max_grad_norm)
        self._link.fence()
        transfers = [
            self._link.to_host([(own.host_grad, local_tensor(own.sharded.grad))])
            for own in self._on_host
        ]
        if self._rest is not None:
            # FusedAdam takes any divisor of gradients in the attribute that GradScaler sets.
            self._rest.grad_scale = 1 / factor.double()  # type: ignore[attr-defined]
            self._rest.step()
        uploads = self._step_host(transfers, factor.item())
        for upload in uploads:
            upload.order()
        for own in self._on_host:
            group = group_of(own.sharded)
            if group is not None:
                group.mark_stale()

    def _step_host(self, transfers: list[Transfer], factor: float) -> list[Transfer]:
        uploads = []
        self.host_s = 0.0
        for own, transfer in zip(self._on_host, transfers, strict=True):
            transfer.wait()
            begin_s = time.perf_counter()
            assert own.weight.grad is not None, "it is made with the parameter"
            own.weight.grad.copy_(own.host_grad)
            if factor != 1.0:
                own.weight.grad.mul_(factor)
            own.optimizer.step()
            self.host_s += time.perf_counter() - begin_s
            uploads.append(self._link.to_device([(local_tensor(own.sharded), own.weight)]))
        return uploads

    def main_weights(self) -> list[torch.Tensor]:
        """Return the fp32 weights of all parameters, from where they are stepped."""
        on_host = {id(own.sharded): own.weight.detach() for own in self._on_host}
        return [on_host.get(id(p), local_tensor(p.detach())) for p in self._parameters]

    def zero_grad(self) -> None:
        """Clear gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def synchronize(self) -> None:
        """Return at once: a step ends with its own work."""

    @property
    def host_nbytes(self) -> int:
        """Return the bytes on the host."""
        return sum(own.host_nbytes for own in self._on_host)

    @property
    def device_nbytes(self) -> int:
        """Return the bytes on the device besides parameters and gradients."""
        states = self._rest.state.values() if self._rest is not None else []
        tensors = [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(local_tensor(t).nbytes for t in tensors if t.ndim)


@torch.no_grad()
def _to_host(parameter: torch.Tensor, dtype: torch.dtype, hyper: dict[str, Any]) -> _HostParameter:
    local = local_tensor(parameter)
    is_pinned = local.device.type == "cuda"
    weight = nn.Parameter(local.detach().to("cpu", torch.float32, copy=True))
    weight.grad = torch.zeros_like(weight)
    if is_pinned:
        weight.data = weight.data.pin_memory()
    host_grad = torch.empty(local.shape, dtype=dtype, pin_memory=is_pinned)
    optimizer = torch.optim.AdamW([weight], fused=True, **hyper)
    return _HostParameter(parameter, weight, optimizer, host_grad)
