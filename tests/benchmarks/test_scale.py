"""What many ranks, units and parameters cost: nothing more for a rank, no more than linear.

Lines of this package are counted as they run, in one process as one of some ranks whose
collectives do nothing. A loop counts with every round, so a count is exact where a time is not.
"""

from __future__ import annotations

import copy
import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import composable_shard
from benchmarks import scale
from composable_shard import (
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    lazy_init,
    register_flat_param,
    register_orig_params,
    set_optimizer_state_dict,
    shard_model,
    unshard_params,
)
from composable_shard.comm import identity_exchange
from composable_shard.comm.order import all_orders
from composable_shard.options import Granularity
from composable_shard.runtime import forward
from tests.common.free_group import FreeGroup, free_world
from tests.common.models import Sum, SumChain, make_llama, param_nbytes

_PACKAGE = str(Path(composable_shard.__file__).parent)
RANKS = (16, 16_384)
_SLACK = 3  # what is found by bisection takes a line more here and there


@contextmanager
def _count_lines() -> Iterator[Counter[str]]:
    """Count the lines of this package that run, by function."""
    lines: Counter[str] = Counter()

    def in_function(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
        return in_function

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return in_function if frame.f_code.co_filename.startswith(_PACKAGE) else None

    previous = sys.gettrace()
    gc.disable()  # finalizers run when they run
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(previous)
        gc.enable()


def _forget_collectives() -> None:
    """Sum up what the last model has issued, which the first step of the next one would do."""
    for _, order in all_orders():
        order.fold()


def _do_everything(model: SumChain, way: str, options: dict[str, Any]) -> dict[str, Counter[str]]:
    """Do everything one does with a model; return the lines that ran, by what was done."""
    lines: dict[str, Counter[str]] = {}
    x = torch.zeros(8)
    _forget_collectives()

    def count(name: str, function: Callable[[], Any]) -> Any:
        with _count_lines() as lines[name]:
            return function()

    def shard() -> None:
        if way == "by rules":
            shard_model(model, [(Sum, {})], **options)
            return
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)

    def call_layers() -> None:
        with torch.no_grad():
            for layer in model.layers:
                layer(x)

    def read() -> None:
        with unshard_params(model, with_grads=True):
            model.state_dict()

    def show_flat() -> None:
        register_flat_param(model)
        register_orig_params(model)

    count("shard", shard)
    count("lazy_init", lambda: lazy_init(model))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    count("first step", lambda: model(x).backward())
    model.zero_grad()
    count("step", lambda: model(x).backward())
    count("clip", lambda: clip_grad_norm_(model, 1.0))
    count("optimizer", optimizer.step)
    count("layers", call_layers)
    count("copy", lambda: copy.deepcopy(model))
    count("read", read)
    if options.get("use_orig_params", True):
        values = count("state_dict", model.state_dict)
        count("load_state_dict", lambda: model.load_state_dict(values))
        state = count("optimizer state", lambda: get_optimizer_state_dict(model, optimizer))
        count("load optimizer", lambda: set_optimizer_state_dict(model, optimizer, state))
        count("model state", lambda: get_model_state_dict(model))
        count("show flat", show_flat)
    return lines


