"""One ``torch.save`` file: a checkpoint as the nested state dict that users of plain torch expect.

``{"model": {fqn: tensor}, "optimizer": {"state": {fqn: {...}}, "param_groups": [...]}}``: whole
tensors, fused parameters joined. ``model`` is what ``nn.Module.load_state_dict`` takes, and
``optimizer`` what ``torch.optim.Optimizer.load_state_dict`` and torch's
``set_optimizer_state_dict`` take; the other sections stand beside them under their own keys.

Both directions go tensor by tensor: a file is mapped rather than read, and tensors to be written
are first put into scratch files beside the target, because ``torch.save`` takes all at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import path_of, section_of
from megafsdp.checkpoint.state.canonical import (
    EXTRA_STATE,
    GROUPS_KEY,
    MEMBER_NAMES,
    reserved_option,
    state_key,
)
from megafsdp.checkpoint.state.merge import common_facts
from megafsdp.checkpoint.storage.locations import Location, local_path
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.stored_like import STATE_PREFIX, FusedLike
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError


def to_torch(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    show_progress: bool = False,
) -> Path:
    """Write a checkpoint as one ``torch.save`` file; local.

    It needs memory for one tensor, and disk space for twice the tensors.

    Args:
        source: The save root, or one checkpoint's own directory.
        destination: The file; an existing one is replaced in one step.
        step: The step; None means the latest published one.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The file.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, the destination is a directory,
            or the disk is full; nothing is left behind.
    """
    file = local_path(destination, purpose="a torch.save file")
    _require_folder(file)
    with CheckpointReader(source, step) as reader, save_root.scratch_beside(file) as scratch:
        by_key: dict[str, object] = {}
        total_nbytes = sum(map(reader.nbytes, reader.whole_keys()))
        with bytes_bar("convert", total_nbytes, is_wanted=show_progress) as bar:
            for number, key in enumerate(reader.whole_keys()):
                mapped = _mapped(Path(scratch, str(number)), reader.shape(key), reader.dtype(key))
                reader.read_into(mapped, key)
                by_key[key] = mapped
                bar.update(mapped.nbytes)
        # A tied tensor is one tensor with two names; torch.save stores it once.
        by_key.update((alias, by_key[key]) for alias, key in reader.whole_aliases().items())
        by_key.update(_objects(reader))
        scratch_file = Path(scratch, "whole")
        try:
            torch.save(_nested(by_key), scratch_file)
        except (OSError, RuntimeError) as error:
            # torch's writer raises RuntimeError if the disk is full.
            raise _cannot_write(scratch_file, total_nbytes, error) from error
        # Synced before the rename: a crash leaves the old file or the new one.
        save_root.sync_file(scratch_file)
        scratch_file.replace(file)
        save_root.sync_directory(file.parent)
    return file


def _require_folder(file: Path) -> None:
    """Make the folder of a file that will be written."""
    if file.is_dir():
        raise CheckpointError.expected(
            "a file to write",
            "a directory",
            where=f"'{file}'",
            hint="Give a file name, such as model.pt",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError.expected(
            "a folder for the file",
            f"{type(error).__name__}: {error}",
            where=f"'{file.parent}'",
            hint="Give a path whose folder is there or can be made",
        ) from error


def _objects(reader: CheckpointReader) -> dict[str, object]:
    """Read the objects; those stored with each part of a fused parameter get the whole's name."""
    names = {
        part.removeprefix("model."): key.removeprefix("model.")
        for key, fused in reader.fused.items()
        for part in fused["parts"]
        if section_of(key) == "model"
    }
    objects = {}
    for key in reader.manifest.objects:
        if key.startswith(STATE_PREFIX):
            *_, name, state_name = path_of(key)
            objects[state_key(names.get(name, name), state_name)] = reader.object(key)
        else:
            objects[key] = reader.object(key)
    return objects


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the memory of a file, whose pages the system can write out and drop."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        # Reserve the space: touching a page of a sparse file on a full disk kills the process.
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise _cannot_write(path, nbytes, error) from error
    bits = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def _nested(by_key: dict[str, object]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in by_key.items():
        *outer, last = path_of(key)
        branch = tree
        for name in outer:
            inner = branch.setdefault(name, {})
            assert isinstance(inner, dict), "a section has no value of its own"
            branch = inner
        branch[last] = _with_params(value) if key == GROUPS_KEY else value
    return tree


def _with_params(groups: object) -> list[dict]:
    """List the parameters of each group under torch's key."""
    assert isinstance(groups, list), "save() stores a list of groups"
    return [
        {"params": group[MEMBER_NAMES]} | {k: v for k, v in group.items() if k != MEMBER_NAMES}
        for group in groups
    ]


def from_torch(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    fused_like: str | os.PathLike[str] | None = None,
    show_progress: bool = False,
) -> Location:
    """Write the state dict in a ``torch.save`` file as a checkpoint; local.

    The file is mapped and written tensor by tensor. A dict of only tensors is taken as a model's.

    Args:
        source: The file, as :func:`to_torch` or a user of plain torch wrote it. Optimizer states
            must be by name, as ``get_optimizer_state_dict`` returns them.
        destination: The save root.
        step: The training step; None means the one in the file, or 0.
        fused_like: A checkpoint with fused parameters stored in parts; parameters of the same names
            are split in the same way. None stores every parameter whole.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The published directory.

    Raises:
        CheckpointError: The file is no such state dict, its shapes do not fit the parts, or the
            step is published already or lower than the latest one.
    """
    entries = read_torch_file(local_path(source, purpose="a torch.save file"))
    like = FusedLike(None if fused_like is None else save_root.find(fused_like, None))
    tensors = {
        key: value
        for key, value in entries.items()
        # Extra state is stored as an object even if it is a tensor.
        if isinstance(value, torch.Tensor) and not key.endswith(f".{EXTRA_STATE}")
    }
    objects = {key: v for key, v in entries.items() if key not in tensors}
    found = objects.pop("common", None)
    common = found if isinstance(found, dict) else {}
    if step is None:
        step = common["step"] if isinstance(common.get("step"), int) else 0
    save_root.require_ahead(destination, step)
    # Random states in another form are stored, but no rank could continue with them.
    num_states = sum(section_of(key) == "rng" for key in objects)
    num_ranks = num_states if all(f"rng.{rank}" in objects for rank in range(num_states)) else 0
    total_nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with (
        CheckpointWriter(destination, step, world_size=num_ranks) as writer,
        bytes_bar("convert", total_nbytes, is_wanted=show_progress) as bar,
    ):
        first_names: dict[tuple, str] = {}
        for key, tensor in tensors.items():
            # Tensors of a model that share memory are one tensor with two names.
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            is_tied = section_of(key) == "model" and tensor.numel() > 0 and place in first_names
            like.add(writer, key, tensor, tied_to=first_names[place] if is_tied else None)
            first_names.setdefault(place, key)
            bar.update(tensor.nbytes)
        for key, value in objects.items():
            for part in like.names(key):
                writer.add_object(part, value)
        # The random states belong to ranks of a run with these degrees.
        degrees = common["degrees"] if isinstance(common.get("degrees"), dict) else {}
        writer.add_object("common", common_facts(step, num_ranks, degrees))
        return writer.publish()


def read_torch_file(path: Path) -> dict[str, object]:
    """Map a ``torch.save`` file and return its values by the keys of a checkpoint.

    Raises:
        CheckpointError: It is no state dict of plain tensors and plain values.
    """
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        # A file that torch.save did not write can raise anything.
        raise _refused(path, f"{type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(tree, Mapping) or not all(isinstance(key, str) for key in tree):
        raise _refused(path, f"a {type(tree).__name__}")
    if all(isinstance(value, torch.Tensor) for value in tree.values()):
        tree = {"model": tree}
    model, optimizer = tree.get("model"), tree.get("optimizer", {})
    if not isinstance(model, Mapping) or not isinstance(optimizer, Mapping):
        raise _refused(path, f"a dict of {list(tree)[:20]}")
    entries: dict[str, object] = {f"model.{name}": value for name, value in model.items()}
    entries.update(_optimizer_entries(path, optimizer))
    for section, value in tree.items():
        if section == "rng" and isinstance(value, Mapping):
            entries.update((f"rng.{rank}", state) for rank, state in value.items())
        elif section == "quantize" and isinstance(value, Mapping):
            entries.update((f"quantize.{name}", maxima) for name, maxima in value.items())
        elif section not in ("model", "optimizer"):
            entries[section] = value
    return entries


def _optimizer_entries(path: Path, optimizer: Mapping) -> Iterator[tuple[str, object]]:
    others = [key for key in optimizer if key not in ("state", "param_groups")]
    if others:
        raise _refused(path, f"an optimizer with {others[:4]} beside state and param_groups")
    groups = optimizer.get("param_groups", [])
    names: dict[object, str] = {}
    for index, group in enumerate(groups):
        if MEMBER_NAMES in group:
            raise CheckpointError(reserved_option(f"param_groups[{index}] of '{path}'"))
        # torch numbers parameters, and lists their names too if the optimizer has them.
        own = group.get("param_names", group["params"])
        names.update(zip(group["params"], own, strict=True))
    if not all(isinstance(name, str) for name in names.values()):
        raise _refused(path, "an optimizer whose parameters are numbered, not named")
    for parameter, states in optimizer.get("state", {}).items():
        for state_name, value in states.items():
            yield state_key(names.get(parameter, str(parameter)), state_name), value
    if groups:
        hyper = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in groups
        ]
        members = [[names[parameter] for parameter in group["params"]] for group in groups]
        yield (
            GROUPS_KEY,
            [{MEMBER_NAMES: own} | rest for own, rest in zip(members, hyper, strict=True)],
        )


def _cannot_write(path: Path, nbytes: int, error: Exception) -> CheckpointError:
    return CheckpointError.expected(
        f"room for {nbytes} bytes",
        f"{type(error).__name__}: {str(error)[:200]}",
        where=f"'{path.parent.parent}'",
        hint="A conversion needs twice the bytes of the tensors there: make room, or write to "
        "another disk",
    )


def _refused(path: Path, got: str) -> CheckpointError:
    return CheckpointError.expected(
        'a state dict {"model": {name: tensor}, "optimizer": ...} written by torch.save',
        got,
        where=f"'{path}'",
        hint="Save plain tensors by name, the optimizer with get_optimizer_state_dict()",
    )
