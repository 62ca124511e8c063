"""Streams, events and memory: one handle for CPU and CUDA.

The folder has copy streams, pinned host memory, threads of the host, the byte ledger, background
threads, profiler ranges and the private names of torch's core (torch_private.py). It imports no
other folder.

Read first: streams.py.
"""
