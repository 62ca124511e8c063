"""Layers that tensor parallelism cuts, with the sequence cut beside them.

Megatron's layers: linear maps by columns and rows, a word embedding and an output layer by the
vocabulary, norms that know of a cut sequence, and the loss of a cut vocabulary. Without a mesh they
are plain layers. They work under this package's ``fully_shard``, under torch's, and alone. Nothing
here shards over data-parallel ranks, and nothing imports models.

Read first: layer.py, then linear.py.
"""

from megafsdp.parallel.embedding import PositionEmbedding, VocabParallelEmbedding
from megafsdp.parallel.layer import ParallelModule
from megafsdp.parallel.linear import Linear, OutputLayer
from megafsdp.parallel.local import localized
from megafsdp.parallel.loss import cross_entropy
from megafsdp.parallel.mappings import gather_vocabulary
from megafsdp.parallel.norm import LayerNorm, RMSNorm
from megafsdp.parallel.parallelize import parallelize

__all__ = [
    "LayerNorm",
    "Linear",
    "OutputLayer",
    "ParallelModule",
    "PositionEmbedding",
    "RMSNorm",
    "VocabParallelEmbedding",
    "cross_entropy",
    "gather_vocabulary",
    "localized",
    "parallelize",
]
