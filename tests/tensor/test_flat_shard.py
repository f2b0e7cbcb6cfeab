"""FlatShard: a parameter like any other to its user, and one rank's slice inside."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard.comm.trace import count_collectives
from composable_shard.layout.flat_layout import FlatLayout
from composable_shard.tensor.flat_shard import FlatShard, FlatShardOfDTensor
from composable_shard.tensor.labels import ParamLabel
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.tensor.write_guard import WriteGuard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks

pytestmark = pytest.mark.fast


class OddShapes(nn.Module):
    """Parameters of every awkward kind, of one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(7, 15, dtype=dtype))
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.empty = nn.Parameter(torch.randn(0, 3, dtype=dtype))
        self.one = nn.Parameter(torch.randn(1, dtype=dtype))
        image = torch.randn(4, 3, 2, 2, dtype=dtype)
        self.channels_last = nn.Parameter(image.to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.randn(7, dtype=dtype))


def shard_module(module: nn.Module) -> dict[torch.dtype, Tensor]:
    """Swap FlatShards into the module's parameters; return the local shards by dtype.

    All parameters of one dtype share a local shard and a write guard.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, param in module.named_parameters():
        by_dtype[param.dtype].append((name, param))
    return {dtype: _shard_params(module, named) for dtype, named in by_dtype.items()}


def _shard_params(module: nn.Module, named: list[tuple[str, nn.Parameter]]) -> Tensor:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    layout = FlatLayout.plan([param.numel() for _, param in named], world_size, 4)
    first = named[0][1]
    local_shard = torch.zeros(layout.shard_numel, dtype=first.dtype, device=first.device)
    guard = WriteGuard()
    for index, (name, param) in enumerate(named):
        start, end = layout.local_range(index, rank)
        spec = make_spec(param, layout, index, name)
        local_shard[start:end] = spec.slice(param.detach())
        shard = FlatShard(local_shard[start:end], spec, guard=guard)
        _install(module, name, nn.Parameter(shard, param.requires_grad))
    return local_shard


def make_spec(tensor: Tensor, layout: FlatLayout, index: int, name: str) -> ShardSpec:
    """Return the spec of the layout's parameter `index`, for this rank of the default group."""
    return ShardSpec(
        tensor.shape,
        tensor.shape,
        tensor.stride(),
        layout,
        index,
        dist.get_rank(),
        dist.group.WORLD.group_name,
        label=ParamLabel(name),
    )


def _install(module: nn.Module, name: str, sharded: nn.Parameter) -> None:
    param = module.get_parameter(name)
    if weakref.getweakrefs(param):  # an RNN's: it can't be swapped, but takes another object
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, sharded)
    else:
        torch.utils.swap_tensors(param, sharded)


