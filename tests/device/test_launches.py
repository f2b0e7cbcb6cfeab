"""Collectives of small units that are issued together: values of collectives alone, in fewer calls.

Each program runs twice on the device, once with each collective alone, and must give the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    count_collectives,
    estimate,
    fully_shard,
    no_sync,
    register_comm_hook,
    reshard,
    set_backward_prefetch,
    set_forward_prefetch,
    set_requires_all_reduce,
    unshard,
    unshard_params,
)
from composable_shard.comm.hooks import then_call_hook
from composable_shard.comm.launches import Launch, _Call
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradient_reduction import FlatReduction
from composable_shard.planning import by_class
from composable_shard.runtime import divide_in_runs, initialization
from composable_shard.runtime.reduction_queue import ReductionQueue
from tests.common import device
from tests.device.running import on_device
from tests.programs.models import Net, shard_blocks, wait_for_engine
from tests.runtime.test_failures import PlannedInterrupt

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
NUM_BLOCKS = 8
BLOCK_NBYTES = 960  # of a block's full parameters, padded
WAITING = (FULL_SHARD, SHARD_GRAD_OP)  # small units' gradients wait for others
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
NUM_WARM = 12  # steps until no identities are exchanged any more


@pytest.mark.fast
@pytest.mark.parametrize(
    ("nbytes", "limit", "runs"),
    [
        ([5], 9, []),
        ([2] * 8, 8, [(0, 1, 5), (3, 5, 8)]),
        ([2] * 9, 9, [(0, 1, 5), (3, 5, 8), (4, 8, 9)]),
        ([2] * 4, 0, [(0, 1, 2), (1, 2, 3), (2, 3, 4)]),  # one at a time
        ([2, 9, 9, 9], 8, [(0, 1, 2), (1, 2, 3), (2, 3, 4)]),
        ([2, 3, 9, 3, 3], 8, [(0, 1, 2), (1, 2, 3), (2, 3, 5)]),
        ([1 << 20] * 13, 64 << 20, [(0, 1, 5), (0, 5, 9), (0, 9, 13)]),  # of 4 MiB at most
    ],
)
def test_runs_are_of_neighbours_and_due_when_there_is_room(
    nbytes: list[int], limit: int, runs: list[tuple[int, int, int]]
) -> None:
    """As early as all that is ahead stays within the limit; one unit may always be ahead."""
    assert divide_in_runs(nbytes, [limit] * len(nbytes)) == runs


@pytest.mark.fast
@pytest.mark.parametrize(
    ("limits", "runs"),
    [
        ([0, 9, 9, 9, 9], [(0, 1, 2), (1, 2, 5)]),  # while the first one runs, one is ahead
        ([2, 9, 9, 9, 9], [(0, 1, 2), (1, 2, 5)]),
        ([4, 9, 0, 9, 9], [(0, 1, 3), (1, 3, 4), (3, 4, 5)]),
    ],
)
def test_no_run_is_due_while_a_unit_runs_whose_own_limit_it_exceeds(
    limits: list[int], runs: list[tuple[int, int, int]]
) -> None:
    """Although the limit of the unit before it is higher."""
    assert divide_in_runs([2] * 5, limits) == runs


@contextmanager
def issuing_alone(flag: bool = True) -> Iterator[None]:
    """Let trees whose ranks are compared inside issue each collective alone."""
    with pytest.MonkeyPatch.context() as patch:
        if flag:
            patch.setattr(initialization, "groups_calls", lambda *_: False)
        yield


def rank_input_of(index: int) -> Tensor:
    """Return this rank's batch of a step."""
    generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
    return torch.randn(4, 5, generator=generator).to(device.NAME)


