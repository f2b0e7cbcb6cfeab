"""The options of a unit and the policies in them, frozen and validated.

Read `unit_options` first: at its end `ShardingStrategy`, what each keeps, frees and sends.
"""

from composable_shard.options.advice import (
    FULL_SIZE,
    HIDDEN,
    INTO_PLAIN,
    PLACEMENTS,
    SAVE,
    VALUES,
    WHOLE_NEEDED,
    check_no_others,
    check_path_order,
)
from composable_shard.options.unit_options import (
    DEFAULT_STRATEGY,
    PRECISIONS,
    Block,
    CheckOrder,
    Granularity,
    GranularityOption,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptionsDict,
    ReshardAfterForward,
    ShardingStrategy,
    StateDictOptions,
    StrategyFacts,
    StrategyName,
    UnitOptions,
    check_reshard_after_forward,
    granularity_of,
    strategy_of,
)
