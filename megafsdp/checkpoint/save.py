"""Save a checkpoint: every rank writes what it owns, rank 0 describes and publishes it.

Three small collectives, whatever the number of tensors: rank 0 announces the temporary directory,
the ranks tell it where their records lie (or what went wrong), rank 0 announces the published
directory. What to write is arithmetic on every rank. A save has two halves: :func:`begin_save`
lists what there is, in the caller's thread, and :func:`finish_save` writes it, in any. Which ranks
hold what on disk is the manifest's business, the order of file-system steps ``directory``'s.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
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
from megafsdp.checkpoint.background.pending_save import surface_failure
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import (
    Chunk,
    write_dcp_metadata,
    write_manifest,
)
from megafsdp.checkpoint.format.plain_values import plain
from megafsdp.checkpoint.format.records import RecordWriter
from megafsdp.checkpoint.format.regions import Region, ReplicaBalance, local_regions, local_view
from megafsdp.checkpoint.format.rng import rng_state
from megafsdp.checkpoint.state.canonical import (
    CanonicalState,
    canonical_weights,
    model_state,
    optimizer_state,
    parameter_names,
)
from megafsdp.checkpoint.state.merge import (
    Written,
    checksum_of_common,
    describe,
    library_versions,
    own_table,
)
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp.params.meta import require_initialized

_log = logging.getLogger("megafsdp.checkpoint")


class HasState(Protocol):
    """Something with a state dict of plain values: a scheduler, a loss scaler."""

    def state_dict(self) -> dict:
        """Return the state."""

    def load_state_dict(self, state_dict: dict, /) -> object:
        """Take the state over."""


@dataclass(slots=True)
class OwnTensor:
    """A region that this rank writes.

    Attributes:
        key: Name in the checkpoint.
        region: Which part of the tensor.
        data: Its elements: a plain tensor on any device.
    """

    key: str
    region: Region
    data: torch.Tensor


@dataclass(slots=True)
class BegunSave:
    """A save of which the rest can be done by any thread, once on every rank.

    Attributes:
        temporary: The directory that rank 0 has made.
        step: Training step.
        keep: Retention: ``keep_last`` and ``keep_every``.
        state: What the ranks hold together; None after an error.
        tensors: What this rank writes.
        objects: Non-tensor values that this rank writes, by key.
        error: What went wrong on this rank.
    """

    temporary: Path
    step: int
    keep: dict[str, int | None]
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
) -> Path:
    """Save a training state and publish it by one atomic rename; collective over all ranks.

    Works with and without process groups, for sharded and plain modules. Buffers that differ
    between ranks are stored as rank 0 has them, the random states per rank. Saving the step that is
    already the latest published one is refused; any other directory of the same step is replaced.
    Waits for a background save that is still going on. Allocates no memory on the CPU, and host
    memory for one tensor at a time elsewhere.

    Args:
        directory: The save root, on a file system that all ranks share.
        step: Training step; names the directory, e.g. ``iter_0000050``.
        model: Its parameters (main weights), persistent buffers and extra states are stored.
        optimizer: Any ``torch.optim.Optimizer`` over the model's parameters.
        lr_scheduler: Stored by its ``state_dict()``.
        loss_scaler: Stored by its ``state_dict()``.
        extra: Plain values and plain tensors of the caller, such as consumed samples and
            configuration; rank 0's are stored.
        keep_last: Number of newest checkpoints to keep afterwards; None keeps all.
        keep_every: Keep also steps that are multiples of this.

    Returns:
        The published directory, on all ranks.

    Raises:
        CheckpointError: Any rank could not write; raised on all ranks. What was published before
            stays. Or a background save has failed, and nobody has been told.
        ValueError: The step or a retention number is out of range; no rank has communicated yet.
    """
    surface_failure()
    return finish_save(
        begin_save(
            directory,
            step=step,
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loss_scaler=loss_scaler,
            extra=extra,
            keep_last=keep_last,
            keep_every=keep_every,
        )
    )


def begin_save(
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    extra: Mapping[str, object] | None = None,
    **stateful: HasState | None,
) -> BegunSave:
    """List what to save and make the temporary directory; one collective over all ranks.

    Values that are no tensors, random states and buffers are copied; other tensors are not, and
    must not change until :func:`finish_save` has written them or somebody has put copies in their
    place.

    Args:
        directory: As for :func:`save`, like all that follow.
        step: Training step.
        model: The model.
        optimizer: Its optimizer.
        keep_last: Retention.
        keep_every: Retention.
        extra: The caller's values.
        stateful: Objects with a state dict, by the name of their section.

    Raises:
        CheckpointError: The step is published already; raised on all ranks. Errors in listing are
            kept for :func:`finish_save`.
        ValueError: The step or a retention number is out of range.
    """
    _require_counts(step, keep_last, keep_every)
    # The rest of a save may come after a change of the working directory.
    root = Path(directory).absolute()
    rank, _ = rank_and_world_size()
    state, error = attempt(
        lambda: _collect(model, optimizer, step=step, stateful=stateful, extra=extra)
    )
    tensors: list[OwnTensor] | None = None
    objects: dict[str, object] = {}
    if state is not None:
        ready = state
        tensors, error = attempt(lambda: _own_tensors(ready))
        writers = {key: holders[0] for key, holders in state.own.items()}
        objects = {k: v for k, v in state.objects.items() if writers.get(k, 0) == rank}
    if error is None:
        objects[f"rng.{rank}"], error = attempt(rng_state)
    keep = {"keep_last": keep_last, "keep_every": keep_every}
    temporary = on_rank_zero(lambda: on_disk.prepare(root, step))
    return BegunSave(temporary, step, keep, state, tensors or [], objects, error)


def finish_save(begun: BegunSave, group: dist.ProcessGroup | None = None) -> Path:
    """Write, describe and publish what was begun; two small collectives over all ranks.

    Args:
        begun: The begun save.
        group: All ranks, over another communicator than the default one: a thread beside the main
            one needs its own.

    Returns:
        The published directory, on all ranks.

    Raises:
        CheckpointError: Any rank has failed; raised on all ranks.
    """
    written, error = None, begun.error
    if error is None:
        # As bytes, which rank 0 turns into objects once it waits for nobody.
        written, error = attempt(lambda: pickle.dumps(_write(begun)))
    try:
        outcomes = gather_on_rank_zero(written, error, group)
        return on_rank_zero(lambda: _publish(begun, outcomes), group)
    except CheckpointError:
        if rank_and_world_size()[0] == 0 and begun.temporary.exists():
            on_disk.remove(begun.temporary)
        raise


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from walking the many small objects of a manifest again and again.

    By its threshold, as the switch may be the caller's: other threads go on meanwhile.
    """
    threshold, *others = gc.get_threshold()
    gc.set_threshold(0, *others)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(threshold, *others)


