"""Optimizer state by parameter name: that of a plain optimizer, from and into any layout."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictOptions,
    count_collectives,
    fully_shard,
    get_handles,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import (
    EVERYWHERE,
    FROM_RANK0,
    FULL,
    Net,
    Twins,
    every_granularity,
    rank_input,
    shard_blocks,
    shard_root,
)


class TrainedModel(Net):
    """A frozen layer, a tie, a parameter that gets no gradient, and one without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[2].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return three groups, one of them empty, with options of their own."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[:2], "lr": 0.01}, {"params": []}, {"params": params[2:]}]


_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"amsgrad": True}),
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9}),
    "nadam": (optim.NAdam, {}),
    "adagrad": (optim.Adagrad, {}),
    "rmsprop": (optim.RMSprop, {"centered": True}),
    "asgd": (optim.ASGD, {}),
    "rprop": (optim.Rprop, {}),
}


def _trained_twins(
    kind: str, shard: Callable[..., object], make: Any = TrainedModel, groups: Any = param_groups
) -> tuple[Twins, list[Any]]:
    twins = Twins(make, shard)
    build, options = _KINDS[kind]
    optimizers = [build(groups(model), lr=0.05, **options) for model in twins]
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 5, step=step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return twins, optimizers


def expected_state(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the state of a plain optimizer by name, in the optimizer's order."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)]: state for param, state in optimizer.state.items()}


def assert_same_state(
    found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]
) -> None:
    """Assert names, order, types and values; shards are compared as a whole."""
    assert list(found) == list(expected)
    for fqn, state in expected.items():
        assert list(found[fqn]) == list(state), fqn
        for name, value in state.items():
            other = found[fqn][name]
            if isinstance(other, FlatShard):
                other = other.full_tensor()
            assert type(other) is type(value), (fqn, name)
            if isinstance(value, Tensor):
                assert_equal(other, value, f"{name} of {fqn}")
            else:
                assert other == value


def _owned(model: nn.Module) -> None:
    shard_blocks(model, granularity="param")


def _mixed(model: nn.Module) -> None:
    shard_blocks(model, granularity=every_granularity)


def _zero1(model: nn.Module) -> None:
    fully_shard(model, strategy=ShardingStrategy.SHARD_OPTIM)


# --- S2.7 ---


@pytest.mark.parametrize(
    ("kind", "shard"),
    [*((kind, shard_blocks) for kind in _KINDS), ("adagrad", _owned), ("adamw", _mixed)],
)
@distributed(2, on_device=True)
def test_s2_7_state_is_that_of_a_plain_optimizer(kind: str, shard: Callable[..., object]) -> None:
    """Frozen, tied, unused and 0-d parameters, groups; whole on the first rank, and on all."""
    twins, optimizers = _trained_twins(kind, shard)
    expected = expected_state(twins.plain, optimizers[0])
    plain = torch_state_dict.get_optimizer_state_dict(twins.plain, optimizers[0])
    for options in (FULL, EVERYWHERE, StateDictOptions()):
        found = get_optimizer_state_dict(twins.sharded, optimizers[1], options=options)
        if options is FULL and dist.get_rank():
            assert found == {}
            continue
        assert_same_state(found["state"], expected)
        assert found["param_groups"] == plain["param_groups"]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
@distributed(2)
def test_s2_7_state_loads_into_a_plain_optimizer_by_torch(kind: str) -> None:
    """By torch's own function, into an optimizer that never stepped."""
    twins, optimizers = _trained_twins(
        kind, shard_blocks, Net, lambda model: list(model.parameters())
    )
    saved = get_optimizer_state_dict(twins.sharded, optimizers[1], options=EVERYWHERE)
    build, options = _KINDS[kind]
    fresh = build(twins.plain.parameters(), lr=0.5, **options)
    torch_state_dict.set_optimizer_state_dict(twins.plain, fresh, saved)
    expected = expected_state(twins.plain, optimizers[0])
    assert_same_state(expected_state(twins.plain, fresh), expected)
    assert fresh.param_groups[0]["lr"] == 0.05


def _state_after_two_steps(kind: str) -> Any:
    twins, optimizers = _trained_twins(kind, shard_blocks)
    return (
        get_model_state_dict(twins.sharded, options=FULL),
        get_optimizer_state_dict(twins.sharded, optimizers[1], options=FULL),
    )


