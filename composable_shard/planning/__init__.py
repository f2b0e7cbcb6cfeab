"""`shard_model`: rules that choose units, the dry run that counts their cost, and `describe`.

Read `api`, `rules` and `costs` first.
"""

from composable_shard.planning.api import shard_model
from composable_shard.planning.description import DescribedUnit, Description, describe
from composable_shard.planning.report import ShardingPlan
from composable_shard.planning.rules import by_class, by_size, transformer_blocks

__all__ = [
    "DescribedUnit",
    "Description",
    "ShardingPlan",
    "by_class",
    "by_size",
    "describe",
    "shard_model",
    "transformer_blocks",
]
