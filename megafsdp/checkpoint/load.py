"""Load a checkpoint into any number of ranks, mesh and sharding strategy.

Everything that can be wrong is found before anything is touched: the manifest, the size of every
file, the checksum of every record that will be read, names, shapes, dtypes and parameter groups.
Then the ranks agree, and each copies the stored chunks that meet its own regions. Two small
collectives, whatever the number of tensors: the agreement, and the news that all ranks have
finished.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from megafsdp.buffer.comm.agreement import agree, attempt, rank_and_world_size
from megafsdp.checkpoint.background.pending_save import SAVES
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import ANOTHER_STEP, Manifest, Record, read_manifest
from megafsdp.checkpoint.format.records import RecordReader, require_files
from megafsdp.checkpoint.format.regions import (
    Region,
    Stored,
    is_filled,
    local_regions,
    local_view,
    underlying,
)
from megafsdp.checkpoint.format.rng import restore_rng_state
from megafsdp.checkpoint.save import HasState, TrainingState
from megafsdp.checkpoint.state.canonical import (
    CanonicalState,
    HasCanonicalState,
    canonical_weights,
    model_state,
    modules_with_extra_state,
    parameter_names,
)
from megafsdp.checkpoint.state.fused import wholes_by_part
from megafsdp.checkpoint.state.matching import Match, Rules, as_patterns, match
from megafsdp.checkpoint.state.optimizer_load import (
    GROUPS_KEY,
    OptimizerLoad,
    plan_optimizer_load,
    plan_param_groups,
    require_equal_copies,
)
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp import mark_main_weights_changed
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import give_memory_to_meta_tensors

_log = logging.getLogger("megafsdp.checkpoint")


@dataclass(frozen=True, slots=True)
class _Copy:
    """One piece of a stored chunk on its way into one region of a target.

    Attributes:
        record: Where the chunk lies.
        stored: The chunk's region.
        piece: The part to copy.
        key: The target.
        region: The target's region that receives it.
    """

    record: Record
    stored: Region
    piece: Region
    key: str
    region: Region


@dataclass(slots=True)
class _Plan:
    """A load that passed every check on this rank.

    Attributes:
        directory: The checkpoint.
        manifest: What it holds.
        match: Which stored key goes where.
        tensors: Targets by key.
        copies: Pieces to copy, in the order of the files.
        objects: Non-tensor values that were read, by key.
        optimizer: Where optimizer states go; None if not asked for.
        weights: Parameters, by key, of which the optimizer keeps a part: their tensor is a copy,
            which the optimizer takes apart.
        own: Keys that only some ranks ask for -> these ranks.
    """

    directory: Path
    manifest: Manifest
    match: Match
    tensors: dict[str, Stored]
    copies: list[_Copy]
    objects: dict[str, object] = field(default_factory=dict)
    optimizer: OptimizerLoad | None = None
    weights: dict[str, nn.Parameter] = field(default_factory=dict)
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: HasState | None = None,
    loss_scaler: HasState | None = None,
    step: int | None = None,
    strict: str = "all",
    ignore: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    hint: str | None = None,
) -> dict[str, object]:
    """Load a checkpoint in place; collective over all ranks.

    Any number of ranks, mesh and strategy may load what any other saved. Only what is passed is
    loaded: ``model`` alone is a weights-only load and leaves optimizer and random states as they
    are. With an ``optimizer`` the random states are restored too, if the number of ranks is the
    saved one; otherwise each rank keeps its own, and the log says so. Parameter objects stay the
    same, and compute weights are fresh when this returns. Waits for a background save first.

    Args:
        directory: The save root, or one checkpoint's own directory.
        model: Receives parameters, persistent buffers and extra states.
        optimizer: Receives states and hyperparameters; needs ``model`` for the names. It must not
            have taken a step, but may.
        lr_scheduler: Receives its state dict.
        loss_scaler: Receives its state dict.
        step: The step to load; None means the latest published one.
        strict: ``"all"``: every requested key must be stored and every stored key of the requested
            sections used, with equal shape and dtype. ``"model"``: so for the model; elsewhere what
            fits is taken. ``"none"``: what fits is taken and dtypes are cast. Shapes must always
            match.
        ignore: Patterns (``fnmatch``) of keys to leave alone on both sides, such as
            ``"lm_head.*"``; a fused parameter's name means all its parts.
        allow_missing: Patterns of requested keys that may keep their own values.
        hint: What an error of keys that do not fit tells the user to do; None names the arguments.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: Nothing to load, damaged, or not of this model; raised on all ranks, before
            any of them touched its model.
        ValueError: The arguments contradict each other.
    """
    patterns = as_patterns("ignore", ignore), as_patterns("allow_missing", allow_missing)
    rules = Rules(strict, *patterns, hint=hint)
    if optimizer is not None and model is None:
        raise ValueError(
            expected(
                "the model whose parameters the optimizer holds",
                "an optimizer alone",
                where="checkpoint.load()",
                hint="Pass model= too: its names say which state belongs to which parameter",
            )
        )
    targets = TrainingState(model, optimizer, lr_scheduler, loss_scaler)
    SAVES.wait_for_end()
    plan, error = attempt(lambda: _plan(Path(directory), step, targets=targets, rules=rules))
    seen = agree(
        None if plan is None else f"step {plan.manifest.step} in {plan.directory.name}", error
    )
    if len(set(seen)) > 1:
        raise CheckpointError.expected(
            "one checkpoint for all ranks",
            f"{sorted(set(seen))} on different ranks",
            where=f"'{directory}'",
            hint="Pass step=, and load while no other job saves there",
        )
    assert plan is not None, "ranks without a plan have raised"
    ready = plan
    _, error = attempt(lambda: _commit(ready, targets))
    agree(True, error)
    return cast(dict[str, object], ready.objects["extra"])


def _plan(directory: Path, step: int | None, *, targets: TrainingState, rules: Rules) -> _Plan:
    """Find, check and match a checkpoint; touches nothing."""
    rank, world_size = rank_and_world_size()
    path = save_root.find(directory, step)
    manifest = read_manifest(path)
    # Each rank looks at its share of the files; the agreement unites what they find.
    require_files(manifest, path, sorted(manifest.files)[rank::world_size])

    names: dict[nn.Parameter, str] = {}
    weights: dict[str, nn.Parameter] = {}
    wanted: set[str] = set(targets.stateful())
    state = CanonicalState()
    if targets.model is not None:
        state = model_state(targets.model, manifest.stored())
        names = parameter_names(targets.model)
        # Older checkpoints have the extra state of a module of two names under the first alone.
        wanted.update(key for key, _ in modules_with_extra_state(targets.model))
        wanted.update(state.objects.keys() & manifest.objects.keys())
    tensors, own = dict(state.tensors), dict(state.own)
    whole_of = wholes_by_part(state.fused_into) | wholes_by_part(manifest.fused_into)
    optimizer = None
    if targets.optimizer is not None:
        optimizer = plan_optimizer_load(targets.optimizer, names, manifest, rules.is_ignored)
        tensors.update(optimizer.tensors)
        own.update(optimizer.own)
        whole_of.update(optimizer.whole_of)
        for key, parameter, weight in canonical_weights(
            targets.optimizer, names, manifest.stored()
        ):
            tensors[key], weights[key] = weight, parameter
        wanted.update(optimizer.objects, {GROUPS_KEY})
    matched = match(
        manifest,
        tensors=tensors,
        objects=wanted,
        sections=targets.sections(),
        elsewhere=state.elsewhere,
        rules=replace(rules, whole_of=whole_of),
        where=f"'{path}'",
    )
    copies = _plan_copies(manifest, matched, tensors)
    plan = _Plan(
        path, manifest, matched, tensors, copies, optimizer=optimizer, weights=weights, own=own
    )
    _verify_and_read_objects(plan, wanted, rules)
    if GROUPS_KEY not in manifest.objects:
        # Allowed by the rules: the optimizer keeps what it has instead of losing it.
        plan.optimizer = None
    elif optimizer is not None and GROUPS_KEY in plan.objects:
        stored_groups = plan.objects[GROUPS_KEY]
        assert isinstance(stored_groups, list), "save() stores a list of groups"
        plan_param_groups(optimizer, names, stored_groups, rules=rules, warn=_log.warning)
    return plan


def _plan_copies(manifest: Manifest, matched: Match, tensors: dict[str, Stored]) -> list[_Copy]:
    """Intersect this rank's regions with the stored chunks.

    Raises:
        CheckpointError: The chunks leave a part of a region out.
    """
    copies = []
    for key, source in matched.sources.items():
        if key not in tensors:
            continue
        for region in local_regions(key, tensors[key]):
            pieces = [
                _Copy(chunk.record, chunk.region, piece, key, region)
                for chunk in manifest.tensors[source].chunks
                if (piece := chunk.region.intersect(region)) is not None
            ]
            if not is_filled(region, [copy.piece for copy in pieces]):
                raise CheckpointError.expected(
                    f"stored chunks that fill {region} once",
                    f"{[copy.piece for copy in pieces][:8]}",
                    where=f"'{key}'",
                    hint=f"The checkpoint is damaged: {ANOTHER_STEP}",
                )
            copies += pieces
    return sorted(copies, key=lambda copy: (copy.record.file, copy.record.offset))


def _verify_and_read_objects(plan: _Plan, wanted: set[str], rules: Rules) -> None:
    """Verify this rank's share of the records that any rank will read, and read the small ones."""
    rank, world_size = rank_and_world_size()
    manifest = plan.manifest
    objects = {key: plan.match.sources[key] for key in sorted(wanted) if key in plan.match.sources}
    objects["extra"] = "extra"
    own_rng = f"rng.{rank}"
    if plan.optimizer is not None and manifest.world_size == world_size:
        objects[own_rng] = own_rng
    # Only records of tensors are shared out: every rank reads, and thereby verifies, its objects
    # itself. Ranks that ask for the same keys share them among themselves.
    keys_by_ranks: dict[tuple[int, ...], set[str]] = {}
    for key, source in plan.match.sources.items():
        if source in manifest.tensors:
            ranks = plan.own.get(key, tuple(range(world_size)))
            keys_by_ranks.setdefault(ranks, set()).add(source)
    with RecordReader(plan.directory) as reader:
        for ranks, keys in keys_by_ranks.items():
            records = manifest.places(sorted(keys))
            share = ranks.index(rank) if rank in ranks else len(records)
            for record, key in records[share :: len(ranks)]:
                reader.verify(key, record)
        if plan.optimizer is not None:
            require_equal_copies(plan.optimizer, plan.match.sources, manifest, reader, rules)
        for key, source in objects.items():
            plan.objects[key] = reader.read_object(source, manifest.objects[source])
    assert isinstance(plan.objects["extra"], dict), "save() and CheckpointWriter store a dict"


