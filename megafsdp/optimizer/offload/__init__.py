"""Optimizer CPU offload: main weights and states of a fraction of the model on the host.

The sub-package has the optimizer for users (HybridDeviceOptimizer), the choice of what to offload,
the buckets, their pipeline of copies and steps, and speculative steps in backward. The offload of
parameters is in fsdp/params/host_params.py.

Read first: hybrid.py, then bucket_step.py; run_ahead.py last.
"""
