"""Load a checkpoint into any number of ranks, mesh and sharding strategy.

What every rank does::

    _plan     read the manifest; check the rank's share of the files; match names, shapes and
              dtypes; intersect the rank's regions with the stored chunks; verify its share of the
              records; read the objects. Writes nothing.
    agree     collective 1: raise the first error of any rank, or agree on one checkpoint
    _commit   copy the chunks into the tensors, then extra states, optimizer, random states,
              scheduler and loss scaler
    agree     collective 2: all ranks have finished

So everything that can be wrong is found before any rank touches its model, with two small
collectives however many tensors there are. Names are matched in state/matching.py, optimizer states
in state/optimizer_load.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import nn

from megafsdp.buffer.comm.agreement import agree, attempt, rank_and_world_size
from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.background.pending_save import SAVES
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import (
    ANOTHER_STEP,
    Chunk,
    Manifest,
    read_manifest,
    require_same,
)
from megafsdp.checkpoint.format.records import RecordReader, require_files
from megafsdp.checkpoint.format.regions import (
    Stored,
    is_filled,
    local_regions,
    local_view,
    underlying,
)
from megafsdp.checkpoint.format.rng import restore_rng_state
from megafsdp.checkpoint.save import HasState, TrainingState
from megafsdp.checkpoint.state.canonical import (
    GROUPS_KEY,
    CanonicalState,
    HasCanonicalState,
    canonical_weights,
    extra_states,
    model_state,
    parameter_names,
)
from megafsdp.checkpoint.state.declared import require_whole_order
from megafsdp.checkpoint.state.fused import wholes_by_part
from megafsdp.checkpoint.state.histories import HistoryLoad
from megafsdp.checkpoint.state.matching import Match, Rules, as_patterns, match
from megafsdp.checkpoint.state.merge import model_degrees
from megafsdp.checkpoint.state.optimizer_load import (
    OptimizerLoad,
    plan_optimizer_load,
    plan_param_groups,
    require_equal_copies,
)
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp import mark_main_weights_changed
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import give_memory_to_meta_tensors
from megafsdp.fsdp.quantized_model import requantize_
from megafsdp.fsdp.runtime.torch_fsdp import quantized_parameters

_LOGGER = logging.getLogger("megafsdp.checkpoint")


class _Copy(NamedTuple):
    """A stored chunk that overlaps one region of a target.

    Attributes:
        chunk: The chunk.
        key: Key of the target.
        region: The region of the target; it receives the overlap.
    """

    chunk: Chunk
    key: str
    region: Region


@dataclass(slots=True)
class _Requests:
    """What this rank requests from a checkpoint.

    Attributes:
        tensors: Targets by key.
        objects: Keys of non-tensor values.
        names: Canonical names of the model's parameters.
        optimizer: Targets of the optimizer states; None if not requested.
        weights: Parameters, by key, whose weight the optimizer holds in a form of its own: the
            target is a canonical copy, which is given to the optimizer afterwards.
        ranks_of: Keys that only some ranks request -> these ranks.
        whole_of: Key of a part of a fused tensor -> key of the whole.
        elsewhere: Names of parameters that only other ranks have.
        histories: Targets of delayed scaling's histories; None without a model.
    """

    tensors: dict[str, Stored]
    objects: set[str]
    names: dict[nn.Parameter, str]
    optimizer: OptimizerLoad | None
    weights: dict[str, nn.Parameter]
    ranks_of: dict[str, tuple[int, ...]]
    whole_of: dict[str, str]
    elsewhere: set[str]
    histories: HistoryLoad | None = None


@dataclass(slots=True)
class _Plan:
    """A load that passed every check on this rank.

    Attributes:
        directory: The checkpoint.
        manifest: Its contents.
        requests: What to fill.
        match: The stored key of each requested key.
        copies: Chunks to copy, in the order of the files.
        degrees: Degrees of model parallelism of the model that is filled.
        objects: Non-tensor values that were read, by key.
    """

    directory: Location
    manifest: Manifest
    requests: _Requests
    match: Match
    copies: list[_Copy]
    degrees: dict[str, int]
    objects: dict[str, object] = field(default_factory=dict)


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

    The number of ranks, the mesh and the strategy may differ from the saved ones. Only what is
    passed is loaded: ``model`` alone is a weights-only load and leaves optimizer and random states
    as they are. With an ``optimizer`` the random states are restored too, if the number of ranks
    and the degrees of model parallelism are the saved ones; otherwise each rank keeps its own, and
    the log says so. Parameter objects stay the same, and compute weights are fresh when this
    returns. A background save is waited for first.

    Args:
        directory: The save root, or one checkpoint's own directory; a path, or the URL of a store.
        model: Receives parameters, persistent buffers and extra states.
        optimizer: Receives states and hyperparameters; needs ``model`` for the names. It need not
            have taken a step.
        lr_scheduler: Receives its state dict.
        loss_scaler: Receives its state dict.
        step: The step to load; None means the latest published one.
        strict: ``"all"``: every requested key must be stored and every stored key of the requested
            sections used, with equal shape and dtype. ``"model"``: as ``"all"`` for the model;
            elsewhere what fits is taken. ``"none"``: what fits is taken and dtypes are cast.
            Shapes must always match.
        ignore: Patterns (``fnmatch``) of keys to leave alone on both sides, such as
            ``"lm_head.*"``; a fused parameter's name means all its parts.
        allow_missing: Patterns of requested keys that may keep their own values.
        hint: Advice in the error about keys that do not fit; None names the arguments.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged or of another model; raised on all
            ranks, before any of them touched its model.
        TypeError: The model is no module, or several optimizers are given.
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
    plan, error = attempt(lambda: _plan(directory, step, targets=targets, rules=rules))
    seen = agree(None if plan is None else _name_of(plan), error)
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


def _name_of(plan: _Plan) -> str:
    """Name a checkpoint uniquely among other steps and other saves of the same step."""
    manifest = plan.manifest
    return f"step {manifest.step} in {plan.directory.name}, of checksum {manifest.checksum}"


def _plan(
    directory: str | os.PathLike[str],
    step: int | None,
    *,
    targets: TrainingState,
    rules: Rules,
) -> _Plan:
    """Find, check and match a checkpoint; writes nothing."""
    rank, world_size = rank_and_world_size()
    path = save_root.find(directory, step)
    manifest = read_manifest(path)
    # Each rank checks its share of the files; agree() raises the errors on all ranks.
    require_files(manifest, path, sorted(manifest.files)[rank::world_size])
    if targets.model is not None:
        require_whole_order(targets.model, manifest, where=f"'{path}'")
    requests = _requests(targets, manifest, rules)
    matched = match(
        manifest,
        tensors=requests.tensors,
        objects=requests.objects,
        sections=targets.sections(),
        elsewhere=requests.elsewhere,
        rules=replace(rules, whole_of=requests.whole_of),
        where=f"'{path}'",
    )
    copies = _plan_copies(manifest, matched, requests.tensors)
    degrees = {} if targets.model is None else model_degrees(targets.model)
    plan = _Plan(path, manifest, requests, matched, copies, degrees)
    _verify_and_read_objects(plan, rules)
    if GROUPS_KEY not in manifest.objects:
        # No groups are stored, and the rules allow it: keep the optimizer's own states.
        requests.optimizer = None
    elif requests.optimizer is not None and GROUPS_KEY in plan.objects:
        stored_groups = plan.objects[GROUPS_KEY]
        assert isinstance(stored_groups, list), "save() stores a list of groups"
        plan_param_groups(
            requests.optimizer, requests.names, stored_groups, rules=rules, warn=_LOGGER.warning
        )
    return plan


def _requests(targets: TrainingState, manifest: Manifest, rules: Rules) -> _Requests:
    """List the targets by key; allocates missing optimizer states."""
    state, names = CanonicalState(), {}
    objects = set(targets.stateful())
    if targets.model is not None:
        state = model_state(targets.model, manifest.stored())
        names = parameter_names(targets.model)
        # Older checkpoints have the extra state of a module with two names only under the first;
        # converted ones have none, which is as good as an empty one.
        keys = (extra.key for extra in extra_states(targets.model))
        objects.update(key for key in keys if state.objects[key] is not None)
        objects.update(state.objects.keys() & manifest.objects.keys())
    requests = _Requests(
        tensors=state.tensors,
        objects=objects,
        names=names,
        optimizer=None,
        weights={},
        ranks_of=state.ranks_of,
        whole_of=wholes_by_part(state.fused_into) | wholes_by_part(manifest.fused_into),
        elsewhere=state.elsewhere,
    )
    if targets.model is not None:
        requests.histories = histories = HistoryLoad(targets.model, manifest.tensors)
        requests.tensors.update(histories.tensors)
        requests.ranks_of.update(histories.ranks_of)
    if targets.optimizer is not None:
        planned = plan_optimizer_load(targets.optimizer, names, manifest, rules.is_ignored)
        requests.optimizer = planned
        requests.tensors.update(planned.tensors)
        requests.ranks_of.update(planned.ranks_of)
        requests.whole_of.update(planned.whole_of)
        requests.objects.update(planned.objects, {GROUPS_KEY})
        weights = canonical_weights(targets.optimizer, names, manifest.stored())
        for key, parameter, weight in weights:
            requests.tensors[key], requests.weights[key] = weight, parameter
    return requests


def _plan_copies(manifest: Manifest, matched: Match, tensors: dict[str, Stored]) -> list[_Copy]:
    """Intersect this rank's regions with the stored chunks.

    Raises:
        CheckpointError: The chunks do not cover each region exactly once.
    """
    copies = []
    for key, source in matched.sources.items():
        if key not in tensors:
            continue
        for region in local_regions(key, tensors[key]):
            pieces = []
            for chunk in manifest.tensors[source].chunks:
                if (piece := chunk.region.intersect(region)) is not None:
                    pieces.append(piece)
                    copies.append(_Copy(chunk, key, region))
            if not is_filled(region, pieces):
                raise CheckpointError.expected(
                    f"stored chunks that fill {region} once",
                    f"{pieces[:8]}",
                    where=f"'{key}'",
                    hint=f"The checkpoint is damaged: {ANOTHER_STEP}",
                )
    return sorted(copies, key=lambda copy: (copy.chunk.record.file, copy.chunk.record.offset))


def _verify_and_read_objects(plan: _Plan, rules: Rules) -> None:
    """Verify this rank's share of the tensor records to be read, and read the objects."""
    rank, world_size = rank_and_world_size()
    manifest, requests, sources = plan.manifest, plan.requests, plan.match.sources
    objects = {key: sources[key] for key in sorted(requests.objects) if key in sources}
    objects["extra"] = "extra"
    if requests.optimizer is not None and manifest.world_size == world_size:
        own_rng = f"rng.{rank}"
        objects[own_rng] = own_rng
        objects["common"] = "common"
    # Only the verification of tensors is shared out, among the ranks that request the same keys:
    # every rank reads its objects itself, which verifies them.
    keys_by_ranks: dict[tuple[int, ...], set[str]] = {}
    for key, source in sources.items():
        if source in manifest.tensors:
            ranks = requests.ranks_of.get(key, tuple(range(world_size)))
            keys_by_ranks.setdefault(ranks, set()).add(source)
    with RecordReader(plan.directory) as reader:
        for ranks, keys in keys_by_ranks.items():
            records = manifest.places(sorted(keys))
            share = ranks.index(rank) if rank in ranks else len(records)
            for record, key in records[share :: len(ranks)]:
                reader.verify(key, record)
        if requests.optimizer is not None:
            require_equal_copies(requests.optimizer, sources, manifest, reader, rules)
        for key, source in objects.items():
            plan.objects[key] = reader.read_object(source, manifest.objects[source])
    assert isinstance(plan.objects["extra"], dict), "save() and CheckpointWriter store a dict"


