"""Write our checkpoints in Megatron-LM's ``fsdp_dtensor`` format, in one process on the CPU.

The storage is torch DCP's, so torch DCP can read it by itself. Tensors go from file to file one at
a time. Names are in names.py, values beside tensors in values.py.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from megafsdp.checkpoint.megatron.names import (
    FLOPS,
    SCHEDULER,
    VERSION,
    TheirNames,
    group_members,
    is_output_norm,
    is_stack,
)
from megafsdp.checkpoint.megatron.values import (
    args_needed_to_load,
    their_group,
    their_rng_state,
    their_schedule,
)
from megafsdp.checkpoint.storage.locations import local_path
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
    """Write our checkpoint as a Megatron-LM ``fsdp_dtensor`` one, which its training can resume.

    The storage is torch DCP's, in the directory ``iter_<step>`` under a save root with its tracker
    file. The job's arguments are those of the original job if the checkpoint came from Megatron-LM,
    else the few that a load compares. The step of each parameter is stored twice: in its group,
    where Transformer Engine's optimizer reads it, and beside its moments, where torch's does. One
    tensor is in memory at a time.

    Each expert of a stack gets tensors of its own. Their names are those of a grouped layer
    (``linear_fc1.weight3``) if the arguments have ``moe_grouped_gemm``, the default with
    Transformer Engine, else those of a sequential one (``local_experts.3.linear_fc1.weight``). The
    output norm of a gated delta net is stored as weight - 1 if the arguments have
    ``apply_layernorm_1p``, the default for such a model: we store its other norms in that form too.

    Args:
        source: Our save root, or one checkpoint's own directory.
        target: The save root to write to.
        step: The step to read; None means the latest.
        precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``: the precision of the Megatron-LM job. The
            names of its optimizer states depend on it.
        transformer_impl: ``"transformer_engine"`` or ``"local"``, as ``--transformer-impl``. The
            names of norms depend on it.
        args: Further arguments of the job; they override all others.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The published directory.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or its step is published in the
            target already or lower than the target's latest.
        ValueError: A choice is unknown.
    """
    with CheckpointReader(source, step) as ours:
        manifest = ours.manifest
        names = frozenset(
            key.removeprefix("model.") for key in ours.whole_keys() if key.startswith("model.")
        )
        model_args = _model_args(ours, names, args or {}, transformer_impl)
        is_grouped = bool(model_args.get("moe_grouped_gemm"))
        their_names = TheirNames(
            names, precision, transformer_impl, _num_experts(ours, names), is_grouped
        )
        root = local_path(target, purpose="a checkpoint of Megatron-LM")
        on_disk.require_ahead(root, manifest.step, is_chosen=False)
        temporary = on_disk.prepare(root, manifest.step)
        try:
            entries = manifest.tensors.values()
            nbytes = sum(math.prod(e.shape) * e.torch_dtype.itemsize for e in entries)
            with (
                RecordWriter(temporary, 0) as records,
                bytes_bar("convert", nbytes, is_wanted=show_progress) as bar,
            ):
                output = _Output(records, manifest.step)
                has_less_one = bool(model_args.get("apply_layernorm_1p"))
                _write_tensors(ours, output, their_names, bar, has_less_one=has_less_one)
                _write_rest(ours, output, their_names, model_args, given=args or {})
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
        """Write a value as torch DCP's planner would: flatten nested dicts and lists of dicts."""
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
    ours: CheckpointReader,
    output: _Output,
    their_names: TheirNames,
    bar: tqdm,
    *,
    has_less_one: bool,
) -> None:
    for key in ours.manifest.tensors:
        if key.startswith("quantize."):
            continue  # Histories of delayed scaling begin anew there, as they do in their jobs.
        tensor = ours.tensor(key)
        if key.startswith("model."):
            name = key.removeprefix("model.")
            if has_less_one and is_output_norm(name):
                tensor = tensor - 1
            paths = [their_names.model_key(one) for one in their_names.of_experts(name)]
        else:
            _, _, name, state = path_of(key)
            paths = [their_names.state_key(one, state) for one in their_names.of_experts(name)]
        for path, piece in zip(paths, _of_experts(tensor, name, their_names), strict=True):
            output.add(path, piece)
        bar.update(tensor.nbytes)


