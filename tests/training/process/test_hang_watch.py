"""Which rank leaves the others waiting, by the collectives that each has issued."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch.distributed as dist

from megafsdp.buffer.comm.trace import issued
from megafsdp.training.process import hang_watch
from megafsdp.training.process.hang_watch import Progress, judge, watching_for_hangs

LIMIT_S = 10.0
WORLD = [0, 1, 2, 3]


def _at(
    counts: dict[str, int],
    members: dict[str, list[int]] | None = None,
    *,
    still_s: float = LIMIT_S,
    place: str = "loop.py:1 in wait",
) -> Progress:
    """Return the progress of a rank whose n-th collective of a group is all_gather of '<n>'."""
    recent = [
        (g, n, "all_gather", f"unit {n}")
        for g, count in counts.items()
        for n in range(1, count + 1)
    ]
    return Progress(still_s, counts, members or {"": WORLD}, recent, place)


def test_a_rank_that_is_behind_is_named_with_what_it_misses() -> None:
    """The collective after its last one, where its main thread is, and the others' patience."""
    progress = dict.fromkeys(range(4), _at({"": 7}))
    progress[2] = _at({"": 5}, place="loader.py:88 in read")
    text = judge(progress, timeout_s=LIMIT_S)
    assert "Expected ranks 0, 1, 2, 3 to reach all_gather of 'unit 6' within 10 s" in text
    assert "got all but rank 2. In collective 6 of these ranks" in text
    assert "rank 2 is at loader.py:88 in read, after all_gather of 'unit 5'" in text
    assert "run.timeout_s" in text and "checkpoint" in text


def test_a_rank_that_does_not_answer_is_named() -> None:
    """A stopped process has no thread that could answer."""
    text = judge({rank: _at({"": 3}) for rank in (0, 1, 3)}, timeout_s=LIMIT_S)
    assert "to reach all_gather of 'unit 3'" in text
    assert "got all but rank 2." in text and "rank 2 does not answer" in text


def test_a_rank_that_waits_for_another_is_not_the_cause() -> None:
    """Of two groups the one is named whose missing rank waits for nobody."""
    groups = {"b": [0, 2], "a": [0, 1], "c": [1, 3]}

    def own(rank: int, counts: dict[str, int]) -> Progress:
        return _at(counts, {name: ranks for name, ranks in groups.items() if rank in ranks})

    progress = {
        0: own(0, {"a": 3, "b": 1}),
        1: own(1, {"a": 2, "c": 1}),
        2: own(2, {"b": 2}),
        3: own(3, {"c": 1}),
    }
    text = judge(progress, timeout_s=LIMIT_S)
    assert "Expected ranks 0, 1 to reach all_gather of 'unit 3'" in text
    assert "got all but rank 1." in text


def test_of_the_ranks_that_a_group_misses_the_cause_alone_is_named() -> None:
    """Rank 0 is missed by rank 2 as well, but only because it waits for rank 1."""
    members = {"": [0, 1, 2], "a": [0, 1]}
    progress = {
        0: _at({"": 1, "a": 2}, members),
        1: _at({"": 1, "a": 1}, members),
        2: _at({"": 2}, {"": [0, 1, 2]}),
    }
    text = judge(progress, timeout_s=LIMIT_S)
    assert "Expected ranks 0, 1, 2 to reach all_gather of 'unit 2'" in text
    assert "got all but rank 1. " in text


def test_a_group_that_a_rank_has_never_used_counts() -> None:
    """Its members are those that the other ranks know."""
    both = {"": WORLD, "a": [0, 1]}
    progress = dict.fromkeys(range(4), _at({"": 2}))
    progress[0] = _at({"": 2, "a": 1}, both)
    text = judge(progress, timeout_s=LIMIT_S)
    assert "Expected ranks 0, 1 to reach all_gather of 'unit 1'" in text
    assert "got all but rank 1." in text


@pytest.mark.parametrize(
    "progress",
    [
        # All work at something that needs no collective.
        dict.fromkeys(range(4), _at({"": 7})),
        # One rank was faster at it, and the others come.
        dict.fromkeys(range(4), _at({"": 7})) | {0: _at({"": 8}, still_s=0.5)},
    ],
    ids=["long work", "work that ends"],
)
def test_ranks_that_wait_less_than_the_limit_are_left_alone(progress: dict[int, Progress]) -> None:
    """A limit is on waiting, not on work."""
    assert judge(progress, timeout_s=LIMIT_S) == ""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages that end processes, which do not end."""
    messages: list[str] = []
    monkeypatch.setattr(hang_watch, "report_failure", messages.append)
    monkeypatch.setattr(hang_watch.os, "_exit", lambda code: _end())
    return messages


def _end() -> None:
    # What a store raises whose process has ended.
    raise dist.DistStoreError("ended")


def _other_rank(store: dist.Store, *, answers: bool, until: Callable[[], object]) -> None:
    """Answer alarms as rank 1, which is one collective behind."""
    while answers and not until():
        if store.check(["hang/0"]) and not store.check(["hang/0/1"]):
            store.set("hang/0/1", json.dumps(asdict(_at({"": 1}, {"": [0, 1]}, place="p"))))
        time.sleep(0.01)


@pytest.mark.parametrize("answers", [True, False])
def test_the_thread_of_a_waiting_rank_raises_the_alarm(said: list[str], answers: bool) -> None:
    """With or without an answer of the other rank, and within seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = threading.Thread(
        target=_other_rank,
        args=(store.clone(),),
        kwargs={"answers": answers, "until": lambda: said},
    )
    with watching_for_hangs(store, rank=0, world_size=2, timeout_s=0.3):
        other.start()
        issued.members[""] = [0, 1]
        issued.counts[""] = 2
        issued.recent.extend([("", 1, "barrier", ""), ("", 2, "all_reduce", "loss")])
        deadline_s = time.monotonic() + 20
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.01)
    other.join()
    (message,) = said
    assert message.startswith("RankError: Expected ranks 0, 1 to reach all_reduce of 'loss'")
    assert ("rank 1 is at p" if answers else "rank 1 does not answer") in message


def test_ranks_that_go_on_are_not_asked(said: list[str]) -> None:
    """No alarm is written while collectives are issued."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with watching_for_hangs(store, rank=0, world_size=2, timeout_s=0.5):
        for number in range(20):
            issued.counts[""] = number
            time.sleep(0.05)
    assert not said
    assert not store.check(["hang/0"])
