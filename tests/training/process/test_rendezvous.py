"""Ranks that meet in a store which earlier starts have used, and ranks that do not come."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megafsdp.errors import RankError
from megafsdp.training.process import rendezvous
from megafsdp.training.process.rendezvous import meet
from megafsdp.training.process.world import World, process_group

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def store() -> dist.Store:
    """Return a store as a launcher serves it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _meet(
    store: dist.Store, sizes: dict[int, int], timeout_s: float = 20.0
) -> list[dist.Store | str]:
    """Let ranks meet, a thread each; return the part of the store or the error of each."""

    def one(rank: int) -> dist.Store | str:
        # Requests of one connection follow each other.
        own = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
        try:
            return meet(own, rank=rank, world_size=sizes[rank], timeout_s=timeout_s)
        except RankError as error:
            return str(error)

    with ThreadPoolExecutor(len(sizes)) as threads:
        return list(threads.map(one, sizes))


def test_each_start_has_keys_of_its_own(store: dist.Store) -> None:
    """What one start wrote is not there for the next, whatever earlier ones left."""
    for start in range(3):
        parts = _meet(store, dict.fromkeys(range(4), 4))
        for rank, part in enumerate(parts):
            assert isinstance(part, dist.PrefixStore)
            assert not part.check([f"address/{rank}"])
            part.set(f"address/{rank}", f"{start}")
        (first, *_) = parts
        assert isinstance(first, dist.Store)
        assert [first.get(f"address/{rank}") for rank in range(4)] == [b"%d" % start] * 4


def test_a_process_that_died_before_it_joined_is_not_taken_for_its_successor(
    store: dist.Store,
) -> None:
    """The first rank answers the dead one, and goes on waiting for the one that comes."""
    store.set("megafsdp/rank/1", "asks dead")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(meet, store.clone(), rank=0, world_size=2, timeout_s=20.0)
        store.wait(["megafsdp/answer/dead"])
        own = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
        part = meet(own, rank=1, world_size=2, timeout_s=20.0)
        part.set("key", "value")
        assert first.result().get("key") == b"value"


def test_ranks_that_do_not_come_are_named_on_all_that_came(store: dist.Store) -> None:
    """One message on every rank, with the limit and what to look at."""
    messages = _meet(store, {0: 4, 2: 4}, timeout_s=0.5)
    assert len(set(map(str, messages))) == 1
    (message, _) = messages
    assert isinstance(message, str)
    assert message.startswith("Expected 4 ranks to meet within 0.5 s, got no sign of rank 1, 3. In")
    assert "MASTER_ADDR" in message and "run.timeout_s" in message and "checkpoint" in message


def test_a_rank_that_came_to_the_last_start_alone_is_missed(store: dist.Store) -> None:
    """What its dead process left does not count as its coming."""
    _meet(store, {0: 2, 1: 2})
    (message,) = _meet(store, {0: 2}, timeout_s=0.3)
    assert "no sign of rank 1" in str(message)


def test_a_first_rank_that_does_not_come_is_named(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait a little longer than the limit, for its word."""
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.1)
    (message,) = _meet(store, {1: 2}, timeout_s=0.2)
    assert "no sign of rank 0" in str(message)


def test_ranks_of_another_number_of_machines_are_refused(store: dist.Store) -> None:
    """At once, on all ranks, with both numbers."""
    messages = _meet(store, {0: 2, 1: 4})
    assert len(set(map(str, messages))) == 1
    assert "the same WORLD_SIZE on all ranks, got 2 on rank 0 and 4 on rank 1" in str(messages[0])


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return a port on which nothing listens, as the environment's."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        for name, value in zip(NAMES, ("1", "2", "127.0.0.1", str(port), "True"), strict=True):
            monkeypatch.setenv(name, value)
        yield port


def test_a_store_that_nothing_serves_is_named(closed_port: int) -> None:
    """Where the ranks should have met, and what was not started there."""
    world = World(1, 2, 0, 1, torch.device("cpu"))
    with (
        pytest.raises(RankError, match=f"127.0.0.1:{closed_port} within 1 s.*Start rank 0 too"),
        process_group(world, timeout_s=1),
    ):
        pass
