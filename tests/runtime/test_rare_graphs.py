"""Backwards of graphs that are deep, or whose saved tensors may be written."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from composable_shard import ShardingStrategy
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.models import average_gradients, rank_input, shard_children, square_mean

DIM = 5
NUM_NODES = 20_000
STACK_NBYTES = 256 << 10


class _ManyNodes(nn.Module):
    """A layer, many nodes on what it returns, and another layer."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.num_nodes = num_nodes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.num_nodes):
            x = x + 1e-5
        return self.second(x)


def _in_small_thread(run: Callable[[], None]) -> None:
    """Run in a thread whose stack a recursion over the nodes would overflow."""
    errors: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(STACK_NBYTES)
    try:
        thread = threading.Thread(target=catch)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    for error in errors:
        raise error


def _train(model: nn.Module, number: int) -> None:
    square_mean(model(rank_input(3, DIM, step=number, dtype=torch.float64))).backward()


def _assert_step_alike(plain: nn.Module, model: nn.Module) -> None:
    average_gradients(plain.parameters())
    found = unsharded_gradients(model)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.grad, f"gradient of {name}")
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        optimizer.step()
        optimizer.zero_grad()
    values = unsharded_values(model)
    for name, param in plain.named_parameters():
        assert_close(values[name], param.detach(), name)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@distributed(1, 2)
def test_many_nodes_in_a_thread_with_a_small_stack(strategy: ShardingStrategy) -> None:
    """Inside the forward of a unit: nothing walks the graph by recursion, or frees it so."""
    torch.manual_seed(0)
    plain = _ManyNodes(NUM_NODES).double()
    model = copy.deepcopy(plain)
    shard_children(model, strategy=strategy)
    for number in range(2):
        for each in (plain, model):
            _in_small_thread(lambda each=each, number=number: _train(each, number))
        _assert_step_alike(plain, model)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2)
def test_saved_tensors_that_may_be_written(strategy: ShardingStrategy) -> None:
    """`allow_mutation_on_saved_tensors` is right, or says what it meets, and leaves no harm."""
    torch.manual_seed(0)
    plain = _ManyNodes(2).double()
    model = copy.deepcopy(plain)
    shard_children(model, strategy=strategy)
    for number in range(3):
        for each in (plain, model):
            with allow_mutation_on_saved_tensors():
                _train(each, number)
        _assert_step_alike(plain, model)
