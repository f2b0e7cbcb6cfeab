"""`FullValues`: the unsharded buffer of a flat parameter, and which values it holds.

[Note: Locked versions]
Tensors that autograd saved of the unsharded parameters must not be read while the values are
missing. So the parameters have the version `LOCKED` from when their values are freed or overwritten
until `wait` has them again. Autograd compares versions, and raises instead of reading. `wait`
restores the versions of the values if these are the same as before, and gives new ones if shards
were written meanwhile: graphs of the former values raise, as they do in a plain model. A write to
shards that are part of the buffer locks it.

[Note: Kept buffers]
Where the strategy keeps parameters unsharded, as all but `FULL_SHARD` do, and where one rank holds
them all, the unsharded buffer is never freed, and this rank's part of it is the local shard. The
optimizer writes into it, and the next forward that finds `guard.num_writes` changed gathers the
other ranks' parts in place.

[Note: Graphs of gradients]
The graph that a backward makes with create_graph reads full values too, and no hook shows when, as
its nodes are no outputs. So the values stay until the shards are written, or until `reshard`: then
reads raise. Values that stay only for a graph count as freed, and the next use gathers them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import (
    DONE,
    Streams,
    Waitable,
    collectives,
    fail,
    trace,
)
from composable_shard.flat_param.entries import zero_padding
from composable_shard.flat_param.initial_values import checksum
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.flat_param.readers import GRAPH, WRITE, Readers
from composable_shard.flat_param.sources import Source, choose_source
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.flat_param.unsharded_params import UnshardedParams
from composable_shard.tensor import UnitLabel
from composable_shard.torch_private import set_versions


class FullState(Enum):
    """What the unsharded buffer of a flat parameter holds."""

    FREED = "no full values; the buffer has no memory, unless it is a kept one"
    GATHERING = "full values that a gather still writes"
    CURRENT = "full values, as they were gathered"
    STALE = "full values of shards that were written since"
    HOLDS_GRADIENTS = "gradients in the place of values, [Note: Packing in place]"
    IS_SCRATCH = "scratch memory of a reduction: what other ranks sent of gradients elsewhere"

    __hash__ = object.__hash__  # Enum's own is a slow Python function


FREED, GATHERING, CURRENT, STALE, HOLDS_GRADIENTS, IS_SCRATCH = FullState
HAVE_VALUES = CURRENT, STALE, GATHERING  # full values are there, or a gather still writes them
_HOLD_NO_VALUES = FREED, HOLDS_GRADIENTS, IS_SCRATCH

MOVES: dict[FullState, frozenset[FullState]] = {
    FREED: frozenset({GATHERING, IS_SCRATCH}),
    GATHERING: frozenset({CURRENT, FREED}),
    CURRENT: frozenset({STALE, FREED, HOLDS_GRADIENTS, IS_SCRATCH}),
    STALE: frozenset({GATHERING, FREED, HOLDS_GRADIENTS, IS_SCRATCH}),
    HOLDS_GRADIENTS: frozenset({GATHERING, FREED}),
    IS_SCRATCH: frozenset({GATHERING, FREED}),
}


class FullValues:
    """The unsharded buffer, its state, and the parameters that are views of it.

    Args:
        shard: The shard to gather.
        buffer: Shape `(layout.padded_numel,)`.
        unversioned: The same memory for collectives: what they write to it changes no version that
            autograd has saved, [Note: Storage and autograd]. A gather's output; for gradients in
            the place of values the input of their reduction.
        own_part: Shape `(own_numel,)`, this rank's part of `unversioned`.
        is_kept: The buffer is never freed, see [Note: Kept buffers].

    Attributes:
        label: Label of the unit, for messages.
        state: What the buffer holds; `move` alone changes it.
        writes: guard.num_writes of the shard when the buffer was filled; -1: not filled.
        is_cast: A gather casts the shards' values, [Note: Main and compute dtype].
        has_separate_shard: The local shard is never part of the buffer.
        is_whole: The local shard is the buffer, so that nothing needs to be filled.
        keep: Makes `kept` of values that are freed between forward and backward; None: nothing.
        kept: What fills the buffer the next time in place of `source`, if freed values left it.
        readers: Who may still read the values: claims by name, and kinds as bits. Between a
            unit's forward and its backward a plain step has none, from the second on: autograd's
            saved tensors are spared by the order of nodes, and by versions.
        params: The parameters that are views of the buffer.
    """

    def __init__(
        self,
        shard: LocalShard,
        buffer: Tensor,
        unversioned: Tensor,
        own_part: Tensor,
        *,
        is_kept: bool,
    ) -> None:
        self.label = UnitLabel("?")
        self.shard = shard
        self.buffer = buffer
        self.unversioned = unversioned
        self.own_part = own_part
        self.is_kept = is_kept
        self.is_sharded = shard.shard_group.size > 1
        main_dtype = shard.values.dtype
        self.is_cast = not buffer.dtype == shard.wire_dtype == main_dtype
        self.has_separate_shard = self.is_cast or shard.is_offloaded
        self.is_whole = not (self.is_sharded or self.has_separate_shard)
        self.state = CURRENT if self.is_whole else FREED
        self.writes = -1
        self.readers = Readers()
        self.keep: Callable[[FullValues], Source] | None = None
        self.kept: Source | None = None
        self.params = UnshardedParams(buffer, shard.layout, self.readers)
        self._written_back = -1  # guard.num_writes after the last writeback by hand
        self._gather: Waitable | None = None  # while GATHERING

    def move(self, state: FullState) -> None:
        """Change the state by one of `MOVES`."""
        if state not in MOVES[self.state]:
            raise RuntimeError(
                f"the full values of unit '{self.label.name}' can't go from {self.state.name} to "
                f"{state.name}; please report this"
            )
        self.state = state

    def take_over(self, other: FullValues) -> None:
        """Take over name, readers and what is kept of the full values that these replace."""
        self.label, self.keep = other.label, other.keep
        self.readers.follow(other.readers)
        self.params.follow(other.params)

    @property
    def is_current(self) -> bool:
        """Whether the buffer has the shards' current values, or a gather brings them."""
        return self.writes == self.shard.guard.num_writes and self.state is not STALE

    @property
    def has_values(self) -> bool:
        """Whether the buffer holds full values, or is being filled with them."""
        return self.state in HAVE_VALUES

    def is_readable(self) -> bool:
        """Wait for a gather in flight; return whether the buffer has the current values."""
        if self.state is GATHERING and self.is_current:
            self.wait()
        # What stays for a graph alone is there until shards are written.
        has_current = self.state is CURRENT and (self.is_current or self.readers.bits & GRAPH)
        return self.is_whole or bool(has_current)

    @cached_property
    def source(self) -> Source:
        """What fills the buffer; found by the first gather of a handle without full parameters."""
        return self._find_source()

    def choose_source(self) -> None:
        """Choose how the shards fill the buffer, which has memory; issues nothing."""
        self.source = self._find_source()

    def _find_source(self) -> Source:
        return choose_source(
            self.shard,
            self.unversioned,
            self.own_part,
            self.label,
            has_separate_shard=self.has_separate_shard,
        )

    def keep_with(self, keep: Callable[[FullValues], Source] | None) -> None:
        """Choose what makes `kept` of values that are freed between forward and backward."""
        self.keep, self.kept = keep, None

    # Graphs of gradients

    def serve_graphs(self) -> None:
        """Keep the values until shards are written, see [Note: Graphs of gradients]."""
        if not self.readers.bits & GRAPH:
            self.readers.add(GRAPH)
            _watch_writes(self)

    def end_graphs(self, event: str) -> None:
        """Stop keeping the values for graphs, `WRITE` or `RESHARD`; one that reads them raises."""
        if self.readers.bits & GRAPH:
            self.readers.end(event)
            self.params.expire()

    # Gather, wait, free

    def gather(self, streams: Streams | None, when: str) -> None:
        """Start filling the buffer from the shards, after any gather that is in flight.

        See `FlatParamHandle.unshard`. If the gather fails, the values are freed.
        """
        # The wait comes first: two gathers into one buffer could end in either order. The lock
        # comes before the gather, which overwrites what a graph may read as soon as it is issued;
        # freed values were locked when they were freed.
        if self.state is GATHERING:
            self.wait()
        if self.state is CURRENT:
            self.move(STALE)
        if self.state is not FREED:
            self.params.lock()
        if trace.logs:
            trace.record("issue_gather", self.label.name)
        try:
            self.move(GATHERING)
            if streams is None or not self.is_sharded:
                alloc_storage(self.buffer)
                self._gather = (self.kept or self.source).start(when)
            else:
                self._gather = self._start_on_stream(streams, when)
        except BaseException:
            self._abandon(streams)
            raise
        # Last: if an interrupt cuts `_abandon` short, the state stays GATHERING, and with the count
        # set the next forward would take for values what nobody has written.
        self.writes = self.shard.guard.num_writes
        if self._gather is None:
            self.move(CURRENT)
        elif self.readers.bits & GRAPH:
            self.wait()

    def _start_on_stream(self, streams: Streams, when: str) -> Waitable:
        stream = streams.unshard_stream
        # The shard may just have been written by the optimizer, and the memory that the gather
        # gets may still be read by the last unit's compute: both are on the current stream.
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            alloc_storage(self.buffer)
            return streams.point_after(stream, (self.kept or self.source).start(when) or DONE)

    def wait(self) -> None:
        """Make the current stream (on CPU: the caller) wait for the gather in flight, if any.

        From then on autograd may read the values, [Note: Locked versions].
        """
        if self.state is GATHERING:
            gather = self._gather or DONE
            try:
                gather.wait()
            except BaseException as error:
                if not isinstance(error, Exception):
                    collectives.abandon(gather)  # an interrupt: the backend still writes
                self._give_up()
                if isinstance(error, RuntimeError) and isinstance(gather, dist.Work):
                    fail(error, self.shard.shard_group.group)
                raise
            self.move(CURRENT)
            self._gather = self.kept = None
            if trace.logs:
                trace.record("wait_gather", self.label.name)
        writes = self.shard.guard.num_writes if self.is_whole else self.writes
        params = self.params
        if not params.is_locked or self.state is not CURRENT or writes == -1:
            return  # -1: `expire` came while the gather ran, so its values are stale
        params.aliases.overwritten = None
        if params.version_writes != writes:
            if params.version_writes != -1:
                params.versions = [version + 1 for version in params.versions]
            params.version_writes = writes
        set_versions(params.watched, tuple(params.versions))
        params.is_locked = False
        if self.is_kept and not self.has_separate_shard:
            _watch_writes(self)

    def _abandon(self, streams: Streams | None) -> None:
        """Free the values after an error or interrupt of `gather`, which may have lost its work."""
        self.shard.shard_group.wait_for_interrupted()  # the backend may still write
        if streams is not None:
            torch.accelerator.current_stream().wait_stream(streams.unshard_stream)
        self._give_up()

    def _give_up(self) -> None:
        """Free the values after an error or interrupt; no collective may write into the buffer."""
        self._gather = self.kept = None
        self._forget()

    def free(self, *, is_backward_next: bool = False) -> None:
        """Free the values, after waiting for a gather in flight; a kept buffer stays as it is.

        Gradients and terms of a reduction stay until `end_gradients`; values that a graph may read
        stay too. Where `is_backward_next` a policy may keep some of them, in `kept`.
        """
        kept = None
        if is_backward_next and self.keep and self.state is CURRENT and self.is_current:
            kept = self.keep(self)
        self.kept = None
        if not self.is_sharded or self.state in _HOLD_NO_VALUES:
            return
        if self.state is GATHERING or self.readers.bits & GRAPH:
            # The backend still writes into the storage. Ignore errors: the values are not needed,
            # and an earlier error may be the cause.
            with suppress(RuntimeError):
                self.wait()
        if self.is_kept:
            return
        self.kept = kept
        if self.readers.bits & GRAPH:
            self.writes = -1
            return
        self._forget()
        if trace.logs:
            trace.record("free", self.label.name)

    def _forget(self) -> None:
        """Free the memory, unless the buffer is a kept one."""
        self.writes = -1  # first, and `state` last: an interrupt in between leaves stale values
        self.params.is_locked = True  # `lock` inlined, to save a call in each step
        set_versions(self.params.watched, self.params.locked)
        if not self.is_kept:
            free_storage(self.buffer, refuses_reads=True)
        if self.state is not FREED:
            self.move(FREED)

    def expire(self) -> None:
        """Mark the values as stale: other ranks may have written their shards."""
        if not self.is_sharded:
            return
        if self.state is CURRENT:
            self.move(STALE)
        elif self.state is GATHERING:
            self.writes = -1

    # Edits

    @property
    def can_write_back(self) -> bool:
        """Whether no shard was written since the gather, except by `write_back`."""
        return self.is_whole or self.shard.guard.num_writes in (self.writes, self._written_back)

    def write_back(self, *, compares: bool = False) -> None:
        """Write this rank's part of the full values, which were edited, into the shard.

        With `compares` the next backward checks that all ranks had the same full values.
        """
        self.wait()
        zero_padding(self.unversioned, self.shard.layout)
        self.shard.write_edited(self.own_part, is_cast=self.is_cast)
        self.params.forget_edits()  # before the write, which locks a kept buffer
        self.shard.guard.count_write(1 + int(checksum(self.unversioned)) if compares else 0)
        self._written_back = self.shard.guard.num_writes

    def keep_edits(self) -> bool:
        """Write back what a forward has edited, return True; graphs of these values stay valid."""
        self.params.check_can_write_back()
        self.write_back(compares=True)
        self.params.version_writes = self.shard.guard.num_writes
        if self.is_whole:
            self.wait()  # no gather will
        return True

    # Gradients in the place of values

    def hold_gradients(self) -> None:
        """Let gradients take the place of the values one by one, see [Note: Packing in place].

        The others are still read, so no version is set here: packing writes through the parameters,
        which changes theirs. `is_locked` lets the next `wait` set them all.
        """
        if self.state is not HOLDS_GRADIENTS:
            self.move(HOLDS_GRADIENTS)
        self.writes = -1
        self.kept = None
        self.params.is_locked = True

    def serve_as_scratch(self) -> None:
        """Let a reduction of gradients that are elsewhere use the memory, at once."""
        if self.state is not IS_SCRATCH:
            self.move(IS_SCRATCH)
        self.writes = -1
        self.kept = None
        self.params.lock()

    def end_gradients(self) -> None:
        """Free the memory that gradients or a reduction have taken from the values, if any has."""
        if self.state is HOLDS_GRADIENTS or self.state is IS_SCRATCH:
            self._forget()
            if trace.logs:
                trace.record("free", self.label.name)


def _watch_writes(full: FullValues) -> None:
    # Weak: a parameter, which leads to the guard, may outlive its module.
    full.shard.guard.at_next_write("full values", partial(_note_write, weakref.ref(full)))


def _note_write(full_ref: weakref.ref[FullValues]) -> None:
    """Before a write: end graphs that read the values; free the values if no claim is left."""
    full = full_ref()
    if full is None:
        return
    full.end_graphs(WRITE)
    if not full.readers.claims:
        full.free()
        full.params.lock()  # a kept buffer