def _require_counts(step: int, keep_last: int | None, keep_every: int | None) -> None:
    for name, value, least in (
        ("step", step, 0),
        ("keep_last", keep_last, 1),
        ("keep_every", keep_every, 1),
    ):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(
                expected(
                    f"{name} to be a whole number of at least {least}",
                    repr(value),
                    where="checkpoint.save()",
                    hint="Give None to keep all checkpoints" if least else "Count steps from 0",
                )
            )


def _collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    step: int,
    stateful: Mapping[str, HasState | None],
    extra: Mapping[str, object] | None,
) -> CanonicalState:
    require_initialized([model], where="checkpoint.save()")
    state = model_state(model)
    if optimizer is not None:
        state.update(optimizer_state(optimizer, parameter_names(model)))
        for key, _, weight in canonical_weights(optimizer, parameter_names(model)):
            state.tensors[key] = weight
    for key, source in stateful.items():
        if source is not None:
            state.objects[key] = plain(key, source.state_dict())
    state.objects["extra"] = plain("extra", dict(extra or {}))
    state.objects["common"] = {
        "step": step,
        "world_size": rank_and_world_size()[1],
        "versions": library_versions(),
    }
    return state


def _own_tensors(state: CanonicalState) -> list[OwnTensor]:
    """List the regions that this rank writes; buffers, which a forward may change, as copies."""
    rank, world_size = rank_and_world_size()
    balance = ReplicaBalance(rank, world_size)
    own = []
    for key, tensor in state.tensors.items():
        for region in local_regions(key, tensor):
            if key not in state.rank_zero:
                if balance.is_mine(tensor, region):
                    own.append(OwnTensor(key, region, local_view(tensor, region)))
            elif rank == 0:
                own.append(OwnTensor(key, region, local_view(tensor, region).clone()))
    return own


def _write(begun: BegunSave) -> Written:
    """Write this rank's share of the state to its own file."""
    assert begun.state is not None, "ranks that failed to collect do not write"
    rank, _ = rank_and_world_size()
    written = Written(checksum_of_common(begun.state), own_table(begun.state))
    with RecordWriter(begun.temporary, rank) as writer:
        on_disk.reached("file opened")
        for own in begun.tensors:
            record = writer.append_tensor(own.data)
            written.chunks.append((own.key, Chunk(own.region, record)))
        for key, value in begun.objects.items():
            written.objects[key] = writer.append_object(value)
        on_disk.reached("records written")
    on_disk.reached("file synced")
    written.files[writer.file_name] = writer.nbytes
    return written


def _describe(begun: BegunSave, sent: list[bytes]) -> None:
    """Write what describes the records, from what every rank has pickled of its own."""
    assert begun.state is not None, "ranks that failed to collect have raised"
    parts: list[Written] = [pickle.loads(part) for part in sent]
    manifest = describe(begun.step, begun.state, parts)
    temporary = begun.temporary
    described = write_dcp_metadata(manifest, temporary)
    on_disk.sync_file(described)
    manifest.files[described.name] = described.stat().st_size
    on_disk.reached("DCP metadata written")
    on_disk.sync_file(write_manifest(manifest, temporary))
    on_disk.reached("manifest written")


def _publish(begun: BegunSave, outcomes: list[Outcome[Any]] | None) -> Path:
    """Describe what all ranks wrote and publish it; rank 0 alone."""
    assert outcomes is not None, "rank 0 gathers"
    sent: list[bytes] = values_of(outcomes, begun.error)
    on_disk.reached("records gathered")
    with _no_garbage_collection():
        _describe(begun, sent)
    temporary = begun.temporary
    root = temporary.parent
    final = on_disk.publish(temporary, root, begun.step)
    removed = on_disk.prune(root, **begun.keep)
    _log.info("saved step %d to '%s'; removed steps %s", begun.step, final, removed)
    return final
