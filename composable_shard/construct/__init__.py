"""`fully_shard`: validate, plan, build, hook.

Read `plan` (what will change), then `forming` (the public function, and the change).
"""

from composable_shard.construct.checks import has_forward
from composable_shard.construct.forming import find_shard_group, form_unit, fully_shard
from composable_shard.construct.grouping import group_params, lay_out
from composable_shard.construct.originals import Plan
from composable_shard.construct.plan import plan_unit
from composable_shard.construct.split_by_hand import PlainPart, plain_parts
