"""Make the states of an optimizer's first step before that step.

``torch.distributed.checkpoint`` fills existing states: a new optimizer has none and would load
none. Optimizers of this package make their states themselves. torch's make them only in a step;
here another optimizer of the class steps zeros, so no weight and no gradient is touched.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import Optimizer

from megafsdp.errors import expected

# Classes whose states begin at zero, with the exceptions of each.
_BEGINNINGS: dict[type[Optimizer], dict[str, float]] = {
    torch.optim.Adadelta: {},
    torch.optim.Adam: {},
    torch.optim.AdamW: {},
    torch.optim.Adamax: {},
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.RAdam: {},
    torch.optim.RMSprop: {},
    torch.optim.SGD: {},
}


@runtime_checkable
class MakesStates(Protocol):
    """An optimizer that can make its states before a step."""

    def make_states(self) -> None:
        """Give each trainable parameter without states those of its first step; local."""


def make_states(optimizer: Optimizer) -> None:
    """Give an optimizer the missing states of its first step; local.

    Later steps give the same bits as without this. Existing states stay, e.g. if only some
    parameters had a gradient so far. Temporary memory is at most two tensors like one parameter.

    Raises:
        NotImplementedError: The initial states of its class are not known.
    """
    missing = [
        (group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and not optimizer.state.get(p)
    ]
    if not missing:
        return
    if isinstance(optimizer, MakesStates):
        optimizer.make_states()
        return
    # Any, as constructors of subclasses differ from that of the base class.
    kind: Any = type(optimizer)
    beginning = _BEGINNINGS.get(kind)
    # SGD recognizes its first step, which omits dampening, by missing states.
    if beginning is None or any(group.get("dampening") for group in optimizer.param_groups):
        raise NotImplementedError(
            expected(
                "an optimizer whose states are known before its first step",
                f"{kind.__module__}.{kind.__name__}",
                where="its states, which torch.distributed.checkpoint.load() is to fill",
                hint="Load into what get_optimizer_state_dict() of torch returns, or by "
                "megafsdp.checkpoint.load()",
            )
        )
    for group, parameter in missing:
        stand_in = torch.zeros_like(parameter, requires_grad=False)
        stand_in.grad = torch.zeros_like(stand_in)
        stepped = kind([{**group, "params": [stand_in]}])
        stepped.step()
        for name, value in stepped.state[stand_in].items():
            # Reset: after the step, counts are 1, and some moments are eps.
            optimizer.state[parameter][name] = value.fill_(beginning.get(name, 0.0))
