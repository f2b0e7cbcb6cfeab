"""Ray Train starts the workers. One is killed; Ray starts them again, and the run goes on.

    pip install "ray[train]"
    python tutorials/16_ray_train.py

Ray makes the process group. Each worker shards the model in the function that it runs, and saves
with `save_checkpoint` in a directory that all nodes see. When a worker dies, Ray starts all of
them again, up to `max_failures` times: the function looks for a checkpoint, and takes the missing
steps. Ray may start another number of workers then, as the checkpoint loads on any.

Expected output (digits may differ):

    start 1 on 2 workers: from step 0
    start 2 on 2 workers: from step 6
    10 steps, last loss 0.0310
    largest difference from one process below 1e-06: True
"""

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn

from composable_shard import find_checkpoint, fully_shard, load_checkpoint, save_checkpoint

DIM, BATCH, STEPS, KILLED_IN = 16, 8, 10, 7


def make_model() -> nn.Module:
    """Return the same model everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, DIM))


def make_batch(step: int) -> Tensor:
    """Return the inputs of all ranks, (BATCH, DIM)."""
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Let the model reverse its input."""
    return (model(x) - x.flip(-1) / 4).square().mean()


def train(config: dict[str, Any]) -> None:
    """Run on each worker, in the process group that Ray has made."""
    folder, rank, num_ranks = Path(config["folder"]), dist.get_rank(), dist.get_world_size()
    model = make_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    is_first = find_checkpoint(folder) is None
    start = 0 if is_first else load_checkpoint(folder, model, optimizer).step
    if rank == 0:
        with (folder / "starts.txt").open("a") as file:
            file.write(f"on {num_ranks} workers: from step {start}\n")
    for step in range(start, STEPS):
        if is_first and step == KILLED_IN and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that fails
        loss = loss_of(model, make_batch(step).chunk(num_ranks)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        if rank == 0:
            (folder / f"loss_{step}.json").write_text(json.dumps(mean.item()))
        if step % 3 == 2:
            save_checkpoint(folder, model, optimizer, step=step + 1)
        ray.train.report({"step": step, "loss": mean.item()})


def train_alone() -> list[float]:
    """Return the losses of one process without sharding."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),  # on GPUs leave it out, and pass use_gpu=True
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
        ),
    )
    trainer.fit()
    ray.shutdown()
    for number, line in enumerate((folder / "starts.txt").read_text().splitlines(), 1):
        print(f"start {number} {line}")
    losses = [json.loads((folder / f"loss_{step}.json").read_text()) for step in range(STEPS)]
    pairs = zip(losses, train_alone(), strict=True)
    difference = max(abs(one - other) for one, other in pairs)
    print(f"{STEPS} steps, last loss {losses[-1]:.4f}")
    print(f"largest difference from one process below 1e-06: {difference < 1e-6}")


if __name__ == "__main__":
    main()
