"""`FlatReduction`: from a buffer of unsharded gradients to this rank's shard of their mean.

Gradients are averaged over all data-parallel ranks, whatever the strategy and the mesh. Where ranks
hold copies of a shard, their sums are added up in a second stage, `two_stages`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import (
    PendingReduction,
    ReduceScatter,
    ShardGroup,
    Streams,
    Then,
    Waitable,
)
from composable_shard.layout import FlatLayout
from composable_shard.options import UnitSettings
from composable_shard.tensor import UnitLabel
from composable_shard.torch_private import storage_of

_Kind = tuple[torch.dtype, torch.device]


class ScratchPool:
    """Memory that the reductions of a tree share: only one at a time is in its first stage.

    It grows to the second-largest size that was asked for. So the one unit that needs more, mostly
    the root, keeps no memory: it gets new memory in each step, when the activations are gone.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Kind, Tensor] = {}
        self._largest: dict[_Kind, int] = {}  # storage of the one unit's buffer that needs more

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return memory of shape `(numel,)`; it may be the memory returned before.

        Args:
            numel: Number of elements.
            like: The buffer that is reduced.
        """
        key = like.dtype, like.device
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = like.new_empty(numel)
        elif buffer.numel() < numel:
            if self._largest.setdefault(key, owner := storage_of(like)) == owner:
                return like.new_empty(numel)
            del self._largest[key]
            buffer = self._buffers[key] = like.new_empty(numel)
        return buffer[:numel]


class FlatReduction:
    """The reduction of one flat gradient, over the ranks that share the flat parameter.

    `start` issues the reduce-scatter, `end_first_stage` or `finish` waits for it; `deferred` stays
    None. `TwoStageReduction` overrides what follows: the all-reduce is issued where the first stage
    ends (on a side stream: together with it), and `finish` waits for both. If it is postponed,
    `finish` adds the shard to `deferred` and returns None.

    Attributes:
        has_second_stage: Whether ranks hold copies of the shard, [Note: Two stages].
        shard_group: The ranks that share the flat parameter, and the ranks that hold copies.
        label: Label of the unit, for messages.
        settings: The unit's: the divisor, and what takes the place of its collectives.
        main_dtype: Dtype of `deferred`, and of results that need no further reduction.
        output_dtype: Dtype in which the ranks' terms are added up.
        own_numel: Elements of this rank's shard: `layout.shard_numel` where shards are even.
        nbytes: Of the buffers that it reduces.
        num_terms: The scratch memory that it needs beside a buffer, in shards.
        output: Shape `(own_numel,)`: output of the reduction in flight; None without one.
        deferred: Shape `(own_numel,)`, reduce-scattered; a second stage is postponed.
    """

    has_second_stage = False

    def __init__(self, shard_group: ShardGroup, layout: FlatLayout) -> None:
        self.main_dtype = self.output_dtype = torch.get_default_dtype()
        self.shard_group = shard_group
        self._layout = layout
        self._num_ranks = shard_group.num_ranks
        self.own_numel = layout.cut(shard_group.rank + 1) - layout.cut(shard_group.rank)
        self.nbytes = self.num_terms = 0
        self._is_in_place = False
        self.label = UnitLabel("?")
        self.settings = UnitSettings()
        self.deferred: Tensor | None = None
        self._reduce_scatter: ReduceScatter | None = None  # where several ranks share
        self._scatter: PendingReduction | None = None  # in flight
        self.output: Tensor | None = None
        # For the output, if each rank holds the whole parameter: a reduce-scatter applies the scale
        # that it was started with itself.
        self._scale = 1.0
        self._is_deferred = False
        # On a side stream: the point at which the result is complete, and the stream with the
        # memory that it reads until then.
        self._done: Waitable | None = None
        self._read: tuple[torch.Stream, Tensor | None, Tensor | None] | None = None

    def bind(
        self,
        reduce_dtype: torch.dtype,
        main_dtype: torch.dtype,
        device: torch.device,
        *,
        is_in_place: bool,
    ) -> None:
        """Prepare for buffers of this dtype and device, which need not be the mesh's.

        A second stage travels in the dtype of the first. If the main dtype is narrower than the
        reduce dtype, only the result is rounded to it, once. `is_in_place`: the output is this
        rank's part of the buffer.
        """
        group, self.main_dtype = self.shard_group, main_dtype
        self.nbytes = self._layout.padded_numel * reduce_dtype.itemsize
        is_wider = not self.has_second_stage and reduce_dtype != main_dtype
        self.output_dtype = (
            torch.promote_types(reduce_dtype, main_dtype) if is_wider else reduce_dtype
        )
        self._is_in_place = is_in_place or self.output_dtype != reduce_dtype
        if group.size > 1:
            self._choose_sum(reduce_dtype, device)

    def follow(self, settings: UnitSettings) -> None:
        """Follow the settings of the unit from now on."""
        before, self.settings = self.settings, settings
        if settings.comm_hook is not before.comm_hook and (now := self._reduce_scatter) is not None:
            self._choose_sum(now.dtype, now.device)

    def _choose_sum(self, dtype: torch.dtype, device: torch.device) -> None:
        """Choose what sums over the shard group: a reduce-scatter, or what takes its place."""
        ranks, layout, other = self.shard_group, self._layout, self.settings.comm_hook
        arguments = ranks.reduce_group or ranks.group, dtype, device, layout.uneven_numels
        if other is None:
            self._reduce_scatter = ReduceScatter(*arguments)
        else:
            gaps, before = layout.padding_ranges(), self._reduce_scatter
            self._reduce_scatter = other.make_sum(*arguments, gaps=gaps, before=before)
        self.num_terms = self._reduce_scatter.scratch_parts(in_place=self._is_in_place)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of its first collective; None if that is unknown, or if there are several."""
        return None if self._reduce_scatter is None else self._reduce_scatter.launch_group

    def start(
        self,
        buffer: Tensor,
        scratch: Tensor | None,
        streams: Streams | None,
        *,
        output: Tensor | None,
        prescale: float,
        is_deferred: bool,
    ) -> None:
        """Start reducing `buffer`, on the reduce stream where there are streams.

        Args:
            buffer: Shape `(padded_numel,)`, packed on the current stream.
            scratch: Memory of `num_terms` shards; None for none.
            streams: The side streams of an accelerator.
            output: Shape `(own_numel,)`, where the result goes: this rank's part of `buffer`, or
                memory of the main dtype. None for new memory.
            prescale: Factor by which the gradients were multiplied already.
            is_deferred: Whether to postpone the second stage, if there is one.
        """
        self._is_deferred = is_deferred
        scale = 1.0 / (self.settings.gradient_divide_factor or self._num_ranks) / prescale
        if streams is None:
            self.output = self._issue(buffer, scratch, scale, output)
            return
        stream = streams.reduce_stream
        # [Note: Streams and memory]; the gradients were packed on the current stream.
        stream.wait_stream(torch.accelerator.current_stream())
        self._read = stream, scratch, self.deferred  # `buffer` stays until `free_input` anyway
        with stream:
            output = self._issue(buffer, scratch, scale, output)
            # All that follows is issued now too: `point_after` calls `stages.wait()`, by which the
            # stream waits and not this thread. In a launch, [Note: Launches], it does so at the end
            # of that.
            stages = Then((), partial(self._end_on_stream, stream, output))
            self._done = streams.point_after(stream, stages)
        self.output = output

    def _end_on_stream(self, stream: torch.Stream, output: Tensor) -> None:
        """Let a side stream do all that comes after the first collective was issued."""
        self._end_scatter()
        if self._scale != 1.0:
            output.mul_(self._scale)

    def _issue(
        self, buffer: Tensor, scratch: Tensor | None, scale: float, output: Tensor | None
    ) -> Tensor:
        if output is None:
            output = buffer.new_empty(self.own_numel, dtype=self.output_dtype)
        if self._reduce_scatter is not None:
            self._scale, unit = 1.0, self.label.text
            self._scatter = self._reduce_scatter.start(output, buffer, scratch, scale, unit=unit)
        else:
            self._scale = scale
            self._issue_whole(output, buffer)
        return output

    def _issue_whole(self, output: Tensor, buffer: Tensor) -> None:
        """Reduce what one rank of each shard group holds all of; no other rank has gradients."""
        output.copy_(buffer)

    def _end_scatter(self) -> Tensor | None:
        if self._scatter is None:
            return None
        output = self._scatter.finish()
        self._scatter = None  # last: an interrupted one is abandoned before memory is freed
        return output

    def end_first_stage(self) -> None:
        """Wait until the buffer is free; without a second stage the result is complete then."""
        self._end_scatter()

    def finish(self) -> Tensor | None:
        """Wait; return the result, or None if a second stage was postponed."""
        output, self.output = self.output, None
        if output is None:
            return None
        if self._done is not None:
            # After this wait the current stream may reuse the buffers.
            self._done.wait()
            self._done = self._read = None
        elif self._scatter is not None:
            self._end_scatter()
        elif self._scale != 1.0:
            output.mul_(self._scale)
        return output

    def drop(self) -> None:
        """Forget reductions in flight or postponed, once the backend no longer uses the buffers."""
        self.abandon()
        self.deferred = None

    def abandon(self) -> None:
        """Forget the reduction in flight, once the backend no longer uses the buffers."""
        if self._scatter is not None:
            self._scatter.abandon()
        self._scatter = None
        self.shard_group.wait_for_interrupted()
        if self._read is not None:
            # The stream may read buffers that are about to be reused.
            torch.accelerator.current_stream().wait_stream(self._read[0])
        self._done = self._read = self.output = None
