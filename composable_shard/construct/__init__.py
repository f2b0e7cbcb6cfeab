"""`fully_shard`: validate, plan, build, hook.

Read `api` (the public function), `plan` (what will change) and `build` (the change) in this order.
"""

from composable_shard.construct.api import check_unit, find_shard_group, form_unit, fully_shard
from composable_shard.construct.build import group_params, lay_out
from composable_shard.construct.plan import Plan

__all__ = [
    "Plan",
    "check_unit",
    "find_shard_group",
    "form_unit",
    "fully_shard",
    "group_params",
    "lay_out",
]
