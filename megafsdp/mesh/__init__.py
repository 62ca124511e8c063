"""Meshes, placements, and what layers declare about their parameters.

The names of mesh axes are spelt here and nowhere else, as are the private names of
torch.distributed (torch_private.py).

Read first: parallel_dims.py.
"""
