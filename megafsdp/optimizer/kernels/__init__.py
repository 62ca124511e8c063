"""Arithmetic of the optimizer on plain tensors: Adam's update, sums of squares.

The C++ and CUDA kernels are called here, beside the reference in torch. Nothing here knows of
DTensors, parameter groups or state dicts.

Read first: reference.py (Adam, operation by operation), then adam_kernel.py.
"""
