"""What the benchmarks for one GPU share: a process group, peers in bf16, times, memory, traces.

The group is NCCL's of this process alone, or torch's `fake` one, of which the other ranks do not
exist. Nothing is sent there, though it is not quite free: an all-gather copies this rank's shard
once for each rank, and an all-to-all the whole buffer, on the device, beside compute. All peers pay
that for the same bytes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import peers
from benchmarks.rounds import in_turn
from tests.common.gpu_steps import Step
from tests.common.models import make_batch, make_llama

SKIPPED = "needs a CUDA GPU: skipped"


def join_group(kind: str) -> None:
    """Make the default process group: `fake` of 8 ranks, or `nccl` of 1.

    Raises:
        ValueError: For another kind.
    """
    torch.cuda.set_device(0)
    if kind == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    elif kind == "nccl":
        store = dist.FileStore(tempfile.mkstemp()[1], 1)
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        raise ValueError(f"expected --group fake or nccl, got {kind!r}")


@dataclass
class Trainer:
    """One peer with its optimizer and a batch that stays where it is, for CUDA graphs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]

    def step(self) -> Tensor:
        """Take one step and return the loss, on the device."""
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_trainer(peer: str, model_name: str, *, capturable: bool = False) -> Trainer:
    """Return a peer with fused AdamW, all in bf16, after three steps."""
    with torch.device("cuda"):
        model = make_llama(model_name).bfloat16()
    model = peers.build(peer, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)
    tokens, targets = make_batch(model_name, 0)
    trainer = Trainer(model, optimizer, (tokens.cuda(), targets.cuda()))
    for _ in range(3):
        trainer.step()
    return trainer


def milliseconds(step: Step, num_steps: int) -> float:
    """Return the time of a step between two events on the device, the mean of several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / num_steps


def take_turns(steps: dict[str, Step], rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return each one's milliseconds in each round, in rotating order."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in in_turn(names, turn):
            times[name].append(milliseconds(steps[name], num_steps))
    return times


@dataclass
class Memory:
    """Bytes that one peer adds to what was there before, at most and between steps."""

    peak: int
    rest: int
    reserved: int


def measure_memory(make: Callable[[], Trainer]) -> tuple[Trainer, Memory]:
    """Make a trainer; return it with the memory that a step of it takes."""
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainer = make()
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    torch.cuda.synchronize()
    memory = Memory(
        peak=torch.cuda.max_memory_allocated() - allocated,
        rest=torch.cuda.memory_allocated() - allocated,
        reserved=torch.cuda.max_memory_reserved() - reserved,
    )
    return trainer, memory


def by_speed(times: dict[str, list[float]]) -> list[str]:
    """Return the names, fastest first."""
    return sorted(times, key=lambda name: statistics.median(times[name]))
