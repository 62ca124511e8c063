"""The process: its rank and world, signals, the lock of a run, and `megafsdp doctor`.

Read first: world.py.
"""
