"""Every way to run forward and backward gives unsharded gradients and leaves a model at rest."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable_shard import (
    FlatShard,
    fully_shard,
    get_handles,
    get_states,
    no_sync,
    reshard,
    set_requires_gradient_sync,
    unshard,
)
from composable_shard.comm.trace import count_collectives, trace_events
from composable_shard.tensor import reduced_gradient
from tests.harness.helpers import assert_equal, distributed
from tests.harness.pairs import pairwise
from tests.programs.models import (
    CheckpointsBlocks,
    Layer,
    Net,
    Optional,
    Twins,
    assert_at_rest,
    assert_is_slice,
    average_gradients,
    rank_input,
    shard_blocks,
    shard_children,
    shard_layers,
    shard_root,
    square_mean,
)


def _loss_of_shape(*shape: int, step: int = 0) -> Callable[[nn.Module], Tensor]:
    x = rank_input(*shape, step=step)
    return lambda model: square_mean(model(x))


def _zero_grad(twins: Twins) -> None:
    for model in twins:
        model.zero_grad()


def _train_by(
    twins: Twins, run: Callable[[int], Callable[[nn.Module], Any]], steps: int = 2
) -> None:
    """Take optimizer steps with both twins, comparing as it goes."""
    optimizers = twins.optimizers()
    for step in range(steps):
        twins.step(run(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


# --- how often a module runs ---


@distributed(2, 3, on_device=True)
def test_training_equals_the_unsharded_model() -> None:
    """Losses, gradients and parameters agree over steps."""
    twins = Twins(Net, shard_blocks)
    _train_by(twins, lambda step: _loss_of_shape(4, 5, step=step), steps=3)
    assert_at_rest(twins.sharded)


class _RepeatedBlock(nn.Module):
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


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_module_called_twice(reshard_after_forward: bool | None) -> None:
    """The gradients of both calls are added and reduced once."""
    twins = Twins(_RepeatedBlock, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        with count_collectives() as counts:
            twins.step(_loss_of_shape(4, 15, step=step))
        _zero_grad(twins)
    assert counts.count("reduce_scatter") == 2  # the root has no parameters left
    assert_at_rest(twins.sharded)


@distributed(2)
def test_module_called_twice_with_others_between() -> None:
    """A unit that runs first and last is reduced when its first use has passed."""

    twins = Twins(lambda: _Sandwich(), shard_children)
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Blocks(nn.Module):
    """Blocks, and a parameterless rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class _Sandwich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Layer()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.outer(x)))


class _Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, depth - 1) if depth else x


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_module_that_calls_itself(shard: Callable[..., None]) -> None:
    """Inner calls neither gather again nor free what the outer one needs."""
    twins = Twins(_Recursive, shard)
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Choosing(nn.Module):
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


