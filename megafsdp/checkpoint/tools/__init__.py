"""Tools on files alone: readers and writers, verify, diff, and other libraries' formats.

None of them needs a model, a device or other ranks. The command line over them is in training/cli.

Read first: reader.py.
"""