def _commit(plan: _Plan, targets: TrainingState) -> None:
    """Write into the targets; every check has passed on every rank."""
    _copy_tensors(plan, targets.model)
    if targets.model is not None:
        for key, module in modules_with_extra_state(targets.model):
            if key in plan.objects:
                module.set_extra_state(plan.objects[key])
    if targets.optimizer is not None:
        _commit_optimizer(plan, targets.optimizer)
        _restore_rng(plan)
    for key, stateful in targets.stateful().items():
        if key in plan.objects:
            stateful.load_state_dict(plan.objects[key])  # type: ignore[arg-type]
    for fact, keys in (("kept their own values", plan.match.kept), ("not used", plan.match.unused)):
        if keys:
            _log.warning(
                "load from '%s': %d keys %s: %s", plan.directory, len(keys), fact, keys[:20]
            )


def _commit_optimizer(plan: _Plan, optimizer: torch.optim.Optimizer) -> None:
    if plan.optimizer is not None:
        plan.optimizer.commit(plan.objects, skipped=set(plan.match.kept))
    if isinstance(optimizer, HasCanonicalState):
        loaded = {
            parameter: underlying(plan.tensors[key])
            for key, parameter in plan.weights.items()
            if key in plan.match.sources
        }
        for parameter, weight in loaded.items():
            with torch.inference_mode(False), torch.no_grad():
                optimizer.load_canonical(parameter, weight)


