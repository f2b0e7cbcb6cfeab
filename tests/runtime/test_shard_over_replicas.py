"""shard_over_replicas: both axes of a 2-D mesh share a unit, and the inner one is near."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import ShardingStrategy, fully_shard, get_handles, no_sync, shard_model
from composable_shard.comm import groups
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param import FullState
from tests.helpers import assert_equal, distributed
from tests.models import (
    Net,
    Twins,
    assert_at_rest,
    loss_of,
    make_net,
    pickled,
    replica_mesh,
    shard_blocks,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@distributed(4)
def test_training_and_state_are_those_of_a_1d_mesh_of_all_ranks(
    strategy: ShardingStrategy,
) -> None:
    """Bitwise, accumulation included; a rank holds a fourth of parameters and state."""
    small = {"reshard_after_forward": 2} if strategy is FULL_SHARD else {}
    models = [
        make_net(strategy=strategy, mesh=replica_mesh(), shard_over_replicas=True),
        make_net(strategy=strategy, **small),
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for micro in range(2):
                with nullcontext() if micro else no_sync(model):
                    loss_of(model, 10 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
    numels = []
    for optimizer in optimizers:
        state = [value for each in optimizer.state.values() for value in each.values()]
        numels.append(sum(value.to_local().numel() for value in state if value.dim()))
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        assert_equal(ours.full_tensor(), expected.full_tensor())
    total = torch.tensor(numels[0])
    dist.all_reduce(total)
    assert numels[0] == numels[1]
    assert total == 2 * sum(param.numel() for param in models[0].parameters())
    assert_at_rest(models[0])


@distributed(4)
def test_groups_of_a_step() -> None:
    """Forward gathers and reductions span the mesh; the backward gathers inside an axis."""
    mesh = replica_mesh()
    model = make_net(mesh=mesh, shard_over_replicas=True)
    loss_of(model).backward()
    with count_collectives() as forward:
        loss = loss_of(model)
    with count_collectives() as backward:
        loss.backward()
    num_units = len(get_handles(model))
    world, inner = get_handles(model)[0].shard_group.name, mesh.get_group("shard").group_name
    assert [(event.kind, event.name) for event in forward.events] == [
        ("all_gather", world)
    ] * num_units
    issued = {(event.kind, event.name) for event in backward.events}
    assert issued == {("all_gather", inner), ("reduce_scatter", world), ("all_reduce", world)}
    assert backward.count("all_gather") == backward.count("reduce_scatter") == num_units
    assert backward.count("all_reduce") == 1


@distributed(4)
def test_a_group_of_all_ranks_is_made_where_the_mesh_has_none() -> None:
    """As for a mesh that is not the world; once for all units. Copies find it."""
    mesh = replica_mesh()
    axes = (mesh.get_group(1), mesh.get_group(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composable_shard.comm.groups._joint_groups", lambda *_: axes)
        twins = Twins(Net, shard_blocks, mesh=mesh, shard_over_replicas=True)
    names = {handle.shard_group.name for handle in get_handles(twins.sharded)}
    assert len(names) == 1
    assert names.isdisjoint(group.group_name for group in (*axes, dist.group.WORLD))
    twins.step(loss_of)
    model = pickled(twins.sharded)
    assert_equal(loss_of(model).detach(), loss_of(twins.sharded).detach())


@distributed(4)
def test_a_group_that_torch_would_hang_in_is_refused() -> None:
    """Where ranks know different numbers of groups, on all of them; the model stays as it was."""
    mesh = replica_mesh()
    axes = (mesh.get_group(1), mesh.get_group(0))
    dist.new_group([0, 1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composable_shard.comm.groups._joint_groups", lambda *_: axes)
        # No earlier test's: of some ranks they may have been collected already.
        for name in ("_groups_of_world", "_made_groups"):
            patch.setattr(groups, name, WeakKeyDictionary())
        calls = {"reshard_after_forward": 2}, {"mesh": mesh, "shard_over_replicas": True}
        for options in calls:
            model = Net()
            with pytest.raises(RuntimeError, match="know different numbers of process groups"):
                fully_shard(model, **options)
            fully_shard(model)
            loss_of(model).backward()


@distributed(4)
def test_wrong_calls_are_refused_before_anything_changes() -> None:
    """The same on every rank, also by shard_model."""
    flat, mesh = init_device_mesh("cpu", (4,)), replica_mesh()
    calls: list[tuple[dict[str, Any], str]] = [
        ({"mesh": flat}, r"expected a 2-D mesh .* got 1 axes"),
        ({}, r"expected a 2-D mesh .* got none"),
        ({"mesh": mesh, "strategy": NO_SHARD}, "NO_SHARD shares nothing"),
        ({"mesh": mesh, "reshard_after_forward": 3}, "a divisor of the 4 ranks"),
        ({"mesh": DeviceMesh("cpu", [[0, 2], [1, 3]])}, "to ascend row by row"),
    ]
    for options, message in calls:
        model = Net()
        with pytest.raises(ValueError, match=message):
            fully_shard(model, shard_over_replicas=True, **options)
        fully_shard(model)
    with pytest.raises(ValueError, match="expected shard_over_replicas to be True or False"):
        fully_shard(Net(), mesh=mesh, shard_over_replicas=1)
    with pytest.raises(ValueError, match="expected a 2-D mesh"):
        shard_model(Net(), {"blocks.*": {"shard_over_replicas": True}})


@distributed(4)
def test_shard_model_passes_it_on() -> None:
    """The dry run counts all ranks."""
    model = Net()
    plan = shard_model(
        model, {"blocks.*": {}}, mesh=replica_mesh(), shard_over_replicas=True, dry_run=True
    )
    assert {unit.world_size for unit in plan.units} == {4}
    shard_model(model, {"blocks.*": {}}, mesh=replica_mesh(), shard_over_replicas=True)
    assert {handle.shard_group.size for handle in get_handles(model)} == {4}


@distributed(4)
def test_ranks_that_differ_are_told() -> None:
    """One digest covers it."""
    model = Net()
    fully_shard(model, mesh=replica_mesh(), shard_over_replicas=dist.get_rank() == 0)
    with pytest.raises(RuntimeError, match="the first difference is at parameter 0"):
        loss_of(model)


@pytest.mark.parametrize("number", [1, 2])
@distributed(4)
def test_a_number_on_a_2d_mesh_speaks_of_the_shard_group(number: int) -> None:
    """`reshard_after_forward=int` without the option: a divisor of the ranks along its axis."""
    twins = Twins(Net, shard_blocks, mesh=replica_mesh(), reshard_after_forward=number)
    for step in range(2):
        twins.step(lambda model, step=step: loss_of(model, step))
    assert not any(handle.full.state is FullState.PARTIAL for handle in get_handles(twins.sharded))
    with pytest.raises(ValueError, match="a divisor of the 2 ranks that share the unit, got 4"):
        fully_shard(nn.Linear(5, 5), mesh=replica_mesh(), reshard_after_forward=4)


@distributed(4)
def test_a_small_group_inside_the_shard_axis_of_a_2d_mesh() -> None:
    """Of four ranks that share the unit, two keep it together; one replica."""
    mesh = init_device_mesh("cpu", (1, 4))
    twins = Twins(Net, shard_blocks, mesh=mesh, reshard_after_forward=2)
    twins.step(loss_of)
    loss = loss_of(twins.sharded)
    assert all(handle.full.state is FullState.PARTIAL for handle in get_handles(twins.sharded))
    loss.backward()
    assert_at_rest(twins.sharded)
