"""A weight that is made of other tensors, and has no memory of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Codes(torch.Tensor):
    """A quantized weight as torchao has them: codes and a scale behind operations of its own."""

    @staticmethod
    def __new__(cls: type[Codes], codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        """Show the dtype that the weight stands for."""
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep both."""
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name both."""
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run on the values; detach, which a Parameter is made by, keeps the codes."""
        (weight, *others) = args
        assert isinstance(weight, cls)
        if func is torch.ops.aten.detach.default:
            return cls(weight.codes, weight.scale)
        return func(weight.codes * weight.scale, *others, **(kwargs or {}))
