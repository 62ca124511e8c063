"""What is saved: models and optimizers as canonical tensors, and their loading.

Fused tensors are split into their parts here, experts get keys of their own, and optimizer states
are named after their parameters. The format on disk is in checkpoint/format.

Read first: canonical.py.
"""
