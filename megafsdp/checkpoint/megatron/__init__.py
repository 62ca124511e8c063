"""Megatron-LM's `fsdp_dtensor` checkpoints: reading them and writing them.

Weights, moments, step, learning rate and sample counts are translated; other arguments are kept as
they are.

Read first: names.py.
"""
