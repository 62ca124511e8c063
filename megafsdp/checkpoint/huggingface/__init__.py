"""Hugging Face checkpoints: export to and import from transformers' file format.

An export gathers one file's tensors at a time on the rank that writes it; an import reads the
slices that each rank needs. What a configuration means is in models/hf_config.py.

Read first: mapping.py (names and layouts of each model family), then export.py.
"""
