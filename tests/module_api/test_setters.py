"""Settings that change between steps: what is freed when, what is gathered ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    get_handles,
    set_backward_prefetch,
    set_forward_prefetch,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
    set_unshard_in_backward,
)
from composable_shard.comm import SmallGroup
from composable_shard.comm.trace import count_collectives, trace_events
from composable_shard.flat_param import LOCKED
from composable_shard.options import UnitSettings
from composable_shard.runtime.reshard_policy import KeptPart
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    collectives_of,
    loss_of,
    make_net,
    rank_input,
    shard_blocks,
    train_twins,
)

NUM_UNITS = 4  # of a Net: three blocks and the root


# --- resharding to a smaller group ---


@pytest.mark.parametrize("size", [1, 2, 4])
@distributed(4)
def test_training_equals_the_unsharded_model_with_any_small_group(size: int) -> None:
    """1 keeps everything between forward and backward, 4 frees it, 2 keeps a half."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=size)
    train_twins(twins)
    assert_at_rest(twins.sharded, kept=(twins.sharded,) if size == 1 else ())


@distributed(4)
def test_backward_gathers_over_the_small_group() -> None:
    """After the forward a rank holds half of the parameters; the backward sends halves."""
    model = make_net(reshard_after_forward=2)
    loss_of(model).backward()
    with count_collectives() as forward:
        loss = loss_of(model)
    handles = get_handles(model)
    for handle in handles:
        assert handle.unsharded.untyped_storage().size() == 0
        assert isinstance(handle.full.kept, KeptPart)
        assert handle.full.kept.part.numel() == handle.layout.padded_numel // 2
    small = SmallGroup.of(handles[0].shard_group, 2)
    backward = collectives_of(loss.backward)
    names = [
        {event.name for event in log.events if event.kind == "all_gather"}
        for log in (forward, backward)
    ]
    assert names[0] == {handles[0].shard_group.name}
    assert names[1] == {small.group.group_name}
    assert backward.count("all_gather") == forward.count("all_gather") == NUM_UNITS
    assert_at_rest(model)
    assert all(handle.full.kept is None for handle in handles)


@distributed(4)
def test_no_part_is_kept_where_no_backward_follows() -> None:
    """Nor is a part used after a write."""
    model = make_net(reshard_after_forward=2)
    with torch.no_grad():
        before = loss_of(model)
    assert all(handle.full.kept is None for handle in get_handles(model))
    loss = loss_of(model)
    assert all(handle.full.kept is not None for handle in get_handles(model))
    del loss
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
        after = loss_of(model)
    assert not torch.equal(before, after)
    twin = make_net()
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(1.5)
        assert_equal(after, loss_of(twin))


@distributed(4)
def test_copy_of_a_model_with_small_groups_trains_alike() -> None:
    """The copy refers to the same process groups."""
    model = make_net(reshard_after_forward=2)
    twin = copy.deepcopy(model)
    set_gradient_divide_factor(model, 2.0)
    other = copy.deepcopy(model)
    for each in (model, twin, other):
        loss_of(each).backward()
    for triple in zip(*(each.parameters() for each in (model, twin, other)), strict=True):
        total, mean, copied = [param.grad.full_tensor() for param in triple]
        assert_equal(total, copied)
        torch.testing.assert_close(total, 2 * mean)


# --- what is freed when ---


@distributed(2)
def test_reshard_after_forward_may_change_between_steps() -> None:
    """True gathers each unit twice, False once; units that are kept anyway are left alone."""
    twins = Twins(Net, shard_blocks)
    for flag, num_gathers in [(True, 2 * NUM_UNITS), (False, NUM_UNITS), (None, 2 * NUM_UNITS - 1)]:
        set_reshard_after_forward(twins.sharded, flag)
        _step_of_twins(twins)
        log = collectives_of(lambda: loss_of(twins.sharded).backward())
        assert log.count("all_gather") == num_gathers
        twins.sharded.zero_grad()
    model = make_net(strategy=ShardingStrategy.SHARD_OPTIM)
    set_reshard_after_forward(model, True)
    loss_of(model)
    assert collectives_of(lambda: loss_of(model)).events == []


def _step_of_twins(twins: Twins) -> None:
    twins.step(loss_of)
    for model in twins:
        model.zero_grad()


@pytest.mark.fast
@distributed(2, on_device=True)
def test_reshard_after_backward_keeps_what_the_next_forward_needs() -> None:
    """No gather in it, nor a stale value after a write; True frees everything again."""
    twins = Twins(Net, shard_blocks)
    model = twins.sharded
    set_reshard_after_backward(model, False)
    _step_of_twins(twins)
    assert all(handle.full.has_values for handle in get_handles(model))
    with torch.no_grad():
        assert collectives_of(lambda: loss_of(model)).events == []
    train_twins(twins, kept=(model,))
    set_reshard_after_backward(model, True)
    _step_of_twins(twins)
    assert_at_rest(model)


@distributed(2)
def test_setter_without_recurse_is_for_one_unit() -> None:
    """The units below keep their setting."""
    model = make_net()
    set_reshard_after_forward(model, False, recurse=False)
    flags = [
        fully_shard.state(each).settings.reshard_after_forward for each in (model, model.blocks[0])
    ]
    assert flags == [False, None]


# --- what is gathered ahead ---


def _gathers_before(model: nn.Module, unit: str, kind: str) -> list[str]:
    """Return the units whose gathers were issued when `unit` began to compute."""
    with trace_events() as events:
        loss_of(model).backward()
    begin = next(i for i, e in enumerate(events) if e.kind == kind and e.name == unit)
    start = 0 if kind == "compute" else _last(events, "compute")
    return [event.name for event in events[start:begin] if event.kind == "issue_gather"]


