"""Refuse reads of tensors by the host, for which it would have to wait for a device."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class NoHostReads(TorchDispatchMode):
    """Refuse what a capture would refuse: values of tensors on the host."""

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Refuse, or run."""
        assert "_local_scalar_dense" not in str(func), "the host reads a tensor"
        return func(*args, **(kwargs or {}))
