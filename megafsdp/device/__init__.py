"""Streams, events and memory: one handle for CPU and CUDA.

Here are copy streams, pinned host memory, threads of the host, the byte ledger, background threads,
profiler ranges and the private names of torch's core (torch_private.py). Nothing here imports
another folder.

Read first: streams.py.
"""
