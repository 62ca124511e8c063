"""Meshes, placements, and what layers declare about their parameters.

The names of mesh axes are spelt here and nowhere else.

Read first: parallel_dims.py.
"""
