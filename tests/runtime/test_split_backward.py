"""A backward in two parts, as pipelines without bubbles run it; outputs that may be detached."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from composable_shard import (
    ShardingStrategy,
    is_sharded,
    no_sync,
    reduce_pending_gradients,
    reshard,
    unshard,
)
from tests.harness.assertions import Planned
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import Layer, rank_input, shard_children, shard_root, square_mean


class _HandsOn(nn.Module):
    """Returns what a unit inside has returned, and an input, beside a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.scale = nn.Parameter(torch.ones(15))

    def forward(self, x: Tensor, scalar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = self.second(self.first(x * self.scale))
        return inner, torch.tanh(inner) * self.scale, scalar


@claims.variants
@distributed(2)
def test_c5_what_a_unit_hands_on_is_no_view(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Case 5: the output of an inner unit, or an input, is as detachable as in a plain module."""

    def program(model: nn.Module, number: int) -> None:
        x = rank_input(4, 15, step=number, dtype=torch.float64).requires_grad_()
        scalar = x.sum() * 2  # of no dimension
        kept = torch.tanh(scalar)
        inner, own, handed_on = model(x, scalar)
        assert handed_on is scalar
        # Saved before it was handed on, as input and as output: autograd finds nothing written.
        loss = square_mean(inner) + square_mean(own) + handed_on * scalar + kept
        loss.backward()
        for tensor in (inner, own, handed_on):
            tensor.detach_()
            assert not tensor.requires_grad

    claims.assert_right(
        _HandsOn,
        program,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


def _make_rows_to_one() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), nn.Linear(15, 1))


def _make_sharded_rows_to_one(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = _make_rows_to_one().double()
    shard_children(model, **options)
    return model


def _loss_of_rows(model: nn.Module, number: int) -> Tensor:
    return square_mean(model(rank_input(4, 15, step=number, dtype=torch.float64)))


@claims.variants
@distributed(2)
def test_c4_backward_to_chosen_parameters(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Case 4: after unshard the parameters of the module are those of the graph."""

    def program(model: nn.Module, number: int) -> None:
        if is_sharded(model):
            unshard(model, recurse=True)
        params = list(model.parameters())
        loss = _loss_of_rows(model, number)
        own = torch.autograd.grad(loss, params, retain_graph=True)  # of this rank
        expected = torch.autograd.grad(_loss_of_rows(model, number), params)
        for gradient, other in zip(own, expected, strict=True):
            claims.assert_close(gradient, other, "gradient")
        loss.backward(inputs=params[2:])
        if is_sharded(model):
            reshard(model, recurse=True)

    claims.assert_right(
        _make_rows_to_one,
        program,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@claims.strategies
@distributed(2)
def test_c4_sharded_parameters_are_in_no_graph(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 4: autograd says so, and so do we where torch asks us."""
    model = _make_sharded_rows_to_one(strategy=strategy, use_orig_params=use_orig_params)
    params = list(model.parameters())
    loss = _loss_of_rows(model, 0)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss, params)
    with pytest.raises(RuntimeError, match=r"sharded parameter '.*' was asked for.*unshard\("):
        get_gradient_edge(params[0])
    with pytest.raises(RuntimeError, match=r"sharded parameter '.*' was asked for.*unshard\("):
        stage_backward_input([loss], None, [rank_input(4, 15)], iter(params))
    loss.backward()


@claims.strategies
@distributed(2)
def test_c4_backward_to_sharded_parameters_is_warned_of(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 4: torch tells nobody of it, so the next forward does; not where no backward ran."""
    other = _make_sharded_rows_to_one(strategy=strategy, use_orig_params=use_orig_params)
    _loss_of_rows(other, 0).backward()
    model = _make_sharded_rows_to_one(strategy=strategy, use_orig_params=use_orig_params)
    _loss_of_rows(model, 0)
    _loss_of_rows(model, 1).backward()  # two forwards before a backward, as often
    _loss_of_rows(model, 2).backward()
    for number in range(4):
        loss = _loss_of_rows(model, number)
    loss.backward(inputs=list(model.parameters()))
    with pytest.warns(UserWarning, match=r"reached none of them.*unshard\(module\) before"):
        loss = _loss_of_rows(model, 3)
    loss.backward()
    for number in range(6):  # more forwards than ever, and another model's backward
        loss = _loss_of_rows(model, number)
        _loss_of_rows(other, number).backward()
    loss.backward()
    for number in range(7):
        loss = _loss_of_rows(model, number)
    loss.register_hook(_fail_before_any_unit)
    with pytest.raises(Planned):
        loss.backward()
    with pytest.warns(UserWarning, match=r"reached none of them.*If it raised an error, that is"):
        loss = _loss_of_rows(model, 0)
    loss.backward()


def _fail_before_any_unit(_: Tensor) -> None:
    raise Planned


@pytest.mark.parametrize("ends_with_whole", [True, False])
@claims.strategies
@distributed(2, on_device=True)
def test_c5_backward_of_inputs_and_then_of_weights(
    strategy: ShardingStrategy, use_orig_params: bool, ends_with_whole: bool
) -> None:
    """Case 5: as pipelines run it, of two microbatches in turns; reduced then, or when asked."""

    def program(model: nn.Module, number: int) -> None:
        if is_sharded(model):
            unshard(model, recurse=True)
        parts = []
        for index in range(2):
            x = rank_input(4, 15, step=3 * number + index, dtype=torch.float64).requires_grad_()
            loss = square_mean(model(x))
            parts.append(stage_backward_input([loss], None, [x], model.parameters())[1])
        for part in parts:
            stage_backward_weight(model.parameters(), part)
        if ends_with_whole:
            _loss_of_rows(model, 3 * number + 2).backward()
        if is_sharded(model):
            reshard(model, recurse=True)
            reduce_pending_gradients(model)

    claims.assert_right(
        _make_rows_to_one, program, strategy=strategy, use_orig_params=use_orig_params
    )


class _MayLeaveOut(nn.Module):
    """Of two layers, the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, uses_both: bool = True) -> Tensor:
        x = self.first(x)
        return self.second(x) if uses_both else x


@pytest.mark.parametrize("ends_with_whole", [True, False])
@claims.strategies
@distributed(2)
def test_c5_whole_and_split_backwards_add_up(
    strategy: ShardingStrategy, use_orig_params: bool, ends_with_whole: bool
) -> None:
    """Case 5: what a split backward sets is added to what whole ones have left, and reduced.

    Also where the backward that reduces does not reach the parameter.
    """

    def program(model: nn.Module, number: int) -> None:
        is_ours = is_sharded(model)
        x = rank_input(4, 15, step=number, dtype=torch.float64)
        with no_sync(model) if is_ours else nullcontext():
            square_mean(model(x)).backward()
            split = x.flip(0).requires_grad_()
            loss = square_mean(model(split))
            if is_ours:
                unshard(model, recurse=True)
            part = stage_backward_input([loss], None, [split], model.parameters())[1]
            stage_backward_weight(model.parameters(), part)
        if ends_with_whole:
            square_mean(model(2 * x, uses_both=False)).backward()
        if is_ours:
            reshard(model, recurse=True)
            if not ends_with_whole:
                reduce_pending_gradients(model)

    claims.assert_right(
        _MayLeaveOut,
        program,
        shard=shard_root,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(2)
def test_c4_calls_of_two_models_by_turns_are_not_warned_of() -> None:
    """Case 4: no backward has run between them, whatever each of them looks up."""
    models = [_make_sharded_rows_to_one() for _ in range(2)]
    losses = [_loss_of_rows(model, number) for number in range(3) for model in models]
    sum(losses).backward()  # type: ignore[union-attr] # not empty
