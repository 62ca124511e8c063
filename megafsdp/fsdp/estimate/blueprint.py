"""What units a model would fall into, and the layout of each group, without memory.

A blueprint is what ``fully_shard_model`` would build, made by the same search, grouping and planner
but without buffers, hooks or process groups: the model may be on the meta device and the ranks may
not exist. What the units cost is the business of :mod:`megafsdp.fsdp.estimate.footprint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megafsdp.buffer.layout import FlatLayout, TensorSpec
from megafsdp.buffer.planner import plan_layout
from megafsdp.errors import expected
from megafsdp.fsdp.grouping import (
    claim,
    find_parameters,
    find_units,
    group_parameters,
    policies_by_module,
)
from megafsdp.fsdp.params.group_buffers import GroupDtypes
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, Strategy


@dataclass(frozen=True)
class PlannedGroup:
    """One parameter group that is not built.

    Attributes:
        layout: Its layout; one shard if it is replicated.
        dtypes: Dtypes of its buffers.
        strategy: What would be divided.
        is_trainable: Whether its parameters require gradients.
        is_offloaded: Whether the optimizer keeps its main weight and states on the host.
    """

    layout: FlatLayout
    dtypes: GroupDtypes
    strategy: Strategy
    is_trainable: bool
    is_offloaded: bool = False

    @property
    def is_sharded(self) -> bool:
        """Tell whether the group would be gathered and reduce-scattered."""
        return self.strategy is not Strategy.NO_SHARD


@dataclass(frozen=True)
class PlannedUnit:
    """One unit that is not built.

    Attributes:
        name: Its FQN; the class's name for the root.
        groups: Its parameter groups, perhaps none.
    """

    name: str
    groups: tuple[PlannedGroup, ...]


@dataclass(frozen=True)
class ShardDegrees:
    """How many ranks divide and repeat a model.

    Attributes:
        dp_shard: Ranks among which compute weights are gathered.
        dp_outer: Groups of such ranks.
        is_outer_sharded: True if main weights are cut over both (HFSDP), False if the groups are
            replicas (HSDP).
    """

    dp_shard: int
    dp_outer: int = 1
    is_outer_sharded: bool = False

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp_shard * self.dp_outer

    @property
    def num_pieces(self) -> int:
        """Return how many consecutive shards of a layout make one rank's compute weight shard."""
        return self.dp_outer if self.is_outer_sharded else 1

    @property
    def num_shards(self) -> int:
        """Return the number of shards of a sharded group's layout."""
        return self.dp_shard * self.num_pieces


def plan_units(
    model: nn.Module,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None,
    degrees: ShardDegrees,
    *,
    strategy: Strategy,
    policy: MixedPrecisionPolicy,
) -> list[PlannedUnit]:
    """Plan what ``fully_shard_model`` would build of a model; local and without memory.

    The model is used up: its modules lose their parameters, as they would to the units.

    Args:
        model: On any device, meta included.
        fsdp_unit_modules: As for ``fully_shard_model``.
        degrees: The ranks.
        strategy: What is divided.
        policy: Dtypes.

    Returns:
        The root's unit, then the others in the order of ``modules()``.

    Raises:
        ValueError: As ``fully_shard_model``.
        NotImplementedError: A parameter kind.
    """
    if degrees.is_outer_sharded and strategy is not Strategy.OPTIM_GRADS_PARAMS:
        raise ValueError(
            expected(
                f"the strategy {Strategy.OPTIM_GRADS_PARAMS.value!r}",
                repr(strategy.value),
                where="an outer_strategy of 'optim'",
                hint="Divide parameters too, or leave outer_strategy at 'no_shard'",
            )
        )
    names = {id(module): name for name, module in model.named_modules()}
    planned: list[PlannedUnit] = []
    layouts: dict[object, FlatLayout] = {}
    units = find_units(model, fsdp_unit_modules)
    policies = policies_by_module(model, units, policy)
    # Inner units first, as they take their parameters before the units around them look.
    for module in [*reversed(units), model]:
        groups = _plan_groups(module, degrees, strategy, policies[module], layouts)
        planned.append(PlannedUnit(names[id(module)] or type(model).__name__, groups))
    return planned[::-1]


def _plan_groups(
    module: nn.Module,
    degrees: ShardDegrees,
    strategy: Strategy,
    policy: MixedPrecisionPolicy,
    layouts: dict[object, FlatLayout],
) -> tuple[PlannedGroup, ...]:
    found = find_parameters([module], (), policy)
    groups = []
    for key, items in group_parameters(found, policy).items():
        chosen = Strategy.NO_SHARD if key.is_whole else strategy
        num_shards = 1 if chosen is Strategy.NO_SHARD else degrees.num_shards
        specs = tuple(TensorSpec(i.record.name, tuple(i.record.shape)) for i in items)
        # Most units of a model are alike: one layout serves all of them.
        which = (specs, num_shards, key.dtypes.compute.itemsize)
        if which not in layouts:
            layouts[which] = plan_layout(specs, num_shards, itemsize=key.dtypes.compute.itemsize)
        groups.append(PlannedGroup(layouts[which], key.dtypes, chosen, key.requires_grad))
    claim(found, type(module).__name__)
    for item in found:
        for owner, attribute in item.record.owners:
            holder = owner()
            assert holder is not None, "the model is alive"
            holder._parameters[attribute] = None
    return tuple(groups)
