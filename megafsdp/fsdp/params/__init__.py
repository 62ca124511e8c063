"""What a unit owns: parameter groups, compute weights, gradients, and their placement.

A parameter group has one compute weight (gathered for forward and backward) and one gradient
reducer. Nothing here decides when a collective runs: that is fsdp/runtime.

Read first: parameter_group.py, then gathered_weight.py with gather_sources.py, and
gradient_reducer.py.
"""
