"""Hugging Face checkpoints: export to and import from transformers' file format.

Tensors go one at a time, from and to sharded models or our checkpoints. What a configuration means
is in models/hf_config.py.

Read first: rules.py (names and shapes), then export.py.
"""
