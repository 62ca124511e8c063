"""Waits and references, each with the run that shows its absence; removes one after another.

``python -m tests.stand_in.mutations [TEXT]`` copies the package, applies one change, and runs the
case and the order that the table names, which must fail; with TEXT only changes of files whose
paths contain it. ``--search`` tries all cases and orders of a change and prints those that fail.

A mutation whose old text is not found exactly once is an error, so the table follows the code.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path

# Imported once, before the forks: it takes longer than a case.
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 180.0
_DIFFERS = 3
KINDS = ("offload", "saves", "engine")
ORDERS = ("COMPUTE_FIRST", "COPIES_FIRST", "LAZY", "RANDOM")


@dataclass(frozen=True)
class Mutation:
    """One change of the package.

    Attributes:
        path: File below ``megafsdp``.
        old: Text that is in it once.
        new: What is put in its place.
        shown_by: The kind of test (``offload``, ``saves`` or ``engine``), the name of its case, and
            the order of the stand-in.
    """

    path: str
    old: str
    new: str
    shown_by: tuple[str, str, str]

    def apply(self, text: str) -> str:
        """Return a file's text with the change.

        Raises:
            ValueError: The old text is not there, or more than once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)


_WEIGHTS = "fsdp/params/host_params.py"
_GRADS = "fsdp/params/host_grads.py"
_REDUCER = "fsdp/params/gradient_reducer.py"
_COMPUTE = "fsdp/params/compute_weight.py"
_SOURCES = "fsdp/params/gather_sources.py"
_MAIN_GRAD = "fsdp/params/main_gradient.py"
_GROUP = "fsdp/params/parameter_group.py"
_SCHEDULE = "fsdp/runtime/schedule.py"
_AGREEMENT = "fsdp/runtime/agreement.py"
_BUCKET = "optimizer/offload/bucket.py"
_STEP = "optimizer/offload/bucket_step.py"
_HYBRID = "optimizer/offload/hybrid.py"
_AHEAD = "optimizer/offload/run_ahead.py"
_STAGING = "checkpoint/background/staging.py"
_SAVES = "checkpoint/background/pending_save.py"
_STREAMS = "device/streams.py"
_COPIES = "device/host_copies.py"
_DOOR = "buffer/comm/collectives.py"

