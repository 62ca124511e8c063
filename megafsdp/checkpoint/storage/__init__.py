"""Where the files of checkpoints lie: a path of the machine, or a URL of an object store.

Both are read and written by the same few methods, those of pathlib. How files become a checkpoint,
by a rename or by a manifest, is in checkpoint/format.

Read first: locations.py.
"""