def _load_on_rank0(kind: str, saved: Any, shard: Callable[..., object]) -> None:
    """Load on rank 0 into a fresh optimizer, and compare all that it holds then."""
    torch.manual_seed(1)
    model = TrainedModel()
    shard(model)
    build, options = _KINDS[kind]
    optimizer = build(param_groups(model), lr=0.5, **options)
    given = saved if dist.get_rank() == 0 else ({}, {})
    set_model_state_dict(model, given[0], options=FROM_RANK0)
    set_optimizer_state_dict(model, optimizer, given[1], options=FROM_RANK0)
    found = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    assert_same_state(found["state"], saved[1]["state"])
    assert found["param_groups"] == saved[1]["param_groups"]
    for name, value in get_model_state_dict(model, options=EVERYWHERE).items():
        assert_equal(value, saved[0][name], name)


@pytest.mark.parametrize("kind", ["nadam", "sgd"])
def test_s2_7_state_comes_back_at_any_world_size(kind: str) -> None:
    """Of two ranks into one, three and four, from the first rank, into another layout."""
    saved = run_ranks(2, _state_after_two_steps, kind)[0]
    for world_size, shard in ((1, shard_root), (3, _owned), (4, _mixed)):
        run_ranks(world_size, _load_on_rank0, kind, saved, shard)


# --- other layouts ---


@distributed(2)
def test_s3_6_main_shards_and_their_state_are_fp32() -> None:
    """A bf16 model with fp32 main parameters: both dicts are fp32, and resume exactly."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_dtype=torch.float32)

    def make() -> tuple[nn.Module, Any]:
        model = Net().to(torch.bfloat16)
        shard_blocks(model, strategy=ShardingStrategy.SHARD_OPTIM, mp_policy=policy)
        return model, optim.AdamW(model.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: Any, number: int) -> Tensor:
        loss = model(rank_input(4, 5, step=number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer = make()
    step(model, optimizer, 0)
    values = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert all(value.dtype == torch.float32 for value in values.values())
    other, fresh = make()
    set_model_state_dict(other, values, options=FROM_RANK0)
    set_optimizer_state_dict(other, fresh, state, options=FROM_RANK0)
    for number in range(1, 4):
        assert_equal(step(other, fresh, number), step(model, optimizer, number), "loss")


@distributed(2)
def test_loaded_state_is_in_memory_of_its_own() -> None:
    """Two optimizers must not step one state; but what is an optimizer's own is not copied."""
    model = Net()
    shard_blocks(model)
    optimizer, other = (optim.AdamW(model.parameters()) for _ in range(2))
    model(rank_input(4, 5)).square().mean().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, other, saved)
    for param, state in optimizer.state.items():
        for name, value in state.items():
            found = other.state[param][name]
            assert found is not value
            found.zero_()
            assert value.abs().sum() > 0
    kept = {id(value) for state in optimizer.state.values() for value in state.values()}
    set_optimizer_state_dict(model, optimizer, saved)
    assert kept == {id(value) for state in optimizer.state.values() for value in state.values()}


