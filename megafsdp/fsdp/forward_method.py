"""Methods other than ``forward`` around which a unit gathers its parameters."""

from __future__ import annotations

import inspect

from torch import nn

from megafsdp.device.torch_private import end_graph, untraced_frame
from megafsdp.errors import expected
from megafsdp.fsdp.runtime.unit import unit_of


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
    own = vars(module).get(method_name)
    # Take the class's method unbound: a bound one would be a cycle through the module.
    of_class = inspect.getattr_static(type(module), method_name, None)
    if own is None and of_class is None:
        raise ValueError(
            expected(
                f"a method of {type(module).__name__}",
                repr(method_name),
                where="register_fsdp_forward_method()",
                hint="Give the name of a method of the module itself",
            )
        )
    # An attribute of the instance would hide the method of the class below.
    vars(module).pop(method_name, None)

    @untraced_frame
    def run(self: nn.Module, *args: object, **kwargs: object) -> object:
        unit = unit_of(self)
        assert unit is not None, "the class was made by fully_shard()"
        end_graph(unit.why_graphs_end)
        bind = getattr(of_class, "__get__", None)
        method = own or (of_class if bind is None else bind(self, type(self)))
        return unit.run_as_forward(self, method, args, kwargs)

    # Make a class for this module alone: other units share the one that mix_in() gave it.
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {method_name: run, "__doc__": cls.__doc__})
