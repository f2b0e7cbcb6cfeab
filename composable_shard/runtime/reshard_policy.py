"""The policy `reshard_after_forward`, and the part of freed values that a number keeps.

[Note: Small group]
Between forward and backward a rank may keep more than its shard and less than everything: the shard
group is divided into groups of consecutive ranks, and each group holds all values once. The
backward gathers inside this small group of neighbouring ranks.
"""

from __future__ import annotations

from functools import partial

from composable_shard.comm import ShardGroup, SmallGroup, Waitable, collectives
from composable_shard.flat_param import FullValues
from composable_shard.options import ReshardAfterForward
from composable_shard.runtime.unit import ShardState


class KeptPart:
    """This rank's part of values that are about to be freed, from which its small group has all.

    It is what the next gather starts, unless shards were written meanwhile.
    """

    def __init__(self, group: SmallGroup, full: FullValues) -> None:
        self._group, self._source = group, full.source
        self._output, self._what = full.unversioned, full.label
        self._guard = full.shard.guard
        self._writes = self._guard.num_writes
        self.part = self._output.chunk(group.size)[group.rank].clone()

    def start(self, when: str) -> Waitable | None:
        """Start gathering inside the small group."""
        if self._writes != self._guard.num_writes:
            return self._source.start(when)
        group, what = self._group.group, f"the {when} gather of {self._what}"
        return collectives.all_gather(self._output, self.part, group, what=what, is_of_step=True)


def apply_policy(state: ShardState, value: ReshardAfterForward) -> None:
    """Set `reshard_after_forward` to a checked value, from the unit's next forward on.

    A number creates a process group the first time: call it on all ranks with the same value. Does
    nothing for units whose strategy keeps parameters unsharded.
    """
    if not state.options.strategy.facts.frees_params:
        return
    state.change(reshard_after_forward=value)
    for handle in state.handles:
        group = make_small_group(handle.shard_group, value)
        handle.full.keep_with(None if group is None else partial(KeptPart, group))


def make_small_group(shard_group: ShardGroup, value: ReshardAfterForward) -> SmallGroup | None:
    """Make the group of n neighbouring ranks for a checked number n; None for other values."""
    if value is None or isinstance(value, bool):
        return None
    return SmallGroup.of(shard_group, value)
