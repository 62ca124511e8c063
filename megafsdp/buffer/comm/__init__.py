"""Collectives: the only way to torch.distributed, with counters and labels.

The sub-package has the collectives on flat tensors, the reduce-scatter on gloo, the records that
tests read, and the functions that raise one rank's error on all ranks. Nothing here imports layouts
or buffers.

Read first: collectives.py.
"""