def _commit(plan: _Plan, targets: TrainingState) -> None:
    """Write into the targets; every check has passed on every rank."""
    _copy_tensors(plan, targets.model)
    if plan.requests.histories is not None:
        plan.requests.histories.commit(plan.match.sources)
    if targets.model is not None:
        for extra in extra_states(targets.model):
            if extra.key in plan.objects:
                extra.module.set_extra_state(plan.objects[extra.key])
    if targets.optimizer is not None:
        _commit_optimizer(plan, targets.optimizer)
        _restore_rng(plan)
    for key, stateful in targets.stateful().items():
        if key in plan.objects:
            stateful.load_state_dict(plan.objects[key])  # type: ignore[arg-type]
    for fact, keys in (
        ("keys kept their own values", plan.match.skipped),
        ("keys not used", plan.match.unused),
        ("patterns of ignore match no key", plan.match.idle),
    ):
        if keys:
            _LOGGER.warning("load from '%s': %d %s: %s", plan.directory, len(keys), fact, keys[:20])


def _commit_optimizer(plan: _Plan, optimizer: torch.optim.Optimizer) -> None:
    requests = plan.requests
    if requests.optimizer is not None:
        requests.optimizer.commit(plan.objects, skipped=set(plan.match.skipped))
    if isinstance(optimizer, HasCanonicalState):
        # By parameter: the parts of a fused parameter are several keys of one weight.
        loaded = {
            parameter: underlying(requests.tensors[key])
            for key, parameter in requests.weights.items()
            if key in plan.match.sources
        }
        for parameter, weight in loaded.items():
            with torch.inference_mode(False), torch.no_grad():
                optimizer.load_canonical(parameter, weight)


