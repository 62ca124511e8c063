"""Any element-wise torch optimizer, instead of Adam, for the part on the host.

It steps one plain tensor per parameter, this rank's part of the main weight, and keeps its own
states, which are shown as tensors like the parameter. It is slower than the kernel: several passes
over the memory, and a few calls per parameter. It never runs ahead of ``step()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megafsdp.buffer.dtensor.cures import cure_of_optimizer
from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.errors import expected
from megafsdp.fsdp.params.main_gradient import FlatGradient
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.optimizer.adam.checks import check_grad
from megafsdp.optimizer.adam.plan import FoundGrads, GroupPlan
from megafsdp.optimizer.kernels.adam_kernel import AdamSegment
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.offload.bucket import GradientCopy
from megafsdp.optimizer.offload.bucket_step import BucketStep, SegmentRun
from megafsdp.optimizer.states.store import StateStore

# Hyperparameters that are copied from the parameter groups that users see.
_FOLLOWED = ("lr", "betas", "eps", "weight_decay")


class HostOptimizer:
    """A torch optimizer over this rank's parts of offloaded parameters.

    Args:
        kind: Its class; the update of an element must depend only on that element.
        options: Its keywords. ``lr`` always follows the parameter groups; ``betas``, ``eps`` and
            ``weight_decay`` do so if the class has them and they are not among the keywords.
        parameters: The offloaded parameters of each parameter group.

    Raises:
        ValueError: The class refuses the options.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        options: Mapping[str, Any],
        parameters: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self._options = dict(options)
        # Parameters whose states were shown: if their state is empty now, the user dropped it.
        self._shown: set[int] = set()
        self.plain: dict[int, torch.nn.Parameter] = {
            # .data has its own version counter: a write by the worker must not look like a load.
            id(p): torch.nn.Parameter(local_tensor(p).data.view(-1))
            for own in parameters
            for p in own
        }
        groups = [{"params": [self.plain[id(p)] for p in own]} for own in parameters]
        self.optimizer = kind(groups, **options)
        # Options that are given here are fixed; others follow the groups, which schedulers change.
        self._followed = [name for name in _FOLLOWED if name == "lr" or name not in options]

    def steps(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is stepped here."""
        return id(parameter) in self.plain

    def hyperparameters(self, param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the values that a step copies from the users' groups, and adopt their members."""
        groups = self.optimizer.param_groups
        # Between steps, users may move parameters between groups, and add and drop groups.
        groups += [dict(self.optimizer.defaults) for _ in param_groups[len(groups) :]]
        del groups[len(param_groups) :]
        for group, own in zip(param_groups, groups, strict=True):
            own["params"] = [self.plain[id(p)] for p in group["params"] if self.steps(p)]
        return [
            {
                name: _unchanging(group[name])
                for name in self._followed
                if name in own and name in group
            }
            for group, own in zip(param_groups, groups, strict=True)
        ]

    def shown_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states; those of its shape as tensors like it; aliases."""
        plain = self.plain[id(parameter)]
        local = local_tensor(parameter)
        self._shown.add(id(parameter))
        return {
            name: wrap_like(parameter, value.view(local.shape))
            if isinstance(value, torch.Tensor) and value.shape == plain.shape
            else value
            for name, value in self.optimizer.state.get(plain, {}).items()
        }

    def begin_again(self, parameter: torch.Tensor) -> None:
        """Drop a parameter's states if they were shown, as the user has dropped the shown ones."""
        plain = self.plain[id(parameter)]
        if id(parameter) not in self._shown or not self.optimizer.state.get(plain):
            return
        self._shown.discard(id(parameter))
        del self.optimizer.state[plain]
        # Some optimizers have states from the start.
        fresh = type(self.optimizer)([plain], **self._options)
        if plain in fresh.state:
            self.optimizer.state[plain] = fresh.state[plain]

    def take_over(self, parameter: torch.Tensor, given: Mapping[str, Any]) -> None:
        """Replace a parameter's states by loaded ones, in the memory of existing states."""
        plain = self.plain[id(parameter)]
        before = self.optimizer.state.get(plain, {})
        taken = {}
        for name, value in given.items():
            taken[name] = value
            if isinstance(value, torch.Tensor):
                own = local_tensor(value)
                # A plain scalar is a count; the state of a scalar parameter is a DTensor like it.
                own = own.reshape(-1) if own.ndim or isinstance(value, DTensor) else own
                kept = before.get(name)
                is_alike = isinstance(kept, torch.Tensor) and kept.shape == own.shape
                # In the existing memory, if it fits: states shown before alias it.
                taken[name] = kept.copy_(own) if is_alike else own.clone()
        self.optimizer.state[plain] = taken


class HostPlan(GroupPlan):
    """The plan of an optimizer group of which a :class:`HostOptimizer` steps some parameters.

    Args:
        parameters: The group's list of parameters.
        store: Where the states of the other parameters are.
        host: The optimizer that steps some of them.
    """

    def __init__(
        self, parameters: list[torch.Tensor], store: StateStore, host: HostOptimizer
    ) -> None:
        super().__init__([p for p in parameters if not host.steps(p)], store)
        self._host = host
        self._all = list(parameters)
        self.on_host = [p for p in parameters if host.steps(p)]

    def is_of(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether the plan was made for these parameters."""
        return len(self._all) == len(parameters) and all(
            a is b for a, b in zip(self._all, parameters, strict=True)
        )

    def owners(self) -> list[ParameterGroup]:  # type: ignore[override]
        """Return the parameter groups that own the parameters."""
        found = {id(owner): owner for owner in super().owners()}
        found |= {id(o): o for o in map(group_of, self.on_host) if o is not None}
        return list(found.values())

    def find(
        self, states_by_parameter: dict[torch.Tensor, dict[str, Any]], *, attribute: str
    ) -> FoundGrads:
        """Collect gradients; those of the host's parameters are only checked."""
        found = super().find(states_by_parameter, attribute=attribute)
        for parameter in self.on_host:
            grad = getattr(parameter, attribute, None)
            if grad is not None:
                check_grad(parameter, grad)
                # The user has dropped the states, or this is the first step.
                if not states_by_parameter.get(parameter):
                    self._host.begin_again(parameter)
        return found


@dataclass(eq=False)
class TorchBucketStep(BucketStep):
    """The step of a :class:`HostOptimizer` on one bucket.

    Attributes:
        host: The optimizer.
        hyperparameters: Values for its parameter groups, set before the step.
    """

    host: HostOptimizer = field(kw_only=True)
    hyperparameters: list[dict[str, Any]] = field(kw_only=True)
    _stepped: list[torch.nn.Parameter] = field(init=False, default_factory=list)

    def add_parameter(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a parameter to step and its gradient."""
        states = self.bucket.states
        index = states.indices[id(parameter)]
        run = states.range_of(index)
        segment = AdamSegment(run.start, run.stop, AdamHyper())
        buffer = grad.buffer if isinstance(grad, FlatGradient) else None
        # The flat buffer if it fits: the gradients of all parameters then take one copy.
        is_like = buffer and grad.index == index and buffer.layout is states.layout
        grads = buffer.flat if buffer and is_like else local_tensor(grad).reshape(-1)
        self.add(grads, SegmentRun((segment,), step=1, numel=run.numel))
        self._stepped.append(self.host.plain[id(parameter)])

    def _issue_copy(self) -> GradientCopy:
        # Flat buffers and single gradients are mixed if a user has made some gradients.
        numel = self.bucket.grad.numel()
        if all(grads.numel() == numel for grads in self._grads):
            return super()._issue_copy()
        pieces = []
        for grads, run in zip(self._grads, self.segment_runs, strict=True):
            (segment,) = run.segments
            is_flat = grads.numel() == numel
            piece = grads[segment.start : segment.stop] if is_flat else grads
            pieces.append((segment.start, piece))
        return self.bucket.copy_pieces(pieces)

    def _take_buffers(self) -> list[torch.Tensor]:
        self._result = self.bucket.group.main_weight.flat
        return [self._result]

    def _update(self, scale: float) -> None:
        optimizer = self.host.optimizer
        for group, values in zip(optimizer.param_groups, self.hyperparameters, strict=True):
            group.update(values)
        ranges = [(s.start, s.stop) for run in self.segment_runs for s in run.segments]
        for plain, (start, stop) in zip(self._stepped, ranges, strict=True):
            grad = self.bucket.grad[start:stop].to(plain.dtype)
            # Do not multiply by 1: it costs a pass over the memory.
            plain.grad = grad if scale == 1.0 else grad * scale
        # Always drop the gradients: they are views of the bucket's, which the next copy overwrites.
        try:
            optimizer.step()
        finally:
            for plain in self._stepped:
                plain.grad = None
        if self.bucket.copy_out is not None:
            for start, stop in ranges:
                self.bucket.copy_out[start:stop].copy_(self._result[start:stop])


def _unchanging(value: Any) -> Any:
    """Return a copy of a value or tuple of values: schedulers fill tensors in place."""
    if isinstance(value, tuple | list):
        return type(value)(_unchanging(item) for item in value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def check_host_optimizer(kind: object, options: object) -> None:
    """Check the optimizer for the host's part.

    Raises:
        TypeError: ``kind`` is not an optimizer class; or options are given without a class.
        NotImplementedError: Its update of an element depends on others.
    """
    is_class = isinstance(kind, type) and issubclass(kind, Optimizer)
    if (kind is not None and not is_class) or (kind is None and options):
        raise TypeError(
            expected(
                "a class of torch optimizers with its options, or neither",
                f"{kind!r} with {options!r}",
                where="cpu_optimizer_cls and cpu_optimizer_kwargs of HybridDeviceOptimizer",
                hint="Give the class itself, such as torch.optim.SGD, and its keywords beside it",
            )
        )
    # Rprop is refused for DTensors, but works here, on plain tensors.
    if not isinstance(kind, type) or issubclass(kind, torch.optim.Rprop):
        return
    cure = cure_of_optimizer(kind)
    if cure is not None:
        raise NotImplementedError(
            expected(
                "an optimizer that steps each element by itself",
                f"{kind.__module__}.{kind.__name__}",
                where="cpu_optimizer_cls of HybridDeviceOptimizer",
                hint=cure,
            )
        )
