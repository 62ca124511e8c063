"""Layers that tensor and expert parallelism cut, and sequences that ranks share out.

Megatron's layers: linear maps by columns and rows, a word embedding and an output layer by the
vocabulary, norms that know of a cut sequence, and the loss of a cut vocabulary; routers and stacks
of experts, which ranks share out; what ranks of context parallelism exchange, and documents that
lie in one sequence. Without a mesh they are plain layers. They work under this package's
``fully_shard``, under torch's, and alone. Nothing here shards over data-parallel ranks, and nothing
imports models.

Read first: layer.py, then linear.py; dispatch.py for experts; context.py for sequences.
"""

from megafsdp.parallel.documents import Documents
from megafsdp.parallel.embedding import PositionEmbedding, VocabParallelEmbedding
from megafsdp.parallel.experts import GroupedExperts, GroupedLinear
from megafsdp.parallel.layer import ParallelModule
from megafsdp.parallel.linear import Linear, OutputLayer
from megafsdp.parallel.local import localized
from megafsdp.parallel.loss import cross_entropy
from megafsdp.parallel.mappings import gather_vocabulary
from megafsdp.parallel.norm import LayerNorm, RMSNorm
from megafsdp.parallel.parallelize import parallelize
from megafsdp.parallel.router import (
    RoutedBatch,
    Router,
    RouterMetrics,
    end_router_step,
    router_metrics,
    scale_auxiliary_losses,
)

__all__ = [
    "Documents",
    "GroupedExperts",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "OutputLayer",
    "ParallelModule",
    "PositionEmbedding",
    "RMSNorm",
    "RoutedBatch",
    "Router",
    "RouterMetrics",
    "VocabParallelEmbedding",
    "cross_entropy",
    "end_router_step",
    "gather_vocabulary",
    "localized",
    "parallelize",
    "router_metrics",
    "scale_auxiliary_losses",
]
