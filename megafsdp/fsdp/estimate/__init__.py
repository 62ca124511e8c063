"""Estimates: bytes and collectives of a training step, without memory and without ranks.

`megafsdp train --dry-run` is built on this sub-package. It runs no operator of the model.

Read first: footprint.py.
"""
