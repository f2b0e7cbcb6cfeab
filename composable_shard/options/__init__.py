"""What a user asks for, frozen and validated.

Read `policies` first.
"""

from composable_shard.options.policies import (
    PRECISIONS,
    PREFETCH_NBYTES,
    Block,
    Granularity,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
)

__all__ = [
    "PRECISIONS",
    "PREFETCH_NBYTES",
    "Block",
    "Granularity",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardingStrategy",
    "StateDictOptions",
]
