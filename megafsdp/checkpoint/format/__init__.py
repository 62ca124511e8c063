"""The format on disk: the manifest, records, values, and regions of tensors.

A checkpoint is a directory that one atomic rename publishes. Models and optimizers
are not known here.

Read first: manifest.py.
"""
