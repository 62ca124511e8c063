"""Muon: orthogonalised momentum; one owner rank orthogonalises each matrix.

The sub-package has the optimizer, the matrices that it forms from shards, their exchange between
ranks, and the Newton-Schulz iteration.

Read first: muon.py.
"""
