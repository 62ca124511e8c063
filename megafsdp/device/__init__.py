"""Streams, events and memory: one handle for CPU and CUDA.

Here are copy streams, pinned host memory, the byte ledger, background threads, profiler ranges and
the names that torch's core keeps to itself (torch_private.py). Nothing here imports another folder.

Read first: streams.py.
"""