def _make_chosen(shard: Callable[..., None], make: Callable[[], nn.Module], **options: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    if "offload_policy" not in options:
        model.to(device.NAME)
    shard(model, **options)
    return model


class Chosen(Net):
    """A net whose calls may choose the blocks to run, and return what they all gave."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.order: Sequence[int] = range(NUM_BLOCKS)
        self.fails_after = -1
        self.checkpoints = ""

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, 3)."""
        x = self.inp(x)
        self.between = []
        for number, index in enumerate(self.order):
            block = self.blocks[index]
            is_reentrant = self.checkpoints == "reentrant"
            x = (
                checkpoint(block, x, use_reentrant=is_reentrant)
                if self.checkpoints and number % 2
                else block(x)
            )
            self.between.append(x)
            if number == self.fails_after:
                raise ZeroDivisionError
        return self.out(x)


Step = Callable[[Any, int], None]
Program = tuple[Step, Callable[..., None], dict[str, Any]]


def _go_back(model: Any, index: int) -> None:
    model(rank_input_of(index)).float().square().mean().backward()


def _microbatches(model: Any, index: int) -> None:
    set_requires_all_reduce(model, False)
    _go_back(model, index + 10)
    set_requires_all_reduce(model, True)
    with no_sync(model):
        _go_back(model, index + 20)
    _go_back(model, index)


def _other_orders(model: Any, index: int) -> None:
    model.order = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6], [5, 5, 5, 1]][
        index % 4
    ]
    _go_back(model, index)


def _failures(model: Any, index: int) -> None:
    model.fails_after = index % NUM_BLOCKS
    with suppress(ZeroDivisionError):
        _go_back(model, index)
    model.fails_after = -1

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = model.blocks[(3 * index) % NUM_BLOCKS].register_full_backward_hook(fail)
    with suppress(ZeroDivisionError):
        _go_back(model, index)
    hook.remove()
    _go_back(model, index)


def _some_outputs(model: Any, index: int) -> None:
    """The loss of one rank passes over the root and most blocks; reductions come later."""
    with no_sync(model):
        model(rank_input_of(index))
        number = 1 if index % 2 and dist.get_rank() == 0 else 6
        model.between[number].square().mean().backward()
    _go_back(model, index)


def _evaluations(model: Any, index: int) -> None:
    with torch.no_grad():
        model(rank_input_of(index + 50))
        with unshard_params(model):
            model(rank_input_of(index + 60))
    unshard(model.blocks[3], recurse=True)
    _go_back(model, index)
    reshard(model.blocks[3], recurse=True)


