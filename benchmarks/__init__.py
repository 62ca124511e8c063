"""Benchmarks: both sides in one run, interleaved, correctness first, one record a run.

``python -m benchmarks CASE`` runs a case and writes
``benchmarks/records/<case>_<hardware>_<date>.json``. Absolute times on shared machines mean little;
records are for ratios of interleaved runs.
"""
