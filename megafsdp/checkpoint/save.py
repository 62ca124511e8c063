"""Save a checkpoint: every rank writes what it owns, rank 0 describes and publishes it.

A save has two halves, so that a background thread can do the second one::

    every rank   begin_save    list the state, choose own regions     no collective
    rank 0                     make the temporary directory           broadcast its draft
    every rank   finish_save   write and sync its own file            gather chunks and errors
    rank 0                     write .metadata and the manifest;
                               rename the directory; move the         broadcast the final path
                               tracker; remove old steps

These three small collectives suffice for any number of tensors: each rank computes locally what it
writes. Under delayed scaling an all-reduce of maxima precedes them. The next forward would begin
with it, so the histories are stored as they would be then. No file is visible under its final name
before all files are on the disk. An error of any rank is raised on all, and then nothing is
published.

state/canonical.py turns a model into tensors by key. The file formats are in format/manifest.py and
format/records.py, the order of operations on a disk in format/save_root.py, and in an object store,
which has no renames, in format/store_root.py.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megafsdp.buffer.comm.agreement import (
    Outcome,
    attempt,
    gather_on_rank_zero,
    on_rank_zero,
    rank_and_world_size,
    values_of,
)
from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.background.pending_save import SAVES
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import Chunk
from megafsdp.checkpoint.format.plain_values import plain, whole_number
from megafsdp.checkpoint.format.publication import saves_to
from megafsdp.checkpoint.format.records import RecordSums, RecordWriter
from megafsdp.checkpoint.format.regions import ReplicaBalance, local_regions, local_view
from megafsdp.checkpoint.format.rng import rng_state
from megafsdp.checkpoint.format.save_root import Draft
from megafsdp.checkpoint.state.canonical import (
    CanonicalState,
    canonical_weights,
    model_state,
    optimizer_state,
    parameter_names,
)
from megafsdp.checkpoint.state.histories import history_state
from megafsdp.checkpoint.state.merge import (
    Written,
    checksum_of_common,
    common_facts,
    describe,
    model_degrees,
    table_of,
)
from megafsdp.checkpoint.storage.locations import Location, location_of
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp.params.meta import require_initialized
from megafsdp.fsdp.weight_sync import roll_histories

_LOGGER = logging.getLogger("megafsdp.checkpoint")


class HasState(Protocol):
    """Something with a state dict of plain values: a scheduler, a loss scaler."""

    def state_dict(self) -> dict:
        """Return the state."""

    def load_state_dict(self, state_dict: dict, /) -> object:
        """Load the state."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The caller's objects: what a save stores and a load fills.

    Attributes:
        model: The model; None if it is not loaded.
        optimizer: Its optimizer.
        lr_scheduler: Has a state dict of plain values.
        loss_scaler: Likewise.
        extra: Plain values of the caller, for a save.

    Raises:
        TypeError: The model is no module, or several optimizers are given.
    """

    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: HasState | None
    loss_scaler: HasState | None
    extra: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        """Refuse arguments that would fail later with a message that does not help."""
        if not isinstance(self.model, nn.Module | None):
            raise TypeError(
                expected(
                    "a module",
                    f"a {type(self.model).__name__}",
                    where="model= of checkpoint.save(), async_save() or load()",
                    hint="Pass the module itself, not its state dict; several as one ModuleList",
                )
            )
        if isinstance(self.optimizer, list | tuple):
            raise TypeError(
                expected(
                    "one optimizer",
                    f"a {type(self.optimizer).__name__} of {len(self.optimizer)}",
                    where="optimizer= of checkpoint.save(), async_save() or load()",
                    hint="Build one optimizer of several parameter groups, or save and load the "
                    "model with each optimizer in a directory of its own",
                )
            )

    def stateful(self) -> dict[str, HasState]:
        """Return the objects with a state dict, by the section that stores it."""
        by_section = {"lr_scheduler": self.lr_scheduler, "loss_scaler": self.loss_scaler}
        return {section: own for section, own in by_section.items() if own is not None}

    def sections(self) -> set[str]:
        """Return the sections of a checkpoint that a load should use in full."""
        own = {"model": self.model, "optimizer": self.optimizer}
        return {name for name, target in own.items() if target is not None} | set(self.stateful())


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints stay after a save.

    Attributes:
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_every: Keep also steps that are multiples of this.
    """

    keep_last: int | None = None
    keep_every: int | None = None


