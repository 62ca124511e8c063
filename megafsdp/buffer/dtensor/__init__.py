"""Uneven DTensors: parameters, gradients and states whose ranks own unequal numbers of rows.

The sub-package has the DTensor subclass, the operators it supports, its layout (which checkpoints
and copies keep), and the register of memory that a background step is writing. buffer/planner.py
assigns rows to ranks.

Read first: uneven.py.
"""
