"""A collective that was abandoned before it was done: whoever waits for it later gets an error."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import fully_shard, get_handles, unshard
from composable_shard.comm import ReduceScatter, Waitable, collectives, messages
from composable_shard.comm.collectives import wait_for_interrupted
from composable_shard.comm.devices import Then
from composable_shard.comm.messages import Works
from composable_shard.comm.watch import begin_watch
from tests.harness.ranks import distributed


def _gather(group: dist.ProcessGroup) -> Callable[[], object]:
    return collectives.all_gather(torch.empty(6), torch.ones(6 // group.size()), group).wait


def _all_reduce(group: dist.ProcessGroup) -> Callable[[], object]:
    return collectives.all_reduce(torch.ones(6), group).wait


def _broadcast(group: dist.ProcessGroup) -> Callable[[], object]:
    return collectives.broadcast(torch.ones(6), 1, group).wait


def _reduce_scatter(group: dist.ProcessGroup) -> Callable[[], object]:
    tensors = torch.empty(6 // group.size()), torch.ones(6)
    reduction = ReduceScatter(group, torch.float32, torch.device("cpu"))
    parts = reduction.scratch_parts(in_place=False)
    scratch = torch.empty(parts * len(tensors[0])) if parts else None
    return reduction.start(*tensors, scratch).finish


_STARTS = [_gather, _all_reduce, _broadcast, _reduce_scatter]


@pytest.mark.parametrize("start", _STARTS)
@distributed(2, 3)
def test_a_wait_after_an_abandoned_one_raises(start: Callable[..., Callable[[], object]]) -> None:
    """The wait of who abandons it ends before the other ranks come, so memory is not complete."""
    begin_watch()
    group = dist.new_group(timeout=timedelta(seconds=20))
    if dist.get_rank() == 0:
        wait = start(group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "_ABANDONED_TIMEOUT", timedelta(seconds=0.2))
            wait_for_interrupted(group)
        for text in ("not all ranks came", "stopped by an earlier error: "):
            with pytest.raises(RuntimeError, match=text):
                wait()
    dist.barrier()


@pytest.mark.parametrize("start", _STARTS)
@distributed(2, 3)
def test_a_wait_after_an_abandoned_one_that_ended_passes(
    start: Callable[..., Callable[[], object]],
) -> None:
    """All ranks came in time."""
    group = dist.group.WORLD
    wait = start(group)
    wait_for_interrupted(group)
    wait()


@distributed(2)
def test_values_of_a_gather_that_was_abandoned_are_not_used() -> None:
    """A unit's gather is in flight while another unit's is lost; then the first one is needed."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model(torch.ones(2, 6))
    if dist.get_rank() == 0:
        unshard(model[0], async_op=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "_ABANDONED_TIMEOUT", timedelta(seconds=0.2))
            get_handles(model[1])[0].shard_group.wait_for_interrupted()
        with pytest.raises(RuntimeError, match="not all ranks came"):
            model[0](torch.ones(2, 6))
    dist.barrier()


class _Backends:
    """A backend's collective; it has failed, or is done."""

    def __init__(self, error: RuntimeError | None) -> None:
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        if self._error is not None:
            raise self._error


@distributed(2)
def test_a_backends_collective_that_failed_before_it_was_abandoned() -> None:
    """It was done, with an error, when it was abandoned."""
    group: Any = dist.new_group()
    for error in (None, RuntimeError("gloo")):
        works = Works([_Backends(error)], group)  # type: ignore[list-item]
        works.abandon()
        if error is None:
            works.wait()
        else:
            with pytest.raises(RuntimeError, match="collective has failed"):
                works.wait()


def test_what_follows_a_collective_runs_once_or_raises() -> None:
    """An interrupt may come before, in the middle of it, or after its last line."""
    values: list[int] = []
    calls = iter([KeyboardInterrupt, None])

    class Work:
        def wait(self) -> None:
            if (error := next(calls, None)) is not None:
                raise error

    then: Waitable = Then([Work()], lambda: values.append(1))
    with pytest.raises(KeyboardInterrupt):
        then.wait()
    assert not values
    for _ in range(2):
        then.wait()
    assert values == [1]

    def interrupted() -> None:
        values.append(2)
        raise KeyboardInterrupt

    then = Then([], interrupted)
    with pytest.raises(KeyboardInterrupt):
        then.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="values are not complete"):
            then.wait()
    assert values == [1, 2]


@distributed(2)
def test_an_interrupt_while_a_dropped_collective_is_waited_for_is_kept() -> None:
    """Python drops what is raised in a `__del__`. The next wait of the main thread raises it."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    works = [collectives.broadcast(torch.ones(6), 1, group)]
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        works.clear()  # a wait of 0.8 s
        signal.signal(signal.SIGALRM, before)
        thread = threading.Thread(target=Works([], group).wait)
        thread.start()
        thread.join()
        with pytest.raises(KeyboardInterrupt):
            Works([], group).wait()
    else:
        works[0].wait()
    Works([], group).wait()
    collectives.all_reduce(torch.ones(6), group).wait()


class _Broken(dist.Work):
    """A work whose device has failed."""

    def is_completed(self) -> bool:
        raise RuntimeError("the device has failed")


def test_a_dropped_work_that_can_not_say_whether_it_is_done_is_let_go() -> None:
    """As of a device that has failed: its destructor ends, and a later wait of it raises."""
    posted = messages._InFlight([_Broken()])
    posted.end()
    with pytest.raises(RuntimeError, match="the device has failed"):
        posted[0].wait()
    messages._InFlight([_Broken()]).__del__()
    assert messages._interrupts == []
