"""The methods that a module gains when it becomes a unit.

:class:`FSDPModule` is mixed into the class of every module given to ``fully_shard``; the names and
meanings are those of ``torch.distributed.fsdp.FSDPModule``, so code written for it keeps working.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from megafsdp.device.torch_private import compiled_call, is_backward_running
from megafsdp.errors import expected
from megafsdp.fsdp.runtime.guards import refuse_changes, refuse_copy
from megafsdp.fsdp.runtime.schedule import references
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below
from megafsdp.mesh.torch_private import register_as_fully_sharded


class UnshardHandle:
    """A gather under way, returned by :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: FSDPUnit) -> None:
        self._unit: FSDPUnit | None = unit

    def wait(self) -> None:
        """Wait for the gather and show the unsharded parameters; later calls return at once."""
        if self._unit is not None:
            self._unit.finish_unshard()
            self._unit.show_unsharded()
            self._unit = None


class FSDPModule:
    """Mixin of modules given to ``fully_shard``."""

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Make a module of the class without this mixin.

        torch makes a slice of an ``nn.Sequential`` by the class of the whole, and is no unit.
        """
        plain = next(c for c in cls.__mro__[1:] if issubclass(c, nn.Module))
        return plain(*args, **kwargs)

    def _fsdp_unit(self) -> FSDPUnit:
        unit = unit_of(self) if isinstance(self, nn.Module) else None
        assert unit is not None, "fully_shard() made this module a unit"
        return unit

    def _fsdp_units(self, *, recurse: bool) -> list[FSDPUnit]:
        if not recurse or not isinstance(self, nn.Module):
            return [self._fsdp_unit()]
        return list(units_below([self]).values())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the module; a compiled one within the unit's forward, whose hooks stay outside."""
        # torch traces the hooks of a module that it compiles, and ours issue collectives.
        assert isinstance(self, nn.Module)
        compiled = compiled_call(self)
        if compiled is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._fsdp_unit().run_as_forward(self, compiled, args, kwargs)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the module in place, as ``nn.Module.compile``, without the unit's hooks."""
        assert isinstance(self, nn.Module)
        # Without them, or torch would trace them; __call__ does their work from here on.
        for handle in self._fsdp_unit().forward_hooks.pop(id(self), ()):
            handle.remove()
        super().compile(*args, **kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and show them; collective over its ranks.

        Args:
            async_op: Return a handle at once; the parameters are shown by its ``wait()``.
        """
        unit = self._fsdp_unit()
        # The user may gather before the first forward, which would have found the root.
        unit.require_context().start_unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show this unit's sharded parameters and free its unsharded storage; local."""
        unit = self._fsdp_unit()
        unit.show_sharded()
        unit.release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally, in full size, while the context is open; local."""
        # Each unit's own choice is restored at the end: contexts may be nested.
        units = self._fsdp_units(recurse=True)
        before = [unit.options.requires_gradient_sync for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.options = replace(unit.options, requires_gradient_sync=value)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether backward reduces gradients or accumulates them locally in full size."""
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, requires_gradient_sync=requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the step's last; else reductions that can wait do."""
        self._fsdp_unit().require_context().is_last_microbatch = is_last_backward

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether shards are summed over the outer axis, if there is one, from here on."""
        for unit in self._fsdp_units(recurse=recurse):
            # Without an outer axis the reduction over the inner one is all there is.
            has_outer_axis = any(group.axes.outer_group is not None for group in unit.groups)
            is_required = requires_all_reduce or not has_outer_axis
            unit.options = replace(unit.options, requires_all_reduce=is_required)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether storage is freed between forward and backward."""
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether storage is freed when a unit's backward ends, or with the whole one."""
        for unit in self._fsdp_units(recurse=recurse):
            unit.options = replace(unit.options, reshard_after_backward=reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's forward begins, instead of the recorded next."""
        # An empty list is a choice too: nothing is gathered ahead.
        units = references(module._fsdp_unit() for module in modules)
        self._fsdp_unit().options = replace(self._fsdp_unit().options, forward_prefetch=units)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's backward begins, instead of the recorded next."""
        units = references(module._fsdp_unit() for module in modules)
        self._fsdp_unit().options = replace(self._fsdp_unit().options, backward_prefetch=units)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether backward gathers this unit; False is right only if it needs no weights."""
        unit = self._fsdp_unit()
        unit.options = replace(unit.options, unshard_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if factor <= 0:
            raise ValueError(
                expected(
                    "a positive factor",
                    factor,
                    where="set_gradient_divide_factor()",
                    hint="Give the number that the sum over ranks is divided by",
                )
            )
        for group in self._fsdp_unit().groups:
            group.gradients.scale = 1.0 / factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept torch's switch; gradients are always summed and scaled by us, on any backend."""

    def set_reduce_scatter_unused_params(self, enable: bool) -> None:
        """Accept torch's switch; whole buffers are always reduced.

        Raises:
            ValueError: ``enable`` is False, which could mix gradients of different parameters.
        """
        if not enable:
            raise ValueError(
                expected(
                    "True",
                    enable,
                    where="set_reduce_scatter_unused_params()",
                    hint="Leave out the call: parameters that no rank used keep .grad None anyway",
                )
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Choose whether reductions have communicators of their own; collective, on all ranks.

        The default is True on CUDA, where one communicator runs one collective at a time, and False
        on CPU. The choice applies to all units under one root.
        """
        self._fsdp_unit().require_context().separate_reductions(enable)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose how many reductions may be under way; each needs one unit's full gradients.

        Raises:
            ValueError: The number is not positive.
        """
        if max_input_buffers < 1:
            raise ValueError(
                expected(
                    "1 or more buffers",
                    max_input_buffers,
                    where="set_reduce_scatter_max_input_buffers()",
                    hint="Use 1, which lets a reduction overlap with the next unit's backward",
                )
            )
        self._fsdp_unit().require_context().reductions.max_waiting = max_input_buffers

    def set_post_optim_event(self, event: torch.cuda.Event) -> None:
        """Make the next forward's first gather wait for an event of the optimizer's stream."""
        self._fsdp_unit().post_optim_event = event

    def reset_iter_state(self) -> None:
        """Drop what is not in ``.grad`` yet; called by all ranks.

        That is a forward or backward that an exception cut short, and the sums of microbatches
        whose last one does not come, which an optimizer's ``zero_grad`` does not reach.
        """
        self._fsdp_unit().require_context().reset_after_error()
        # The reset keeps sums of earlier microbatches where only a forward was cut short.
        self._discard_unreduced_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those of microbatches that wait for the last one included."""
        # Inside of a backward, as in a hook that steps, sums of other units are still to come.
        if not is_backward_running():
            self._discard_unreduced_grads()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def _discard_unreduced_grads(self) -> None:
        for unit in self._fsdp_units(recurse=True):
            # No backward runs on this thread: one that has begun was cut short by an exception.
            if unit.context is not None and unit.context.has_backward_begun:
                unit.context.reset_after_error()
            unit.discard_unreduced_grads()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Accept ``to_empty()``, and ``.to()`` and its kin where they change nothing."""
        # torch's own _apply() would replace the parameters even where nothing changes.
        assert isinstance(self, nn.Module)
        refuse_changes(self, fn, recurse)
        return self

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse to copy: a copy would not be tied to the flat buffers."""
        refuse_copy("copy.deepcopy()")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle: process groups cannot be pickled."""
        refuse_copy("pickle")


def mix_in(module: nn.Module) -> None:
    """Give a module the methods of :class:`FSDPModule` by changing its class."""
    register_as_fully_sharded(module)
    cls = type(module)
    # A class for each module: register_fsdp_forward_method() sets methods on it.
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__doc__": cls.__doc__})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit's parameters around calls of a method other than ``forward``.

    Args:
        module: A module given to ``fully_shard``; any other is left as it is.
        method_name: Name of a method, for example ``"generate_logits"``.

    Raises:
        ValueError: The module has no such method.
    """
    if unit_of(module) is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            expected(
                f"a method of {type(module).__name__}",
                repr(method_name),
                where="register_fsdp_forward_method()",
                hint="Give the name of a method of the module itself",
            )
        )
    # Of the class, unbound: a bound one would be a cycle through the module.
    method = getattr(type(module), method_name)

    def run(self: nn.Module, *args: object, **kwargs: object) -> object:
        unit = unit_of(self)
        assert unit is not None, "the class was made by fully_shard()"
        return unit.run_as_forward(self, partial(method, self), args, kwargs)

    # The class was made by mix_in() for this module alone, so the method is set on no other.
    setattr(type(module), method_name, run)
