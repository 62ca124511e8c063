"""The way of a gradient through the package is short, and calls on it go one way."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import megafsdp
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import Ranks

PACKAGE = str(Path(megafsdp.__file__).parent)
UNIT, SCHEDULE = "fsdp/runtime/unit.py", "fsdp/runtime/schedule.py"
MAX_FILES = 8
# What moves a gradient's bytes, or makes the tensors that show them, by the name of the function.
STATIONS = {
    "_foreach_copy_": "packed",
    "all_to_all_single": "sent",
    "sum_shards": "summed",
    "_unflatten_dense_tensors": "cut",
    "wrap": "wrapped",
    "wrapper": "wrapped",
    "users_hook": "published",
}
# torch has functions of these names too, which wrap no tensor.
OURS_ALONE = ("wrap", "wrapper")

Hop = tuple[str, str]  # A file, relative to the package, and a function of it.


@dataclass
class Trace:
    """What one backward called.

    Attributes:
        way: By station the functions on the stack when it was called.
        all_files: Calls by file of the package, whether or not on the way.
        round_trips: Calls of a unit by the schedule that a unit called, by unit.
        calls_back: Calls of the schedule by a unit that the schedule called.
    """

    way: dict[str, dict[Hop, None]] = field(default_factory=dict)
    all_files: Counter[str] = field(default_factory=Counter)
    round_trips: Counter[str] = field(default_factory=Counter)
    calls_back: Counter[Hop] = field(default_factory=Counter)

    @property
    def files(self) -> dict[str, list[str]]:
        """Return the functions on the way by file, in the order of the hops."""
        found: dict[str, list[str]] = {}
        for hops in self.way.values():
            for file, function in hops:
                if function not in found.setdefault(file, []):
                    found[file].append(function)
        return found


def _file(code: CodeType) -> str | None:
    inside = code.co_filename.startswith(PACKAGE)
    return Path(code.co_filename).relative_to(PACKAGE).as_posix() if inside else None


def _hops(frame: FrameType | None) -> list[tuple[Hop, FrameType]]:
    """Return the package's functions on a stack, outermost first."""
    hops = []
    while frame is not None:
        file = _file(frame.f_code)
        if file is not None:
            hops.append(((file, frame.f_code.co_name), frame))
        frame = frame.f_back
    return hops[::-1]


def _note_turns(path: Trace, hops: list[tuple[Hop, FrameType]]) -> None:
    """Count the last call if it leads back to where the stack has been."""
    turns = [file for (file, _), _ in hops if file in (UNIT, SCHEDULE)]
    sides = [side for k, side in enumerate(turns) if k == 0 or turns[k - 1] != side]
    (file, function), frame = hops[-1]
    is_entry = len(hops) < 2 or hops[-2][0][0] != file
    if not is_entry or file != sides[-1]:
        return
    if sides[-3:] == [UNIT, SCHEDULE, UNIT]:
        path.round_trips[frame.f_locals["self"].name] += 1
    if sides[-3:] == [SCHEDULE, UNIT, SCHEDULE]:
        path.calls_back[file, function] += 1


def _traced_backward() -> Trace:
    net = shard(Net(num_blocks=1))
    for batch in batches(2):
        net.zero_grad()
        net(*mine(batch)).backward()
    net.zero_grad()
    loss = net(*mine(batches(1)[0]))
    path = Trace()

    def users_hook(parameter: object) -> None:
        assert parameter.grad is not None  # type: ignore[attr-defined]

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(users_hook)

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            name, caller = getattr(called, "__name__", ""), frame
        elif event == "call":
            name, caller = frame.f_code.co_name, frame
        else:
            return
        file = _file(caller.f_code)
        if event == "call" and file is not None:
            path.all_files[file] += 1
            if file in (UNIT, SCHEDULE):
                _note_turns(path, _hops(frame))
        if name in STATIONS and (file is not None or name not in OURS_ALONE):
            hops = path.way.setdefault(STATIONS[name], {})
            hops.update((hop, None) for hop, _ in _hops(caller))

    # On a CPU autograd runs on the calling thread.
    sys.setprofile(note)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    return path


def test_a_gradient_passes_few_files_and_calls_go_one_way(ranks: Ranks) -> None:
    """From autograd's first call to ``.grad``, and no unit calls the schedule that called it.

    On the way is what is on the stack when the gradient is packed, sent, summed, cut into views,
    wrapped and published. What these functions ask on the side (ledgers, layouts, counters,
    profiler, weights to release) is not, and is listed in the message.
    """
    path = ranks(2).run(_traced_backward)[0]
    assert set(path.way) == set(STATIONS.values()), "all stations are seen"
    way = "\n".join(f"{file}: {', '.join(names)}" for file, names in path.files.items())
    others = sorted(set(path.all_files) - set(path.files))
    message = f"{len(path.files)} files on the way:\n{way}\nothers that were called: {others}"
    assert len(path.files) <= MAX_FILES, message
    assert max(path.round_trips.values(), default=0) <= 1, path.round_trips
    assert not path.calls_back, path.calls_back
    assert {UNIT, SCHEDULE} <= set(path.all_files), "both took part"
