"""The options of a unit and the policies in them, frozen and validated.

Read `unit_options` first, then `strategy` (what each strategy keeps, frees and sends).
"""

from composable_shard.options.policies import (
    PRECISIONS,
    Block,
    Granularity,
    GranularityOption,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateDictOptions,
    granularity_of,
)
from composable_shard.options.strategy import DEFAULT_STRATEGY, ShardingStrategy, StrategyFacts
from composable_shard.options.unit_options import (
    ReshardAfterForward,
    UnitOptions,
    check_reshard_after_forward,
)

__all__ = [
    "DEFAULT_STRATEGY",
    "PRECISIONS",
    "Block",
    "Granularity",
    "GranularityOption",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReshardAfterForward",
    "ShardingStrategy",
    "StateDictOptions",
    "StrategyFacts",
    "UnitOptions",
    "check_reshard_after_forward",
    "granularity_of",
]
