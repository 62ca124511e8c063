"""Turn Megatron-LM's ``fsdp_dtensor`` checkpoints into ours, in one process on the CPU.

Tensors go from file to file one at a time; no model is built and nothing is communicated. Names are
in names.py, values beside tensors in values.py. The directory cannot run code: its pickles are read
as data.
"""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from megafsdp.checkpoint.format.save_root import require_ahead
from megafsdp.checkpoint.megatron.contents import Contents, read_contents
from megafsdp.checkpoint.megatron.names import (
    EMBEDDING,
    FLOPS,
    OUTPUT,
    SCHEDULER,
    VERSION,
    is_output_norm,
    is_stack,
)
from megafsdp.checkpoint.megatron.values import (
    our_groups,
    our_rng_states,
    our_schedule,
    plain_args,
    query_groups,
)
from megafsdp.checkpoint.state.matching import as_patterns
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.tools.dcp_reader import DCPDirectory
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError, listed
from megafsdp.mesh.fused_parts import FusedParts

_LOGGER = logging.getLogger("megafsdp.checkpoint")


def from_megatron(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    ignore: Sequence[str] = (),
    separate_experts: bool = False,
    show_progress: bool = False,
) -> Location:
    """Write a checkpoint of ours from one that Megatron-LM saved with ``fsdp_dtensor``.

    Weights, optimizer states, parameter groups, the learning rate schedule and the random states go
    where ``load`` looks for them; the job's arguments are kept as plain values in ``extra``. State
    of the job's own machinery (``_extra_state``, the rerun state machine) is dropped. One tensor is
    in memory at a time.

    A layer's experts, grouped or sequential, become one stack, as in ``megafsdp.models``. In a
    model with a gated delta net, norms are copied as they are, except that 1 is added to the output
    norm if Megatron-LM stored weight - 1 (``apply_layernorm_1p``).

    Args:
        source: Megatron-LM's save root, or one checkpoint's own directory.
        root: Our save root.
        step: The iteration to read; None means the latest.
        ignore: Patterns (``fnmatch``) of Megatron-LM's keys to leave out.
        separate_experts: Store each expert under its own name, for a model with a module per
            expert.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The published directory.

    Raises:
        CheckpointError: There is no such directory, it is damaged, keys are unknown or missing, or
            the iteration is published already or lower than our latest step; nothing is published.
    """
    patterns = as_patterns("ignore", ignore)
    with DCPDirectory(source, step) as theirs:
        contents = read_contents(theirs, patterns, has_stacks=not separate_experts)
        common = {key: theirs.value(key) for key in contents.common if key in theirs.objects}
        common |= {key: theirs.tensor(key) for key in contents.common if key in theirs.tensors}
        iteration = _checked_step(theirs.directory, common)
        require_ahead(root, iteration, is_chosen=False)
        args, foreign = _checked_args(theirs.directory, common.get("args"))
        if args.get("apply_layernorm_1p") and not any(map(is_output_norm, contents.weights)):
            _LOGGER.warning(
                "'%s': norm weights are stored less 1 (apply_layernorm_1p)", theirs.directory
            )
        rng = _rng_states(common)
        entries = theirs.tensors.values()
        nbytes = sum(math.prod(e.shape) * e.torch_dtype.itemsize for e in entries)
        with (
            CheckpointWriter(root, iteration, world_size=len(rng)) as ours,
            bytes_bar("convert", nbytes, is_wanted=show_progress) as bar,
        ):
            groups, steps = our_groups(contents.fields, contents.stored_name)
            copy = _Copy(theirs, ours, contents, bar)
            copy.weights(args)
            copy.states(steps)
            if groups:
                ours.add_object("optimizer.param_groups", groups)
            for rank, state in enumerate(rng):
                ours.add_object(f"rng.{rank}", state)
            _add_schedule(ours, common, args, foreign=foreign, step=iteration)
            return ours.publish()


def _checked_step(directory: Location, common: Mapping[str, object]) -> int:
    step, version = common["iteration"], common["checkpoint_version"]
    if not isinstance(step, int) or step < 0 or version != VERSION:
        raise CheckpointError.expected(
            f"an iteration and checkpoint_version {VERSION}",
            f"{step!r} and {version!r}",
            where=f"'{directory}'",
            hint="Save it with a Megatron-LM that writes fsdp_dtensor checkpoints",
        )
    return step


def _checked_args(directory: Location, value: object) -> tuple[dict[str, object], list[str]]:
    if value is None:
        _LOGGER.warning("'%s' has no args: they are empty here", directory)
        return {}, []
    try:
        args, foreign = plain_args(value)
    except ValueError as error:
        raise CheckpointError.expected(
            "a namespace of arguments",
            error,
            where=f"'args' of '{directory}'",
            hint="Pass ignore=['args'] to go on without",
        ) from error
    if foreign:
        text = "'%s': %d of args are no plain values and are kept as text: %s"
        _LOGGER.warning(text, directory, len(foreign), listed(foreign))
    return args, foreign


def _rng_states(common: Mapping[str, object]) -> list[dict]:
    stored = [(key, value) for key, value in common.items() if key.startswith("rng_state.")]
    states, unused = our_rng_states(stored)
    if unused:
        _LOGGER.warning(
            "random states of other model-parallel ranks are not used: %s", listed(unused)
        )
    return states


