"""Muon: momentum that is orthogonalised, each matrix by one owner rank.

The sub-package has the optimizer, the matrices that it forms from shards, their exchange between
ranks, and the Newton-Schulz iteration.

Read first: muon.py.
"""
