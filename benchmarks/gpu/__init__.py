"""The parts of ``benchmarks/gpu_suite.py``, each a function ``run(size, report)`` in its own file.

Read first: part.py, then any part. Each runs on a GPU and, in a rehearsal, on a CPU with tiny
sizes; code that only runs on CUDA is in functions of a few lines.
"""
