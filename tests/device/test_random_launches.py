"""Random programs, with collectives issued together and alone: the same bits and errors.

A seed gives a model, its options and a list of actions. All ranks take the same actions on data of
their own. The device's streams are late by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    no_sync,
    reshard,
    set_backward_prefetch,
    set_forward_prefetch,
    set_requires_all_reduce,
    set_reshard_after_backward,
    set_reshard_after_forward,
    unshard,
    unshard_params,
)
from tests.common import device
from tests.device.running import on_device
from tests.device.test_launches import issuing_alone, rank_input_of
from tests.programs.models import wait_for_engine
from tests.runtime.test_failures import Planned

WIDTHS = (3, 8, 20, 40)
AHEAD = (0, 500, 3_000, 12_000, 4 << 20)
SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


class _TanhBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, width), nn.Linear(width, 5)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise Planned
        return x + self.down(torch.tanh(self.up(x)))


class _ReorderedChain(nn.Module):
    """Blocks in an order that can change, some of them in regions that run again."""

    def __init__(self, widths: list[int], tied: list[tuple[int, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(_TanhBlock, widths))
        for one, other in tied:
            if widths[one] == widths[other]:
                self.blocks[one].up.weight = self.blocks[other].up.weight
        self.out = nn.Linear(5, 2)
        self.order = list(range(len(widths)))
        self.again: dict[int, bool] = {}  # blocks that run again; True: reentrantly

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, 2)."""
        for index in self.order:
            block = self.blocks[index]
            kind = self.again.get(index)
            x = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
        return self.out(x)


def _build_random_chain(rng: random.Random, num_ranks: int) -> Any:
    num_blocks = rng.randint(1, 10)
    # Mostly equal ones, as in real models; some that dwarf the others.
    widths = [rng.choice(WIDTHS)] * num_blocks
    for _ in range(rng.randint(0, 3)):
        widths[rng.randrange(num_blocks)] = rng.choice((*WIDTHS, 400))
    pairs = [(rng.randrange(num_blocks), rng.randrange(num_blocks)) for _ in range(2)]
    torch.manual_seed(0)
    model = _ReorderedChain(widths, pairs if rng.random() < 0.2 else [])
    for block in model.blocks if rng.random() < 0.15 else ():
        if rng.random() < 0.3:
            block.up.requires_grad_(False)
    model.to(device.NAME)
    options: dict[str, Any] = {"prefetch_nbytes": rng.choice(AHEAD)}
    if num_ranks == 4 and rng.random() < 0.4:
        options["mesh"] = init_device_mesh(device.NAME, (2, 2), mesh_dim_names=("copies", "shard"))
    options |= rng.choice(
        [
            *([{}] * 4),
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
            {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)},
            {"use_orig_params": False},
            {"granularity": "row"},
            {"separate_reduce_group": True},
        ]
    )
    strategies = rng.choice([[rng.choice(list(ShardingStrategy))], SHARDED, list(ShardingStrategy)])
    if "separate_reduce_group" in options:
        strategies = [ShardingStrategy.FULL_SHARD]
    for block in model.blocks:
        if rng.random() < 0.95:
            fully_shard(block, strategy=rng.choice(strategies), **options)
    fully_shard(model, strategy=rng.choice(strategies), **options)
    return model


def _take_backward(model: Any, rng: random.Random, index: int) -> None:
    loss = model(rank_input_of(index).requires_grad_()).float().square().mean()
    if rng.random() < 0.1:
        loss.backward(retain_graph=True)
    loss.backward()


def _take_microbatches(model: Any, rng: random.Random, index: int) -> None:
    with no_sync(model):
        _take_backward(model, rng, index)
    set_requires_all_reduce(model, False)
    _take_backward(model, rng, index + 1)
    set_requires_all_reduce(model, True)
    _take_backward(model, rng, index + 2)


