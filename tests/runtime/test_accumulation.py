"""Gradients of several backwards: with no_sync, without, and from zeros."""

from __future__ import annotations

import copy

import pytest
from torch.nn.parallel import DistributedDataParallel

from composable_shard import FlatShard, get_handles, get_states, no_sync, set_requires_gradient_sync
from composable_shard.tensor import reduced_gradient
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    assert_gradients_equal,
    loss_of_shape,
    num_gathers_and_reductions,
    rank_input,
    shard_blocks,
    square_mean,
)
from tests.programs.modules import ALL_USED, NONE_USED, Choosing, OptionalStack, shard_linears


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2)
def test_accumulation_without_no_sync(reshard_after_forward: bool | None) -> None:
    """Every backward reduces and adds to the sharded gradients."""
    twins = Twins(Net, shard_blocks, reshard_after_forward=reshard_after_forward)
    for step in range(3):
        twins.step(loss_of_shape(4, 5, step=step))
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
            run = loss_of_shape(4, 5, step=micro)
            if micro == 2:
                if uses_setter:
                    set_requires_gradient_sync(model, True)
                run(ddp).backward()
                assert (
                    num_gathers_and_reductions(model, lambda model, run=run: run(model).backward())[
                        1
                    ]
                    == 4
                )
            elif uses_setter:
                set_requires_gradient_sync(model, False)
                with ddp.no_sync():
                    run(ddp).backward()
                assert (
                    num_gathers_and_reductions(model, lambda model, run=run: run(model).backward())[
                        1
                    ]
                    == 0
                )
            else:
                with ddp.no_sync(), no_sync(model):
                    run(ddp).backward()
                    assert (
                        num_gathers_and_reductions(
                            model, lambda model, run=run: run(model).backward()
                        )[1]
                        == 0
                    )
        assert_gradients_equal(model, plain)
        plain.zero_grad()
        model.zero_grad()
    assert_at_rest(model, kept=(model,) if reshard_after_forward is False else ())


@pytest.mark.fast
@distributed(2)
def test_no_sync_leaves_no_gradient_on_the_shards() -> None:
    """The reduced part of `.grad` is as before; the modules are at rest but for what waits."""
    twins = Twins(Net, shard_blocks)
    twins.step(loss_of_shape(4, 5))
    before = [param.grad for param in twins.sharded.parameters()]
    with no_sync(twins.sharded):
        loss_of_shape(4, 5, step=1)(twins.sharded).backward()
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
    plain = Choosing()
    model = copy.deepcopy(plain)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    shard_linears(model)
    for used, is_last in (((0, 1), False), ((1,), True)):
        x = rank_input(4, 15)
        if is_last:
            square_mean(ddp(x, used)).backward()
            square_mean(model(x, used)).backward()
        else:
            with ddp.no_sync(), no_sync(model):
                square_mean(ddp(x, used)).backward()
                square_mean(model(x, used)).backward()
    assert_gradients_equal(model, plain)
    assert_at_rest(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2)
def test_zero_grad(set_to_none: bool) -> None:
    """Gradients start from None or from zeros; a parameter without gradient keeps either."""
    twins = Twins(OptionalStack, shard_blocks)
    optimizers = twins.optimizers()
    for step, used in enumerate((ALL_USED, NONE_USED, ALL_USED)):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: square_mean(model(x, used)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    twins.assert_equal_gradients()
    twins.assert_equal_parameters()
    assert_at_rest(twins.sharded)
