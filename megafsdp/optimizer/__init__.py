"""Optimizers and what belongs to their step."""
