"""Meshes, placements, and what layers declare about their parameters.

The names of mesh axes are spelt here and nowhere else, as are the names that torch.distributed
keeps to itself (torch_private.py).

Read first: parallel_dims.py.
"""
