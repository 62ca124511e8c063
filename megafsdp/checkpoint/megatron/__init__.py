"""Megatron-LM's `fsdp_dtensor` checkpoints: reading them and writing them.

Weights, moments, step, learning rate and samples are translated; other arguments are carried along.

Read first: names.py.
"""
