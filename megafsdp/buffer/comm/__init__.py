"""Collectives: the one door to torch.distributed, with its counters and labels.

Here are the collectives on flat tensors, the reduce-scatter on gloo, the records that tests read,
and the functions that raise one rank's error on all ranks. Nothing here imports layouts or buffers.

Read first: collectives.py.
"""
