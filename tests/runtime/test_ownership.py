"""Who owns whole parameters: balanced over a tree, the same on all ranks, and fixed in time."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    lazy_init,
    register_orig_params,
    set_gradient_divide_factor,
    shard_model,
    unshard_params,
)
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    assert_is_slice,
    rank_input,
    replica_mesh,
    seeded,
    shard_blocks,
)

STRATEGIES = list(ShardingStrategy)


class OwnedLayer(nn.Module):
    """One weight, of which a unit alone gives all to one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Layers(Net):
    """Such layers between an input and an output layer."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__(0)
        self.blocks.extend(OwnedLayer() for _ in range(num_layers))


def owners_of(model: nn.Module) -> list[int | None]:
    """Return the owner of each parameter that is sharded."""
    params = [param for param in model.parameters() if isinstance(param, FlatShard)]
    return [param._shard_spec.owner for param in params]


def loads(model: nn.Module) -> list[int]:
    """Return the elements of whole parameters on each rank."""
    found = [0] * dist.get_world_size()
    for handle in get_handles(model):
        for entry in handle.entries:
            if entry.spec.owner is not None:
                found[entry.spec.owner] += entry.spec.numel
    return found


def assert_balanced(model: nn.Module) -> None:
    """Assert the bound of the whole tree."""
    each = loads(model)
    largest = max(param.numel() for param in model.parameters())
    assert max(each) <= max(1.05 * sum(each) / len(each), largest), each


def assert_whole(model: nn.Module) -> None:
    """Assert that the owner has all of a parameter, in its handle's shard, and others nothing."""
    for handle in get_handles(model):
        for entry in handle.entries:
            local = entry.sharded.to_local()
            is_mine = entry.spec.owner == handle.shard_group.rank
            assert local.numel() == (entry.spec.numel if is_mine else 0), entry.label
            assert entry.sharded._shard_spec is entry.spec
            if is_mine and not local.is_meta:
                shard = handle.local_shard
                assert local.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


def assert_same_everywhere(value: object) -> None:
    """Assert that all ranks have the same."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values)


def train_twins_with(twins: Twins, num_steps: int = 2, optimizers: list[Any] | None = None) -> None:
    """Take steps with both, and compare the parameters after each."""
    for step in range(num_steps):
        for model, optimizer in zip(twins, optimizers or twins.optimizers(), strict=True):
            loss = model(rank_input(4, 5, step=step)).square().mean()
            twins.backward(model, loss)
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, 3)
def test_each_parameter_has_one_owner_for_good(strategy: ShardingStrategy) -> None:
    """S2.2, S2.9: balanced, the same map on all ranks; freezing and unfreezing move nothing."""
    twins = Twins(Layers, shard_blocks, strategy=strategy, granularity="param")
    model = twins.sharded
    owners = owners_of(model)
    assert_same_everywhere(owners)
    if strategy is not ShardingStrategy.NO_SHARD:
        assert set(owners) == set(range(dist.get_world_size()))
        assert_balanced(model)
        assert_whole(model)
    optimizers = twins.optimizers()
    train_twins_with(twins, optimizers=optimizers)
    for frozen in (True, False):
        for each in twins:
            each.blocks[1].requires_grad_(not frozen)
            each.blocks[0].linear.weight.requires_grad_(not frozen)
        train_twins_with(twins, optimizers=optimizers)
        assert owners_of(model) == owners
    assert_at_rest(model)


@distributed(2, 3)
def test_units_alone_would_not_be_balanced() -> None:
    """What the outermost call moves: each block's largest parameter was on the first rank."""
    model = Layers()
    before = [param.detach().clone() for param in model.parameters()]
    objects = list(model.parameters())
    for block in model.blocks:
        fully_shard(block, granularity="param")
    alone = loads(model)
    assert max(alone) > 1.05 * sum(alone) / len(alone)
    fully_shard(model, granularity="param")
    assert_balanced(model)
    assert_whole(model)
    assert [id(param) for param in model.parameters()] == [id(param) for param in objects]
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_is_slice(param, expected)


