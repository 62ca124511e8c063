"""What is saved: models and optimizers as canonical tensors, and the way back.

Fused tensors are split into their parts here, experts into their own keys, and optimizer states are
named after their parameters. How tensors lie on disk is in checkpoint/format.

Read first: canonical.py.
"""
