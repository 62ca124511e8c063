"""Write our checkpoints as Megatron-LM's ``fsdp_dtensor`` ones, in one process on the CPU.

The storage is torch DCP's and torch DCP alone reads it. Tensors go from file to file one at a time.
Names are in names.py, values beside tensors in values.py.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from megafsdp.buffer.dtensor.uneven_layout import whole
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import (
    Chunk,
    Manifest,
    Record,
    TensorEntry,
    path_of,
    write_dcp_metadata,
)
from megafsdp.checkpoint.format.records import RecordWriter
from megafsdp.checkpoint.megatron.names import FLOPS, SCHEDULER, VERSION, TheirNames, group_members
from megafsdp.checkpoint.megatron.values import (
    args_needed_to_load,
    their_group,
    their_rng_state,
    their_schedule,
)
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.errors import CheckpointError, listed

_LOGGER = logging.getLogger("megafsdp.checkpoint")

_OWN_OBJECTS = frozenset({"extra", "lr_scheduler", "optimizer.param_groups"})


def to_megatron(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    precision: str = "bf16",
    transformer_impl: str = "transformer_engine",
    args: Mapping[str, object] | None = None,
    show_progress: bool = False,
) -> Path:
    """Write a checkpoint of ours as Megatron-LM's ``fsdp_dtensor`` does, for it to go on from.

    The storage is torch DCP's, the directory ``iter_<step>`` under a save root with its tracker
    file. The arguments are those that the checkpoint came with, if it came from Megatron-LM, else
    the few that a load compares. Each parameter's step stands beside its moments and in its group:
    Transformer Engine's optimizer looks there, torch's here. One tensor is in memory at a time.

    Args:
        source: Our save root, or one checkpoint's own directory.
        target: The save root to write to.
        step: The step to read; None means the latest.
        precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``: what the Megatron-LM job will run in, on
            which the names of its optimizer states depend.
        transformer_impl: ``"transformer_engine"`` or ``"local"``, as ``--transformer-impl``: where
            the names of norms are.
        args: Further arguments of the job, which go before all others.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The published directory.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or the target's latest
            checkpoint has its step already.
        ValueError: A choice is unknown.
    """
    with CheckpointReader(source, step) as ours:
        manifest = ours.manifest
        names = frozenset(
            key.removeprefix("model.") for key in ours.whole_keys() if key.startswith("model.")
        )
        their_names = TheirNames(names, precision, transformer_impl)
        root = Path(target)
        temporary = on_disk.prepare(root, manifest.step)
        try:
            entries = manifest.tensors.values()
            nbytes = sum(math.prod(e.shape) * e.torch_dtype.itemsize for e in entries)
            with (
                RecordWriter(temporary, 0) as records,
                bytes_bar("convert", nbytes, is_wanted=show_progress) as bar,
            ):
                output = _Output(records, manifest.step)
                _write_tensors(ours, output, their_names, bar)
                _write_rest(ours, output, their_names, given=args or {})
            on_disk.sync_file(output.describe(temporary))
            return on_disk.publish(temporary, root, manifest.step)
        except BaseException:
            if temporary.exists():
                on_disk.remove(temporary)
            raise


@dataclass(slots=True)
class _Output:
    """A torch DCP directory in the making.

    Attributes:
        records: Where payloads go.
        step: The step.
        tensors: What was written, by key.
        objects: Likewise.
        paths: Nested path of each key.
    """

    records: RecordWriter
    step: int
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Record] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    def add(self, path: tuple[str | int, ...], value: object) -> None:
        """Write a value as torch DCP's planner would: nested dicts and lists of dicts apart."""
        if isinstance(value, dict):
            for name, item in value.items():
                self.add((*path, name), item)
            return
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                self.add((*path, index), item)
            return
        key = ".".join(map(str, path))
        if key in self.paths:
            raise CheckpointError.expected(
                "each name once under the names of Megatron-LM",
                f"'{key}' again",
                where="the names of the model's parameters and buffers",
                hint="Rename a module: theirs is the name of one thing only",
            )
        self.paths[key] = path
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            chunk = Chunk(whole(shape), self.records.append_tensor(value))
            dtype = str(value.dtype).removeprefix("torch.")
            self.tensors[key] = TensorEntry(shape, dtype, (chunk,))
        else:
            self.objects[key] = self.records.append_object(value)

    def describe(self, directory: Path) -> Path:
        """Write ``.metadata`` and return its path."""
        manifest = Manifest(self.step, 1, {}, self.tensors, self.objects, {}, {})
        return write_dcp_metadata(manifest, directory, paths=self.paths)


