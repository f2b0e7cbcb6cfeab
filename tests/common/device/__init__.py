"""An accelerator without hardware: a device of torch of type `lag`, made of threads.

    from tests.common import device

    device.load()                         # builds it first; raises `device.Unavailable`
    device.configure("random", seed=1)    # how late its streams are
    dist.init_process_group(device.BACKENDS, ...)
    model.to("lag")

A process loads it once, before it makes any process group for the device, and keeps it: from then
on `torch.accelerator` is this device. A process may fork after it has loaded the device, as long as
it has issued nothing on it. See README.md for what it imitates.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from composable_shard.flat_param import storage
from tests.common.device import build
from tests.common.device.build import Unavailable

__all__ = [
    "BACKENDS",
    "NAME",
    "Cost",
    "Mode",
    "Race",
    "RaceFound",
    "Span",
    "Unavailable",
    "Use",
    "check_races",
    "configure",
    "counts",
    "detect_races",
    "device_time_us",
    "forbid_host_waits",
    "is_loaded",
    "load",
    "model_durations",
    "reset_peak_memory",
    "synchronize",
    "take_host_waits",
    "take_races",
    "timeline",
]

NAME = "lag"
BACKENDS = "cpu:gloo,lag:lag"  # for `init_process_group`

Mode = Literal["none", "slow_side", "slow_compute", "random"]


@dataclass(frozen=True)
class Cost:
    """What a kernel, copy or collective takes in modelled time."""

    call_us: float = 0.0
    byte_us: float = 0.0  # for each byte that it reads or writes


@dataclass(frozen=True)
class Span:
    """When something ran, in modelled time; stream 0 is the default one."""

    stream: int
    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Use:
    """What has read or written memory: an operator, a copy, a collective or an allocation."""

    name: str
    stream: int | None  # None for the host
    where: str  # the line of Python, outside of torch, that issued it
    is_write: bool

    def __str__(self) -> str:
        place = "the host" if self.stream is None else f"stream {self.stream}"
        verb = "writes" if self.is_write else "reads"
        return f"{self.name} {verb} on {place} ({self.where})"


@dataclass(frozen=True)
class Race:
    """Two uses of the same memory that no wait orders."""

    earlier: Use
    later: Use
    nbytes: int  # that both use
    was_freed: bool  # between the two, and perhaps handed out again

    def __str__(self) -> str:
        between = ", freed between the two" if self.was_freed else ""
        return f"{self.later} has not waited for {self.earlier}: {self.nbytes} bytes{between}"


class RaceFound(AssertionError):  # not an error of the device
    """The text tells the races."""


_extension: Any = None


def is_loaded() -> bool:
    """Return whether this process has the device."""
    return _extension is not None


def load(*, backend_name: str = "nccl") -> None:
    """Give this process the device and its backend for process groups; once, then it does nothing.

    Args:
        backend_name: What a group's backend for the device calls itself. Code that prefers
            features of NCCL, such as averages, asks for this name.

    Raises:
        Unavailable: It can't be built here; the text names what is missing.
    """
    global _extension
    if _extension is not None:
        return
    path = build.library()
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location(build.NAME, path)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    _extension = extension
    # Builds of torch with CUDA have them, but for 2.11.
    storage.refuse_reads = getattr(extension, "refuse_reads", None)
    storage.allow_reads = getattr(extension, "allow_reads", None)
    torch._register_device_module(NAME, _module_of_torch(extension))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )

    def make_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)
        return extension.Backend(gloo, backend_name)

    dist.Backend.register_backend(NAME, make_backend, devices=[NAME])


def configure(
    mode: Mode = "none", *, delay_us: int = 200, poison: bool = True, seed: int = 0
) -> None:
    """Choose how late streams are from now on; waits until what was issued before is done.

    Args:
        mode: "none", each task as soon as its thread gets to it; "slow_side", each task of another
            stream than the default one `delay_us` late; "slow_compute", each task of the default
            stream; "random", four of ten tasks, up to twice `delay_us`.
        delay_us: The delay in microseconds.
        poison: Whether memory that is handed out is filled with NaN, on its stream.
        seed: Of the random delays.
    """
    with _allowing_host_waits():
        synchronize()
        _extension.take_host_waits()
    _extension.configure(mode, delay_us, poison, seed)


def counts() -> dict[str, int]:
    """Return what was counted since the device was loaded.

    Keys: "tasks" (kernels, copies, collectives), "waits" of streams, "host_waits", "allocations",
    "reuses" of freed memory, and bytes: "allocated", "peak", "reserved", "peak_reserved".
    """
    found: dict[str, int] = _extension.counts()
    found["allocated"] = torch.accelerator.memory_allocated()
    found["peak"] = torch.accelerator.max_memory_allocated()
    found["reserved"] = torch.accelerator.memory_reserved()
    found["peak_reserved"] = torch.accelerator.max_memory_reserved()
    return found


def reset_peak_memory() -> None:
    """Let "peak" and "peak_reserved" begin at what is held now."""
    torch.accelerator.reset_peak_memory_stats()


def synchronize() -> None:
    """Wait until all streams are done.

    Raises:
        RuntimeError: A kernel or collective has failed since the last wait of the host.
    """
    _extension.synchronize()


def take_host_waits() -> dict[str, int]:
    """Return how often the host has waited since the last call, by what it waited for.

    The kinds: "item", "copy to the host", "copy to the device", "stream.synchronize",
    "event.synchronize", "device.synchronize", "barrier", "empty_cache", and the names of operators
    whose results' shapes depend on values, such as "aten::nonzero".
    """
    found: dict[str, int] = _extension.take_host_waits()
    return found


@contextmanager
def forbid_host_waits() -> Iterator[None]:
    """Make each wait of the host for the device raise a `RuntimeError` that names its kind."""
    before = _extension.forbid_host_waits(True)
    try:
        yield
    finally:
        _extension.forbid_host_waits(before)


@contextmanager
def _allowing_host_waits() -> Iterator[None]:
    before = _extension.forbid_host_waits(False)
    try:
        yield
    finally:
        _extension.forbid_host_waits(before)


def detect_races(flag: bool = True) -> None:
    """Compare from now on what is issued with what was issued before, see `take_races`."""
    _extension.detect_races(flag)


def take_races() -> list[Race]:
    """Return the races since the last call, in the order in which they were issued.

    Two uses of the same memory, of which one writes, are a race unless waits order them: of
    streams, events and collectives, or of the host. How late streams are does not matter. Memory
    that was freed counts as used by whatever its stream allocates next, as a caching allocator may
    hand it out again.
    """
    return [
        Race(*(_use(*each) for each in uses), nbytes, was_freed)
        for *uses, nbytes, was_freed in _extension.take_races()
    ]


def _use(name: str, stream: int, where: str, is_write: bool) -> Use:
    return Use(name, None if stream == -1 else stream, where, is_write)


def check_races() -> None:
    """Check that there were no races since the last call.

    Raises:
        RaceFound: There were.
    """
    if found := take_races():
        raise RaceFound(f"{len(found)} races:\n" + "\n".join(map(str, found)))


def model_durations(costs: Mapping[str, Cost], *, host_us: float = 0.0) -> None:
    """Give kernels, copies and collectives durations; time begins at 0, and the timeline is empty.

    The time is computed when something is issued, not slept: results do not depend on the machine's
    load. A task starts when its stream is free, but not before the host has issued it. A collective
    does not wait for other ranks. `torch.Event.elapsed_time` is of this time too.

    Args:
        costs: By the operator's name ("aten::mm"), the copy's ("copy", "copy_from_host",
            "copy_to_host") or the collective's ("all_gather", "reduce_scatter", "all_reduce",
            "broadcast", "reduce", "all_to_all", "gather", "scatter", "send", "recv", "barrier");
            "*" is for all others. Without one, a task takes no time.
        host_us: What it takes the host to issue one task.
    """
    table = {name: (cost.call_us, cost.byte_us) for name, cost in costs.items()}
    _extension.model(table, host_us)


def timeline() -> list[Span]:
    """Return what was issued since `model_durations`, in order."""
    return [Span(*span) for span in _extension.spans()]


def device_time_us() -> float:
    """Return when all that was issued so far will be done, in modelled time."""
    found: float = _extension.device_time_us()
    return found


def _module_of_torch(extension: Any) -> types.ModuleType:
    """Return `torch.lag`: what torch calls on the module of a device type."""
    generator: torch.Generator = extension.default_generator()
    module = types.ModuleType(f"torch.{NAME}")

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    vars(module).update(
        Event=torch.Event,
        Stream=torch.Stream,
        _initialized=True,  # or `torch.utils.checkpoint` keeps no states of the generator
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        current_stream=lambda device=None: torch.accelerator.current_stream(),
        default_generators=(generator,),
        device=_Device,
        device_count=lambda: 1,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=get_rng_state,
        initial_seed=generator.initial_seed,
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        max_memory_allocated=torch.accelerator.max_memory_allocated,
        memory_allocated=torch.accelerator.memory_allocated,
        set_device=lambda device: None,
        set_rng_state=set_rng_state,
        stream=lambda stream: stream,
        synchronize=lambda device=None: extension.synchronize(),
    )
    sys.modules[module.__name__] = module
    return module


class _Device:
    """The context `torch.lag.device(index)`: there is one device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
