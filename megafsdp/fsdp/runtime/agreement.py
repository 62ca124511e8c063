"""What ranks exchange besides weights and gradients: statistics, and which gradients exist.

Both are small, and made once for all parameter groups of a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafsdp.buffer.comm.collectives import Pending, all_reduce, start_all_reduce
from megafsdp.fsdp.params.parameter_group import ParameterGroup


def refresh_with_statistics(groups: Sequence[ParameterGroup]) -> None:
    """Encode stale compute weights that need statistics; one all-reduce for all of one mesh.

    And one more over each model axis that cuts tensors. Ranks that repeat a tensor are not asked,
    unless a ``weight_mesh`` has them.
    """
    waiting = [g for g in groups if g.compute_weight.needs_statistics]
    # Groups of experts have ranks of their own, so each set of ranks agrees by itself.
    for ranks in dict.fromkeys(g.statistics_groups for g in waiting):
        members = [g for g in waiting if g.statistics_groups == ranks]
        statistics = [g.compute_weight.statistics() for g in members]
        combined = torch.cat(statistics)
        # A maximum may be taken one axis after the other.
        for process_group in ranks:
            all_reduce(combined, op="max", group=process_group, label="statistics")
        parts = combined.split([s.numel() for s in statistics])
        for group, part in zip(members, parts, strict=True):
            group.compute_weight.refresh(part)


def agree_on_usage(groups: Sequence[ParameterGroup]) -> list[Pending]:
    """Exchange one byte a trainable parameter; only a rank with undecided sums reads the answer.

    Returns:
        The exchanges whose answer this rank does not read, to be waited for later.
    """
    unread = []
    groups = [g for g in groups if g.is_trainable]
    # Sums over a model axis give a gradient to ranks that have none: it takes part.
    for everyone in dict.fromkeys(g.axes.everyone for g in groups):
        members = [g for g in groups if g.axes.everyone == everyone]
        main_grads = [g.gradients.main_grad for g in members]
        flags = [flag for main_grad in main_grads for flag in main_grad.usage()]
        is_asking = any(main_grad.has_undecided for main_grad in main_grads)
        if everyone.size() > 1:
            device = members[0].device
            # A copy from pageable memory makes the host wait until the device has come to it.
            is_pinned = device.type == "cuda"
            votes = torch.tensor(flags, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            votes = votes.to(device, non_blocking=True)
            # Every rank issues it: one with undecided sums would wait for the others forever.
            exchange = start_all_reduce(votes, op="max", group=everyone, label="usage")
            if is_asking:
                exchange.wait()
                flags = votes.bool().tolist()
            else:
                unread.append(exchange)
        if is_asking:
            answer = iter(flags)
            for group, main_grad in zip(members, main_grads, strict=True):
                main_grad.resolve_usage([next(answer) for _ in group.parameters])
    return unread
