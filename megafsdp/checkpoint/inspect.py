"""Public import path of :func:`inspect`; the code is in checkpoint/tools/summary.py."""

from megafsdp.checkpoint.tools.summary import (
    CheckpointSummary,
    SectionSummary,
    TensorSummary,
    inspect,
)

__all__ = ["CheckpointSummary", "SectionSummary", "TensorSummary", "inspect"]
