"""Waits and references, each with the run that shows its absence; removes one after another.

``python -m tests.stand_in.mutations`` copies the package, applies one change, and runs the case and
the order that the table names, which must fail. For a new line of the table ``--search`` tries all
cases and orders, and prints the first that fails and how.

A mutation whose old text is not found exactly once is an error, so the table follows the code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Imported once, before the forks: it takes longer than a case.
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 180.0
_DIFFERS = 3
_FORK = multiprocessing.get_context("fork")
KINDS = ("offload", "saves", "engine")
ORDERS = ("COMPUTE_FIRST", "COPIES_FIRST", "LAZY", "RANDOM")


@dataclass(frozen=True)
class Mutation:
    """One change of the package.

    Attributes:
        path: File below ``megafsdp``.
        old: Text that is in it once.
        shown_by: The kind of test (``offload``, ``saves`` or ``engine``), the name of its case, and
            the order of the stand-in.
        new: What is put in its place.
    """

    path: str
    old: str
    shown_by: tuple[str, str, str]
    new: str = "pass"

    def apply(self, text: str) -> str:
        """Return a file's text with the change.

        Raises:
            ValueError: The old text is not there, or more than once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)


_TABLE = {
    # Parameters on the host.
    "fsdp/params/host_params.py": [
        (
            "self._wait_for_copy()\n        return self._cast.tensor",
            ("offload", "parameters", "COMPUTE_FIRST"),
            "return self._cast.tensor",
        ),
        (
            "self._wait_for_copy()\n                    # Use several threads",
            ("offload", "parameters, SGD", "COMPUTE_FIRST"),
            "# Use several threads",
        ),
        (
            "if self._is_direct:\n            self._wait",
            ("offload", "parameters, plain loop", "LAZY"),
            "if False:\n            self._wait",
        ),
        (
            "self._handle.behind_current(self._stream)",
            ("offload", "parameters", "COPIES_FIRST"),
            "self._handle.use(self._stream)",
        ),
        ("self._copied = self._handle.record_event()", ("offload", "parameters", "COMPUTE_FIRST")),
        ("self._handle.wait_event(self._copied)", ("offload", "parameters", "COMPUTE_FIRST")),
    ],
    "fsdp/params/host_grads.py": [
        (
            "self._handle.behind_current(self._stream)",
            ("offload", "parameters", "COPIES_FIRST"),
            "self._handle.use(self._stream)",
        ),
        ("self._copied.synchronize()", ("offload", "parameters", "COMPUTE_FIRST")),
        (
            "self._copy = main_grad, target",
            ("offload", "parameters", "COMPUTE_FIRST"),
            "self._copy, self._sum = (main_grad, target), None",
        ),
        (
            "record_event(self._stream, is_blocking=True)",
            ("offload", "parameters", "COMPUTE_FIRST"),
            "record_event(is_blocking=True)",
        ),
    ],
    # Gradients between ranks.
    "fsdp/params/gradient_reducer.py": [
        (
            "self._pending.wait()\n        addends,",
            ("engine", "ZeRO-3", "COMPUTE_FIRST"),
            "addends,",
        ),
        ("self._pending.discard()", ("engine", "ZeRO-3, fails", "COMPUTE_FIRST")),
    ],
    "buffer/comm/collectives.py": [
        ("                work.wait()", ("engine", "ZeRO-3", "LAZY"), "                pass"),
    ],
    "buffer/comm/custom.py": [
        (
            "        self._handle.wait_event(event)",
            ("engine", "ZeRO-3, user's collectives", "COMPUTE_FIRST"),
            "        pass",
        ),
        (
            "        handle.wait_stream(handle.current_stream(), stream)\n\n",
            ("engine", "ZeRO-3, user's collectives", "COMPUTE_FIRST"),
            "\n",
        ),
        ("        work.wait()", ("engine", "ZeRO-3, user's collectives", "LAZY"), "        pass"),
    ],
    "fsdp/runtime/agreement.py": [
        ("exchange.wait()", ("engine", "ZeRO-3, odd", "LAZY")),
    ],
    "fsdp/runtime/schedule.py": [
        (
            "users read .grad at once.\n        self.reductions.finish()",
            ("engine", "ZeRO-3", "COMPUTE_FIRST"),
            "users read .grad at once.",
        ),
        (
            "self._exchanges.pop().wait()",
            ("engine", "ZeRO-3", "COMPUTE_FIRST"),
            "self._exchanges.pop()",
        ),
        (
            "unit.finish_unshard()\n\n    def _gather_ahead",
            ("engine", "ZeRO-3", "COMPUTE_FIRST"),
            "pass\n\n    def _gather_ahead",
        ),
    ],
    # Compute weights between ranks.
    "fsdp/params/cast_weight.py": [
        ("self._host_weight.wait_for_copy()", ("offload", "parameters", "LAZY")),
    ],
    "fsdp/params/gathered_weight.py": [
        ("        pending.wait()", ("engine", "ZeRO-3", "LAZY"), "        pass"),
        (
            "            self.finish_unshard()\n            self._full",
            ("engine", "ZeRO-3, odd", "COMPUTE_FIRST"),
            "            self._full",
        ),
        (
            "        self._source.finish_refresh()\n        full.storage",
            ("engine", "HFSDP", "COMPUTE_FIRST"),
            "        full.storage",
        ),
        (
            "self._gather = pending, source, own",
            ("engine", "ZeRO-1", "COMPUTE_FIRST"),
            "self._gather = pending, source, own; source.release_input()",
        ),
        (
            "with self._on_copy_stream():",
            ("engine", "parameters on the host", "COPIES_FIRST"),
            "if True:",
        ),
    ],
    "fsdp/params/gather_sources.py": [
        (
            "with self._on_copy_stream():",
            ("engine", "HFSDP, parameters on the host", "COMPUTE_FIRST"),
            "if True:",
        ),
        ("self._joining.wait()", ("engine", "HFSDP", "COMPUTE_FIRST")),
        (
            "self.finish_refresh()\n        return self._pieces",
            ("engine", "HFSDP, odd, repeats", "COMPUTE_FIRST"),
            "return self._pieces",
        ),
    ],
    # The optimizer on the host.
    "fsdp/params/parameter_group.py": [
        (
            "            self.step_in_flight.wait()\n        # Cleared",
            ("offload", "optimizer", "COMPUTE_FIRST"),
            "            pass\n        # Cleared",
        ),
    ],
    "optimizer/offload/bucket.py": [
        ("bucket.link.fence()", ("offload", "optimizer, half, ahead", "COPIES_FIRST")),
        ("[source for _, source in copies]", ("offload", "optimizer", "COMPUTE_FIRST"), "[]"),
        ("self.transfer.wait()", ("offload", "optimizer", "COMPUTE_FIRST")),
        ("self.transfer.order()", ("offload", "optimizer, zeros", "COMPUTE_FIRST")),
        ("self.uploaded.wait()", ("offload", "optimizer, repeats", "COMPUTE_FIRST")),
    ],
    "optimizer/offload/bucket_step.py": [
        ("link.fence()", ("offload", "optimizer, ahead, clipped", "LAZY")),
        ("self._transfer.wait()", ("offload", "optimizer, ahead, clipped", "COMPUTE_FIRST")),
        (
            "link.to_host([(self._kept, self._source)])",
            ("offload", "optimizer, ahead, clipped", "COMPUTE_FIRST"),
            "link.to_host([(self._kept, self._source)]); del self._source",
        ),
        ("        self._copy.wait()\n", ("offload", "optimizer", "COMPUTE_FIRST"), ""),
        ("self.bucket.wait_for_upload()", ("offload", "optimizer, repeats", "COMPUTE_FIRST")),
        ("self.bucket.uploaded.order()", ("offload", "optimizer", "COMPUTE_FIRST")),
    ],
    "optimizer/offload/hybrid.py": [
        ("bucket.release_grads()", ("offload", "optimizer, zeros", "COMPUTE_FIRST")),
        ("    handle.adopt_thread()", ("offload", "optimizer", "COMPUTE_FIRST"), ""),
        ("self._link.fence()", ("offload", "optimizer, repeats", "COPIES_FIRST")),
    ],
    "optimizer/offload/run_ahead.py": [
        ("self.copy.wait()", ("offload", "optimizer, half, ahead", "COMPUTE_FIRST")),
    ],
    # Background saves.
    "checkpoint/background/staging.py": [
        (
            "self._handle.behind_current(stream)",
            ("saves", "on the device", "COPIES_FIRST"),
            "self._handle.use(stream)",
        ),
        (
            "is_blocking=True)\n",
            ("saves", "on the device", "COMPUTE_FIRST"),
            "is_blocking=True)\n            self._on_device.clear()\n",
        ),
        (
            "record_event(stream, is_blocking=True)",
            ("saves", "on the device", "COMPUTE_FIRST"),
            "record_event(is_blocking=True)",
        ),
        (
            "self._is_copied.set()\n        if self._event is not None:",
            ("saves", "on the device", "COMPUTE_FIRST"),
            "self._is_copied.set()\n        if False:",
        ),
        ("self._handle.wait_event(self._event)", ("saves", "on the device", "COMPUTE_FIRST")),
        ("self._handle.adopt_thread()", ("saves", "on the device", "LAZY")),
    ],
    "checkpoint/background/pending_save.py": [
        (
            "register_optimizer_step_pre_hook(self.wait_until_staged)",
            ("saves", "on the device", "COMPUTE_FIRST"),
        ),
    ],
    # The device's own.
    "device/host_copies.py": [
        (
            "self._handle.wait_event(event, stream)",
            ("offload", "optimizer, half, ahead", "COPIES_FIRST"),
        ),
        (
            "def wait(self) -> None:\n        self._event.synchronize()",
            ("offload", "optimizer", "COMPUTE_FIRST"),
            "def wait(self) -> None:\n        pass",
        ),
        ("self._handle.wait_event(self._event)", ("offload", "optimizer", "COMPUTE_FIRST")),
        (
            "record_event(stream, is_blocking=True)",
            ("offload", "optimizer", "COMPUTE_FIRST"),
            "record_event(is_blocking=True)",
        ),
    ],
    "device/streams.py": [
        ("waiting.wait_stream(other)", ("offload", "parameters", "COPIES_FIRST")),
        (".wait_event(event)", ("offload", "parameters", "COMPUTE_FIRST"), ".query()"),
        (
            "self.wait_stream(stream, current)",
            ("engine", "ZeRO-3, user's collectives", "COPIES_FIRST"),
        ),
        (
            "self.wait_stream(current, stream)",
            ("engine", "ZeRO-3, user's collectives fail", "COMPUTE_FIRST"),
        ),
    ],
}

