"""Tools that need only the files: readers and writers, verify, diff, and other libraries' formats.

None of them needs a model, a device or other ranks. Their command line is in training/cli.

Read first: reader.py.
"""
