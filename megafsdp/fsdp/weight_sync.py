"""Keep compute weights in step with main weights: marks after optimizer steps and edits by hand.

After a step of any ``torch.optim.Optimizer`` a hook marks the groups of its parameters as stale,
with or without a gradient on this rank, so no optimizer needs an adapter. Before the step another
hook refuses parameters that ``fully_shard`` has replaced. Both are process-wide, because torch has
no other hook that every optimizer runs. The first ``fully_shard`` registers them. They cache the
groups of each optimizer, and return at once for an optimizer without sharded parameters.

Only marks are made here. The next unshard of a group refreshes its compute weight, or a save does
if it stores the histories that the scales are made from.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megafsdp.buffer.dtensor.cures import cure_of_optimizer
from megafsdp.buffer.dtensor.recut import recut_state
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.device.torch_private import end_graph, set_tracer, untraced_frame
from megafsdp.errors import expected
from megafsdp.fsdp.grouping import is_replaced
from megafsdp.fsdp.params.meta import mark_initialized
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.runtime.torch_fsdp import shard_of, write_full_values
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.torch_private import local_of, write_full_states_by
from megafsdp.quantize.tensor import QuantizedTensor

# torch's optimizers that mix gradients into moments of the weights' dtype; subclasses count too.
_OF_ONE_DTYPE = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)

_before_loads: list[Callable[[], object]] = []


@runtime_checkable
class SelfMarkingOptimizer(Protocol):
    """An optimizer whose step marks the groups that it changes.

    Its step may also write the cast of a main weight, by ``start_encoding`` of
    :class:`~megafsdp.fsdp.params.gathered_weight.GatheredWeight`; a second mark would drop that
    cast. Before it steps anything, it refuses what :func:`fully_shard_optimizer` refuses.
    """

    def mark_stepped(self, groups: Iterable[ParameterGroup]) -> None:
        """Mark the groups that the optimizer's step has changed but not marked yet."""


@runtime_checkable
class StepsQuantized(Protocol):
    """An optimizer that can step the main weights of quantized parameters and encode them."""

    @property
    def steps_quantized_parameters(self) -> bool:
        """Return whether this instance was built to do so."""


@dataclass(frozen=True, slots=True)
class _OptimizerRecord:
    """The parameters that an optimizer had at its last step.

    Attributes:
        ids: Their ids. References to parameters would keep an optimizer alive if their hooks call
            it. No new sharded parameter can reuse one of these ids: all of them exist by then.
        groups: The groups of the sharded ones, each once.
    """

    ids: tuple[int, ...]
    groups: tuple[weakref.ref[ParameterGroup], ...]


class _StepHooks:
    """The process-wide hooks on optimizer steps, and their record of each optimizer."""

    def __init__(self) -> None:
        self._records: weakref.WeakKeyDictionary[Optimizer, _OptimizerRecord]
        self._records = weakref.WeakKeyDictionary()
        # The tracer of torch.compile, to be restored after the steps under way.
        self._tracers: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()
        self._is_registered = False

    def watch(self) -> None:
        """Register the hooks once, and check all optimizers again at their next step."""
        # An optimizer that was seen before may have parameters that fully_shard() has replaced.
        self._records.clear()
        if not self._is_registered:
            self._is_registered = True
            register_optimizer_step_pre_hook(self._before_step)
            register_optimizer_step_post_hook(self._after_step)

    @untraced_frame
    def _before_step(self, optimizer: Optimizer, *unused: object) -> None:
        """Check the parameters; keep the step out of graphs if it has sharded ones."""
        end_graph(_why_graphs_end)
        tracer = set_tracer(None)
        if self._record_of(optimizer).groups:
            # Sharded parameters alias flat buffers, which torch.compile cannot express. After an
            # exception the outermost compiled call restores the tracer that it began with.
            self._tracers[optimizer] = tracer
        else:
            set_tracer(tracer)

    @untraced_frame
    def _after_step(self, optimizer: Optimizer, *unused: object) -> None:
        end_graph(_why_graphs_end)
        tracer = set_tracer(None)
        self._mark_stepped(optimizer)
        set_tracer(self._tracers.pop(optimizer, tracer))

    def _mark_stepped(self, optimizer: Optimizer) -> None:
        # Look the groups up again: a closure may have changed the optimizer's parameters.
        references = self._record_of(optimizer).groups
        if not references:
            return
        groups = [group for group in (reference() for reference in references) if group is not None]
        if isinstance(optimizer, SelfMarkingOptimizer):
            # The optimizer may have skipped the step, or written casts that a mark would drop.
            optimizer.mark_stepped(groups)
            return
        # Mark groups without a gradient on this rank too: a refresh may be a collective.
        for group in groups:
            group.mark_stale(is_step=True)

    def _record_of(self, optimizer: Optimizer) -> _OptimizerRecord:
        """Return the record of an optimizer, made anew if its parameters have changed.

        Raises:
            ValueError: A parameter is the original that ``fully_shard`` has replaced.
            NotImplementedError: The optimizer cannot step unevenly sharded parameters, or cannot
                take the dtype of their gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        ids = tuple(map(id, parameters))
        record = self._records.get(optimizer)
        if record is None or record.ids != ids:
            _refuse_quantized(optimizer, parameters)
            # Before the step: stepping replaced originals would change nothing that forward reads.
            if not isinstance(optimizer, SelfMarkingOptimizer):
                fully_shard_optimizer(optimizer)
                _refuse_optimizer(optimizer, parameters)
                _refuse_grads(optimizer)
                _recut_states(optimizer)
                if record is None and any(map(group_of, parameters)):
                    optimizer.register_load_state_dict_post_hook(_recut_states)
            # A dict keeps the order, which all ranks share.
            groups = dict.fromkeys(group for p in parameters if (group := group_of(p)) is not None)
            record = _OptimizerRecord(ids, tuple(map(weakref.ref, groups)))
            self._records[optimizer] = record
        return record


def _refuse_quantized(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise before a step that would write to codes, or round each update to codes."""
    if isinstance(optimizer, StepsQuantized) and optimizer.steps_quantized_parameters:
        return
    shard = next((found for p in parameters if (found := shard_of(p)) is not None), None)
    if shard is not None:
        raise RuntimeError(
            expected(
                "megafsdp.FusedAdam without capturable and store_param_remainders, which steps "
                "fp32 main weights of quantized parameters",
                f"{type(optimizer).__module__}.{type(optimizer).__name__}",
                where=f"its step, with the quantized parameter '{shard.fqn}'",
                hint="Build megafsdp.FusedAdam(model.parameters()), or do not quantize the model",
            )
        )


