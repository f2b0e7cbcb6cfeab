"""The options of a unit and the policies in them, frozen and validated.

Read `unit_options` first, then `strategies`: what each strategy keeps, frees and sends.
"""

from composable_shard.options.advice import (
    AT_REST,
    HIDDEN,
    IN_GRAPH,
    KEPT,
    LOAD_FILE,
    OWNED,
    OWNED_IN_GRAPH,
    OWNED_IN_STEP,
    PLACEMENTS,
    SAVE,
    VALUES,
    WHOLE_NEEDED,
    check_options,
    check_path_order,
    describe_prefix,
)
from composable_shard.options.granularity import (
    Block,
    Granularity,
    GranularityOption,
    granularity_of,
)
from composable_shard.options.strategies import (
    DEFAULT_STRATEGY,
    ShardingStrategy,
    StrategyFacts,
    StrategyName,
    strategy_of,
)
from composable_shard.options.unit_options import (
    PRECISIONS,
    CheckOrder,
    FormName,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptionsDict,
    ReshardAfterForward,
    StateDictOptions,
    UnitOptions,
    check_bool,
    check_reshard_after_forward,
)
from composable_shard.options.unit_settings import UnitSettings
