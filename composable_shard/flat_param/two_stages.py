"""`TwoStageReduction`: the reduction of a flat gradient where ranks hold copies of its shard.

[Note: Two stages]
Where the flat parameter is sharded, a reduce-scatter leaves each rank the sum over its shard group;
where shards have copies, an all-reduce of the shard adds the other copies' sums. The second stage
needs only the shard, so the buffer is free for other use as soon as the first is done. It may be
postponed: reduce-scattered shards then add up in `deferred` until a reduction with both stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import (
    ReductionStage,
    ShardGroup,
    StageKey,
    StreamPoint,
    Waitable,
    collectives,
)
from composable_shard.flat_param.entries import zero_padding
from composable_shard.flat_param.gradient_reduction import FlatReduction
from composable_shard.layout import FlatLayout


def make_reduction(shard_group: ShardGroup, layout: FlatLayout) -> FlatReduction:
    """Return a reduction over all data-parallel ranks."""
    kind = TwoStageReduction if shard_group.replicate_groups else FlatReduction
    return kind(shard_group, layout)


class TwoStageReduction(FlatReduction):
    """A reduction whose second stage is over the ranks that hold copies, [Note: Two stages].

    Where each rank holds the whole flat parameter, there is no first stage.
    """

    has_second_stage = True

    def __init__(self, shard_group: ShardGroup, layout: FlatLayout) -> None:
        super().__init__(shard_group, layout)
        self._second_keys = [StageKey() for _ in shard_group.replicate_groups]
        self._all_reduce: Waitable | None = None  # in flight
        # On a side stream: the point at which the buffer is free.
        self._buffer_read: StreamPoint | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of its first collective; None for a comm hook, or a sum over several groups."""
        ranks = self.shard_group
        if self.settings.comm_hook is not None or ranks.size > 1:
            return super().group
        return ranks.replicate_groups[0] if len(ranks.replicate_groups) == 1 else None

    def _issue_whole(self, output: Tensor, buffer: Tensor) -> None:
        if self.settings.comm_hook is not None:  # it may quantise the padding, which is not packed
            zero_padding(buffer, self._layout)
        self._issue_all_reduce(output)  # the output is the buffer

    def _end_on_stream(self, stream: torch.Stream, output: Tensor) -> None:
        scattered = self._end_scatter()
        self._buffer_read = StreamPoint(stream)
        if scattered is not None:
            self._begin_second_stage(scattered)
        self._end(output)

    def _issue_all_reduce(self, output: Tensor) -> None:
        groups = list(zip(self.shard_group.replicate_groups, self._second_keys, strict=True))
        *earlier, last = groups
        for each in earlier:
            self._start_all_reduce(output, *each).wait()
        self._all_reduce = self._start_all_reduce(output, *last)

    def _start_all_reduce(
        self, output: Tensor, group: dist.ProcessGroup, key: StageKey
    ) -> Waitable:
        if self.settings.comm_hook is None:
            what = f"the reduction of {self.label.text}"
            return collectives.all_reduce(output, group, what=what)
        stage = ReductionStage(
            "all_reduce", output, output, group, self._scale, key, unit=self.label.text
        )
        work: Waitable = self.settings.comm_hook.reduce(stage)
        return work

    def end_first_stage(self) -> None:
        """Wait until the buffer is free; without side streams start the second stage.

        Without a first stage the buffer is needed until `finish`. On a side stream the second stage
        was issued with the first.
        """
        if self._buffer_read is not None:
            self._buffer_read.wait()
            self._buffer_read = None
            return
        output = self._end_scatter()
        if output is not None:
            self._begin_second_stage(output)

    def _begin_second_stage(self, output: Tensor) -> None:
        if self._is_deferred:
            return
        if self.deferred is not None:
            output.add_(self.deferred)
            self.deferred = None
        self._issue_all_reduce(output)

    def _end(self, output: Tensor) -> None:
        if self._all_reduce is not None:
            self._all_reduce.wait()
            self._all_reduce = None
        if self._scale != 1.0:
            output.mul_(self._scale)

    def finish(self) -> Tensor | None:
        """Wait for all stages; return the result, or None if the second was postponed."""
        output, self.output = self.output, None
        if output is None:
            return None
        if self._done is None:
            self.end_first_stage()
            self._end(output)
        else:
            # After this wait the current stream may reuse the buffers.
            self._done.wait()
            self._done = self._buffer_read = self._read = None
        if not self._is_deferred:
            return output
        # Accumulate in the main dtype, whatever dtype travelled.
        output = output.to(self.main_dtype)
        self.deferred = output if self.deferred is None else self.deferred.add_(output)
        return None

    def abandon(self) -> None:
        """Forget the reduction in flight, once the backend no longer uses the buffers."""
        if self._all_reduce is not None:
            collectives.abandon(self._all_reduce)
        self._all_reduce = self._buffer_read = None
        super().abandon()
