"""Estimates: bytes and collectives of a training step, without memory and without ranks.

`megafsdp train --dry-run` is built on this sub-package. The real engine runs on the meta device, as
rank 0 of a fake process group; no operator of the model runs.

Read first: footprint.py, then meta_engine.py.
"""