def _graphs(model: Any, index: int) -> None:
    x = rank_input_of(index).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.square().sum() + model(x).square().mean()).backward()
    loss = model(rank_input_of(index)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _checkpoints(kind: str) -> Step:
    def step(model: Any, index: int) -> None:
        model.checkpoints = kind
        model(rank_input_of(index).requires_grad_()).square().mean().backward()

    return step


def _hooks(model: Any, index: int) -> None:
    if index == 0:
        for param in model.blocks[4].parameters():
            param.register_post_accumulate_grad_hook(_halve_gradient)
    _go_back(model, index)


def _halve_gradient(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _prefetches(model: Any, index: int) -> None:
    if index == 1:
        set_forward_prefetch(model.blocks[0], [model.blocks[2], model.blocks[1]])
        set_backward_prefetch(model.blocks[6], [model.blocks[4], model.blocks[5]])
    _go_back(model, index)


def _comm_hooks(model: Any, index: int) -> None:
    if index == 0:
        register_comm_hook(model.blocks[2], then_call_hook, (Tensor.neg_, "reduce_scatter"))
    _go_back(model, index)


def _frozen(model: Any, index: int) -> None:
    for param in model.blocks[index % NUM_BLOCKS].parameters():
        param.requires_grad_(index % 2 == 0)
    _go_back(model, index)


def _tied(model: Any, **options: Any) -> None:
    model.blocks[5].up.weight = model.blocks[1].up.weight
    model.blocks[6].down = model.blocks[2].down
    shard_blocks(model, **options)


def _several_dtypes(model: Any, **options: Any) -> None:
    for block in model.blocks[2:6:2]:
        block.double()

        def cast(module: nn.Module, args: tuple[Tensor]) -> Tensor:
            return args[0].double()

        block.register_forward_pre_hook(cast)
        block.register_forward_hook(lambda _, args, out: out.float())
    shard_blocks(model, **options)


def _several_groups(model: Any, **options: Any) -> None:
    mesh = init_device_mesh(device.NAME, (2, 2), mesh_dim_names=("outer", "inner"))
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh["inner"] if index % 4 == 3 else mesh, **options)
    fully_shard(model, **options)


def _several_strategies(model: Any, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        fully_shard(block, strategy=list(ShardingStrategy)[index % 4], **options)
    fully_shard(model, **options)


def _all_kinds(model: Any, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        strategy = [FULL_SHARD, SHARD_GRAD_OP][index % 2]
        reshard = {"reshard_after_forward": False} if index == 4 else {}
        fully_shard(block, strategy=strategy, **options, **reshard)
    fully_shard(model, **options)


def _with_replicas(model: Any, **options: Any) -> None:
    mesh = init_device_mesh(device.NAME, (2, 2), mesh_dim_names=("replicate", "shard"))
    shard_blocks(model, mesh=mesh, **options)


PROGRAMS: dict[str, Program] = {
    "plain": (_go_back, shard_blocks, {}),
    "microbatches": (_microbatches, shard_blocks, {}),
    "replicas": (_microbatches, _with_replicas, {}),
    "flat": (_go_back, shard_blocks, {"use_orig_params": False}),
    "bf16": (_go_back, shard_blocks, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "sum in fp32": (
        *(_microbatches, shard_blocks),
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "int8": (_go_back, shard_blocks, {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.int8)}),
    "rows": (_go_back, shard_blocks, {"granularity": "row"}),
    "whole parameters": (_go_back, shard_blocks, {"granularity": "param"}),
    "failures": (_failures, shard_blocks, {}),
    "evaluations": (_evaluations, shard_blocks, {}),
    "non-reentrant": (_checkpoints("non-reentrant"), shard_blocks, {}),
    "reentrant": (_checkpoints("reentrant"), shard_blocks, {}),
    "hooks": (_hooks, shard_blocks, {}),
    "comm hooks": (_comm_hooks, shard_blocks, {}),
    "tied": (_go_back, _tied, {}),
    "dtypes": (_go_back, _several_dtypes, {}),
    "groups": (_microbatches, _several_groups, {}),
    "frozen": (_frozen, shard_blocks, {}),
    "buckets": (_go_back, shard_blocks, {"bucket_cap_mb": 0.0005}),
    "offload": (_microbatches, shard_blocks, {"offload_policy": OffloadPolicy(params=True)}),
}
SHARDED: dict[str, Program] = {
    "orders": (_other_orders, shard_blocks, {}),
    "outputs": (_some_outputs, shard_blocks, {}),
    "graphs": (_graphs, shard_blocks, {}),
    "prefetches": (_prefetches, shard_blocks, {}),
    "kept": (_failures, shard_blocks, {"reshard_after_forward": False}),
    "kept parts": (_other_orders, shard_blocks, {"reshard_after_forward": 2}),
    "reduce group": (_microbatches, shard_blocks, {"separate_reduce_group": True}),
    "strategies": (_microbatches, _several_strategies, {}),
    "both": (_failures, _all_kinds, {}),
}


def _train_some_steps(
    step: Step, shard: Callable[..., None], options: dict[str, Any]
) -> list[Tensor]:
    model = _make_chosen(shard, Chosen, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: list[Tensor] = []
    for index in range(5):
        step(model, index)
        found += [
            each.grad.to_local().clone() for each in model.parameters() if each.grad is not None
        ]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.to_local().detach().clone() for each in model.parameters())]


def _check_program(program: Program, **options: Any) -> None:
    step, shard, own = program
    results = []
    for flag in (True, False):
        with issuing_alone(flag):
            ahead = {"prefetch_nbytes": AHEAD[-1]} if flag else {}  # alone, all is ahead at once
            results.append(_train_some_steps(step, shard, {**options, **ahead, **own}))
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results, strict=True):
        assert one.equal(other)
        assert one.isfinite().all()


# Four units may be ahead, so that runs and batches end in the middle; or all.
AHEAD = [4 * BLOCK_NBYTES, 4 << 20]


@pytest.mark.parametrize("prefetch_nbytes", AHEAD)
@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("name", PROGRAMS)
@on_device(num_ranks=4)
def test_values_are_those_of_collectives_alone(
    name: str, strategy: ShardingStrategy, prefetch_nbytes: int
) -> None:
    """Bitwise, whatever a program does; no stream reads or writes too early."""
    _check_program(PROGRAMS[name], strategy=strategy, prefetch_nbytes=prefetch_nbytes)


@pytest.mark.parametrize("prefetch_nbytes", AHEAD)
@pytest.mark.parametrize("name", SHARDED)
@on_device(num_ranks=4)
def test_values_of_sharded_units_are_those_of_collectives_alone(
    name: str, prefetch_nbytes: int
) -> None:
    """Likewise, in programs of FULL_SHARD or of several strategies."""
    _check_program(SHARDED[name], prefetch_nbytes=prefetch_nbytes)


# How many


def _count_of_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return how often the backend is called in a warm step, by kind, without the flags."""
    for number in range(NUM_WARM + 1):
        if number == NUM_WARM:
            device.synchronize()
            device.model_durations(dict.fromkeys(COLLECTIVES, device.Cost(10)))
        _go_back(model, number)
        optimizer.step()
        optimizer.zero_grad()
    kinds = Counter(span.name for span in device.timeline())
    device.model_durations({})
    kinds["all_reduce"] -= 1
    return {kind: kinds[kind] for kind in COLLECTIVES}


@pytest.mark.parametrize(
    ("strategy", "alone", "together"),
    [
        # Runs of 3 units after one of 4, as one may still be ahead; batches of 2, as what waits has
        # half of that. The last units that end, block 0 and the root, are reduced alone.
        (FULL_SHARD, (97, 49, 0), (1 + 16 + 16, 24 + 2, 0)),
        (SHARD_GRAD_OP, (49, 49, 0), (1 + 16, 24 + 2, 0)),
        (SHARD_OPTIM, (49, 49, 0), (1, 1, 0)),  # 47 kB are less than 4 MiB
        (NO_SHARD, (0, 0, 49), (0, 0, 1)),
    ],
)
@on_device(num_ranks=2)
def test_forty_eight_small_units_take_few_collectives(
    strategy: ShardingStrategy, alone: tuple[int, ...], together: tuple[int, ...]
) -> None:
    """By what may be ahead and what may wait: here four units, and two."""
    for flag, counts in ((True, alone), (False, together)):
        with issuing_alone(flag):
            options = {"strategy": strategy, "prefetch_nbytes": 4 * BLOCK_NBYTES}
            model = _make_chosen(shard_blocks, functools.partial(Net, 48), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert tuple(_count_of_step(model, optimizer).values()) == counts


WIDTH = 64
EQUAL_NBYTES = 4 * WIDTH * WIDTH


def _peaks_of_backwards(strategy: ShardingStrategy, prefetch_nbytes: int) -> tuple[int, int]:
    """Return what a backward of 16 equal units holds at most, and the estimate of it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)))
    options = {"strategy": strategy, "prefetch_nbytes": prefetch_nbytes}
    x = torch.ones(2, WIDTH)
    estimated = estimate(
        model, rules=by_class(nn.Linear), world_size=2, batch=x, device_type=device.NAME, **options
    )
    model.to(device.NAME)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated() - 16 * EQUAL_NBYTES
    for module in (*model, model):
        fully_shard(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        loss = model(x.to(device.NAME)).sum()
        torch.accelerator.synchronize()
        device.reset_peak_memory()
        loss.backward()
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    return peak, estimated.peak_backward_nbytes


@pytest.mark.parametrize("strategy", ShardingStrategy)
@on_device(num_ranks=2)
def test_the_peak_is_that_of_collectives_alone_or_within_the_bound(
    strategy: ShardingStrategy,
) -> None:
    """To the byte for large units and kept gradients; else what may wait. The estimate has it."""
    for num_units in (0, 1, 4, 8, 256):
        nbytes = num_units * EQUAL_NBYTES
        with issuing_alone():
            alone, _ = _peaks_of_backwards(strategy, nbytes)
        peak, estimated = _peaks_of_backwards(strategy, nbytes)
        assert alone <= peak <= alone + (nbytes if num_units > 1 and strategy in WAITING else 0)
        # It counts the shards of what waits, half of it at most, before they are there.
        shards = min(nbytes, 16 * EQUAL_NBYTES) // 4 if strategy in WAITING else 0
        assert peak * 0.99 <= estimated <= peak * 1.01 + shards, num_units


def _choose_next(model: Any, when: str) -> None:
    """Let most blocks choose the block after them."""
    for index in range(1, 6):
        if when == "forward":
            set_forward_prefetch(model.blocks[index], [model.blocks[index + 1]])
        else:
            set_backward_prefetch(model.blocks[index + 1], [model.blocks[index]])


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_device(num_ranks=2)
def test_units_that_ran_are_not_gathered_again_after_a_choice(when: str) -> None:
    """The runs that were due while units ran that choose are issued without them."""
    found = []
    for flag in (True, False):
        with issuing_alone(flag):
            model = _make_chosen(shard_blocks, Chosen, prefetch_nbytes=BLOCK_NBYTES)
            _choose_next(model, when)
            for index in range(3):
                torch.accelerator.synchronize()
                device.reset_peak_memory()
                before = torch.accelerator.memory_allocated()
                with count_collectives() as log:
                    _go_back(model, index)
                model.zero_grad()
            torch.accelerator.synchronize()
            peak = torch.accelerator.max_memory_allocated() - before
            found.append((log.count("all_gather"), log.nbytes("all_gather"), peak))
            del model
    assert found[0] == found[1]


def _tie_neighbours(model: Any, **options: Any) -> None:
    for index in (1, 3, 5):
        model.blocks[index].up.weight = model.blocks[index - 1].up.weight
    shard_blocks(model, **options)


@pytest.mark.parametrize("number", [2, 4, 6])
@on_device(num_ranks=2)
def test_a_rank_that_passes_over_a_unit_keeps_what_the_next_one_shares(number: int) -> None:
    """Whoever of the two units holds the tied parameter: no rank gathers it once more."""
    model = _make_chosen(_tie_neighbours, Chosen, prefetch_nbytes=BLOCK_NBYTES)
    for index in range(3):
        _go_back(model, index)
        with no_sync(model):
            model(rank_input_of(index))
            with count_collectives() as log:
                model.between[number + dist.get_rank()].square().mean().backward()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, log.count("all_gather"))
        assert found[0] == found[1]
        model.zero_grad()


