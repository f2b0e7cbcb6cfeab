"""Train one model under every sharding strategy, and see what each one holds and sends.

    torchrun --standalone --nproc-per-node 2 tutorials/05_compare_strategies.py
    python tutorials/05_compare_strategies.py                    # one rank

The losses are the same numbers under every strategy. The strategies differ in how much of the
parameters, gradients and optimizer state each rank keeps, and in how much it sends in a step. This
program measures both: the bytes of the tensors' storages, and the bytes of the collectives. Before
training, `shard_model(..., dry_run=True)` prints the same figures, for any number of ranks.

Expected output (two ranks; in P, the bytes of all parameters; digits vary with the ranks):

    strategy                 parameters  gradients  AdamW  sent per step  last loss
    FULL_SHARD                     0.50       0.50   1.00           1.50     0.0588
    FULL_SHARD, kept full          0.50       0.50   1.00           1.00     0.0588
    SHARD_GRAD_OP                  1.00       0.50   1.00           1.00     0.0588
    SHARD_OPTIM                    1.00       1.00   1.00           1.00     0.0588
    NO_SHARD                       1.00       1.00   2.00           1.00     0.0588
    the losses of all steps are equal

FULL_SHARD holds least and sends most: it gathers parameters for the forward and again for the
backward, unless it keeps them in between. The other three keep them for good, and differ in whether
gradients and optimizer state are sharded. The fewer ranks there are, the less there is to save.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import join, leave, say
from torch import Tensor, nn

from composable_shard import ShardingStrategy, count_collectives, fully_shard, get_handles

DIM, LAYERS, STEPS = 256, 6, 8
CHOICES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "FULL_SHARD, kept full": {"reshard_after_forward": False},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "SHARD_OPTIM": {"strategy": ShardingStrategy.SHARD_OPTIM},
    "NO_SHARD": {"strategy": ShardingStrategy.NO_SHARD},
}


def make_model() -> nn.Module:
    """Return the plain model, with the same weights every time and everywhere."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*layers, nn.Linear(DIM, DIM))


def stored(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; a storage that several share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def train(options: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Shard a fresh model and train it.

    Returns:
        The losses, and the bytes of parameters, gradients, AdamW's moments, and what is sent.
    """
    model = make_model()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(32, DIM, generator=batches)
        optimizer.zero_grad()
        with count_collectives() as log:
            loss = F.mse_loss(model(x), x.roll(1, dims=-1) / 4)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    handles, states = get_handles(model), optimizer.state.values()
    moments = [state[key].to_local() for state in states for key in ("exp_avg", "exp_avg_sq")]
    held = [
        stored(tensor for each in handles for tensor in (each.local_shard, each.unsharded)),
        stored(param.grad.to_local() for param in model.parameters()),
        stored(moments),
    ]
    # Of a gather or a reduce-scatter a rank sends all but its own part; an all-reduce is both.
    payload = log.nbytes("all_gather") + log.nbytes("reduce_scatter") + 2 * log.nbytes("all_reduce")
    ranks = dist.get_world_size()
    return losses, [*held, payload * (ranks - 1) // ranks]


def main() -> None:
    """Train under every strategy and print the table."""
    join()
    size = sum(param.nbytes for param in make_model().parameters())
    results = {name: train(options) for name, options in CHOICES.items()}
    say("strategy                 parameters  gradients  AdamW  sent per step  last loss")
    for name, (losses, (params, grads, moments, sent)) in results.items():
        held = f"{params / size:10.2f} {grads / size:10.2f} {moments / size:6.2f}"
        say(f"{name:24} {held} {sent / size:14.2f} {losses[-1]:10.4f}")
    first = results["FULL_SHARD"][0]
    for name, (losses, _) in results.items():
        torch.testing.assert_close(losses, first, rtol=1e-6, atol=0, msg=f"losses of {name}")
    say("the losses of all steps are equal")
    leave()


if __name__ == "__main__":
    main()
