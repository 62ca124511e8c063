"""Uneven DTensors: parameters, gradients and states whose ranks own unequal numbers of rows.

The sub-package has the DTensor subclass, the operators it supports, the layout that goes with it
into checkpoints and copies, and the register of memory that a background step is writing. How rows
are assigned to ranks is planned in buffer/planner.py.

Read first: uneven.py.
"""
