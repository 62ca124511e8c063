"""What other code asks of a module of FSDP2, answered for our units.

``torch.distributed.pipelining`` reduces gradients through the state behind it after a step's last
microbatch, and torch's ``register_fsdp_forward_method`` gathers through it. The names are torch's,
as read by 2.11 to 2.14; what is not here is refused by name. No other code of megafsdp uses it.

transformers asks for a mark on modules: its models then run as often on each rank, as gathers need.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.runtime.unit import FSDPUnit, unit_of, units_below


def refuse_split_backward(module: nn.Module, schedule: str) -> None:
    """Raise if a pipeline that splits backward has a unit below the module of a stage.

    Raises:
        NotImplementedError: It has.
    """
    units = units_below([module])
    if units:
        raise _split_backward(f"{schedule}, and a unit of megafsdp at '{next(iter(units))}'")


def _split_backward(got: str) -> NotImplementedError:
    # Weights are looked for in the graph between forward and backward, where ours are sharded.
    return NotImplementedError(
        expected(
            "a pipeline whose stages run the backward of inputs and weights at once",
            got,
            where="the schedule of torch.distributed.pipelining",
            hint="Use Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS instead of "
            "ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble or ScheduleDualPipeV",
        )
    )


def mark_managed(modules: Iterable[nn.Module], is_managed: bool = True) -> None:
    """Mark modules and all below them as gathered around their forwards, as torch does, or not."""
    for module in modules:
        for each in module.modules():
            # What dynamo reads beside the first: parameters are the modules' own, in no flat one.
            each._is_fsdp_managed_module = is_managed  # type: ignore[assignment]
            each._fsdp_use_orig_params = is_managed  # type: ignore[assignment]


class TorchState:
    """The state of one module of a unit, as torch's own code reads it.

    Args:
        module: A module given to ``fully_shard``.
    """

    # An attribute that torch would set here has no effect on a unit, so none can be set.
    __slots__ = ("_is_part", "_module")

    # Pipelining ends the backward of each of these, and then calls the root's callback, which here
    # ends that of all units.
    all_states: tuple[TorchState, ...] = ()

    def __init__(self, module: nn.Module) -> None:
        # The module owns its state.
        self._module = weakref.ref(module)
        # Whether a method was called within the module's forward; torch asks for a state each time.
        self._is_part = False

    def _unit(self) -> FSDPUnit:
        module = self._module()
        unit = None if module is None else unit_of(module)
        assert unit is not None, "fully_shard() made this module a unit"
        return unit

    @property
    def _state_ctx(self) -> TorchState:
        return self

    def _root_post_backward_final_callback(self) -> None:
        context = self._unit().require_context()
        groups = [group for group in context.groups if group.is_trainable]
        # Also where a schedule was not known to split it: no gradient may be lost in silence.
        if (
            context.has_unfinished_backward
            and groups
            and not any(g.gradients.has_any for g in groups)
        ):
            raise _split_backward("a backward of a pipeline's stage that left no gradient at all")
        context.end_backward()

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
        """Refuse what torch's code reads of its own units and ours do not have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            expected(
                "a unit of torch's fully_shard()",
                f"one of megafsdp, which has no '{name}'",
                where="code of torch that works on the inner state of its units, such as "
                "share_comm_ctx()",
                hint="Leave out the call: units of megafsdp have no streams of their own to share",
            )
        )