def shard(full: Tensor, name: str = "w", *, offset: int = 3) -> FlatShard:
    """Return a FlatShard of `full`, which lies `offset` elements into a flat parameter of its own.

    The cuts fall so that two ranks hold unequal parts, and a third one the rest.
    """
    numel = full.numel()
    world_size = dist.get_world_size()
    shard_numel = max(1, -(-(offset + numel) // world_size))
    layout = FlatLayout((numel,), (offset,), world_size, world_size * shard_numel, 1)
    return FlatShard.from_full(full, make_spec(full, layout, 0, name))


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor if it is a shard, or itself."""
    return tensor.full_tensor() if isinstance(tensor, FlatShard) else tensor.detach()


def guard_of(param: Tensor) -> WriteGuard:
    """Return a parameter's write guard."""
    assert isinstance(param, FlatShard)
    assert param._guard is not None
    return param._guard


def assert_parameters_equal(sharded: nn.Module, plain: nn.Module) -> None:
    """Assert exactly equal parameters, under the same names."""
    expected = dict(plain.named_parameters())
    for name, param in sharded.named_parameters():
        assert_equal(full(param), expected.pop(name).detach(), name)
    assert not expected


DTYPES = [torch.float32, torch.bfloat16, torch.complex64]


# What it is


@distributed(1, 2, 3)
def test_full_tensor_returns_the_original() -> None:
    """Every shape, stride and dtype comes back exactly."""
    for dtype in DTYPES:
        plain, sharded = OddShapes(dtype), OddShapes(dtype)
        shard_module(sharded)
        assert_parameters_equal(sharded, plain)
        assert full(sharded.channels_last).stride() == plain.channels_last.stride()


@distributed(1, 2)
def test_a_loss_of_a_full_tensor_is_refused_by_its_backward() -> None:
    """No gradient would reach the parameter; who only reads or edits it notices nothing."""
    model = OddShapes()
    shard_module(model)
    whole = model.channels_last.full_tensor()
    values = whole.detach().clone()
    assert torch.equal(whole, values)
    whole.mul_(2)
    assert_equal(whole.detach(), 2 * values)
    with pytest.raises(RuntimeError, match=r"reached parameter '.*channels_last' at rest"):
        whole.square().sum().backward()
    assert not model.channels_last.detach().full_tensor().requires_grad
    with torch.no_grad():
        assert not model.channels_last.full_tensor().requires_grad


@distributed(2)
def test_parameter_keeps_its_logical_metadata() -> None:
    """Shape, stride, dtype and being a leaf nn.Parameter are the original's."""
    plain, sharded = OddShapes(), OddShapes()
    shard_module(sharded)
    for param, original in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, nn.Parameter)
        assert param.is_leaf
        assert param.requires_grad
        assert param.shape == original.shape
        assert param.stride() == original.stride()
        assert param.dtype is original.dtype
        assert param.numel() == original.numel()


@distributed(2, 3)
def test_slices_of_all_ranks_hold_every_element_once() -> None:
    """`to_local()` is 1-D, and the ranks' sizes add up."""
    for size in (105, 1, 0):
        numel = torch.tensor(shard(torch.randn(size)).to_local().numel())
        dist.all_reduce(numel)
        assert numel == size


@distributed(2)
def test_to_local_shares_memory_with_the_shard() -> None:
    """An in-place op on the shard is seen through its local slice."""
    sharded = shard(torch.zeros(7, 15))
    local = sharded.to_local()
    sharded.add_(1)
    assert local.dim() == 1
    assert local.eq(1).all()
    assert not local.requires_grad


@distributed(2)
def test_fresh_shard_has_only_its_own_fields() -> None:
    """No attribute appears outside the constructor."""
    sharded = shard(torch.zeros(7, 15))
    fields = {"_local", "_shard_spec", "_guard"}
    assert set(sharded.__dict__) == fields
    assert set((sharded * 2).__dict__) == fields
    full(sharded), repr(sharded), sharded.sum()
    assert set(sharded.__dict__) == fields


@distributed(2)
def test_from_full_copies() -> None:
    """The shard doesn't share memory with the tensor it was cut from."""
    whole = torch.zeros(7, 15)
    sharded = shard(whole)
    whole.fill_(1)
    assert full(sharded).eq(0).all()


@distributed(2)
def test_from_full_of_another_shape_raises() -> None:
    """The message shows both shapes and the name."""
    sharded = shard(torch.zeros(7, 15), "fc.weight")
    message = r"expected a tensor of shape \(7, 15\) for 'fc.weight', got \(15, 7\)"
    with pytest.raises(ValueError, match=message):
        FlatShard.from_full(torch.zeros(15, 7), sharded._shard_spec)


def _printed() -> tuple[str, int]:
    sharded = shard(torch.arange(6.0).view(2, 3), "fc.weight", offset=0)
    with count_collectives() as log:
        return repr(sharded), len(log.events)


def test_repr_shows_the_own_part_and_communicates_nothing() -> None:
    """Name, logical shape, dtype, which elements, and their values."""
    (first, num_first), (second, num_second) = run_ranks(2, _printed)
    common = "FlatShard('fc.weight', shape=(2, 3), dtype=torch.float32, elements "
    assert first == common + "[0, 3) of 6, local=tensor([0., 1., 2.]))"
    assert second == common + "[3, 6) of 6, local=tensor([3., 4., 5.]))"
    assert num_first == num_second == 0


@distributed(2)
def test_repr_on_one_rank_does_not_hang() -> None:
    """A parameter, its gradient and a result of an op print on rank 0 alone."""
    param = nn.Parameter(shard(torch.randn(7, 15)))
    param.grad = shard(torch.randn(7, 15))
    if dist.get_rank() == 0:
        assert "FlatShard" in f"{param} {param.grad} {param * 2}"


# Identity, attributes, conversion


@distributed(2)
def test_swap_keeps_the_parameter_object() -> None:
    """An optimizer built before sharding holds the very parameters that are sharded."""
    model = OddShapes()
    before = list(model.parameters())
    shard_module(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(isinstance(param, FlatShard) for param in before)


@distributed(2)
@pytest.mark.parametrize("convert", ["bfloat16", "double", "half", "meta_and_back", "nothing"])
def test_module_conversion_keeps_identity_and_attributes(convert: str) -> None:
    """`.to()`, `.half()` and `to_empty` leave the Parameter objects and the user's attributes."""
    model = OddShapes()
    shard_module(model)
    model.weight.is_shared = "by me"
    model.weight.grad = torch.zeros_like(model.weight)
    before = list(model.parameters())
    if convert == "meta_and_back":
        model.to("meta").to_empty(device="cpu")
    elif convert == "nothing":
        model.to(torch.float32)
    else:
        getattr(model, convert)()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model.weight.is_shared == "by me"
    assert isinstance(model.weight, nn.Parameter)
    for tensor in (model.weight, model.weight.grad):
        assert isinstance(tensor, FlatShard)
        assert tensor.dtype is tensor.to_local().dtype
        assert tensor.device.type == tensor.to_local().device.type == "cpu"


@distributed(2)
def test_conversion_that_changes_nothing_keeps_the_slice() -> None:
    """`.to()` of the present dtype leaves the very slice, which handles know by identity."""
    model = OddShapes()
    shard_module(model)
    local, guard = model.weight.to_local(), guard_of(model.weight)
    model.to(torch.float32)
    assert model.weight.to_local() is local
    assert guard_of(model.weight) is guard


@distributed(2)
def test_conversion_computes_the_values_of_the_unsharded_module() -> None:
    """`.to(bfloat16)` rounds like the unsharded module's."""
    plain, sharded = OddShapes(), OddShapes()
    shard_module(sharded)
    assert_parameters_equal(sharded.bfloat16(), plain.bfloat16())


@distributed(2)
def test_data_can_be_read_and_replaced() -> None:
    """`p.data = ...` takes a shard of the same shape or a full tensor, and nothing else."""
    param = nn.Parameter(shard(torch.zeros(7, 15)))
    param.data.add_(1)
    assert full(param).eq(1).all()
    param.data = torch.full((7, 15), 2.0)
    assert full(param).eq(2).all()
    param.data = torch.zeros_like(param, dtype=torch.bfloat16)
    assert param.dtype is param.to_local().dtype is torch.bfloat16
    param.data = shard(torch.full((7, 15), 3.0), "v", offset=1)  # of another range: gathered
    assert full(param).eq(3).all()
    with pytest.raises(ValueError, match=r"shard of the same range for 'w'\.data, got one of 'v'"):
        param.data = shard(torch.zeros(15, 7), "v", offset=1)


# Copies and files


@distributed(2)
def test_deepcopy_copies_values_and_keeps_everything_else() -> None:
    """Attributes, being a Parameter, requires_grad; not `.grad`, as torch, nor a write guard."""
    model = OddShapes()
    shard_module(model)
    model.weight.tag = ["mine"]
    model.weight.grad = torch.ones_like(model.weight)
    model.bias.requires_grad_(False)
    assert copy.deepcopy(nn.Linear(1, 1)).weight.grad is None
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_(), model.weight.tag.clear()
    assert full(twin.weight).abs().sum() > 0
    assert twin.weight.grad is None
    assert twin.weight.tag == ["mine"]
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad
    assert not twin.bias.requires_grad
    assert twin.weight._guard is None


@distributed(2)
def test_deepcopy_keeps_ties() -> None:
    """A parameter that two modules share is copied once."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    shard_module(model)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight is not first.weight


@distributed(2)
def test_deepcopy_of_a_computed_tensor_raises() -> None:
    """As torch does for plain tensors that are not leaves."""
    param = nn.Parameter(shard(torch.zeros(7, 15), "fc.weight"))
    with pytest.raises(RuntimeError, match=r"computed from 'fc.weight'.*detach\(\)"):
        copy.deepcopy(param * 2)


@distributed(2)
def test_pickles_keep_everything() -> None:
    """Values, names, attributes and being a Parameter."""
    for dtype in DTYPES:
        model = OddShapes(dtype)
        shard_module(model)
        model.weight.tag = "mine"
        loaded = pickle.loads(pickle.dumps(dict(model.named_parameters())))
        for name, param in model.named_parameters():
            assert_equal(full(loaded[name]), full(param), name)
            assert loaded[name]._shard_spec == param._shard_spec
            assert loaded[name]._shard_spec.label.fqn == name
        assert loaded["weight"].tag == "mine"
        assert isinstance(loaded["weight"], nn.Parameter)


@distributed(2)
def test_pickling_one_slice_writes_no_other() -> None:
    """The pickle of one bias is small although its unit's storage is large."""
    model = nn.Linear(300, 300)
    shard_module(model)
    assert len(pickle.dumps(model.bias)) < 10_000


@distributed(2)
def test_pickle_round_trip() -> None:
    """What pickles can travel between processes."""
    sharded = shard(torch.randn(7, 15))
    assert_equal(full(pickle.loads(pickle.dumps(sharded))), full(sharded))


@distributed(2, 3)
def test_load_state_dict_takes_full_and_sharded_values() -> None:
    """A plain module's state dict loads into a sharded one, and a sharded one's too."""
    plain, sharded = OddShapes(), OddShapes()
    shard_module(sharded)
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    sharded.load_state_dict(plain.state_dict())
    assert_parameters_equal(sharded, plain)
    saved = copy.deepcopy(sharded.state_dict())
    with torch.no_grad():
        sharded.weight.zero_()
    sharded.load_state_dict(saved)
    assert_parameters_equal(sharded, plain)


@distributed(2)
def test_tensors_of_a_dtensor_parameter_can_be_swapped() -> None:
    """A second class with DTensor's slots takes a DTensor's place and survives `.to()`."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    whole = torch.arange(35.0).view(7, 5)
    for placement in (dist.tensor.Shard(0), dist.tensor.Shard(1), dist.tensor.Replicate()):
        param = nn.Parameter(dist.tensor.distribute_tensor(whole, mesh["tp"], [placement]))
        sharded = _shard_dtensor(param, mesh)
        torch.utils.swap_tensors(param, sharded)
        assert isinstance(param, nn.Parameter)
        assert type(param) is FlatShardOfDTensor
        module = nn.ParameterDict({"w": param}).double()
        assert module["w"] is param
        assert type(param) is FlatShardOfDTensor
        assert_equal(full(param), whole.double())
        assert param.sum() == whole.sum()
        assert param.max() == 34
        assert param.norm() == whole.double().norm()
        param.mean().backward()
        assert_equal(full(param.grad), torch.full((7, 5), 1 / 35, dtype=torch.float64))


def _shard_dtensor(param: nn.Parameter, mesh: dist.device_mesh.DeviceMesh) -> nn.Parameter:
    assert isinstance(param, dist.tensor.DTensor)
    dense = param.to_local()
    spec = ShardSpec(
        param.shape,
        dense.shape,
        dense.stride(),
        FlatLayout.plan([dense.numel()], 1),
        0,
        rank=0,
        group_name=mesh.get_group("shard").group_name,
        tensor_parallel=(mesh["tp"], tuple(param.placements)),
        label=ParamLabel("w"),
    )
    return nn.Parameter(FlatShardOfDTensor(spec.slice(dense.detach()).clone(), spec))


# The write guard


@distributed(2)
def test_every_kind_of_write_is_noted() -> None:
    """In-place, copies, fills, list ops, views, masks, regions and random fills reach the guard."""
    model = OddShapes()
    shard_module(model)
    weight, bias = model.weight, model.bias
    guard = guard_of(weight)
    mask = weight.detach() > 0
    writes = [
        lambda: weight.add_(1),
        lambda: weight.data.mul_(2),
        lambda: weight.detach().zero_(),
        lambda: weight.view(-1).fill_(2),
        lambda: weight.copy_(torch.ones(7, 15)),
        lambda: weight.normal_(),
        lambda: torch.mul(weight, 2, out=weight),
        lambda: torch._foreach_add_([weight, bias], 1),
        lambda: weight[2].fill_(0),
        lambda: weight.__setitem__(mask, 0),
        lambda: setattr(weight, "data", torch.ones(7, 15)),
    ]
    with torch.no_grad():
        for index, write in enumerate(writes):
            before = guard.num_writes
            write()
            assert guard.num_writes > before, index


@distributed(2)
def test_reading_is_not_a_write() -> None:
    """Out-of-place ops, reductions, copies and printing leave the guard alone."""
    model = OddShapes()
    shard_module(model)
    guard = guard_of(model.weight)
    before = guard.num_writes
    full(model.weight), repr(model.weight), model.weight * 2, model.weight.norm()
    copy.deepcopy(model), model.state_dict(), torch.zeros_like(model.weight)
    assert guard.num_writes == before


@distributed(2)
def test_write_during_a_backward_raises_before_writing() -> None:
    """The guard's error comes before the first element has changed."""
    param = nn.Parameter(shard(torch.zeros(7, 15), "fc.weight"))
    param._guard = WriteGuard()
    param._guard.is_in_backward = True
    probe = torch.ones(1, requires_grad=True)
    with torch.no_grad():
        probe.register_hook(lambda grad: param.data.add_(1) and None)
    with pytest.raises(RuntimeError, match=r"'fc.weight' was written while a backward"):
        probe.sum().backward()
    assert full(param).eq(0).all()


# Autograd and modes


@distributed(2)
def test_inference_mode_reads_and_writes() -> None:
    """Elementwise ops, reductions and in-place ops run under inference_mode."""
    param = nn.Parameter(shard(torch.ones(7, 15)))
    with torch.inference_mode():
        assert (param * 2).sum() == 210
        param.mul_(3)
    assert full(param).eq(3).all()


@distributed(2)
def test_meta_shards_stay_meta() -> None:
    """Ops on shards without data run, communicate nothing, and need no memory."""
    with torch.device("meta"):
        model = OddShapes()
    shard_module(model)
    with torch.no_grad(), count_collectives() as log:
        model.weight.normal_().mul_(2)
        model.weight[2] = 0
        assert (torch.rand_like(model.weight) + 1).is_meta
        assert model.weight.full_tensor().is_meta
    assert not log.events


def test_the_next_write_runs_a_function_of_each_user_once() -> None:
    """A second user does not take the place of the first; one that asks again has one function."""
    guard, runs = WriteGuard(), list[str]()
    for who in ("values", "values", "copies"):
        guard.at_next_write(who, partial(runs.append, who))
    guard.note_write("p")
    guard.count_write()
    assert runs == ["values", "copies"]
