"""Read Megatron-LM's ``fsdp_dtensor`` checkpoints (``from_nvidia``), write them (``to_nvidia``)."""

from megafsdp.checkpoint.nvidia_export import to_nvidia
from megafsdp.checkpoint.nvidia_import import from_nvidia

__all__ = ["from_nvidia", "to_nvidia"]
