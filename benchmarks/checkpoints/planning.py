"""What does it cost a rank to plan a save, on few ranks and on thousands, beside DCP?

One process, as one rank of a group whose collectives do nothing: the rank in the middle. Units of
100 parameters of 64 x 64 with AdamW's state, of which a rank holds a piece of each unit. *seconds*:
process CPU time of `save_checkpoint` until the rank has told what it holds; of DCP's
`create_local_plan` for state dicts of the same shards. *bytes*: the JSON that the rank sends, and
DCP's pickled local plan, which goes to one rank as well. Each rank is then told which of its pieces
to write; the first rank's own work has a line for each piece of each rank, as DCP's has, and is not
measured here.

    python -m benchmarks.checkpoints planning --output planning.md
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner

from benchmarks import report
from composable_shard import fully_shard, get_optimizer_state_dict, save_checkpoint
from composable_shard.comm import HostGroup
from tests.common.free_group import free_world

NUM_PARAMS = 100  # of a unit


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        params = (nn.Parameter(torch.empty(64, 64)) for _ in range(NUM_PARAMS))
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor) -> Tensor:
        return x


class _ToldError(Exception):
    """Ends a save when the rank has told what it holds."""


class _OneOfMany(HostGroup):
    """A rank that is not the first, of a group without others; counts what it sends."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size
        self.sent: list[int] = []

    def all_messages(self, message: Any) -> list[Any]:
        return [message]

    def on_first(self, function: Any) -> Any:
        return [0]  # the rank that describes what all have

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(len(json.dumps(value)))
        if len(self.sent) == 2:
            raise _ToldError
        return []


def measure(num_ranks: int, num_units: int) -> list[float]:
    """Return seconds and bytes of ours, and of DCP's local plan."""
    with free_world(num_ranks, num_ranks // 2):
        with torch.device("meta"):
            model = nn.Sequential(*(_Unit() for _ in range(num_units)))
        for unit in (*model, model):
            fully_shard(unit, check_initial_values=False)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
        group = _OneOfMany(num_ranks // 2, num_ranks)
        start = time.process_time()
        replaced = patch("composable_shard.checkpoint.saving.quiet_group", lambda: group)
        with replaced, suppress(_ToldError):
            save_checkpoint("unused", model, optimizer, step=1)
        own = time.process_time() - start
        states = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        start = time.process_time()
        planner = DefaultSavePlanner()
        planner.set_up_planner(states, is_coordinator=False)
        plan = pickle.dumps(planner.create_local_plan())
        return [own, sum(group.sent), time.process_time() - start, len(plan)]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--ranks", default="64,512,4096", help="comma-separated")
    parser.add_argument("--units", type=int, default=1000, help="of 100 parameters each")
    args = parser.parse_args(argv)
    measure(2, 2)  # what is done once
    rows = []
    for num_ranks in map(int, args.ranks.split(",")):
        own, sent, theirs, planned = measure(num_ranks, args.units)
        figures = [f"{own:.1f}", f"{sent / 1e3:,.0f}", f"{theirs:.1f}", f"{planned / 1e3:,.0f}"]
        rows.append([f"{num_ranks:,}", *figures])
    markdown = report.header(
        f"Planning a save of {args.units * NUM_PARAMS:,} parameters with AdamW",
        "the rank in the middle; collectives do nothing",
    )
    columns = ["ranks", "`save_checkpoint`, s", "sent kB", "DCP's local plan, s", "its kB"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)


if __name__ == "__main__":
    main()