def _give_memory(plan: _Plan, model: nn.Module) -> None:
    """Materialize the meta tensors that will be loaded, in the model and in the plan."""
    tensors = plan.requests.tensors
    loaded = {
        id(plan.requests.weights.get(key, underlying(tensor)))
        for key, tensor in tensors.items()
        if key in plan.match.sources
    }
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    wanted = {name for name, tensor in every if id(tensor) in loaded}
    give_memory_to_meta_tensors(model, device_below(model), is_wanted=wanted.__contains__)
    for key, tensor in model_state(model, plan.manifest.stored()).tensors.items():
        if key in tensors and tensors[key].is_meta:
            tensors[key] = tensor


@torch.no_grad()
def _copy_tensors(plan: _Plan, model: nn.Module | None) -> None:
    """Fill this rank's regions; collective if codes of weights under torch's FSDP2 are made."""
    _, error = attempt(lambda: _read_tensors(plan, model))
    if model is not None and quantized_parameters(model):
        # Agree first: the other ranks would wait in the collective for a rank that failed to read.
        agree(True, error)
        # Otherwise no codes would be made before the next forward.
        requantize_(model)
    elif error is not None:
        raise error


def _read_tensors(plan: _Plan, model: nn.Module | None) -> None:
    """Read each record that overlaps this rank's regions once, and copy the overlaps; local."""
    if model is not None:
        _give_memory(plan, model)
    _, error = attempt(lambda: _read_records(plan))
    # Checked before a read error is raised: if another save has replaced the step meanwhile, that
    # save's bytes were read, perhaps without an error.
    require_same(plan.manifest, plan.directory)
    if error is not None:
        raise error
    if model is not None:
        # It is the parameter that has a compute weight to refresh, not the copy that was filled.
        tensors = plan.requests.tensors
        parameters = {key: underlying(stored) for key, stored in tensors.items()}
        parameters.update(plan.requests.weights)
        loaded = {parameters[key]: None for key in plan.match.sources if key in parameters}
        mark_main_weights_changed(model, list(loaded))