def _shard_units(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            fully_shard(module)
    fully_shard(model)


def _shard_linears(model: nn.Module, **options: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(model, **options)


@distributed(2)
def test_unit_that_is_not_called_gets_no_gradient() -> None:
    """Its parameters keep None on all ranks, whatever ran in the step before."""
    twins = Twins(_Choosing, _shard_linears)
    x = rank_input(4, 15)
    for used in ((0, 1, 2), (0, 2), (1,), (), (2, 1, 0)):
        twins.step(lambda model, used=used: square_mean(model(x, used)))
        not_used = {0, 1, 2} - set(used)
        assert all(twins.sharded.layers[i].weight.grad is None for i in not_used)
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


class _Optional(nn.Module):
    """A unit in which one layer is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(15, 15)
        self.optional = nn.Linear(15, 15)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        if is_used:
            x = torch.tanh(self.optional(x))
        return torch.tanh(self.always(x))


class _OptionalLast(_Optional):
    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return torch.tanh(self.optional(x)) if is_used else x


class _OptionalStack(nn.Module):
    """Units with an optional layer each; all other parameters are used in every step."""

    def __init__(self, kind: type[_Optional] = _Optional, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 15)
        self.blocks = nn.ModuleList(kind() for _ in range(num_blocks))
        self.out = nn.Linear(15, 3)

    def forward(self, x: Tensor, used: tuple[bool, ...]) -> Tensor:
        x = self.inp(x)
        for block, is_used in zip(self.blocks, used, strict=True):
            x = block(x, is_used)
        return self.out(x)


def _make_last_stack() -> nn.Module:
    return _OptionalStack(_OptionalLast)


_ALL, _NONE = (True, True, True), (False, False, False)


@pytest.mark.parametrize("make", [_OptionalStack, _make_last_stack])
@distributed(2)
def test_parameter_unused_on_all_ranks_gets_no_gradient(make: Callable[[], nn.Module]) -> None:
    """Inside a used unit it keeps None, not zeros; it gets one when it is used again."""
    twins = Twins(make, shard_blocks)
    patterns = (_ALL, _NONE, _NONE, (False, True, False), _ALL, (True, False, True))
    for step, used in enumerate(patterns):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: square_mean(model(x, used)))
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize(
    *pairwise(
        make=[_OptionalStack, _make_last_stack],
        reshard_after_forward=[None, False],
        world_size=(2, 3),
    )
)
@distributed(on_device=True)
def test_parameter_used_on_one_rank_only(
    make: Callable[[], nn.Module], reshard_after_forward: bool | None
) -> None:
    """The other ranks contribute zeros and nobody hangs, in changing patterns."""
    twins = Twins(make, shard_blocks, reshard_after_forward=reshard_after_forward)
    is_first = dist.get_rank() == 0
    mixed = (is_first, not is_first, is_first)
    optimizers = twins.optimizers(torch.optim.SGD)
    for step, used in enumerate((mixed, _NONE, mixed, _ALL, (not is_first,) * 3, mixed)):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: square_mean(model(x, used)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_unused_parameters_equal_ddp() -> None:
    """Gradients are those of DistributedDataParallel(find_unused_parameters=True)."""
    plain = _OptionalStack()
    model = copy.deepcopy(plain)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    shard_blocks(model)
    is_first = dist.get_rank() == 0
    for step, used in enumerate((_ALL, (is_first, False, not is_first), _ALL)):
        x = rank_input(4, 5, step=step)
        losses = [square_mean(net(x, used)) for net in (ddp, model)]
        for loss in losses:
            loss.backward()
        assert_equal(losses[1], losses[0])
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert (param.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                assert_is_slice(param.grad, expected.grad, name)
        plain.zero_grad()
        model.zero_grad()


class _Detached(nn.Module):
    """Uses a weight without its gradient too, before the place that makes the gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        weight = weight.detach() if self.kind == "detach" else weight.data
        x = torch.tanh(nn.functional.linear(x, weight))
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("kind", ["detach", "data"])
@distributed(2)
def test_weight_that_is_needed_after_its_gradient(kind: str) -> None:
    """The last gradient of a unit need not be the last use of its values."""
    twins = Twins(lambda: nn.Sequential(*(_Detached(kind) for _ in range(3))))
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


# --- forwards and backwards that do not alternate ---


@pytest.mark.fast
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_several_forwards_before_one_backward(reshard_after_forward: bool | None) -> None:
    """The gradients of all forwards arrive together."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        inputs = [rank_input(4, 5, step=10 * step + i) for i in range(3)]
        twins.step(lambda model, inputs=inputs: sum(square_mean(model(x)) for x in inputs))
        _zero_grad(twins)
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
        _zero_grad(twins)
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@pytest.mark.parametrize("make", [_RepeatedBlock, _Sandwich])
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
    twins = Twins(_OptionalStack, shard_blocks)
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


@pytest.mark.fast
@pytest.mark.parametrize("make", [_Blocks, _Sandwich, _RepeatedBlock])
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
    _train_by(twins, lambda step: _loss_of_shape(4, 5, step=step))
    assert_equal(kept[1], kept[0])
    assert_at_rest(twins.sharded)


@distributed(2)
def test_inner_modules_called_first() -> None:
    """A direct call of an inner unit changes nothing for later calls of the root."""
    twins = Twins(Net, shard_blocks)
    twins.step(lambda model: square_mean(model.blocks[1](rank_input(4, 15))))
    _zero_grad(twins)
    twins.step(lambda model: square_mean(model.blocks[2](model.blocks[0](rank_input(4, 15)))))
    _zero_grad(twins)
    assert_at_rest(twins.sharded)
    _train_by(twins, lambda step: _loss_of_shape(4, 5, step=step))
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
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


@distributed(2)
def test_root_without_parameters_of_its_own() -> None:
    """It leads the call and holds nothing."""
    twins = Twins(
        lambda: nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3)), _shard_linears
    )
    assert get_states(twins.sharded)[0].handles == []
    _train_by(twins, lambda step: _loss_of_shape(4, 7, step=step))
    assert_at_rest(twins.sharded)


def _shard_blocks_only(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)


@distributed(2)
def test_blocks_sharded_without_their_root() -> None:
    """Each block is a tree of its own."""
    twins = Twins(_Blocks, _shard_blocks_only)
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
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
    _train_by(twins, lambda step: _loss_of_shape(2, length, 5, step=step))
    assert_at_rest(twins.sharded)


# --- without gradients ---


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
        twins.step(_loss_of_shape(4, 5))
        _zero_grad(twins)
    with torch.inference_mode():
        outputs = [model(rank_input(4, 5)) for model in twins]
        assert_equal(outputs[1], outputs[0])
    _train_by(twins, lambda step: _loss_of_shape(4, 5, step=step))
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
        twins.step(_loss_of_shape(4, 5, step=step))
        with torch.no_grad():
            outputs = [model(rank_input(4, 5, step=step)) for model in twins]
            assert_equal(outputs[1], outputs[0], "evaluation before the step")
        optimizer.step()
        _zero_grad(twins)
        with torch.no_grad():
            # The fused kernel rounds a slice's tail in another way than a whole tensor's.
            for plain, sharded in zip(*(model.parameters() for model in twins), strict=True):
                plain.copy_(sharded.full_tensor())


# --- what is gathered when ---


def _num_gathers_and_reductions(
    model: nn.Module, run: Callable[[nn.Module], Any]
) -> tuple[int, int]:
    with count_collectives() as counts:
        run(model)
    return counts.count("all_gather"), counts.count("reduce_scatter")


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
        counts = _num_gathers_and_reductions(
            twins.sharded,
            lambda model, step=step: _loss_of_shape(4, 5, step=step)(model).backward(),
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
            _num_gathers_and_reductions(model, lambda model: model(rank_input(4, 5)))[0]
            for _ in range(2)
        ]
    assert tuple(counts) == expected
    assert not any(handle.shown.is_unsharded for handle in get_handles(model))


@distributed(2, on_device=True)
def test_unshard_by_hand_spares_the_gathers() -> None:
    """A step between unshard and reshard gathers nothing and gives the same gradients."""
    twins = Twins(Net, shard_blocks)
    twins.step(_loss_of_shape(4, 5))
    _zero_grad(twins)
    unshard(twins.sharded, recurse=True)
    counts = _num_gathers_and_reductions(
        twins.sharded, lambda model: twins.backward(model, _loss_of_shape(4, 5)(model))
    )
    reshard(twins.sharded, recurse=True)
    assert counts == (0, 4)
    twins.backward(twins.plain, _loss_of_shape(4, 5)(twins.plain))
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


# --- accumulation ---


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2)
def test_accumulation_without_no_sync(reshard_after_forward: bool | None) -> None:
    """Every backward reduces and adds to the sharded gradients."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    for step in range(3):
        twins.step(_loss_of_shape(4, 5, step=step))
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@pytest.mark.parametrize("uses_setter", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2)
def test_accumulation_with_no_sync_equals_ddp(
    uses_setter: bool, reshard_after_forward: bool | None
) -> None:
    """Gradients stay local until the last microbatch; nothing is reduced before."""
    plain = Net()
    model = copy.deepcopy(plain)
    ddp = DistributedDataParallel(plain)
    shard_blocks(model, reshard_after_forward=reshard_after_forward)
    model(rank_input(4, 5))
    for _ in range(2):
        for micro in range(3):
            run = _loss_of_shape(4, 5, step=micro)
            if micro == 2:
                if uses_setter:
                    set_requires_gradient_sync(model, True)
                run(ddp).backward()
                assert (
                    _num_gathers_and_reductions(
                        model, lambda model, run=run: run(model).backward()
                    )[1]
                    == 4
                )
            elif uses_setter:
                set_requires_gradient_sync(model, False)
                with ddp.no_sync():
                    run(ddp).backward()
                assert (
                    _num_gathers_and_reductions(
                        model, lambda model, run=run: run(model).backward()
                    )[1]
                    == 0
                )
            else:
                with ddp.no_sync(), no_sync(model):
                    run(ddp).backward()
                    assert (
                        _num_gathers_and_reductions(
                            model, lambda model, run=run: run(model).backward()
                        )[1]
                        == 0
                    )
        _assert_equal_gradients(model, plain)
        plain.zero_grad()
        model.zero_grad()
    assert_at_rest(model, kept=(model,) if reshard_after_forward is False else ())


def _assert_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert_is_slice(param.grad, expected.grad, name)


@distributed(2)
def test_no_sync_leaves_no_gradient_on_the_shards() -> None:
    """The reduced part of `.grad` is as before; the modules are at rest but for what waits."""
    twins = Twins(Net, shard_blocks)
    twins.step(_loss_of_shape(4, 5))
    before = [param.grad for param in twins.sharded.parameters()]
    with no_sync(twins.sharded):
        _loss_of_shape(4, 5, step=1)(twins.sharded).backward()
    reduced = map(reduced_gradient, twins.sharded.parameters())
    assert all(found is grad for found, grad in zip(reduced, before, strict=True))
    assert all(isinstance(param, FlatShard) for param in twins.sharded.parameters())
    assert not any(handle.full.has_values for handle in get_handles(twins.sharded))


@distributed(2)
def test_no_sync_restores_the_flags_after_an_exception() -> None:
    """S2.14: each unit gets its own earlier setting back."""
    twins = Twins(Net, shard_blocks)
    model = twins.sharded
    set_requires_gradient_sync(model.blocks[1], False)
    before = [state.settings.requires_gradient_sync for state in get_states(model)]

    def fail() -> None:
        with no_sync(model):
            assert not any(state.settings.requires_gradient_sync for state in get_states(model))
            raise KeyError("user")

    with pytest.raises(KeyError):
        fail()
    assert [state.settings.requires_gradient_sync for state in get_states(model)] == before
    assert before == [True, True, False, True]


@distributed(2)
def test_unit_used_only_inside_no_sync_is_reduced_by_the_next_backward() -> None:
    """As in DistributedDataParallel, the reduction does not depend on the last microbatch."""
    plain = _Choosing()
    model = copy.deepcopy(plain)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    _shard_linears(model)
    for used, is_last in (((0, 1), False), ((1,), True)):
        x = rank_input(4, 15)
        if is_last:
            square_mean(ddp(x, used)).backward()
            square_mean(model(x, used)).backward()
        else:
            with ddp.no_sync(), no_sync(model):
                square_mean(ddp(x, used)).backward()
                square_mean(model(x, used)).backward()
    _assert_equal_gradients(model, plain)
    assert_at_rest(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2)
def test_zero_grad(set_to_none: bool) -> None:
    """Gradients start from None or from zeros; a parameter without gradient keeps either."""
    twins = Twins(_OptionalStack, shard_blocks)
    optimizers = twins.optimizers()
    for step, used in enumerate((_ALL, _NONE, _ALL)):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: square_mean(model(x, used)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    twins.assert_equal_gradients()
    twins.assert_equal_parameters()
    assert_at_rest(twins.sharded)


# --- what modules take and return ---


@dataclass
class _DataclassOutput:
    hidden: Tensor
    extra: dict[str, Tensor | None]


@dataclass(frozen=True)
class _FrozenOutput:
    hidden: Tensor
    loss: Tensor | None = None


class _NamedOutput(NamedTuple):
    hidden: Tensor
    number: int


class _ModelOutput(OrderedDict[str, Any]):
    """Keys are attributes too, as in the outputs of Hugging Face's models."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else list(self.values())[key]


class _Result:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.name = "plain object"


_FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda out: out),
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "list": (lambda x: [x, "text"], lambda out: out[0]),
    "dict": (lambda x: {"a": None, "b": x}, lambda out: out["b"]),
    "nested": (lambda x: ({"a": [x, {"b": (x.sin(),)}]},), lambda out: out[0]["a"][1]["b"][0]),
    "namedtuple": (lambda x: _NamedOutput(x, 3), lambda out: out.hidden),
    "dataclass": (lambda x: _DataclassOutput(x, {"none": None}), lambda out: out.hidden),
    "dataclass_field": (
        lambda x: _DataclassOutput(x.detach(), {"x": x}),
        lambda out: out.extra["x"],
    ),
    "frozen_dataclass": (lambda x: _FrozenOutput(x), lambda out: out.hidden),
    "model_output": (lambda x: _ModelOutput(loss=x.sum(), hidden=x), lambda out: out.hidden),
    "object": (lambda x: _Result(x), lambda out: out.hidden),
}


class _Wrapping(nn.Module):
    """A block that returns its output in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.block = Layer()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return _FORMS[self.form][0](self.block(x))


class _Unwrapping(nn.Module):
    """Three units that return their output in some form, under a root that does too."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Wrapping(form) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = _FORMS[self.form][1](layer(x))
        return _FORMS[self.form][0](x)


@pytest.mark.parametrize("form", _FORMS)
@distributed(2)
def test_forms_of_outputs(form: str) -> None:
    """Whatever holds the output tensors comes through unchanged, and backward finds them."""
    twins = Twins(lambda: _Unwrapping(form), shard_layers)
    get = _FORMS[form][1]
    outputs = [model(rank_input(4, 15)) for model in twins]
    assert type(outputs[1]) is type(outputs[0])
    _train_by(
        twins, lambda step: lambda model: square_mean(get(model(rank_input(4, 15, step=step))))
    )
    assert_at_rest(twins.sharded)


class _InNone(nn.Module):
    """Units that return None in some of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_NoneOrSum() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers[1](None) is None
        total = x
        for layer in self.layers:
            total = layer(total)
        assert self.layers[0](None) is None
        return total


class _NoneOrSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.tanh(self.linear(x))


@distributed(2)
def test_output_none() -> None:
    """A call without output is gathered and freed like any other."""
    twins = Twins(_InNone, shard_layers)
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ScaledByOption() for _ in range(2))

    def forward(self, *, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, options={"scale": scale})
        return {"x": x}


class _ScaledByOption(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor, *, options: dict[str, Tensor | None]) -> Tensor:
        scale = options["scale"]
        return torch.tanh(self.linear(x if scale is None else x * scale))


@distributed(2)
def test_keyword_arguments() -> None:
    """They reach the module as they are."""
    twins = Twins(_Keywords, shard_layers)
    scale = rank_input(15)
    twins.step(lambda model: square_mean(model(x=rank_input(4, 15), scale=scale)["x"]))
    assert_at_rest(twins.sharded)


class _InPlace(nn.Module):
    """Changes the output of a unit in place: the tensor, or a view that the unit returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_MaybeView(kind) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.kind == "slice":
                x[:, :3].add_(1)
                x.mul_(0.5)
            else:
                x.add_(1).mul_(0.5)
        return x


class _MaybeView(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 16 if kind == "view" else 15)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(torch.tanh(x))
        return x[:, 1:] if self.kind == "view" else x


@pytest.mark.parametrize("kind", ["tensor", "slice", "view"])
@distributed(2)
def test_in_place_operations_on_outputs(kind: str) -> None:
    """They neither fail nor keep the backward from finding the unit."""
    twins = Twins(lambda: _InPlace(kind), shard_layers)
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Positions(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(7, 15))
        self.kind = kind

    def forward(self, length: int) -> Any:
        if self.kind == "whole":
            return self.pos
        if self.kind == "dict":
            return {"pos": self.pos[:length], "none": None}
        return self.pos[:length]


class _Positioned(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions = _Positions(kind)
        self.block = Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pos = self.positions(len(x))
        pos = pos["pos"] if isinstance(pos, dict) else pos[: len(x)]
        return self.block(x + pos), pos


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@pytest.mark.parametrize("kind", ["whole", "view", "dict"])
@distributed(2, on_device=True)
def test_output_that_aliases_a_parameter(kind: str, shard: Callable[..., None]) -> None:
    """It may be read after the call and after the backward, and its gradient counts."""
    twins = Twins(lambda: _Positioned(kind), shard)
    x = rank_input(4, 15)
    with torch.no_grad():
        outputs = [model(x)[1] for model in twins]
        assert_equal(outputs[1], outputs[0])
    results = [model(x) for model in twins]
    for model, (hidden, pos) in zip(twins, results, strict=True):
        twins.backward(model, square_mean(hidden) + pos.sin().sum())
    assert_equal(results[1][1].detach(), results[0][1].detach(), "after the backward")
    assert_equal(outputs[1], outputs[0], "after the backward")
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_inference_output_that_aliases_a_parameter() -> None:
    """In inference mode too."""
    twins = Twins(lambda: _Positions("view"), shard_root)
    with torch.inference_mode():
        outputs = [model(4) for model in twins]
    assert_equal(outputs[1].clone(), outputs[0].clone())
    assert_at_rest(twins.sharded)


class _Identity(nn.Module):
    """Returns its input, a view of it, or uses its parameters, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor, what: str) -> Tensor:
        return {"same": lambda: x, "view": lambda: x[:], "use": lambda: self.linear(x)}[what]()


class _Identities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.layers = nn.ModuleList(_Identity() for _ in range(3))

    def forward(self, x: Tensor, what: tuple[str, ...]) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer, do in zip(self.layers, what, strict=True):
            x = layer(x, do)
        return torch.tanh(x)


@distributed(2)
def test_unit_that_returns_its_input() -> None:
    """As with stochastic depth: all of its parameters keep no gradient."""
    twins = Twins(_Identities, shard_layers)
    for what in (("same", "use", "view"), ("use",) * 3, ("same",) * 3, ("view", "view", "use")):
        twins.step(lambda model, what=what: square_mean(model(rank_input(4, 15), what)))
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


def _shard_layers_only(model: nn.Module) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model.first)