def _of_experts(tensor: torch.Tensor, name: str, their_names: TheirNames) -> list[torch.Tensor]:
    """Return the tensor of each expert in a stack; a scalar is repeated for each expert."""
    if name not in their_names.num_experts:
        return [tensor]
    return list(tensor) if tensor.ndim else [tensor] * their_names.num_experts[name]


def _num_experts(ours: CheckpointReader, names: Collection[str]) -> dict[str, int]:
    """Return the number of experts of each stack by name: of whole stacks and of their parts."""
    stored = (k.removeprefix("model.") for k in ours.manifest.tensors if k.startswith("model."))
    shapes = {n: ours.shape(f"model.{n}") for n in {*names, *stored} if is_stack(n)}
    return {name: shape[0] for name, shape in shapes.items() if len(shape) == 3}


def _model_args(
    ours: CheckpointReader,
    names: Collection[str],
    given: Mapping[str, object],
    transformer_impl: str,
) -> dict[str, object]:
    """Return the job's model arguments: derived, then the checkpoint's own, then given ones."""
    args = args_needed_to_load(ours, names)
    if any(map(is_stack, names)):
        args["moe_grouped_gemm"] = transformer_impl == "transformer_engine"
    origin = _origin(ours.object("extra") if "extra" in ours.manifest.objects else None)
    foreign = set(origin.get("foreign_args", ()))
    args |= {k: v for k, v in origin.get("args", {}).items() if k not in foreign}
    return args | dict(given)


def _origin(extra: object) -> dict[str, Any]:
    """Return what an import from Megatron-LM stored in the extra of a checkpoint."""
    return extra.get("nvidia", {}) if isinstance(extra, dict) else {}


def _write_rest(
    ours: CheckpointReader,
    output: _Output,
    their_names: TheirNames,
    model_args: Mapping[str, object],
    *,
    given: Mapping[str, object],
) -> None:
    objects = dict(_objects(ours))
    extra = objects.get("extra")
    origin = _origin(extra)
    run = extra.get("run", {}) if isinstance(extra, dict) else {}
    groups = objects.get("optimizer.param_groups", [])
    assert isinstance(groups, list), "save() stores a list of groups"
    schedule, schedule_args = _schedule(origin, run, groups, own=objects.get("lr_scheduler"))
    for key, value in objects.items():
        if key.startswith("optimizer.state."):
            _, _, name, state = path_of(key)
            for one in their_names.of_experts(name):
                output.add(their_names.state_key(one, state), value)
    whole_keys = set(ours.whole_keys())
    for group in groups:
        fields = their_group(group, schedule)
        members = (group_members(name, their_names.names) for name in group["names"])
        for name in itertools.chain.from_iterable(members):
            counted = f"optimizer.state.{name}.step"
            step = {"step": int(ours.tensor(counted).item())} if counted in whole_keys else {}
            for one in their_names.of_experts(name):
                for field_name, value in (fields | step).items():
                    output.add(their_names.group_key(one, field_name), value)
    args = schedule_args | dict(model_args)
    num_consumed = run.get("consumed_samples", 0)
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


def _schedule(
    origin: Mapping[str, Any], run: Mapping[str, Any], groups: list[dict], *, own: object
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields of the schedule, the original job's if there is one, and args for it."""
    num_scheduled = run.get("consumed_samples", 0) - run.get("skipped_samples", 0)
    schedule = dict(origin.get(SCHEDULER) or {})
    if schedule:
        # A run may have gone on since the import.
        return schedule | ({"num_steps": num_scheduled} if "consumed_samples" in run else {}), {}
    state = own if isinstance(own, dict) else None
    return their_schedule(state, groups, num_samples=num_scheduled)


def _objects(ours: CheckpointReader) -> Iterator[tuple[str, object]]:
    """Yield the objects that Megatron-LM's format has a place for; log the others."""
    left_out = []
    for key in ours.manifest.objects:
        if key in _OWN_OBJECTS or key.startswith(("optimizer.state.", "rng.")):
            yield key, ours.object(key)
        elif key != "common":
            left_out.append(key)
    if left_out:
        _LOGGER.warning("'%s': Megatron-LM has no place for %s", ours.directory, listed(left_out))
