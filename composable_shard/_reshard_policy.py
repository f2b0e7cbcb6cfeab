"""What is kept of a unit's full parameters between its forward and its backward."""

from __future__ import annotations

from composable_shard._mesh import ShardGroup, SmallGroup
from composable_shard._state import ShardState
from composable_shard.api import ShardingStrategy

__all__ = ["ReshardAfterForward", "apply_policy", "check_policy", "find_small_group"]

ReshardAfterForward = bool | int | None


def check_policy(value: ReshardAfterForward, shard_size: int) -> ReshardAfterForward:
    """Check `reshard_after_forward` and return it, as a truth value where a number means one.

    Args:
        value: What the user gave.
        shard_size: Ranks that share the unit.

    Raises:
        ValueError: If it is neither a truth value, None nor a divisor of `shard_size`.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(
            "expected reshard_after_forward to be True, False, None or a divisor of the "
            f"{shard_size} ranks that share the unit, got {value!r}"
        )
    if value in (1, shard_size):
        return value == shard_size
    return value


def apply_policy(state: ShardState, value: ReshardAfterForward) -> None:
    """Make a checked value count from the unit's next forward on.

    A number makes a process group, the first time: all ranks must call this alike. Units whose
    strategy keeps parameters unsharded stay as they are.
    """
    if state.strategy is not ShardingStrategy.FULL_SHARD:
        return
    state.reshard_after_forward = value
    for handle in state.handles:
        handle.small_group = find_small_group(handle.shard_group, value)


def find_small_group(shard_group: ShardGroup, value: ReshardAfterForward) -> SmallGroup | None:
    """Return the ranks that a checked number speaks of, or None where it is none."""
    if value is None or isinstance(value, bool):
        return None
    return SmallGroup.of(shard_group, value)
