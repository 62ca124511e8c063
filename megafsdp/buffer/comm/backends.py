"""Which library serves a process group, on which device; calls no collective."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type that a group serves."""
    return _parse(dist.get_backend_config(group))


@functools.cache
def _parse(config: str) -> dict[str, str]:
    # Every collective asks: cpu:gloo,cuda:nccl and the like.
    return dict(item.split(":") for item in config.split(","))


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether a group serves a device by gloo."""
    return backends(group).get(device.type) == "gloo"


def small_device(group: dist.ProcessGroup) -> str:
    """Return where a group exchanges tensors that live nowhere yet."""
    return "cpu" if "cpu" in backends(group) else "cuda"
