"""FusedAdam: the optimizer, the plan of its passes over flat buffers, and one step.

The arithmetic is in optimizer/kernels, the states are in optimizer/states.

Read first: fused_adam.py, then step.py.
"""