MUTATIONS = [
    # Parameters on the host.
    Mutation(
        _WEIGHTS,
        "self._wait_for_copy()\n        return self._cast.tensor",
        "return self._cast.tensor",
        ("offload", "parameters", "COMPUTE_FIRST"),
    ),
    Mutation(
        _WEIGHTS,
        "self._wait_for_copy()\n                    source.copy_",
        "source.copy_",
        ("offload", "parameters, SGD", "COMPUTE_FIRST"),
    ),
    Mutation(
        _WEIGHTS,
        "if self._is_direct:\n            self._wait",
        "if False:\n            self._wait",
        ("offload", "parameters, plain loop", "LAZY"),
    ),
    Mutation(
        _WEIGHTS,
        "self._handle.wait_stream(self._stream, self._handle.current_stream())",
        "pass",
        ("offload", "parameters", "COPIES_FIRST"),
    ),
    Mutation(
        _WEIGHTS,
        "self._copied = self._handle.record_event()",
        "pass",
        ("offload", "parameters", "COMPUTE_FIRST"),
    ),
    Mutation(
        _WEIGHTS,
        "self._handle.wait_event(self._copied)",
        "pass",
        ("offload", "parameters", "COMPUTE_FIRST"),
    ),
    Mutation(
        _GRADS,
        "self._handle.wait_event(self._copied)",
        "pass",
        ("offload", "parameters, SGD", "COMPUTE_FIRST"),
    ),
    Mutation(
        _GRADS,
        "self._handle.wait_stream(self._stream, self._handle.current_stream())",
        "pass",
        ("offload", "parameters", "COPIES_FIRST"),
    ),
    Mutation(
        _GRADS, "self._copied.synchronize()", "pass", ("offload", "parameters", "COMPUTE_FIRST")
    ),
    Mutation(
        _GRADS,
        "self._copy = main_grad, target",
        "self._copy, self._sum = (main_grad, target), None",
        ("offload", "parameters", "COMPUTE_FIRST"),
    ),
    Mutation(
        _GRADS,
        "record_event(self._stream, is_blocking=True)",
        "record_event(is_blocking=True)",
        ("offload", "parameters", "COMPUTE_FIRST"),
    ),
    # Gradients between ranks.
    Mutation(
        _REDUCER,
        "self._pending.wait()\n        addends,",
        "addends,",
        ("engine", "ZeRO-3", "COMPUTE_FIRST"),
    ),
    Mutation(
        _REDUCER, "self._pending.discard()", "pass", ("engine", "ZeRO-3, fails", "COMPUTE_FIRST")
    ),
    Mutation(
        _SCHEDULE,
        "self.reductions.finish()\n        self._release_all",
        "self._release_all",
        ("engine", "ZeRO-3", "COMPUTE_FIRST"),
    ),
    Mutation(
        _SCHEDULE,
        "self._exchanges.pop().wait()",
        "self._exchanges.pop()",
        ("engine", "ZeRO-3", "COMPUTE_FIRST"),
    ),
    Mutation(_AGREEMENT, "exchange.wait()", "pass", ("engine", "ZeRO-3, odd", "LAZY")),
    Mutation(_DOOR, "                work.wait()", "                pass", ("engine", "ZeRO-3", "LAZY")),
    # Compute weights between ranks.
    Mutation(
        _SCHEDULE,
        "unit.finish_unshard()\n\n    def _gather_ahead",
        "pass\n\n    def _gather_ahead",
        ("engine", "ZeRO-3", "COMPUTE_FIRST"),
    ),
    Mutation(_COMPUTE, "            pending.wait()", "            pass", ("engine", "ZeRO-3", "LAZY")),
    Mutation(
        _COMPUTE, "self._host_weight.wait_for_copy()", "pass", ("offload", "parameters", "LAZY")
    ),
    Mutation(
        _COMPUTE,
        "            self.finish_unshard()\n            for full",
        "            for full",
        ("engine", "ZeRO-3, odd", "COMPUTE_FIRST"),
    ),
    Mutation(
        _COMPUTE,
        "        self._source.finish_refresh()\n        self._outdated.diff",
        "        self._outdated.diff",
        ("engine", "HFSDP", "COMPUTE_FIRST"),
    ),
    Mutation(
        _COMPUTE,
        "self._source.finish_refresh()\n        self._source.refresh",
        "self._source.refresh",
        ("engine", "HFSDP, odd", "COMPUTE_FIRST"),
    ),
    Mutation(
        _COMPUTE,
        "self._gathers.append((pending, source, inputs))",
        "self._gathers.append((pending, source, inputs)); source.release_inputs()",
        ("engine", "ZeRO-1", "COMPUTE_FIRST"),
    ),
    Mutation(
        _COMPUTE,
        "torch.no_grad(), self._on_copy_stream():",
        "torch.no_grad():",
        ("engine", "parameters on the host", "COMPUTE_FIRST"),
    ),
    Mutation(
        _SOURCES,
        "with self._on_copy_stream():",
        "if True:",
        ("engine", "HFSDP, parameters on the host", "COMPUTE_FIRST"),
    ),
    Mutation(_SOURCES, "self._joining.wait()", "pass", ("engine", "HFSDP", "COMPUTE_FIRST")),
    Mutation(
        _SOURCES,
        "self.finish_refresh()\n        return self._pieces",
        "return self._pieces",
        ("engine", "HFSDP, odd", "COMPUTE_FIRST"),
    ),
    # The optimizer on the host.
    Mutation(
        _GROUP,
        "            self.step_in_flight.wait()\n        # Cleared",
        "            pass\n        # Cleared",
        ("offload", "optimizer", "COMPUTE_FIRST"),
    ),
    Mutation(
        _MAIN_GRAD,
        "self.listener.grads_will_change()",
        "pass",
        ("offload", "optimizer, added", "COMPUTE_FIRST"),
    ),
    Mutation(
        _BUCKET, "bucket.link.fence()", "pass", ("offload", "optimizer, half, ahead", "COPIES_FIRST")
    ),
    Mutation(
        _BUCKET,
        "[source for _, source in copies]",
        "[]",
        ("offload", "optimizer", "COMPUTE_FIRST"),
    ),
    Mutation(
        _BUCKET, "self.transfer.wait()", "pass", ("offload", "optimizer", "COMPUTE_FIRST")
    ),
    Mutation(
        _BUCKET,
        "self.transfer.order()",
        "pass",
        ("offload", "optimizer, added", "COMPUTE_FIRST"),
    ),
    Mutation(
        _BUCKET, "self.uploaded.wait()", "pass", ("offload", "optimizer", "COMPUTE_FIRST")
    ),
    Mutation(
        _BUCKET,
        "bucket.release_grads()\n\n    def cancel",
        "pass\n\n    def cancel",
        ("offload", "optimizer, added", "COMPUTE_FIRST"),
    ),
    Mutation(
        _BUCKET,
        "if self.copy is not None and self.copy.transfer.is_done:",
        "if self.copy is not None and not setattr(self, 'copy', None):\n            return\n        if False:",
        ("offload", "optimizer", "COMPUTE_FIRST"),
    ),
    Mutation(
        _HYBRID,
        "bucket.release_grads()",
        "pass",
        ("offload", "optimizer, zeros", "COMPUTE_FIRST"),
    ),
    Mutation(
        _HYBRID, "self._link.fence()", "pass", ("offload", "optimizer", "COPIES_FIRST")
    ),
    Mutation(
        _HYBRID, ", begin=handle.adopt_thread", "", ("offload", "optimizer", "COMPUTE_FIRST")
    ),
    Mutation(
        _STEP, "link.fence()", "pass", ("offload", "optimizer, ahead, clipped", "COPIES_FIRST")
    ),
    Mutation(
        _STEP,
        "self._transfer.wait()",
        "pass",
        ("offload", "optimizer, ahead, clipped", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STEP,
        "link.to_host([(self._kept, self._source)])",
        "link.to_host([(self._kept, self._source)]); del self._source",
        ("offload", "optimizer, ahead, clipped", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STEP, "        self._copy.wait()\n", "", ("offload", "optimizer", "COMPUTE_FIRST")
    ),
    Mutation(
        _STEP,
        "self.bucket.wait_for_upload()",
        "pass",
        ("offload", "optimizer", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STEP, "self.bucket.uploaded.order()", "pass", ("offload", "optimizer", "COMPUTE_FIRST")
    ),
    Mutation(
        _AHEAD, "self.copy.wait()", "pass", ("offload", "optimizer, half, ahead", "COMPUTE_FIRST")
    ),
    Mutation(
        _AHEAD,
        "self.bucket.wait_for_upload()",
        "pass",
        ("offload", "optimizer, half, ahead", "COMPUTE_FIRST"),
    ),
    # Background saves.
    Mutation(
        _STAGING,
        "self._handle.wait_stream(stream, self._handle.current_stream())",
        "pass",
        ("saves", "on the device", "COPIES_FIRST"),
    ),
    Mutation(
        _STAGING,
        "self._event = self._handle.record_event(stream, is_blocking=True)",
        "self._event = self._handle.record_event(stream, is_blocking=True); self._on_device.clear()",
        ("saves", "on the device", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STAGING,
        "record_event(stream, is_blocking=True)",
        "record_event(is_blocking=True)",
        ("saves", "on the device", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STAGING,
        "self._is_copied.set()\n        if self._event is not None:",
        "self._is_copied.set()\n        if False:",
        ("saves", "on the device", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STAGING,
        "self._handle.wait_event(self._event)",
        "pass",
        ("saves", "on the device", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STAGING, "self._handle.adopt_thread()", "pass", ("saves", "on the device", "LAZY")
    ),
    Mutation(
        _SAVES,
        "register_optimizer_step_pre_hook(self.wait_until_staged)",
        "pass",
        ("saves", "on the device", "COMPUTE_FIRST"),
    ),
    # The device.
    Mutation(
        _COPIES,
        "self._handle.wait_event(event, stream)",
        "pass",
        ("offload", "optimizer, half, ahead", "COPIES_FIRST"),
    ),
    Mutation(
        _COPIES, "self._event.synchronize()", "pass", ("offload", "optimizer", "COMPUTE_FIRST")
    ),
    Mutation(
        _COPIES,
        "self._handle.wait_event(self._event)",
        "pass",
        ("offload", "optimizer", "COMPUTE_FIRST"),
    ),
    Mutation(
        _COPIES,
        "record_event(stream, is_blocking=True)",
        "record_event(is_blocking=True)",
        ("offload", "optimizer", "COMPUTE_FIRST"),
    ),
    Mutation(
        _STREAMS,
        "waiting.wait_stream(other)",
        "pass",
        ("offload", "parameters", "COPIES_FIRST"),
    ),
    Mutation(
        _STREAMS,
        ".wait_event(event)",
        ".query()",
        ("offload", "parameters", "COMPUTE_FIRST"),
    ),
]


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
    assert Path(runs.megafsdp.__file__).is_relative_to(root), "the copy is run"
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
    context = multiprocessing.get_context("fork")
    num_ranks = 2 if shown_by[0] == "engine" else 1
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(root, shown_by, rank, folder))
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
    """Return the lines that a program prints, in a process of its own: this one has none of ours."""
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
    """Store what a case shows on the host, with the package as it is."""
    kind, name, _ = shown_by
    if not (root / f"{kind} {name} 0").exists():
        fails, how = _fails(root, (kind, name, ""))
        assert not fails, how


def _is_shown(mutation: Mutation, root: Path, *, searches: bool) -> bool:
    """Apply a mutation to the copy and run what must show it; tell whether it does."""
    kind, name, order = mutation.shown_by
    tried = [mutation.shown_by]
    if searches:
        tried += [(kind, *pair) for pair in itertools.product(_names(f"test_{kind}.CASES"), ORDERS)]
    path = root / "megafsdp" / mutation.path
    text = path.read_text()
    changed = mutation.apply(text)
    # What does not compile would fail for another reason.
    compile(changed, mutation.path, "exec")
    for shown_by in tried:
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


def main(arguments: list[str]) -> int:
    """Apply each mutation that the arguments choose; return how many no test has shown."""
    searches = "--search" in arguments
    texts = [argument for argument in arguments if argument != "--search"]
    chosen = [m for m in MUTATIONS if all(t in m.path + m.old for t in texts)]
    _import_of_others()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(ROOT / "megafsdp", root / "megafsdp")
        return sum(not _is_shown(mutation, root, searches=searches) for mutation in chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
