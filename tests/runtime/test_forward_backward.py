"""Forwards and backwards in any order give unsharded gradients and leave a model at rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import fully_shard, get_handles, get_states, reshard, unshard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Twins,
    assert_at_rest,
    loss_of_shape,
    num_gathers_and_reductions,
    rank_input,
    shard_blocks,
    square_mean,
    train_by,
)
from tests.programs.modules import (
    ChainOfBlocks,
    OptionalStack,
    RepeatedBlock,
    Sandwich,
    shard_linears,
)


@pytest.mark.fast
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_several_forwards_before_one_backward(reshard_after_forward: bool | None) -> None:
    """The gradients of all forwards arrive together."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        inputs = [rank_input(4, 5, step=10 * step + i) for i in range(3)]
        twins.step(lambda model, inputs=inputs: sum(square_mean(model(x)) for x in inputs))
        twins.zero_grad()
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2)
def test_forwards_with_a_backward_each_afterwards(reshard_after_forward: bool | None) -> None:
    """Backwards may come in any order after all forwards."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    for order in ((0, 1, 2), (2, 1, 0)):
        for model in twins:
            losses = [square_mean(model(rank_input(4, 5, step=i))) for i in range(3)]
            for index in order:
                twins.backward(model, losses[index])
        twins.assert_equal_gradients()
        twins.zero_grad()
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@pytest.mark.parametrize("make", [RepeatedBlock, Sandwich])
@distributed(2)
def test_forwards_with_a_backward_each_of_a_module_called_twice(
    make: Callable[[], nn.Module],
) -> None:
    """A second use that an earlier backward did not reach is waited for."""
    twins = Twins(make)
    for model in twins:
        losses = [square_mean(model(rank_input(4, 15, step=i))) for i in range(3)]
        for index in (1, 0, 2):
            twins.backward(model, losses[index])
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_backwards_in_turn_with_a_parameter_used_on_one_rank_only() -> None:
    """Reductions keep one order on all ranks though no forward came just before."""
    twins = Twins(OptionalStack, shard_blocks)
    is_first = dist.get_rank() == 0
    for model in twins:
        losses = [
            square_mean(model(rank_input(4, 5, step=i), (is_first, not is_first, i == 1)))
            for i in range(2)
        ]
        for loss in losses:
            twins.backward(model, loss)
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


def _shard_units(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            fully_shard(module)
    fully_shard(model)


@pytest.mark.fast
@pytest.mark.parametrize("make", [ChainOfBlocks, Sandwich, RepeatedBlock])
@distributed(2, on_device=True)
def test_backward_twice_over_one_graph(make: Callable[[], nn.Module]) -> None:
    """With retain_graph=True the second backward gathers again and adds the same gradients."""
    twins = Twins(make, _shard_units)
    for model in twins:
        loss = square_mean(model(rank_input(4, 15)))
        twins.backward(model, loss, retain_graph=True)
        twins.backward(model, loss)
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_two_losses_of_one_forward() -> None:
    """Each loss has its own backward; the first one keeps what both need."""
    twins = Twins(Net, shard_blocks)
    for model in twins:
        output = model(rank_input(4, 5))
        twins.backward(model, output[:, 0].square().sum(), retain_graph=True)
        twins.backward(model, output[:, 1:].tanh().sum())
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


class _TwoHeads(nn.Module):
    """Two heads over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Layer(), Layer())
        self.left = nn.Linear(15, 3)
        self.right = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


@distributed(2)
def test_two_losses_that_reach_different_units() -> None:
    """A unit that a backward does not reach gets no gradient from it."""
    twins = Twins(_TwoHeads)
    for model in twins:
        left, right = model(rank_input(4, 15))
        twins.backward(model, square_mean(left), retain_graph=True)
    twins.assert_equal_gradients()
    assert twins.sharded.right.weight.grad is None
    for model in twins:
        left, right = model(rank_input(4, 15))
        twins.backward(model, square_mean(left), retain_graph=True)
        twins.backward(model, square_mean(right))
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_forward_without_a_backward() -> None:
    """Outputs that are thrown away, or kept, disturb no later step."""
    twins = Twins(Net, shard_blocks)
    kept = [model(rank_input(4, 5, step=7)) for model in twins]
    twins.sharded(rank_input(4, 5, step=8))
    train_by(twins, lambda step: loss_of_shape(4, 5, step=step))
    assert_equal(kept[1], kept[0])
    assert_at_rest(twins.sharded)


@distributed(2)
def test_inner_modules_called_first() -> None:
    """A direct call of an inner unit changes nothing for later calls of the root."""
    twins = Twins(Net, shard_blocks)
    twins.step(lambda model: square_mean(model.blocks[1](rank_input(4, 15))))
    twins.zero_grad()
    twins.step(lambda model: square_mean(model.blocks[2](model.blocks[0](rank_input(4, 15)))))
    twins.zero_grad()
    assert_at_rest(twins.sharded)
    train_by(twins, lambda step: loss_of_shape(4, 5, step=step))
    assert_at_rest(twins.sharded)