def _refuse_optimizer(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise before the first step of an optimizer that would fail in the middle of a step."""
    sharded = [p for p in parameters if isinstance(p, UnevenDTensor)]
    are_even = all(p.uneven_layout.is_even for p in sharded)
    cure = cure_of_optimizer(type(optimizer), are_even=are_even)
    if cure is not None and sharded:
        shape = tuple(sharded[0].shape)
        raise NotImplementedError(
            expected(
                "an optimizer that steps the rows of each rank by themselves",
                f"{type(optimizer).__module__}.{type(optimizer).__name__}",
                where=f"its first step, with a sharded parameter of shape {shape}",
                hint=cure,
            )
        )


def _refuse_grads(optimizer: Optimizer) -> None:
    """Raise before the first step of an optimizer that would fail over gradients of their dtype."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, _OF_ONE_DTYPE) and not group.get("fused"):
            continue
        for parameter in group["params"]:
            grad = parameter.grad
            if (
                group_of(parameter) is not None
                and grad is not None
                and grad.dtype != parameter.dtype
            ):
                raise NotImplementedError(
                    expected(
                        f"gradients in the dtype of main weights, {parameter.dtype}",
                        f"{grad.dtype}, the main_grads_dtype",
                        where=f"the first step of {type(optimizer).__module__}."
                        f"{type(optimizer).__name__}",
                        hint="Leave main_grads_dtype out; or use megafsdp.FusedAdam, which takes "
                        "other gradients for fp32 weights, or another optimizer without fused=True",
                    )
                )


def _recut_states(optimizer: Optimizer) -> None:
    """Cut states that were loaded as torch cuts them like the parameters; then collective."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group_of(parameter) is not None and parameter in optimizer.state:
                state = optimizer.state[parameter]
                state.update(recut_state(state, parameter))


def _why_graphs_end() -> str:
    return expected(
        "no optimizer step within one graph",
        "one after a call of fully_shard(), which watches steps",
        where="code under torch.compile",
        hint="Leave out fullgraph=True: a step over sharded parameters runs uncompiled",
    )


_hooks = _StepHooks()


def watch_optimizer_steps() -> None:
    """Check and note every optimizer step from here on; local, for the whole process.

    Called whenever parameters become sharded.
    """
    _hooks.watch()
    write_full_states_by(_write_from_full)


def _write_from_full(tensor: DTensor, full: torch.Tensor) -> bool:
    """Copy this rank's rows of a full tensor that torch's state-dict setters give.

    Local, except for quantized parameters, whose scales ranks may share.
    """
    if tensor.ndim == 0:
        wait_before_load()
        local_of(tensor).copy_(full)
        return True
    if not isinstance(tensor, UnevenDTensor):
        return write_full_values(tensor, full)
    wait_before_load()
    tensor.copy_from_full_(full)
    return True


def register_before_load(wait: Callable[[], object]) -> None:
    """Register a function to call before loads of main weights other than ``load_state_dict``.

    Args:
        wait: A function that returns once main weights may be written.
    """
    _before_loads.append(wait)


def wait_before_load() -> None:
    """Wait until nothing reads the main weights that are about to be loaded; local."""
    for wait in _before_loads:
        wait()


def mark_main_weights_changed(
    module: nn.Module, parameters: Iterable[torch.Tensor] | None = None
) -> None:
    """Mark main weights below a module as edited in place; called on all ranks alike.

    Optimizer steps, ``load_state_dict`` and checkpoint loads do so by themselves, and operations on
    sharded parameters are noticed. Call it after writes to ``.local`` or ``to_local()``, because
    ranks without rows make none. Of ``no_shard`` or 0-dim parameters that are on the host or have
    another compute dtype, call it also after writes to their entries in a state dict, or by a list
    of only these (torch 2.11: of their ``.data``): torch does not count these. Under delayed
    scaling, the history of a weight whose maximum has changed begins anew.

    Args:
        module: A module with units below it.
        parameters: The parameters that have values now, if they came on the meta device; None
            means all.
    """
    # Read once for each unit: it may be an iterator.
    given = None if parameters is None else list(parameters)
    for unit in units_below([module]).values():
        unit.mark_stale()
        mark_initialized(unit.groups, given)


def roll_histories(module: nn.Module) -> None:
    """Roll the histories of delayed scaling that the next forward would roll; collective.

    It takes one all-reduce of maxima if main weights have changed since the last roll. Nothing
    happens while a parameter has no values yet.

    Args:
        module: A module with units below it, at rest.
    """
    units = list(units_below([module]).values())
    groups = [group for unit in units for group in unit.groups]
    if not all(parameter.is_initialized for group in groups for parameter in group.parameters):
        return
    if any(group.has_history for group in groups):
        # The outermost unit comes first and adopts the others, which would else become roots.
        for context in dict.fromkeys(unit.require_context() for unit in units):
            context.roll_histories()


def fully_shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """Check that an optimizer has sharded parameters, and return it unchanged.

    Not needed: any ``torch.optim`` optimizer over ``model.parameters()`` works, and its first step
    makes the same check. It exists for people who come from Megatron-FSDP.

    Raises:
        ValueError: A parameter is the original that ``fully_shard`` has replaced.
        RuntimeError: A parameter is a gathered quantized one, which no step can write to.
    """
    for index, param_group in enumerate(optimizer.param_groups):
        for parameter in param_group["params"]:
            is_gathered = isinstance(parameter, QuantizedTensor) and shard_of(parameter) is None
            if is_gathered:
                raise RuntimeError(
                    expected(
                        f"the sharded parameter '{parameter.fqn}'",  # type: ignore[attr-defined]
                        "the quantized one that is made from it",
                        where=f"param group {index} of {type(optimizer).__name__}",
                        hint="Build the optimizer, FusedAdam or another one, over "
                        "model.parameters() outside of forward and of summon_full_params()",
                    )
                )
            if group_of(parameter) is None and is_replaced(parameter):
                raise ValueError(
                    expected(
                        "sharded parameters",
                        f"an original parameter of shape {tuple(parameter.shape)}",
                        where=f"param group {index} of {type(optimizer).__name__}",
                        hint="Build the optimizer after fully_shard(), and not within "
                        "summon_full_params()",
                    )
                )
    return optimizer


@contextlib.contextmanager
def optimizers_follow(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Give optimizers the sharded parameters that replace a module's while the context is open.

    For libraries that build optimizers before they shard. Param groups and their options stay.
    States that an optimizer made before its first step, as Adagrad does, are cut like the
    parameters; local.

    Args:
        module: The module that is given to ``fully_shard`` inside the context.
        optimizers: Optimizers of its parameters, or of some of them.

    Raises:
        ValueError: An optimizer has stepped, or has a parameter that is not the module's.
    """
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    listed = [parameter for group in groups for parameter in group["params"]]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    has_stepped = any(state.get("step", 1) != 0 for state in states)
    if has_stepped or any(id(parameter) not in names for parameter in listed):
        raise ValueError(
            expected(
                "new optimizers of the model's parameters",
                "states of steps" if has_stepped else "parameters of another model",
                where=f"the optimizers given with {type(module).__name__} to be sharded",
                hint="Build them from model.parameters(), before or after it is sharded",
            )
        )
    yield
    for group in groups:
        group["params"] = [module.get_parameter(names[id(p)]) for p in group["params"]]
    for optimizer in optimizers:
        for p in list(optimizer.state):
            sharded, state = module.get_parameter(names[id(p)]), optimizer.state.pop(p)
            optimizer.state[sharded] = {
                name: value if name == "step" else _cut_like(sharded, value)
                for name, value in state.items()
            }


@torch.no_grad()
def _cut_like(parameter: torch.Tensor, value: object) -> object:
    """Return an optimizer state in the form that it has for a sharded parameter."""
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor)):
        return value
    # Of a parameter that a model axis has cut, the state is of this rank's part.
    part, made = local_tensor(value), torch.empty_like(parameter, dtype=value.dtype)
    layout = made.uneven_layout if isinstance(made, UnevenDTensor) else None
    if part.shape != (local_tensor(made).shape if layout is None else layout.part.local_shape):
        return value
    local_tensor(made).copy_(part if layout is None else layout.rows_of_part(part))
    return made
