"""Megatron-FSDP's entry points over this engine, for programs that change the import.

    from megafsdp.megatron import fully_shard_model, fully_shard_optimizer

Nothing is ignored silently: anything that would mean something else is refused by name, with a hint
on what to do. The model is changed in place and returned; there is no wrapper.
docs/from-megatron-fsdp.md has the table. Read first: fully_shard.py.
"""

from typing import NoReturn

from megafsdp.megatron.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megafsdp.megatron.keywords import (
    DistributedDataParallelConfig,
    MegatronKeywords,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from megafsdp.megatron.refusals import refuse_name

__all__ = [
    "DistributedDataParallelConfig",
    "MegatronKeywords",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]


def __getattr__(name: str) -> NoReturn:
    """Refuse names of Megatron-FSDP's package that have no counterpart, when they are imported."""
    refuse_name(name, __all__, __name__)
