"""Optimizer states: how they are stored, grown, loaded and shown as DTensors.

The formats (fp32, bf16, fp16, FP8, remainders) and the flat buffers of states lie here; what a step
does with them is in optimizer/adam and optimizer/muon.

Read first: formats.py, then store.py.
"""
