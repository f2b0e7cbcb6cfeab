"""Operate on the weights of a sharded model: look, compress, re-initialise, load.

    torchrun --standalone --nproc-per-node 2 tutorials/03_edit_weights.py
    python tutorials/03_edit_weights.py                        # one rank

Inside `unshard_params` a sharded model is an ordinary model: full matrices under their own names.
Edits are written back to the shards when the scope ends, and training goes on.

Expected output:

    largest singular value of each matrix: [1.14, 1.12, 1.09]
    rank of layers.1.weight after compression: 8 of 64
    function changed by compression: 0.69 of its size
    new head, the same on all ranks: True
    loaded on rank 0 only, arrived on all ranks: True
    an edit that failed on one rank changed nothing: True
"""

import torch
import torch.distributed as dist
from ranks import join, leave, say
from torch import Tensor, nn

from composable_shard import fully_shard, unshard_params

DIM = 64


class Net(nn.Module):
    """Three layers, (B, D) to (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D) to (B, D)."""
        return self.head(torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)))))


def is_loaded(model: Net) -> bool:
    """Return whether this rank's shards have the values of `load`."""
    return all(bool((param.to_local() == 0.01).all()) for param in model.parameters())


def look(model: Net) -> None:
    """Read full matrices; with writeback=False nothing is sent when the scope ends."""
    with unshard_params(model, writeback=False), torch.no_grad():
        sizes = [torch.linalg.matrix_norm(p, 2).item() for p in model.parameters() if p.ndim == 2]
    say(f"largest singular value of each matrix: {[round(size, 2) for size in sizes]}")


@torch.no_grad()
def compress(model: Net, x: Tensor) -> None:
    """Keep 8 singular values of a matrix. All ranks do the same: each keeps its own slice."""
    before = model(x)
    with unshard_params(model.layers[1]):
        weight = model.layers[1].weight
        u, s, v = torch.linalg.svd(weight)
        weight.copy_(u[:, :8] * s[:8] @ v[:8])
        rank = torch.linalg.matrix_rank(weight).item()
    change = ((model(x) - before).norm() / before.norm()).item()
    say(f"rank of layers.1.weight after compression: {rank} of {DIM}")
    say(f"function changed by compression: {change:.2f} of its size")


def initialise_head(model: Net) -> None:
    """Draw new weights on rank 0 only, where seeds differ between ranks; all ranks get them."""
    torch.manual_seed(dist.get_rank())
    with unshard_params(model, recurse=False, rank0_only=True):
        if dist.get_rank() == 0:
            nn.init.orthogonal_(model.head.weight)
    values = model.head.weight.full_tensor()
    reference = values.clone()
    dist.broadcast(reference, 0)
    say(f"new head, the same on all ranks: {torch.equal(values, reference)}")


def load(model: Net) -> None:
    """Load a full checkpoint that only rank 0 has, in host memory, unit by unit."""
    with unshard_params(model, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            full = {
                name: torch.full_like(value, 0.01) for name, value in model.state_dict().items()
            }
            model.load_state_dict(full)
    say(f"loaded on rank 0 only, arrived on all ranks: {is_loaded(model)}")


def make_mistake(model: Net) -> None:
    """Fail on one rank: all ranks get an error, and none keeps half an edit."""
    try:
        with unshard_params(model), torch.no_grad():
            model.head.weight.zero_()
            if dist.get_rank() == 0:
                raise ValueError("a mistake on rank 0")
    except (ValueError, RuntimeError):
        say(f"an edit that failed on one rank changed nothing: {is_loaded(model)}")


def main() -> None:
    """Do one operation after the other, then train."""
    join()
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    look(model)
    compress(model, torch.randn(128, DIM))
    initialise_head(model)
    load(model)
    make_mistake(model)
    leave()


if __name__ == "__main__":
    main()
