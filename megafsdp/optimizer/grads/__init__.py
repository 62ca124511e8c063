"""Gradients before the step: norms, counts of zeros, clipping.

Every norm is computed on flat shards with one all-reduce. The gradients themselves are reduced in
fsdp/params/gradient_reducer.py.

Read first: norms.py.
"""
