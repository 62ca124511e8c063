"""Checkpoints: canonical tensors and a manifest, saved by any mesh and loaded by any other."""

from megafsdp.checkpoint import inspect
from megafsdp.checkpoint.directory import latest_step
from megafsdp.checkpoint.load import load
from megafsdp.checkpoint.save import save

__all__ = ["inspect", "latest_step", "load", "save"]
