"""The FSDP2 state of a module that other code reads, provided for our units.

``torch.distributed.pipelining`` reduces gradients through this state after a step's last
microbatch, and torch's ``register_fsdp_forward_method`` gathers through it. The names are those
that torch 2.11 to 2.15 read; any other is refused by name. No other code of megafsdp uses it.

transformers looks for a mark on modules: its models then run equally often on all ranks, which
gathers need.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import nn

from megafsdp.buffer.dtensor.cures import HINT_OF_SPLIT_BACKWARD
from megafsdp.errors import expected
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below


@contextlib.contextmanager
def show_weights_to_split_backward(module: nn.Module) -> Iterator[None]:
    """Show full weights while a pipeline runs the backward of inputs or of weights; collective.

    The pipeline looks for each weight in the graph, and adds its gradient to what the module shows.

    Args:
        module: The module of the stage, with any units below it; without one nothing happens.
    """
    units = list(units_below([module]).values())
    contexts = [unit.require_context() for unit in units]
    # Autograd reads saved weights even for the gradients of weights alone.
    for unit, context in zip(units, contexts, strict=True):
        context.start_unshard(unit, in_backward=True)
    for unit in units:
        unit.finish_unshard()
        unit.show_unsharded(in_backward=True)
    yield
    # No output of a unit has seen the backward of weights.
    for context in dict.fromkeys(contexts):
        context.end_unseen_backward()


def refuse_lost_gradients(unit: FSDPUnit) -> None:
    """Raise RuntimeError if a split backward of a pipeline has left a root without any gradient.

    Where :func:`show_weights_to_split_backward` was not installed, replicas lost theirs.

    Args:
        unit: The root.
    """
    context = unit.require_context()
    groups = [group for group in context.groups if group.is_trainable]
    if context.iteration.is_unfinished and groups and not any(g.gradients.has_any for g in groups):
        raise RuntimeError(
            expected(
                "gradients of the weights of a pipeline's stage",
                "none",
                where=f"the end of a step, at unit '{unit.name}'",
                hint=HINT_OF_SPLIT_BACKWARD,
            )
        )


def mark_managed(modules: Iterable[nn.Module], is_managed: bool = True) -> None:
    """Set or clear torch's mark that forwards of modules, and of all below them, gather."""
    for module in modules:
        for each in module.modules():
            # dynamo also reads this second mark: modules keep their own parameters, not a flat one.
            each._is_fsdp_managed_module = is_managed  # type: ignore[assignment]
            each._fsdp_use_orig_params = is_managed  # type: ignore[assignment]


class _LacksState(NotImplementedError, AttributeError):
    """A state lacks an attribute; ``getattr()`` with a default and ``hasattr()`` may ask for it."""


class TorchState:
    """The state of one module of a unit, as torch's own code reads it.

    Args:
        module: A module given to ``fully_shard``.
    """

    # Slots keep torch from setting an attribute here, which would have no effect on a unit.
    __slots__ = ("_is_part", "_module")

    # Pipelining ends the backward of each state in this list, then calls the root's callback. Ours
    # ends the backward of all units, so the list is empty.
    all_states: tuple[TorchState, ...] = ()

    # share_comm_ctx() lets the stages of a rank use the streams of one of them. Collectives of our
    # units use those of the device and of its process groups, which all roots share.
    _fsdp_param_groups: tuple[object, ...] = ()

    def __init__(self, module: nn.Module) -> None:
        # The module owns its state: a strong reference would be a cycle.
        self._module = weakref.ref(module)
        # Whether a method was called within the module's forward. One flag is enough: torch asks
        # for a new state at each call.
        self._is_part = False

    def _unit(self) -> FSDPUnit:
        module = self._module()
        unit = None if module is None else unit_of(module)
        assert unit is not None, "fully_shard() made this module a unit"
        return unit

    @property
    def _state_ctx(self) -> TorchState:
        return self

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        """Return the policy, in which programs look up the dtype that a module computes in."""
        return self._unit().policy

    @property
    def _comm_ctx(self) -> object:
        """Return what share_comm_ctx() hands on, of which schedules require one for each stage."""
        return self._unit()

    @_comm_ctx.setter
    def _comm_ctx(self, value: object) -> None:
        """Take what share_comm_ctx() hands on: there is nothing to do."""

    def _root_post_backward_final_callback(self) -> None:
        unit = self._unit()
        refuse_lost_gradients(unit)
        unit.require_context().end_backward()

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        unit = self._unit()
        self._is_part = unit.is_in_forward_of(module)
        if self._is_part:
            return unit.prepare_inputs(args, kwargs)
        return unit._pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unit = self._unit()
        return unit.end_part(output) if self._is_part else unit._post_forward(module, args, output)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse attributes that torch's code reads from its own units and that ours lack."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise _LacksState(
            expected(
                "a unit of torch's fully_shard()",
                f"one of megafsdp, which has no '{name}'",
                where="code of torch that works on the inner state of its units, such as its "
                "FSDPMemTracker",
                hint="Leave out the call: units of megafsdp have another inner state",
            )
        )
