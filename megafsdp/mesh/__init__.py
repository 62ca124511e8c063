"""Meshes, placements, and what layers declare about their parameters.

Only this folder spells the names of mesh axes and the private names of torch.distributed
(torch_private.py).

Read first: parallel_dims.py.
"""
