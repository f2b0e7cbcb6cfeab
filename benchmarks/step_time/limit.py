"""What a step can't fall below: its computation alone, and its messages alone on the same ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import report
from composable_shard import count_collectives
from tests.common.models import param_nbytes

COLUMNS = (
    *("peer", "MB to each other rank", "messages", "step ms", "compute alone", "wire alone"),
    *("larger", "sum", "step / sum by round"),
    *("CPU ms: step", "compute", "wire", "rest in the main thread", "rest in others"),
)
_DDP_BUCKET_NBYTES = 25 << 20
Times = Sequence[Sequence[float]]  # by round: seconds of wall, of CPU in all threads, in the main


def clocks() -> Tensor:
    """Return wall seconds, and CPU seconds of all threads and of this one."""
    now = time.perf_counter(), time.process_time(), time.thread_time()
    return torch.tensor(now, dtype=torch.float64)


def find_messages(name: str, model: nn.Module, step: Callable[[], object]) -> list[int]:
    """Return the bytes of each message that a step of a peer sends to each other rank, in order.

    Ours are counted in a step. DDP's are those of an all-reduce of each bucket. Other peers: none.
    """
    size = dist.get_world_size()
    with count_collectives() as log:
        step()
    sent = [(event.nbytes, event.kind == "all_reduce") for event in log.events]
    if name.startswith("ddp"):
        full, rest = divmod(param_nbytes(model), _DDP_BUCKET_NBYTES)
        sent = [(_DDP_BUCKET_NBYTES, True)] * full + [(rest, True)]
    # An all-reduce: the others' parts of each term, then this rank's part of the sum.
    return [nbytes // size for nbytes, is_sum in sent for _ in range(1 + is_sum) if nbytes >= size]


def send_messages(messages: Sequence[int], buffer: Tensor) -> list[float]:
    """Send messages, and nothing else, one after another; return what `clocks` says they took.

    Args:
        messages: The bytes of each, which every rank sends to each other one.
        buffer: Bytes: a row for each rank, to send from and to receive into.
    """
    rank = dist.get_rank()
    others = [other for other in range(len(buffer)) if other != rank]
    dist.barrier()
    start = clocks()
    for nbytes in messages:
        works = [dist.isend(buffer[rank, :nbytes], other) for other in others]
        works += [dist.irecv(buffer[other, :nbytes], other) for other in others]
        for work in works:
            work.wait()  # type: ignore[union-attr]  # None: this rank is not of the group
    slowest = clocks() - start
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


def rows(
    steps: Mapping[str, Times], wires: Mapping[str, Times], messages: Mapping[str, Sequence[int]]
) -> list[list[str]]:
    """Return one row of `COLUMNS` for each peer whose messages are known: medians of rounds.

    The CPU time of a step beyond compute and wire alone is divided into that of the main thread
    (copies, sums, host time) and that of others (the backend's, while something else computes).
    """
    lines = []
    for name, sent in messages.items():
        step, compute, wire = (
            [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
            for times in (steps[name], steps["bare"], wires[name])
        )
        sums = [a[0] + b[0] for a, b in zip(steps["bare"], wires[name], strict=True)]
        ratios = [each[0] / least for each, least in zip(steps[name], sums, strict=True)]
        rest = [a - b - c for a, b, c in zip(step, compute, wire, strict=True)]
        wall = step[0], compute[0], wire[0], max(compute[0], wire[0]), compute[0] + wire[0]
        cpu = step[1], compute[1], wire[1], rest[2], rest[1] - rest[2]
        cells = *(f"{each:.0f}" for each in wall), report.spread(ratios)
        cells = *cells, *(f"{each:.0f}" for each in cpu)
        lines.append([name, f"{sum(sent) / 1e6:.1f}", str(len(sent)), *cells])
    return lines
