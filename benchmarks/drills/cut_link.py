"""Cut the link between two hosts: both raise an error that says so, within the timeout and 10 s.

    python -m benchmarks.drills cut_link

Two network namespaces stand for the hosts, a pair of virtual interfaces for the link. Each has one
rank; rank 0 hosts the store. In the middle of the training the link goes down: no connection is
closed, nothing arrives any more. Needs root and iproute2, and says so where they are missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.drills.rank_kills import SPARE_S, TIMEOUT_S, loss_of, make_model
from benchmarks.report import emit, header, make_parser, table
from composable_shard import ShardingStrategy

_CLONE_NEWNET = 0x40000000
HOSTS = ("10.77.0.1", "10.77.0.2")
PORT = 29477
MISSING = "needs root and iproute2, to make network namespaces"


class Hosts:
    """Two namespaces, and the link between them."""

    def __init__(self) -> None:
        self.names = [f"shard{os.getpid()}{side}" for side in "ab"]
        self.links = [f"cs{os.getpid()}{side}" for side in "ab"]

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, HOSTS, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def cut(self) -> None:
        """Take the link down."""
        ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def __exit__(self, *_: Any) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def enter(self, side: int) -> None:
        """Move this process, which has no other thread, to one of the hosts."""
        with open(f"/var/run/netns/{self.names[side]}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns failed")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_run() -> bool:
    """Return whether this process can make namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    try:
        with Hosts():
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def rank_main(rank: int, hosts: Hosts, strategy: ShardingStrategy, folder: Path) -> None:
    """Train until the link is cut."""
    hosts.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.links[rank]
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(HOSTS[0], PORT, 2, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(100_000):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            (folder / f"trains {rank}").touch()
        time.sleep(0.005)


def _fork(rank: int, hosts: Hosts, strategy: ShardingStrategy, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        rank_main(rank, hosts, strategy, folder)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        (folder / f"error {rank}").write_text(json.dumps([time.time(), text]))
        time.sleep(SPARE_S / 2)
    finally:
        os._exit(0)


def cut(strategy: ShardingStrategy) -> list[tuple[float, str]]:
    """Cut the link of a run; return after how many seconds each rank raised what."""
    limit_s = TIMEOUT_S + 3 * SPARE_S
    with tempfile.TemporaryDirectory() as name, Hosts() as hosts:
        folder = Path(name)
        pids = [_fork(rank, hosts, strategy, folder) for rank in range(2)]
        try:
            _wait_for([folder / f"trains {rank}" for rank in range(2)], 60)
            hosts.cut()
            began = time.time()
            errors = [folder / f"error {rank}" for rank in range(2)]
            _wait_for(errors, limit_s)
            time.sleep(0.1)
            found = [json.loads(p.read_text()) if p.exists() else (0.0, "") for p in errors]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [(at - began if text else limit_s, text or "nothing") for at, text in found]


def _wait_for(paths: list[Path], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    if not can_run():
        print(f"skipped: {MISSING}")
        return 0
    torch.set_num_threads(1)
    rows, is_right = [], True
    for strategy in ShardingStrategy:
        for rank, (seconds, text) in enumerate(cut(strategy)):
            other = "rank 1 is gone, or can't be reached" if rank == 0 else "can't be reached"
            is_named = text.startswith("RuntimeError") and other in text
            is_right = is_right and is_named and seconds < TIMEOUT_S + SPARE_S
            rows.append([strategy.name, str(rank), f"{seconds:.1f}", text])
    notes = f"2 gloo ranks, timeout {TIMEOUT_S} s; seconds from the cut to the error"
    text = header("The link between two hosts is cut", notes)
    emit(text + "\n" + table(["strategy", "rank", "seconds", "error"], rows), args.output)
    return 0 if is_right else 1