@pytest.mark.fast
@distributed(2)
def test_moves_gather_each_unit_once() -> None:
    """Counted: the bytes of the handles that change, and 32 bytes to compare the plan."""
    model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    before = [handle.layout.owners for handle in get_handles(model)]
    handles = get_handles(model)
    with count_collectives() as log:
        fully_shard(model, granularity="param")
    moved = [
        handle
        for handle, owners in zip(handles, before, strict=True)
        if handle.layout.owners != owners
    ]
    assert moved
    sizes = [32 * 2, *(4 * sum(handle.layout.shard_numels) for handle in moved)]
    assert [event.kind for event in log.events] == ["all_gather"] * len(sizes)
    assert [event.nbytes for event in log.events] == sizes


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_OPTIM])
@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": False},
        {"mp_policy": MixedPrecisionPolicy(main_dtype=torch.float64)},
        {"offload_policy": OffloadPolicy(params=True)},
        {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.float64)},
        {"bucket_cap_mb": 0.0005},
    ],
    ids=["flat", "main dtype", "offload", "gather dtype", "buckets"],
)
@distributed(2)
def test_all_kinds_of_units_move(options: dict[str, Any], strategy: ShardingStrategy) -> None:
    """Values arrive, an optimizer built before holds the parameters, and training goes on."""
    torch.manual_seed(0)
    model = Layers()
    plain = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, strategy=strategy, granularity="param", **options)
    shown = [*model.blocks.parameters()]
    first = [handle.layout.owners for handle in get_handles(model)]
    optimizer = torch.optim.AdamW(shown, lr=0.05)
    fully_shard(model, strategy=strategy, granularity="param", **options)
    assert first != [handle.layout.owners for handle in get_handles(model.blocks)]
    assert_whole(model)
    assert [id(param) for param in model.blocks.parameters()] == [id(param) for param in shown]
    with unshard_params(model):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equal(param.detach().to(expected.dtype), expected.detach())
    reference = torch.optim.AdamW(plain.blocks.parameters(), lr=0.05)
    for step in range(2):
        x = torch.full((2, 5), 0.5 + step)
        for each, which in ((model, optimizer), (plain, reference)):
            each(x).square().mean().backward()
            which.step()
            each.zero_grad()
    register_orig_params(model)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor().float(), expected.detach())


