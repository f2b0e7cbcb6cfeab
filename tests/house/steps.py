"""Functions of the package that a training step and the README's program enter, as they run.

Two fresh processes run each program on gloo, and rank 0 counts. The model of the step is three
residual blocks of two bias-free linear layers in an `nn.Sequential` that has no parameters of its
own; `fully_shard` wraps each block and then the root. A step is a forward, a backward, a step of
`torch.optim.AdamW` with its defaults and `zero_grad`.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import composable_shard
from tests.harness.ranks import run_processes

__all__ = ["Entered", "count_steps"]

# Functions: the path of a file within a folder, the name and the first line. A comprehension is one
# where the Python in use makes it one (Python 3.12 inlines comprehensions).
Entered = set[tuple[str, str, int]]

_OURS = str(Path(composable_shard.__file__).parent)
_FSDP2 = str(Path(fsdp.__file__).parent / "_fully_shard")
_README = Path(_OURS).parent / "README.md"
_NUM_BLOCKS = 3
_NUM_WARM_UP_STEPS = 3


def count_steps() -> dict[str, Entered]:
    """Return what is entered in a first step, a warm one, FSDP2's warm one, and the quick start."""
    return _on_rank_0(_count_warm_steps) | _on_rank_0(_count_quick_start)


def _on_rank_0(count: Callable[[], dict[str, Entered]]) -> dict[str, Entered]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
        ranks = [{"RANK": rank, "LOCAL_RANK": rank, **common} for rank in "01"]
        found: dict[str, Entered] = run_processes(ranks, _count_in, folder, count)[0]
        return found


def _count_in(folder: str, count: Callable[[], dict[str, Entered]]) -> dict[str, Entered]:
    torch.set_num_threads(1)
    os.chdir(folder)
    return count()


def _count_quick_start() -> dict[str, Entered]:
    """Run the README's program in the current folder, which holds no checkpoint yet."""
    [program] = re.findall(r"^```python\n(# train\.py\n.*?)^```$", _README.read_text(), re.M | re.S)
    path = Path(f"train_{os.environ['RANK']}.py")
    path.write_text(program)
    with _count(_OURS) as entered, redirect_stdout(None):
        runpy.run_path(str(path), run_name="__main__")
    return {"quick start": entered}


def _count_warm_steps() -> dict[str, Entered]:
    dist.init_process_group("gloo")
    try:
        first, warm = _count_trainer(_OURS, composable_shard.fully_shard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, fsdp2 = _count_trainer(_FSDP2, fsdp.fully_shard)
        return {"first": first, "warm": warm, "fsdp2": fsdp2}
    finally:
        dist.destroy_process_group()


def _count_trainer(folder: str, fully_shard: Callable[[nn.Module], Any]) -> tuple[Entered, Entered]:
    """Return what the first step enters, and what a warm one does."""
    model = nn.Sequential(*(_Residual() for _ in range(_NUM_BLOCKS)))
    x = torch.ones(4, 16)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with _count(folder) as first:
        _step(model, optimizer, x)
    for _ in range(_NUM_WARM_UP_STEPS):
        _step(model, optimizer, x)
    with _count(folder) as warm:
        _step(model, optimizer, x)
    return first, warm


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


@contextmanager
def _count(folder: str) -> Iterator[Entered]:
    """Fill a set with the functions of a folder that run, files' own code and old threads aside.

    On rank 0: nobody reads what the other one enters.
    """
    codes: set[CodeType] = set()
    entered: Entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            codes.add(frame.f_code)

    gc.disable()  # finalizers run when they run
    if os.environ["RANK"] == "0":
        sys.setprofile(note)
        threading.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
        for code in codes:
            if code.co_name != "<module>":
                path = str(Path(code.co_filename).relative_to(folder))
                entered.add((path, code.co_name, code.co_firstlineno))
