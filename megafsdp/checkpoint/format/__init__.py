"""The format on disk: the manifest, records, values, and regions of tensors.

A checkpoint is a directory that one atomic rename publishes. Nothing here knows of models and
optimizers. A region is a box inside a tensor, a chunk is a stored region, and a record is the place
of a payload on disk.

Read first: manifest.py.
"""
