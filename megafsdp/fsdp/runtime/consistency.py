"""What the units under one root must have in common, checked once before their first gather.

All units are divided over the same ranks, and all ranks have made the same units. The first is
known to every rank alone; the second takes one small collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megafsdp.buffer.comm.collectives import require_equal
from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup


def check_agreement(groups_of_units: Mapping[str, Sequence[ParameterGroup]]) -> None:
    """Check the groups of all units under one root, by FQN; one small collective.

    Raises:
        ValueError: Units are divided over different ranks, or the ranks do not agree on the
            layouts.
    """
    _check_same_ranks(groups_of_units)
    groups = [(name, g) for name, members in groups_of_units.items() for g in members]
    for everyone in dict.fromkeys(group.axes.all_ranks for _, group in groups):
        layouts = [(n, g.layout.fingerprint()) for n, g in groups if g.axes.all_ranks == everyone]
        require_equal(
            repr(layouts),
            what="parameters, shapes and dtypes",
            group=everyone,
            mend="Build the same model and wrap the same modules on all ranks",
        )


def _check_same_ranks(groups_of_units: Mapping[str, Sequence[ParameterGroup]]) -> None:
    first: tuple[str, list[int]] | None = None
    for name, members in groups_of_units.items():
        # Groups of one unit may have ranks of their own, as experts do; together they have all.
        of_groups = [dist.get_process_group_ranks(g.axes.all_ranks) for g in members]
        ranks = sorted({rank for of_group in of_groups for rank in of_group})
        if not ranks:
            continue
        first = first or (name, ranks)
        if ranks != first[1]:
            raise ValueError(
                expected(
                    f"one mesh under one root: ranks {first[1]} as of unit '{first[0]}'",
                    f"ranks {ranks} of unit '{name}'",
                    where="the first forward",
                    mend="Give fully_shard() the same mesh for all units",
                )
            )
