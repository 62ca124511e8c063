"""Public import path of the manifest's reader; the code is in checkpoint/format/manifest.py."""

from megafsdp.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest

__all__ = ["Manifest", "TensorEntry", "read_manifest"]
