"""2-D meshes: shards along one axis, copies of them along the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_handles,
    no_sync,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
)
from composable_shard.tensor import reduced_gradient
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Optional,
    Twins,
    assert_at_rest,
    collectives_of,
    loss_of,
    make_net,
    rank_input,
    replica_mesh,
    shard_blocks,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
NUM_UNITS = 4  # of a Net


def _shard_on_meshes(model: nn.Module) -> None:
    """Give each unit another strategy or mesh."""
    mesh = replica_mesh(2, 2)
    for block, strategy in zip(model.blocks, STRATEGIES[1:], strict=True):
        fully_shard(block, strategy=strategy, mesh=mesh)
    fully_shard(model)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [(strategy, (2, 2)) for strategy in STRATEGIES]
    + list(zip(STRATEGIES, [(1, 4), (4, 1)] * 2, strict=True)),
)
@distributed(4, on_device=True)
def test_training_equals_the_unsharded_model(
    strategy: ShardingStrategy, shape: tuple[int, int]
) -> None:
    """The mean is over all ranks, whatever the mesh; clipping sees each element once."""
    _train_clipping_twins(partial(shard_blocks, strategy=strategy, mesh=replica_mesh(*shape)))


@distributed(4, on_device=True)
def test_meshes_and_strategies_mix_in_one_tree() -> None:
    """Hybrid units beside ones that are sharded over all ranks."""
    _train_clipping_twins(_shard_on_meshes)


def _train_clipping_twins(shard: Callable[[nn.Module], object]) -> None:
    twins = Twins(Net, shard)
    optimizers = twins.optimizers()
    for step in range(3):
        twins.step(partial(loss_of, step=step))
        norms = [
            clip_grad_norm_(twins.sharded, 0.1),
            nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.1),
        ]
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for each in optimizers:
            each.step()
            each.zero_grad()
    twins.assert_equal_parameters()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize(
    ("strategy", "num_scatters", "num_all_reduces"),
    [
        (FULL_SHARD, NUM_UNITS, NUM_UNITS),
        (SHARD_GRAD_OP, NUM_UNITS, NUM_UNITS),
        (SHARD_OPTIM, NUM_UNITS, NUM_UNITS),
        (NO_SHARD, 0, NUM_UNITS),
    ],
)
@distributed(4)
def test_gradients_are_reduced_inside_and_the_shards_across(
    strategy: ShardingStrategy, num_scatters: int, num_all_reduces: int
) -> None:
    """A reduce-scatter of the unit in the shard group, an all-reduce of the shard across."""
    model = make_net(strategy=strategy, mesh=replica_mesh(2, 2))
    loss_of(model).backward()
    loss = loss_of(model)
    log = collectives_of(loss.backward)
    assert log.count("reduce_scatter") == num_scatters
    assert log.count("all_reduce") == num_all_reduces + 1  # one tells of the parameters' use
    shards = sum(handle.layout.shard_numel * 4 for handle in get_handles(model))
    assert log.nbytes("all_reduce") == shards + len(list(model.parameters()))


@pytest.mark.fast
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_mesh_that_only_replicates_copies_and_gathers_nothing(strategy: ShardingStrategy) -> None:
    """The full parameter is the shard; a backward sums each unit once, where it was packed."""
    model = make_net(strategy=strategy, mesh=replica_mesh(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = loss_of(model, step)
        backward = collectives_of(loss.backward)
        assert len(backward.events) == backward.count("all_reduce") == NUM_UNITS + 1
        optimizer.step()
        assert collectives_of(lambda step=step: loss_of(model, step)).events == []
        optimizer.zero_grad()
    for handle in get_handles(model):
        assert handle.unsharded.data_ptr() == handle.local_shard.data_ptr()
        assert handle.grads._memory.buffer.untyped_storage().size() == handle.unsharded.nbytes


@distributed(2)
def test_mesh_with_one_replica_is_a_plain_one() -> None:
    """No collective over a group of one rank."""
    logs = []
    for mesh in (replica_mesh(1, 2), None):
        model = make_net(strategy=FULL_SHARD, mesh=mesh)
        log = collectives_of(lambda model=model: loss_of(model).backward())
        logs.append([(event.kind, event.nbytes) for event in log.events])
    assert logs[0] == logs[1]


@contextmanager
def _setting(set_flag: Callable[[nn.Module, bool], None], model: nn.Module) -> Iterator[None]:
    set_flag(model, False)
    yield
    set_flag(model, True)


DEFERRALS: dict[str, Callable[[nn.Module], Any]] = {
    "requires_all_reduce": partial(_setting, set_requires_all_reduce),
    "is_last_backward": partial(_setting, set_is_last_backward),
    "no_sync": no_sync,
}


@pytest.mark.parametrize("deferral", DEFERRALS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4, on_device=True)
def test_what_is_put_off_comes_with_the_last_microbatch(
    strategy: ShardingStrategy, deferral: str
) -> None:
    """Sharded gradients add up unpublished; a buffer that is unsharded anyway waits as a whole."""
    twins = Twins(Net, partial(shard_blocks, strategy=strategy, mesh=replica_mesh(2, 2)))
    model = twins.sharded
    loss_of(model)
    for turn in range(2):
        with ExitStack() as stack:
            stack.enter_context(DEFERRALS[deferral](model))
            for micro in range(2):
                loss = loss_of(model, 10 * turn + micro)
                log = collectives_of(loss.backward)
                scatters = deferral != "no_sync" and strategy in (FULL_SHARD, SHARD_GRAD_OP)
                assert log.count("reduce_scatter") == scatters * NUM_UNITS
                assert log.count("all_reduce") <= 1  # of the parameters' use
                assert all(reduced_gradient(param) is None for param in model.parameters())
        loss = loss_of(model, 10 * turn + 2)
        assert collectives_of(loss.backward).count("all_reduce") == NUM_UNITS + 1
        for micro in range(3):
            loss_of(twins.plain, 10 * turn + micro).backward()
        for ours, plain in zip(model.parameters(), twins.plain.parameters(), strict=True):
            dist.all_reduce(plain.grad.div_(4))
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=0, atol=1e-6)
        for each in twins:
            each.zero_grad()


@distributed(4)
def test_unit_that_the_last_microbatch_leaves_out_is_reduced_with_it() -> None:
    """Its gradients were reduced inside the shard group only, until then."""
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    units = copy.deepcopy(plain)

    class _Chosen(nn.Module):
        def __init__(self, units: nn.ModuleList) -> None:
            super().__init__()
            self.units = units

        def forward(self, x: Tensor, number: int) -> Tensor:
            return self.units[0](x) if number == 1 else self.units[1](self.units[0](x))

    model = _Chosen(units)
    for unit in units:
        fully_shard(unit, mesh=replica_mesh(2, 2))
    fully_shard(model, mesh=replica_mesh(2, 2))
    x = rank_input(4, 5)
    set_requires_all_reduce(model, False)
    model(x, 2).square().mean().backward()
    set_requires_all_reduce(model, True)
    model(x, 1).square().mean().backward()
    reference = _Chosen(plain)
    for number in (2, 1):
        reference(x, number).square().mean().backward()
    for ours, param in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(param.grad.div_(4))
        torch.testing.assert_close(ours.grad.full_tensor(), param.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4, on_device=True)
def test_replicas_start_and_stay_equal(strategy: ShardingStrategy) -> None:
    """S2.4: ranks that initialise differently, on purpose, train one model."""
    torch.manual_seed(dist.get_rank())
    model = Net()
    shard_blocks(model, strategy=strategy, mesh=replica_mesh(2, 2), check_initial_values=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        mine = param.full_tensor()
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first)


@distributed(4)
def test_sync_module_states_reaches_every_rank_of_the_mesh() -> None:
    """S2.15: parameters and buffers of the mesh's first rank, along both axes."""
    torch.manual_seed(dist.get_rank())
    model = nn.BatchNorm1d(5)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.running_mean)
    expected = [model.weight.detach().clone(), model.running_mean.clone()]
    for tensor in expected:
        dist.broadcast(tensor, 0)
    fully_shard(model, mesh=replica_mesh(2, 2), sync_module_states=True)
    assert torch.equal(model.weight.full_tensor(), expected[0])
    assert torch.equal(model.running_mean, expected[1])


