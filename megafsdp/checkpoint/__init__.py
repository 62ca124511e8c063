"""Checkpoints: canonical tensors and a manifest, saved by any mesh and loaded by any other.

Read first: save.py, then load.py.
"""

from megafsdp.checkpoint import inspect
from megafsdp.checkpoint.app_state import AppState
from megafsdp.checkpoint.async_save import async_save, release_staging_memory, wait_for_saves
from megafsdp.checkpoint.background.pending_save import PendingSave
from megafsdp.checkpoint.format.save_root import latest_step
from megafsdp.checkpoint.huggingface.checkpoints import export_hf_checkpoint, import_hf_checkpoint
from megafsdp.checkpoint.huggingface.export import export_hf
from megafsdp.checkpoint.huggingface.import_ import import_hf
from megafsdp.checkpoint.load import load
from megafsdp.checkpoint.save import save
from megafsdp.checkpoint.storage.store_path import StorePath

__all__ = [
    "AppState",
    "PendingSave",
    "StorePath",
    "async_save",
    "export_hf",
    "export_hf_checkpoint",
    "import_hf",
    "import_hf_checkpoint",
    "inspect",
    "latest_step",
    "load",
    "release_staging_memory",
    "save",
    "wait_for_saves",
]
