"""Arithmetic of the optimizer on plain tensors: Adam's update, sums of squares.

The C++ and CUDA kernels are called here, beside the reference in torch. DTensors, parameter
groups and state dicts do not come here.

Read first: reference.py (Adam, operation by operation), then adam_kernel.py.
"""
