"""Loss scaling for fp16: multiply the loss by a factor, and divide gradients by it before a step.

:class:`LossScaler` scales losses, unscales gradients and skips steps that are not finite; all ranks
agree on that by one small all-reduce. :class:`ScaleRule`, which touches no tensor, derives the
scale from which steps were finite. The rule is that of Megatron-LM's DynamicGradScaler.
With growth_window 3 and hysteresis 2 (``!`` is a step that is not finite; the scale is the one in
use at that step)::

    step    .  .  .  !  !  !  .  .  .  !
    scale   8  8  8  16 16 8  4  4  4  8

Gradients are clipped in :mod:`megafsdp.optimizer.grads.clip`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.torch_private import unscale_and_check, without_dynamo
from megafsdp.errors import expected
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.adam.plan import gradients_of

# A greater scale would make an fp32 loss infinite, so that no step could be finite any more.
_LARGEST_SCALE = 2.0**127


@dataclass(frozen=True, slots=True)
class ScaleState:
    """A scale, and the counts that decide its next change.

    Attributes:
        scale: Factor on the loss.
        num_finite: Finite steps in a row since the last growth or non-finite step.
        hysteresis_left: Non-finite steps until the scale backs off; at most 0 means each does.
    """

    scale: float
    num_finite: int
    hysteresis_left: int


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """The rule by which a loss scale starts and moves.

    Attributes:
        initial_scale: The first scale; no scale exceeds 2^127.
        min_scale: The lowest scale that backing off reaches.
        growth_factor: Factor after ``growth_window`` finite steps in a row.
        backoff_factor: Factor after a non-finite step, once hysteresis is used up.
        growth_window: Finite steps in a row before the scale grows.
        hysteresis: Non-finite steps since the last growth before the scale backs off.
        is_dynamic: False keeps the first scale forever.
    """

    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_window: int = 1000
    hysteresis: int = 2
    is_dynamic: bool = True

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ValueError: They contradict each other or are out of range.
        """
        # Written so that NaN, which compares false, is refused.
        has_scales = 0 < self.min_scale <= self.initial_scale <= _LARGEST_SCALE
        has_factors = self.growth_factor > 1 > self.backoff_factor > 0
        if not (has_scales and has_factors and min(self.growth_window, self.hysteresis) > 0):
            raise ValueError(
                expected(
                    "0 < min_scale <= initial_scale <= 2^127, growth_factor > 1 > backoff_factor > "
                    "0, growth_window > 0 and hysteresis > 0",
                    asdict(self),
                    where="ScaleRule",
                    hint="Leave out the values that you do not want to change",
                )
            )

    @classmethod
    def constant(cls, scale: float) -> ScaleRule:
        """Return the rule of a scale that never changes; overflowing steps are still skipped."""
        return cls(scale, min_scale=scale, is_dynamic=False)

    def start(self) -> ScaleState:
        """Return the state before the first step."""
        return ScaleState(self.initial_scale, 0, self.hysteresis)

    def after(self, state: ScaleState, *, is_finite: bool) -> ScaleState:
        """Return the state after one more step."""
        if not self.is_dynamic:
            return state
        if not is_finite:
            # Finite steps do not restore the hysteresis; only growth does.
            left = state.hysteresis_left - 1
            backed_off = max(state.scale * self.backoff_factor, self.min_scale)
            return ScaleState(state.scale if left > 0 else backed_off, 0, left)
        # >=: a state from a rule with a longer window may exceed this one's.
        if state.num_finite + 1 >= self.growth_window:
            grown = min(state.scale * self.growth_factor, _LARGEST_SCALE)
            return ScaleState(grown, 0, self.hysteresis)
        return ScaleState(state.scale, state.num_finite + 1, state.hysteresis_left)


_DYNAMIC = ScaleRule()


