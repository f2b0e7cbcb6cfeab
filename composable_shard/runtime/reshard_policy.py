"""The policy `reshard_after_forward`, and the part of freed values that a number keeps.

[Note: Small group]
Between forward and backward a rank may keep more than its shard and less than everything: the shard
group is divided into groups of consecutive ranks, and each group holds all values once. The
backward gathers inside this small group of neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Callable
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


class ReshardPolicy:
    """A checked value of `reshard_after_forward`, for units that some ranks share."""

    def __init__(self, value: ReshardAfterForward, shard_group: ShardGroup) -> None:
        """Make the small groups of a number; only the first call with the same number makes any.

        Call it on all ranks with the same value.
        """
        self._value = value
        self._keep: Callable[[FullValues], KeptPart] | None = None
        if value is not None and not isinstance(value, bool):
            self._keep = partial(KeptPart, SmallGroup.of(shard_group, value))

    def apply(self, state: ShardState) -> None:
        """Follow the policy from the unit's next forward on, if its strategy frees parameters."""
        if not state.options.strategy.facts.frees_params:
            return
        state.change(reshard_after_forward=self._value)
        for handle in state.handles:
            handle.full.keep_with(self._keep)
