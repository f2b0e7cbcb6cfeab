"""See when a step gathers, computes and reduces: a trace of torch's profiler, unit by unit.

    torchrun --standalone --nproc-per-node 2 tutorials/11_read_a_trace.py
    python tutorials/11_read_a_trace.py                       # one rank: nothing is sent

With a profiler on, each gather and reduction is a range with the name of its unit, and so is each
wait for one. Three things to look for, in `trace.json` (open it in ui.perfetto.dev) or in the lines
below: the gather of the next unit begins before the unit in front of it computes; in the backward
units come in reverse, each with a reduction; and a long wait names the unit that came too late.

Expected output (two ranks):

    forward:
      all_gather 0
      all_gather 1
      wait all_gather 0
      all_gather 2
      wait all_gather 1
      wait all_gather 2
    backward:
      all_gather 2
      all_gather 1
      wait all_gather 2
      reduce_scatter 2
      all_gather 0
      wait all_gather 1
      wait reduce_scatter 2
      reduce_scatter 1
      wait all_gather 0
      wait reduce_scatter 1
      reduce_scatter 0
      wait reduce_scatter 0
    optimizer step:
    written: trace.json
"""

import torch
import torch.distributed as dist
from ranks import join, leave
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from composable_shard import fully_shard

DIM, UNITS = 512, 3


def make_model() -> nn.Sequential:
    """Return a sharded stack of layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(UNITS))
    )
    for layer in model:
        fully_shard(layer, prefetch_nbytes=0)  # one unit ahead, not more
    return fully_shard(model)


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Take a step, with ranges of our own around its parts."""
    with record_function("forward"):
        loss = model(x).square().mean()
    with record_function("backward"):
        loss.backward()
    with record_function("optimizer step"):
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Warm up, profile a step, and print the ranges in order."""
    join()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, DIM)
    for _ in range(2):  # the first steps learn the order of the units
        step(model, optimizer, x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model, optimizer, x)
    if dist.get_rank() == 0:
        parts = ("forward", "backward", "optimizer step")
        kinds = ("all_gather", "reduce_scatter", "wait")
        events = sorted(profiler.events(), key=lambda event: event.time_range.start)
        for event in events:
            if event.name in parts:
                print(f"{event.name}:")
            elif event.name.startswith(kinds):
                print(f"  {event.name}")
        profiler.export_chrome_trace("trace.json")
        print("written: trace.json")
    leave()


if __name__ == "__main__":
    main()
