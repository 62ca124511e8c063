"""Optimizer states in flat buffers with the layout of the parameter group's main weight.

One pass over a buffer then serves all parameters of a group: neighbours that are stepped alike form
a *run*, including the gaps between them, which are zero. Users and checkpoints see DTensors over
the same memory, one per parameter. Nothing here depends on the formula of a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_object, local_tensor
from megafsdp.device.torch_private import version_of
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup

# Bounds the cache of runs: with routed experts, different parameters may step each time.
_MOST_RUNS = 16
_STEP = "step"


@dataclass(frozen=True, slots=True)
class FlatRun:
    """A range of a group's local flat buffers.

    Attributes:
        start: First element.
        stop: One past the last element.
        numel: Elements that belong to parameters: the length without gaps.
    """

    start: int
    stop: int
    numel: int


class FlatStates:
    """The states of one parameter group.

    Args:
        group: The group; only a weak reference is kept.
        dtypes: Dtype of each state by name.
        counts_on_device: Keep the counts of steps on the group's device, not on the CPU.

    The buffers are zero at first.

    Raises:
        ValueError: ``counts_on_device`` is set but the parameters are on the host.
    """

    def __init__(
        self,
        group: ParameterGroup,
        dtypes: Mapping[str, torch.dtype],
        *,
        counts_on_device: bool = False,
    ) -> None:
        if counts_on_device and group.lives_on_host:
            raise ValueError(
                expected(
                    "parameters on the device",
                    f"unit '{group.label}' with offload_policy, whose parameters are on the host",
                    where="FusedAdam(capturable=True)",
                    hint="Leave out one of the two",
                )
            )
        # Weak: the store maps the group to self, so a strong reference would keep both forever.
        self._group = weakref.ref(group)
        self.layout = group.layout
        self.buffers: dict[str, DBuffer] = {
            name: group.new_state_buffer(dtype) for name, dtype in dtypes.items()
        }
        # Gaps too, as a step reads them with the runs around them.
        for buffer in self.buffers.values():
            buffer.flat.zero_()
        tensors = [group.main_weight.tensor(i) for i in range(len(group.parameters))]
        origin = int(group.main_weight.flat.storage_offset())
        starts = [int(t.storage_offset()) - origin for t in tensors]
        self._ranges = [(s, s + t.numel()) for s, t in zip(starts, tensors, strict=True)]
        self._order = sorted(
            (i for i, t in enumerate(tensors) if t.numel()), key=lambda i: self._ranges[i]
        )
        self.indices = {id(p.sharded): i for i, p in enumerate(group.parameters)}
        # Counts of steps are kept twice: as tensors that the optimizer shows, and as numbers, to be
        # read without a wait.
        device = group.device if counts_on_device else "cpu"
        self._steps = torch.zeros(len(tensors), dtype=torch.float32, device=device)
        # A tensor, as adding a number takes several times as long.
        self._one = torch.ones((), dtype=torch.float32, device="cpu")
        self._shown_steps = list(self._steps)
        self._counts = [0] * len(tensors)
        self._counted_version = version_of(self._steps)
        # States that were handed out; their memory may not be zero.
        self._used: set[tuple[int, str]] = set()
        self._runs: dict[tuple[int, ...], list[FlatRun]] = {}

    @property
    def group(self) -> ParameterGroup:
        """Return the parameter group."""
        group = self._group()
        assert group is not None, "the optimizer has the group's parameters"
        return group

    def adopt(self, index: int, name: str, current: torch.Tensor | None) -> torch.Tensor:
        """Return state ``name`` of a parameter as a view of the flat buffer.

        A current state in other memory, e.g. after a load, is copied in. Without a current state,
        the state starts again at zero.
        """
        buffer = self.buffers[name]
        own = buffer.tensor(index)
        if current is not None:
            local = local_tensor(current)
            is_there = local.data_ptr() == own.data_ptr() and local.dtype == own.dtype
            # Users get DTensors: a plain or empty tensor may have this address by chance.
            if is_there and isinstance(current, DTensor):
                return current
            own.copy_(local.reshape(-1))
        elif (index, name) in self._used:
            own.zero_()
        self._used.add((index, name))
        return self.group.as_sharded_dtensor(index, own)

    def exchange(
        self,
        others: Mapping[str, DBuffer],
        views: Mapping[str, Sequence[torch.Tensor]],
        states_by_parameter: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> None:
        """Exchange the memory of the states with that of other buffers; copies nothing.

        Args:
            others: For each state, a buffer like its own.
            views: For each of these buffers, views of the parameters in their local shapes.
            states_by_parameter: The optimizer's ``state``, with views of the flat buffers.
        """
        for name, buffer in self.buffers.items():
            buffer.exchange(others[name])
            for index, parameter in enumerate(self.group.parameters):
                shown = states_by_parameter.get(parameter.sharded, {}).get(name)
                # Keep the object, which users and the optimizer refer to; change its memory.
                if shown is not None:
                    local_object(shown).data = views[name][index]

    def adopt_step(self, index: int, current: torch.Tensor | float | None) -> torch.Tensor:
        """Return a parameter's count of steps, 0-dim fp32, set to the current count or to 0."""
        own = self._shown_steps[index]
        if current is None:
            if (index, _STEP) in self._used:
                own.zero_()
        elif current is not own:
            own.copy_(torch.as_tensor(current, dtype=own.dtype, device=own.device))
        self._used.add((index, _STEP))
        return own

    def shown_step(self, index: int) -> torch.Tensor:
        """Return the tensor from :meth:`adopt_step`; a write to it changes the count."""
        return self._shown_steps[index]

    def advance(self, indices: list[int]) -> dict[int, list[int]]:
        """Count one step of some parameters.

        Returns:
            The parameters by their new counts.
        """
        counts = self._current_counts()
        # Nearly always all parameters: one operator instead of an index and a write.
        if len(indices) == len(counts):
            self._steps.add_(self._one)
            counts = self._counts = [count + 1 for count in counts]
        else:
            self._steps[indices] += 1
            for index in indices:
                counts[index] += 1
        self._counted_version = version_of(self._steps)
        return _by_count(indices, counts)

    def take_back(self, indices: list[int]) -> None:
        """Undo the last :meth:`advance` of these parameters."""
        counts = self._current_counts()
        self._steps[indices] -= 1
        for index in indices:
            counts[index] -= 1
        self._counted_version = version_of(self._steps)

    def upcoming(self, indices: list[int]) -> dict[int, list[int]]:
        """Return what :meth:`advance` would return, without counting."""
        return _by_count(indices, [count + 1 for count in self._current_counts()])

    def _current_counts(self) -> list[int]:
        if version_of(self._steps) != self._counted_version:
            # A load has written to the shown counts, which are views.
            self._counts = [int(count) for count in self._steps.tolist()]
            self._counted_version = version_of(self._steps)
        return self._counts

    def range_of(self, index: int) -> FlatRun:
        """Return the range of one parameter in the local buffer."""
        start, stop = self._ranges[index]
        return FlatRun(start, stop, stop - start)

    def runs(self, indices: list[int]) -> list[FlatRun]:
        """Join parameters that are neighbours in the local buffer."""
        key = tuple(indices)
        runs = self._runs.get(key)
        if runs is None:
            if len(self._runs) >= _MOST_RUNS:
                self._runs.clear()
            runs = self._runs[key] = self._join(indices)
        return runs

    def _join(self, indices: Collection[int]) -> list[FlatRun]:
        wanted, runs = set(indices), list[FlatRun]()
        is_joined = False
        # In the order of the buffer, which may differ from that of the layout's slots.
        for i in self._order:
            if i not in wanted:
                is_joined = False
                continue
            start, stop = self._ranges[i]
            if is_joined:
                last = runs.pop()
                runs.append(FlatRun(last.start, stop, last.numel + stop - start))
            else:
                runs.append(FlatRun(start, stop, stop - start))
            is_joined = True
        return runs

    @property
    def numel(self) -> int:
        """Return the number of parameter elements on this rank."""
        return sum(stop - start for start, stop in self._ranges)


def _by_count(indices: list[int], counts: list[int]) -> dict[int, list[int]]:
    """Group parameters by their counts of steps."""
    if counts.count(counts[0]) == len(counts):
        return {counts[0]: indices}
    by_count: dict[int, list[int]] = {}
    for index in indices:
        by_count.setdefault(counts[index], []).append(index)
    return by_count
