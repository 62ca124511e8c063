"""One unit: the phases of its parameters, and its hooks on modules.

A unit is a module, or a list of modules that run one after another, with the parameters it owns.
Outside its own forward and backward its modules have sharded parameters. This file has the hooks on
modules, which call the schedule in forward, and the methods that the schedule calls.
:mod:`megafsdp.fsdp.runtime.schedule`, which autograd's hooks call
(:mod:`megafsdp.fsdp.runtime.autograd_hooks`), decides when a unit is gathered and when its backward
begins and ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from megafsdp.device.memory import ByteLedger
from megafsdp.device.profiling import in_profiler_range
from megafsdp.device.streams import device_handle
from megafsdp.device.torch_private import (
    base_of,
    end_graph,
    is_backward_running,
    is_called_within,
    untraced_frame,
    untraced_hook,
    without_dynamo,
)
from megafsdp.errors import expected
from megafsdp.fsdp.params.freezing import follow_user, set_trainable, trainable_of
from megafsdp.fsdp.params.meta import device_of
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.runtime.autograd_hooks import (
    BackwardHook,
    EndOfBackward,
    all_arrived,
    anchored,
    cast_floating,
    map_tensors,
    on_device,
    tensors_of,
)
from megafsdp.fsdp.runtime.forward_passes import ForwardToken, ModuleRun, PendingForwards
from megafsdp.fsdp.runtime.guards import (
    guard_parameters,
    guard_state_dicts,
    note_ignored,
    refuse_replaced,
    refuse_transforms,
)
from megafsdp.fsdp.runtime.process_groups import num_neighbours
from megafsdp.fsdp.runtime.root import (
    adopt_units_below,
    attach,
    attached_unit,
    attached_units,
    refuse_changed_modules,
)
from megafsdp.fsdp.runtime.schedule import FSDPContext, UnitOptions
from megafsdp.fsdp.runtime.type_checks import keeps_types


class Phase(Enum):
    """What the unit's parameters are used for; recomputed activations belong to BACKWARD."""

    RESTING = "resting"  # Modules have sharded parameters; storage may be reserved for backward.
    FORWARD = "forward"  # Modules have unsharded parameters.
    BACKWARD = "backward"  # Modules have unsharded parameters, whose gradients arrive.


# A tuple, not a set: an Enum hashes by a slow Python function, and every hook sets a phase.
_TRANSITIONS = (
    (Phase.RESTING, Phase.FORWARD),
    (Phase.FORWARD, Phase.RESTING),
    (Phase.RESTING, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.RESTING),
    # A forward that never ended begins again: torch runs no hook after a KeyboardInterrupt.
    (Phase.FORWARD, Phase.FORWARD),
    # The backward of an earlier forward runs inside this forward, which then ends in RESTING.
    (Phase.FORWARD, Phase.BACKWARD),
)


