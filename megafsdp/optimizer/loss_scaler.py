"""Loss scaling for fp16: one factor on the loss, taken off the gradients again before the step.

All ranks take the same decisions: whether a step is finite is agreed by one small all-reduce. How
the scale moves is the business of :mod:`megafsdp.optimizer.scale_rule`; clipping is that of
:mod:`megafsdp.optimizer.grads.clip`.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.errors import expected
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.adam.plan import gradients_of
from megafsdp.optimizer.scale_rule import ScaleRule, ScaleState

_DYNAMIC = ScaleRule()


class LossScaler:
    """Scales losses, unscales gradients, and skips steps whose gradients are not finite.

    One step: ``scaler.scale(loss).backward()``, then ``scaler.unscale_(optimizer)`` if gradients
    are clipped, ``scaler.step(optimizer)``, ``scaler.update()``.

    Args:
        rule: How the scale starts and moves; ``ScaleRule.constant(scale)`` keeps it.
        group: Ranks that agree whether a step is finite; None means all.
    """

    def __init__(
        self, rule: ScaleRule = _DYNAMIC, *, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rule = rule
        self._group = group
        self._state = rule.start()
        self._unscaled: tuple[Optimizer, ...] = ()
        self._is_finite = True

    @property
    def current_scale(self) -> float:
        """Return the factor that the next loss gets."""
        return self._state.scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, which should be fp32 or wider, times the scale."""
        return loss * self._state.scale

    @torch.no_grad()
    def unscale_(self, *optimizers: Optimizer) -> bool:
        """Divide the optimizers' gradients by the scale; tell whether all ranks' are finite.

        Collective: one all-reduce of one element. Give all optimizers of the step at once. Reads
        the rows of gradients that the steps read, never gaps of flat buffers.

        Raises:
            RuntimeError: Gradients of this step are unscaled already.
            ValueError: A gradient is fp16, where unscaled values would underflow.
        """
        if self._unscaled:
            raise _out_of_turn(
                "one unscale_() a step", "a second one", "Give all optimizers in one call"
            )
        params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for local in (local_tensor(g) for o in optimizers for g in _gradients(o)):
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        if any(dtype == torch.float16 for _, dtype in by_kind):
            raise ValueError(
                expected(
                    "gradients in fp32 or bf16",
                    torch.float16,
                    where="LossScaler.unscale_()",
                    mend="Set main_grads_dtype=torch.float32 in the MixedPrecisionPolicy",
                )
            )
        # A rank without gradients takes part too.
        device = params[0].device if params else torch.device("cpu")
        is_bad = torch.zeros(1, dtype=torch.float32, device=device)
        for (kind, _), locals_ in by_kind.items():
            found = torch.zeros(1, dtype=torch.float32, device=kind)
            inverse = torch.tensor(1.0 / self._state.scale, dtype=torch.float32, device=kind)
            torch._amp_foreach_non_finite_check_and_unscale_(locals_, found, inverse)
            # The operator does not count what it writes.
            torch.autograd.graph.increment_version(locals_)
            is_bad += found.to(device)
        all_reduce(is_bad, op="max", group=self._group, label="found inf")
        self._unscaled, self._is_finite = optimizers, not is_bad.item()
        return self._is_finite

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer if all ranks' gradients are finite; tell whether it did.

        Unscales first unless :meth:`unscale_` did. A skipped step changes no weight and no state.

        Raises:
            RuntimeError: Gradients of other optimizers were unscaled, but not this one's.
        """
        if not self._unscaled:
            self.unscale_(optimizer)
        if all(optimizer is not unscaled for unscaled in self._unscaled):
            raise _out_of_turn(
                "an optimizer whose gradients are unscaled",
                type(optimizer).__name__,
                "Give all optimizers of the step to one unscale_() before the first step()",
            )
        if self._is_finite:
            optimizer.step()
        return self._is_finite

    def update(self, *, is_finite: bool | None = None) -> None:
        """Choose the next step's scale by whether the step was finite.

        Args:
            is_finite: What all ranks found by themselves; None means what :meth:`unscale_` found.

        Raises:
            RuntimeError: Nothing was given or unscaled since the last call.
        """
        if is_finite is None and not self._unscaled:
            raise _out_of_turn("a step since the last update()", "none", "Call step() before it")
        found = self._is_finite if is_finite is None else is_finite
        self._unscaled = ()
        self._state = self.rule.after(self._state, is_finite=found)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and what its next change depends on; the rule is not part of it."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the state of another scaler; a constant scale stays what it is."""
        if self.rule.is_dynamic:
            self._state = ScaleState(
                float(state["scale"]), int(state["num_finite"]), int(state["hysteresis_left"])
            )


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    is_decoupled = isinstance(optimizer, FusedAdam) and optimizer.use_decoupled_grad
    return gradients_of(optimizer.param_groups, "decoupled_grad" if is_decoupled else "grad")


def _out_of_turn(what: str, got: str, mend: str) -> RuntimeError:
    return RuntimeError(expected(what, got, where="LossScaler", mend=mend))
