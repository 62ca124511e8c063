"""Granules of placements, and the collectives between residences."""

from __future__ import annotations

from megafsdp.buffer.comm import collectives
from megafsdp.mesh.placement import TRANSITIONS, Flat, Residence, TensorAtomic


def test_granules_are_rows_and_tensors() -> None:
    """What a cut keeps together, for a (10, 4) tensor and for a vector."""
    assert Flat().granule_numel((10, 4), 4) == 4
    assert TensorAtomic().granule_numel((10, 4), 4) == 40
    assert TensorAtomic().granule_numel((0, 4), 4) == 1, "an empty tensor needs no room"


def test_transitions_name_collectives_that_exist() -> None:
    """The table of moves points into buffer/comm/collectives.py."""
    for name in TRANSITIONS.values():
        assert callable(getattr(collectives, name))
    assert TRANSITIONS[Residence.PARTIAL, Residence.SHARD] == "reduce_scatter"
    assert TRANSITIONS[Residence.SHARD, Residence.REPLICATE] == "all_gather"


def test_nothing_becomes_partial_and_nothing_moves_to_itself() -> None:
    """A partial sum is made by computing, never by communicating."""
    assert all(source is not target for source, target in TRANSITIONS)
    assert all(target is not Residence.PARTIAL for _, target in TRANSITIONS)
