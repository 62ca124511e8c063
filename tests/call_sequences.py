"""What tests of random sequences of calls share: calls that two nets are given, and their order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class TwinCalls:
    """Calls that two nets are given alike; a public method is a call.

    Attributes:
        nets: The reference, and the net that is tested.
    """

    nets: Sequence[nn.Module]

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def _check(self) -> None:
        """Assert that both nets show the same."""
        raise NotImplementedError

    def _a_name(self) -> str:
        return self._rng.choice([name for name, _ in self.nets[0].named_parameters()])

    def edit_a_weight(self) -> None:
        """Scale or shift a parameter by hand."""
        name, edit, value = self._a_name(), *self._rng.choice([("mul_", 0.9), ("add_", 0.01)])
        with torch.no_grad():
            for net in self.nets:
                getattr(net.get_parameter(name), edit)(value)

    def freeze_or_thaw(self) -> None:
        """Change whether a parameter is trained."""
        name = self._a_name()
        for net in self.nets:
            parameter = net.get_parameter(name)
            parameter.requires_grad_(not parameter.requires_grad)
            if not parameter.requires_grad:
                parameter.grad = None


def call_in_random_order(twins: TwinCalls, num_calls: int, *, often: Sequence[str]) -> None:
    """Make random calls, those of ``often`` more often, and check at last.

    Raises:
        AssertionError: With the calls before the one that failed; the cause says what failed.
    """
    names = [name for name in dir(type(twins)) if not name.startswith("_")]
    names = [*(name for name in names if callable(getattr(twins, name))), *often]
    called = []
    try:
        for _ in range(num_calls):
            called.append(twins._rng.choice(names))
            getattr(twins, called[-1])()
        twins._check()
    except Exception as error:
        raise AssertionError(f"after {', '.join(called)}") from error