# Failures


def _fail_in_turn(original: Callable[..., Any], k: int, when: str) -> tuple[Any, list[int]]:
    """Return a method that raises in its k-th call, and a list with the number of its calls."""
    calls = [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == k and when == "before":
            raise PlannedInterrupt
        result = original(*args, **kwargs)
        if calls[0] == k:
            raise PlannedInterrupt
        return result

    return method, calls


PLACES: list[tuple[type, str]] = [
    *((Launch, name) for name in ("__enter__", "_enter", "__exit__", "close")),
    *((_Call, name) for name in ("issue", "_start", "wait")),
    *((FullValues, "gather"), (FlatReduction, "start"), (ReductionQueue, "issue")),
]


@pytest.mark.deadline(240)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", ShardingStrategy)
@on_device(num_ranks=2)
def test_an_interrupt_anywhere_leaves_the_next_step_right(
    strategy: ShardingStrategy, when: str
) -> None:
    """On all ranks, in the k-th call of each function that takes part, for each k of a step."""
    model, undisturbed = (
        _make_chosen(
            shard_blocks,
            functools.partial(Net, 4),
            strategy=strategy,
            prefetch_nbytes=4 * BLOCK_NBYTES,
        )
        for _ in range(2)
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, undisturbed)]
    index = 0
    for kind, name in PLACES:
        original = getattr(kind, name)
        for k in itertools.count(1):
            method, calls = _fail_in_turn(original, k, when)
            with pytest.MonkeyPatch.context() as patch, suppress(PlannedInterrupt):
                patch.setattr(kind, name, method)
                _go_back(model, index + 1000)
            wait_for_engine(model)
            optimizers[0].zero_grad()
            for each, optimizer in zip((model, undisturbed), optimizers, strict=True):
                _go_back(each, index)
                optimizer.step()
                optimizer.zero_grad()
            for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
                assert one.to_local().equal(other.to_local()), (name, k)
            index += 1
            if calls[0] < k:
                break
    assert index > 2 * len(PLACES)


@on_device(num_ranks=2, timeout_s=3)
def test_a_rank_that_is_gone_is_told_by_the_others() -> None:
    """A launch fails after the timeout, in the host's next wait, as a collective alone does."""
    model = _make_chosen(shard_blocks, functools.partial(Net, 4))
    for index in range(NUM_WARM):
        _go_back(model, index)
        model.zero_grad()
    if dist.get_rank() == 1:
        return
    with pytest.raises(RuntimeError, match=r"(?i)closed|timed out|failed"):
        _go_back_and_wait(model)
    with suppress(RuntimeError):
        device.synchronize()


def _go_back_and_wait(model: nn.Module) -> None:
    _go_back(model, 0)
    device.synchronize()
