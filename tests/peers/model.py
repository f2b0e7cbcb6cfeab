"""The run whose checkpoints the fixtures are: three steps, saved, and three more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_STEPS = 3  # before the checkpoint, and again after it
WORLD_SIZE = 2
LR = 0.01


class PeerModel(nn.Module):
    """Odd shapes; a tied, a frozen and a scalar parameter; buffers that change and do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 15)
        self.down = nn.Linear(15, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.linspace(0, 1, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden))) * self.scale.to(hidden.dtype)
        hidden = self.norm(hidden + self.frozen(hidden) + self.offset.to(hidden.dtype))
        return self.head(hidden)


def make_peer_model() -> PeerModel:
    """Return the model that the runs begin with."""
    torch.manual_seed(7)
    return PeerModel()


def two_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups of the trainable parameters, with and without weight decay."""
    params = [each for each in model.parameters() if each.requires_grad]
    named = dict.fromkeys(params)
    wide = [each for each in named if id(each) in _ids_of_wide(model)]
    rest = [each for each in named if id(each) not in _ids_of_wide(model)]
    return [
        {"params": wide, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
    ]


def _ids_of_wide(model: nn.Module) -> set[int]:
    """Return the weights of linear layers and embeddings: by module, for shards have other dims."""
    kinds = nn.Linear | nn.Embedding
    return {id(each.weight) for each in model.modules() if isinstance(each, kinds)}


def peer_batches(first: int, rank: int) -> Iterator[Tensor]:
    """Yield the tokens of three steps, for one rank."""
    for step in range(first, first + NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield torch.randint(0, 11, (4, 5), generator=generator)


def peer_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss, in fp32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def take_steps(model: nn.Module, optimizer: Any, scheduler: Any, first: int, rank: int) -> None:
    """Take three steps on the batches of a rank."""
    for tokens in peer_batches(first, rank):
        optimizer.zero_grad()
        peer_loss(model(tokens), tokens).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
