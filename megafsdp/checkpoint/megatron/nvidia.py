"""Read Megatron-LM's ``fsdp_dtensor`` checkpoints (``from_nvidia``), write them (``to_nvidia``)."""

from megafsdp.checkpoint.megatron.exporter import to_nvidia
from megafsdp.checkpoint.megatron.importer import from_nvidia

__all__ = ["from_nvidia", "to_nvidia"]
