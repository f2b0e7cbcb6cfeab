"""Modules with unusual calls or parameters, and how they are sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import fully_shard
from tests.programs.models import Layer, Net


class RepeatedBlock(nn.Module):
    """Calls its only block several times."""

    def __init__(self, num_calls: int = 2) -> None:
        super().__init__()
        self.block = Layer()
        self.last = nn.Linear(15, 3)
        self.num_calls = num_calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_calls):
            x = self.block(x)
        return self.last(x)


class ChainOfBlocks(nn.Module):
    """Blocks, and a parameterless rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Sandwich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Layer()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.outer(x)))


class CallsItself(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, depth - 1) if depth else x


class Choosing(nn.Module):
    """Runs those of its layers that it is told to run."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(num_layers))
        self.last = nn.Linear(15, 3)

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        x = torch.tanh(self.first(x))
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return self.last(x)


def shard_linears(model: nn.Module, **options: Any) -> None:
    """Make each linear layer, and what is left, a unit."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(model, **options)


class OptionalLayer(nn.Module):
    """A unit in which one layer is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(15, 15)
        self.optional = nn.Linear(15, 15)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        if is_used:
            x = torch.tanh(self.optional(x))
        return torch.tanh(self.always(x))


class OptionalStack(nn.Module):
    """Units with an optional layer each; all other parameters are used in every step."""

    def __init__(self, kind: type[OptionalLayer] = OptionalLayer, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 15)
        self.blocks = nn.ModuleList(kind() for _ in range(num_blocks))
        self.out = nn.Linear(15, 3)

    def forward(self, x: Tensor, used: tuple[bool, ...]) -> Tensor:
        x = self.inp(x)
        for block, is_used in zip(self.blocks, used, strict=True):
            x = block(x, is_used)
        return self.out(x)


ALL_USED, NONE_USED = (True, True, True), (False, False, False)


class RecurrentHead(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(5, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class OddParameters(nn.Module):
    """Parameters of every odd kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.randn(1))
        self.transposed = nn.Parameter(torch.randn(15, 7).t())
        self.strided = nn.Parameter(torch.randn(7, 30)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(15).expand(7, 15))
        self.conv = nn.Conv2d(3, 5, (3, 2)).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ (self.transposed + self.strided).t() * self.scalar + self.one
        x = x + self.empty.sum() + torch.tanh(x @ self.expanded)[:, :7]
        images = x.new_ones(2, 3, 4, 4) * x.mean()
        return x.sum() + self.conv(images.to(memory_format=torch.channels_last)).square().sum()


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EmptyUnit(), EmptyUnit()])
        self.last = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class EmptyUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 15))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum(0)


class ComplexLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 7, dtype=torch.complex64)
        self.real = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.real(x)).to(torch.complex64)).abs()


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 15, sparse=True)
        self.last = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x))


class PartlyFrozen(nn.Module):
    """Frozen layers before, between and after trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(5))
        for index in (0, 2, 4):
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make_partly_frozen() -> nn.Module:
    """Return units of which each has frozen layers."""
    return nn.Sequential(*(PartlyFrozen() for _ in range(3)))


def make_with_frozen_unit() -> nn.Module:
    """Return a `Net` whose second block is frozen."""
    model = Net()
    model.blocks[1].requires_grad_(False)
    return model


class TiedLanguage(nn.Module):
    """An embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 15)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(15, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rank_tokens(step: int) -> Tensor:
    """Return tokens that differ between ranks and steps."""
    return (torch.arange(8).view(2, 4) * (step + 2) + 5 * dist.get_rank()) % 11


class SomeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(4))

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x


def shard_pairs(model: nn.Module, **options: Any) -> None:
    """Make two layers each one unit."""
    fully_shard([model.layers[0], model.layers[1]], **options)
    fully_shard([model.layers[2], model.layers[3]], **options)
    fully_shard(model, **options)