@dataclass(frozen=True, slots=True)
class _Copy:
    """Copies tensors from Megatron-LM's directory into our checkpoint, one at a time."""

    theirs: DCPDirectory
    ours: CheckpointWriter
    contents: Contents
    bar: tqdm

    def weights(self, args: Mapping[str, object]) -> None:
        """Copy weights and buffers, with the parts of fused parameters and tied names."""
        for name, members in self.contents.members().items():
            keys = [self.contents.weights[member] for member in members]
            groups = query_groups(name, self.theirs.tensors[keys[0]].shape, args)
            if args.get("apply_layernorm_1p") and is_output_norm(name):
                self.ours.add_tensor(f"model.{name}", self._read(keys[0]) + 1)
            else:
                self._tensor(name, f"model.{name}", keys, groups)
        for name, (_, parts) in self._fused().items():
            keys = [f"model.{self.contents.stored_name(part)}" for part in parts]
            self.ours.fuse(f"model.{name}", keys, dim=int(is_stack(name)))
        is_tied = args.get("untie_embeddings_and_output_weights") is False
        if is_tied and EMBEDDING in self.contents.weights and OUTPUT not in self.contents.weights:
            self.ours.alias(f"model.{OUTPUT}", f"model.{EMBEDDING}")

    def states(self, steps: Mapping[str, Any]) -> None:
        """Copy optimizer states.

        Args:
            steps: The step of each parameter, by the name of the whole (unsplit) parameter, if
                groups count steps.
        """
        for name, members in self.contents.members().items():
            keys = self.contents.states.get(members[0], {})
            step = steps.get(self.contents.whole_name(members[0]))
            for state, key in keys.items():
                stored = f"optimizer.state.{name}.{state}"
                if key in self.theirs.tensors:
                    keys_of_state = [self.contents.states[m][state] for m in members]
                    self._tensor(name, stored, keys_of_state)
                elif state == "step":
                    step = self.theirs.value(key)
                else:
                    self.ours.add_object(stored, self.theirs.value(key))
            if keys and step is not None and keys.get("step") not in self.theirs.tensors:
                self.ours.add_tensor(
                    f"optimizer.state.{name}.step",
                    torch.tensor(float(step), dtype=torch.float32, device="cpu"),
                )
        self._fuse_states(steps)

    def _fuse_states(self, steps: Mapping[str, Any]) -> None:
        for name, (whole, parts) in self._fused().items():
            states = [self.contents.states.get(part, {}) for part in parts]
            tensors = self.theirs.tensors
            shared = {
                state: None
                for state in states[0]
                if all(state == "step" or of.get(state) in tensors for of in states)
            }
            if states[0] and whole in steps:
                shared["step"] = None
            for state in shared:
                of_parts = map(self.contents.stored_name, parts)
                keys = [f"optimizer.state.{part}.{state}" for part in of_parts]
                self.ours.fuse(f"optimizer.state.{name}.{state}", keys, dim=int(is_stack(name)))

    def _fused(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return source name and parts of each fused parameter; for a stack, those of one expert.

        Keys are the names in our checkpoint.
        """
        return {self.contents.stored_name(n): (n, p) for n, p in self.contents.parts.items()}

    def _tensor(
        self, name: str, stored: str, keys: list[str], fused: FusedParts | None = None
    ) -> None:
        """Copy a parameter's tensor, or stack those of all experts; of scalars copy the first."""
        if name in self.contents.stacks and self.theirs.tensors[keys[0]].shape:
            self.ours.add_stack(stored, map(self._read, keys))
        else:
            self.ours.add_tensor(stored, self._read(keys[0]), fused=fused)

    def _read(self, key: str) -> torch.Tensor:
        tensor = self.theirs.tensor(key)
        self.bar.update(tensor.nbytes)
        return tensor


def _add_schedule(
    ours: CheckpointWriter,
    common: Mapping[str, object],
    args: dict[str, object],
    *,
    foreign: list[str],
    step: int,
) -> None:
    prefix = f"{SCHEDULER}."
    schedule, _ = plain_args(
        {k.removeprefix(prefix): v for k, v in common.items() if k.startswith(prefix)}
    )
    counted: Any = schedule.get("num_steps") or 0
    consumed: Any = args.get("consumed_train_samples", counted)
    try:
        state = our_schedule(schedule, args)
        num_scheduled, num_consumed = operator.index(counted), operator.index(consumed)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError.expected(
            "numbers in a schedule, and whole ones as num_steps and consumed_train_samples",
            f"{type(error).__name__}: {error}",
            where=f"'{SCHEDULER}' and the args of the checkpoint",
            hint=f"Pass ignore=['{SCHEDULER}.*', 'args'] to go on without",
        ) from error
    if state is not None:
        ours.add_object("lr_scheduler", state)
    run = {"step": step, "consumed_samples": num_consumed}
    run["skipped_samples"] = max(num_consumed - num_scheduled, 0) if schedule else 0
    nvidia: dict[str, object] = {"args": args, "foreign_args": foreign, SCHEDULER: schedule}
    nvidia[FLOPS] = common.get(FLOPS, 0)
    ours.add_object("extra", {"run": run, "nvidia": nvidia})
