"""Muon on a sharded model: each matrix whole on one rank, which steps it alone.

    torchrun --standalone --nproc-per-node 2 tutorials/08_train_with_muon.py
    python tutorials/08_train_with_muon.py                       # one rank

Muon takes products of whole matrices: a rank with some rows can't. `granularity="param"` gives
each matrix to one rank, balanced by size; biases and norms stay cut anywhere, and AdamW steps them.
A rank holds the momentum of its own matrices only, a step of both optimizers issues no collective,
and the losses of torch's own Muon are those of one process without sharding.

Expected output (two ranks; digits vary with the number of ranks):

    step    0  loss 1.7864
    step   20  loss 0.6123
    step   40  loss 0.6010
    optimizer state of this rank: 0.50 of the whole, 4 of 8 matrices
    collectives in a step of both optimizers: 0
    largest difference from one process over 40 steps: 0.000000
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import join, leave, say
from torch import Tensor, nn

from composable_shard import FlatShard, clip_grad_norm_, count_collectives, fully_shard

DIM, HIDDEN, LAYERS, STEPS = 32, 64, 4, 40


class Layer(nn.Module):
    """A pre-norm residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to (B, D)."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the rest, sharded or not."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0),
    ]


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (B, D) each, of the function to learn."""
    x = torch.randn(32, DIM, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, torch.sin(2 * x.roll(1, 1)) * x.roll(3, 1)


def train_alone(model: nn.Module, num_ranks: int) -> list[float]:
    """Train without sharding on the batches of all ranks; return the losses."""
    optimizers, losses = make_optimizers(model), []
    for step in range(STEPS + 1):
        batches = [make_batch(step, rank) for rank in range(num_ranks)]
        (loss := sum(F.mse_loss(model(x), y) for x, y in batches) / num_ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_nbytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """Return the bytes that this rank holds of the optimizers' state."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if value.dim()]
    return sum(t.to_local().nbytes if isinstance(t, FlatShard) else t.nbytes for t in tensors)


def main() -> None:
    """Train sharded and alone; compare."""
    rank, num_ranks = join()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    alone = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, granularity=lambda p: "param" if p.dim() == 2 else "element")
    fully_shard(model)
    optimizers, losses, num_collectives = make_optimizers(model), [], 0
    for step in range(STEPS + 1):
        x, y = make_batch(step, rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        clip_grad_norm_(model, 10.0)  # torch's refuses: each rank has other gradients
        with count_collectives() as log:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        num_collectives += len(log.events)
        dist.all_reduce(mean := loss.detach() / num_ranks)
        losses.append(mean.item())
        if step % 20 == 0:
            say(f"step {step:4d}  loss {losses[-1]:.4f}")

    whole = 4 * sum(param.numel() * (3 - min(param.dim(), 2)) for param in model.parameters())
    share, owned = state_nbytes(optimizers) / whole, len(optimizers[0].state)
    say(f"optimizer state of this rank: {share:.2f} of the whole, {owned} of {2 * LAYERS} matrices")
    say(f"collectives in a step of both optimizers: {num_collectives}")
    difference = max(abs(a - b) for a, b in zip(losses, train_alone(alone, num_ranks), strict=True))
    say(f"largest difference from one process over {STEPS} steps: {difference:.6f}")
    leave()


if __name__ == "__main__":
    main()
