"""Generate and train by turns, as reinforcement learning does, with an engine for inference.

    torchrun --standalone --nproc-per-node 2 tutorials/13_generate_and_train.py
    python tutorials/13_generate_and_train.py                          # one rank

The trainer is sharded. The engine is a model of its own, here a copy in bf16, elsewhere a server:
it takes full weights by name. `iter_full_params` hands them over bucket by bucket, the next one
gathered ahead, so that no rank ever holds the whole model beside its shards. The reward is the
share of one word in what the engine writes.

Expected output:

    the engine has the trainer's weights: True
    all-gathers to hand over 5 units: 5
    turn 0: 0.03 of the words are the wanted one
    turn 30: most words are the wanted one: True
    the engine has the trainer's weights: True
"""

import copy

import torch
import torch.distributed as dist
from ranks import join, leave, say
from torch import Tensor, nn
from torch.nn import functional as F

from composable_shard import count_collectives, fully_shard, iter_full_params

WORDS, DIM, LENGTH, WANTED = 32, 32, 12, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(self.norm(x))[0])


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Map (N, T) to (N, T, V)."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def hand_over(trainer: nn.Module, engine: nn.Module) -> None:
    """Give the engine the trainer's weights; on all ranks."""
    for name, value in iter_full_params(trainer, dtype=torch.bfloat16):
        engine.get_parameter(name).copy_(value)


@torch.no_grad()
def write(engine: nn.Module, number: int) -> Tensor:
    """Let the engine write, word by word; each rank writes other texts."""
    words = torch.zeros(number, 1, dtype=torch.long)
    for _ in range(LENGTH):
        chances = engine(words)[:, -1].float().softmax(-1)
        words = torch.cat([words, torch.multinomial(chances, 1)], 1)
    return words


def learn(trainer: nn.Module, words: Tensor) -> Tensor:
    """Return a loss that makes texts with more than the usual reward likelier."""
    reward = (words[:, 1:] == WANTED).float().mean(1)
    chances = F.log_softmax(trainer(words[:, :-1]), -1)
    taken = chances.gather(-1, words[:, 1:, None])[..., 0].mean(1)
    return -((reward - reward.mean()) * taken).mean() * 10


def agrees(trainer: nn.Module, engine: nn.Module) -> bool:
    """Compare all weights, bit by bit."""
    pairs = iter_full_params(trainer, dtype=torch.bfloat16)
    return all([torch.equal(value, engine.get_parameter(name)) for name, value in pairs])


def main() -> None:
    join()
    torch.manual_seed(0)
    trainer = Writer()
    engine = copy.deepcopy(trainer).bfloat16()
    for block in trainer.blocks:
        fully_shard(block)
    fully_shard(trainer)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    with count_collectives() as log:
        hand_over(trainer, engine)
    say("the engine has the trainer's weights:", agrees(trainer, engine))
    say("all-gathers to hand over 5 units:", log.count("all_gather"))
    for turn in range(31):
        words = write(engine, 64)
        share = (words[:, 1:] == WANTED).float().mean() / dist.get_world_size()
        dist.all_reduce(share)
        if turn == 0:
            say(f"turn {turn}: {share:.2f} of the words are the wanted one")
        learn(trainer, words).backward()
        optimizer.step()
        optimizer.zero_grad()
        hand_over(trainer, engine)
    say(f"turn {turn}: most words are the wanted one:", bool(share > 0.5))
    say("the engine has the trainer's weights:", agrees(trainer, engine))
    leave()


if __name__ == "__main__":
    main()
