"""`shard_model`: rules that choose units; `estimate` and `describe`: what units cost.

Read `model_plan`, `rules` and `costs` first.
"""

from composable_shard.planning.description import DescribedUnit, Description, describe
from composable_shard.planning.estimation import Estimate, estimate, tabulate
from composable_shard.planning.model_plan import shard_model
from composable_shard.planning.rules import by_class, transformer_blocks
from composable_shard.planning.sharding_plan import ShardingPlan

__all__ = [
    "DescribedUnit",
    "Description",
    "Estimate",
    "ShardingPlan",
    "by_class",
    "tabulate",
    "transformer_blocks",
]