class FSDPUnit:
    """State and hooks of one unit.

    Args:
        modules: The modules, in the order in which they run.
        groups: Its parameter groups.
        policy: Dtypes of inputs and outputs.
        memory: The memory of its buffers.
        options: The user's choices for its schedule.

    Attributes:
        options: The argument, until the user changes it.
        context: The state shared by the units under one root; None before the first forward.
        outstanding: Its forwards whose backward may still come.
        num_rests: How often sharded parameters were shown or storage was freed: a handle of an
            earlier ``unshard`` compares it.
        is_pinned: Whether it stays unsharded until ``summon_full_params`` ends.
        is_hidden: Whether no tensor was found in an output, so that no hook shows when backward
            begins. Its first gradient then shows that; it stays unsharded until that backward ends.
        post_optim_event: The event that the next forward's first gather waits for.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[ParameterGroup],
        *,
        policy: MixedPrecisionPolicy,
        memory: UnitMemory,
        options: UnitOptions,
    ) -> None:
        self.groups = groups
        self.policy = policy
        self.memory = memory
        self.options = options
        self._phase = Phase.RESTING
        self.context: FSDPContext | None = None
        self.outstanding = PendingForwards()
        self.num_rests = 0
        self.is_pinned = self.is_hidden = False
        self.post_optim_event: torch.Event | None = None
        # Modules own their unit: weak references let a deleted model free its buffers at once.
        self._modules = [weakref.ref(module) for module in modules]
        # Ids suffice: the parameters are made once, and the groups own them.
        self._own_ids = frozenset(id(p.unsharded) for group in groups for p in group.parameters)
        self._run: ModuleRun | None = None
        self.rename("")
        for module in modules:
            attach(module, self)
            # Run before all other hooks: users' hooks see unsharded parameters.
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            # This hook also runs after an exception, unlike _post_forward.
            module.register_forward_hook(self._leave_forward, always_call=True)
            guard_state_dicts(module, self)
        for part in guard_parameters(groups, units=modules):
            guard_state_dicts(part, self)
        for group in groups:
            group.places.put_sharded()
        note_ignored(modules)

    def rename(self, name: str) -> None:
        """Set the FQN within the root, for messages and counters; if empty, the class's name."""
        self.name = name or type(self.modules[0]).__name__.removeprefix("FSDP")
        for group in self.groups:
            group.rename(self.name)

    def require_context(self) -> FSDPContext:
        """Return the context, adopting all units below this one's modules on first use."""
        if self.context is None:
            adopt_units_below(self)
        assert self.context is not None
        return self.context

    @property
    def modules(self) -> list[nn.Module]:
        """Return the unit's modules."""
        return [m for m in (reference() for reference in self._modules) if m is not None]

    @property
    def ledger(self) -> ByteLedger:
        """Return the ledger of bytes on the device; once adopted, the root's counts them too."""
        return self.memory.ledger

    @property
    def host_ledger(self) -> ByteLedger:
        """Return the ledger of bytes on the host; once adopted, the root's counts them too."""
        return self.memory.host_ledger

    @property
    def phase(self) -> Phase:
        """Return what the unit's parameters are used for."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if (self._phase, phase) not in _TRANSITIONS:
            raise RuntimeError(
                expected(
                    f"a phase that may follow {self._phase.name}",
                    phase.name,
                    where=f"unit '{self.name}'",
                    hint="Call reset_iter_state() on the root after an exception",
                )
            )
        self._phase = phase

    @property
    def is_resting(self) -> bool:
        """Return whether the unit rests: parameters are sharded, or full as the user asked."""
        return self._phase is Phase.RESTING

    @property
    def is_in_backward(self) -> bool:
        """Return whether the unit's backward has begun and not ended."""
        return self._phase is Phase.BACKWARD

    @property
    def is_at_work(self) -> bool:
        """Return whether a forward or backward has begun and not ended."""
        is_running = self._run is not None and self._run.is_open
        return is_running or self._phase is not Phase.RESTING

    @property
    def is_list(self) -> bool:
        """Return whether the unit has several modules."""
        return len(self._modules) > 1

    @property
    def is_unsharded(self) -> bool:
        """Return whether a sharded group's full storage is allocated."""
        return any(g.axes.is_sharded and g.is_unsharded for g in self.groups)

    def mark_stale(self) -> None:
        """Note that main weights changed: the next unshard refreshes, once."""
        for group in self.groups:
            group.mark_stale()

    def needs_maxima(self, *, in_backward: bool = False) -> bool:
        """Return whether a stale weight needs the maxima of other ranks.

        Before a forward, this first marks weights stale that were written to. Backward computes
        with the weights of its forward, so it gathers anew only what a step has marked.
        """
        is_needed = False
        for group in self.groups:
            if not in_backward:
                # Loads write through tensors of a state dict, without a call into megafsdp.
                group.mark_stale_if_written()
            is_needed = is_needed or group.compute_weight.needs_maxima
        return is_needed

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Issue the gathers of all groups; collective. Ask :meth:`needs_maxima` first."""
        # Keep the order of construction, which is the same on all ranks.
        for group in self.groups:
            group.start_unshard(in_backward=in_backward)

    def finish_unshard(self) -> None:
        """Wait for the gathers of all groups."""
        for group in self.groups:
            group.finish_unshard()

    def release(self) -> None:
        """Free the full storage, unless the unit is pinned, hidden or at work."""
        if not (self.is_pinned or self.is_hidden) and self._phase is Phase.RESTING:
            self.num_rests += 1
            for group in self.groups:
                if group.places.have_unsharded:
                    # unshard() showed them, and no forward or backward of the unit came after it.
                    group.places.show_sharded()
                group.release()

    def show_unsharded(self, *, in_backward: bool = False) -> None:
        """Put the unsharded parameters into the modules; in backward, frozen as in forward."""
        if not in_backward:
            follow_user(self.groups)
        for group in self.groups:
            group.places.show_unsharded()

    def freeze_as_in(self, token: ForwardToken) -> None:
        """Set ``requires_grad`` of the unsharded parameters as it was in a forward."""
        if token.trainable is not None:
            set_trainable(self.groups, token.trainable)

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules, unless the unit is pinned."""
        self.num_rests += 1
        if not self.is_pinned:
            for group in self.groups:
                group.places.show_sharded()

    def why_graphs_end(self) -> str:
        """Return why ``torch.compile`` ends a graph where it calls this unit."""
        return expected(
            "no unit within one graph",
            f"a call of unit '{self.name}', whose gathers no graph contains",
            where="code under torch.compile",
            hint="With fullgraph=True, compile each unit by itself: block.compile(fullgraph=True)",
        )

    @untraced_frame
    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A compiled graph with the gather in it would use the parameters that it was traced with.
        end_graph(self.why_graphs_end)
        return self._pre_forward(module, args, kwargs)

    @untraced_hook
    @keeps_types(lambda args, kwargs: (args, kwargs))
    @in_profiler_range("pre_forward")
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        refuse_transforms(self.name)
        context, run = self.require_context(), self._run
        # The module's forward, or a registered method, may call the module itself.
        is_nested = run is not None and run.is_running(module) and is_called_within(module)
        if run is not None and is_nested and self._phase is Phase.FORWARD:
            run.num_nested += 1
            context.begin_part(self)
            return self.prepare_inputs(args, kwargs)
        goes_on = run is not None and run.goes_on_with(module, is_interrupted=self.is_resting)
        if not goes_on and not _is_in_backward():
            refuse_changed_modules(self, context)
            context.begin_forward(self)
        args, kwargs = self.prepare_inputs(args, kwargs)
        if self._phase is Phase.BACKWARD:
            # If a parameter was replaced since forward, recomputation would give another graph.
            refuse_replaced(self.groups)
            # Activations are recomputed, also if the user keeps backward from gathering the unit.
            context.start_unshard(self)
            self.finish_unshard()
            return all_arrived((args, kwargs))
        if run is None or not goes_on:
            self._run = run = ModuleRun(self.modules)
            # A backward within the outer call has ended its run: it goes on with this one.
            run.num_nested = int(is_nested)
        run.begin(module)
        if self._phase is Phase.FORWARD and goes_on:
            return all_arrived((args, kwargs))
        if self.post_optim_event is not None:
            # The gather reads main weights that the optimizer writes on the user's stream.
            device_handle("cuda").wait_event(self.post_optim_event)
            self.post_optim_event = None
        self.phase = Phase.FORWARD
        # Show the parameters only after the wait: a user's hook may read them at once.
        context.unshard_for_forward(self)
        self.show_unsharded()
        if torch.is_grad_enabled() and not goes_on:
            args, kwargs = self._watch_inputs(run, (args, kwargs))
        return args, kwargs

    def prepare_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast inputs to the dtype of the policy; move the root's to the units' device."""
        context = self.require_context()
        if context.is_root(self) or context.is_without_root(self):
            # Only here, as in torch: inner units may take lengths on the host.
            args, kwargs = on_device((args, kwargs), device_of(self.groups or context.groups))
        dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        args, kwargs = cast_floating((args, kwargs), dtype)
        return args, kwargs

    def _watch_inputs(self, run: ModuleRun, inputs: Any) -> Any:
        """Pass inputs that need a gradient through the identity that ends the unit's backward."""
        watched = [t for t in tensors_of(inputs) if t.requires_grad]
        context = self.require_context()
        is_in_order = not (self.is_list and context.is_without_root(self))
        run.token = token = ForwardToken(watched, context.forward_pass, is_in_order=is_in_order)
        token.trainable = trainable_of(self.groups)
        if not (watched or self.options.reduces_unused):
            # Without such an input the unit's backward ends in the schedule's callback.
            return inputs
        if not _is_in_backward():
            # Not for a recomputed graph, which may never have a backward. If it has one, the hook
            # on its output counts it.
            self.outstanding.add(token)
        replaced = iter(EndOfBackward.apply(self, token, *watched) if watched else ())
        return map_tensors(inputs, lambda t: next(replaced) if t.requires_grad else t)

    # No compiled graph contains calls of the next two hooks: it has ended before the forward.
    @untraced_hook
    @keeps_types(lambda args, output: output)
    @in_profiler_range("post_forward")
    def _post_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        context, run = self.require_context(), self._run
        if run is not None and run.num_nested:
            return self.end_part(output)
        output = self._finished(output)
        if self._phase is Phase.BACKWARD:
            return output
        is_partial = run is not None and not run.end(module)
        token = None if run is None else run.token
        if run is not None and is_partial:
            is_within_root = not (context.is_root(self) or context.is_without_root(self))
            if is_within_root or run.is_open or _is_in_backward():
                # The modules that run next find the parameters in place.
                self._watch_outputs(token, output)
                return output
        # The other modules of a list may run or not, so the unit rests. If the list is the root and
        # a graph is built, they continue this run; otherwise each call is a run of its own.
        is_reserved = is_partial and context.is_root(self) and torch.is_grad_enabled()
        if not is_reserved:
            self._run = None
        # A backward of an earlier forward may have run inside this one and ended the phase.
        if self._phase is Phase.FORWARD:
            self.phase = Phase.RESTING
        self.show_sharded()
        self._watch_outputs(token, output)
        self._end_run(is_reserved=is_reserved)
        return output

    def _finished(self, output: Any) -> Any:
        output = map_tensors(output, self._copied_if_own)
        return cast_floating(output, self.policy.output_dtype)

    def _copied_if_own(self, output: torch.Tensor) -> torch.Tensor:
        """Return a copy of an output that is a parameter of the unit, or a view of one.

        Later operations may read it after the unit's storage is released. Its gradient passes the
        copy, which can carry a hook: a hook on the parameter itself would outlive the graph.
        """
        base = base_of(output)
        return output.clone() if id(output if base is None else base) in self._own_ids else output

    def _end_run(self, *, is_reserved: bool) -> None:
        """Reshard after a forward, unless storage is reserved for later use."""
        context = self.require_context()
        is_graph_built = torch.is_grad_enabled()
        # The backward of a recomputed forward follows at once.
        is_recomputing = _is_in_backward()
        is_reserved = is_reserved or is_recomputing or context.is_reserved_for_backward(self)
        if not (is_graph_built and is_reserved):
            self._release_after_forward(is_graph_built=is_graph_built)
        if context.is_root(self) and not is_recomputing:
            context.end_forward(is_graph_built=is_graph_built)
            context.end_unseen_backward()

    def _watch_outputs(self, token: ForwardToken | None, output: Any) -> None:
        """Register hooks on a module's outputs, at which backward begins."""
        if torch.is_grad_enabled():
            hook, tensors = BackwardHook(self, token), anchored(self, output)
            for tensor in tensors:
                hook.watch(tensor)
            if not tensors and not self.is_hidden:
                self._hide()

    def _hide(self) -> None:
        """Stay gathered, and let the first gradient notify the schedule that a backward runs."""
        self.is_hidden = True
        parameters = [p.unsharded for group in self.groups for p in group.parameters]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if trainable:

            def begin(first_grad: torch.Tensor) -> None:
                handle.remove()
                self.require_context().begin_whole_backward()

            handle = register_multi_grad_hook(trainable, begin, mode="any")

    def _release_after_forward(self, *, is_graph_built: bool) -> None:
        num_ranks = self.options.reshard_after_forward
        is_sliced = is_graph_built and num_ranks is not None and not isinstance(num_ranks, bool)
        if not is_sliced or self.is_pinned or self.is_hidden:
            self.release()
            return
        for group in self.groups:
            size = num_neighbours(group.axes, int(num_ranks or 1))
            if 1 < size < group.axes.group.size():
                neighbours = self.require_context().extra_groups.neighbours(group.axes, size)
                group.compute_weight.release_to_slice(neighbours)
            # With one neighbour (this rank alone) the storage stays as it is.
            if size > 1:
                group.release()

    def end_partial_forward(self) -> None:
        """End a forward in which some of the unit's modules did not run; stay gathered."""
        run = self._run
        if self._phase is Phase.FORWARD and run is not None and not run.is_open:
            self.phase = Phase.RESTING
            self._run = None
            self.show_sharded()

    @untraced_hook
    def _leave_forward(self, module: nn.Module, *unused: object) -> None:
        """Return to rest if the forward was cut short; called after every forward."""
        # Recomputation stops early on purpose, once it has made what backward needs. A unit whose
        # backward has not begun by then may have none, and rests meanwhile.
        run = self._run
        if run is not None and run.num_nested:
            run.num_nested -= 1
            return
        if self._phase is not Phase.FORWARD or run is None or not run.has_to_end(module):
            return
        self._run = None
        self.phase = Phase.RESTING
        if run.token is not None:
            self.outstanding.discard(run.token)
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
        """Call a bound method of one of the unit's modules, gathered as for its forward."""
        if self.is_in_forward_of(module):
            args, kwargs = self.prepare_inputs(args, kwargs)
            return self.end_part(method(*args, **kwargs))
        args, kwargs = self._pre_forward(module, args, kwargs)
        try:
            return self._post_forward(module, args, method(*args, **kwargs))
        finally:
            self._leave_forward(module)

    def is_in_forward_of(self, module: nn.Module) -> bool:
        """Return whether the module's forward runs, so that a method called now is part of it."""
        return (
            self._phase is Phase.FORWARD and self._run is not None and self._run.is_running(module)
        )

    def end_part(self, output: Any) -> Any:
        """End a part of the forward, such as a method; the forward continues, unsharded."""
        output = self._finished(output)
        if torch.is_grad_enabled():
            # Watch outputs also if the forward was cut short by an interrupt before (no token).
            hook = BackwardHook(self, None if self._run is None else self._run.token)
            for tensor in tensors_of(output):
                hook.watch(tensor)
        return output

    def enter_backward(self) -> None:
        """Begin the unit's backward."""
        self.phase = Phase.BACKWARD

    def leave_backward(self) -> None:
        """Put the sharded parameters into the modules, and free storage that the options free."""
        if self._phase is Phase.FORWARD:
            # A backward ran inside the unit's forward, which still needs the full parameters.
            return
        if self._phase is Phase.BACKWARD:
            self.phase = Phase.RESTING
        self.show_sharded()
        if self.options.reshard_after_backward:
            self.release()

    def discard_unreduced_grads(self) -> None:
        """Drop gradients that are not in ``.grad`` yet."""
        for group in self.groups:
            group.gradients.abort()

    def reset_after_error(self, *, keep_accumulated: bool) -> None:
        """Return to rest after an exception, free storage, and keep or drop accumulated sums."""
        if self._phase is not Phase.RESTING:
            self.phase = Phase.RESTING
        self._run, self.is_hidden = None, False
        self.outstanding.clear()
        if not keep_accumulated:
            self.discard_unreduced_grads()
        # Ranks may have stopped at different units, so that only some have a slice: drop it on all.
        for group in self.groups:
            group.compute_weight.forget_slice()
        self.show_sharded()
        self.release()


def _is_in_backward() -> bool:
    """Return whether the autograd engine runs on this thread, as it does in recomputation."""
    return is_backward_running()


def unit_of(module: nn.Module) -> FSDPUnit | None:
    """Return the unit that a module was given to; None for other modules."""
    unit = attached_unit(module)
    return unit if isinstance(unit, FSDPUnit) else None


def units_below(modules: Iterable[nn.Module]) -> dict[str, FSDPUnit]:
    """Return the units of the modules and their submodules by FQN, outer ones first."""
    found = attached_units(modules)
    return {name: unit for name, unit in found.items() if isinstance(unit, FSDPUnit)}


def hidden_parameters(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded parameters that are hidden by unsharded ones, by the id of the latter.

    Modules show unsharded parameters after ``unshard()``, or after an interrupt in forward, while
    gradients belong to the sharded ones.
    """
    hidden = {
        id(p.unsharded): p.sharded
        for unit in units_below([module]).values()
        for group in unit.groups
        if group.places.have_unsharded
        for p in group.parameters
    }
    shown = map(id, module.parameters()) if hidden else ()
    return {key: hidden[key] for key in shown if key in hidden}
