"""One training step: microbatches, the update, learning rates, and evaluation.

Read first: train_step.py.
"""
