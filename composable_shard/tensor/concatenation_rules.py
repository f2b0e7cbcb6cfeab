"""The rule for `cat`, [Note: Vectors in parts]."""

from __future__ import annotations

from typing import Any

import torch

from composable_shard.tensor.concatenation import concatenated
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.gathering import refuse_wrappers
from composable_shard.tensor.operands import unsupported
from composable_shard.tensor.rule_table import Rule
from composable_shard.torch_private import OpOverload

aten = torch.ops.aten


def _cat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shards = args[0]
    is_flat = all(isinstance(shard, FlatShard) and shard.dim() == 1 for shard in shards)
    if not is_flat or len({shard.dtype for shard in shards}) > 1:
        raise unsupported(func, args)
    refuse_wrappers(shards)
    return concatenated(shards)


RULES: dict[OpOverload, Rule] = {aten.cat.default: _cat}