@pytest.mark.parametrize("shard", [shard_layers, _shard_layers_only])
@distributed(2)
def test_unit_that_returns_its_input_on_one_rank_only(shard: Callable[..., None]) -> None:
    """Ranks may skip different layers, the last one too."""
    twins = Twins(_Identities, shard)
    is_first = dist.get_rank() == 0
    for first, second in (("same", "use"), ("use", "use"), ("view", "same"), ("use", "same")):
        what = ("use", first, second) if is_first else (second, "use", first)
        twins.step(lambda model, what=what: square_mean(model(rank_input(4, 15), what)))
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


# --- kinds of modules and parameters ---


class _RecurrentHead(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(5, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@distributed(2)
def test_recurrent_modules(kind: type[nn.RNNBase], shard: Callable[..., None]) -> None:
    """Their second list of weights follows the registration."""
    twins = Twins(lambda: _RecurrentHead(kind), shard)
    _train_by(twins, lambda step: _loss_of_shape(2, 6, 5, step=step))
    assert_at_rest(twins.sharded)
    assert all(
        weight is twins.sharded.rnn._parameters[name]
        for name, weight in zip(
            twins.sharded.rnn._flat_weights_names, twins.sharded.rnn._flat_weights, strict=True
        )
    )


class _OddParameters(nn.Module):
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


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_odd_parameters(shard: Callable[..., None]) -> None:
    """Without dims, empty, not contiguous, channels-last."""
    twins = Twins(_OddParameters, shard)
    assert twins.sharded.transposed.stride() == (1, 7)
    for name in ("strided", "expanded"):  # what has gaps becomes contiguous
        plain = getattr(twins.plain, name).detach()
        setattr(twins.plain, name, nn.Parameter(plain.clone(memory_format=torch.contiguous_format)))
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 15, step=step)))
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


