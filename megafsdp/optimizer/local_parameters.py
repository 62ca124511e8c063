"""One plain tensor for each flat buffer of main weights, for element-wise optimizers.

A torch optimizer steps a model's thousand parameters as a thousand DTensors. Over
:func:`local_parameters` it steps a few long plain tensors, which alias the same memory. That is
correct for an optimizer whose update of an element depends only on that element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megafsdp.device.torch_private import as_subclass_with_grad
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup, tie_to_group
from megafsdp.fsdp.runtime.unit import units_below


class LocalParameter(nn.Parameter):
    """This rank's part of one parameter group's main weight, as one plain 1-D tensor.

    ``grad`` is the group's flat main gradient. It exists if any parameter of the group has a
    gradient; gradients that the user assigned are moved there, and parameters without a gradient
    have zeros there. Setting it to None clears the gradients of all parameters.
    """

    _group: ParameterGroup

    @staticmethod
    def over(group: ParameterGroup) -> LocalParameter:
        """Make the parameter of one group; aliases its main weight."""
        parameter = as_subclass_with_grad(LocalParameter, group.main_weight.flat)
        parameter._group = group
        # Through this tie the hook after a step finds the group, to mark its compute weights stale.
        tie_to_group(parameter, group)
        return parameter

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """Return the flat main gradient, including its gaps, which are zero; None if absent."""
        # A user may have assigned or cleared single gradients: the buffer must agree with them.
        buffer = self._group.gradients.main_grad.adopt_grads()
        return None if buffer is None else buffer.flat

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        # The flat gradient is a view of what the reducer adds to; another tensor would be lost.
        if value is not None:
            raise RuntimeError(
                expected(
                    "None, or a change in place",
                    "an assignment",
                    where="the gradient of a local parameter",
                    hint="Copy into it, or assign gradients of the model's own parameters",
                )
            )
        for parameter in self._group.parameters:
            parameter.sharded.grad = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle the tensor, which is a part of a model."""
        raise RuntimeError(
            expected(
                "the parameters of a model",
                "a local parameter",
                where="pickle",
                hint="Save the model and an optimizer over model.parameters()",
            )
        )


def local_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return one plain tensor for each trainable parameter group of a sharded model; local.

    Build an element-wise optimizer over them instead of ``model.parameters()``. The result is the
    same if the parameters of each group get gradients all together or not at all, or if a zero
    gradient updates nothing. Weight decay then applies to a whole group alike. The norms and the
    clipping of this package count the rows of all ranks, as over ``model.parameters()``; torch's
    count only this rank's. Scale losses with
    :class:`~megafsdp.optimizer.loss_scaler.LossScaler`: ``torch.amp.GradScaler`` sees plain
    tensors, so each rank would decide by itself whether to skip a step, and ranks would diverge.
    The optimizer's states fit only this mesh; to save an optimizer, build it over
    ``model.parameters()``.

    Args:
        model: A module with units below it.

    Returns:
        1-D tensors in the dtype of the main weights, which they alias; each rank has its own part.

    Raises:
        ValueError: There is no unit below the model.
    """
    # By unit, not by parameter: tied parameters lie in one buffer, and so in one result.
    units = units_below([model])
    if not units:
        raise ValueError(
            expected(
                "a model with units below it",
                "none",
                where="local_parameters()",
                hint="Call fully_shard() first",
            )
        )
    groups = [group for unit in units.values() for group in unit.groups if group.is_trainable]
    return [LocalParameter.over(group) for group in groups]
