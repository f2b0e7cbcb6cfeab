"""The rule for `cat`, [Note: Vectors in parts]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composable_shard.tensor.concatenation import concatenated
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.gathering import refuse_wrappers
from composable_shard.tensor.operands import shards_in, unsupported
from composable_shard.tensor.rule_table import Rule
from composable_shard.torch_private import OpOverload, is_in_step

aten = torch.ops.aten


def _cat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shards = args[0]
    _check_owners(func, shards)
    is_flat = all(isinstance(shard, FlatShard) and shard.dim() == 1 for shard in shards)
    if not is_flat or len({shard.dtype for shard in shards}) > 1:
        raise unsupported(func, args)
    refuse_wrappers(shards)
    return concatenated(shards)


def _check_owners(func: OpOverload, tensors: Sequence[Tensor]) -> None:
    """Refuse to join what one rank owns into a vector, in a step: the other ranks join others."""
    if not is_in_step() or any(tensor.dim() != 1 for tensor in tensors):
        return
    specs = [shard._shard_spec for shard in shards_in(tensors)]
    if len({spec.label for spec in specs}) == 1:  # with padding, or parts of one parameter
        return
    for spec in specs:
        if spec.owner is not None and not spec.is_alone:
            raise RuntimeError(
                f"{func.overloadpacket} joins '{spec.label.fqn}' {tuple(spec.shape)} "
                f'(granularity="param") with other parameters, and each rank has only the values '
                "of those that it owns, so that each would take a step of its own. Shard the model "
                "in the default granularity for this optimizer."
            )


RULES: dict[OpOverload, Rule] = {aten.cat.default: _cat}