def _find_superlinear(
    make: Callable[[int], SumChain], way: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Return what grows faster than the size of a model, with the functions that do."""
    with free_world(2):
        _do_everything(make(2), way, options)  # what is done once for all
        small, medium, large = (_do_everything(make(size), way, options) for size in (2, 4, 6))
    found = {}
    for name in small:
        # Of a + b n the second difference is 0, of c n * n it is 8 c.
        rest = Counter(large[name])
        rest.subtract(medium[name])
        rest.subtract(medium[name])
        rest.update(small[name])
        if rest.total() > _SLACK:
            found[name] = rest.most_common(4)
    return found


@pytest.fixture(autouse=True)
def _no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the exchange of identities out: it ends in the middle of some step."""
    monkeypatch.setattr(identity_exchange, "is_capturing", lambda device: True)


def test_nothing_grows_faster_than_the_number_of_units() -> None:
    """With 10,000 units, what looks at all of them for each one would take minutes.

    The root borrows a parameter of each.
    """
    assert not _find_superlinear(lambda size: SumChain(size, 1, is_tied=True), "one by one", {})


def test_rules_and_flat_parameters_grow_no_faster() -> None:
    """`shard_model` checks each unit as if those before it were formed."""
    options = {"use_orig_params": False, "granularity": "row"}
    assert not _find_superlinear(lambda size: SumChain(size, 1), "by rules", options)


def test_nothing_grows_faster_than_the_number_of_parameters() -> None:
    """All in one unit."""
    assert not _find_superlinear(lambda size: SumChain(1, size), "one by one", {})


def test_a_loop_over_all_units_in_each_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above look for."""
    original = forward._unshard

    def unshard(context: Any, *args: Any) -> None:
        context.live_states()
        original(context, *args)

    monkeypatch.setattr(forward, "_unshard", unshard)
    found = _find_superlinear(lambda size: SumChain(size, 1), "one by one", {})
    assert found.keys() == {"first step", "step", "layers"}


def test_the_number_of_ranks_costs_a_rank_nothing() -> None:
    """Not one line more on one of 16,384 ranks than of 16; only a scope asks each for a flag."""
    found = []
    for size in RANKS * 2:
        with free_world(size):
            found.append(_do_everything(SumChain(2, 2), "one by one", {}))
    _, _, few, many = found  # without what is done once for all, as for new collectives
    del few["read"], many["read"]
    assert few == many


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
def test_the_number_of_ranks_costs_a_plan_nothing(granularity: Granularity) -> None:
    """For each unit; where parameters are owned whole, ranks are balanced once for all units."""

    def lines(num_units: int, world_size: int) -> int:
        with _count_lines() as counted:
            model, rules = SumChain(num_units, 9), [(Sum, {})]
            shard_model(model, rules, dry_run=True, world_size=world_size, granularity=granularity)
        return counted.total()

    lines(1, 1)  # what is done once for all
    few, many = (lines(3, size) - lines(1, size) for size in RANKS)
    assert many <= few + _SLACK


def _shard_and_train(model: SumChain) -> None:
    """Shard a unit for each layer, and take two steps; leave no garbage."""
    for module in (*model.layers, model):
        fully_shard(module)
    for _ in range(2):
        model(torch.zeros(8)).backward()
        model.zero_grad()
    gc.collect()


def test_the_number_of_ranks_costs_a_rank_no_memory() -> None:
    """No list of ranks is kept for a unit or a parameter: what Python holds after two steps."""
    found = []
    for size in RANKS * 3:
        with free_world(size):
            model = SumChain(2, 2)
            tracemalloc.start()
            _shard_and_train(model)
            found.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
    # Not the first two. What other tests of this process have left may grow in one turn.
    more = min(found[3] - found[2], found[5] - found[4])
    assert more < RANKS[1] - RANKS[0]  # bytes: less than one for each rank


def test_a_parameter_is_five_tensors() -> None:
    """Its shard, the full values, an alias of each, and a view for a gradient beside the values.

    The first backward packs gradients there. They are gone with `zero_grad`.
    """
    found = []
    for num_params in (2, 10, 30):  # the first for what is made once in a process
        with free_world(2):
            model = SumChain(1, num_params)
            _shard_and_train(model)
            found.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
            del model
    _, few, many = found
    assert many - few == 5 * (30 - 10)


def test_a_step_issues_the_same_collectives_on_any_number_of_ranks() -> None:
    """Of the same bytes, but for each shard's end, which is rounded up to 16 bytes."""
    size = param_nbytes(make_llama("micro"))
    few, many = (scale.collectives_of_step("ours", number, "micro") for number in RANKS)
    for number, sizes in zip(RANKS, (few, many), strict=True):
        counts = {kind: len(each) for kind, each in sizes.items()}
        assert counts == {"gathers": 97, "reductions": 49, "others": 1}
        assert size <= sum(sizes["reductions"]) <= size + 49 * 16 * number
        assert sum(sizes["others"]) < 1024  # of flags


def _collectives_of_equal_units(strategy: ShardingStrategy, num_ranks: int, width: int) -> Sizes:
    """Return those of a step of 24 units, on more ranks than gloo has messages for."""
    with free_world(num_ranks) as group:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(24)))
        for layer in (*model, model):
            fully_shard(layer, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            sizes = scale.note_collectives(group) if index == 2 else {}
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sizes


Sizes = dict[str, list[int]]


@pytest.mark.parametrize(
    ("strategy", "by_width"),
    [
        # Units of 256 KiB, 1 MiB, 4 MiB: what may be ahead, 4 MiB, and half of it for gradients.
        (ShardingStrategy.FULL_SHARD, {256: (4, 4), 512: (16, 13), 1024: (48, 24)}),
        (ShardingStrategy.SHARD_GRAD_OP, {256: (2, 4), 512: (8, 13), 1024: (24, 24)}),
        (ShardingStrategy.SHARD_OPTIM, {256: (2, 2), 512: (6, 6), 1024: (24, 24)}),
    ],
)
def test_the_collectives_of_a_step_follow_the_bytes_of_units_not_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
    strategy: ShardingStrategy,
    by_width: dict[int, tuple[int, int]],
) -> None:
    """Where the backend groups them: as many as bytes need; the same bytes as alone."""
    for width, counts in by_width.items():
        monkeypatch.setattr(FreeGroup, "supports_coalescing", False)
        alone = _collectives_of_equal_units(strategy, 64, width)
        assert len(alone["reductions"]) == 24
        monkeypatch.setattr(FreeGroup, "supports_coalescing", True)
        for num_ranks in (64, 16_384):
            sizes = _collectives_of_equal_units(strategy, num_ranks, width)
            kinds = ("gathers", "reductions")
            assert (width, *(len(sizes[kind]) for kind in kinds)) == (width, *counts)
            for kind in kinds:
                assert sum(sizes[kind]) == sum(alone[kind])