@distributed(2)
def test_full_state_does_not_go_on_with_the_optimizer() -> None:
    """Nor do full values with the model: what is small, and what no unit manages, is copied."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fully_shard(model)
    optimizer = optim.AdamW(model.parameters())

    def step() -> None:
        model(rank_input(4, 3)).square().mean().backward()
        optimizer.step()

    step()
    state = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    values = get_model_state_dict(model, options=EVERYWHERE)
    before = copy.deepcopy((state["state"], values))
    step()
    assert_same_state(state["state"], before[0])
    for name, value in values.items():
        assert_equal(value, before[1][name], name)


@pytest.mark.fast
@distributed(2)
def test_torchs_own_functions_give_the_same() -> None:
    """With default options, which return shards; and they take them back."""
    twins, optimizers = _trained_twins(
        "adamw", shard_blocks, Net, lambda model: list(model.parameters())
    )
    model, optimizer = twins.sharded, optimizers[1]
    found = torch_state_dict.get_optimizer_state_dict(model, optimizer)
    assert_same_state(found["state"], expected_state(twins.plain, optimizers[0]))
    mine = get_optimizer_state_dict(model, optimizer)
    assert found["param_groups"] == mine["param_groups"]
    assert list(torch_state_dict.get_model_state_dict(model)) == list(get_model_state_dict(model))
    torch_state_dict.set_optimizer_state_dict(model, optimizer, found)
    assert_same_state(
        get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"],
        expected_state(twins.plain, optimizers[0]),
    )


@distributed(2)
def test_several_optimizers_share_one_dict() -> None:
    """Each gets its own back."""
    model = Net()
    shard_blocks(model)
    params = list(model.parameters())

    def build() -> list[Any]:
        return [optim.AdamW(params[:3]), optim.SGD(params[3:], lr=0.1, momentum=0.9)]

    optimizers = build()
    model(rank_input(4, 5)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    saved = get_optimizer_state_dict(model, optimizers)
    fresh = build()
    set_optimizer_state_dict(model, fresh, saved)
    assert_same_state(
        get_optimizer_state_dict(model, fresh, options=EVERYWHERE)["state"],
        get_optimizer_state_dict(model, optimizers, options=EVERYWHERE)["state"],
    )


@distributed(2)
def test_full_state_takes_one_gather_per_flat_parameter_and_kind() -> None:
    """And broadcasts likewise; sharded state takes one message of 31 bytes alone."""
    model = Net()
    shard_blocks(model)
    optimizer = optim.AdamW(model.parameters())
    model(rank_input(4, 5)).square().mean().backward()
    optimizer.step()
    num_handles = len(get_handles(model))
    with count_collectives() as log:
        saved = get_optimizer_state_dict(model, optimizer, options=FULL)
    large = [event for event in log.events if event.nbytes > 100]  # without messages
    assert [event.kind for event in large] == ["all_gather"] * 2 * num_handles
    with count_collectives() as log:
        set_optimizer_state_dict(model, optimizer, saved, options=FROM_RANK0)
    assert log.count("broadcast") == 2 * num_handles
    with count_collectives() as log:
        get_optimizer_state_dict(model, optimizer)
    assert [event.kind for event in log.events] == ["all_gather"]
    assert sum(event.nbytes for event in log.events) < 150


@distributed(2)
def test_state_that_only_an_owner_has_reaches_all() -> None:
    """Whole parameters on one rank: shards are empty elsewhere, other tensors are fetched."""
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rows = torch.arange(20.0)
    if dist.get_rank() == 1:
        optimizer.state[model.weight] = {"step": torch.tensor(3.0), "rows": rows, "count": 2}
    found = get_optimizer_state_dict(model, optimizer)["state"]["weight"]
    assert found["count"] == 2
    assert_equal(found["step"], torch.tensor(3.0))
    full = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"]["weight"]
    assert_equal(full["rows"], rows)
    saved = {"state": {"weight": full}, "param_groups": [{"lr": 0.2, "params": ["weight"]}]}
    set_optimizer_state_dict(
        model, optimizer, saved if dist.get_rank() == 0 else {}, options=FROM_RANK0
    )
    assert_equal(optimizer.state[model.weight]["rows"], rows)
    assert optimizer.param_groups[0]["lr"] == 0.2


def _whole_params(model: nn.Module, **options: Any) -> None:
    shard_blocks(model, granularity="param", **options)


@pytest.mark.parametrize("how", ["sharded", "full", "from rank 0"])
@distributed(2)
def test_state_of_whole_parameters_is_its_owners(how: str) -> None:
    """What the others hold of it, from a load perhaps, is not asked: nobody steps it there."""
    twins, optimizers = _trained_twins("nadam", _whole_params)
    given = {"sharded": StateDictOptions(), "full": EVERYWHERE, "from rank 0": FULL}
    saved = get_optimizer_state_dict(twins.sharded, optimizers[1], options=given[how])
    if saved:
        assert_same_state(saved["state"], expected_state(twins.plain, optimizers[0]))
    torch.manual_seed(1)
    model = TrainedModel()
    _whole_params(model)
    fresh = optim.NAdam(param_groups(model), lr=0.5)
    options = FROM_RANK0 if how == "from rank 0" else StateDictOptions()
    set_model_state_dict(model, get_model_state_dict(twins.sharded))
    set_optimizer_state_dict(model, fresh, saved, options=options)
    for param in model.parameters():
        if not param.to_local().numel():
            assert not fresh.state[param]
    for optimizer, twin in ((optimizers[0], twins.plain), (fresh, model)):
        twin(torch.ones(4, 5)).square().mean().backward()
        if twin is model:
            for param in model.parameters():
                if not param.to_local().numel():
                    param.grad = None
        optimizer.step()
    full = get_optimizer_state_dict(model, fresh, options=FULL)
    if dist.get_rank() == 0:
        assert_same_state(full["state"], expected_state(twins.plain, optimizers[0]))


@distributed(2)
def test_state_of_a_stale_copy_is_not_read() -> None:
    """A rank that does not own a parameter may hold state of it all the same."""
    model = nn.Linear(3, 3, bias=False)
    fully_shard(model, granularity="param")
    optimizer = optim.AdamW(model.parameters())
    is_owner = bool(model.weight.to_local().numel())
    optimizer.state[model.weight] = {"step": torch.tensor(5.0 if is_owner else 2.0)}
    for options in (StateDictOptions(), EVERYWHERE):
        found = get_optimizer_state_dict(model, optimizer, options=options)
        assert_equal(found["state"]["weight"]["step"], torch.tensor(5.0))


@pytest.mark.fast
@pytest.mark.parametrize("is_saved_sharded", [True, False])
@distributed(2)
def test_state_moves_between_sharded_and_plain_parameters(is_saved_sharded: bool) -> None:
    """A parameter that one model's units manage, and the other's leave alone."""

    def build(is_sharded: bool) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Net()
        fully_shard(model, ignored_params=set() if is_sharded else {model.out.weight})
        return model, optim.NAdam(model.parameters())

    model, optimizer = build(is_saved_sharded)
    for param in model.parameters():
        param.grad = param.detach().clone()
    optimizer.step()
    other, fresh = build(not is_saved_sharded)
    saved = get_optimizer_state_dict(model, optimizer)
    wrong = copy.deepcopy(saved)
    if dist.get_rank() == 1:
        wrong["state"]["out.weight"]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'exp_avg' of 'out\.weight' to have shape \(3, 15\)"):
        set_optimizer_state_dict(other, fresh, wrong)
    set_optimizer_state_dict(other, fresh, saved)
    expected = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"]
    found = get_optimizer_state_dict(other, fresh, options=EVERYWHERE)["state"]
    assert_same_state(found, expected)
    # Without a group of ranks too.
    plain = Net()
    fresh = optim.NAdam(plain.parameters())
    set_optimizer_state_dict(plain, fresh, saved)
    assert_same_state(expected_state(plain, fresh), expected)


@distributed(4)
def test_the_first_rank_gives_to_a_partly_tensor_parallel_model() -> None:
    """What the tensor-parallel mesh does not cut goes along it too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> tuple[nn.Module, Any]:
        model = Net()
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        shard_blocks(model, mesh=mesh["dp"])
        return model, optim.AdamW(model.parameters())

    torch.manual_seed(0)
    plain = Net()
    expected = optim.AdamW(plain.parameters())
    torch.manual_seed(1)
    model, optimizer = build()
    values = plain.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, values, options=FROM_RANK0)
    for each, its_model in ((expected, plain), (optimizer, model)):
        for param in its_model.parameters():
            param.grad = torch.ones_like(param)
        each.step()
    found = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert bool(found) == bool(state) == (dist.get_rank() == 0)
    for name, value in found.items():
        assert_equal(value, plain.state_dict()[name], name)
    if state:
        assert_same_state(state["state"], expected_state(plain, expected))
    other, fresh = build()
    set_optimizer_state_dict(other, fresh, state, options=FROM_RANK0)
    again = get_optimizer_state_dict(other, fresh, options=EVERYWHERE)
    assert_same_state(again["state"], expected_state(plain, expected))