class _OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Empty(), _Empty()])
        self.last = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 15))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum(0)


@distributed(2)
def test_unit_of_empty_parameters() -> None:
    """There is nothing to gather, and the gradients are empty."""
    twins = Twins(_OnlyEmpty, shard_layers)
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 7, dtype=torch.complex64)
        self.real = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.real(x)).to(torch.complex64)).abs()


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2, on_device=True)
def test_complex_parameters(shard: Callable[..., None]) -> None:
    """They are gathered and reduced like real ones."""
    twins = Twins(_Complex, shard)
    twins.step(_loss_of_shape(4, 15))
    assert twins.sharded.linear.weight.grad.dtype == torch.complex64
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@distributed(2)
def test_dtypes(dtype: torch.dtype) -> None:
    """A unit gathers and reduces in its parameters' dtype."""
    twins = Twins(lambda: Net().to(dtype), shard_blocks)
    _train_by(
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
        twins.step(_loss_of_shape(4, 15, step=step))
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 15, sparse=True)
        self.last = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(x))


@distributed(2)
def test_sparse_gradients() -> None:
    """They become dense, and are averaged like any other, also inside no_sync."""
    twins = Twins(_Sparse)
    tokens = torch.arange(4) + 3 * dist.get_rank()
    twins.step(lambda model: square_mean(model(tokens)))
    assert not twins.sharded.embedding.weight.grad.to_local().is_sparse
    _zero_grad(twins)
    with no_sync(twins.sharded):
        square_mean(twins.sharded(tokens)).backward()
    square_mean(twins.sharded(tokens + 1)).backward()
    twins.backward(
        twins.plain, square_mean(twins.plain(tokens)) + square_mean(twins.plain(tokens + 1))
    )
    twins.assert_equal_gradients()