@distributed(2)
def test_nothing_is_sent_on_the_meta_device() -> None:
    """Only the 32 bytes that compare the plan; the parameters move all the same."""
    with torch.device("meta"):
        model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    with count_collectives() as log:
        fully_shard(model, granularity="param")
    assert sum(event.nbytes for event in log.events) == 64
    assert_balanced(model)
    assert_whole(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    model(torch.ones(2, 5)).sum().backward()


@distributed(2, 3)
def test_units_that_ran_stay_and_count() -> None:
    """A unit that was initialised keeps its owners; the rest is balanced around it."""
    model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    lazy_init(model.blocks[0])
    owners = owners_of(model.blocks[0])
    fully_shard(model, granularity="param")
    assert owners_of(model.blocks[0]) == owners
    assert_balanced(model)


@distributed(2)
def test_parameters_with_gradients_stay() -> None:
    """Their gradients are shards of the same ranges."""
    model = Layers()
    for param in model.blocks[0].parameters():
        param.grad = torch.ones_like(param)
    for block in model.blocks:
        fully_shard(block, granularity="param")
    owners = owners_of(model.blocks[0])
    fully_shard(model, granularity="param")
    assert owners_of(model.blocks[0]) == owners


@distributed(2)
def test_nested_units_and_ties_move_once_for_each_call() -> None:
    """A unit in a unit in a unit, lists of modules, and a parameter that two units show."""
    torch.manual_seed(0)
    model = Layers(4)
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    plain = copy.deepcopy(model)
    fully_shard(model.blocks[0].linear, granularity="param")
    fully_shard(model.blocks[0], granularity="param")
    fully_shard([model.blocks[1], model.blocks[2]], granularity="param")
    fully_shard(model.blocks[3], granularity="row")
    fully_shard(model, granularity="param")
    assert_balanced(model)
    x = torch.ones(2, 5)
    assert_equal(model(x).detach(), plain(x).detach())
    assert model.blocks[1].linear.weight is model.blocks[0].linear.weight


@distributed(2)
def test_siblings_are_balanced_by_lazy_init() -> None:
    """Units that no call encloses: a `lazy_init` of the module around them is what they share."""
    model = nn.ModuleList(OwnedLayer() for _ in range(4))
    before = [param.detach().clone() for param in model.parameters()]
    for block in model:
        fully_shard(block, granularity="param")
    lazy_init(model)
    assert_balanced(model)
    assert_whole(model)
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_is_slice(param, expected)
    owners = owners_of(model)
    lazy_init(model)
    assert owners_of(model) == owners


@pytest.mark.parametrize("is_used", [False, True])
@distributed(2)
def test_copies_keep_owners(is_used: bool) -> None:
    """A copy of a unit that ran is fixed too, a copy of another one is not."""
    model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    if is_used:
        lazy_init(model.blocks)
    twin = copy.deepcopy(model)
    assert owners_of(twin) == owners_of(model)
    assert {handle.has_fixed_owners for handle in get_handles(twin)} == {is_used}
    before = owners_of(twin.blocks)
    fully_shard(twin, granularity="param")
    after = owners_of(twin.blocks)
    assert (before == after) is is_used
    assert_whole(twin)
    twin(torch.ones(2, 5)).sum().backward()


@distributed(4)
def test_replicas_have_the_same_owners() -> None:
    """A 2-D mesh: owners are ranks of the shard group; a unit over all ranks is apart."""
    twins = Twins(partial(Layers, 5), nn.Module.train)
    model = twins.sharded
    for block in model.blocks[:2]:
        fully_shard(block, mesh=replica_mesh(), granularity="param")
    fully_shard(model.blocks[2], granularity="param")
    fully_shard(model, mesh=replica_mesh(), granularity="param")
    assert_same_everywhere(owners_of(model))
    assert_whole(model)
    by_size: dict[int, list[int]] = {2: [0] * 2, 4: [0] * 4}
    for handle in get_handles(model):
        for entry in handle.entries:
            by_size[handle.shard_group.size][entry.spec.owner] += entry.spec.numel
    assert max(by_size[2]) <= 1.05 * sum(by_size[2]) / 2
    train_twins_with(twins)


@distributed(2)
def test_rules_settle_owners_before_anything_is_sharded() -> None:
    """`shard_model` moves nothing: no collective at all, and the balance of the whole tree."""
    model = Layers()
    with count_collectives() as log:
        shard_model(model, {OwnedLayer: {}}, granularity="param")
    assert not log.events
    assert_balanced(model)
    assert_whole(model)


@distributed(2)
def test_ranks_with_other_plans_raise_before_anything_moves() -> None:
    """The same error on both ranks, naming the parameter; then nothing has changed."""
    model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    owners = owners_of(model)
    if dist.get_rank() == 1:
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if isinstance(param, FlatShard) else None
    with pytest.raises(RuntimeError, match=r"same way; the first difference is at parameter"):
        fully_shard(model, granularity="param")
    assert owners_of(model) == owners
    model.zero_grad()
    fully_shard(model, granularity="param")
    assert_balanced(model)
    model(torch.ones(2, 5)).sum().backward()


@distributed(2)
def test_a_failed_move_leaves_everything_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective fails: no rank's values are lost, and the corrected call succeeds."""
    model = Layers()
    before = [param.detach().clone() for param in model.parameters()]
    for block in model.blocks:
        fully_shard(block, granularity="param")
    shard_class = type(get_handles(model)[0].shard)
    gather, calls = shard_class.gather_into, []

    def fail(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(self)
        if len(calls) == 2:
            raise RuntimeError("planned")
        return gather(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shard_class, "gather_into", fail)
        with pytest.raises(RuntimeError, match="planned"):
            fully_shard(model, granularity="param")
    assert len(calls) == 2
    assert type(model.inp.weight) is nn.Parameter
    assert_whole(model.blocks)
    fully_shard(model, granularity="param")
    assert_balanced(model)
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_is_slice(param, expected)


@pytest.mark.parametrize("seed", range(4))
@distributed(2, 3)
def test_an_average_has_the_owners_of_its_model_whatever_is_frozen(seed: int) -> None:
    """So that it is averaged where the values are, by any operation, and sends nothing."""
    numbers = torch.Generator().manual_seed(seed)
    plain = seeded(Layers)
    for param in plain.parameters():
        param.requires_grad_(bool(torch.rand((), generator=numbers) < 0.6))
    model, average = copy.deepcopy(plain), copy.deepcopy(plain).requires_grad_(False)
    plain_average = copy.deepcopy(average)
    for each in (model, average):
        shard_blocks(each, granularity="param")
        lazy_init(each)
    assert owners_of(average) == owners_of(model)
    with torch.no_grad():
        for each in (plain, model):
            torch._foreach_add_(list(each.parameters()), 1.0)
        for one, other in (plain_average, plain), (average, model):
            with count_collectives() as log:
                torch._foreach_lerp_(list(one.parameters()), list(other.parameters()), 0.25)
                for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
                    mine.mul_(0.5).add_(theirs, alpha=0.5)
            assert log.events == []
    for mine, expected in zip(average.parameters(), plain_average.parameters(), strict=True):
        assert_equal(mine.full_tensor(), expected.detach())


@distributed(2)
def test_state_made_before_a_move_raises() -> None:
    """Adagrad makes its state at once: clear on every rank, and nothing is stepped silently."""
    model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    optimizer = torch.optim.Adagrad(model.blocks.parameters())
    fully_shard(model, granularity="param")
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"given to another rank\..* after the outermost"):
        optimizer.step()
    later = torch.optim.Adagrad(model.parameters())
    later.step()


@distributed(2)
def test_comm_options_survive_a_move() -> None:
    """What was set on an inner unit before the outermost call."""
    model = Layers()
    for block in model.blocks:
        fully_shard(block, granularity="param")
    set_gradient_divide_factor(model.blocks, 3.0)
    fully_shard(model, granularity="param")
    settings = [handle.grads.reduction.settings for handle in get_handles(model.blocks)]
    factors = [each.gradient_divide_factor for each in settings]
    assert factors == [3.0] * len(factors)
    assert all(isinstance(param, FlatShard) for param in model.parameters())