@distributed(2)
def test_inner_output_and_root_output_in_one_loss() -> None:
    """A unit may run under the root and by itself before one backward."""
    twins = Twins(Net, shard_blocks)

    def run(model: nn.Module) -> Tensor:
        hidden = model.blocks[1](rank_input(4, 15))
        return square_mean(model(rank_input(4, 5))) + square_mean(model.blocks[0](hidden))

    for _ in range(2):
        twins.step(run)
        twins.zero_grad()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_root_without_parameters_of_its_own() -> None:
    """It leads the call and holds nothing."""
    twins = Twins(
        lambda: nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3)), shard_linears
    )
    assert get_states(twins.sharded)[0].handles == []
    train_by(twins, lambda step: loss_of_shape(4, 7, step=step))
    assert_at_rest(twins.sharded)


def _shard_blocks_only(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)


@distributed(2)
def test_blocks_sharded_without_their_root() -> None:
    """Each block is a tree of its own."""
    twins = Twins(ChainOfBlocks, _shard_blocks_only)
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


@distributed(2)
def test_inputs_may_need_gradients() -> None:
    """Input gradients are right, and the units inside still free their parameters."""
    twins = Twins(Net, shard_blocks)
    inputs = [rank_input(4, 5).requires_grad_() for _ in range(2)]
    for model, x in zip(twins, inputs, strict=True):
        twins.backward(model, square_mean(model(x)))
    assert_equal(inputs[1].grad, inputs[0].grad)
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_ranks_with_different_sequence_lengths() -> None:
    """Collectives carry parameters, whose sizes do not depend on the data."""
    twins = Twins(Net, shard_blocks)
    length = 3 + 4 * dist.get_rank()
    train_by(twins, lambda step: loss_of_shape(2, length, 5, step=step))
    assert_at_rest(twins.sharded)


@distributed(2)
def test_only_no_grad_forwards() -> None:
    """Values are right and nothing is left behind."""
    twins = Twins(Net, shard_blocks)
    with torch.no_grad():
        for step in range(3):
            outputs = [model(rank_input(4, 5, step=step)) for model in twins]
            assert_equal(outputs[1], outputs[0])
            assert_at_rest(twins.sharded)
    assert get_states(twins.sharded)[0].context.graphs.armed == {}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_inference_mode(is_first: bool, reshard_after_forward: bool | None) -> None:
    """Between training steps, and as the very first call."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    if not is_first:
        twins.step(loss_of_shape(4, 5))
        twins.zero_grad()
    with torch.inference_mode():
        outputs = [model(rank_input(4, 5)) for model in twins]
        assert_equal(outputs[1], outputs[0])
    train_by(twins, lambda step: loss_of_shape(4, 5, step=step))
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2)
def test_evaluation_between_steps_uses_new_weights(reshard_after_forward: bool | None) -> None:
    """A kept buffer is filled anew after a fused optimizer step, which bumps no version."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    _, optimizer = twins.optimizers(fused=True)
    for step in range(3):
        with torch.no_grad():
            outputs = [model(rank_input(4, 5, step=step)) for model in twins]
            assert_equal(outputs[1], outputs[0], "evaluation")
        twins.step(loss_of_shape(4, 5, step=step))
        with torch.no_grad():
            outputs = [model(rank_input(4, 5, step=step)) for model in twins]
            assert_equal(outputs[1], outputs[0], "evaluation before the step")
        optimizer.step()
        twins.zero_grad()
        with torch.no_grad():
            # The fused kernel rounds a slice's tail in another way than a whole tensor's.
            for plain, sharded in zip(*(model.parameters() for model in twins), strict=True):
                plain.copy_(sharded.full_tensor())


@pytest.mark.parametrize(
    ("reshard_after_forward", "num_gathers"), [(True, 8), (None, 7), (False, 4)]
)
@distributed(2)
def test_collectives_of_a_step(reshard_after_forward: bool | None, num_gathers: int) -> None:
    """N units: 2N gathers, 2N-1 where the root is kept, N where all are; N reductions."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    (optimizer,) = twins.optimizers(fused=True)[1:]
    twins.sharded(rank_input(4, 5)).sum().backward()  # the first forward compares the ranks
    for step in range(2):
        optimizer.step()
        counts = num_gathers_and_reductions(
            twins.sharded,
            lambda model, step=step: loss_of_shape(4, 5, step=step)(model).backward(),
        )
        assert counts == (num_gathers, 4)


@pytest.mark.parametrize(
    ("reshard_after_forward", "expected"), [(True, (4, 4)), (None, (4, 4)), (False, (4, 0))]
)
@distributed(2)
def test_collectives_of_evaluation(
    reshard_after_forward: bool | None, expected: tuple[int, int]
) -> None:
    """What is kept needs no second gather as long as no parameter is written."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    model = twins.sharded
    (optimizer,) = twins.optimizers(fused=True)[1:]
    model(rank_input(4, 5)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        counts = [
            num_gathers_and_reductions(model, lambda model: model(rank_input(4, 5)))[0]
            for _ in range(2)
        ]
    assert tuple(counts) == expected
    assert not any(handle.shown.is_unsharded for handle in get_handles(model))


@distributed(2, on_device=True)
def test_unshard_by_hand_spares_the_gathers() -> None:
    """A step between unshard and reshard gathers nothing and gives the same gradients."""
    twins = Twins(Net, shard_blocks)
    twins.step(loss_of_shape(4, 5))
    twins.zero_grad()
    unshard(twins.sharded, recurse=True)
    counts = num_gathers_and_reductions(
        twins.sharded, lambda model: twins.backward(model, loss_of_shape(4, 5)(model))
    )
    reshard(twins.sharded, recurse=True)
    assert counts == (0, 4)
    twins.backward(twins.plain, loss_of_shape(4, 5)(twins.plain))
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)
