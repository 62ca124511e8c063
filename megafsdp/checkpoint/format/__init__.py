"""The format on disk: the manifest, records, values, and regions of tensors.

A checkpoint is a directory that one atomic rename publishes. Nothing here knows models or
optimizers.

Read first: manifest.py.
"""
