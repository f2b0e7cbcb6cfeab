"""`FlatGradient`: from a unit's unsharded gradients, one by one, to this rank's reduced shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard import _collectives, _trace
from composable_shard._collectives import PendingReduction
from composable_shard._flat_shard import FlatShard, wrap
from composable_shard._layout import FlatLayout
from composable_shard._mesh import ShardGroup
from composable_shard._shard_spec import ShardSpec
from composable_shard._storage import alloc_storage, free_storage

__all__ = ["FlatGradient", "Streams", "local_gradient"]


@dataclass(frozen=True)
class Streams:
    """Side streams of an accelerator: gathers on one, reductions on the other."""

    unshard_stream: torch.Stream
    reduce_stream: torch.Stream


class FlatGradient:
    """The gradients of one flat parameter during a backward pass.

    Gradients are packed into one buffer as autograd produces them. `issue` starts the
    reduce-scatter, `finish` ends it and adds the result to `reduced`; a second round in the same
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

    Attributes:
        arrived: Which parameters' gradients are in the buffer.
        num_arrived: How many are.
        reduced: Shape `(layout.shard_numel,)`, or None before the first `finish`.
        uses_shared: Gradients, or other ranks' terms of them, are in the unsharded buffer.
    """

    def __init__(self, layout: FlatLayout, shard_group: ShardGroup, name: str) -> None:
        self.name = name
        self._layout = layout
        self._shard_group = shard_group
        self._piece_numels = layout.piece_numels(shard_group.rank)
        num_params = len(layout.numels)
        self.arrived = [False] * num_params
        self.num_arrived = 0
        self._was_used = [False] * num_params
        self.reduced: Tensor | None = None
        self.uses_shared = False
        self._is_awaited = [True] * num_params  # not counted yet in this backward
        self._num_awaited = num_params
        self._own = torch.empty(0)  # (padded_numel,), storage size 0 unless a round needs it
        self._shared = self._own  # the unsharded buffer, of the same shape
        self._own_views: list[Tensor] = []  # by parameter, in its dense shape
        self._shared_views: list[Tensor] = []  # likewise; they share the parameters' versions
        self._views: list[Tensor] | None = None  # those of the round, None between rounds
        self._prescale = 1.0
        self._is_plain = False  # gradients are copied as they are
        self._pending: PendingReduction | None = None
        self._event: torch.Event | None = None

    def bind(self, specs: list[ShardSpec], shared: Tensor, shared_views: list[Tensor]) -> None:
        """Make the own buffer and its views anew, without storage; drops what was in flight.

        Args:
            specs: The parameters', in order.
            shared: The unsharded buffer, shape `(layout.padded_numel,)`.
            shared_views: Its part for each parameter, in the dense shape.
        """
        self.drop()
        self._own = torch.empty_like(shared)
        self._own_views = [
            self._own.as_strided(spec.dense_shape, spec.dense_stride, offset)
            for spec, offset in zip(specs, self._layout.offsets, strict=True)
        ]
        free_storage(self._own)
        self._shared, self._shared_views = shared, shared_views
        # A sum of fp16 gradients may overflow where their mean does not.
        is_half = shared.dtype is torch.float16
        self._prescale = 1.0 / self._shard_group.size if is_half else 1.0
        self._is_plain = not is_half and all(spec.tensor_parallel is None for spec in specs)

    def count(self, index: int) -> bool:
        """Count an accumulated gradient; return whether it was the last that was awaited."""
        if not self._is_awaited[index]:
            return False
        # Once each: a backward nested in another, as reentrant checkpointing runs it, may
        # accumulate the gradient of one parameter again before that of another has come.
        self._is_awaited[index] = False
        self._num_awaited -= 1
        if self._num_awaited:
            return False
        self.reset_count()
        return True

    def reset_count(self) -> None:
        """Start counting anew, for the next backward."""
        if self._num_awaited == len(self.arrived):
            return
        self._is_awaited = [True] * len(self.arrived)
        self._num_awaited = len(self.arrived)

    @property
    def used(self) -> list[bool]:
        """Which parameters got a gradient on this rank since the last `publish`."""
        pairs = zip(self._was_used, self.arrived, strict=True)
        return [used or arrived for used, arrived in pairs]

    # From unsharded gradients to the reduced shard

    @property
    def is_bound(self) -> bool:
        """Whether there are buffers for gradients."""
        return bool(self._own_views)

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduction was issued and not finished."""
        return self._pending is not None

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
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._prescale != 1.0:
            gradient = gradient * self._prescale
        view = self._views[index]  # type: ignore[index]
        if self.arrived[index]:
            view.add_(gradient)
            return
        view.copy_(gradient)
        self.arrived[index] = True
        self.num_arrived += 1

    def pack_further(self, index: int, param: nn.Parameter | None) -> bool:
        """Pack the gradient of `param` into a round that is open: the short way, for most.

        Returns:
            False, having done nothing, where `pack` must be called instead.
        """
        if self._views is None or self.arrived[index] or not self._is_plain or param is None:
            return False
        gradient = param.grad
        if gradient is None or gradient.is_sparse:
            return False
        param.grad = None
        self._views[index].copy_(gradient)
        self.arrived[index] = True
        self.num_arrived += 1
        return True

    def _open(self, in_place: bool) -> None:
        self.uses_shared = in_place
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

    def issue(self, streams: Streams | None, *, may_share: bool) -> None:
        """Start the reduction; parameters without a gradient contribute zeros.

        One reduce-scatter of `layout.padded_numel` elements, on the reduce stream where there are
        streams.

        Args:
            streams: The side streams of an accelerator.
            may_share: Whether the content of the unsharded buffer is not needed any more.
        """
        if self._views is None:
            self._open(in_place=False)
        if self.num_arrived < len(self.arrived):
            for view, has_arrived in zip(self._views or (), self.arrived, strict=True):
                if not has_arrived:
                    view.zero_()
        if _trace.is_traced():
            _trace.record("issue_reduce", self.name)
        if streams is None:
            self._pending = self._reduce(may_share)
        else:
            stream = streams.reduce_stream
            # The gradients were packed on the current stream.
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                self._pending = self._reduce(may_share)
                self._pending.finish()
                self._event = stream.record_event()
        self._close()

    def _reduce(self, may_share: bool) -> PendingReduction:
        group, buffer = self._shard_group, self._shared if self.uses_shared else self._own
        output = buffer.new_empty(self._layout.shard_numel)
        scale = 1.0 / group.size / self._prescale
        scratch = None
        if _collectives.needs_scratch(group.group, buffer.device):
            scratch = self._take_scratch(may_share)
        return _collectives.reduce_scatter(output, buffer, scratch, group.group, scale)

    def _take_scratch(self, may_share: bool) -> Tensor:
        """Return the one of the two buffers that does not hold the gradients, or a new one."""
        if not self.uses_shared and not may_share:
            return torch.empty_like(self._own)
        scratch = self._own if self.uses_shared else self._shared
        self.uses_shared = True
        alloc_storage(scratch)
        return scratch

    def finish(self) -> None:
        """Wait for the reduction in flight, free the own buffer, add the result to `reduced`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            if self._event is None:
                output = pending.finish()
            else:
                # The buffers may be used anew by the current stream once this has passed.
                torch.accelerator.current_stream().wait_event(self._event)
                self._event, output = None, pending.output
        finally:
            free_storage(self._own)
            self.uses_shared = False
        if _trace.is_traced():
            _trace.record("wait_reduce", self.name)
        self.reduced = output if self.reduced is None else self.reduced.add_(output)

    def publish(self, params: list[FlatShard], specs: list[ShardSpec], used: list[bool]) -> None:
        """Set, or add to, `.grad` of the parameters that any rank used; forget `reduced`.

        Raises:
            RuntimeError: If a parameter's existing `.grad` is not a shard like the parameter.
        """
        shard, self.reduced = self.reduced, None
        self._was_used = [False] * len(self._was_used)
        if shard is None:
            return
        pieces = shard.split_with_sizes(self._piece_numels)[1::2]
        for param, spec, piece, is_used in zip(params, specs, pieces, used, strict=True):
            if not is_used:
                continue
            if param.grad is None:
                param.grad = wrap(piece, spec)
            else:
                _add_to_grad(param, piece)

    def drop(self) -> None:
        """Forget this backward's gradients, whatever was in flight, after an error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()
        self._event = None
        self.reduced = None
        self._close()
        self._was_used = [False] * len(self._was_used)
        self.reset_count()
        free_storage(self._own)
        self.uses_shared = False

    def _close(self) -> None:
        """End the round: what comes next begins a new one."""
        self._was_used = self.arrived if self.num_arrived == len(self.arrived) else self.used
        self.arrived = [False] * len(self.arrived)
        self.num_arrived = 0
        self._views = None


def _add_to_grad(param: FlatShard, shard: Tensor) -> None:
    grad = param.grad
    if not isinstance(grad, FlatShard) or grad.to_local().shape != shard.shape:
        raise RuntimeError(
            f"expected .grad of parameter '{param._shard_spec.label}' to be None or a FlatShard, "
            f"got {type(grad).__name__}. Let backward() set it, or assign a FlatShard."
        )
    grad.to_local().add_(shard)


def local_gradient(gradient: Tensor, spec: ShardSpec) -> Tensor:
    """Return the dense gradient that belongs to a parameter's local part.

    A DTensor gradient is brought to its parameter's placements first: layers with sequence
    parallelism produce partial sums.
    """
    if spec.tensor_parallel is None:
        return gradient
    mesh, placements = spec.tensor_parallel
    return cast(DTensor, gradient).redistribute(mesh, placements).to_local()
