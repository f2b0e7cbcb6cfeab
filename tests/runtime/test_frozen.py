"""Frozen parameters, units and models, and what is frozen or trained later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from composable_shard import get_handles
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    loss_of_shape,
    rank_input,
    shard_blocks,
    shard_children,
    shard_root,
    square_mean,
)
from tests.programs.modules import make_partly_frozen, make_with_frozen_unit


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_partly_frozen_units(shard: Callable[..., None], needs_grad: bool) -> None:
    """Frozen weights stay until the gradients of the inputs are there."""
    twins = Twins(make_partly_frozen, shard)
    inputs = [rank_input(4, 15).requires_grad_(needs_grad) for _ in twins]
    for step in range(3):
        with count_collectives() as counts:
            for model, x in zip(twins, inputs, strict=True):
                twins.backward(model, square_mean(model(x)))
        twins.assert_equal_gradients()
        if needs_grad:
            assert_equal(inputs[1].grad, inputs[0].grad, f"input gradient in step {step}")
        twins.zero_grad()
    num_units = 1 if shard is shard_root else 3
    assert counts.count("reduce_scatter") == num_units
    assert_at_rest(twins.sharded)


@distributed(2)
def test_partly_frozen_units_with_backwards_afterwards() -> None:
    """A second backward needs the frozen weights as late as the first."""
    twins = Twins(make_partly_frozen)
    for model in twins:
        losses = [square_mean(model(rank_input(4, 15, step=i))) for i in range(2)]
        twins.backward(model, losses[0], retain_graph=True)
        twins.backward(model, losses[1])
        twins.backward(model, losses[0])
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_frozen_unit() -> None:
    """It is gathered for both passes, reduces nothing and allocates no gradient memory."""
    twins = Twins(make_with_frozen_unit, shard_blocks)
    for step in range(2):
        with count_collectives() as counts:
            twins.step(loss_of_shape(4, 5, step=step))
        twins.zero_grad()
    assert counts.count("reduce_scatter") == 3
    (handle,) = get_handles(twins.sharded.blocks[1])
    assert handle.grads._memory.buffer.numel() == 0
    assert_at_rest(twins.sharded)


@distributed(2)
def test_frozen_model_gives_input_gradients() -> None:
    """Nothing is reduced, and the units free their parameters."""
    twins = Twins(lambda: Net().requires_grad_(False), shard_blocks)
    inputs = [rank_input(4, 5).requires_grad_() for _ in twins]
    with count_collectives() as counts:
        for model, x in zip(twins, inputs, strict=True):
            square_mean(model(x)).backward()
    assert_equal(inputs[1].grad, inputs[0].grad)
    assert counts.count("reduce_scatter") == 0
    assert_at_rest(twins.sharded)


@distributed(2)
def test_freezing_after_sharding() -> None:
    """`requires_grad_(False)` on a sharded parameter, as for the other half of a GAN's step."""
    twins = Twins(Net, shard_blocks)
    for is_trainable in (True, False, True):
        for model in twins:
            model.blocks[1].requires_grad_(is_trainable)
        twins.step(loss_of_shape(4, 5))
        assert (twins.sharded.blocks[1].up.weight.grad is None) is not is_trainable
        twins.zero_grad()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_unfreezing_after_sharding() -> None:
    """`requires_grad_(True)` on a parameter that was sharded frozen trains it from then on."""
    twins = Twins(make_with_frozen_unit, shard_blocks)
    twins.step(loss_of_shape(4, 5))
    for model in twins:
        model.zero_grad()
        model.blocks[1].requires_grad_()
    twins.step(loss_of_shape(4, 5))
    assert twins.sharded.blocks[1].up.weight.grad is not None
    assert_at_rest(twins.sharded)
