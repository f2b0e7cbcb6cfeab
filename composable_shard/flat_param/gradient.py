"""`FlatGradient`: from a unit's unsharded gradients, one by one, to this rank's reduced shard."""

from __future__ import annotations

from collections.abc import Sequence
from operator import or_

import torch
from torch import Tensor, nn

from composable_shard.comm import ShardGroup, Streams, trace
from composable_shard.flat_param.grad_pieces import (
    AwaitedGradients,
    GradPieces,
    SmallGradients,
    move_out_gradients,
    packing_scale,
    set_gradients,
    write_gradient,
    write_gradients,
)
from composable_shard.flat_param.reduction import FlatReduction, ScratchPool
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.layout import FlatLayout
from composable_shard.tensor import FlatShard, ShardSpec

__all__ = ["FlatGradient"]


class FlatGradient:
    """The gradients of one flat parameter during a backward pass.

    Gradients are packed into one buffer as autograd produces them. `issue` starts their
    reduction, `finish` ends it and adds the result to `reduced`; a second round in the same
    backward (a gradient that arrives late) adds to it too. `publish` sets the sharded parameters'
    `.grad` from it.

    [Note: Packing in place]
    When autograd has accumulated the whole gradient of a parameter, every node that used the
    parameter has run, so the gradient may take the place of the value: the unsharded buffer has
    just the right layout, and the backward of a unit then needs no second buffer. Where a later use
    is possible (create_graph, a backward nested in a backward, a forward that still runs, a
    detached alias), the gradients are packed into a buffer of their own. The write changes the
    parameter's version counter, so what the last resort misses raises in autograd; the next
    gather restores the counters.

    [Note: Persistent gradients]
    Under `SHARD_OPTIM`, and where each rank holds the whole parameter, the buffer stays from the
    first backward on. Gradients of microbatches that are not reduced add up in it, it is reduced in
    place, and the published `.grad`s are views of the result: a step allocates nothing. A round
    that begins while they are still set moves them out first.

    Where one rank trains alone, nothing is packed: autograd's own gradients are published, cast.

    Attributes:
        arrived: Which parameters' gradients are in the buffer.
        num_arrived: How many are.
        reduced: Shape `(layout.shard_numel,)`, or None before the first `finish`.
        uses_shared: Gradients, or other ranks' terms of them, are in the unsharded buffer.
        reduction: Reduces the buffer.
        is_persistent: See [Note: Persistent gradients].
        is_alone: No other rank has gradients.
        packs_always: Gradients are packed also if this backward does not reduce them.
        can_share: Gradients may be packed in place.
        awaited: Counts the parameters whose gradient this backward has accumulated.
        small: Those whose gradients wait to be packed together.
    """

    def __init__(
        self, layout: FlatLayout, shard_group: ShardGroup, name: str, *, is_persistent: bool
    ) -> None:
        self.name = name
        self.reduction = FlatReduction(shard_group, layout)
        self.is_alone = shard_group.num_ranks == 1
        self.is_persistent = is_persistent
        self._layout = layout
        self._shard_group = shard_group
        self._pieces = GradPieces(layout, shard_group.rank, is_kept=self.is_persistent)
        self.arrived = [False] * len(layout.numels)
        self.num_arrived = 0
        self._was_used = [False] * len(layout.numels)
        self.reduced: Tensor | None = None
        self.uses_shared = False
        self.awaited = AwaitedGradients(len(layout.numels))
        self.small = SmallGradients()
        self._own = torch.empty(0)  # (padded_numel,), storage size 0 unless a round needs it
        self._shared = self._own  # the unsharded buffer, of the same shape
        self._own_part: Tensor | None = None  # (shard_numel,), where a reduction ends in place
        self._result = self._own  # (shard_numel,), persistent memory of the main dtype, if needed
        self.packs_always = self.is_persistent
        self.can_share = True
        self._own_views: list[Tensor] = []  # by parameter, in its dense shape
        self._shared_views: list[Tensor] = []  # likewise; they share the parameters' versions
        self._views: list[Tensor] | None = None  # those of the round, None between rounds
        self._prescale = 1.0
        # The same, None for 1: a kernel takes a tensor of 0 dimensions fastest.
        self._factor: Tensor | None = None
        self._is_plain = False  # gradients are copied as they are
        self._num_terms = 0  # shards' memory that a reduction needs beside the buffer

    def bind(
        self,
        specs: list[ShardSpec],
        shared: Tensor,
        shared_views: list[Tensor],
        reduce_dtype: torch.dtype,
        main_dtype: torch.dtype,
    ) -> None:
        """Make the own buffer and its views anew, without storage; drops what was in flight.

        Args:
            specs: The parameters', in order.
            shared: The unsharded buffer, shape `(layout.padded_numel,)`.
            shared_views: Its part for each parameter, in the dense shape.
            reduce_dtype: The own buffer's.
            main_dtype: That of `reduced`.
        """
        self.drop()
        group = self._shard_group
        self._own_part = None
        self._own = torch.empty_like(shared, dtype=reduce_dtype)
        self._result = self._own.new_empty(0, dtype=main_dtype)
        self.reduction.bind(reduce_dtype, main_dtype, shared.device)
        self.can_share = reduce_dtype == shared.dtype
        self.packs_always = self.is_persistent or not self.can_share
        self._own_views = [
            self._own.as_strided(spec.dense_shape, spec.dense_stride, offset)
            for spec, offset in zip(specs, self._layout.offsets, strict=True)
        ]
        self._num_terms = self.reduction.scratch_parts(in_place=self.is_persistent)
        if self.is_persistent and self.reduction.output_dtype == reduce_dtype:
            start, end = self._layout.shard_range(group.rank)
            self._own_part = self._own[start:end]
        free_storage(self._own)
        self._shared, self._shared_views = shared, shared_views
        self._prescale, factor = packing_scale(group, reduce_dtype, is_cast=not self.can_share)
        self._factor = None if self._prescale == 1.0 else factor
        self.small.bind(self._own_views)
        self._is_plain = all(spec.tensor_parallel is None for spec in specs)

    def release(self) -> None:
        """Give up the buffers, of parameters that are frozen now; published gradients stay."""
        self.drop()
        self._own = self._shared = self._result = torch.empty(0)
        self._own_part = None
        self._own_views, self._shared_views = [], []

    @property
    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank since the last `publish`."""
        return list(map(or_, self._was_used, self.arrived))

    # From unsharded gradients to the reduced shard

    @property
    def is_bound(self) -> bool:
        """Whether there are buffers for gradients."""
        return bool(self._own_views)

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction was issued and not finished."""
        return self.reduction.output is not None

    @property
    def is_partial(self) -> bool:
        """Whether gradients are reduced over the shard group only, so far."""
        return self.reduction.partial is not None

    @property
    def may_wait(self) -> bool:
        """Whether small gradients may wait for others, in the round that is open."""
        return self._views is not None and self._is_plain

    @property
    def is_open(self) -> bool:
        """Whether a round has begun: gradients are in the buffer, or a reduction is next."""
        return self._views is not None

    def note_arrival(self, index: int) -> None:
        """Note that parameter `index` has a gradient, which stays where autograd put it."""
        if not self.arrived[index]:
            self.arrived[index] = True
            self.num_arrived += 1

    def pack(self, index: int, gradient: Tensor, *, in_place: bool) -> None:
        """Copy the gradient of parameter `index` into the buffer: one kernel, one pass.

        Args:
            index: Position of the parameter.
            gradient: Its dense gradient.
            in_place: Whether a round that begins now may use the unsharded buffer,
                see [Note: Packing in place].
        """
        if self._views is None:
            self._open(in_place)
        view = self._views[index]  # type: ignore[index]
        if self.arrived[index]:
            view.add_(gradient, alpha=self._prescale)
        else:
            write_gradient(view, gradient, self._factor)
            self.note_arrival(index)

    def pack_further(self, index: int, param: nn.Parameter | None) -> bool:
        """Pack the gradient of `param` into a round that is open: the short way, for most.

        Returns:
            False, having done nothing, where `pack` must be called instead.
        """
        gradient = None if param is None else param.grad
        if self._views is None or self.arrived[index] or not self._is_plain or gradient is None:
            return False
        param.grad = None  # type: ignore[union-attr]
        write_gradient(self._views[index], gradient, self._factor)
        self.note_arrival(index)
        return True

    def pack_small(self, params: Sequence[nn.Parameter | None]) -> None:
        """Pack the gradients that wait, of all parameters in order: [Note: Small gradients]."""
        indices, views = self.small.take(), self._views
        if indices and views is not None:
            chosen = [views[index] for index in indices]
            waiting = [params[index] for index in indices]
            for position in write_gradients(chosen, waiting, self._factor):
                self.arrived[indices[position]] = True
                self.num_arrived += 1

    def _open(self, in_place: bool) -> None:
        self.uses_shared = in_place
        if self.is_persistent and self.reduced is not None:
            # An earlier round of this backward left it in the buffer.
            self.reduced = self.reduced.clone()
        if in_place:
            self._views = self._shared_views
        else:
            alloc_storage(self._own)
            self._views = self._own_views

    def move_out(self) -> None:
        """Move gradients packed in place to the own buffer: the values are wanted again."""
        if not self.uses_shared or self._views is None:
            return
        self._open(in_place=False)
        for own, shared, has_arrived in zip(
            self._own_views, self._shared_views, self.arrived, strict=True
        ):
            if has_arrived:
                own.copy_(shared)

    def issue(
        self,
        streams: Streams | None,
        scratch: ScratchPool,
        *,
        may_share: bool,
        is_deferred: bool = False,
    ) -> None:
        """Start the reduction; parameters without a gradient contribute zeros.

        A reduce-scatter of `layout.padded_numel` elements over the shard group, and an all-reduce
        of `layout.shard_numel` over the ranks that hold copies, as far as there are such; on the
        reduce stream where there are streams.

        Args:
            streams: The side streams of an accelerator.
            scratch: The tree's.
            may_share: Whether the content of the unsharded buffer is not needed any more.
            is_deferred: Whether to put the all-reduce off.
        """
        if self.is_alone:
            self._close()
            return
        if self._views is None:
            self._open(in_place=False)
        if self.num_arrived < len(self.arrived):
            for view, has_arrived in zip(self._views or (), self.arrived, strict=True):
                if not has_arrived:
                    view.zero_()
        if trace.logs:
            trace.record("issue_reduce", self.name)
        buffer = self._shared if self.uses_shared else self._own
        output = self._own_part
        if output is None and self.is_persistent:
            output = self._main_memory()
        self.reduction.start(
            buffer,
            self._take_scratch(scratch, may_share and self.can_share),
            streams,
            output=output,
            prescale=self._prescale,
            is_deferred=is_deferred,
        )
        self._close()

    def _main_memory(self) -> Tensor:
        """Return the persistent memory of [Note: Reduce dtype]."""
        if self._result.numel() == 0:
            self._result = self._result.new_empty(self.reduction.own_numel)
        return self._result

    def _take_scratch(self, pool: ScratchPool, may_share: bool) -> Tensor | None:
        """Return the one of the two buffers that does not hold the gradients, or other memory."""
        if self._num_terms == 0 or self.reduction.hook_name:
            return None
        numel = self._num_terms * self.reduction.own_numel
        if self.is_persistent:
            return pool.take(numel, self._own)
        scratch = self._own if self.uses_shared else self._shared
        may_share = self._num_terms == self._shard_group.size and (self.uses_shared or may_share)
        if not may_share or numel > scratch.numel():  # as with an uneven shard, and a large one
            return self._own.new_empty(numel)
        self.uses_shared = True
        alloc_storage(scratch)
        return scratch[:numel]

    def advance(self) -> None:
        """Wait until the reduction in flight needs no buffer any more; free the own buffer.

        Where the result is the whole buffer there is nothing to wait for before `finish`.
        """
        if not self._shard_group.replicate_groups:
            self.finish()
        elif self._shard_group.size > 1:
            try:
                self.reduction.advance()
            finally:
                self._free_own()

    def _free_own(self) -> None:
        self.uses_shared = False
        if not self.is_persistent:
            free_storage(self._own)

    def finish(self) -> None:
        """Wait for the reduction in flight, free the own buffer, add the result to `reduced`."""
        if not self.is_in_flight:
            return
        try:
            output = self.reduction.finish()
        finally:
            self._free_own()
        if trace.logs:
            trace.record("wait_reduce", self.name)
        if output is not None and output.dtype != self.reduction.main_dtype:
            into = self._main_memory() if self.is_persistent else None
            output = output.to(self.reduction.main_dtype) if into is None else into.copy_(output)
        if output is not None:
            self.reduced = output if self.reduced is None else self.reduced.add_(output)

    def move_out_published(self, params: list[FlatShard]) -> None:
        """Give published gradients that are views of the buffer memory of their own."""
        move_out_gradients(params, self._result if self._result.numel() else self._own)

    def publish(
        self,
        params: list[FlatShard],
        specs: list[ShardSpec],
        used: list[bool],
        own: list[Tensor | None] | None = None,
    ) -> None:
        """Set, or add to, `.grad` of the parameters that any rank used; forget `reduced`.

        Args:
            params: The sharded parameters.
            specs: Theirs.
            used: Which of them any rank used.
            own: Their gradients, where no reduction gave `reduced`.

        Raises:
            RuntimeError: If a parameter's existing `.grad` is not a shard like the parameter.
        """
        if self.is_partial:
            return  # until the all-reduce that was put off
        shard, self.reduced = self.reduced, None
        self._was_used = [False] * len(self._was_used)
        if own is not None:
            set_gradients(params, self._pieces.wrap(own, specs), used)
        elif shard is not None:
            set_gradients(params, self._pieces.cut(shard, specs), used)

    def drop(self) -> None:
        """Forget this backward's gradients, whatever was in flight, after an error."""
        self.reduction.drop()
        self.reduced = None
        self._pieces.forget()
        self._close()
        self._was_used = [False] * len(self._was_used)
        self.awaited.reset()
        self._free_own()

    def _close(self) -> None:
        """End the round: what comes next begins a new one."""
        self._was_used = self.arrived if self.num_arrived == len(self.arrived) else self.used
        self.arrived = [False] * len(self.arrived)
        self.num_arrived = 0
        self._views = None
        self.small.close()
