"""Keep an exponential moving average (EMA) of sharded weights, evaluate it, and export it.

    torchrun --standalone --nproc-per-node 2 tutorials/04_average_weights.py
    python tutorials/04_average_weights.py                       # one rank

The weights of the last step jump about; their average does not. Three things to see:

1. The average is kept on the shards. It is elementwise, so each rank averages its own slices:
   no communication, and 1/N of the memory.
2. To evaluate, `unshard_params` gathers the averaged model once; then any number of forwards runs
   without communication.
3. To export, rank 0 alone gets full values, in host memory, unit by unit.

Expected output (two ranks; digits vary a little with the number of ranks):

    held-out loss of the last weights      0.132
    held-out loss of the averaged weights  0.057
    averaged loss / last loss              0.43
    exported 6 tensors, 17,537 numbers, to average.pt
    a plain model with the exported weights gives the same loss
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import join, leave, say
from torch import Tensor, nn

from composable_shard import clip_grad_norm_, fully_shard, unshard_params

DIM, DECAY, STEPS = 128, 0.98, 300


def make_model() -> nn.Module:
    """Return the plain model, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, DIM), nn.Tanh()),
        nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()),
        nn.Linear(DIM, 1),
    )


def draw(num: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (num, 6) and targets (num, 1) of the function to learn."""
    x = torch.randn(num, 6, generator=generator)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.5 * x[:, :1]
    return x, y + noise * torch.randn(num, 1, generator=generator)


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module) -> None:
    """Move the average towards the model: one elementwise kernel over all shards."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - DECAY)


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss; after the gather that opens the scope, ranks work on their own."""
    with unshard_params(model, writeback=False):
        losses = [F.mse_loss(model(x), y) for x, y in batches]
    return torch.stack(losses).mean().item()


def export(model: nn.Module, path: Path) -> None:
    """Write an ordinary state dict; only rank 0 ever holds the whole model, on its host."""
    with unshard_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)


def main() -> None:
    """Train, average, evaluate, export."""
    join()

    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    average = copy.deepcopy(model)  # sharded as well, with buffers of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(STEPS):
        x, y = draw(64, 1.0, data)
        F.mse_loss(model(x), y).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_average(average, model)

    held_out = torch.Generator().manual_seed(0)
    batches = [draw(256, 0.0, held_out) for _ in range(8)]
    last, averaged = evaluate(model, batches), evaluate(average, batches)
    say(f"held-out loss of the last weights      {last:.3f}")
    say(f"held-out loss of the averaged weights  {averaged:.3f}")
    say(f"averaged loss / last loss              {averaged / last:.2f}")

    path = Path("average.pt")
    export(average, path)
    if dist.get_rank() == 0:
        plain, weights = make_model(), torch.load(path)
        numel = sum(value.numel() for value in weights.values())
        say(f"exported {len(weights)} tensors, {numel:,} numbers, to {path.name}")
        plain.load_state_dict(weights)
        with torch.no_grad():
            loss = torch.stack([F.mse_loss(plain(x), y) for x, y in batches]).mean().item()
        assert abs(loss - averaged) < 1e-6, (loss, averaged)
        say("a plain model with the exported weights gives the same loss")
    leave()


if __name__ == "__main__":
    main()
