"""When things happen: hooks around forward and backward, and the schedule of collectives.

A unit moves its parameters between phases; the schedule decides what is gathered ahead and which
reductions are in flight. The buffers themselves are in fsdp/params.

Read first: unit.py, then schedule.py.
"""