@dataclass(slots=True)
class OwnTensor:
    """A region that this rank writes.

    Attributes:
        key: Name in the checkpoint.
        region: Which part of the tensor.
        data: Its elements: a plain tensor on any device.
        is_copy: Whether ranks of another mesh write the region; this rank only computes the
            checksum, to be compared.
    """

    key: str
    region: Region
    data: torch.Tensor
    is_copy: bool = False


@dataclass(slots=True)
class BegunSave:
    """A begun save; any thread can finish it, once on every rank.

    Attributes:
        draft: Where all ranks write; rank 0 has made it.
        retention: Which checkpoints stay afterwards.
        state: This rank's view of the state to store; None after an error.
        tensors: What this rank writes.
        objects: Non-tensor values that this rank writes, by key.
        error: What went wrong on this rank.
    """

    draft: Draft
    retention: Retention
    state: CanonicalState | None
    tensors: list[OwnTensor]
    objects: dict[str, object]
    error: Exception | None


def save(
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: HasState | None = None,
    loss_scaler: HasState | None = None,
    extra: Mapping[str, object] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Location:
    """Save a training state and publish it atomically; collective over all ranks.

    On a disk a rename publishes it, in a store a manifest that is written last.

    Works with and without process groups, for sharded and plain modules. Buffers are stored as rank
    0 has them, random states per rank. Saving the step that is already the latest published one is
    refused; any other directory of the same step is replaced. A background save that is still in
    flight is waited for. Large tensors on the CPU are written without a copy; those on a device
    need host memory for one tensor at a time. A store also needs a buffer of 64 MiB for one part.

    Args:
        directory: The save root, on a file system that all ranks share, or the URL of a folder in
            an object store, such as ``s3://bucket/run``.
        step: Training step; names the directory, e.g. ``iter_0000050``.
        model: Its parameters (main weights), persistent buffers and extra states are stored.
        optimizer: Any ``torch.optim.Optimizer`` over the model's parameters.
        lr_scheduler: Stored by its ``state_dict()``.
        loss_scaler: Stored by its ``state_dict()``.
        extra: Plain values and plain tensors of the caller, such as consumed samples and
            configuration; rank 0's are stored.
        keep_last: Number of newest checkpoints, by step, to keep afterwards; None keeps all.
        keep_every: Keep also steps that are multiples of this.

    Returns:
        The published directory, on all ranks.

    Raises:
        CheckpointError: Any rank could not write, or has another step or directory than rank 0, or
            a number out of range; raised on all ranks. What was published before stays. Or a
            background save has failed, and no call has raised that yet.
        TypeError: The model is no module, or several optimizers are given.
        ValueError: The step or a retention number is out of range on rank 0 and on this rank.
    """
    SAVES.raise_failure()
    state = TrainingState(model, optimizer, lr_scheduler, loss_scaler, extra)
    return finish_save(begin_save(directory, step, state, Retention(keep_last, keep_every)))


def begin_save(
    directory: str | os.PathLike[str], step: int, given: TrainingState, retention: Retention
) -> BegunSave:
    """List what to save and make the temporary directory; one collective over all ranks.

    Under delayed scaling there is a second one.

    Non-tensor values, random states and buffers are copied. Other tensors are not: they must not
    change until :func:`finish_save` has written them, or the caller has replaced them by copies.

    Args:
        directory: The save root.
        step: Training step.
        given: What to save.
        retention: Which checkpoints to keep afterwards.

    Raises:
        CheckpointError: The step is published already, or rank 0 has refused its arguments; raised
            on all ranks. Errors in the listing, and in other ranks' arguments, are raised by
            :func:`finish_save`, where all ranks meet.
        ValueError: The step or a retention number is out of range on rank 0 and on this rank.
    """
    # A rank with wrong arguments goes on: the others wait in the first collective.
    checked, refusal = attempt(lambda: _checked(directory, step, retention))
    root, step = checked or (None, step)
    rank, _ = rank_and_world_size()
    if given.model is not None:
        roll_histories(given.model)
    state, error = attempt(lambda: _collect(given, step))
    tensors: list[OwnTensor] | None = None
    objects: dict[str, object] = {}
    if state is not None:
        ready = state
        tensors, error = attempt(lambda: _own_tensors(ready))
        writers = {key: holders[0] for key, holders in state.ranks_of.items()}
        objects = {k: v for k, v in state.objects.items() if writers.get(k, 0) == rank}
    if error is None:
        objects[f"rng.{rank}"], error = attempt(rng_state)
    # A rank with an error goes on too: the others wait in this collective.
    try:
        draft, wanted = on_rank_zero(lambda: (_prepare(root, step, refusal), str(directory)))
    except CheckpointError:
        if refusal is not None:
            raise refusal from None
        raise
    if refusal is None:
        refusal = _mismatch((step, str(directory)), (draft.step, wanted))
    return BegunSave(draft, retention, state, tensors or [], objects, refusal or error)


def finish_save(begun: BegunSave, group: dist.ProcessGroup | None = None) -> Location:
    """Write, describe and publish what was begun; two small collectives over all ranks.

    Args:
        begun: The begun save.
        group: A group of all ranks; a background thread needs one of its own. None means the
            default group.

    Returns:
        The published directory, on all ranks.

    Raises:
        CheckpointError: Any rank has failed; raised on all ranks.
    """
    written, error = None, begun.error
    if error is None:
        written, error = attempt(lambda: _write(begun))
    try:
        outcomes = gather_on_rank_zero(written, error, group)
        return on_rank_zero(lambda: _publish(begun, outcomes), group)
    except CheckpointError:
        if rank_and_world_size()[0] == 0:
            saves_to(begun.draft.root).discard(begun.draft)
        raise


@contextlib.contextmanager
def _disk_errors(root: Location, step: int) -> Iterator[None]:
    """Convert errors of the disk to ours, as they name no step and often no file."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "Make room on its disk" if is_full else "Mend what the system names"
        raise CheckpointError.expected(
            f"to write step {step}",
            f"{type(error).__name__}: {error}",
            where=f"'{root}'",
            hint=f"{cure}, or save to another folder; what was published before stays",
        ) from error


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking the many small objects of a manifest again and again.

    By the threshold, not gc.disable(): the caller may use that in other threads meanwhile.
    """
    threshold, *others = gc.get_threshold()
    gc.set_threshold(0, *others)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(threshold, *others)


def _checked(
    directory: str | os.PathLike[str], step: int, retention: Retention
) -> tuple[Location, int]:
    """Check this rank's arguments; return the absolute save root and the step."""
    for name, value, least in (
        ("step", step, 0),
        ("keep_last", retention.keep_last, 1),
        ("keep_every", retention.keep_every, 1),
    ):
        if value is not None and whole_number(value, least) is None:
            raise ValueError(
                expected(
                    f"{name} to be a whole number of at least {least}",
                    repr(value),
                    where="checkpoint.save()",
                    hint="Give None to keep all checkpoints" if least else "Count steps from 0",
                )
            )
    # Absolute: the working directory may change before the rest of the save runs.
    return location_of(directory).absolute(), int(step)


def _prepare(root: Location | None, step: int, refusal: Exception | None) -> Draft:
    """Make the temporary directory, unless the arguments are refused; rank 0 only."""
    if refusal is not None:
        raise refusal
    assert root is not None, "arguments that are not refused name a root"
    with _disk_errors(root, step):
        return saves_to(root).prepare(step)


def _mismatch(own: tuple[int, str], wanted: tuple[int, str]) -> CheckpointError | None:
    """Return an error if step or directory differ from rank 0's, else None.

    Directories are compared as they were given: working directories may differ between ranks.
    """
    if own == wanted:
        return None
    return CheckpointError.expected(
        f"step {wanted[0]} in '{wanted[1]}', as on rank 0",
        f"step {own[0]} in '{own[1]}'",
        where="checkpoint.save()",
        hint="Save the same step to the same directory on all ranks",
    )


def _collect(given: TrainingState, step: int) -> CanonicalState:
    """List the state of this rank under its canonical names."""
    assert given.model is not None, "a save has a model"
    require_initialized([given.model], where="checkpoint.save()")
    state = model_state(given.model)
    state.update(history_state(given.model))
    if given.optimizer is not None:
        names = parameter_names(given.model)
        state.update(optimizer_state(given.optimizer, names))
        for key, _, weight in canonical_weights(given.optimizer, names):
            state.tensors[key] = weight
    for section, source in given.stateful().items():
        state.objects[section] = plain(section, source.state_dict())
    state.objects["extra"] = plain("extra", dict(given.extra or {}))
    degrees = model_degrees(given.model)
    state.objects["common"] = common_facts(step, rank_and_world_size()[1], degrees)
    return state


def _own_tensors(state: CanonicalState) -> list[OwnTensor]:
    """List the regions that this rank writes; buffers are copied, as a forward may change them."""
    rank, world_size = rank_and_world_size()
    balance = ReplicaBalance(rank, world_size)
    own = []
    for key, tensor in state.tensors.items():
        # A key that not all ranks have is one tensor on one mesh: meshes beside it have others.
        is_copy = key not in state.ranks_of and not balance.is_first(tensor)
        for region in local_regions(key, tensor):
            if key not in state.rank_zero:
                if balance.is_mine(tensor, region):
                    own.append(OwnTensor(key, region, local_view(tensor, region), is_copy))
            elif rank == 0:
                own.append(OwnTensor(key, region, local_view(tensor, region).clone()))
    return own


def _write(begun: BegunSave) -> bytes:
    """Write this rank's share of the state; return the description of it, pickled."""
    # As bytes: rank 0 unpickles them after the gather, without garbage collection.
    with _disk_errors(begun.draft.root, begun.draft.step):
        return pickle.dumps(_write_share(begun))


def _write_share(begun: BegunSave) -> Written:
    """Write this rank's share of the state to its own file."""
    assert begun.state is not None, "ranks that failed to collect do not write"
    rank, _ = rank_and_world_size()
    written = Written(checksum_of_common(begun.state), table_of(begun.state, begun.state.ranks_of))
    sums = RecordSums()
    with RecordWriter(begun.draft.folder, rank, suffix=begun.draft.suffix) as writer:
        save_root.reached("file opened")
        for own in begun.tensors:
            record = (sums if own.is_copy else writer).append_tensor(own.data)
            of_kind = written.copies if own.is_copy else written.chunks
            of_kind.append((own.key, Chunk(own.region, record)))
        for key, value in begun.objects.items():
            written.objects[key] = writer.append_object(value)
        save_root.reached("records written")
    save_root.reached("file synced")
    written.files[writer.file_name] = writer.nbytes
    return written


def _publish(begun: BegunSave, outcomes: list[Outcome[Any]] | None) -> Location:
    """Describe what all ranks wrote and publish it; rank 0 only."""
    assert outcomes is not None, "rank 0 gathers"
    sent: list[bytes] = values_of(outcomes, begun.error)
    assert begun.state is not None, "ranks that failed to collect have raised"
    save_root.reached("records gathered")
    with _no_garbage_collection():
        parts: list[Written] = [pickle.loads(part) for part in sent]
        manifest = describe(begun.draft.step, begun.state, parts)
        saves = saves_to(begun.draft.root)
        with _disk_errors(begun.draft.root, begun.draft.step):
            saves.describe(manifest, begun.draft)
            final = saves.publish(begun.draft)
    removed = saves.prune(
        keep_last=begun.retention.keep_last, keep_every=begun.retention.keep_every
    )
    _LOGGER.info("saved step %d to '%s'; removed steps %s", begun.draft.step, final, removed)
    return final
