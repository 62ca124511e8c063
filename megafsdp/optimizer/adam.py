"""FusedAdam: Adam and AdamW in one pass over flat buffers.

Parameters of ``fully_shard`` lie in flat buffers, and so do their gradients and states; runs of
neighbours are stepped by one kernel call, which also folds in the unscaling and clipping of
gradients and, where a cast of the weight is made once a step, writes that. Plain tensors and other
DTensors are stepped one by one with the same arithmetic (:mod:`megafsdp.optimizer.reference`), so
how a parameter is stored does not change its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.uneven import local_tensor
from megafsdp.errors import expected
from megafsdp.fsdp.main_weights import MarksMainWeights
from megafsdp.fsdp.parameter_group import group_of
from megafsdp.optimizer.adam_checks import check_grad, check_hyperparameters
from megafsdp.optimizer.clip import clip_coefficient, total_norm
from megafsdp.optimizer.flat_states import FlatStates
from megafsdp.optimizer.hyper import AdamHyper
from megafsdp.optimizer.kernels import AdamBuffers, AdamSegment, adam_step
from megafsdp.optimizer.state import check_state_dtype
from megafsdp.optimizer.state_store import STATES, StateStore


@dataclass(slots=True)
class _Item:
    """One parameter to step: what it is, its gradient, and where it lies."""

    parameter: torch.Tensor
    grad: torch.Tensor
    step: int
    states: FlatStates | None
    index: int


class FusedAdam(MarksMainWeights, Optimizer):
    """Adam with decoupled (AdamW) or coupled weight decay, for sharded and plain parameters.

    A drop-in for ``torch.optim.AdamW``: parameter groups, schedulers, closures, hooks and state
    dicts work as there, ``torch.amp.GradScaler`` too. Parameters of ``fully_shard``, plain tensors
    and DTensors may be mixed. State names are torch's (``step``, ``exp_avg``, ``exp_avg_sq``), so
    checkpoints of one load into the other.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay; 0 by default, unlike ``torch.optim.AdamW``.
        adam_w_mode: Decoupled weight decay; False adds ``weight_decay * p`` to the gradient.
        bias_correction: Correct the moments for their start at zero.
        exp_avg_dtype: Dtype of the first moment: fp32, bf16, or fp16 or FP8 (e4m3) with a scale a
            block (:mod:`megafsdp.optimizer.state`).
        exp_avg_sq_dtype: Dtype of the second moment.
        use_decoupled_grad: Read ``p.decoupled_grad`` instead of ``p.grad``; it may have another
            dtype than the parameter.
        max_grad_norm: Clip by the norm of all gradients, which :attr:`grad_norm` shows after each
            step; the gradients themselves are left as they are. Makes ``step`` collective.
        ftz: Flush denormal numbers to zero inside the step: states of rows without gradients decay
            into denormals, which are many times slower.

    Raises:
        ValueError: A hyperparameter or dtype has no meaning.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        max_grad_norm: float | None = None,
        ftz: bool = True,
    ) -> None:
        check_hyperparameters(float(lr), betas, eps, weight_decay, max_grad_norm)
        check_state_dtype("exp_avg_dtype", exp_avg_dtype)
        check_state_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype)
        self.adam_w_mode = adam_w_mode
        self.use_decoupled_grad = use_decoupled_grad
        self.max_grad_norm = max_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self.ftz = ftz
        self._store = StateStore(dict(zip(STATES, (exp_avg_dtype, exp_avg_sq_dtype), strict=True)))
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient.

        Collective only with ``max_grad_norm``: one small all-reduce for each process group.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            What the closure returned; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = self._of_scaler("found_inf")
        if found_inf is not None and bool(found_inf.item()):
            return loss
        work = [(group, self._items(group)) for group in self.param_groups]
        scale = self._gradient_scale([item.grad for _, items in work for item in items])
        encodings = _Encodings()
        for hyperparameters, items in work:
            self._step_group(hyperparameters, items, scale, encodings)
        self._mark_main_weights(encodings)
        return loss

    def _items(self, group: dict[str, Any]) -> list[_Item]:
        """Collect what is stepped in one parameter group, its states made and counted on."""
        items = []
        for parameter in group["params"]:
            grad = self._grad_of(parameter)
            if grad is None:
                continue
            check_grad(parameter, grad)
            state = self.state[parameter]
            states, index = self._store.prepare(parameter, state)
            state["step"] += 1
            items.append(_Item(parameter, grad, int(state["step"]), states, index))
        return items

    def _of_scaler(self, name: str) -> torch.Tensor | None:
        """Return what torch.amp.GradScaler sets on the optimizer for the time of a step."""
        return getattr(self, name, None)

    def _grad_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self.use_decoupled_grad:
            return getattr(parameter, "decoupled_grad", None)
        return parameter.grad

    def _gradient_scale(self, grads: list[torch.Tensor]) -> float:
        """Return the factor on gradients: unscaling times clipping."""
        loss_scale = self._of_scaler("grad_scale")
        scale = 1.0 if loss_scale is None else 1.0 / float(loss_scale)
        if self.max_grad_norm is None:
            return scale
        self.grad_norm = total_norm(grads) * scale
        return scale * float(clip_coefficient(self.grad_norm, self.max_grad_norm))

    def _step_group(
        self, group: dict[str, Any], items: list[_Item], scale: float, encodings: _Encodings
    ) -> None:
        hyper = AdamHyper(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            adam_w_mode=self.adam_w_mode,
            bias_correction=group["bias_correction"],
        )
        flat: dict[tuple[FlatStates, DBuffer, int], list[int]] = {}
        for item in items:
            buffer = self._flat_grad(item)
            if buffer is None or item.states is None:
                self._step_one(item, hyper, scale)
            else:
                flat.setdefault((item.states, buffer, item.step), []).append(item.index)
        for (states, grads, step), indices in flat.items():
            runs = states.runs(indices)
            adam_step(
                AdamBuffers(
                    states.group.main_weight.flat,
                    grads.flat,
                    states.buffers["exp_avg"].flat,
                    states.buffers["exp_avg_sq"].flat,
                    copy_out=encodings.output(states),
                ),
                [AdamSegment(run.start, run.stop, hyper) for run in runs],
                step=step,
                grad_scale=scale,
                flush_denormals=self.ftz,
            )
            encodings.note(states, sum(run.numel for run in runs))

    def _flat_grad(self, item: _Item) -> DBuffer | None:
        """Return the flat buffer that a gradient lies in as its parameter does, if it does."""
        buffer = getattr(item.grad, "_megafsdp_buffer", None)
        states = item.states
        if buffer is None or states is None or len(states.buffers) < len(STATES):
            return None
        if len({kept.flat.dtype for kept in states.buffers.values()}) > 1:
            return None
        return buffer if states.covers(item.index, buffer, item.grad) else None

    def _step_one(self, item: _Item, hyper: AdamHyper, scale: float) -> None:
        """Step one tensor by itself, through fp32 copies of what the kernel does not take."""
        local = local_tensor(item.parameter)
        if not local.numel():
            return
        weight = local.contiguous().float().view(-1)
        grad = local_tensor(item.grad).reshape(-1)
        moments = self._store.decode(item.parameter, self.state[item.parameter])
        adam_step(
            AdamBuffers(
                weight,
                grad.float() if grad.dtype == torch.float64 else grad,
                moments["exp_avg"],
                moments["exp_avg_sq"],
            ),
            hyper,
            step=item.step,
            grad_scale=scale,
            flush_denormals=self.ftz,
        )
        if weight.data_ptr() != local.data_ptr():
            local.copy_(weight.view(local.shape))
        self._store.encode(item.parameter, self.state[item.parameter], moments)

    def _mark_main_weights(self, encodings: _Encodings) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                owner = group_of(parameter)
                if owner is not None:
                    owner.mark_stale()
        encodings.finish()

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state's values in fp32, as a tensor like the parameter; a copy; local.

        Args:
            parameter: One of the optimizer's parameters, which has been stepped.
            name: ``exp_avg`` or ``exp_avg_sq``.

        Raises:
            KeyError: The parameter has no such state.
        """
        return self._store.unscaled(parameter, name, self.state[parameter])

    def set_scaled_state(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Set a state from fp32 values, a tensor like the parameter; local.

        Raises:
            ValueError: The values are not fp32, or the state has no such name.
        """
        if values.dtype != torch.float32 or name not in STATES:
            raise ValueError(
                expected(
                    f"fp32 values of one of {STATES}",
                    f"{values.dtype} for '{name}'",
                    where="FusedAdam.set_scaled_state()",
                    mend="Cast the values, or set optimizer.state[parameter] directly",
                )
            )
        self.state[parameter][name] = values
        self._store.prepare(parameter, self.state[parameter])


class _Encodings:
    """Which compute weights a step has written along with the main weights."""

    def __init__(self) -> None:
        self._outputs: dict[FlatStates, torch.Tensor | None] = {}
        self._numels: dict[FlatStates, int] = {}

    def output(self, states: FlatStates) -> torch.Tensor | None:
        """Return where the cast of a group's main weight goes; None if it is made elsewhere."""
        if states not in self._outputs:
            self._outputs[states] = states.group.compute_weight.start_encoding()
        return self._outputs[states]

    def note(self, states: FlatStates, numel: int) -> None:
        """Count elements of parameters that were written."""
        self._numels[states] = self._numels.get(states, 0) + numel

    def finish(self) -> None:
        """Tell the groups, all of whose elements were written, that they need no cast."""
        for states, output in self._outputs.items():
            if output is not None and self._numels.get(states, 0) == states.numel:
                states.group.compute_weight.finish_encoding()
