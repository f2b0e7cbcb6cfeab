"""The device itself: late kernels, streams, memory, collectives, and the errors of all these."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.common import device
from tests.device.running import all_gather, on_device

SLOW_US = 100_000


def _late_ones(numel: int = 4) -> torch.Tensor:
    """Return ones that are not there yet: the default stream is slow."""
    device.configure("slow_compute", delay_us=SLOW_US)
    return torch.ones(numel, device="lag")


@on_device
def test_kernels_run_later_and_in_order() -> None:
    """The host issues them at once; what it reads in the end is right."""
    x = _late_ones()
    started = time.monotonic()
    for _ in range(3):
        x = x * 2
    assert time.monotonic() - started < 2 * SLOW_US / 1e6
    assert x.tolist() == [8.0] * 4
    assert time.monotonic() - started > 3 * SLOW_US / 1e6


@on_device
def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    """And one that waits for a stream or an event does not."""
    x = _late_ones()
    side = torch.Stream("lag")
    with side:
        early = x.clone()
    side.synchronize()
    assert early.isnan().all()
    assert len(device.take_races()) == 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        right = x.clone()
    side.synchronize()
    assert right.tolist() == [1.0] * 4
    event = torch.accelerator.current_stream().record_event()
    side.wait_event(event)
    assert not event.query()
    event.synchronize()
    assert event.query()


@on_device
def test_freed_memory_is_handed_out_again_at_once() -> None:
    """To its stream alone; whoever still reads it finds what others write there."""
    x = torch.ones(64, device="lag")
    address = x.data_ptr()
    torch.accelerator.synchronize()
    side = torch.Stream("lag")
    device.configure("slow_side", delay_us=SLOW_US)
    with side:
        late = x + 1
        other = torch.empty(64, device="lag")
    del x
    again = torch.full((64,), 5.0, device="lag")
    assert again.data_ptr() == address != other.data_ptr()
    side.synchronize()
    assert late.tolist() == [6.0] * 64
    assert len(device.take_races()) == 1


@on_device
def test_record_stream_keeps_memory_until_that_stream_is_done() -> None:
    """As the caching allocator of CUDA does."""
    x = torch.ones(64, device="lag")
    address = x.data_ptr()
    torch.accelerator.synchronize()
    side = torch.Stream("lag")
    device.configure("slow_side", delay_us=SLOW_US)
    with side:
        late = x + 1
    x.record_stream(side)
    del x
    others = [torch.empty(64, device="lag") for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    side.synchronize()
    assert late.tolist() == [2.0] * 64
    time.sleep(2 * SLOW_US / 1e6)
    assert torch.empty(64, device="lag").data_ptr() == address


@on_device
def test_host_waits_are_counted_by_kind_and_can_be_forbidden() -> None:
    """A forbidden wait raises with its kind."""
    x = torch.arange(3.0, device="lag")
    device.take_host_waits()
    x.sum().item()
    x.cpu()
    x.nonzero()
    torch.accelerator.synchronize()
    assert device.take_host_waits() == {
        "item": 1,
        "copy to the host": 1,
        "aten::nonzero": 1,
        "device.synchronize": 1,
    }
    with device.forbid_host_waits():
        y = x * 2
        with pytest.raises(RuntimeError, match="the host waits: item"):
            y.sum().item()
    assert y.sum().item() == 6.0


@on_device
def test_an_error_in_a_kernel_is_raised_by_the_next_wait_of_the_host() -> None:
    """Not where the kernel was issued."""
    x = torch.zeros(3, device="lag")
    x.index_select(0, torch.tensor([7], device="lag"))
    with pytest.raises(RuntimeError, match=r"what ran on a stream failed.*out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


@on_device
def test_modelled_durations_give_a_timeline() -> None:
    """Streams run side by side, and wait for each other and for the host, in modelled time."""
    x = torch.ones(4, 4, device="lag")
    side = torch.Stream("lag")
    side.wait_stream(torch.accelerator.current_stream())
    device.model_durations({"aten::mm": device.Cost(100), "aten::add": device.Cost(0, 1.0)})
    start = torch.accelerator.current_stream().record_event(torch.Event("lag", enable_timing=True))
    y = x @ x
    with side:
        x @ x
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y + y  # reads 64 bytes once for each argument, and writes 64
    end = side.record_event(torch.Event("lag", enable_timing=True))
    spans = [(span.name, span.stream, span.start_us, span.end_us) for span in device.timeline()]
    number = side.stream_id
    assert spans == [
        ("aten::mm", 0, 0, 100),
        ("aten::mm", number, 0, 100),
        ("aten::add", number, 100, 100 + 3 * 64),
    ]
    assert device.device_time_us() == 292
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(0.292)
    device.model_durations({"aten::mm": device.Cost(10)})
    torch.accelerator.current_stream().wait_event(end)  # of an earlier model: it is over
    x @ x
    assert device.device_time_us() == 10


@on_device(num_ranks=2)
def test_collectives_run_on_streams_and_the_host_does_not_wait() -> None:
    """Each stream that needs the result waits for the work."""
    rank = dist.get_rank()
    device.configure("slow_compute", delay_us=SLOW_US)
    x = torch.full((4,), float(rank + 1), device="lag")
    gathered = torch.empty(8, device="lag")
    device.take_host_waits()
    with device.forbid_host_waits():
        work = all_gather(gathered, x, async_op=True)
        assert work is not None
        assert not work.is_completed()
        work.wait()
        total = gathered.sum()
        dist.all_reduce(x)
        part = torch.empty(4, device="lag")
        dist.reduce_scatter_single(part, gathered, op=dist.ReduceOp.AVG)
    assert total.item() == 12.0
    assert x.tolist() == [3.0] * 4
    assert part.tolist() == [float(rank + 1)] * 4
    x.fill_(rank)
    dist.broadcast(x, 1)
    halves = [torch.empty(4, device="lag") for _ in range(2)]
    dist.all_gather(halves, x)
    assert torch.cat(halves).tolist() == [1.0] * 8
    dist.barrier()


@on_device(num_ranks=2, timeout_s=2)
def test_a_collective_that_a_rank_does_not_join_fails_after_the_timeout() -> None:
    """The host gets the error from the work, or when it waits for the device."""
    if dist.get_rank() == 1:
        return
    x = torch.ones(4, device="lag")
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    with pytest.raises(RuntimeError, match="failed"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError):
        work.wait()
    assert not work.is_success()
