"""A step on a GPU: captured as a graph, or profiled, and how much of its streams overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Span = tuple[int, int, int]  # stream, start and end in ns
Step = Callable[[], Tensor]


def capture(step: Step) -> Step:
    """Return what replays a step; the step has run on a side stream before, as it must."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def overlap(spans: Iterable[Span]) -> float:
    """Return how much of the time of side streams passes while the compute stream is busy.

    The compute stream is the one with the most time. 0.0 where nothing runs beside it.

    Example: compute from 0 to 10, and a copy on another stream from 8 to 12: 0.5.
    """
    by_stream: dict[int, list[tuple[int, int]]] = {}
    for stream, start, end in spans:
        by_stream.setdefault(stream, []).append((start, end))
    if len(by_stream) < 2:
        return 0.0
    busy = {stream: _merge(ranges) for stream, ranges in by_stream.items()}
    compute = busy.pop(max(busy, key=lambda stream: _length(busy[stream])))
    side = [each for ranges in busy.values() for each in ranges]
    shared = sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in side
        for other_start, other_end in compute
    )
    return shared / _length(side)


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def trace(step: Step, path: Path | None = None) -> list[Span]:
    """Profile two steps; return what ran on the device, and export a Chrome trace to `path`."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    results = profiler.profiler.kineto_results
    return [
        (event.device_resource_id(), event.start_ns(), event.end_ns())
        for event in results.events()
        # A range of the user's is shown on the device too.
        if event.device_type() is torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