# --- frozen parameters ---


class _PartlyFrozen(nn.Module):
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


def _make_partly_frozen() -> nn.Module:
    return nn.Sequential(*(_PartlyFrozen() for _ in range(3)))


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_partly_frozen_units(shard: Callable[..., None], needs_grad: bool) -> None:
    """Frozen weights stay until the gradients of the inputs are there."""
    twins = Twins(_make_partly_frozen, shard)
    inputs = [rank_input(4, 15).requires_grad_(needs_grad) for _ in twins]
    for step in range(3):
        with count_collectives() as counts:
            for model, x in zip(twins, inputs, strict=True):
                twins.backward(model, square_mean(model(x)))
        twins.assert_equal_gradients()
        if needs_grad:
            assert_equal(inputs[1].grad, inputs[0].grad, f"input gradient in step {step}")
        _zero_grad(twins)
    num_units = 1 if shard is shard_root else 3
    assert counts.count("reduce_scatter") == num_units
    assert_at_rest(twins.sharded)


@distributed(2)
def test_partly_frozen_units_with_backwards_afterwards() -> None:
    """A second backward needs the frozen weights as late as the first."""
    twins = Twins(_make_partly_frozen)
    for model in twins:
        losses = [square_mean(model(rank_input(4, 15, step=i))) for i in range(2)]
        twins.backward(model, losses[0], retain_graph=True)
        twins.backward(model, losses[1])
        twins.backward(model, losses[0])
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