MUTATIONS = [Mutation(path, *line) for path, lines in _TABLE.items() for line in lines]


def _run_rank(root: Path, shown_by: tuple[str, str, str], rank: int, folder: str) -> None:
    """Run a case as one rank, in a process of its own; exits with _DIFFERS if a bit differs.

    Without an order it runs on the host, and what it shows is stored for the others to compare.
    """
    kind, name, order = shown_by
    sys.stderr = open(f"{folder}/{rank}", "w")  # noqa: SIM115
    sys.path.insert(0, str(root))
    os.environ["MEGAFSDP_POISON"] = "1"
    module = importlib.import_module(f"tests.stand_in.test_{kind}")
    runs = importlib.import_module("tests.stand_in.runs")
    assert Path(str(sys.modules["megafsdp"].__file__)).is_relative_to(root), "the copy is run"
    store = dist.FileStore(f"{folder}/store", module.NUM_RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=module.NUM_RANKS, store=store)
    case, shown = module.CASES[name], root / f"{kind} {name} {rank}"
    found = []
    try:
        if order:
            wanted = pickle.loads(shown.read_bytes())
            orders = [importlib.import_module("tests.stand_in.device").Order[order]]
            found = runs.differences(case, orders, module.RUN, wanted)
        else:
            shown.write_bytes(pickle.dumps(runs.run_on_host(case, module.RUN)))
    except BaseException:
        traceback.print_exc()
        found = ["an error"]
    print(found[:3], file=sys.stderr, flush=True)
    # Threads that wait for ranks which have ended would keep the process.
    os._exit(_DIFFERS if found else 0)


