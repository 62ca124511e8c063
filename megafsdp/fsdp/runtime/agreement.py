"""What ranks tell each other besides weights and gradients: statistics, and which gradients exist.

Both are small and made once for all parameter groups of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafsdp.buffer.comm.collectives import Pending, all_reduce, start_all_reduce
from megafsdp.fsdp.params.gradient_reducer import GradientReducer
from megafsdp.fsdp.params.parameter_group import ParameterGroup


def refresh_with_statistics(groups: Sequence[ParameterGroup]) -> None:
    """Encode stale compute weights that need statistics; one all-reduce for all of one mesh."""
    waiting = [g for g in groups if g.compute_weight.needs_statistics]
    for process_group in dict.fromkeys(g.axes.dividing_ranks for g in waiting):
        members = [g for g in waiting if g.axes.dividing_ranks == process_group]
        statistics = [g.compute_weight.statistics() for g in members]
        combined = torch.cat(statistics)
        all_reduce(combined, op="max", group=process_group, label="statistics")
        parts = combined.split([s.numel() for s in statistics])
        for group, part in zip(members, parts, strict=True):
            group.compute_weight.refresh(part)


def agree_on_usage(reducers: Sequence[GradientReducer]) -> list[Pending]:
    """Exchange one byte a trainable parameter; only a rank that waits for it reads the answer.

    Returns:
        The exchanges whose answer this rank has no use for, to be waited for at leisure.
    """
    unread = []
    reducers = [r for r in reducers if r.group.is_trainable]
    for everyone in dict.fromkeys(r.group.axes.all_ranks for r in reducers):
        members = [r for r in reducers if r.group.axes.all_ranks == everyone]
        flags = [flag for reducer in members for flag in reducer.usage()]
        if members[0].group.axes.num_ranks > 1:
            device = members[0].group.device
            # Of pageable memory the host would wait until the device has come to the copy.
            is_pinned = device.type == "cuda"
            votes = torch.tensor(flags, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            votes = votes.to(device, non_blocking=True)
            exchange = start_all_reduce(votes, op="max", group=everyone, label="usage")
            if any(reducer.has_pending for reducer in members):
                exchange.wait()
                flags = votes.bool().tolist()
            else:
                unread.append(exchange)
        answer = iter(flags)
        for reducer in members:
            reducer.resolve_usage([next(answer) for _ in reducer.group.parameters])
    return unread