def _make_with_frozen_unit() -> nn.Module:
    model = Net()
    model.blocks[1].requires_grad_(False)
    return model


@distributed(2)
def test_frozen_unit() -> None:
    """It is gathered for both passes, reduces nothing and allocates no gradient memory."""
    twins = Twins(_make_with_frozen_unit, shard_blocks)
    for step in range(2):
        with count_collectives() as counts:
            twins.step(_loss_of_shape(4, 5, step=step))
        _zero_grad(twins)
    assert counts.count("reduce_scatter") == 3
    (handle,) = get_handles(twins.sharded.blocks[1])
    assert handle.grads._own.buffer.numel() == 0
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
        twins.step(_loss_of_shape(4, 5))
        assert (twins.sharded.blocks[1].up.weight.grad is None) is not is_trainable
        _zero_grad(twins)
    assert_at_rest(twins.sharded)


@distributed(2)
def test_unfreezing_after_sharding() -> None:
    """`requires_grad_(True)` on a parameter that was sharded frozen trains it from then on."""
    twins = Twins(_make_with_frozen_unit, shard_blocks)
    twins.step(_loss_of_shape(4, 5))
    for model in twins:
        model.zero_grad()
        model.blocks[1].requires_grad_()
    twins.step(_loss_of_shape(4, 5))
    assert twins.sharded.blocks[1].up.weight.grad is not None
    assert_at_rest(twins.sharded)


# --- tied parameters ---


class _Language(nn.Module):
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


def _shard_language(model: nn.Module, units: tuple[str, ...], **options: Any) -> None:
    for unit in units:
        fully_shard(model.get_submodule(unit), **options)
    fully_shard(model, **options)


def _rank_tokens(step: int) -> Tensor:
    return (torch.arange(8).view(2, 4) * (step + 2) + 5 * dist.get_rank()) % 11


@pytest.mark.parametrize(
    "units",
    [
        ("blocks.0", "blocks.1"),
        ("embedding", "blocks.0", "blocks.1"),
        ("blocks.0", "head"),
        ("embedding", "blocks.0", "blocks.1", "head"),
        ("head", "blocks.1", "blocks.0", "embedding"),
    ],
)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_tied_parameters(units: tuple[str, ...], reshard_after_forward: bool | None) -> None:
    """Inside a unit, between a unit and the root, between siblings, owner first or last."""
    twins = Twins(
        _Language, _shard_language, units=units, reshard_after_forward=reshard_after_forward
    )
    assert twins.sharded.head.weight is twins.sharded.embedding.weight
    _train_by(twins, lambda step: lambda model: square_mean(model(_rank_tokens(step))), steps=3)
    assert twins.sharded.head.weight is twins.sharded.embedding.weight
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


class _BorrowedOnly(nn.Module):
    """Two layers with one weight, so that the second unit has no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.first.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@distributed(2)
def test_a_unit_that_only_borrows_is_reached_twice_in_a_backward() -> None:
    """Its parameters' owner has ended and freed them between the two."""
    twins = Twins(_BorrowedOnly)
    for step in range(2):
        twins.step(
            lambda model, step=step: sum(
                model(rank_input(4, 5, step=2 * step + i)).square().mean() for i in range(2)
            )
        )
        for model in twins:
            model.zero_grad()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_collectives_of_parameters_tied_to_the_root() -> None:
    """The owner is gathered once for each pass and reduced once."""
    twins = Twins(_Language, _shard_language, units=("embedding",), reshard_after_forward=True)
    model = twins.sharded
    square_mean(model(_rank_tokens(0))).backward()
    with trace_events() as events:
        square_mean(model(_rank_tokens(0))).backward()
    names = [(event.kind, event.name) for event in events]
    assert names.count(("issue_gather", "embedding")) == 2
    assert names.count(("issue_reduce", "embedding")) == 1


@pytest.mark.parametrize("units", [("embedding", "head"), ("head", "embedding")])
@distributed(2)
def test_tied_parameter_of_a_unit_that_does_not_run(units: tuple[str, ...]) -> None:
    """The borrowing unit alone makes the gradient, and the owner alone does."""
    twins = Twins(_Language, _shard_language, units=units)
    for model in twins:
        model.head.bias.requires_grad_(True)
    twins.step(lambda model: square_mean(model.head(rank_input(4, 15))))
    _zero_grad(twins)
    twins.step(lambda model: square_mean(model.embedding(_rank_tokens(0))))
    _zero_grad(twins)
    twins.step(lambda model: square_mean(model(_rank_tokens(1))))
    assert_at_rest(twins.sharded)


# --- a unit of several modules ---


class _SomeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(4))

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x


def _shard_pairs(model: nn.Module, **options: Any) -> None:
    fully_shard([model.layers[0], model.layers[1]], **options)
    fully_shard([model.layers[2], model.layers[3]], **options)
    fully_shard(model, **options)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(2)