def _fails(root: Path, shown_by: tuple[str, str, str]) -> tuple[bool, str]:
    """Run a case on all its ranks; tell whether it fails, and how."""
    num_ranks = 2 if shown_by[0] == "engine" else 1
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _FORK.Process(target=_run_rank, args=(root, shown_by, rank, folder))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s and not any(p.exitcode == _DIFFERS for p in ranks):
            if all(process.exitcode is not None for process in ranks):
                break
            time.sleep(0.02)
        for process in ranks:
            # The others would wait for a rank that has failed.
            process.kill()
            process.join()
        how = " ".join(Path(f"{folder}/{rank}").read_text() for rank in range(num_ranks))
        return any(process.exitcode == _DIFFERS for process in ranks), " ".join(how.split())[-300:]


def _names(source: str) -> list[str]:
    """Return the lines that a program prints, in a process of its own: this has none of ours."""
    kinds = ", ".join(f"test_{kind}" for kind in KINDS)
    program = f"import sys; from tests.stand_in import {kinds}; print(*{source}, sep='\\n')"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return printed.stdout.splitlines()


def _import_of_others() -> None:
    """Import what our modules import of others, once before all forks; it takes seconds."""
    for name in _names("sys.modules"):
        if name.split(".")[0] not in ("megafsdp", "tests", "__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _prepare(root: Path, shown_by: tuple[str, str, str]) -> None:
    """Store what a case shows on the host, with the package as it is, which must not fail."""
    kind, name, order = shown_by
    tried = [(root / f"{kind} {name} 0", ""), (root / f"{kind} {name} {order} is right", order)]
    for mark, how_run in tried:
        if not mark.exists():
            fails, how = _fails(root, (kind, name, how_run))
            assert not fails, how
            mark.touch()


def _tried(mutation: Mutation, *, searches: bool) -> Iterator[tuple[str, str, str]]:
    """Yield what must show a mutation, and in a search all else of its kind."""
    yield mutation.shown_by
    if searches:
        kind = mutation.shown_by[0]
        for order, name in itertools.product(ORDERS, _names(f"test_{kind}.CASES")):
            yield kind, name, order


def _is_shown(mutation: Mutation, root: Path, *, searches: bool) -> bool:
    """Apply a mutation to the copy and run what must show it; tell whether it does."""
    path = root / "megafsdp" / mutation.path
    text = path.read_text()
    changed = mutation.apply(text)
    # What does not compile would fail for another reason.
    compile(changed, mutation.path, "exec")
    for shown_by in _tried(mutation, searches=searches):
        _prepare(root, shown_by)
        path.write_text(changed)
        is_shown, how = _fails(root, shown_by)
        path.write_text(text)
        if is_shown:
            break
    print(f"{'ok' if is_shown else 'NOT SHOWN'}: {mutation.path}: {mutation.old!r}", flush=True)
    if searches:
        print("   ", *shown_by, how, flush=True)
    return is_shown


def _show_all(mutations: Sequence[Mutation], *, searches: bool) -> None:
    """Try mutations, one after another, in a copy of the package; exit with how many fail."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "megafsdp", root / "megafsdp")
        sys.exit(sum(not _is_shown(mutation, root, searches=searches) for mutation in mutations))


def main() -> int:
    """Try the mutations that the arguments choose; return how many no run has shown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="*", help="only changes whose path or old text has it")
    parser.add_argument("--search", action="store_true", help="try all cases and orders")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if all(text in m.path + m.old for text in options.text)]
    _import_of_others()
    # Those of one case together: what it shows on the host is made once.
    cases = list(dict.fromkeys(m.shown_by[:2] for m in chosen))
    workers = []
    for job in range(options.jobs):
        own = [m for m in chosen if cases.index(m.shown_by[:2]) % options.jobs == job]
        workers.append(
            _FORK.Process(target=_show_all, args=(own,), kwargs={"searches": options.search})
        )
        workers[-1].start()
    for worker in workers:
        worker.join()
    return sum(worker.exitcode or 0 for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
