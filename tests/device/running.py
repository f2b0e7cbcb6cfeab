"""Runs test bodies in processes that have the device: `torch.accelerator` is one per process."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.common import device
from tests.common.device import build
from tests.harness.ranks import run_processes

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor  # before torch 2.13
)

TIMEOUT_S = 20


def on_device(
    body: Callable[..., None] | None = None, /, *, num_ranks: int = 1, timeout_s: int = TIMEOUT_S
) -> Any:
    """Turn the body of a module-level test into what each of `num_ranks` processes runs.

    With more than one rank they share a process group, whose collectives end after `timeout_s`.
    The body ends with a synchronisation, so that no error of a kernel is lost, and a race in it
    fails the test. That is skipped, by the name of what is missing, where there is no device.
    """
    if body is None:
        return functools.partial(on_device, num_ranks=num_ranks, timeout_s=timeout_s)

    @functools.wraps(body)
    def test(**kwargs: Any) -> None:
        __tracebackhide__ = True
        if missing := build.why_unavailable():
            pytest.skip(missing)
        with tempfile.TemporaryDirectory() as folder:
            environments = [{"RANK": str(rank)} for rank in range(num_ranks)]
            store = str(Path(folder) / "store")
            name = (body.__module__, body.__qualname__)
            run_processes(environments, _run_with_device, name, kwargs, store, num_ranks, timeout_s)

    test.rank_body = body  # type: ignore[attr-defined]  # read by the workers
    return test


def _run_with_device(
    name: tuple[str, str], kwargs: dict[str, Any], store: str, num_ranks: int, timeout_s: int
) -> None:
    module, qualname = name
    body = getattr(importlib.import_module(module), qualname).rank_body
    device.load()
    device.detect_races()
    torch.manual_seed(0)
    if num_ranks > 1:
        rank = int(os.environ["RANK"])
        dist.init_process_group(
            device.BACKENDS,
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    body(**kwargs)
    device.synchronize()
    device.check_races()
