"""Let the ranks of one start meet in the launcher's store, under a prefix of their own.

torchrun keeps one store over all restarts. The addresses that the processes of an earlier start
wrote are still there, and a rank that reads one waits for a process that is dead. Counts of
restarts do not tell starts apart: a machine that comes back counts from 0, and one that stays goes
on counting. So the first rank draws a name for the start, and answers each rank that asks with it:

    rank 1                      store                                      rank 0
    writes a fresh nonce   -->  megafsdp/rank/1 = asks <nonce>
                                megafsdp/answer/<nonce> = <name>      <--  answers every nonce
    takes the name         -->  megafsdp/rank/1 = joined <name> <size>
                                megafsdp/<name>/complete = <failure>  <--  empty: all have joined

A nonce of a dead process is answered too, which changes nothing: that process never joins. This
file opens no process group.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable

import torch.distributed as dist

from megafsdp.errors import RankError, expected, listed

_ROOT = "megafsdp"
_NO_VALUE = "none"
# Pauses between two looks at the store; the first ones are short.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.005, 0.2
# The first rank decides for all, so the others wait this much longer, for its answer.
_GRACE_S = 10.0


def meet(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return the part of a store that belongs to this start; collective over all ranks.

    Args:
        store: What the launcher or the first rank serves; earlier starts may have used it.
        rank: This process.
        world_size: Number of processes.
        timeout_s: How long ranks wait for each other.

    Raises:
        RankError: Ranks did not come in time, or were started for another number of ranks. The
            same message on all ranks that came, if the first is one of them.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        failure = _gather(store, name, world_size, timeout_s)
        store.set(_complete_key(name), failure)
    else:
        name, failure = _join(store, rank, world_size, timeout_s)
    if failure:
        raise RankError(failure)
    return dist.PrefixStore(f"{_ROOT}/{name}", store)


def _gather(store: dist.Store, name: str, world_size: int, timeout_s: float) -> str:
    """As the first rank, wait until all have joined; return what went wrong, or nothing."""
    missing = list(range(1, world_size))
    # Each rank's key is there from here on, so that one request reads all of them.
    for rank in missing:
        store.compare_set(_rank_key(rank), "", _NO_VALUE)
    answered: dict[int, str] = {}
    odd_sizes: dict[int, int] = {}

    def is_complete() -> bool:
        values = store.multi_get([_rank_key(rank) for rank in missing]) if missing else []
        for rank, value in zip(tuple(missing), values, strict=True):
            match value.decode().split():
                case ["asks", nonce] if answered.get(rank) != nonce:
                    answered[rank] = nonce
                    store.set(_answer_key(nonce), name)
                case ["joined", joined, size] if joined == name:
                    missing.remove(rank)
                    if int(size) != world_size:
                        odd_sizes[rank] = int(size)
        # Odd sizes end the wait: ranks beyond the first one's world size would never be missed.
        return bool(odd_sizes) or not missing

    is_done = _waited(is_complete, timeout_s)
    if odd_sizes:
        return _of_other_sizes(odd_sizes, world_size)
    return "" if is_done else _missing(missing, world_size, timeout_s)


def _join(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> tuple[str, str]:
    """Ask the first rank for the name of the start; return it and what went wrong, or nothing."""
    nonce = uuid.uuid4().hex
    store.set(_rank_key(rank), f"asks {nonce}")
    if not _waited(lambda: store.check([_answer_key(nonce)]), timeout_s + _GRACE_S):
        raise RankError(_missing([0], world_size, timeout_s))
    name = store.get(_answer_key(nonce)).decode()
    store.delete_key(_answer_key(nonce))
    store.set(_rank_key(rank), f"joined {name} {world_size}")
    if not _waited(lambda: store.check([_complete_key(name)]), timeout_s + _GRACE_S):
        raise RankError(_missing([0], world_size, timeout_s))
    return name, store.get(_complete_key(name)).decode()


def _waited(is_true: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a condition holds before a limit; the last look comes at the limit."""
    deadline_s, pause_s = time.monotonic() + timeout_s, _MIN_PAUSE_S
    while not is_true():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    return True


def _missing(ranks: Iterable[int], world_size: int, timeout_s: float) -> str:
    names = listed([str(rank) for rank in ranks])
    return expected(
        f"{world_size} ranks to meet within {timeout_s:g} s",
        f"no sign of rank {names}",
        where="the rendezvous of the ranks, before anything was read or written",
        hint="Look at the first error of these ranks and whether their machines reach MASTER_ADDR"
        " and MASTER_PORT; start as many ranks as WORLD_SIZE says, or raise run.timeout_s. The"
        " same command then goes on from the last checkpoint",
    )


def _of_other_sizes(sizes: dict[int, int], world_size: int) -> str:
    found = listed([f"{size} on rank {rank}" for rank, size in sizes.items()])
    return expected(
        "the same WORLD_SIZE on all ranks",
        f"{world_size} on rank 0 and {found}",
        where="the rendezvous of the ranks, before anything was read or written",
        hint="Start the launchers of all machines with the same number of machines and of ranks a"
        " machine. The same command then goes on from the last checkpoint",
    )


def _rank_key(rank: int) -> str:
    return f"{_ROOT}/rank/{rank}"


def _answer_key(nonce: str) -> str:
    return f"{_ROOT}/answer/{nonce}"


def _complete_key(name: str) -> str:
    return f"{_ROOT}/{name}/complete"