def _write_tensors(
    ours: CheckpointReader, output: _Output, their_names: TheirNames, bar: tqdm
) -> None:
    for key in ours.manifest.tensors:
        if key.startswith("model."):
            path = their_names.model_key(key.removeprefix("model."))
        else:
            _, _, name, state = path_of(key)
            path = their_names.state_key(name, state)
        tensor = ours.tensor(key)
        output.add(path, tensor)
        bar.update(tensor.nbytes)


def _write_rest(
    ours: CheckpointReader,
    output: _Output,
    their_names: TheirNames,
    *,
    given: Mapping[str, object],
) -> None:
    objects = dict(_objects(ours))
    extra = objects.get("extra")
    origin = extra.get("nvidia", {}) if isinstance(extra, dict) else {}
    run = extra.get("run", {}) if isinstance(extra, dict) else {}
    groups = objects.get("optimizer.param_groups", [])
    assert isinstance(groups, list), "save() stores a list of groups"
    num_consumed = run.get("consumed_samples", 0)
    num_scheduled = num_consumed - run.get("skipped_samples", 0)
    schedule = origin.get(SCHEDULER)
    schedule_args: dict[str, object] = {}
    if not schedule:
        own = objects.get("lr_scheduler")
        schedule, schedule_args = their_schedule(
            own if isinstance(own, dict) else None, groups, num_samples=num_scheduled
        )
    for key, value in objects.items():
        if key.startswith("optimizer.state."):
            _, _, name, state = path_of(key)
            output.add(their_names.state_key(name, state), value)
    whole_keys = set(ours.whole_keys())
    for group in groups:
        fields = their_group(group, schedule)
        members = (group_members(name, their_names.names) for name in group["names"])
        for name in itertools.chain.from_iterable(members):
            counted = f"optimizer.state.{name}.step"
            step = {"step": int(ours.tensor(counted).item())} if counted in whole_keys else {}
            for field_name, value in (fields | step).items():
                output.add(their_names.group_key(name, field_name), value)
    foreign = set(origin.get("foreign_args", ()))
    args = {k: v for k, v in origin.get("args", {}).items() if k not in foreign}
    args = args_needed_to_load(ours, their_names.names) | schedule_args | args
    args |= {"iteration": output.step, "consumed_train_samples": num_consumed} | dict(given)
    output.add(("args",), argparse.Namespace(**args))
    output.add(("checkpoint_version",), VERSION)
    output.add(("iteration",), output.step)
    output.add((FLOPS,), origin.get(FLOPS, 0))
    output.add((SCHEDULER,), schedule)
    rng = [objects[f"rng.{r}"] for r in range(len(objects)) if f"rng.{r}" in objects]
    if rng:
        states = [their_rng_state(state) for state in rng if isinstance(state, dict)]
        output.add(("rng_state", "(0, 0)"), states)


def _objects(ours: CheckpointReader) -> Iterator[tuple[str, object]]:
    """Yield the objects that have a place in their format; the log names the others."""
    left_out = []
    for key in ours.manifest.objects:
        if key in _OWN_OBJECTS or key.startswith(("optimizer.state.", "rng.")):
            yield key, ours.object(key)
        elif key != "common":
            left_out.append(key)
    if left_out:
        _LOGGER.warning("'%s': Megatron-LM has no place for %s", ours.directory, listed(left_out))
