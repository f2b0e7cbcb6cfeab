"""Clipping, gradient scaling, and optimizer state made before sharding.

Read `clipping` first, then `optimizer_state`.
"""

from composable_shard.optim.clipping import clip_grad_norm_
from composable_shard.optim.grad_scaler import ShardedGradScaler
from composable_shard.optim.optimizer_state import (
    find_scalar_keys,
    has_stepped,
    made_state,
    shard_optimizer_state,
    with_local_state,
)

__all__ = ["with_local_state"]
