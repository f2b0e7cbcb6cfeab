"""Options that users pass: frozen, and free of behaviour."""

from __future__ import annotations

from enum import Enum

__all__ = ["ShardingStrategy"]


class ShardingStrategy(Enum):
    """What each rank keeps of a unit."""

    # Parameters, gradients and optimizer state are sharded at rest; a unit is gathered for its
    # forward and again for its backward. Known as ZeRO-3 and as FSDP.
    FULL_SHARD = "full_shard"
