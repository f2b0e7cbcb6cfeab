"""Sharded training gives the losses, gradients, parameters and states of its references."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from composable_shard import ShardingStrategy, fully_shard, no_sync
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import assert_is_slice, full_tensor_of

NUM_STEPS = 6


class LanguageBlock(nn.Module):
    """Residual block with odd shapes, a frozen layer and a vector parameter."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.frozen = nn.Linear(hidden, hidden, bias=False).requires_grad_(False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return x of shape (batch, length, dim), changed."""
        hidden = self.frozen(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.scale * self.down(hidden)


class LanguageModel(nn.Module):
    """Language model with tied embedding and head, of odd widths."""

    def __init__(self, num_layers: int = 3, dim: int = 15, vocab: int = 37) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LanguageBlock(dim, 7) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting each token's successor."""
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _batches(step: int, num: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    for _ in range(num):
        yield torch.randint(0, 37, (3, 9), generator=generator)


def _shard_language_model(
    model: LanguageModel, apply: Callable[[nn.Module], object]
) -> LanguageModel:
    for layer in model.layers:
        apply(layer)
    apply(model)
    return model


def _train_microbatches(
    model: nn.Module,
    unsynced: Callable[[nn.Module], object],
    num_microbatches: int,
    on_step: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        for index, tokens in enumerate(_batches(step, num_microbatches)):
            with unsynced(model) if index + 1 < num_microbatches else nullcontext():
                loss = model(tokens)
                (loss / num_microbatches).backward()
            losses.append(loss.detach())
        on_step(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return losses


# The last step's parameters and averages have every gradient before it in them.
RECORDED = (0, 1, 2, NUM_STEPS - 1)


def _record(
    history: list[list[Tensor]], steps: tuple[int, ...] = RECORDED
) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """Return a step callback that keeps gradients, parameters and optimizer state, in full."""
    numbers = itertools.count()

    def on_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if next(numbers) not in steps:
            return
        params = [param for param in model.parameters() if param.requires_grad]
        values = [full_tensor_of(param.grad) for param in params] + [
            full_tensor_of(p.detach()) for p in params
        ]
        for param in params:
            values += [full_tensor_of(value) for _, value in sorted(optimizer.state[param].items())]
        history.append([value.clone() for value in values])

    return on_step


STRATEGIES = list(ShardingStrategy)


def _train_ours(
    num_microbatches: int,
    unsynced: Callable[[nn.Module], object] = no_sync,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    recorded: tuple[int, ...] = RECORDED,
) -> tuple:
    torch.manual_seed(0)
    history: list[list[Tensor]] = []
    model = _shard_language_model(LanguageModel(), partial(fully_shard, strategy=strategy))
    return _train_microbatches(
        model, unsynced, num_microbatches, _record(history, recorded)
    ), history


@functools.cache  # every strategy has the same references
def _train_ddp(num_microbatches: int, recorded: tuple[int, ...] = RECORDED) -> tuple:
    torch.manual_seed(0)
    history: list[list[Tensor]] = []
    model = DistributedDataParallel(LanguageModel(), gradient_as_bucket_view=True)
    record = _record(history, recorded)
    return _train_microbatches(model, lambda ddp: ddp.no_sync(), num_microbatches, record), history


@functools.cache
def _train_fsdp2(num_microbatches: int) -> tuple:
    """Return what training with every microbatch reduced gives."""
    torch.manual_seed(0)
    history: list[list[Tensor]] = []
    model = _shard_language_model(LanguageModel(), torch_fully_shard)
    return _train_microbatches(model, nullcontext, num_microbatches, _record(history)), history


def _assert_same_run(ours: tuple, theirs: tuple) -> None:
    for loss, expected in zip(*(run[0] for run in (ours, theirs)), strict=True):
        assert_equal(loss, expected, "loss")
    for values, references in zip(ours[1], theirs[1], strict=True):
        for value, reference in zip(values, references, strict=True):
            assert_equal(value, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_microbatches", [1, 3])
@distributed(2)
def test_losses_gradients_and_states_are_bitwise_those_of_ddp(
    num_microbatches: int, strategy: ShardingStrategy
) -> None:
    """6 AdamW steps with odd shapes, frozen layers and ties, with and without accumulation.

    S2.4 and S2.14, for every strategy: only data movement differs.
    """
    _assert_same_run(_train_ours(num_microbatches, strategy=strategy), _train_ddp(num_microbatches))


@distributed(2)
def test_losses_gradients_and_states_are_bitwise_those_of_fsdp2() -> None:
    """6 AdamW steps; torch's fully_shard takes the ties since they lie in one unit."""
    _assert_same_run(_train_ours(1), _train_fsdp2(1))


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_accumulating_into_shards_is_the_same_as_fsdp2(strategy: ShardingStrategy) -> None:
    """Every microbatch reduced: gradients add up in the sharded `.grad`, as FSDP2's do."""
    _assert_same_run(_train_ours(3, nullcontext, strategy), _train_fsdp2(3))


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(3)
def test_three_ranks_agree_with_ddp_to_rounding(strategy: ShardingStrategy) -> None:
    """The sum over three ranks may be taken in another order: within 1e-6 of DDP."""
    losses, [values] = _train_ours(1, strategy=strategy, recorded=(0,))
    expected_losses, [expected] = _train_ddp(1, (0,))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
@distributed(2)
def test_other_dtypes_are_bitwise_those_of_ddp(dtype: torch.dtype) -> None:
    """A unit's dtype is the user's; only sums of two numbers are taken, halved."""
    torch.manual_seed(0)
    layer = nn.Linear(7, 15, dtype=dtype)
    sharded = fully_shard(copy.deepcopy(layer))
    reference = DistributedDataParallel(layer)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 7, dtype=dtype)
    for module in (sharded, reference):
        module(x).abs().square().sum().backward()
    for param, expected in zip(sharded.parameters(), layer.parameters(), strict=True):
        assert_is_slice(param.grad, expected.grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(1)
def test_one_rank_trains_like_the_plain_module(strategy: ShardingStrategy) -> None:
    """With one rank nothing is gathered and the full parameter is the shard."""
    torch.manual_seed(0)
    plain = LanguageModel()
    history: list[list[Tensor]] = []
    losses = _train_microbatches(plain, lambda _: nullcontext(), 2, _record(history))
    _assert_same_run(_train_ours(2, strategy=strategy), (losses, history))