def test_unit_of_several_modules(reshard_after_forward: bool) -> None:
    """It is gathered once for all of them, and stays until the last has run."""
    twins = Twins(_SomeLayers, _shard_pairs, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        with count_collectives() as counts:
            twins.step(_loss_of_shape(4, 15, step=step))
        _zero_grad(twins)
    assert counts.count("reduce_scatter") == 2
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@distributed(2)
def test_only_some_modules_of_a_unit_run() -> None:
    """Any of them, in any order; what did not run gets no gradient."""
    twins = Twins(_SomeLayers, _shard_pairs)
    for used in ((0, 2), (1,), (3, 0), (0, 0, 1), (1, 2, 0, 3), ()):
        x = rank_input(4, 15).requires_grad_()
        twins.step(lambda model, used=used, x=x: square_mean(model(x, used)))
        _zero_grad(twins)
        assert_at_rest(twins.sharded)


@distributed(2)
def test_modules_of_a_unit_without_a_root() -> None:
    """Each call is led by the unit itself."""
    model = _SomeLayers()
    twins = Twins(_SomeLayers, lambda model: fully_shard(list(model.layers)))
    del model
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    twins.step(lambda model: square_mean(model(rank_input(4, 15), (2,))))
    assert_at_rest(twins.sharded)


class _Checkpointed(CheckpointsBlocks, Net):
    pass


def _shard_pairs_of_blocks(model: nn.Module) -> None:
    fully_shard(list(model.blocks[:2]))
    fully_shard(list(model.blocks[2:]))
    fully_shard(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(2)
def test_modules_of_a_unit_may_be_checkpointed_one_by_one(use_reentrant: bool) -> None:
    """Each is recomputed on its own, in the unit that is gathered once for all of them."""
    twins = Twins(lambda: _Checkpointed(4), _shard_pairs_of_blocks)
    for model in twins:
        model.use_reentrant = use_reentrant
    optimizers = twins.optimizers()
    for step in range(3):
        with count_collectives() as log:
            twins.step(_loss_of_shape(4, 5, step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()
    assert log.count("reduce_scatter") == 3
    assert_at_rest(twins.sharded)


class _Caller(nn.Module):
    """Calls a module of its own unit that is no child of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.others[0](torch.tanh(self.linear(x)))))


class _WithCaller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(15, 15)
        self.caller = _Caller(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.caller(x)


@distributed(2)
def test_module_that_calls_another_of_its_unit() -> None:
    """The call is still the caller's."""
    twins = Twins(_WithCaller, lambda model: fully_shard([model.caller, model.inner]))
    _train_by(twins, lambda step: _loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


# --- what users hang on parameters ---


class _GradientLog:
    """A hook that counts its calls and keeps the gradients it saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, value: Tensor) -> None:
        grad = value.grad if isinstance(value, nn.Parameter) else value
        assert grad is not None
        self.seen.append(grad.full_tensor() if isinstance(grad, FlatShard) else grad.clone())


@pytest.mark.parametrize("is_before", [True, False])
@distributed(2)
def test_tensor_hook_on_a_parameter(is_before: bool) -> None:
    """`register_hook` sees this rank's full gradient, once, and may change it."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    logs = [_GradientLog(), _GradientLog()]
    for net, log in zip((plain, model), logs, strict=True):
        if not is_before and net is model:
            shard_blocks(model)
        net.blocks[0].up.weight.register_hook(log)
        net.blocks[1].up.weight.register_hook(lambda grad: 2 * grad)
        if is_before and net is model:
            shard_blocks(model)
    for net in (plain, model):
        _loss_of_shape(4, 5)(net).backward()
    assert len(logs[0].seen) == len(logs[1].seen) == 1
    assert_equal(logs[1].seen[0], logs[0].seen[0])
    average_gradients(plain.parameters())
    _assert_equal_gradients(model, plain)


@distributed(2)
def test_removed_tensor_hook_does_not_fire() -> None:
    """The handle that `register_hook` returns removes it."""
    twins = Twins(Net, shard_blocks)
    log = _GradientLog()
    handle = twins.sharded.out.weight.register_hook(log)
    twins.step(_loss_of_shape(4, 5))
    handle.remove()
    twins.step(_loss_of_shape(4, 5))
    assert len(log.seen) == 1


@pytest.mark.parametrize("is_before", [True, False])
@distributed(2)
def test_post_accumulate_hook_on_a_parameter(is_before: bool) -> None:
    """It sees the final, averaged gradient, once, when all are there."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    log = _GradientLog()
    if is_before:
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(log)
    shard_blocks(model)
    if not is_before:
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(log)
    for net in (plain, model):
        _loss_of_shape(4, 5)(net).backward()
    average_gradients([plain.blocks[0].up.weight])
    assert len(log.seen) == 1
    assert_equal(log.seen[0], plain.blocks[0].up.weight.grad)


@pytest.mark.fast
@distributed(2, on_device=True)
def test_optimizer_in_the_backward() -> None:
    """A post-accumulate hook may step its parameter's optimizer and drop the gradient."""
    twins = Twins(Net, shard_blocks)
    optimizers = {
        param: torch.optim.AdamW([param], lr=0.05)
        for model in twins
        for param in model.parameters()
    }

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        param.grad = None

    for param in twins.sharded.parameters():
        param.register_post_accumulate_grad_hook(step)
    for index in range(2):
        twins.backward(twins.plain, _loss_of_shape(4, 5, step=index)(twins.plain))
        for param in twins.plain.parameters():
            step(param)
        _loss_of_shape(4, 5, step=index)(twins.sharded).backward()
    twins.assert_equal_parameters()
    assert all(param.grad is None for param in twins.sharded.parameters())
    assert_at_rest(twins.sharded)


@distributed(2)
def test_attributes_of_parameters_stay() -> None:
    """What users write on a parameter is there before, during and after a step."""
    model = Net()
    model.inp.weight.lr_scale = 0.5
    shard_blocks(model)
    model.out.weight.lr_scale = 0.25
    _loss_of_shape(4, 5)(model).backward()
    assert model.inp.weight.lr_scale == 0.5
    assert model.out.weight.lr_scale == 0.25


# --- gradients of gradients ---


class _InnerGradient(nn.Module):
    """Differentiates a unit inside its own forward."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 1))
        self.last = nn.Linear(15, 3)
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return self.last(force) + energy


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("create_graph", [True, False])
@distributed(2, on_device=True)
def test_backward_inside_a_forward(create_graph: bool, reshard_after_forward: bool | None) -> None:
    """As for forces from an energy; without create_graph the energy needs its own graph."""
    twins = Twins(lambda: _InnerGradient(create_graph), reshard_after_forward=reshard_after_forward)

    def run(model: nn.Module) -> Tensor:
        return square_mean(model(rank_input(4, 15)))

    with torch.no_grad():
        outputs = [run(model) for model in twins]
        assert_equal(outputs[1], outputs[0])
    for _ in range(2):
        losses = [run(model) for model in twins]
        assert_equal(losses[1].detach(), losses[0].detach())
        if create_graph:
            for model, loss in zip(twins, losses, strict=True):
                twins.backward(model, loss)
            twins.assert_equal_gradients()
            _zero_grad(twins)
    if create_graph:
        reshard(twins.sharded, recurse=True)  # what a graph may read stays until then
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


def _make_chain() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), nn.Linear(15, 1))


@pytest.mark.parametrize("make", [_make_chain, _RepeatedBlock])
@distributed(2)
def test_gradient_penalty(make: Callable[[], nn.Module]) -> None:
    """create_graph=True, then a backward through the gradient, for several steps."""
    twins = Twins(make)
    optimizers = twins.optimizers(torch.optim.SGD)
    for step in range(3):
        for model in twins:
            x = rank_input(4, 15, step=step).requires_grad_()
            loss = square_mean(model(x))
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            twins.backward(model, loss + grad.square().sum())
        twins.assert_equal_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        twins.sharded(rank_input(4, 15))
    assert_at_rest(twins.sharded)


@distributed(2, on_device=True)
def test_backward_with_create_graph() -> None:
    """The gradients of the parameters are right; their graph is not kept."""
    twins = Twins(lambda: nn.Sequential(Layer(), Layer()))
    for model in twins:
        x = rank_input(4, 15).requires_grad_()
        grads = torch.autograd.grad(square_mean(model(x)), x, create_graph=True)
        twins.backward(model, grads[0].square().sum())
    twins.assert_equal_gradients()


class _AddsLast(nn.Module):
    """A block whose last operation adds a parameter, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Layer(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y + self.last.sum() if dist.get_rank() else y


@distributed(2)
def test_a_gradient_before_the_recomputation() -> None:
    """It leaves the value in place: no rank gathers the unit once more for that."""
    twins = Twins(lambda: nn.Sequential(_AddsLast(), _AddsLast(), Layer()))
    for _ in range(2):
        for model in twins:
            y = rank_input(4, 15)
            for child in model:
                y = torch.utils.checkpoint.checkpoint(child, y, use_reentrant=False)
            loss = square_mean(y)
            twins.backward(model, loss, retain_graph=True)
            model.zero_grad()
            twins.backward(model, loss)
        twins.assert_equal_gradients()
        for model in twins:
            model.zero_grad()


@distributed(2)
def test_create_graph_of_microbatches() -> None:
    """What only the first of them used is packed at the unit's end, without its graph."""
    twins = Twins(Optional, shard_root)
    for model in twins:
        for used in ([0, 1, 2], [0, 2]):
            with no_sync(twins.sharded) if len(used) == 3 else nullcontext():
                loss = square_mean(model(rank_input(4, 5), used))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of cycles that this can make
                    twins.backward(model, loss, create_graph=True)
    for param, plain in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        assert param.grad.requires_grad  # as the plain one; a backward through it raises
        with pytest.raises(RuntimeError, match="has no graph"):
            param.grad.sum().backward()
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad.detach())


@distributed(2)
def test_input_gradients_alone_reduce_nothing() -> None:
    """`torch.autograd.grad` of the inputs leaves `.grad` alone and everything at rest."""
    twins = Twins(Net, shard_blocks)
    twins.sharded(rank_input(4, 5))
    grads = []
    with count_collectives() as counts:
        for model in twins:
            x = rank_input(4, 5).requires_grad_()
            grads += torch.autograd.grad(square_mean(model(x)), x)
    assert_equal(grads[1], grads[0])
    assert counts.count("reduce_scatter") == 0
    assert all(param.grad is None for param in twins.sharded.parameters())
    assert_at_rest(twins.sharded)


@distributed(2)
def test_backward_to_some_inputs_only() -> None:
    """`backward(inputs=[x])` gives no parameter a gradient."""
    twins = Twins(Net, shard_blocks)
    for model in twins:
        x = rank_input(4, 5).requires_grad_()
        square_mean(model(x)).backward(inputs=[x])
        assert x.grad is not None
    assert all(param.grad is None for param in twins.sharded.parameters())
    assert_at_rest(twins.sharded)
    _train_by(twins, lambda step: _loss_of_shape(4, 5, step=step))
