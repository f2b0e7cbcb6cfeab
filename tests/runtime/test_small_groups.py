"""`reshard_after_forward=n`: neighbouring ranks keep a unit between forward and backward."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import ShardingStrategy, fully_shard, get_handles
from composable_shard.comm import groups
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
def test_a_small_group_inside_the_shard_axis_of_a_2d_mesh() -> None:
    """Of four ranks that share the unit, two keep it together; one replica."""
    mesh = init_device_mesh("cpu", (1, 4))
    twins = Twins(Net, shard_blocks, mesh=mesh, reshard_after_forward=2)
    twins.step(loss_of)
    loss = loss_of(twins.sharded)
    assert all(handle.full.kept is not None for handle in get_handles(twins.sharded))
    loss.backward()
    assert_at_rest(twins.sharded)
