"""The states with which an optimizer's first step begins, made before it.

``torch.distributed.checkpoint`` fills the states that there are: a new optimizer, which has none,
would load none. Optimizers of this package make theirs themselves. Those of torch make them in a
step, and here that is one of another optimizer over zeros: no weight and no gradient is touched.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.optimizer import Optimizer

from megafsdp.errors import expected

# Classes whose states begin at zero, with the states of each that do not.
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
        """Give each trainable parameter the states with which its first step begins; local."""


def make_states(optimizer: Optimizer) -> None:
    """Give an optimizer the states with which its first step begins; local.

    The steps after it have the bits that they have without. States that are there stay, as of the
    other parameters where some never had a gradient. Beside them there exist at most two tensors
    like one parameter.

    Raises:
        NotImplementedError: How its states begin is not known.
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
    # Constructors of subclasses differ from that of the base class.
    kind: Any = type(optimizer)
    beginning = _BEGINNINGS.get(kind)
    # The first step of SGD leaves dampening out, and knows itself by missing states.
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
            # Counts are at 1, and some moments at eps.
            optimizer.state[parameter][name] = value.fill_(beginning.get(name, 0.0))
