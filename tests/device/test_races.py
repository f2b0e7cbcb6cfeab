"""The race detector: a missing wait is found without luck, and right programs are silent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.common import device
from tests.device.running import all_gather, on_device


def _device_ones(numel: int = 8) -> Tensor:
    return torch.ones(numel, device="lag")


def _found() -> list[tuple[str, str, str, str]]:
    """Return the races as what came earlier and what later: operators, and reads or writes."""
    torch.accelerator.synchronize()
    return [
        (race.earlier.name, _kind(race.earlier), race.later.name, _kind(race.later))
        for race in device.take_races()
    ]


def _kind(use: device.Use) -> str:
    return "writes" if use.is_write else "reads"


@on_device
def test_kernels_on_two_streams() -> None:
    """A write and a read, a read and a write, two writes."""
    side = torch.Stream("lag")
    x, y = _device_ones(), _device_ones()
    side.synchronize()
    torch.accelerator.synchronize()
    x.mul_(2)
    with side:
        y.copy_(x)
    assert _found() == [("aten::mul", "writes", "copy", "reads")]
    with side:
        y.copy_(x)
    x.mul_(2)
    assert _found() == [("copy", "reads", "aten::mul", "writes")]
    with side:
        y.zero_()
    y.fill_(1)
    assert _found() == [("aten::zero_", "writes", "aten::fill_", "writes")]
    with side:
        x + y
    x + y
    assert _found() == []


@on_device
def test_only_bytes_that_both_use_count() -> None:
    """And views are of the same memory."""
    side = torch.Stream("lag")
    x = _device_ones()
    torch.accelerator.synchronize()
    with side:
        x[2:4].mul_(2)
    x[:2].mul_(3)
    x[4:].mul_(3)
    assert _found() == []
    with side:
        x[2:4].mul_(2)
    x[3:].view(5, 1).mul_(3)
    torch.accelerator.synchronize()
    (race,) = device.take_races()
    assert (race.nbytes, race.earlier.stream, race.later.stream) == (4, side.stream_id, 0)
    assert f"{__file__}:" in race.later.where
    assert "test_only_bytes_that_both_use_count" in race.later.where


@on_device
def test_an_event_orders_what_came_before_it() -> None:
    """Not what came after it, and not other streams that nobody has waited for."""
    side, third = torch.Stream("lag"), torch.Stream("lag")
    x = _device_ones()
    torch.accelerator.synchronize()
    x.mul_(2)
    event = torch.accelerator.current_stream().record_event()
    x.add_(1)
    side.wait_event(event)
    with side:
        x.sum()
    assert _found() == [("aten::add", "writes", "aten::sum", "reads")]
    x.mul_(2)
    side.wait_stream(torch.accelerator.current_stream())
    third.wait_stream(side)
    with third:
        x.add_(1)
    side.wait_stream(third)
    with side:
        x.sum()
    assert _found() == []


@on_device
def test_the_host_orders_what_it_waits_for() -> None:
    """By a stream, an event, a value, or everything; and by an event that it sees reached."""
    side = torch.Stream("lag")
    x = _device_ones()
    for wait in (
        torch.accelerator.current_stream().synchronize,
        torch.accelerator.synchronize,
        lambda: torch.accelerator.current_stream().record_event().synchronize(),
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
    ):
        x.mul_(2)
        wait()
        with side:
            x.mul_(2)
        side.synchronize()
    event = torch.accelerator.current_stream().record_event()
    while not event.query():
        pass
    with side:
        x.mul_(2)
    assert _found() == []


@on_device
def test_freed_memory_is_owed_to_who_still_uses_it() -> None:
    """By any memory that its stream hands out next, of any size, until that stream has waited."""
    main, side = torch.accelerator.current_stream(), torch.Stream("lag")
    x = _device_ones()
    side.wait_stream(main)
    with side:
        y = x + 1
    del x
    torch.zeros(1000, device="lag")
    torch.accelerator.synchronize()
    (race,) = device.take_races()
    assert race.was_freed
    assert (race.earlier.name, race.later.name) == ("aten::add", "aten::zero_")

    x = _device_ones()
    side.wait_stream(main)
    with side:
        y = x + 1
    del x
    main.wait_stream(side)
    torch.zeros(8, device="lag")
    assert _found() == []

    # Allocated on the side stream, read by the main one: that may go on, until others write there.
    main.wait_stream(side)
    y + 1
    del y
    _device_ones()
    side.wait_stream(main)
    with side:
        _device_ones()
    assert _found() == []


@on_device
def test_record_stream_pays_for_the_streams_that_it_names() -> None:
    """Not for others."""
    main, side, third = torch.accelerator.current_stream(), torch.Stream("lag"), torch.Stream("lag")
    x = _device_ones()
    side.wait_stream(main)
    with side:
        x + 1
    x.record_stream(side)
    del x
    _device_ones()
    assert _found() == []
    x = _device_ones()
    for stream in (side, third):
        stream.wait_stream(main)
        with stream:
            x + 1
    x.record_stream(side)
    del x
    _device_ones()
    assert _found() == [("aten::add", "reads", "aten::fill_", "writes")]


@on_device
def test_new_memory_comes_after_what_its_stream_did_before() -> None:
    """Another stream that uses it must have waited, though nothing was written there."""
    side = torch.Stream("lag")
    torch.accelerator.synchronize()
    _device_ones()
    x = torch.empty(8, device="lag")
    with side:
        x.fill_(1)
    assert _found() == [("allocation", "writes", "aten::fill_", "writes")]
    x = torch.empty(8, device="lag")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.fill_(1)
    assert _found() == []


@on_device(num_ranks=2)
def test_collectives() -> None:
    """They read their input and write their output until their work is waited for."""
    x, output = _device_ones(), _device_ones(16)
    work = all_gather(output, x, async_op=True)
    assert work is not None
    output.sum()
    x.mul_(2)
    assert _found() == [
        ("all_gather", "writes", "aten::sum", "reads"),
        ("all_gather", "reads", "aten::mul", "writes"),
    ]
    work = all_gather(output, x, async_op=True)
    assert work is not None
    x.sum()
    work.wait()
    output.sum()
    x.mul_(2)
    dist.all_reduce(x)
    x.mul_(2)
    work = dist.all_reduce(x, async_op=True)
    del x  # the work keeps it
    _device_ones()
    assert work is not None
    work.wait()
    del work
    _device_ones()
    assert _found() == []


@on_device(num_ranks=2)
def test_waiting_on_another_stream_is_not_enough() -> None:
    """A work makes the stream wait that is current."""
    side = torch.Stream("lag")
    x = _device_ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with side:
        work.wait()
    x.mul_(2)
    assert _found() == [("all_reduce", "writes", "aten::mul", "reads")]


@on_device
def test_copies_that_do_not_block() -> None:
    """The host reads or writes pinned memory that a copy uses."""
    x, host = _device_ones(), torch.zeros(8).pin_memory()
    host.copy_(x, non_blocking=True)
    host.sum()
    assert _found() == [("copy_to_host", "writes", "aten::sum", "reads")]
    x.copy_(host, non_blocking=True)
    host[:4].clone()
    host[4:].add_(1)
    assert _found() == [("copy_from_host", "reads", "aten::add_", "writes")]
    host.fill_(2)
    x.copy_(host, non_blocking=True)
    host.copy_(x, non_blocking=True)
    torch.accelerator.current_stream().record_event().synchronize()
    host.add_(1)
    assert host.tolist() == [3.0] * 8
    host.view(2, 4)
    torch.empty_like(host)
    assert _found() == []


@on_device
def test_races_are_raised_with_both_lines() -> None:
    """Once for each pair of lines."""
    side = torch.Stream("lag")
    x = _device_ones()
    torch.accelerator.synchronize()
    for _ in range(3):
        with side:
            x.mul_(2)
        x.add_(1)
    with pytest.raises(
        device.RaceFound, match=r"(?s)2 races:.*aten::add writes on stream 0"
    ) as error:
        device.check_races()
    assert str(error.value).count(__file__) == 4
    device.check_races()
