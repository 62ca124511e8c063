"""Name the ranks that leave the others waiting, and end the run, where torch would only time out.

A thread of each rank looks at how many collectives the rank has issued. If that number has not
changed within the time limit, the thread sets an alarm in the store, and the threads of all ranks
write there how far they have come and what their main threads do. The rank that hangs is one that
issued fewer collectives of a group than others, which have waited for the limit. All ranks then end
with the same message. A launcher with restarts left starts them anew, from the last checkpoint.

The thread reads only the counts of issued collectives, so it works alike on gloo, where the main
thread waits in a collective, and on NCCL, where it may be one step ahead of the GPU. If all ranks
have issued the same number, as with a kernel that never ends, only torch's own limit remains.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from megafsdp.buffer.comm.trace import issued
from megafsdp.errors import RankError, expected, listed
from megafsdp.training.process.failure import describe, report_failure

_LOGGER = logging.getLogger("megafsdp.training")

# The most time from the limit to the end of all ranks. torch's own limit comes after it.
MAX_NAMING_S = 30.0
_MAX_INTERVAL_S = 5.0
# Time for the others to read the verdict, as the store may end with this process.
_FAREWELL_S = 0.5
_EXIT_CODE = 1
_NUM_FRAMES = 3


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank has come.

    Attributes:
        still_s: How long it has issued no collective.
        counts: Number of collectives by name of the process group.
        members: Ranks of these groups.
        recent: The last collectives, as (name of the group, number, kind, label).
        place: What the main thread does.
    """

    still_s: float
    counts: Mapping[str, int]
    members: Mapping[str, Sequence[int]]
    recent: Sequence[Sequence[object]]
    place: str

    def find(self, group: str, number: int) -> str | None:
        """Return what a collective was, if it is among the last ones."""
        for name, its_number, kind, label in reversed(self.recent):
            if (name, its_number) == (group, number):
                return f"{kind} of '{label}'" if label else str(kind)
        return None