def _take_failure(model: Any, rng: random.Random, index: int) -> None:
    block = rng.choice(list(model.blocks))
    is_forward = rng.random() < 0.5
    block.fails = is_forward

    def fail(*_: object) -> None:
        raise Planned

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        if output.requires_grad and not is_forward:
            output.register_hook(fail)

    hook = block.register_forward_hook(watch)
    with suppress(Planned):
        _take_backward(model, rng, index)
    block.fails = False
    hook.remove()
    wait_for_engine(model)


def _take_evaluation(model: Any, rng: random.Random, index: int) -> None:
    again, model.again = model.again, {}  # regions warn where no gradient is wanted
    with torch.no_grad(), unshard_params(model) if rng.random() < 0.3 else nullcontext():
        model(rank_input_of(index))
    model.again = again


def _change_block_order(model: Any, rng: random.Random, index: int) -> None:
    every = range(len(model.blocks))
    model.order = rng.choices(every, k=len(every)) if rng.random() < 0.3 else list(every)
    if rng.random() < 0.5:
        rng.shuffle(model.order)


def _change_block_regions(model: Any, rng: random.Random, index: int) -> None:
    kind = rng.random() < 0.3
    model.again = {each: kind for each in model.order if rng.random() < 0.3}


def _change_block_settings(model: Any, rng: random.Random, index: int) -> None:
    block = rng.choice(list(model.blocks))
    others = rng.sample(list(model.blocks), k=min(2, len(model.blocks)))
    flag, number = rng.random() < 0.5, rng.randrange(4)
    with suppress(ValueError):  # a block that is part of the root
        if number < 2:
            [set_forward_prefetch, set_backward_prefetch][number](block, others)
        else:
            setters = [set_reshard_after_forward, set_reshard_after_backward]
            setters[number - 2](block, flag, recurse=False)


def _take_held_step(model: Any, rng: random.Random, index: int) -> None:
    unshard(model, recurse=True)
    _take_backward(model, rng, index)
    reshard(model, recurse=True)


ACTIONS: list[tuple[Callable[[Any, random.Random, int], None], int]] = [
    *(
        (_take_backward, 6),
        (_take_microbatches, 2),
        (_take_failure, 2),
        (_take_evaluation, 2),
        (_take_held_step, 1),
    ),
    *((_change_block_order, 2), (_change_block_regions, 1), (_change_block_settings, 2)),
]


def run_program(seed: int, num_ranks: int) -> tuple[list[Tensor], str]:
    """Return gradients and parameters of a random program, and the error that ended it."""
    rng = random.Random(seed)
    model = _build_random_chain(rng, num_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: list[Tensor] = []
    choices, weights = zip(*ACTIONS, strict=True)
    try:
        for index in range(0, 50, 5):
            (action,) = rng.choices(choices, weights)
            action(model, rng, index)
            if (
                action in (_take_backward, _take_microbatches, _take_held_step)
                and rng.random() < 0.7
            ):
                grads = [each.grad for each in model.parameters()]
                found += [each.to_local().clone() for each in grads if each is not None]
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        wait_for_engine(model)
        return found, str(error)
    return [*found, *(each.to_local().detach().clone() for each in model.parameters())], ""


def _check_random_programs(seeds: range, num_ranks: int) -> None:
    for seed in seeds:
        device.configure("random", seed=seed)
        results = []
        for flag in (True, False):
            with issuing_alone(flag):
                results.append(run_program(seed, num_ranks))
        (alone, error), (together, other) = results
        assert (seed, error) == (seed, other)
        assert len(alone) == len(together), seed
        for one, each in zip(alone, together, strict=True):
            assert one.equal(each), seed


@pytest.mark.parametrize("first", [0, 8])
@on_device(num_ranks=2)
def test_random_programs_are_right_on_two_ranks(first: int) -> None:
    """Or raise the same error."""
    _check_random_programs(range(first, first + 8), 2)


@on_device(num_ranks=4)
def test_random_programs_are_right_on_four_ranks() -> None:
    """Likewise, some with replicas."""
    _check_random_programs(range(100, 106), 4)
