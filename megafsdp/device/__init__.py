"""Streams, events and memory: one handle for CPU and CUDA.

Here are copy streams, pinned host memory, the byte ledger, background threads and profiler ranges.
Nothing here imports another folder.

Read first: streams.py.
"""
