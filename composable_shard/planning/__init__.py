"""`shard_model`: rules that choose units; `estimate` and `describe`: what units cost.

Read `api`, `rules` and `costs` first.
"""

from composable_shard.planning.api import shard_model
from composable_shard.planning.description import DescribedUnit, Description, ShardingPlan, describe
from composable_shard.planning.estimation import Estimate, estimate, tabulate
from composable_shard.planning.rules import by_class, by_size, transformer_blocks

__all__ = [
    "DescribedUnit",
    "Description",
    "Estimate",
    "ShardingPlan",
    "by_class",
    "by_size",
    "tabulate",
    "transformer_blocks",
]
