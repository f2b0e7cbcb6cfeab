"""Train, evaluate, save and go on: all that a sharded training script needs.

    torchrun --standalone --nproc-per-node 2 tutorials/01_quick_start.py
    python tutorials/01_quick_start.py                        # one rank

Sharding takes the lines with `fully_shard`; the rest is an ordinary training script. Start it a
second time and it goes on from its checkpoint, on any number of ranks.

Expected output (two ranks; digits vary a little with the number of ranks):

    16,640 parameters, of which this rank holds 8,320
    epoch 0  loss 0.3572  test loss 0.3455
    epoch 1  loss 0.3009  test loss 0.3312
    epoch 2  loss 0.3078  test loss 0.3121
    saved after 3 epochs
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composable_shard import (
    clip_grad_norm_,
    find_checkpoint,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)

DIM, LAYERS, EPOCHS = 64, 4, 3


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Return what to train on, and what to test on: the same on every rank."""
    torch.manual_seed(0)
    inputs = torch.randn(1280, DIM)
    targets = inputs.relu()
    return TensorDataset(inputs[:1024], targets[:1024]), TensorDataset(
        inputs[1024:], targets[1024:]
    )


def make_model() -> nn.Module:
    """Return the plain model, with the same weights on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(LAYERS)))


def shard(model: nn.Module) -> None:
    """Make each layer a unit, gathered and reduced together, and the model the root unit."""
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


@torch.no_grad()
def test(model: nn.Module, data: TensorDataset) -> float:
    """Return the loss. A forward gathers, so all ranks run the same number of forwards."""
    inputs, targets = data.tensors
    return (model(inputs) - targets).square().mean().item()


def main() -> None:
    """Train for some epochs, and save after each."""
    if "RANK" not in os.environ:  # started without torchrun: one rank
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_: None

    model = make_model()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    whole = sum(param.numel() for param in model.parameters())  # shapes stay those of the model
    held = sum(param.to_local().numel() for param in model.parameters())
    say(f"{whole:,} parameters, of which this rank holds {held:,}")

    start = 0
    if find_checkpoint("quick_start"):
        start = load_checkpoint("quick_start", model, optimizer).step
        say(f"goes on after {start} epochs")
    training, held_out = make_data()
    sampler = DistributedSampler(training)  # each rank has its own part
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    for epoch in range(start, start + EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            clip_grad_norm_(model, 1.0)  # the norm over all ranks, in one collective
            optimizer.step()
            optimizer.zero_grad()
        say(f"epoch {epoch}  loss {loss.item():.4f}  test loss {test(model, held_out):.4f}")
        save_checkpoint("quick_start", model, optimizer, step=epoch + 1, keep_last=1)
    say(f"saved after {epoch + 1} epochs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
