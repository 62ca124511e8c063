"""The format on disk: the manifest, records, values, and regions of tensors.

A checkpoint is a directory that one atomic rename publishes. Models and optimizers are not known
here. A region is a part of a tensor, a chunk a region that is stored, a record its place on disk.

Read first: manifest.py.
"""
