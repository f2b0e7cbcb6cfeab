"""`shard_model`: rules that choose units, and the dry run that counts their cost.

Read `api`, `rules` and `costs` first.
"""

from composable_shard.planning.api import shard_model
from composable_shard.planning.report import ShardingPlan
from composable_shard.planning.rules import by_class, by_size, transformer_blocks

__all__ = ["ShardingPlan", "by_class", "by_size", "shard_model", "transformer_blocks"]