def _give_memory(plan: _Plan, model: nn.Module) -> None:
    """Replace what is on the meta device and about to be loaded, in the model and in the plan."""
    loaded = {
        id(plan.weights.get(k, underlying(t)))
        for k, t in plan.tensors.items()
        if k in plan.match.sources
    }
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    wanted = {name for name, tensor in every if id(tensor) in loaded}
    give_memory_to_meta_tensors(
        model,
        device_below(model),
        is_wanted=wanted.__contains__,
    )
    for key, tensor in model_state(model, plan.manifest.stored()).tensors.items():
        if key in plan.tensors and plan.tensors[key].is_meta:
            plan.tensors[key] = tensor


@torch.no_grad()
def _copy_tensors(plan: _Plan, model: nn.Module | None) -> None:
    """Read each record that meets this rank's regions once and copy its pieces."""
    if model is not None:
        _give_memory(plan, model)
    with RecordReader(plan.directory) as reader:
        last, stored = None, torch.empty(0, device="cpu")
        for copy in plan.copies:
            if copy.record != last:
                last, stored = copy.record, reader.read_tensor(copy.record)
            target = local_view(plan.tensors[copy.key], copy.region)
            piece = stored[copy.piece.slices_in(copy.stored)]
            target[copy.piece.slices_in(copy.region)].copy_(piece)
    if model is not None:
        parameters = {key: underlying(stored) for key, stored in plan.tensors.items()}
        parameters.update(plan.weights)
        loaded = {parameters[key]: None for key in plan.match.sources if key in parameters}
        mark_main_weights_changed(model, list(loaded))


def _restore_rng(plan: _Plan) -> None:
    rank, world_size = rank_and_world_size()
    state = plan.objects.get(f"rng.{rank}")
    if isinstance(state, dict):
        restore_rng_state(state)
    else:
        _log.warning(
            "'%s' was saved by %d ranks and is loaded by %d: random states were left as they are",
            plan.directory,
            plan.manifest.world_size,
            world_size,
        )