class LossScaler:
    """Scale losses, unscale gradients, and skip steps whose gradients are not finite.

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
        # A device tensor until its value is needed; reading it makes the host wait.
        self._found_inf: torch.Tensor | bool = False

    @property
    def current_scale(self) -> float:
        """Return the factor that the next loss gets."""
        return self._state.scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, which should be fp32 or wider, times the scale."""
        # A Python number, not a tensor: no copy to the device is queued.
        return loss * self._state.scale

    @without_dynamo
    def unscale_(self, *optimizers: Optimizer) -> bool:
        """Divide the optimizers' gradients by the scale; return whether all ranks' are finite.

        Collective: one all-reduce of one element. Give all optimizers of the step at once; a
        gradient that several of them step is divided once. Only rows of gradients are read, as in
        the step, never gaps of flat buffers.

        Raises:
            RuntimeError: Gradients of this step are unscaled already.
            ValueError: A gradient is fp16, where unscaled values would underflow.
        """
        self.queue_unscale(*optimizers)
        return self._is_finite

    @without_dynamo
    @torch.no_grad()
    def queue_unscale(self, *optimizers: Optimizer) -> None:
        """Divide as :meth:`unscale_` does, without waiting for the result.

        Raises:
            RuntimeError: As for :meth:`unscale_`.
            ValueError: As for :meth:`unscale_`.
        """
        if self._unscaled:
            raise _out_of_turn(
                "one unscale_() a step", "a second one", "Give all optimizers in one call"
            )
        params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        # torch's operator takes lists of tensors of one device and dtype.
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        grads = {id(grad): grad for o in optimizers for grad in _gradients(o)}
        for local in map(local_tensor, grads.values()):
            by_kind.setdefault((local.device, local.dtype), []).append(local)
        if any(dtype == torch.float16 for _, dtype in by_kind):
            raise ValueError(
                expected(
                    "gradients in fp32 or bf16",
                    torch.float16,
                    where="LossScaler.unscale_()",
                    hint="Set main_grads_dtype=torch.float32 in the MixedPrecisionPolicy",
                )
            )
        # A rank without gradients must enter the all-reduce below too.
        device = params[0].device if params else torch.device("cpu")
        is_bad = torch.zeros(1, dtype=torch.float32, device=device)
        for (kind, _), locals_ in by_kind.items():
            found = torch.zeros(1, dtype=torch.float32, device=kind)
            # Filled on the device: copying a number there would make the host wait.
            inverse = torch.full((1,), 1.0 / self._state.scale, dtype=torch.float32, device=kind)
            unscale_and_check(locals_, found, inverse)
            # The operator bumps no version counter, by which a kept norm is seen to be stale.
            torch.autograd.graph.increment_version(locals_)
            is_bad += found.to(device)
        # If one rank alone skipped the step, the others would hang in its collectives.
        all_reduce(is_bad, op="max", group=self._group, label="found inf")
        self._unscaled, self._found_inf = optimizers, is_bad

    @property
    def _is_finite(self) -> bool:
        """Return whether all ranks' gradients were finite; waits for the device once a step."""
        if isinstance(self._found_inf, torch.Tensor):
            self._found_inf = bool(self._found_inf.item())
        return not self._found_inf

    @without_dynamo
    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer if all ranks' gradients are finite; return whether it did.

        Unscales first unless :meth:`unscale_` did. A skipped step changes no weight and no state.

        Raises:
            RuntimeError: Gradients of other optimizers were unscaled, but not this one's.
        """
        if not self._unscaled:
            self.unscale_(optimizer)
        # Refused here, as a step on gradients that are still scaled would raise no error.
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
            is_finite: The outcome, equal on all ranks, if an optimizer checked by itself; None
                means the outcome of :meth:`unscale_`.

        Raises:
            RuntimeError: Nothing was given or unscaled since the last call.
        """
        if is_finite is None and not self._unscaled:
            raise _out_of_turn("a step since the last update()", "none", "Call step() before it")
        # Optimizers that check by themselves, in a graph, report the outcome through is_finite.
        found = self._is_finite if is_finite is None else is_finite
        self._unscaled = ()
        self._state = self.rule.after(self._state, is_finite=found)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the counts that decide its next change, without the rule."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the state of another scaler; a constant scale does not change.

        Raises:
            ValueError: It is no state of a LossScaler.
        """
        names = [field.name for field in fields(ScaleState)]
        if not state.keys() >= set(names):
            raise ValueError(
                expected(
                    f"the state of a LossScaler, with {names}",
                    list(state),
                    where="LossScaler.load_state_dict()",
                    hint="Go on from torch's GradScaler by "
                    "LossScaler(ScaleRule(initial_scale=state['scale']))",
                )
            )
        if self.rule.is_dynamic:
            scale = min(float(state["scale"]), _LARGEST_SCALE)
            self._state = ScaleState(scale, int(state["num_finite"]), int(state["hysteresis_left"]))


def _gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    is_decoupled = isinstance(optimizer, FusedAdam) and optimizer.use_decoupled_grad
    return gradients_of(optimizer.param_groups, "decoupled_grad" if is_decoupled else "grad")


def _out_of_turn(what: str, got: str, hint: str) -> RuntimeError:
    return RuntimeError(expected(what, got, where="LossScaler", hint=hint))
