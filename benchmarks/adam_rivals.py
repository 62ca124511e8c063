"""Other people's Adam, for benchmarks/adam.py: torch's, DeepSpeed's CPUAdam and a loop in numba.

The last two take part where they are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megafsdp.optimizer.kernels.hyper import AdamHyper


class _FlatParameter:
    """A flat parameter under a torch optimizer, with the passes around it that a job needs."""

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        weight: torch.Tensor,
        grad: torch.Tensor,
        grad_scale: float | None,
        hyper: AdamHyper,
        **options: bool,
    ) -> None:
        """Copy the weights; moments begin at zero, after a step that changes no weight."""
        parameter = torch.nn.Parameter(weight.clone())
        self.weight = parameter.detach()
        self.narrow_grad, self.grad_scale = grad, grad_scale
        self.copy_out = None if grad_scale is None else torch.zeros_like(weight, dtype=grad.dtype)
        self.optimizer = optimizer_class(
            [parameter],
            lr=hyper.lr,
            betas=hyper.betas,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            **options,
        )
        parameter.grad = torch.zeros_like(weight)
        self.optimizer.step()
        state = self.optimizer.state[parameter]
        state["step"] *= 0
        self.weight.copy_(weight)
        self.exp_avg = state["exp_avg"]
        self.grad = parameter.grad
        self.grad.copy_(grad)

    def step(self) -> None:
        """Run one step."""
        if self.grad_scale is not None:
            self.grad.copy_(self.narrow_grad)
            self.grad.mul_(self.grad_scale)
        self.optimizer.step()
        if self.copy_out is not None:
            self.copy_out.copy_(self.weight)


class Torch(_FlatParameter):
    """torch.optim.AdamW, fused or foreach, on a CPU or a GPU."""

    def __init__(
        self,
        weight: torch.Tensor,
        grad: torch.Tensor,
        grad_scale: float | None,
        hyper: AdamHyper,
        *,
        is_fused: bool = True,
    ) -> None:
        """Make it."""
        options = {"fused": is_fused, "foreach": not is_fused}
        super().__init__(torch.optim.AdamW, weight, grad, grad_scale, hyper, **options)


class DeepSpeed(_FlatParameter):
    """DeepSpeed's CPUAdam."""

    def __init__(
        self, weight: torch.Tensor, grad: torch.Tensor, grad_scale: float | None, hyper: AdamHyper
    ) -> None:
        """Make it; compiles its kernel at first use."""
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        super().__init__(adam, weight, grad, grad_scale, hyper, adamw_mode=True)


class Numba:
    """A flat buffer under a parallel loop, which also casts where a job needs it."""

    def __init__(
        self, weight: torch.Tensor, grad: torch.Tensor, grad_scale: float | None, hyper: AdamHyper
    ) -> None:
        """Copy the weights; moments begin at zero."""
        self.weight, self.hyper = weight.clone(), hyper
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        self.grad_scale = grad_scale
        self.copy_out = None if grad_scale is None else torch.zeros_like(weight, dtype=grad.dtype)
        tensors = [self.weight, self.exp_avg, self.exp_avg_sq]
        self.arrays = [tensor.numpy() for tensor in tensors]
        if self.copy_out is None:
            self.arrays.append(grad.numpy())
        else:
            halves = [tensor.view(torch.int16).numpy() for tensor in (grad, self.copy_out)]
            self.arrays += [half.view(np.uint16) for half in halves]
        self.num_steps = 0

    def step(self) -> None:
        """Run one step."""
        numba = importlib.import_module("numba")
        numba.set_num_threads(torch.get_num_threads())
        self.num_steps += 1
        hyper = self.hyper
        beta1, beta2 = hyper.betas
        step_size = hyper.lr / (1 - beta1**self.num_steps)
        root = (1 - beta2**self.num_steps) ** 0.5
        decay, scale = 1 - hyper.lr * hyper.weight_decay, self.grad_scale or 1.0
        constants = (decay, 1 - beta1, beta2, 1 - beta2, root, hyper.eps, step_size, scale)
        loop = _loops()[self.grad_scale is not None]
        loop(*self.arrays, tuple(np.float32(value) for value in constants))


Rival = Torch | DeepSpeed | Numba

_COMPILED: list[Any] = []


def _loops() -> list[Any]:
    """Return the loops in fp32 and from bf16 to bf16, compiled once."""
    if not _COMPILED:
        numba = importlib.import_module("numba")
        _COMPILED.extend(
            numba.njit(parallel=True, fastmath=False)(loop) for loop in _make_loops(numba)
        )
    return _COMPILED


def _make_loops(numba: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the loops over numpy arrays, bf16 as uint16, not compiled yet."""
    prange = numba.prange

    def fp32(p: Any, m: Any, v: Any, g: Any, constants: Any) -> None:
        decay, lerp, beta2, square, root, eps, step_size = constants[:7]
        for i in prange(p.size):
            m[i] += lerp * (g[i] - m[i])
            v[i] = beta2 * v[i] + square * g[i] * g[i]
            p[i] = p[i] * decay - step_size * m[i] / (np.sqrt(v[i]) / root + eps)

    def bf16(p: Any, m: Any, v: Any, g: Any, out: Any, constants: Any) -> None:
        decay, lerp, beta2, square, root, eps, step_size, scale = constants
        for i in prange(p.size):
            grad = np.uint32(np.uint32(g[i]) << np.uint32(16)).view(np.float32) * scale
            m[i] += lerp * (grad - m[i])
            v[i] = beta2 * v[i] + square * grad * grad
            p[i] = p[i] * decay - step_size * m[i] / (np.sqrt(v[i]) / root + eps)
            bits = np.float32(p[i]).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            out[i] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return fp32, bf16


def installed() -> dict[str, type[Rival]]:
    """Return the rivals that can be imported here, by name."""
    found: dict[str, type[Rival]] = {}
    if importlib.util.find_spec("deepspeed") is not None:
        found["deepspeed"] = DeepSpeed
    if importlib.util.find_spec("numba") is not None:
        found["numba"] = Numba
    return found
