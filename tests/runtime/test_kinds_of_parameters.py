"""Kinds of modules and parameters: recurrent, empty, complex, of several dtypes, sparse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import get_handles, no_sync
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    loss_of_shape,
    rank_input,
    shard_blocks,
    shard_children,
    shard_layers,
    shard_root,
    square_mean,
    train_by,
)
from tests.programs.modules import (
    ComplexLayers,
    OddParameters,
    OnlyEmpty,
    RecurrentHead,
    SparseEmbedding,
)


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@distributed(2)
def test_recurrent_modules(kind: type[nn.RNNBase], shard: Callable[..., None]) -> None:
    """Their second list of weights follows the registration."""
    twins = Twins(lambda: RecurrentHead(kind), shard)
    train_by(twins, lambda step: loss_of_shape(2, 6, 5, step=step))
    assert_at_rest(twins.sharded)
    assert all(
        weight is twins.sharded.rnn._parameters[name]
        for name, weight in zip(
            twins.sharded.rnn._flat_weights_names, twins.sharded.rnn._flat_weights, strict=True
        )
    )


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_odd_parameters(shard: Callable[..., None]) -> None:
    """Without dims, empty, not contiguous, channels-last."""
    twins = Twins(OddParameters, shard)
    assert twins.sharded.transposed.stride() == (1, 7)
    for name in ("strided", "expanded"):  # what has gaps becomes contiguous
        plain = getattr(twins.plain, name).detach()
        setattr(twins.plain, name, nn.Parameter(plain.clone(memory_format=torch.contiguous_format)))
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 15, step=step)))
        twins.zero_grad()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_unit_of_empty_parameters() -> None:
    """There is nothing to gather, and the gradients are empty."""
    twins = Twins(OnlyEmpty, shard_layers)
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2, on_device=True)
def test_complex_parameters(shard: Callable[..., None]) -> None:
    """They are gathered and reduced like real ones."""
    twins = Twins(ComplexLayers, shard)
    twins.step(loss_of_shape(4, 15))
    assert twins.sharded.linear.weight.grad.dtype == torch.complex64
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@distributed(2)
def test_dtypes(dtype: torch.dtype) -> None:
    """A unit gathers and reduces in its parameters' dtype."""
    twins = Twins(lambda: Net().to(dtype), shard_blocks)
    train_by(
        twins,
        lambda step: lambda model: square_mean(model(rank_input(4, 5, step=step, dtype=dtype))),
    )
    assert_at_rest(twins.sharded)


class _ThreeDtypes(nn.Module):
    """float32, float64 and bfloat16 in one unit, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(15, 15)
        self.fp64 = nn.Linear(15, 15, dtype=torch.float64)
        self.bf16 = nn.Linear(15, 15, dtype=torch.bfloat16)
        self.frozen = nn.Linear(15, 15).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fp32(x.float()))
        x = torch.tanh(self.fp64(x.double()))
        x = torch.tanh(self.bf16(x.bfloat16()))
        return torch.tanh(self.frozen(x.float()))


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_mixed_dtypes_in_one_unit(shard: Callable[..., None]) -> None:
    """One handle for each dtype and each kind of training."""
    twins = Twins(lambda: nn.Sequential(_ThreeDtypes(), _ThreeDtypes(), nn.Linear(15, 3)), shard)
    assert len(get_handles(twins.sharded)) == (4 if shard is shard_root else 9)
    for step in range(2):
        twins.step(loss_of_shape(4, 15, step=step))
        twins.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_sparse_gradients() -> None:
    """They become dense, and are averaged like any other, also inside no_sync."""
    twins = Twins(SparseEmbedding)
    tokens = torch.arange(4) + 3 * dist.get_rank()
    twins.step(lambda model: square_mean(model(tokens)))
    assert not twins.sharded.embedding.weight.grad.to_local().is_sparse
    twins.zero_grad()
    with no_sync(twins.sharded):
        square_mean(twins.sharded(tokens)).backward()
    square_mean(twins.sharded(tokens + 1)).backward()
    twins.backward(
        twins.plain, square_mean(twins.plain(tokens)) + square_mean(twins.plain(tokens + 1))
    )
    twins.assert_equal_gradients()