def _read_records(plan: _Plan) -> None:
    tensors = plan.requests.tensors
    with RecordReader(plan.directory) as reader:
        last, stored = None, torch.empty(0, device="cpu")
        for chunk, key, region in plan.copies:
            if chunk.record != last:
                last, stored = chunk.record, reader.read_tensor(chunk.record)
            piece = chunk.region.intersect(region)
            assert piece is not None, "only chunks that meet the region were planned"
            target = local_view(tensors[key], region)[piece.slices_in(region)]
            target.copy_(stored[piece.slices_in(chunk.region)])


def _restore_rng(plan: _Plan) -> None:
    """Restore this rank's random states, if they were saved by a rank with the same role."""
    rank, world_size = rank_and_world_size()
    state, common = plan.objects.get(f"rng.{rank}"), plan.objects.get("common")
    # Older checkpoints store no degrees: their models had no model axes.
    stored = common.get("degrees", {}) if isinstance(common, dict) else {}
    if isinstance(state, dict) and plan.degrees == stored:
        restore_rng_state(state)
        return
    _LOGGER.warning(
        "'%s' was saved by %d ranks and is loaded by %d%s: random states were left as they are",
        plan.directory,
        plan.manifest.world_size,
        world_size,
        f", with degrees {stored} and {plan.degrees}" if common else "",
    )