def _last(events: list[Any], kind: str) -> int:
    return max(i for i, event in enumerate(events) if event.kind == kind)


@distributed(2)
def test_forward_prefetch_is_what_the_user_chose() -> None:
    """Several units, none, or the default again; values are right all the time."""
    twins = Twins(Net, partial(shard_blocks, prefetch_nbytes=0))
    model = twins.sharded
    blocks = list(model.blocks)
    _step_of_twins(twins)
    assert _gathers_before(model, "Net", "compute") == ["Net", "blocks.0"]
    set_forward_prefetch(model, blocks[:2])
    assert _gathers_before(model, "Net", "compute") == ["Net", "blocks.0", "blocks.1"]
    set_forward_prefetch(model, [])
    assert _gathers_before(model, "Net", "compute") == ["Net"]
    set_forward_prefetch(model, None)
    assert _gathers_before(model, "Net", "compute") == ["Net", "blocks.0"]
    for model in twins:
        model.zero_grad()
    set_forward_prefetch(twins.sharded, blocks)
    train_twins(twins)
    assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_backward_prefetch_is_what_the_user_chose() -> None:
    """The last block's backward gathers two more, or none."""
    twins = Twins(Net, shard_blocks)
    model = twins.sharded
    blocks = list(model.blocks)
    set_backward_prefetch(model, [blocks[2], blocks[1], blocks[0]])
    _step_of_twins(twins)
    order = ["blocks.2", "blocks.1", "blocks.0"]
    assert _gathers_before(model, "Net", "compute_backward") == order
    set_backward_prefetch(model, [])
    assert _gathers_before(model, "Net", "compute_backward") == []
    model.zero_grad()
    train_twins(twins)
    assert_at_rest(model)


@distributed(2)
def test_units_that_were_chosen_and_do_not_run_are_freed() -> None:
    """At the end of the call; a copy of the model forgets what was chosen."""
    model = make_net()
    set_forward_prefetch(model.blocks[0], [model])  # gathered already: nothing to do
    set_forward_prefetch(model.blocks[1], [model.blocks[2]])
    loss_of(model).backward()
    with torch.no_grad():
        model.blocks[1](rank_input(4, 15))
    assert_at_rest(model)
    twin = copy.deepcopy(model)
    assert fully_shard.state(twin.blocks[1]).settings.forward_prefetch is None


# --- errors ---

SETTERS: list[Callable[..., None]] = [
    partial(set_requires_all_reduce, flag=True),
    partial(set_is_last_backward, flag=True),
    partial(set_gradient_divide_factor, factor=None),
    partial(set_reshard_after_forward, flag=True),
    partial(set_reshard_after_backward, flag=True),
    partial(set_forward_prefetch, modules=[]),
    partial(set_backward_prefetch, modules=[]),
]


@pytest.mark.parametrize("number", range(len(SETTERS)))
def test_setter_refuses_what_was_never_sharded(number: int) -> None:
    """The message says what to do."""
    with pytest.raises(ValueError, match=r"got Linear\. Call fully_shard on it first"):
        SETTERS[number](nn.Linear(2, 2))


@distributed(4)
def test_refused_values_change_nothing() -> None:
    """Numbers must divide the shard group, factors be positive, prefetched modules sharded."""
    model = make_net()
    with pytest.raises(ValueError, match="expected") as caught:
        set_reshard_after_forward(model, 3)
    assert str(caught.value) == (
        "expected reshard_after_forward to be True, False, None or a divisor of the 4 ranks that "
        "share the unit, got 3"
    )
    with pytest.raises(ValueError, match="expected") as caught:
        set_gradient_divide_factor(model, 0.0)
    assert str(caught.value) == "expected a positive, finite gradient divide factor, got 0.0"
    with pytest.raises(ValueError, match="expected a sharded module, got Linear"):
        set_forward_prefetch(model, [model.blocks[0], model.out])
    for setter, value in (
        (set_requires_gradient_sync, "False"),
        (set_requires_all_reduce, 0),
        (set_is_last_backward, None),
        (set_reshard_after_backward, 3),
        (set_unshard_in_backward, "no"),
    ):
        with pytest.raises(ValueError, match=f"expected flag to be True or False, got {value!r}"):
            setter(model, value)  # type: ignore[arg-type] # the point of the test
    state = fully_shard.state(model)
    assert state.settings == UnitSettings(reshard_after_forward=None)


# --- backwards that read no parameter ---


class _WordsAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words))


@distributed(2)
def test_a_backward_that_reads_nothing_spares_its_gather() -> None:
    """Embeddings train without a gather in the backward; a layer that needs one is refused."""

    def shard(model: nn.Module) -> None:
        for part in model.children():
            fully_shard(part, reshard_after_forward=True)
        fully_shard(model)
        set_unshard_in_backward(model.embedding, False)

    twins = Twins(_WordsAndHead, shard)
    optimizers = twins.optimizers()
    for step in range(4):
        words = torch.arange(5) + step + torch.distributed.get_rank()
        twins.step(lambda model, words=words: model(words).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    log = collectives_of(lambda: twins.sharded(words).square().mean().backward())
    assert log.count("all_gather") == 3  # of the head also in the backward
    set_unshard_in_backward(twins.sharded.head, False)
    with (
        pytest.warns(UserWarning, match="a backward failed before it reached unit"),
        pytest.raises(RuntimeError, match=f"is at version {LOCKED}"),
    ):
        twins.sharded(words).square().mean().backward()
    set_unshard_in_backward(twins.sharded.head, True)
    set_unshard_in_backward(twins.sharded.embedding, True)
    log = collectives_of(lambda: twins.sharded(words).square().mean().backward())
    assert log.count("all_gather") == 4
    assert_at_rest(twins.sharded)