@distributed(4)
def test_difference_anywhere_in_the_mesh_is_named_on_all_ranks() -> None:
    """Also on the ranks whose own shard group agrees."""
    model = fully_shard(nn.Linear(5, 6 if dist.get_rank() == 3 else 5), mesh=replica_mesh(2, 2))
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\].*ranks \[3\]"):
        model(rank_input(2, 5))


@distributed(4)
def test_difference_is_named_where_no_group_has_all_ranks() -> None:
    """The comparison goes along one axis and then along the other."""
    mesh = replica_mesh(2, 2)
    model = fully_shard(nn.Linear(5, 6 if dist.get_rank() == 3 else 5), mesh=mesh)
    (handle,) = get_handles(model)
    axes = (mesh.get_group("shard"), mesh.get_group("replicate"))
    object.__setattr__(handle.shard_group, "joint_groups", axes)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\].*ranks \[3\]"):
        model(rank_input(2, 5))


@pytest.mark.parametrize("has_world", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_parameter_used_on_one_rank_only(strategy: ShardingStrategy, has_world: bool) -> None:
    """All replicas get its gradient, or they would drift apart; none if no rank used it."""
    torch.manual_seed(0)
    plain = Optional()
    mesh = replica_mesh(2, 2)
    model = fully_shard(copy.deepcopy(plain), strategy=strategy, mesh=mesh)
    (handle,) = get_handles(model)
    if not has_world:
        axes = (mesh.get_group("shard"), mesh.get_group("replicate"))
        object.__setattr__(handle.shard_group, "joint_groups", axes)
    used = [0, 2] if dist.get_rank() == 1 else [0]
    for each in (model, plain):
        each(rank_input(4, 5), used).square().mean().backward()
    for index, (ours, param) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        if index in (2, 3):
            assert ours.grad is None
            continue
        expected = torch.zeros_like(param) if param.grad is None else param.grad / 4
        dist.all_reduce(expected)
        torch.testing.assert_close(ours.grad.full_tensor(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_rank_without_any_gradient_issues_its_collectives_in_the_same_order(
    strategy: ShardingStrategy,
) -> None:
    """It learns from the others that there is something to reduce."""
    torch.manual_seed(0)
    mesh = replica_mesh(2, 2)
    model = fully_shard(Optional(), strategy=strategy, mesh=mesh)
    (handle,) = get_handles(model)
    axes = (mesh.get_group("shard"), mesh.get_group("replicate"))
    object.__setattr__(handle.shard_group, "joint_groups", axes)
    used = [] if dist.get_rank() == 3 else [0, 1, 2]
    x = torch.full((2, 5), 0.5, requires_grad=True)
    for _ in range(3):
        model(x, used).sum().backward()
    grads = [param.grad.full_tensor() for param in model.parameters()]
    torch.testing.assert_close(grads[-1], torch.full((5,), 3 * 2 * 3 / 4))


@pytest.mark.parametrize("shape", [None, (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_gradient_divide_factor_replaces_the_number_of_ranks(
    strategy: ShardingStrategy, shape: tuple[int, int] | None
) -> None:
    """One rule for every strategy and mesh: the sum over all ranks, divided by the factor."""
    mesh = None if shape is None else replica_mesh(*shape)
    models = [make_net(strategy=strategy, mesh=mesh) for _ in range(2)]
    set_gradient_divide_factor(models[1], 1.0)
    for model in models:
        loss_of(model).backward()
    for mean, total in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(
            total.grad.full_tensor(), 4 * mean.grad.full_tensor(), rtol=1e-6, atol=1e-7
        )


@distributed(4)
def test_submesh_of_some_ranks_and_a_copy() -> None:
    """A mesh that is not the world has no group of all its ranks; copies find their groups."""
    world = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    mesh = world["replicate", "shard"]
    model = make_net(strategy=SHARD_OPTIM, mesh=mesh)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        loss_of(each).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor())


class _Twice(nn.Module):
    """Runs its layers, or the last one alone, which this rank may let the input pass through."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5)))
        self.last = Optional()

    def forward(self, x: Tensor, used: list[int], runs_all: bool) -> Tensor:
        return self.last(self.outer(x) if runs_all else x, used)


@distributed(4, on_device=True, timeout=20)
def test_late_gradients_on_some_ranks_do_not_change_the_order() -> None:
    """The all-reduce of a unit's first round comes before its second round on all ranks."""
    mesh = replica_mesh(2, 2)

    def shard(model: nn.Module) -> None:
        for module in (model.outer[1], model.outer, model.last, model):
            fully_shard(module, mesh=mesh)

    def run(model: nn.Module) -> Tensor:
        x = rank_input(4, 5).requires_grad_()
        first = model(x, [0, 1, 2] if dist.get_rank() in (1, 2) else [], True)
        return (first + model(x, [0, 1, 2], False)).square().mean()

    twins = Twins(_Twice, shard)
    twins.step(run)
    assert_at_rest(twins.sharded)
