"""Give each part of a model the sharding that suits it.

    torchrun --standalone --nproc-per-node 2 tutorials/02_mix_policies.py
    python tutorials/02_mix_policies.py                       # one rank

- The embedding is frozen, and computes in bfloat16: nothing of it is reduced.
- The blocks are sharded fully and freed after each forward: least memory.
- The last block stays gathered until its backward, which comes at once: a gather less.
- The head is small: every rank keeps it whole, and only its gradients are reduced. The second
  all-reduce is that of the flags by which ranks compare their steps.

Expected output (two ranks):

    unit        strategy    parameters  kept after a forward
    the rest    FULL_SHARD           0  all
    embedding   FULL_SHARD      16,384  nothing
    blocks.0    FULL_SHARD      33,024  nothing
    blocks.1    FULL_SHARD      33,024  nothing
    blocks.2    FULL_SHARD      33,024  all
    head        NO_SHARD        16,512  all
    in a step: 6 gathers, 3 reduce-scatters, 2 all-reduces
    the losses are those of the plain model
"""

import copy

import torch
import torch.nn.functional as F
from ranks import join, leave, say
from torch import Tensor, nn

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    count_collectives,
    describe,
    fully_shard,
)

WORDS, DIM, STEPS = 128, 128, 5


class Net(nn.Module):
    """A model of words, (B, T) to (B, T, WORDS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(3)
        )
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of each next word."""
        x = self.embedding(words).float()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard(model: Net) -> None:
    """Apply a policy to each part."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model.embedding, mp_policy=half)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=block is not model.blocks[-1])
    fully_shard(model.head, strategy=ShardingStrategy.NO_SHARD)
    fully_shard(model)  # no parameters are left for it, but it is the root


def train(model: nn.Module, ranks: list[int]) -> list[float]:
    """Train on the batches of these ranks; return the losses of the first."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.AdamW(params, lr=1e-3), []
    for step in range(STEPS):
        for rank in ranks:
            draw = torch.Generator().manual_seed(1000 * step + rank)
            words = torch.randint(WORDS, (16, 9), generator=draw)
            scores = model(words[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(scores, words[:, 1:].flatten()) / len(ranks)
            loss.backward()
            losses.append(loss.item() * len(ranks))
        optimizer.step()
        optimizer.zero_grad()
    return losses[:: len(ranks)]


def main() -> None:
    """Shard, look, train, and compare with the plain model."""
    rank, num_ranks = join()
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    shard(model)
    say("unit        strategy    parameters  kept after a forward")
    for unit in describe(model).units:
        name = " ".join(unit.fqns) or "the rest"
        say(f"{name:11} {unit.strategy.name:11} {unit.numel:10,}  {unit.keeps}")

    with count_collectives() as log:
        losses = train(model, [rank])
    counts = [log.count(kind) / STEPS for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    say("in a step: {:.0f} gathers, {:.0f} reduce-scatters, {:.0f} all-reduces".format(*counts))
    expected = train(plain, list(range(num_ranks)))
    if rank == 0:
        torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0)
    say("the losses are those of the plain model")
    leave()


if __name__ == "__main__":
    main()
