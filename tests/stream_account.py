"""Streams that run nothing: they keep account of who has waited for whom, and find races.

On a CPU every operation is over when it returns. `StreamAccount` treats each as if it ran on the
stream that is current, and notes who touches which memory. Two accesses of which one writes must be
ordered by waits. Memory that is freed belongs to the stream that it was allocated on, which may get
it again at once, as from the caching allocator: that stream must have waited for all who used it.
Collectives run beside all that, each kind on a stream of its own, until their work is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composable_shard.comm.devices import StreamCopies, Streams
from composable_shard.tensor.flat_shard import FlatShard

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allreduce",
    "alltoall_base",
    "broadcast",
    "reduce",
    "reduce_scatter",
)
_Clock = dict["FakeStream", int]  # how far each stream is known to have come


@dataclass(eq=False)
class FakeEvent:
    """What the library uses of a `torch.Event`."""

    account: StreamAccount
    clock: _Clock

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Let the host wait: whatever is issued from now on comes after."""
        for stream in self.account.all_streams:
            stream.wait_event(self)


@dataclass(eq=False)
class FakeStream:
    """What the library uses of a `torch.Stream`."""

    name: str
    account: StreamAccount
    clock: _Clock = field(default_factory=dict)
    outer: list[FakeStream] = field(default_factory=list)

    def tick(self) -> int:
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def __post_init__(self) -> None:
        self.account.all_streams.append(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.account, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        for stream, time in event.clock.items():
            self.clock[stream] = max(time, self.clock.get(stream, 0))

    def __enter__(self) -> FakeStream:
        self.outer.append(self.account.current)
        self.account.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self.account.current = self.outer.pop()


@dataclass
class _Memory:
    """Who has used some memory, and when last."""

    home: FakeStream
    ref: StorageWeakRef
    what: str
    reads: _Clock = field(default_factory=dict)
    writes: _Clock = field(default_factory=dict)


@dataclass
class _Work:
    inner: Any
    account: StreamAccount
    event: FakeEvent

    def wait(self) -> None:
        self.inner.wait()
        self.account.current.wait_event(self.event)


class StreamAccount(TorchDispatchMode):
    """Attributes everything that runs in it to streams.

    Attributes:
        races: What was found.
        streams: The library's side streams.
        used: Names of the streams that something ran on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all_streams: list[FakeStream] = []
        self.compute, self.unshard, self.reduce, self.to_host = (
            FakeStream(name, self) for name in ("compute", "unshard", "reduce", "to host")
        )
        self.current = self.compute
        self.streams: Any = Streams(self.unshard, self.reduce)  # type: ignore[arg-type]
        self.races: list[str] = []
        self.used: set[str] = set()
        self._memory: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []

    @contextmanager
    def taking_over(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Make the library work with these streams, on the CPU."""
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if nbytes == 0:
                self._free(storage._cdata)
            else:
                self._allocate(storage, "a resized storage")
            return result

        monkeypatch.setattr("composable_shard.runtime.unit.make_streams", lambda _: self.streams)
        monkeypatch.setattr("composable_shard.flat_param.memory.copies_for", self._copies)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_and_note)
        for name in _COLLECTIVES:
            monkeypatch.setattr(dist.ProcessGroup, name, self._on_comm(name))
        with self:
            yield

    def _copies(self, device: torch.device) -> StreamCopies:
        copies = StreamCopies(device)
        copies._to_host = self.to_host  # type: ignore[assignment]
        return copies

    def _on_comm(self, name: str) -> Any:
        issue, stream = getattr(dist.ProcessGroup, name), FakeStream(name, self)

        def call(*args: Any) -> _Work:
            stream.wait_stream(self.current)
            with stream:
                work = issue(*args)
            return _Work(work, self, stream.record_event())

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, FlatShard) for kind in types):
            return NotImplemented  # what it does with its local tensor comes here
        kwargs = kwargs or {}
        self._collect()
        result = func(*args, **kwargs)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = {
            id(tensor)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name))
        } | ({id(args[0])} if func._schema.name.startswith("c10d::_") else set())
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {_key(tensor) for tensor in inputs}
        is_view = bool(outputs) and not written and all(_key(t) in known for t in outputs)
        for tensor in outputs:
            if _key(tensor) not in known:
                self._allocate(tensor.untyped_storage(), str(func))
        if not is_view and "empty" not in str(func):
            time = self.current.tick()
            self.used.add(self.current.name)
            for tensor in inputs:
                self._access(tensor, time, str(func), is_write=id(tensor) in written)
            for tensor in outputs:
                self._access(tensor, time, str(func), is_write=_key(tensor) not in known)
        return result

    def _access(self, tensor: Tensor, time: int, what: str, *, is_write: bool) -> None:
        key = _key(tensor)
        if key not in self._memory:  # it was there before
            self._memory[key] = _Memory(
                self.compute, StorageWeakRef(tensor.untyped_storage()), what
            )
        memory = self._memory[key]
        others = [memory.writes, memory.reads] if is_write else [memory.writes]
        for clock in others:
            self._check(clock, self.current, f"{what} on {self.current.name}", memory)
        (memory.writes if is_write else memory.reads)[self.current] = time

    def _check(self, clock: _Clock, stream: FakeStream, what: str, memory: _Memory) -> None:
        for other, time in clock.items():
            if stream.clock.get(other, 0) < time and other is not stream:
                self.races.append(
                    f"{what} has not waited for {other.name}: memory of {memory.what}"
                )

    def _allocate(self, storage: torch.UntypedStorage, what: str) -> None:
        if storage.nbytes() == 0:
            return
        stream = self.current
        for memory in [each for each in self._freed if each.home is stream]:
            self._freed.remove(memory)
            for clock in (memory.writes, memory.reads):
                self._check(clock, stream, f"an allocation for {what} on {stream.name}", memory)
        self._memory[storage._cdata] = _Memory(stream, StorageWeakRef(storage), what)

    def _free(self, key: int) -> None:
        if memory := self._memory.pop(key, None):
            self._freed.append(memory)

    def _collect(self) -> None:
        for key in [key for key, memory in self._memory.items() if memory.ref.expired()]:
            self._free(key)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
