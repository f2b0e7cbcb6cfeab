"""`fully_shard`: validate, plan, build, hook.

Read `api` (the public function), `plan` (what will change) and `build` (the change) in this order.
"""

from composable_shard.construct.api import find_shard_group, form_unit, fully_shard
from composable_shard.construct.build import group_params, lay_out
from composable_shard.construct.plan import Plan, plan_unit

__all__ = [
    "Plan",
    "find_shard_group",
    "form_unit",
    "fully_shard",
    "group_params",
    "lay_out",
    "plan_unit",
]
