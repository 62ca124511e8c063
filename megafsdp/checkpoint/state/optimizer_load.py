"""Plan how stored optimizer states and parameter groups go into an optimizer, then put them there.

State tensors are created from what the checkpoint says, never by running an optimizer step: a state
of the parameter's shape is ``zeros_like`` the parameter (hence sharded as it is), any other state
is a plain tensor on the device where torch's optimizers keep it. The parts of a fused parameter go
into one state. A parameter without stored state never got a gradient, and has no state after the
load either. How the optimizer runs (foreach, fused, capturable) stays as constructed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from megafsdp.checkpoint.format.manifest import Manifest, path_of
from megafsdp.checkpoint.format.records import RecordReader
from megafsdp.checkpoint.format.regions import Stored, underlying
from megafsdp.checkpoint.state.canonical import (
    EXECUTION_FLAGS,
    GROUP_MEMBERS,
    GROUPS_KEY,
    MEMBER_NAMES,
    HasCanonicalState,
    member_names,
    named_groups,
    state_key,
    states_of,
)
from megafsdp.checkpoint.state.fused import StoredForm, stored_form
from megafsdp.checkpoint.state.matching import Rules
from megafsdp.errors import MAX_NAMED, CheckpointError, expected

# If 0-d, these are scalars even for a 0-d parameter; torch keeps the first two on the CPU.
_CPU_SCALARS = frozenset({"step", "mu_product"})
_SCALARS = _CPU_SCALARS | {"eta", "mu"}
# Options that only some variants of Adam have, with the behavior of the variants without them.
_NEUTRAL = {"amsgrad": False, "maximize": False, "bias_correction": True}
# In some optimizers the class, not the group, decides how weight decay works.
_OF_THE_CLASS = frozenset({"decoupled_weight_decay"})


@dataclass(slots=True)
class OptimizerLoad:
    """Where the states of one optimizer go; nothing is written to it until :meth:`commit`.

    Attributes:
        optimizer: The optimizer.
        tensors: Tensor to read into, by key; existing states are reused, others fresh.
        objects: Keys of stored non-tensor states.
        state: The new ``optimizer.state`` of each parameter: state name -> keys, one for each part.
        left_alone: Names of states that are not stored and that the caller chose to keep.
        groups: Each parameter group with the stored hyperparameters for it.
        whole_of: Key of a part -> key of the whole state.
        ranks_of: Keys that only some ranks load -> these ranks.
    """

    optimizer: torch.optim.Optimizer
    tensors: dict[str, Stored] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    state: dict[nn.Parameter, dict[str, list[str]]] = field(default_factory=dict)
    left_alone: dict[nn.Parameter, list[str]] = field(default_factory=dict)
    groups: list[tuple[dict, dict]] = field(default_factory=list)
    whole_of: dict[str, str] = field(default_factory=dict)
    ranks_of: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def commit(self, objects: Mapping[str, object], *, skipped: Collection[str]) -> None:
        """Give the optimizer its states and hyperparameters; the tensors have been read.

        Args:
            objects: Values of the non-tensor states by key.
            skipped: Keys that the caller chose not to load; the optimizer keeps its own.
        """
        for parameter, keys_by_name in self.state.items():
            current = self.optimizer.state.get(parameter, {})
            loaded: dict[str, object] = {}
            unchanged: dict[str, object] = {
                name: current[name] for name in self.left_alone[parameter]
            }
            for name, keys in keys_by_name.items():
                taken = [key for key in keys if key not in skipped]
                if taken:
                    tensor = self.tensors.get(taken[0])
                    loaded[name] = objects[taken[0]] if tensor is None else underlying(tensor)
                elif name in current:
                    unchanged[name] = current[name]
            if loaded or unchanged:
                self.optimizer.state[parameter] = loaded | unchanged
            else:
                self.optimizer.state.pop(parameter, None)
            if isinstance(self.optimizer, HasCanonicalState):
                with torch.inference_mode(False), torch.no_grad():
                    self.optimizer.load_canonical(parameter)
        for group, stored in self.groups:
            for name, value in stored.items():
                _set_hyperparameter(group, name, value)


def plan_optimizer_load(
    optimizer: torch.optim.Optimizer,
    names: dict[nn.Parameter, str],
    manifest: Manifest,
    is_ignored: Callable[[str], bool],
) -> OptimizerLoad:
    """Match stored states with an optimizer's parameters by name; allocates the missing states.

    Args:
        optimizer: The optimizer to load into.
        names: Canonical names of the model's parameters.
        manifest: What is stored.
        is_ignored: Returns whether the caller chose to leave a key alone.

    Raises:
        CheckpointError: The optimizer has parameters that are not the model's.
    """
    stored: dict[str, dict[str, str]] = {}
    for key in (*manifest.tensors, *manifest.objects):
        if key.startswith("optimizer.state."):
            _, _, name, state_name = path_of(key)
            stored.setdefault(name, {})[state_name] = key
    load = OptimizerLoad(optimizer)
    for group_names, group in named_groups(optimizer, names):
        for name, parameter in zip(group_names, group["params"], strict=True):
            form = stored_form(name, parameter).as_in(stored)
            # States of another kind of optimizer stay unused; a strict load refuses that.
            known = _known_names(optimizer, parameter)
            found = (s for part in form.parts for s in stored.get(part, {}))
            state_names = dict.fromkeys(s for s in found if known is None or s in known)
            load.state[parameter] = {
                state_name: [state_key(part, state_name) for part in form.parts]
                for state_name in state_names
            }
            load.left_alone[parameter] = [
                own
                for own in optimizer.state.get(parameter, {})
                if own not in state_names and _is_left_alone(own, form, is_ignored)
            ]
            for state_name, keys in load.state[parameter].items():
                if len(keys) > 1:
                    load.whole_of.update(dict.fromkeys(keys, state_key(form.name, state_name)))
                if form.is_own and form.ranks is not None:
                    load.ranks_of.update(dict.fromkeys(keys, form.ranks))
                if any(key in manifest.objects for key in keys):
                    load.objects.update(keys)
                    continue
                state = _planned_state(load, state_name, parameter, group, form, manifest)
                load.tensors.update(zip(keys, form.pieces(state), strict=True))
    return load


def _known_names(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> frozenset[str] | None:
    if isinstance(optimizer, HasCanonicalState):
        return optimizer.canonical_names(parameter)
    return None


def _is_left_alone(state_name: str, form: StoredForm, is_ignored: Callable[[str], bool]) -> bool:
    """Return whether a state is ignored under its parameter's name or the names of all parts."""
    keys = [f"optimizer.state.{part}.{state_name}" for part in form.parts]
    return is_ignored(f"optimizer.state.{form.name}.{state_name}") or all(map(is_ignored, keys))


