"""Files, functions and calls between files of a training step, counted as it runs.

Two fresh processes join a gloo group, and rank 0 counts. The model is three residual blocks of two
bias-free linear layers in an `nn.Sequential` that has no parameters of its own; `fully_shard` wraps
each block and then the root. A step is a forward, a backward, a step of `torch.optim.AdamW` with
its defaults and `zero_grad`.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import composable_shard
from tests.helpers import run_processes

__all__ = ["Entered", "count_steps"]

_OURS = str(Path(composable_shard.__file__).parent)
_FSDP2 = str(Path(fsdp.__file__).parent / "_fully_shard")
_NUM_BLOCKS = 3
_NUM_WARM_UP_STEPS = 3
_RANK = "HOUSE_RANK"


@dataclass(frozen=True)
class Entered:
    """What ran of one folder: which files and functions, and how many calls between its files.

    A call is between files if the caller's file and the called function's file are different files
    of the folder. A comprehension or generator is a function where the Python in use makes it one
    (Python 3.12 inlines comprehensions), and never a call.
    """

    files: frozenset[str]
    num_functions: int
    num_calls_between_files: int


def count_steps() -> dict[str, Entered]:
    """Return what a step enters: `warm` and `first` (set-up included), and FSDP2's `fsdp2`."""
    with tempfile.TemporaryDirectory() as folder:
        environments = [{_RANK: str(rank)} for rank in range(2)]
        found: dict[str, Entered] = run_processes(environments, _count_on_rank, folder)[0]
        return found


def _count_on_rank(folder: str) -> dict[str, Entered]:
    torch.set_num_threads(1)
    rank = int(os.environ[_RANK])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        first, warm = _count_trainer(_OURS, composable_shard.fully_shard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fsdp2 = _count_trainer(_FSDP2, fsdp.fully_shard)[1]
        return {"first": first, "warm": warm, "fsdp2": fsdp2}
    finally:
        dist.destroy_process_group()


def _count_trainer(folder: str, fully_shard: Callable[[nn.Module], Any]) -> tuple[Entered, Entered]:
    """Return what set-up and the first step enter, and what a warm step enters."""
    model = nn.Sequential(*(_Residual() for _ in range(_NUM_BLOCKS)))
    x = torch.ones(4, 16)
    with _count(folder) as first:
        for block in model:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer, x)
    for _ in range(_NUM_WARM_UP_STEPS):
        _step(model, optimizer, x)
    with _count(folder) as warm:
        _step(model, optimizer, x)
    return first.entered(), warm.entered()


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass
class _Counter:
    folder: str
    functions: set[CodeType] = field(default_factory=set)
    num_calls: int = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.folder):
            return
        self.functions.add(code)
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        is_function = code.co_name == "<lambda>" or not code.co_name.startswith("<")
        if is_function and caller.startswith(self.folder) and caller != code.co_filename:
            self.num_calls += 1

    def entered(self) -> Entered:
        files = frozenset(
            str(Path(code.co_filename).relative_to(self.folder)) for code in self.functions
        )
        return Entered(files, len(self.functions), self.num_calls)


@contextmanager
def _count(folder: str) -> Iterator[_Counter]:
    counter = _Counter(folder)
    gc.disable()  # finalizers run when they run
    sys.setprofile(counter.note)
    try:
        yield counter
    finally:
        sys.setprofile(None)
        gc.enable()
