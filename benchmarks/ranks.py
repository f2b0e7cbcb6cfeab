"""Run a function in several processes over gloo: nothing hangs, nothing outlives its deadline.

Or on the accelerator of threads that the tests have, `tests/common/device`, one for each process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.common import device

GROUP_TIMEOUT = timedelta(seconds=120)


def timed_together(step: Callable[[], Any]) -> float:
    """Return the milliseconds that a step takes on all ranks of the group, from start to last."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return (time.perf_counter() - start) * 1e3


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    deadline: float = 900.0,
    on_device: bool = False,
) -> Any:
    """Return what rank 0 got from `function(rank, *args)`, run with one thread on every rank.

    Args:
        world_size: Number of processes; each starts from nothing and joins one gloo group.
        function: A module-level function; its result must be representable in JSON.
        args: What to pass after the rank; must pickle.
        deadline: Seconds after which the processes are killed.
        on_device: Give each process an accelerator made of threads, and a group for it.

    Raises:
        RuntimeError: A rank failed, or the deadline passed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_run_rank, args=(rank, world_size, folder, on_device, function, args)
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _join(ranks, time.monotonic() + deadline)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return json.loads(Path(folder, "result").read_text())


def _join(ranks: list[BaseProcess], deadline: float) -> None:
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):
            break
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks did not finish before the deadline")
        time.sleep(0.05)
    exit_codes = [process.exitcode for process in ranks]
    if any(exit_codes):
        raise RuntimeError(f"expected exit code 0 from every rank, got {exit_codes}")


def _run_rank(
    rank: int,
    world_size: int,
    folder: str,
    on_device: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # os._exit: gloo's threads may otherwise abort the process while the interpreter shuts down.
    try:
        torch.set_num_threads(1)
        if on_device:
            device.load()
        dist.init_process_group(
            device.BACKENDS if on_device else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
        result = function(rank, *args)
        if rank == 0:
            Path(folder, "result").write_text(json.dumps(result))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
