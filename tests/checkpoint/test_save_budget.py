"""What a save may cost before it returns, in exact counts, so that speed can't be lost unseen."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import fully_shard, save_checkpoint
from tests.harness.ranks import distributed

_NUM_LAYERS = 4  # of a unit, of two parameters each
# What a save does before it returns, on rank 0; the plan of the save before is kept
MAX_CALLS = 112  # of Python's functions, for one more parameter with AdamW's state
MAX_MESSAGES = 6  # between the ranks, each of which they wait for


def _calls_of_a_save(num_units: int, path: Path) -> Counter[str]:
    """Return the functions that a save calls before it returns.

    Comprehensions are left out: whether they are calls depends on the Python.
    """
    units = [
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(_NUM_LAYERS))) for _ in range(num_units)
    ]
    model = nn.Sequential(*units)
    for unit in (*model, model):
        fully_shard(unit, check_initial_values=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    called: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and not (name.startswith("<") and name.endswith("comp>")):
            called[name] += 1

    for is_counted in (False, True):  # the first save makes the group and the memory of copies
        dist.barrier()
        gc.disable()  # finalizers run when they run
        sys.setprofile(note if is_counted else None)
        try:
            save = save_checkpoint(path, model, optimizer, step=1, async_op=True)
        finally:
            sys.setprofile(None)
            gc.enable()
        save.wait()
    return called


@distributed(2)
def test_a_background_save_blocks_for_few_calls_and_messages(tmp_path: Path) -> None:
    """A parameter is looked at a few times, whatever the number of units; ranks talk as often."""
    few, many = (_calls_of_a_save(num_units, tmp_path / str(num_units)) for num_units in (3, 6))
    added = (many.total() - few.total()) / (3 * _NUM_LAYERS * 2)
    assert added <= MAX_CALLS, (many - few).most_common(20)
    for called in (few, many):
        assert called["_gather_rows"] + called["_messages"] <= MAX_MESSAGES