@torch.no_grad()
def _planned_state(
    load: OptimizerLoad,
    state_name: str,
    parameter: nn.Parameter,
    group: dict,
    form: StoredForm,
    manifest: Manifest,
) -> torch.Tensor:
    """Return the tensor that all parts of a state are read into."""
    keys = load.state[parameter][state_name]
    shapes = [
        (manifest.tensors[key].shape, manifest.tensors.get(f"model.{part}", piece).shape)
        for part, key, piece in zip(form.parts, keys, form.pieces(parameter), strict=True)
        if key in manifest.tensors
    ]
    entry = next(manifest.tensors[key] for key in keys if key in manifest.tensors)
    is_scalar = state_name in _SCALARS and not entry.shape
    # All parts must match: a state of another form may by chance have the shape of one part.
    is_like_parameter = not is_scalar and bool(shapes) and all(own == part for own, part in shapes)
    current = load.optimizer.state.get(parameter, {}).get(state_name)
    # A step of torch's optimizers needs states in the dtype of the parameter, if they had it.
    weights = (manifest.tensors.get(f"model.{part}") for part in form.parts)
    is_cast = is_like_parameter and not isinstance(load.optimizer, HasCanonicalState)
    is_cast &= entry.torch_dtype in {w.torch_dtype for w in weights if w is not None}
    state = _state_tensor(
        state_name,
        parameter,
        shape=tuple(parameter.shape) if is_like_parameter else entry.shape,
        dtype=parameter.dtype if is_cast else entry.torch_dtype,
        group=group,
        is_like_parameter=is_like_parameter,
        existing=current,
    )
    if len(keys) > 1 and isinstance(current, torch.Tensor) and state is not current:
        # A part that is not loaded keeps its values, in the form in which the others are stored.
        own = states_of(load.optimizer, parameter)[state_name]
        if own.shape == state.shape:
            state.copy_(own)
    return state


def require_equal_copies(
    load: OptimizerLoad,
    sources: Mapping[str, str],
    manifest: Manifest,
    reader: RecordReader,
    rules: Rules,
) -> None:
    """Check that a scalar stored with each part of a parameter is equal in all parts.

    Args:
        load: The plan.
        sources: Stored key of each key that is loaded.
        manifest: What is stored.
        reader: Reader of the checkpoint.
        rules: Give the hint of an error.

    Raises:
        CheckpointError: Parts differ, e.g. in their count of steps; the parameter has only one.
    """
    for keys in (keys for states in load.state.values() for keys in states.values()):
        copies = [sources[key] for key in keys if key in sources and key in load.tensors]
        if len(copies) < 2 or manifest.tensors[copies[0]].shape:
            continue
        values = {}
        for key in copies:
            (chunk,) = manifest.tensors[key].chunks
            reader.verify(key, chunk.record)
            values[key] = reader.read_tensor(chunk.record)
        if any(not torch.equal(value, values[copies[0]]) for value in values.values()):
            raise CheckpointError.expected(
                "one value in all parts of a parameter",
                {key: value.item() for key, value in values.items()},
                where="the checkpoint's optimizer states",
                hint=rules.hint or "Leave parts out with ignore=[patterns]",
            )


