"""The options of a unit and the policies in them, frozen and validated.

Read `unit_options` first, then `strategy` (what each strategy keeps, frees and sends).
"""

from composable_shard.options.advice import (
    FULL_SIZE,
    HIDDEN,
    METHOD,
    PLACEMENTS,
    VALUES,
    advise,
    check_no_others,
    warn_of_partial_save,
)
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
from composable_shard.options.strategy import (
    DEFAULT_STRATEGY,
    ShardingStrategy,
    StrategyFacts,
    StrategyName,
    strategy_of,
)
from composable_shard.options.unit_options import (
    CheckOrder,
    OptionsDict,
    ReshardAfterForward,
    UnitOptions,
    check_reshard_after_forward,
)

__all__ = [
    "DEFAULT_STRATEGY",
    "FULL_SIZE",
    "HIDDEN",
    "METHOD",
    "PLACEMENTS",
    "PRECISIONS",
    "VALUES",
    "Block",
    "CheckOrder",
    "Granularity",
    "GranularityOption",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptionsDict",
    "ReshardAfterForward",
    "ShardingStrategy",
    "StateDictOptions",
    "StrategyFacts",
    "StrategyName",
    "UnitOptions",
    "advise",
    "check_no_others",
    "check_reshard_after_forward",
    "granularity_of",
    "strategy_of",
    "warn_of_partial_save",
]
