"""Ranks that do different things: the same Python error on all of them, which names both sides.

`python -m tests.differences` runs all differences that are listed there, with every strategy.
"""

from __future__ import annotations

import copy
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import ShardingStrategy, fully_shard
from composable_shard.comm import devices, get_host_group
from composable_shard.comm import watch as watching
from composable_shard.comm.order import NUM_TAGS, GroupOrder, identify, order_of
from composable_shard.torch_private import side_store, timeout_of
from tests import differences, fuzz_lockstep
from tests.differences import Chain, Run
from tests.harness import ranks
from tests.harness.ranks import distributed
from tests.harness.workers import GROUP_TIMEOUT_S


@pytest.mark.parametrize(
    ("name", "strategy", "sides"),
    [
        ("swap_equal_units", "FULL_SHARD", ["gather of unit 'blocks.0'", "of unit 'blocks.1'"]),
        ("swap_equal_units_without_a_root", "FULL_SHARD", ["'Linear', number 1", "number 2"]),
        ("skip_the_wide_unit", "SHARD_GRAD_OP", ["unit 'blocks.3'", "unit 'blocks.2'"]),
        ("full_tensor", "FULL_SHARD", ["full_tensor() of 'blocks.0.weight'", "forward gather"]),
        ("product_at_rest", "FULL_SHARD", ["of 'blocks.0.weight', 'blocks.1.weight' (all_gather"]),
        ("column_at_rest", "SHARD_OPTIM", ["full_tensor() of 'blocks.0.weight'"]),
        ("rows_at_rest", "SHARD_GRAD_OP", ["aten.linalg_vector_norm"]),
        ("largest_of_a_gradient", "FULL_SHARD", ["full_tensor() of 'blocks.0.weight'"]),
        ("products_of_others", "FULL_SHARD", ["'blocks.0.weight', 'b", "'blocks.1.weight', 'b"]),
        ("product_for_a_sum", "SHARD_GRAD_OP", ["whole values of", "aten.sum"]),
        ("columns_of_others", "SHARD_OPTIM", ["'blocks.0.weight'", "'blocks.1.weight'"]),
        ("dot_for_rows", "FULL_SHARD", ["aten.dot", "aten.linalg_vector_norm"]),
        ("loss_of_a_block", "FULL_SHARD/alone", ["backward gather of unit 'blocks.2'"]),
        (
            "gradient_of_an_activation",
            "SHARD_GRAD_OP",
            ["reduction of unit", "flags"],
        ),
        ("divide_factor", "NO_SHARD", ["set_gradient_divide_factor(7.0) of unit 'Chain'"]),
        ("frozen_unit", "FULL_SHARD", ["unit 'blocks.1' set to [False, False]"]),
        ("save_checkpoint", "FULL_SHARD", ["save_checkpoint()"]),
    ],
)
def test_order_names_both_sides(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, sides: list[str]
) -> None:
    """Order, Alone, Setters: before the group's timeout, where both wait for each other.

    Operations at rest that gather or reduce are among them: one rank alone, or another operation.
    """
    monkeypatch.setattr(ranks, "GRACE_S", 20)
    cell = differences.measure(name, strategy, timeout_s=20)
    assert cell.kind == "error", cell
    assert cell.seconds < 10
    for side in ["rank 0 is in", "rank 1 is in", *sides]:
        assert side in cell.texts[0]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("loss_of_a_block", each) for each in ("FULL_SHARD/kept", "SHARD_GRAD_OP/alone")),
        *(("loss_of_a_block", each) for each in ("SHARD_OPTIM/alone", "NO_SHARD/alone")),
        ("loss_of_a_block_and_zero", "FULL_SHARD/alone"),
        *(("gradient_of_an_activation", each) for each in ("SHARD_OPTIM", "NO_SHARD")),
    ],
)
@distributed(2)
def test_order_a_loss_may_pass_over_units_that_are_not_gathered_for_it(
    name: str, strategy: str
) -> None:
    """Right by value: where values are kept, and with zero times what the loss passes over."""
    assert differences.train(name, strategy)