def plan_param_groups(
    load: OptimizerLoad,
    names: dict[nn.Parameter, str],
    stored_groups: list[dict],
    *,
    rules: Rules,
    warn: Callable[[str], None],
) -> None:
    """Pair each parameter group with the stored group of the same parameters.

    Args:
        load: Receives the pairs.
        names: Canonical names of the model's parameters.
        stored_groups: Names and hyperparameters of the stored groups, in any order.
        rules: Whether to raise if something does not fit, or to keep the optimizer's own values.
        warn: Called with a message about values that are kept.

    Raises:
        CheckpointError: Groups or hyperparameters differ.
    """

    def complain(what: str, got: str, index: int) -> None:
        message = expected(
            what,
            got,
            where=f"optimizer.param_groups[{index}]",
            hint=rules.hint
            or "Group the parameters as the saved run did, or pass strict='model' to keep the "
            "optimizer's own hyperparameters where they differ",
        )
        if rules.is_strict(GROUPS_KEY):
            raise CheckpointError(message)
        warn(message)

    # Groups without parameters have equal (no) names: they are paired in order.
    stored_by_names: dict[frozenset[str], deque[dict]] = defaultdict(deque)
    for group in stored_groups:
        stored_by_names[frozenset(group[MEMBER_NAMES])].append(group)
    current = named_groups(load.optimizer, names)
    if len(current) != len(stored_groups):
        complain(f"{len(stored_groups)} groups as stored", f"{len(current)}", len(current) - 1)
    for index, (_, group) in enumerate(current):
        group_names = member_names(group, names)
        found = stored_by_names[frozenset(group_names)]
        if not found:
            complain(
                "a stored group of the same parameters",
                _difference(group_names, stored_groups),
                index,
            )
            continue
        taken, misfits = _hyperparameters(load.optimizer, group, found.popleft())
        for what, got in misfits:
            complain(what, got, index)
        load.groups.append((group, taken))


def _hyperparameters(
    optimizer: torch.optim.Optimizer, group: dict, stored: dict
) -> tuple[dict[str, object], list[tuple[str, str]]]:
    """Return the hyperparameters to take from a stored group, and the misfits: expected, found."""
    kind = type(optimizer).__name__
    left = {MEMBER_NAMES} | GROUP_MEMBERS | EXECUTION_FLAGS | _settled_by_class(optimizer)
    taken = {k: v for k, v in stored.items() if k not in left}
    misfits = []
    # One group alone may have an option of which the optimizer has no default.
    known = optimizer.defaults.keys() | (group.keys() & _NEUTRAL.keys())
    unknown = known - EXECUTION_FLAGS - _OF_THE_CLASS - set(taken)
    lacking = sorted(k for k in unknown if k not in _NEUTRAL or group[k] != _NEUTRAL[k])
    if lacking:
        misfits.append((f"the hyperparameters of {kind}", f"a stored group without {lacking}"))
    foreign = {k for k in taken if k in _NEUTRAL and k not in optimizer.defaults}
    changing = [f"{k}={taken[k]}" for k in sorted(foreign) if taken[k] != group.get(k, _NEUTRAL[k])]
    if changing:
        misfits.append((f"options of {kind}", f"{', '.join(changing)}, which it ignores"))
    return {k: v for k, v in taken.items() if k not in foreign}, misfits


def _settled_by_class(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the options that appear in an optimizer's groups but have no effect there."""
    has_choice = not isinstance(optimizer, torch.optim.AdamW)
    return frozenset(n for n in _OF_THE_CLASS if not (has_choice and n in optimizer.defaults))


def _difference(group_names: list[str], stored_groups: list[dict]) -> str:
    """Describe how a group differs from the stored group that shares the most names with it."""
    own = set(group_names)
    nearest = max(
        (set(g[MEMBER_NAMES]) for g in stored_groups), key=lambda s: len(s & own), default=set()
    )
    added, lacking = sorted(own - nearest), sorted(nearest - own)
    return (
        f"{len(added)} that the nearest stored group has not ({', '.join(added[:MAX_NAMED])}) "
        f"and {len(lacking)} that it has besides ({', '.join(lacking[:MAX_NAMED])})"
    )


def _state_tensor(
    state_name: str,
    parameter: torch.Tensor,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: dict,
    is_like_parameter: bool,
    existing: object,
) -> torch.Tensor:
    if isinstance(existing, torch.Tensor) and (existing.shape, existing.dtype) == (shape, dtype):
        return existing
    is_on_cpu = state_name in _CPU_SCALARS and not (group.get("capturable") or group.get("fused"))
    # A state made in inference mode could not be written to by a step outside of it.
    with torch.inference_mode(False), torch.no_grad():
        if is_like_parameter:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros(shape, dtype=dtype, device="cpu" if is_on_cpu else parameter.device)


def _set_hyperparameter(group: dict, name: str, value: object) -> None:
    """Set a value in the form that the group uses: a tensor learning rate stays that tensor."""
    current = group.get(name)
    if isinstance(current, torch.Tensor):
        current.fill_(float(value))  # type: ignore[arg-type]
    elif isinstance(value, torch.Tensor) and name in group:
        group[name] = value.item()
    else:
        group[name] = value
