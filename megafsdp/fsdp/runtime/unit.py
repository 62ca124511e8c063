"""One unit: the phases of its parameters and the hooks that move them.

A unit is a module, or a list of modules that run one after another, with the parameters it owns.
Outside its own forward and backward it shows only sharded parameters. Its backward begins when the
gradient of one of its outputs is there, and ends when the gradients of all its inputs are: inputs
pass through an identity whose backward says so. A unit none of whose inputs needs a gradient ends
in the context's callback. Hooks on parameters are never counted: frozen, detached and unused
parameters would break the count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megafsdp.device.profiling import in_profiler_range
from megafsdp.device.streams import device_handle
from megafsdp.device.torch_private import compiled_call, is_backward_running, without_dynamo
from megafsdp.fsdp.params.host_grads import reducer_of
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.runtime.autograd_hooks import (
    BackwardHook,
    EndOfBackward,
    ForwardToken,
    PendingForwards,
    cast_floating,
    map_tensors,
    tensors_of,
)
from megafsdp.fsdp.runtime.guards import guard_parameters, guard_state_dicts
from megafsdp.fsdp.runtime.root import adopt_units_below, attach, attached_unit, attached_units
from megafsdp.fsdp.runtime.schedule import FSDPContext, ScheduledUnit


class Phase(Enum):
    """What the unit's parameters are doing; recomputation of activations stays in BACKWARD."""

    RESTING = "resting"  # Modules hold sharded parameters; storage is kept or released.
    FORWARD = "forward"  # Modules hold unsharded parameters.
    BACKWARD = "backward"  # Modules hold unsharded parameters, whose gradients arrive.