@pytest.mark.parametrize("differs", ["forward", "backward", "first_call"])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_order_of_two_models_of_one_class(strategy: ShardingStrategy, differs: str) -> None:
    """Order: their units have the same names and sizes, so one's gradients met the other's.

    Models are told apart by the numbers of their units, copies by their first calls.
    """
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    for model in models:
        fully_shard([model[0], model], strategy=strategy, check_initial_values=False)
    side = r"number \d+ of the units over these ranks"
    if differs != "first_call":
        models[1] = copy.deepcopy(models[0])
        side = r"rank \d is in a backward of the model whose first call was at collective \d+"
    other_order = models if dist.get_rank() else models[::-1]

    def train(*order: nn.Module) -> None:
        for model in order:
            model(torch.ones(2, 4)).square().mean().backward()

    if differs != "first_call":
        train(*models)
        losses = {model: model(torch.ones(2, 4)).square().mean() for model in models}
    acts = {
        "forward": lambda: train(*other_order),
        "backward": lambda: [losses[model].backward() for model in other_order],
        "first_call": lambda: train(*other_order),
    }
    with pytest.raises(RuntimeError, match=f"{side}; .*{side}"):
        acts[differs]()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("die_in_forward", "rank 1 is gone, or can't be reached"),
        ("end_early", "rank 1 is elsewhere: at "),
    ],
)
def test_alone_says_where_the_other_rank_is(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Alone and A rank dies: within the timeout and 10 s."""
    monkeypatch.setattr(ranks, "GRACE_S", 20)
    cell = differences.measure(name, "FULL_SHARD", timeout_s=3)
    assert cell.kind == "error", cell
    assert text in cell.texts[0]
    assert "gather of unit" in cell.texts[0]
    assert "differences.py:" in cell.texts[0]


@pytest.mark.parametrize(
    ("name", "strategy", "sides"),
    [
        ("one_microbatch_more", "FULL_SHARD", ["after 1 steps", "after 0 steps"]),
        ("no_step", "NO_SHARD", ["after 1 steps", "after 0 steps"]),
        ("clip_with_another_norm", "NO_SHARD", ["norm_type=1.0) of 5", "norm_type=2.0) of 5"]),
    ],
)
def test_order_publishes_no_gradient_of_ranks_out_of_step(
    name: str, strategy: str, sides: list[str]
) -> None:
    """Order: where all collectives match, the digest of the step is what tells."""
    cell = differences.measure(name, strategy, timeout_s=20)
    assert cell.kind == "error", cell
    for side in ["rank 0 is in", "rank 1 is in", "No gradient was published", *sides]:
        assert side in cell.texts[0]


class _SilentStore:
    """A store behind a network that is cut: requests neither succeed nor fail."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def add(self, key: str, number: int) -> int:
        self.is_over.wait(30)
        raise RuntimeError("planned")


@pytest.mark.fast
@pytest.mark.usefixtures("four_ranks")
def test_dies_a_store_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dies: two hosts whose link is cut, on the side without the store."""
    monkeypatch.setattr(watching, "_ANSWER_S", 0.05)
    monkeypatch.setattr(watching, "_STORE_S", 0.05)
    watch = object.__new__(watching._Watch)
    watch._store, watch._key = _SilentStore(), "key"
    group = dist.group.WORLD
    order_of(group).enter(identify("the reduction of unit 'head'", "all_reduce", 8))
    text = watch.explain(group, "Timed out.")
    assert text.startswith("the reduction of unit 'head' (all_reduce of 8 bytes), called at ")
    assert "test_lockstep.py:" in text
    assert "the store of the job can't be reached: the rank that hosts it" in text
    watch._store.is_over.set()


@pytest.mark.fast
@pytest.mark.usefixtures("four_ranks")
def test_order_a_group_that_is_not_in_use_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Order: an error that was caught may have left the ranks at other places there."""
    watch, group = object.__new__(watching._Watch), dist.group.WORLD
    monkeypatch.setattr(watching, "all_orders", lambda: [(group, GroupOrder())])
    statements = {
        rank: {"groups": {group.group_name: [(0, 1, text)]}, "where": "?"}
        for rank, text in enumerate("ab")
    }
    found: list[str] = []
    watch._read = lambda ranks: statements
    watch._agree = lambda group, text: text
    watch._give_up = lambda ranks, text: found.append(text)
    watch._used_last = set()
    watch._look_for_difference()
    assert not found
    watch._used_last = {group.group_name}
    watch._look_for_difference()
    assert ["rank 0 is in a" in text for text in found] == [True]


def test_a_rank_that_deviates_at_random_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thin slice of `python -m tests.fuzz_lockstep`."""
    monkeypatch.setattr(ranks, "GRACE_S", 20)
    assert not fuzz_lockstep.failing_cases(range(1))


@pytest.mark.fast
def test_ranks_agree_on_tags_only_in_step() -> None:
    """A tag depends on what was issued last, and on how much was issued before."""
    one, other = GroupOrder(), GroupOrder()
    first, second = identify("a", "all_gather", 8), identify("b", "all_gather", 8)
    for order in (one, other):
        order.enter(first)
    assert one.recent() == other.recent() == [(0, 1, "a (all_gather of 8 bytes)")]
    one.enter(second)
    one.fold()
    assert one.num_issued == 2
    assert [call for _, call, _ in one.recent()] == [-1, 0]
    assert NUM_TAGS > 1 << 30


@pytest.mark.parametrize(
    ("name", "strategy", "sides"),
    [
        (
            "swap_unequal_units",
            "FULL_SHARD/first",
            ["gather of unit 'blocks.3'", "unit 'blocks.2'"],
        ),
        ("full_tensors_of_others", "FULL_SHARD/later", ["of 'blocks.0.weight'", "of 'blocks.1"]),
        ("swap_unequal_units", "FULL_SHARD/later", ["unit 'blocks.2'", "unit 'blocks.3'"]),
        ("clip_for_full_tensor", "SHARD_OPTIM/always", ["full_tensor() of", "clip_grad_norm_(max"]),
        ("swap_unequal_units", "SHARD_GRAD_OP/comm_hook", ["unit 'blocks.2'", "unit 'blocks.3'"]),
        ("swap_equal_units", "NO_SHARD/comm_hook/collective", ["'blocks.0'", "unit 'blocks.1'"]),
    ],
)
def test_order_of_a_backends_collectives(name: str, strategy: str, sides: list[str]) -> None:
    """Order: they carry no identity, and gloo aborts the process where their sizes differ."""
    cell = differences.measure(name, strategy, timeout_s=20)
    assert cell.kind == "error", cell
    assert cell.seconds < 10
    for side in ["rank 0 is in", "rank 1 is in", *sides]:
        assert side in cell.texts[0]


@pytest.mark.parametrize("check_order", ["first", "always"])
@distributed(2)
def test_order_is_exchanged_until_steps_repeat(
    monkeypatch: pytest.MonkeyPatch, check_order: str
) -> None:
    """Order: in the first steps, and after a step with a unit that has not run before."""
    monkeypatch.setattr(devices, "MAX_EXCHANGE_SIZE", 0)
    group = dist.new_group()  # which no other test has used
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Chain()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, check_order=check_order)
    run, found = Run(model, dist.get_rank()), []
    model.order = [0, 1, 2]
    for run.index in range(12):
        if run.index == 5:
            model.order = [0, 1, 2, 3]
        run.step()
        found.append(order_of(group).is_exchanged)
    first = [True, True, True, True, False, True, True, True]
    assert found[: len(first)] == ([True] * 8 if check_order == "always" else first)
    assert found[-1] is (check_order == "always")
    dist.destroy_process_group(group)


@distributed(2)
def test_the_store_has_a_connection_for_statements() -> None:
    """What asks on it delays nobody else."""
    store = side_store()
    assert store is not None
    store.set(f"lockstep/{dist.get_rank()}", "here")
    dist.barrier()
    assert store.get(f"lockstep/{1 - dist.get_rank()}") == b"here"


@distributed(4)
def test_alone_groups_of_a_mesh_have_the_timeout_of_the_job() -> None:
    """Alone: torch's own would let a rank wait for half an hour for one that has left."""
    mesh = init_device_mesh("cpu", (2, 2))
    group, own = mesh.get_group(0), mesh.get_group(1)
    longer = timedelta(hours=2)
    own._get_backend(torch.device("cpu"))._set_default_timeout(longer)
    fully_shard(Chain(), mesh=mesh)
    assert timeout_of(group) == order_of(group).timeout == timeout_of(dist.group.WORLD)
    assert timeout_of(own) == longer  # as somebody has chosen


@distributed(2)
def test_alone_groups_made_inside_have_the_timeout_of_the_job() -> None:
    """Alone and A rank dies: torch's own would let a checkpoint wait for half an hour."""
    world = dist.group.WORLD
    group = get_host_group()._group
    assert group is not None
    assert group is not world
    assert timeout_of(group) == timeout_of(world) == timedelta(seconds=GROUP_TIMEOUT_S)
