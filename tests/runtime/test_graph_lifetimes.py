"""Graphs that outlive a forward or a backward: create_graph, and what is done before they run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_shard import ShardingStrategy, fully_shard, get_handles, reshard
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import Layer, Optional, rank_input, shard_children, square_mean

ROWS = (4, 15)


def _make_layers() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), nn.Sequential(nn.Tanh(), nn.Linear(15, 1)))


def _make_sharded_layers(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = _make_layers().double()
    shard_children(model, **options)
    return model


def _rows(number: int) -> Tensor:
    return rank_input(*ROWS, step=number, dtype=torch.float64)


def _input_gradient(model: nn.Module, number: int) -> Tensor:
    """Return the gradient of a forward by its input, as part of a graph."""
    x = _rows(number).requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def _are_full_values_held(model: nn.Module) -> bool:
    return any(handle.full.has_values for handle in get_handles(model))


def _collocation(model: nn.Module, number: int) -> None:
    """Differentiate twice by the input, and go forward elsewhere, with and without grad."""
    x = _rows(number).requires_grad_()
    value = model(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    with torch.no_grad():
        weight = model(_rows(number + 100)).abs()
    boundary = model(_rows(number + 200))
    loss = square_mean(curvature.sum(1, keepdim=True) * weight - value) + square_mean(boundary)
    loss.backward()


def _penalty_first(model: nn.Module, number: int) -> None:
    """Compute a gradient penalty before the forwards that it is added to."""
    penalty = (_input_gradient(model, number).norm(dim=1) - 1).square().mean()
    loss = model(_rows(number + 100)).mean() - model(_rows(number + 200)).square().mean()
    (loss + penalty).backward()


def _two_batches(model: nn.Module, number: int) -> None:
    """Take the gradients of two batches before either goes backward, in the order of the first."""
    gradients = [_input_gradient(model, number + 100 * index) for index in range(2)]
    for gradient in gradients:
        square_mean(gradient).backward()


def _discriminate(model: nn.Module, number: int) -> None:
    """Score real and generated rows, then penalize the gradient by the real ones (R1)."""
    real = _rows(number).requires_grad_()
    score = model(real)
    other = model(_rows(number + 100))
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    (square_mean(score - 1) + square_mean(other) + square_mean(slope)).backward()


@pytest.mark.parametrize("program", [_collocation, _penalty_first, _two_batches, _discriminate])
@claims.variants
@distributed(2, on_device=True)
def test_c3_forwards_between_a_gradient_and_its_backward(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool, program: claims.Program
) -> None:
    """Case 3: a graph made by create_graph reads full values as long as it lives."""
    claims.assert_right(
        _make_layers,
        program,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


def _leave_one_for_later(model: nn.Module, number: int) -> None:
    """The first backward gathers the second layer ahead, and does not run it."""
    value = model[0](_rows(number))
    later = model[0](model[1](value))
    square_mean(value).backward(retain_graph=True)
    square_mean(later).backward()


@pytest.mark.parametrize("granularity", ["element", "param"])
@distributed(2, on_device=True)
def test_c3_a_retained_graph_reads_what_was_gathered_ahead(granularity: str) -> None:
    """Case 3: whole parameters count as written when a backward ends, though none was."""
    claims.assert_right(
        _make_layers,
        _leave_one_for_later,
        shard=lambda model, **options: [fully_shard(layer, **options) for layer in model],
        granularity=granularity,
    )


def _train_on_value_and_slope(model: nn.Module, number: int) -> None:
    x = _rows(number).requires_grad_()
    value = model(x)
    (slope,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    (square_mean(slope) + square_mean(value)).backward()


class _CheckpointInside(nn.Module):
    """Runs its layer again in the backward, but not its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return output


@claims.strategies
@distributed(2)
def test_c3_graph_of_a_checkpoint_inside_a_unit(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 3: the graph of a gradient reads the views that a checkpoint has saved again."""
    claims.assert_right(
        lambda: nn.Sequential(_CheckpointInside(), _CheckpointInside(), nn.Linear(15, 1)),
        _train_on_value_and_slope,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize("end", ["step", "reshard"])
@claims.strategies
@distributed(2)
def test_c3_a_graph_that_has_ended_is_refused(
    strategy: ShardingStrategy, use_orig_params: bool, end: str
) -> None:
    """Case 3: after a step or a reshard autograd raises, on every rank, and gives no numbers."""
    model = _make_sharded_layers(strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = _input_gradient(model, 0)
    if end == "step":
        model(_rows(1)).sum().backward()
        optimizer.step()
    else:
        reshard(model, recurse=True)
    for is_gathered_again in (False, True):
        if is_gathered_again:
            model(_rows(2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|written between"):
            square_mean(gradient).backward(retain_graph=True)


@distributed(2)
def test_c3_values_stay_until_the_weights_are_written() -> None:
    """Case 3: what a graph may read; and after a reshard they are freed, too."""
    model = _make_sharded_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for end in (optimizer.step, lambda: reshard(model, recurse=True)):
        loss = square_mean(_input_gradient(model, 0))
        with torch.no_grad():
            model(_rows(4))
        assert _are_full_values_held(model)
        loss.backward()
        assert _are_full_values_held(model)
        end()
        assert not _are_full_values_held(model)


@pytest.mark.parametrize("reshard_after_forward", [None, True, False, 2])
@distributed(2)
def test_c3_a_graph_reads_other_parameters_on_each_rank(
    reshard_after_forward: bool | int | None,
) -> None:
    """All ranks issue the same gathers, whichever full values a rank's graphs still read."""

    def program(model: nn.Module, number: int) -> None:
        used = [[0, 1, 2], [0], [2, 1]][(number + dist.get_rank()) % 3]
        x = rank_input(4, 5, step=number, dtype=torch.float64).requires_grad_()
        loss = square_mean(model(x, used))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with torch.no_grad():
            model(x, used)
        (loss + square_mean(slope) + square_mean(model(x.detach(), used))).backward()

    claims.assert_right(
        Optional,
        program,
        shard=fully_shard,
        bucket_cap_mb=64 / (1 << 20),
        reshard_after_forward=reshard_after_forward,
    )


@claims.strategies
@distributed(2)
def test_c3_evaluation_in_inference_mode_ends_a_graph(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C3: an evaluation asks which graphs still read full values, also in inference mode."""

    def program(model: nn.Module, number: int) -> None:
        loss = _input_gradient(model, number).square().sum()
        with torch.inference_mode():
            model(_rows(number + 100))
        (model(_rows(number)).square().mean() + loss).backward()

    claims.assert_right(_make_layers, program, strategy=strategy, use_orig_params=use_orig_params)


class _LongChain(nn.Module):
    """A chain of more operations than a stack has room for calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for _ in range(30_000):
            x = x + weight
        return x


@distributed(1)
def test_graphs_of_any_depth_are_freed() -> None:
    """Torch frees what Python has seen of a graph by calls in calls."""
    model = nn.Sequential(fully_shard(_LongChain()), fully_shard(_LongChain()))
    model(torch.ones(2)).sum().backward()
    for unit in model:
        assert unit.weight.grad.full_tensor().tolist() == [30_000, 30_000]