class FSDPUnit:
    """State and hooks of one unit.

    Args:
        modules: The modules, in the order in which they run.
        groups: Its parameter groups.
        policy: Dtypes of inputs and outputs.
        memory: Where its buffers lie.
        prefetch: How many units to gather ahead.
        reshard_after_forward: Whether storage is freed between forward and backward; a number
            frees all but a slice on each of so many neighbours; None lets the schedule decide.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[ParameterGroup],
        *,
        policy: MixedPrecisionPolicy,
        memory: UnitMemory,
        prefetch: int,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.groups = groups
        self.reducers = [reducer_of(group) for group in groups]
        self.policy = policy
        self.ledger, self.host_ledger = memory.ledger, memory.host_ledger
        self.prefetch = prefetch
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = self.is_unsharded_in_backward = True
        self.requires_gradient_sync = self.requires_all_reduce = True
        self.phase = Phase.RESTING
        self.context: FSDPContext | None = None
        self.outstanding = PendingForwards()
        self.is_kept = self.is_pinned = False
        self.post_optim_event: torch.cuda.Event | None = None
        self._prefetch: dict[bool, list[weakref.ref[ScheduledUnit]]] = {}
        self._modules = [weakref.ref(module) for module in modules]
        self.rename("")
        self._to_run: set[int] = set()
        self._begun: set[int] = set()
        self._token: ForwardToken | None = None
        self.forward_hooks: dict[int, list[RemovableHandle]] = {}
        for module in modules:
            attach(module, self)
            self._hook_forward(module)
            guard_state_dicts(module, self)
        for part in guard_parameters(groups, units=modules):
            guard_state_dicts(part, self)
        self.show_sharded()

    def _hook_forward(self, module: nn.Module) -> None:
        # A compiled module is called by run_as_forward, which keeps hooks out of its graph.
        if compiled_call(module) is None:
            self.forward_hooks[id(module)] = [
                module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._post_forward),
                module.register_forward_hook(self._leave_forward, always_call=True),
            ]

    # Storage and faces.

    @property
    def modules(self) -> list[nn.Module]:
        """Return the unit's modules."""
        return [m for m in (reference() for reference in self._modules) if m is not None]

    @property
    def is_unsharded(self) -> bool:
        """Tell whether a sharded group's full storage is allocated."""
        return any(g.axes.is_sharded and g.is_unsharded for g in self.groups)

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Issue the gathers of all groups; collective."""
        self.is_kept = False
        for group in self.groups:
            group.mark_stale_if_written()
        if any(group.compute_weight.needs_statistics for group in self.groups):
            self.require_context().refresh_with_statistics()
        for group in self.groups:
            group.start_unshard(in_backward=in_backward)

    def finish_unshard(self) -> None:
        """Wait for the gathers of all groups."""
        for group in self.groups:
            group.finish_unshard()

    def release(self) -> None:
        """Free the full storage, unless the unit is pinned or at work."""
        if not self.is_pinned and self.phase is Phase.RESTING:
            self.is_kept = False
            for group in self.groups:
                group.release()

    def show_unsharded(self) -> None:
        """Make the modules hold the unsharded parameters."""
        for group in self.groups:
            group.show_unsharded()

    def show_sharded(self) -> None:
        """Make the modules hold the sharded parameters, unless the unit is pinned."""
        if not self.is_pinned:
            for group in self.groups:
                group.show_sharded()

    @property
    def is_resting(self) -> bool:
        """Tell whether the modules hold sharded parameters, or full ones by the user's wish."""
        return self.phase is Phase.RESTING

    def mark_stale(self) -> None:
        """Note that main weights changed: the next unshard refreshes, once."""
        for group in self.groups:
            group.mark_stale()

    def rename(self, name: str) -> None:
        """Set the FQN within the root, for messages, counters and profilers; none for its class."""
        self.name = name or type(self.modules[0]).__name__.removeprefix("FSDP")
        for group in self.groups:
            group.rename(self.name)

    def prefetch_override(self, *, is_backward: bool) -> list[ScheduledUnit] | None:
        """Return the units the user chose to prefetch after this one; None follows the record."""
        chosen = self._prefetch.get(is_backward)
        return None if chosen is None else [u for u in (r() for r in chosen) if u is not None]

    def set_prefetch(self, units: Iterable[ScheduledUnit], *, is_backward: bool) -> None:
        """Choose the units to prefetch after this one."""
        self._prefetch[is_backward] = [weakref.ref(unit) for unit in units]

    def require_context(self) -> FSDPContext:
        """Return the context, adopting all units below this one's modules on first use."""
        if self.context is None:
            adopt_units_below(self)
        assert self.context is not None
        return self.context

    # Forward.

    @without_dynamo
    @in_profiler_range("pre_forward")
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = self.require_context()
        is_in_backward = _is_in_backward()
        # A module that began and never ended was cut short by an exception: this is a new pass.
        is_new_pass = not self._to_run or id(module) in self._to_run & self._begun
        if not is_in_backward and is_new_pass:
            context.begin_forward(self)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        if self.phase is Phase.BACKWARD:
            # Activations are recomputed; the storage may have been freed by reshard().
            self.start_unshard(in_backward=False)
            self.finish_unshard()
            return args, kwargs
        if not is_new_pass:
            self._begun.add(id(module))
            return args, kwargs
        self._to_run = {id(m) for m in self.modules}
        self._begun = {id(module)}
        if self.post_optim_event is not None:
            device_handle("cuda").wait_event(self.post_optim_event)
            self.post_optim_event = None
        self.phase = Phase.FORWARD
        context.unshard_for_forward(self)
        self.show_unsharded()
        self._token = None
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs((args, kwargs))
        return args, kwargs

    def _watch_inputs(self, inputs: Any) -> Any:
        """Pass inputs that need a gradient through the identity that ends the unit's backward."""
        watched = [t for t in tensors_of(inputs) if t.requires_grad]
        self._token = token = ForwardToken(watched, self.require_context().forward_pass)
        if not watched:
            return inputs
        if not _is_in_backward():
            # What recomputation builds may stay without a backward; who has one says so.
            self.outstanding.add(token)
        replaced = iter(EndOfBackward.apply(self, token, *watched))
        return map_tensors(inputs, lambda t: next(replaced) if t.requires_grad else t)

    @without_dynamo
    @in_profiler_range("post_forward")
    def _post_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        output = cast_floating(output, self.policy.output_dtype)
        if self.phase is Phase.BACKWARD:
            return output
        self._to_run.discard(id(module))
        if self._to_run:
            return output
        context = self.require_context()
        is_graph_built = torch.is_grad_enabled()
        self.phase = Phase.RESTING
        self.show_sharded()
        is_recomputing = _is_in_backward()
        self.is_kept = is_graph_built and (is_recomputing or context.is_kept_after_forward(self))
        if not self.is_kept:
            self._release_after_forward(is_graph_built=is_graph_built)
        if context.is_root(self) and not is_recomputing:
            context.end_forward(is_graph_built=is_graph_built)
        if is_graph_built:
            hook = BackwardHook(self, self._token)
            for tensor in tensors_of(output):
                hook.watch(tensor)
                context.watch_root(self, tensor)
        self._token = None
        return output

    def end_partial_forward(self) -> None:
        """End a forward in which some of the unit's modules did not run: it stays gathered."""
        if self.phase is Phase.FORWARD and self._to_run:
            self.phase, self.is_kept = Phase.RESTING, True
            self._to_run.clear()
            self.show_sharded()

    def _release_after_forward(self, *, is_graph_built: bool) -> None:
        num_ranks = self.reshard_after_forward
        is_sliced = is_graph_built and num_ranks is not None and not isinstance(num_ranks, bool)
        if is_sliced and not self.is_pinned:
            for group in self.groups:
                if group.axes.is_sharded:
                    extra_groups = self.require_context().extra_groups
                    neighbours = extra_groups.neighbours(group.axes, int(num_ranks or 1))
                    group.compute_weight.release_to_slices(neighbours)
        self.release()

    @without_dynamo
    def _leave_forward(self, module: nn.Module, *unused: object) -> None:
        """Return to rest if the forward was cut short; called after every forward."""
        # Recomputation is cut short on purpose, as soon as it has made what backward needs; a unit
        # whose backward has not begun by then may have none, and rests meanwhile.
        if self.phase is not Phase.FORWARD or id(module) not in self._to_run:
            return
        self.phase = Phase.RESTING
        self._to_run.clear()
        if self._token is not None:
            self.outstanding.discard(self._token)
            self._token = None
        self.show_sharded()
        self.release()
        context = self.require_context()
        if context.is_root(self) and not _is_in_backward():
            context.end_forward(is_graph_built=False)

    @without_dynamo
    def run_as_forward(
        self,
        module: nn.Module,
        method: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Call a bound method of one of the unit's modules as its forward is called."""
        args, kwargs = self._pre_forward(module, args, kwargs)
        try:
            return self._post_forward(module, args, method(*args, **kwargs))
        finally:
            self._leave_forward(module)

    # Backward.

    @without_dynamo
    @in_profiler_range("pre_backward")
    def begin_backward(self, token: ForwardToken) -> None:
        """Start the unit's backward: called when a gradient of one of its outputs is there."""
        context = self.require_context()
        context.begin_backward()
        context.passes_in_backward.add(token.forward_pass)
        self.outstanding.add(token)
        if self.phase is Phase.BACKWARD:
            return
        self.phase = Phase.BACKWARD
        if self.is_unsharded_in_backward:
            context.unshard_for_backward(self)
        self.show_unsharded()

    @without_dynamo
    def inputs_done(self, token: ForwardToken) -> None:
        """End the unit's backward if no other forward of it waits in the passes under way.

        Whether another pass is to follow is not asked: a graph that one rank alone keeps alive
        would make that rank wait.
        """
        self.outstanding.discard(token)
        if not self.outstanding.has_any_of(self.require_context().passes_in_backward):
            self.finish_backward()

    def finish_backward(self) -> None:
        """Reshard and hand the gradients to reduction or local accumulation; collective."""
        # Those too that came past the outputs: by an object that hides them, or by a hook.
        if self.phase is Phase.BACKWARD or any(g.has_unsharded_grads for g in self.groups):
            self._finish_backward()

    @in_profiler_range("post_backward")
    def _finish_backward(self) -> None:
        context = self.require_context()
        if self.phase is not Phase.FORWARD:  # Else it is a backward inside of its forward.
            self.phase = Phase.RESTING
            self.show_sharded()
            if self.reshard_after_backward:
                self.release()
        for reducer in self.reducers:
            if not reducer.group.is_trainable:
                continue
            is_deferred = reducer.group.defers_reduction and not context.is_last_microbatch
            if is_deferred or not self.requires_gradient_sync:
                reducer.accumulate()
            else:
                context.add_reduction(reducer, is_final=self.requires_all_reduce)

    def forget_forwards(self) -> None:
        """Stop waiting for the gradients of forwards so far: the backward is over."""
        self.outstanding.clear()

    @property
    def is_at_work(self) -> bool:
        """Tell whether a forward or backward has begun and not ended."""
        return self.phase is not Phase.RESTING or bool(self._to_run)

    def discard_unreduced_grads(self) -> None:
        """Drop gradients that are not in ``.grad`` yet."""
        for reducer in self.reducers:
            reducer.abort()

    def reset_after_error(self, *, keep_accumulated: bool) -> None:
        """Return to rest after an exception, without storage, with or without waiting sums."""
        self.phase = Phase.RESTING
        self._to_run.clear()
        self.outstanding.clear()
        if not keep_accumulated:
            self.discard_unreduced_grads()
        for group in self.groups:
            group.compute_weight.forget_slices()
        self.show_sharded()
        self.release()


def _is_in_backward() -> bool:
    """Tell whether the autograd engine is running on this thread, as during recomputation."""
    return is_backward_running()


def unit_of(module: nn.Module) -> FSDPUnit | None:
    """Return the unit that a module was given to; None for other modules."""
    unit = attached_unit(module)
    return unit if isinstance(unit, FSDPUnit) else None


def units_below(modules: Iterable[nn.Module]) -> dict[str, FSDPUnit]:
    """Return the units of the modules and their submodules by FQN, outer ones first."""
    found = attached_units(modules)
    return {name: unit for name, unit in found.items() if isinstance(unit, FSDPUnit)}