# --- what is refused ---


@distributed(2)
def test_only_whole_state_is_sent_from_the_first_rank() -> None:
    """It has but a part of a shard."""
    model = Net()
    shard_blocks(model)
    optimizer = optim.AdamW(model.parameters())
    model(rank_input(4, 5)).square().mean().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"'exp_avg' of '.*' to be a whole plain tensor"):
        set_optimizer_state_dict(model, optimizer, saved, options=FROM_RANK0)


def _without_group(saved: Any) -> None:
    saved["param_groups"][0]["params"].remove("inp.bias")


def _with_stranger(saved: Any) -> None:
    saved["state"]["head.weight"] = {"step": torch.tensor(1.0)}


def _with_wrong_state_shape(saved: Any) -> None:
    saved["state"]["out.weight"]["exp_avg"] = torch.zeros(2, 2)


def _by_number(saved: Any) -> None:
    del saved["param_groups"]


_WRONG = {
    "missing": (_without_group, r"missing \['inp\.bias'\]"),
    "unexpected": (_with_stranger, r"unexpected \['head\.weight'\]"),
    "shape": (_with_wrong_state_shape, r"'exp_avg' of 'out\.weight' to have shape \(3, 15\)"),
    "format": (_by_number, r"by parameter name"),
}


@pytest.mark.parametrize("where", ["rank 1", "from rank 0"])
@pytest.mark.parametrize("wrong", list(_WRONG))
@distributed(2)
def test_wrong_state_raises_on_all_ranks_before_anything_changes(wrong: str, where: str) -> None:
    """Naming it; the right one works afterwards."""
    model = Net()
    shard_blocks(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    model(rank_input(4, 5)).square().mean().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    before = copy.deepcopy(saved)
    options = FROM_RANK0 if where == "from rank 0" else StateDictOptions()
    change, message = _WRONG[wrong]
    given = copy.deepcopy(saved)
    if where != "rank 1" or dist.get_rank() == 1:
        change(given)
    with pytest.raises(ValueError, match=message):
        set_optimizer_state_dict(model, optimizer, given, options=options)
    found = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    assert_same_state(found["state"], before["state"])
    set_optimizer_state_dict(model, optimizer, saved, options=options)


@distributed(2)
def test_containers_and_state_of_no_parameter_come_back() -> None:
    """Lists, deques and dicts of shards; state under another key; by whole and sharded dicts."""
    model = Net()
    shard_blocks(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    wide = model.out.weight
    full = torch.arange(float(wide.numel())).view(wide.shape)
    values = torch.zeros_like(wide).copy_(full)
    optimizer.state[wide] = {"queue": deque([values], maxlen=3), 0: {"m": [values, 2, None]}}
    optimizer.state["k"] = torch.tensor([7])  # type: ignore[index] # as MADGRAD does
    for options in (StateDictOptions(), EVERYWHERE):
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        fresh = optim.SGD(model.parameters(), lr=0.1)
        set_optimizer_state_dict(model, fresh, saved)
        found = fresh.state[wide]
        assert found["queue"].maxlen == 3
        assert found[0]["m"][1:] == [2, None]
        for each in (found["queue"][0], found[0]["m"][0]):
            assert torch.equal(each.full_tensor(), full)
        assert fresh.state["k"].item() == 7  # type: ignore[index]


@distributed(2)
def test_state_made_ahead_changes_no_step() -> None:
    """Between backward and step and before; AdamW with weight decay."""
    found = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = Net()
        shard_blocks(model)
        optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        options = StateDictOptions(init_optimizer_state=True)
        if saves:
            assert get_optimizer_state_dict(model, optimizer, options=options)["state"]
        model(torch.ones(4, 5)).square().mean().backward()
        if saves:
            get_optimizer_state_dict(model, optimizer, options=options)
        optimizer.step()
        found.append([param.full_tensor() for param in model.parameters()])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@distributed(2)
def test_plain_dicts_by_number_and_by_prefixed_name_load() -> None:
    """As plain torch and DDP write them; other names warn."""
    plain = Net()
    first = optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(4, 5)).square().mean().backward()
    first.step()
    model = Net()
    shard_blocks(model)
    given = first.state_dict()
    names = [name for name, _ in plain.named_parameters()]
    by_name = {
        "state": {f"module.{names[number]}": value for number, value in given["state"].items()},
        "param_groups": [{**given["param_groups"][0], "params": [f"module.{n}" for n in names]}],
    }
    for each in (given, by_name):
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        set_optimizer_state_dict(model, optimizer, each)
        moments = optimizer.state[model.out.weight]["exp_avg"].full_tensor()
        assert torch.equal(moments, first.state[plain.out.weight]["exp_avg"])
    strange = {"state": {}, "param_groups": [{**given["param_groups"][0], "params": ["other"]}]}
    with pytest.warns(UserWarning, match="No state is loaded"):
        set_optimizer_state_dict(model, optimizer, strange, options=StateDictOptions(strict=False))


@distributed(2)
def test_strangers_and_odd_state_are_refused_by_name() -> None:
    """Another model's parameters; an object; ranks that stepped differently."""
    model = Net()
    shard_blocks(model)
    stranger = optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not among them"):
        get_optimizer_state_dict(model, stranger)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.out.bias] = {"projector": object()}
    with pytest.raises(NotImplementedError, match=r"'projector' of 'out\.bias' is a builtins\.obj"):
        get_optimizer_state_dict(model, optimizer)
    optimizer.state.clear()
    if dist.get_rank() == 0:
        optimizer.state[model.inp.weight] = {"exp_avg": torch.zeros_like(model.inp.weight)}
    with pytest.raises(RuntimeError, match=r"'exp_avg' of 'inp\.weight' is not on all ranks"):
        get_optimizer_state_dict(model, optimizer)
