"""Flat buffers: how tensors are packed into them, and how ranks exchange them.

The folder has the layout and its planner, the buffer itself, and two sub-packages: comm (every
collective of the library) and dtensor (the uneven DTensors that users and optimizers see). fsdp/
decides when something is gathered or reduced.

Read first: layout.py (ranges of tensors in a buffer), then dbuffer.py.
"""