@contextlib.contextmanager
def watching_for_hangs(
    store: dist.Store, *, rank: int, world_size: int, timeout_s: float
) -> Iterator[None]:
    """End all processes with one message if ranks are waited for longer than a limit; local.

    Args:
        store: The store that the ranks of this start share.
        rank: This process, whose main thread has entered the context.
        world_size: Number of processes.
        timeout_s: The limit.
    """
    if world_size == 1:
        yield
        return
    issued.forget()
    is_over = threading.Event()
    # Its own connection, as a request of the main thread may wait in the other one.
    own = store.clone()  # type: ignore[attr-defined] # torch's types lack it.
    watch = _Watch(own, rank, world_size, timeout_s)
    thread = threading.Thread(target=watch.run, args=(is_over,), name="hang watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class _Watch:
    """The thread of one rank, and its part in alarms."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._main = threading.current_thread().ident
        self._interval_s = min(timeout_s / 10, _MAX_INTERVAL_S)
        self._num_issued = -1
        self._since_s = 0.0
        self._patience_s = timeout_s
        self._num_alarms = 0

    def run(self, is_over: threading.Event) -> None:
        """Look every few seconds until the run is over or its store is gone."""
        try:
            while not is_over.wait(self._interval_s):
                self._look()
        except RuntimeError as error:
            # The process that serves the store has ended; the launcher ends the others.
            _LOGGER.debug("hangs are not watched for any more: %s", error)

    def _look(self) -> None:
        num_issued, now_s = sum(list(issued.counts.values())), time.monotonic()
        if num_issued != self._num_issued:
            self._num_issued, self._since_s = num_issued, now_s
            self._patience_s = self._timeout_s
        alarm, own = f"hang/{self._num_alarms}", str(self._rank)
        is_leader = False
        if now_s - self._since_s >= self._patience_s:
            is_leader = self._store.compare_set(alarm, "", own).decode() == own
        elif not self._store.check([alarm]):
            return
        progress = self._progress()
        self._store.set(f"{alarm}/{self._rank}", json.dumps(asdict(progress)))
        if is_leader:
            self._store.set(f"{alarm}/verdict", self._judged(alarm))
        elif not self._waited([f"{alarm}/verdict"]):
            # The leader has ended in the meantime.
            return
        self._num_alarms += 1
        if verdict := self._store.get(f"{alarm}/verdict").decode():
            report_failure(describe(RankError(verdict)))
            time.sleep(_FAREWELL_S if is_leader else 0)
            # The main thread waits in native code, where no exception reaches it.
            os._exit(_EXIT_CODE)
        # All ranks are in the same long work: no further alarm until it has taken twice as long.
        if progress.still_s >= self._timeout_s:
            self._patience_s = 2 * progress.still_s

    def _progress(self) -> Progress:
        return Progress(
            still_s=time.monotonic() - self._since_s,
            counts=dict(issued.counts),
            members={name: list(ranks) for name, ranks in issued.members.items()},
            recent=list(issued.recent),
            place=_place(self._main),
        )

    def _judged(self, alarm: str) -> str:
        """Collect how far the ranks have come, and return the message of a hang, or nothing."""
        ranks = range(self._world_size)
        self._waited([f"{alarm}/{rank}" for rank in ranks])
        progress = {}
        for rank in ranks:
            if self._store.check([f"{alarm}/{rank}"]):
                progress[rank] = Progress(**json.loads(self._store.get(f"{alarm}/{rank}")))
        return judge(progress, timeout_s=self._timeout_s)

    def _waited(self, keys: list[str]) -> bool:
        """Return whether keys come in the time that the others take to look and to answer."""
        deadline_s = time.monotonic() + 2 * self._interval_s + 2
        while not self._store.check(keys):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        return True


def judge(progress: Mapping[int, Progress], *, timeout_s: float) -> str:
    """Return the message on ranks that leave others waiting; empty if there are none.

    Args:
        progress: The progress of each rank that has answered.
        timeout_s: The limit.
    """
    members = {name: ranks for p in progress.values() for name, ranks in p.members.items()}
    waiting: dict[str, list[int]] = {}
    behind: dict[str, list[int]] = {}
    for name, ranks in members.items():
        counts = {r: progress[r].counts.get(name, 0) for r in ranks if r in progress}
        ahead = max(counts.values())
        first = [r for r, count in counts.items() if count == ahead]
        if len(first) < len(ranks) and any(progress[r].still_s >= timeout_s for r in first):
            waiting[name] = first
            behind[name] = [r for r in ranks if r not in first]
    everyone_waiting = {rank for ranks in waiting.values() for rank in ranks}
    # A rank that is waited for may itself wait for another: the one that does not is the cause.
    causes = {n: [r for r in ranks if r not in everyone_waiting] for n, ranks in behind.items()}
    for name in sorted(behind, key=lambda name: not causes[name]):
        missing = causes[name] or behind[name]
        return _message(progress, name, members[name], missing, waiting[name][0], timeout_s)
    return ""


def _message(
    progress: Mapping[int, Progress],
    group: str,
    members: Sequence[int],
    missing: Sequence[int],
    witness: int,
    timeout_s: float,
) -> str:
    done = min(progress[r].counts.get(group, 0) if r in progress else 0 for r in missing)
    answering = [r for r in missing if r in progress]
    if not answering:
        # The missing ranks' counts are unknown: take the collective that the others wait in.
        done = progress[witness].counts[group] - 1
    what = progress[witness].find(group, done + 1) or "a collective"
    places = [f"rank {rank} {_doing(progress.get(rank), group)}" for rank in missing]
    return expected(
        f"ranks {listed([str(r) for r in members])} to reach {what} within {timeout_s:g} s",
        f"all but {listed([f'rank {r}' for r in missing])}",
        where=f"collective {done + 1} of these ranks, while {listed(places, separator='; ')}",
        hint="Look at what the missing ranks do there; raise run.timeout_s if they need longer."
        " The same command goes on from the last checkpoint",
    )


def _doing(progress: Progress | None, group: str) -> str:
    if progress is None:
        return "does not answer: it is stopped, or its machine is gone"
    last = progress.find(group, progress.counts.get(group, 0))
    after = f", after {last}" if last else ""
    return f"is at {progress.place}{after}"


def _place(thread: int | None) -> str:
    """Return where a thread of this process is, innermost call first."""
    # A private function of Python, the only one that gives the frames of another thread.
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "an unknown place"
    calls = traceback.extract_stack(frame)[-_NUM_FRAMES:]
    names = [
        f"{'/'.join(call.filename.split(os.sep)[-2:])}:{call.lineno} in {call.name}"
        for call in reversed(calls)
    ]
    return ", called from ".join(names)
