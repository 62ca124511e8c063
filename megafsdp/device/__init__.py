"""Streams, events and memory: one handle for CPU and CUDA."""
