"""torchft: two replica groups of two ranks; one group is killed again and again, and comes back.

`make ecosystem`, then `python -m tests.ecosystem.torchft_kills` for ten kills in 300 steps; the
suite has two in 90. A group shards over its own ranks. The gradients of a unit are averaged with
the other group's by torchft, in FSDP2's all-reduce hook. Losses and weights are compared with a
plain model that averages over as many groups as each step had.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess as Process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import fsdp2

STEP_S = 0.25


def make_trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has state, the same in each process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.0)


def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, without a change of the model."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1e-2


def batch_of(step: int, member: int, rank: int) -> Tensor:
    """Return what a rank of a group computes with."""
    draw = torch.Generator().manual_seed(100 * step + 10 * member + rank)
    return torch.randn(8, 16, generator=draw)


def loss_at(model: nn.Module, step: int, member: int, rank: int) -> Tensor:
    """Return the loss of a rank's batch."""
    return (model(batch_of(step, member, rank)) - 1).square().mean()


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's part of the weights and of the optimizer's state, not copied."""
    found = {}
    for number, param in enumerate(model.parameters()):
        for name, value in {"": param, **optimizer.state[param]}.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{number}.{name}"] = local.detach()
    return found


def be_rank(folder: Path, replica: int, num_steps: int, environment: dict[str, str]) -> None:
    """Be one rank of a group, in a process of its own."""
    os.environ.update(environment)
    with (folder / f"output_{replica}.txt").open("a") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    run_rank(folder, replica, num_steps)


def run_rank(folder: Path, replica: int, num_steps: int) -> None:
    """Train as one rank of a group, until all steps are committed."""
    import torchft

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = make_trained()
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    begin(model, optimizer)

    @torch.no_grad()
    def load(state: dict[str, Tensor]) -> None:
        for name, value in parts_of(model, optimizer).items():
            value.copy_(state[name])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        use_async_quorum=False,
        state_dict=lambda: {n: v.clone() for n, v in parts_of(model, optimizer).items()},
        load_state_dict=load,
        replica_id=f"replica{replica}",
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        rank=rank,
        world_size=2,
        store_addr=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30),
    )

    def average(gradient: Tensor) -> None:
        manager.allreduce(gradient, reduce_op=dist.ReduceOp.AVG).wait()

    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            module.set_all_reduce_hook(average)
    with (folder / f"log_{replica}_{rank}.jsonl").open("a") as log:
        while manager.current_step() < num_steps:
            time.sleep(STEP_S)
            manager.start_quorum()
            step, member = manager.current_step(), manager.participating_rank()
            loss = loss_at(model, step, member, rank)
            loss.backward()
            if is_committed := manager.should_commit():
                optimizer.step()
            optimizer.zero_grad()
            row = [step, is_committed, manager.num_participants(), member, loss.item()]
            log.write(json.dumps(row) + "\n")
            log.flush()
    parts = {name: value.clone() for name, value in parts_of(model, optimizer).items()}
    torch.save(parts, folder / f"end_{replica}_{rank}.pt")
    options: Any = fsdp2.StateDictOptions(full_state_dict=True)
    whole = fsdp2.get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(whole, folder / f"whole_{replica}.pt")
    os._exit(0)


def start_group(folder: Path, replica: int, lighthouse: str, num_steps: int) -> list[Process]:
    """Start the two ranks of a group: forks of a process that has imported all there is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LIGHTHOUSE": lighthouse,
    }
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchft", "composable_shard.fsdp2"])
    group = [
        context.Process(
            target=be_rank, args=(folder, replica, num_steps, common | {"RANK": str(rank)})
        )
        for rank in range(2)
    ]
    for process in group:
        process.start()
    return group


def rows_of(folder: Path, replica: int) -> list[list[Any]]:
    """Return what the first rank of a group has told of its steps."""
    path = folder / f"log_{replica}_0.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("]")]


def kill_and_restart(folder: Path, lighthouse: str, num_steps: int, num_kills: int) -> None:
    """Run both groups to the end; kill the second one at random moments, and start it again."""
    groups = [start_group(folder, replica, lighthouse, num_steps) for replica in range(2)]
    draw, num_left, num_rows = random.Random(0), num_kills, 0
    limit_s = 60 + 1.5 * num_steps
    end = time.monotonic() + limit_s
    try:
        while any(process.is_alive() for group in groups for process in group):
            assert time.monotonic() < end, f"not done after {limit_s} s: {folder}"
            time.sleep(0.05)
            has_joined = len(rows_of(folder, 1)) > num_rows + 2
            if num_left and has_joined and len(rows_of(folder, 0)) < num_steps - 40:
                time.sleep(2 * draw.random())  # at any moment of a step
                stop(groups[1])
                num_left, num_rows = num_left - 1, len(rows_of(folder, 1))
                wait_for_step_alone(folder, end)
                groups[1] = start_group(folder, 1, lighthouse, num_steps)
    finally:
        for group in groups:
            stop(group)
    assert not num_left, f"{num_left} kills are left: {folder}"


def wait_for_step_alone(folder: Path, end: float) -> None:
    """Wait until the first group has taken a step without the second one, which was killed.

    A group that comes back before torchft misses its heartbeat leaves no step to one group.
    """
    num_rows = len(rows_of(folder, 0))
    while not any(row[1] and row[2] == 1 for row in rows_of(folder, 0)[num_rows:]):
        assert time.monotonic() < end, f"the other group takes no step: {folder}"
        time.sleep(0.05)


def stop(group: list[Process]) -> None:
    """Kill the ranks of a group by SIGKILL."""
    for process in group:
        process.kill()
        process.join()


def run_and_compare(num_steps: int = 300, num_kills: int = 10) -> str:
    """Run, and compare with a plain model; return how many steps had how many groups."""
    from torchft.coordination import LighthouseServer

    os.environ["RUST_LOG"] = "error"
    folder = Path(tempfile.mkdtemp())
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=1000
    )
    try:
        kill_and_restart(folder, server.address(), num_steps, num_kills)
    finally:
        server.shutdown()
    for rank in range(2):
        ends = [torch.load(folder / f"end_{replica}_{rank}.pt") for replica in range(2)]
        assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())
    model, optimizer = make_trained()
    begin(model, optimizer)
    rows = [row for replica in range(2) for row in rows_of(folder, replica)]
    # A group that comes late takes the state of the other: each step is told by those that took it.
    committed = [row for row in sorted(rows) if row[1]]
    assert {row[0] for row in committed} == set(range(num_steps))
    for step in range(num_steps):
        same = [row for row in committed if row[0] == step]
        (num_members,) = {row[2] for row in same}
        losses = [loss_at(model, step, m, rank) for m in range(num_members) for rank in (0, 1)]
        for *_, member, told in same:
            assert abs(losses[2 * member].item() - told) < 1e-5, (step, told)
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = torch.load(folder / "whole_0.pt")
    torch.testing.assert_close(dict(model.state_dict()), dict(whole), rtol=0, atol=1e-5)
    alone = sum(row[2] == 1 for row in committed)
    skipped = sum(not row[1] for row in rows)
    return (
        f"right: {num_kills} kills in {num_steps} steps; {alone} steps of one group alone, "
        f"{skipped} tried again; both groups end bitwise equal"
    )


if __name__ == "__main__":
    from tests.ecosystem import torchft_kills  # by its name, under which ranks find its functions

    sys.stdout.write(torchft_kills.run_and_compare() + "\n")
