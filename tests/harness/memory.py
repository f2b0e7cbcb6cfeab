"""Exact memory counts, and what is still alive."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile


@dataclass
class MemoryCount:
    """CPU tensor bytes of a `peak_bytes` scope, relative to its entry; known once it is left."""

    peak: int = 0  # the most that was held at any moment
    current: int = 0  # held at the end
    allocated: int = 0  # all allocations together, freed or not
    num_allocations: int = 0


@contextmanager
def peak_bytes() -> Iterator[MemoryCount]:
    """Count the bytes of the CPU tensor storages allocated inside the scope, exactly.

    Counts what this thread allocates, inside operators, autograd and `UntypedStorage.resize_`
    too, and what gloo's threads allocate on its behalf. Freeing a storage that is older than the
    scope subtracts nothing. Scopes do not nest, and no other profiler may run. No collective may
    be in flight at the end: gloo's threads and the profiler would race, and corrupt the heap.
    """
    memory = MemoryCount()
    activities = [ProfilerActivity.CPU]
    # With acc_events it would make objects of all events at once: a fifth of some files' CPU time.
    profiler = profile(activities=activities, profile_memory=True)
    with warnings.catch_warnings():  # torch 2.11 warns of that
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.start()
    try:
        yield memory
    finally:
        profiler.stop()
    sizes: dict[int, int] = {}
    for address, size in _cpu_allocations(profiler):
        if size > 0:
            sizes[address] = size
            memory.allocated += size
            memory.num_allocations += 1
            memory.current += size
            memory.peak = max(memory.peak, memory.current)
        else:
            # By address, because the profiler remembers sizes from earlier scopes: it can report
            # the free of a storage that was allocated outside at an address it knew once.
            memory.current -= sizes.pop(address, 0)


def _cpu_allocations(profiler: profile) -> Iterable[tuple[int, int]]:
    """Return (address, size) in order of time; a negative size frees."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    found = []
    pending = list(results.experimental_event_tree())
    order = itertools.count()
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        fields = event.extra_fields
        if event.tag == _EventType.Allocation and fields.device.type == "cpu":
            found.append((event.start_time_ns, next(order), fields.ptr, fields.alloc_size))
    return [(address, size) for _, _, address, size in sorted(found)]


def still_alive(
    references: Sequence[weakref.ref[Any]], storages: Sequence[StorageWeakRef]
) -> list[str]:
    """Return what has not been freed, once gloo's threads have had time to drop its tensors."""
    deadline = time.monotonic() + 10
    while True:
        alive = [type(each()).__name__ for each in references if each() is not None]
        alive += ["UntypedStorage" for storage in storages if not storage.expired()]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)
