"""`reshard_after_forward=n`: neighbouring ranks keep a unit between forward and backward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import ShardingStrategy, fully_shard, get_handles
from composable_shard.comm import SmallGroup, Waitable, collectives, groups
from composable_shard.comm.algorithms import AllGather
from composable_shard.comm.order import order_of
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    loss_of,
    replica_mesh,
    shard_blocks,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy


@distributed(4)
def test_a_group_that_torch_would_hang_in_is_refused() -> None:
    """Where ranks know different numbers of groups, on all of them; the model stays as it was."""
    dist.new_group([0, 1, 2])
    with pytest.MonkeyPatch.context() as patch:
        # No earlier test's: of some ranks they may have been collected already.
        for name in ("_groups_of_world", "_made_groups"):
            patch.setattr(groups, name, WeakKeyDictionary())
        model = Net()
        with pytest.raises(RuntimeError, match="know different numbers of process groups"):
            fully_shard(model, reshard_after_forward=2)
        fully_shard(model)
        loss_of(model).backward()


@pytest.mark.parametrize("number", [1, 2])
@distributed(4)
def test_a_number_on_a_2d_mesh_speaks_of_the_shard_group(number: int) -> None:
    """`reshard_after_forward=int`: a divisor of the ranks along its axis."""
    twins = Twins(Net, shard_blocks, mesh=replica_mesh(), reshard_after_forward=number)
    for step in range(2):
        twins.step(lambda model, step=step: loss_of(model, step))
    assert all(handle.full.kept is None for handle in get_handles(twins.sharded))
    with pytest.raises(ValueError, match="a divisor of the 2 ranks that share the unit, got 4"):
        fully_shard(nn.Linear(5, 5), mesh=replica_mesh(), reshard_after_forward=4)


@distributed(4)
def test_memory_outlives_an_interrupted_gather_of_a_small_group() -> None:
    """A backward that is interrupted right after its messages were posted; the next step is right.

    Else they would be written into memory that was given back.
    """
    twins = Twins(Net, shard_blocks, reshard_after_forward=2)
    twins.step(loss_of)
    twins.zero_grad()
    loss, waited = loss_of(twins.sharded), list[dist.ProcessGroup]()
    last = get_handles(twins.sharded)[-1]
    small = SmallGroup.of(last.shard_group, 2).group
    wait, start = collectives.wait_for_interrupted, AllGather.start

    def interrupted(gather: AllGather, *args: Any, **named: Any) -> Waitable:
        work = start(gather, *args, **named)
        if gather._order is order_of(small):
            raise KeyboardInterrupt
        return work

    def note(group: dist.ProcessGroup) -> None:
        waited.append(group)
        wait(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllGather, "start", interrupted)
        patch.setattr(collectives, "wait_for_interrupted", note)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    assert small in waited
    del loss
    twins.zero_grad()
    twins.step(loss_of)


@distributed(4)
def test_a_small_group_inside_the_shard_axis_of_a_2d_mesh() -> None:
    """Of four ranks that share the unit, two keep it together; one replica."""
    mesh = init_device_mesh("cpu", (1, 4))
    twins = Twins(Net, shard_blocks, mesh=mesh, reshard_after_forward=2)
    twins.step(loss_of)
    loss = loss_of(twins.sharded)
    assert all(handle.full.kept is not None for handle in get_handles(twins.sharded))
    loss.backward()
    assert_at_rest(twins.sharded)
