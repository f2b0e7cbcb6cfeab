#!/usr/bin/env bash
# Gloo's event thread polls in vain while another thread of its process holds the connection.
#
# Where: torch 2.13.0, the backend gloo, two ranks with one core each, which send and receive
#   messages of 0.4 MB, several in flight, and compute meanwhile. Linux.
# Expected: a message costs the event thread the copy out of the socket, 0.05 to 0.1 ms.
# Seen: 0.28 ms of its CPU time for each message, 0.11 to 0.21 ms if nothing but the scheduling
#   policy differs: under SCHED_BATCH a thread that wakes up doesn't push the running one aside.
# Why: the event loop waits by level-triggered epoll and gives up an event if it can't take the
#   connection's lock at once (Pair::handleEvents, gloo/transport/tcp/pair.cc). The thread that
#   sends holds the lock while it writes, which wakes the peer, whose answer wakes the event
#   thread, which pushes the sender from the core and polls until its time slice ends.
# A training step of many small messages pays for it: start such jobs by `chrt --batch 0`.
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/program.py" <<'PROGRAM'
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS, IN_FLIGHT, NUMEL = 500, 4, 100_000


def loop_seconds() -> float:
    """Return the CPU time of gloo's event threads of this process."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "gloo_tcp_loop":
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def exchange(rank: int, is_batch: bool, cores: list[int]) -> None:
    os.sched_setaffinity(0, {cores[rank]})
    if is_batch:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    store = dist.FileStore(f"store{is_batch}", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    sent = [torch.full((NUMEL,), float(each)) for each in range(IN_FLIGHT)]
    received = [torch.empty(NUMEL) for _ in range(IN_FLIGHT)]
    matrix = torch.ones(256, 256)
    dist.barrier()
    start = loop_seconds()
    for _ in range(ROUNDS):
        works = []
        for each in range(IN_FLIGHT):
            works += [dist.isend(sent[each], 1 - rank, tag=each)]
            works += [dist.irecv(received[each], 1 - rank, tag=each)]
            matrix @ matrix
        for work in works:
            work.wait()
    seconds = torch.tensor(loop_seconds() - start, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
    dist.all_reduce(seconds)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        per_message = seconds.item() / (2 * ROUNDS * IN_FLIGHT) * 1e6
        Path(f"seen{is_batch}").write_text(str(per_message))


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    cores = sorted(os.sched_getaffinity(0))[:2]
    seen = {}
    for is_batch in (False, True):
        mp.spawn(exchange, (is_batch, cores), nprocs=2)
        seen[is_batch] = float(Path(f"seen{is_batch}").read_text())
    print(f"event thread, CPU time of a message: {seen[False]:.0f} us; SCHED_BATCH {seen[True]:.0f} us")
    assert seen[False] > 1.15 * seen[True], "changed: the policy makes no difference"
PROGRAM
cd "$folder"
"$folder/venv/bin/python" -W ignore program.py
