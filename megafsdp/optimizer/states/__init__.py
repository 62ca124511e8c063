"""Optimizer states: how they are stored, made, loaded and shown as DTensors.

The formats (fp32, bf16, fp16, FP8, remainders) and the flat buffers of states are here; the steps
that use them are in optimizer/adam and optimizer/muon.

Read first: formats.py, then store.py.
"""
