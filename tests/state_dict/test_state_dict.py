"""Model state dicts: sharded and full, out and in, and what is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
    count_collectives,
    fully_shard,
    get_handles,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    register_flat_param,
    register_orig_params,
    reshard,
    save_checkpoint,
    set_model_state_dict,
    set_optimizer_state_dict,
    shard_optimizer_state,
    unshard,
    unshard_params,
)
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import device, distributed
from tests.programs.models import (
    EVERYWHERE,
    FROM_RANK0,
    FULL,
    Net,
    Tied,
    assert_holds,
    every_granularity,
    net_without_first_rank,
    rank_input,
    seeded,
    shard_blocks,
)


class Buffered(Tied):
    """With a buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


_LAYOUTS: dict[str, Callable[[nn.Module], object]] = {
    "blocks": shard_blocks,
    "one unit": fully_shard,
    "kept": lambda model: shard_blocks(model, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "mixed": lambda model: shard_blocks(model, granularity=every_granularity),
    "zero1": lambda model: fully_shard(model, strategy=ShardingStrategy.SHARD_OPTIM),
    "replicated": lambda model: fully_shard(model, strategy=ShardingStrategy.NO_SHARD),
    "bf16": lambda model: shard_blocks(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "offloaded": lambda model: shard_blocks(model, offload_policy=OffloadPolicy(params=True)),
    # Frozen: for trainable parameters outside of units there is a warning.
    "inner only": lambda model: fully_shard(model.requires_grad_(False).blocks[2]),
}


# --- what a model gives ---


@pytest.mark.parametrize("layout", list(_LAYOUTS))
@distributed(2)
def test_state_dict_has_shards_under_the_original_names_in_order(layout: str) -> None:
    """And inside a scope, plain full tensors."""
    model = seeded(Buffered)
    _LAYOUTS[layout](model)
    num_places = sum(len(entry.slots) for h in get_handles(model) for entry in h.entries)
    found = model.state_dict()
    assert_holds(found, seeded(Buffered))
    assert sum(type(value) is FlatShard for value in found.values()) >= num_places
    with unshard_params(model):
        scope = model.state_dict()
        assert all(type(value) is Tensor for value in scope.values())
        assert_holds(scope, seeded(Buffered))


@distributed(2)
def test_state_dict_of_unsharded_units_has_shards() -> None:
    """What unshard shows is freed by reshard; a state dict must outlive it."""
    model = seeded(Buffered)
    shard_blocks(model)
    unshard(model, recurse=True)
    found = model.state_dict()
    reshard(model, recurse=True)
    assert_holds(found, seeded(Buffered))


@pytest.mark.parametrize("layout", ["blocks", "zero1", "replicated", "bf16"])
@distributed(2)
def test_full_state_dict_takes_one_gather_per_flat_parameter(layout: str) -> None:
    """Whether the first rank alone keeps it, or all do."""
    model = seeded(Buffered)
    _LAYOUTS[layout](model)
    num_handles = len([handle for handle in get_handles(model) if handle.is_sharded])
    with count_collectives() as log:
        found = get_model_state_dict(model, options=FULL)
    assert [event.kind for event in log.events] == ["all_gather"] * num_handles
    if dist.get_rank() == 0:
        assert_holds(found, seeded(Buffered))
        assert all(type(value) is Tensor for value in found.values())
    else:
        assert found == {}
    with count_collectives() as log:
        assert_holds(get_model_state_dict(model, options=EVERYWHERE), seeded(Buffered))
    assert [event.kind for event in log.events] == ["all_gather"] * num_handles


@distributed(2)
def test_full_state_dict_of_kept_parameters_is_free() -> None:
    """They are there, until a step writes the shards."""
    model = seeded(Net)
    shard_blocks(model, strategy=ShardingStrategy.SHARD_GRAD_OP)
    with torch.no_grad():
        model(rank_input(4, 5))
    with count_collectives() as log:
        found = get_model_state_dict(model, options=FULL)
    assert log.events == []
    assert dist.get_rank() or list(found) == list(seeded(Net).state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    found = get_model_state_dict(model, options=EVERYWHERE)
    expected = {name: value + 1 for name, value in seeded(Net).state_dict().items()}
    for name, value in found.items():
        assert_equal(value, expected[name], name)


class _OddlyStored(Buffered):
    """With parameters that lie in memory in other ways, or have other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        odd = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
        odd += [torch.randn(7, 5).t(), torch.randn(4, 3, dtype=torch.complex64), torch.ones(())]
        odd += [torch.ones(0, 3), torch.arange(70.0).half()]
        self.odd = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in odd)


@distributed(2, 3)
def test_full_values_are_in_memory_of_their_own() -> None:
    """Of their size, and nobody else's."""
    for layout in ("blocks", "kept", "mixed", "bf16", "offloaded"):
        model = seeded(_OddlyStored)
        _LAYOUTS[layout](model)
        if layout == "kept":
            unshard(model, recurse=True)
            reshard(model, recurse=True)
        found = get_model_state_dict(model, options=FULL)
        everywhere = get_model_state_dict(model, options=EVERYWHERE)
        if dist.get_rank() == 0:
            assert_holds(found, seeded(_OddlyStored))
        assert_holds(everywhere, seeded(_OddlyStored))
        for values in (found, everywhere):
            storages = {each.data_ptr(): each.untyped_storage() for each in values.values()}
            # One is empty, and two are tied.
            assert len(storages) == (len(values) - 1 if values else 0)
            for value in values.values():
                assert value.untyped_storage().nbytes() == value.nbytes
                value.zero_()
        assert_holds(get_model_state_dict(model, options=EVERYWHERE), seeded(_OddlyStored))


@pytest.mark.parametrize(("dtype", "num_units"), [(None, 13), (torch.bfloat16, 7)])
@distributed(2)
def test_full_state_dict_holds_one_unit_besides_what_it_returns(
    dtype: torch.dtype | None, num_units: int
) -> None:
    """Of twelve equal units the first rank holds the result and one more; the others one."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))))
    for layer in model:
        fully_shard(layer)
    unit_nbytes = 64 * 64 * 4
    options = StateDictOptions(full_state_dict=True, dtype=dtype)
    with peak_bytes() as memory:
        found = get_model_state_dict(model, options=options)
    assert memory.peak <= (num_units if dist.get_rank() == 0 else 1) * unit_nbytes + 4096
    assert len(found) == (12 if dist.get_rank() == 0 else 0)


@pytest.mark.fast
@distributed(2)
def test_options_cast() -> None:
    """`dtype` leaves integers."""
    model = seeded(Buffered)
    model.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
    shard_blocks(model)
    options = StateDictOptions(full_state_dict=True, rank0_only=False, dtype=torch.bfloat16)
    found = get_model_state_dict(model, options=options)
    assert {key for key, value in found.items() if value.dtype != torch.bfloat16} == {"steps"}
    cast = get_model_state_dict(model, options=StateDictOptions(dtype=torch.float64))
    assert_equal(cast["inp.weight"].full_tensor(), seeded(Buffered).inp.weight.detach().double())


# --- what a model takes ---


def _full_state_dict(model: nn.Module) -> dict[str, Any]:
    return model.state_dict()


def _sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    shard_blocks(model)
    return model.state_dict()


def _sharded_as_one(model: nn.Module) -> dict[str, Any]:
    fully_shard(model)
    return model.state_dict()


def _of_fsdp2(model: nn.Module) -> dict[str, Any]:
    return fsdp2(model).state_dict()


@pytest.mark.parametrize("layout", ["blocks", "kept"])
@distributed(2)
def test_load_state_dict_of_the_module_itself_works(layout: str) -> None:
    """Sharded and whole, with the next forward after it; nothing of the given dict changes."""
    model, values = seeded(Buffered, seed=1), seeded(Buffered).state_dict()
    _LAYOUTS[layout](model)
    other = seeded(Buffered)
    fully_shard(other)
    for given in (values, other.state_dict()):
        before = dict(given)
        assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
        assert all(given[name] is before[name] for name in before)
        assert_holds(model.state_dict(), seeded(Buffered))
        with torch.no_grad():
            assert_equal(model(rank_input(4, 5)), seeded(Buffered)(rank_input(4, 5)))
            for param in model.parameters():
                param.zero_()


_GIVEN = {
    "full": _full_state_dict,
    "same": _sharded_state_dict,
    "other": _sharded_as_one,
    "fsdp2": _of_fsdp2,
}


_FORMS = [("full", layout) for layout in _LAYOUTS]
_FORMS += [(given, layout) for given in _GIVEN for layout in ("blocks", "zero1")]


@pytest.mark.parametrize(("given", "layout"), list(dict.fromkeys(_FORMS)))
@distributed(2, on_device=True)
def test_load_takes_values_of_any_form(layout: str, given: str) -> None:
    """Whole, of the same layout, of another, DTensors; the next forward computes with them."""
    if given == "fsdp2":
        values = _GIVEN[given](seeded(Net))
        model, plain = seeded(Net, seed=1), seeded(Net)
    else:
        values = _GIVEN[given](seeded(Buffered))
        model, plain = seeded(Buffered, seed=1), seeded(Buffered)
    _LAYOUTS[layout](model)
    x = rank_input(4, 5)
    with torch.no_grad():
        model(x)
    # Only this function knows of what is outside of units.
    set_model_state_dict(model, values)
    assert_holds(model.state_dict(), plain)
    if layout != "bf16":
        with torch.no_grad():
            assert_equal(model(x), plain(x))


@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("layout", ["blocks", "offloaded"])
@distributed(2)
def test_assign_takes_the_values_over(layout: str, is_meta: bool) -> None:
    """The parameters stay the objects that the optimizer holds; from the meta device too."""
    model = seeded(Net, seed=1)
    if is_meta:
        model = model.to("meta")
    _LAYOUTS[layout](model)
    params = list(model.parameters())
    model.load_state_dict(seeded(Net).state_dict(), assign=True)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert_holds(model.state_dict(), seeded(Net))
    optimizer = torch.optim.SGD(params, lr=0.1)
    model(rank_input(4, 5)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["out.bias"].full_tensor(), seeded(Net).out.bias)


_PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((2,), (Shard(0),)),
    "columns": ((2,), (Shard(-1),)),
    "copies": ((2,), (Replicate(),)),
    "hybrid": ((1, 2), (Replicate(), Shard(0))),
    "term": ((2,), (Partial(),)),
}


@pytest.mark.parametrize("where", list(_PLACEMENTS))
@distributed(2)
def test_values_of_distribute_tensor_are_taken(where: str) -> None:
    """For parameters, also by assignment, also on meta, and for optimizer state; by value."""
    shape, placements = _PLACEMENTS[where]
    mesh = init_device_mesh("cpu", shape)

    def spread(value: Tensor) -> Tensor:
        if where == "term":  # half on each rank
            return DTensor.from_local(value / 2, mesh, placements)
        return distribute_tensor(value, mesh, placements)

    whole = seeded(Net).state_dict()
    for is_meta, assign in ((False, False), (False, True), (True, True)):
        model = seeded(Net, seed=1).to("meta" if is_meta else "cpu")
        shard_blocks(model)
        params = list(model.parameters())
        given = {name: nn.Parameter(spread(value)) for name, value in whole.items()}
        model.load_state_dict(given, assign=assign)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert_holds(model.state_dict(), seeded(Net))
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    model(rank_input(4, 5)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    expected = {name: 2 * each["momentum_buffer"] for name, each in state["state"].items()}
    for name, values in state["state"].items():
        values["momentum_buffer"] = spread(expected[name])
    set_optimizer_state_dict(model, optimizer, state)
    found = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"]
    assert_equal({name: each["momentum_buffer"] for name, each in found.items()}, expected)


@distributed(2)
def test_state_that_is_a_dtensor_is_refused_by_name() -> None:
    """Put into an optimizer by hand."""
    model = seeded(Net)
    shard_blocks(model)
    optimizer = torch.optim.Adagrad(model.parameters())
    rows = distribute_tensor(torch.ones(3, 15), init_device_mesh("cpu", (2,)), [Shard(0)])
    optimizer.state[model.out.weight]["sum"] = rows
    before = {param: dict(state) for param, state in optimizer.state.items()}
    with pytest.raises(ValueError, match=r"'out.weight' is a DTensor.* set_optimizer_state_dict"):
        shard_optimizer_state(optimizer)
    assert all(optimizer.state[param] == state for param, state in before.items())


@distributed(2)
def test_assigned_values_are_gathered_anew() -> None:
    """Where full parameters are kept, too: no op tells of an assignment."""
    model, plain, x = seeded(Net, seed=1), seeded(Net), rank_input(4, 5)
    shard_blocks(model, strategy=ShardingStrategy.SHARD_GRAD_OP)
    with torch.no_grad():
        model(x)
        model.load_state_dict(plain.state_dict(), assign=True)
        assert_equal(model(x), plain(x))


@pytest.mark.parametrize("layout", list(_LAYOUTS))
@distributed(2, on_device=True)
def test_first_rank_alone_has_the_dict(layout: str) -> None:
    """Others pass none; one broadcast for each flat parameter and each other tensor."""
    model = seeded(Buffered, seed=1)
    _LAYOUTS[layout](model)
    given = seeded(Buffered).state_dict() if dist.get_rank() == 0 else {}
    with count_collectives() as log:
        set_model_state_dict(model, given, options=FROM_RANK0)
    values = model.state_dict().values()
    others = [each for each in values if type(each) is Tensor]
    assert log.count("broadcast") == len(get_handles(model)) + len(others)
    assert_holds(model.state_dict(), seeded(Buffered))


@distributed(4, on_device=True)
def test_full_values_cross_a_mesh_with_copies() -> None:
    """(replicate, shard): out of the first copy, into both."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    source, target = seeded(Buffered), seeded(Buffered, seed=1)
    fully_shard(source, mesh=mesh)
    shard_blocks(target, mesh=mesh)
    found = get_model_state_dict(source, options=FULL)
    assert bool(found) == (dist.get_rank() == 0)
    set_model_state_dict(target, found, options=FROM_RANK0)
    assert_holds(target.state_dict(), seeded(Buffered))


# --- what is refused ---


def _missing(values: dict[str, Any]) -> None:
    del values["blocks.1.down.bias"]


def _unexpected(values: dict[str, Any]) -> None:
    values["head.weight"] = torch.zeros(1)


def _with_wrong_shape(values: dict[str, Any]) -> None:
    values["inp.weight"] = torch.zeros(5, 15)


def _without_values(values: dict[str, Any]) -> None:
    values.clear()


_WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing": (_missing, r"blocks\.1\.down\.bias"),
    "unexpected": (_unexpected, r"head\.weight"),
    "shape": (_with_wrong_shape, r"inp\.weight"),
    # As on the ranks that a full state dict is not gathered on.
    "empty": (_without_values, r"inp\.weight"),
}


_PLACES = [("blocks", "all ranks"), ("blocks", "rank 1"), ("inner only", "rank 1")]


@pytest.mark.parametrize("wrong", list(_WRONG))
@pytest.mark.parametrize(("layout", "where"), _PLACES)
@distributed(2)
def test_wrong_dict_raises_on_all_ranks_before_anything_changes(
    layout: str, wrong: str, where: str
) -> None:
    """The same text on all of them, naming the key; a right one works afterwards."""
    model = seeded(Net)
    _LAYOUTS[layout](model)
    change, key = _WRONG[wrong]
    values = seeded(Net, seed=1).state_dict()
    if where == "all ranks" or dist.get_rank() == 1:
        change(values)
    load: Any = model.load_state_dict
    if layout == "inner only":
        load = functools.partial(set_model_state_dict, model)
    with pytest.raises(RuntimeError, match=key) as caught:
        load(values)
    told: list[Any] = [None, None]
    dist.all_gather_object(told, str(caught.value))
    assert told[0] == told[1]
    assert_holds(model.state_dict(), seeded(Net))
    set_model_state_dict(model, seeded(Net, seed=1).state_dict())
    assert_holds(model.state_dict(), seeded(Net, seed=1))


@pytest.mark.parametrize("wrong", list(_WRONG))
@distributed(2)
def test_wrong_dict_of_the_first_rank_raises_on_all(wrong: str) -> None:
    """Only rank 0 can know."""
    model = seeded(Net)
    shard_blocks(model)
    change, key = _WRONG[wrong]
    values = seeded(Net, seed=1).state_dict() if dist.get_rank() == 0 else {}
    if dist.get_rank() == 0:
        change(values)
    with pytest.raises(RuntimeError, match=key):
        set_model_state_dict(model, values, options=FROM_RANK0)
    assert_holds(model.state_dict(), seeded(Net))


@distributed(2)
def test_without_strict_the_rest_is_loaded() -> None:
    """And the names are returned."""
    model = seeded(Net)
    shard_blocks(model)
    values = seeded(Net, seed=1).state_dict()
    _missing(values)
    _unexpected(values)
    result = model.load_state_dict(values, strict=False)
    assert result.missing_keys == ["blocks.1.down.bias"]
    assert result.unexpected_keys == ["head.weight"]
    expected = seeded(Net, seed=1)
    expected.blocks[1].down.bias = seeded(Net).blocks[1].down.bias
    assert_holds(model.state_dict(), expected)


@distributed(2)
def test_values_that_lie_differently_on_the_ranks_are_refused() -> None:
    """A gather of which one rank knows nothing would hang."""
    model, other = seeded(Net), seeded(Net, seed=1)
    shard_blocks(model)
    values = other.state_dict()
    sharded = copy.deepcopy(other)
    fully_shard(sharded)
    if dist.get_rank() == 0:
        values["inp.weight"] = sharded.state_dict()["inp.weight"]
    with pytest.raises(RuntimeError, match=r'different ways for "inp\.weight"'):
        model.load_state_dict(values)
    assert_holds(model.state_dict(), seeded(Net))


@distributed(2)
def test_no_load_into_full_values_nor_into_the_meta_device() -> None:
    """Both would have no effect."""
    model = seeded(Net)
    shard_blocks(model)
    unshard(model, recurse=True)
    with pytest.raises(RuntimeError, match=r"shows its full parameters.*Call\s+reshard"):
        model.load_state_dict(seeded(Net).state_dict())
    reshard(model, recurse=True)
    model.load_state_dict(seeded(Net, seed=1).state_dict())
    assert_holds(model.state_dict(), seeded(Net, seed=1))
    empty = seeded(Net).to("meta")
    shard_blocks(empty)
    with pytest.raises(RuntimeError, match=r"on the meta device\. Call\s+model\.to_empty"):
        empty.load_state_dict(seeded(Net).state_dict())


@distributed(2)
def test_no_state_dict_inside_a_forward() -> None:
    """The functions are collective; a forward is no place for them."""
    model = seeded(Net)
    shard_blocks(model)
    model.blocks[0].register_forward_hook(lambda *_: get_model_state_dict(model))
    with pytest.raises(RuntimeError, match="a state dict can't be made inside the forward"):
        model(rank_input(4, 5))


def _with_wrappers(model: nn.Module) -> nn.Module:
    """Return the model with a wrapped block, and a wrapper inside of a block."""
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.blocks[2].up = checkpoint_wrapper(model.blocks[2].up)
    return model


@pytest.mark.parametrize("layout", ["blocks", "one unit", "inside"])
@distributed(2)
def test_checkpoint_wrappers_leave_no_trace_in_names(layout: str) -> None:
    """They put a name of their own in front, around a unit, in one, and in state dicts halfway."""
    model = _with_wrappers(seeded(Net))
    if layout == "inside":
        fully_shard(model.blocks[1]._checkpoint_wrapped_module)
        fully_shard(model)
    else:
        _LAYOUTS[layout](model)
    assert_holds(model.state_dict(), seeded(Net))
    assert_holds(get_model_state_dict(model, options=EVERYWHERE), seeded(Net))
    values = seeded(Net, seed=1).state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, values, options=FROM_RANK0)
    assert_holds(model.state_dict(), seeded(Net, seed=1))
    for load in (functools.partial(set_model_state_dict, model), model.load_state_dict):
        values = seeded(Net, seed=2).state_dict()
        if dist.get_rank() == 1:
            values["blocks.1.up.bias"] = torch.zeros(3)
        with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.up\.bias"):
            load(values)
        assert_holds(model.state_dict(), seeded(Net, seed=1))
        load(seeded(Net, seed=2).state_dict())
        assert_holds(model.state_dict(), seeded(Net, seed=2))
        load(seeded(Net, seed=1).state_dict())
        assert_holds(model.state_dict(), seeded(Net, seed=1))


@distributed(2)
def test_a_module_that_contains_itself_is_refused(tmp_path: Path) -> None:
    """Its names have no end; torch's own functions end in a RecursionError."""
    model = seeded(Net)
    shard_blocks(model)
    model.blocks[1].around = model
    text = r"Net contains itself, at 'blocks\.1\.around\.blocks\.1\.around\.blocks\.1\.\.\.'"
    with pytest.raises(ValueError, match=text):
        save_checkpoint(tmp_path, model, step=1)
    with pytest.raises(ValueError, match=text):
        get_model_state_dict(model)


class _NormedNet(Net):
    """With a module that has a way of its own to load old state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


@distributed(2)
def test_batch_norm_is_checked_like_the_rest() -> None:
    """Before anything changes, on all ranks; but for its count, which old state dicts lack."""
    model = seeded(_NormedNet)
    shard_blocks(model)
    values = seeded(_NormedNet, seed=1).state_dict()
    values["norm.bias"] += 1
    if dist.get_rank() == 1:
        del values["norm.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm\.weight"'):
        model.load_state_dict(values)
    assert_holds(model.state_dict(), seeded(_NormedNet))
    old = {k: v for k, v in seeded(_NormedNet, seed=1).state_dict().items() if "tracked" not in k}
    model.load_state_dict(old)
    assert_holds(model.state_dict(), seeded(_NormedNet, seed=1))


@pytest.mark.parametrize("layout", ["blocks", "one unit"])
@distributed(2)
def test_parts_of_a_unit_have_state_dicts_of_their_own(layout: str) -> None:
    """Out and in, where the unit hides their parameters too."""
    model, values = seeded(Net), seeded(Net, seed=1)
    _LAYOUTS[layout](model)
    for part in ("blocks.0.up", "blocks", "out"):
        module, plain = model.get_submodule(part), seeded(Net).get_submodule(part)
        assert_holds(module.state_dict(), plain)
        assert_holds(get_model_state_dict(module, options=EVERYWHERE), plain)
        given = values.get_submodule(part).state_dict()
        if dist.get_rank() == 1:
            given.popitem()
        with pytest.raises(RuntimeError, match="Missing key"):
            module.load_state_dict(given)
        assert_holds(module.state_dict(), plain)
        module.load_state_dict(values.get_submodule(part).state_dict())
        assert_holds(module.state_dict(), values.get_submodule(part))
        module.load_state_dict(plain.state_dict())


@pytest.mark.fast
@distributed(2)
def test_modules_of_one_unit_load_one_after_another() -> None:
    """Below a module that is no unit: what the first one's hook has done is not the second's."""
    model = seeded(Net).requires_grad_(False)
    fully_shard([model.inp, model.out])
    source = seeded(Net, seed=1)
    fully_shard(source.inp)
    fully_shard(source.out)
    model.load_state_dict(source.state_dict())
    assert_holds(model.state_dict(), seeded(Net, seed=1))


class _Shared(nn.Module):
    """Two parents in a row share two layers."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.first = nn.Sequential(nn.Linear(3, 3), shared)
        self.second = nn.Sequential(shared, nn.Linear(3, 3))


@pytest.mark.fast
@pytest.mark.parametrize("units", [("first", "second"), ("second", "first"), ("first",)])
@distributed(2)
def test_a_module_of_two_parents_is_loaded_under_both_names(units: tuple[str, ...]) -> None:
    """Without a unit around them, whether one of them is a unit or both are."""
    model, values = seeded(_Shared), seeded(_Shared, seed=1)
    for name in units:
        fully_shard(model.get_submodule(name))
    for _ in range(2):
        model.load_state_dict(values.state_dict())
        assert_holds(model.state_dict(), values)
        model.load_state_dict(model.state_dict())
        assert_holds(model.state_dict(), values)


@distributed(2)
def test_a_model_without_units_takes_shards() -> None:
    """They are gathered."""
    source, target = seeded(Net, seed=1), seeded(Net)
    shard_blocks(source)
    set_model_state_dict(target, source.state_dict())
    assert_holds(target.state_dict(), seeded(Net, seed=1))


@distributed(2)
def test_parameters_from_the_meta_device_are_loaded_before_any_forward() -> None:
    """After to_empty, by each way in."""
    for load in (
        lambda model, values: set_model_state_dict(model, values),
        lambda model, values: model.load_state_dict(values),
        lambda model, values: set_model_state_dict(model, values, options=FROM_RANK0),
    ):
        model = seeded(Net).to("meta")
        shard_blocks(model)
        model.to_empty(device="cpu")
        load(model, seeded(Net, seed=1).state_dict())
        assert_holds(model.state_dict(), seeded(Net, seed=1))


@pytest.mark.parametrize("layout", ["blocks", "kept"])
@distributed(2)
def test_torchs_own_functions_move_full_values(layout: str) -> None:
    """Out, which torch does for DTensors alone, and in, from all ranks or the first."""
    model = seeded(Net, seed=1)
    _LAYOUTS[layout](model)
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    torch_state_dict.set_model_state_dict(model, seeded(Net).state_dict(), options=options)
    found = torch_state_dict.get_model_state_dict(model, options=options)
    assert all(type(value) is Tensor for value in found.values())
    assert_holds(found, seeded(Net))
    options = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = torch_state_dict.get_model_state_dict(model, options=options)
    assert bool(found) == (dist.get_rank() == 0)
    options = torch_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    values = seeded(Net, seed=1).state_dict() if dist.get_rank() == 0 else {}
    torch_state_dict.set_model_state_dict(model, values, options=options)
    assert_holds(model.state_dict(), seeded(Net, seed=1))


_CALLS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], object]] = {
    "state_dict": lambda model, *_: model.state_dict(),
    "state_dict of a part": lambda model, *_: model.blocks[1].up.state_dict(),
    "load_state_dict": lambda model, *_: model.load_state_dict(seeded(Net).state_dict()),
    "without strict": lambda model, *_: model.load_state_dict({}, strict=False),
    "get_model_state_dict": lambda model, *_: get_model_state_dict(model, options=FULL),
    "set_model_state_dict": lambda model, *_: set_model_state_dict(
        model, seeded(Net).state_dict() if dist.get_rank() == 0 else {}, options=FROM_RANK0
    ),
    "get_optimizer_state_dict": lambda model, optimizer, _: get_optimizer_state_dict(
        model, optimizer
    ),
    "set_optimizer_state_dict": lambda model, optimizer, _: set_optimizer_state_dict(
        model, optimizer, {"state": {}, "param_groups": []}
    ),
    "save_checkpoint": lambda model, optimizer, path: save_checkpoint(
        path, model, optimizer, step=1
    ),
    "load_checkpoint": lambda model, optimizer, path: load_checkpoint(path, model, optimizer),
}


@pytest.mark.parametrize("call", _CALLS)
@distributed(2)
def test_units_that_show_flat_parameters_have_no_state_dicts(call: str, tmp_path: Path) -> None:
    """All ranks raise and name the call that shows originals, after which it works."""
    model = seeded(Net)
    shard_blocks(model)
    if call == "load_checkpoint":
        save_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()), step=1)
    register_flat_param(model.blocks[1])
    flat = list(model.parameters())
    text = r"units \['blocks\.1'\] show flat parameters .*register_orig_params\(model\)"
    with pytest.raises(RuntimeError, match=text):
        _CALLS[call](model, torch.optim.AdamW(flat), tmp_path)
    if call != "set_optimizer_state_dict":
        register_orig_params(model)
        _CALLS[call](model, torch.optim.AdamW(model.parameters()), tmp_path)
        register_flat_param(model.blocks[1])
    assert all(a is b for a, b in zip(flat, model.parameters(), strict=True))
    with unshard_params(model):  # shows originals
        assert_holds(model.state_dict(), seeded(Net))
        model.load_state_dict(seeded(Net, seed=1).state_dict())
    register_orig_params(model)
    assert_holds(model.state_dict(), seeded(Net, seed=1))


@distributed(2)
def test_full_values_have_one_first_rank() -> None:
    """Where units' meshes begin with different ranks, none has, or could give, all values."""
    model = net_without_first_rank()
    with pytest.raises(NotImplementedError, match=r"'blocks\.0'.*rank0_only=False"):
        get_model_state_dict(model, options=FULL)
    with pytest.raises(NotImplementedError, match=r"'blocks\.0'.*rank0_only=False"):
        set_model_state_dict(model, seeded(Net).state_dict(), options=FROM_RANK0)
    assert_holds(get_model_state_dict(model, options=EVERYWHERE), seeded(Net))


@distributed(2)
def test_what_is_no_dict_is_refused_on_all_ranks() -> None:
    """None on one rank, as if the first rank gave its own."""
    model = seeded(Net)
    shard_blocks(model)
    values: Any = seeded(Net, seed=1).state_dict() if dist.get_rank() == 0 else None
    with pytest.raises(RuntimeError, match="expected a state dict, got NoneType"):
        set_model_state_dict(model, values)
    assert_holds(model.state_dict(), seeded(Net))
    set_model_state_dict(model, values, options=FROM_RANK0)
    assert_holds(model.state_dict(), seeded(Net, seed=1))


@pytest.mark.parametrize("is_from_first", [False, True])
@distributed(2)
def test_names_behind_a_prefix_are_refused_with_the_prefix(is_from_first: bool) -> None:
    """As DistributedDataParallel saves them; what the error says to pass is loaded."""
    model = seeded(Net)
    fully_shard(model)
    given = {f"module.{name}": value for name, value in seeded(Net, seed=1).state_dict().items()}
    options = FROM_RANK0 if is_from_first else None
    with pytest.raises(RuntimeError, match=r"begin with 'module\.' \(DistributedDataParallel's\)"):
        set_model_state_dict(model, given, options=options)
    given = {name.removeprefix("module."): value for name, value in given.items()}
    set_model_state_dict(model, given, options=options)
    assert_holds(model.state_dict(), seeded(Net, seed=1))


@distributed(2)
def test_load_model_of_safetensors_says_what_loads(tmp_path: Path) -> None:
    """Not what saves."""
    model = seeded(Net)
    fully_shard(model)
    file = tmp_path / f"{dist.get_rank()}.safetensors"
    save_model(seeded(Net), file)
    with pytest.raises(RuntimeError, match=r"Call load_safetensors\(model, path\) on all ranks"):
        load_model(model, file)


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("which", [0, 1])
@distributed(2, 3)
def test_broadcast_that_one_rank_alone_asks_for_is_refused_on_all(kind: str, which: int) -> None:
    """The error names the ranks; nothing is loaded, and the same options load then."""
    model = nn.Linear(3, 3)
    values = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model.weight.full_tensor().clone()
    alone = StateDictOptions(broadcast_from_rank0=dist.get_rank() == which)
    saved = get_optimizer_state_dict(model, optimizer)
    load = {
        "model": lambda: set_model_state_dict(model, values, options=alone),
        "optimizer": lambda: set_optimizer_state_dict(model, optimizer, saved, options=alone),
    }[kind]
    with pytest.raises(ValueError, match=rf"broadcast_from_rank0=True on ranks \[{which}\] of"):
        load()
    assert torch.equal(model.weight.full_tensor(), before)
    together = StateDictOptions(broadcast_from_rank0=True)
    set_model_state_dict(model, values if dist.get_rank() == 0 else {}, options=together)
    assert torch.equal(model.weight.full_tensor(), torch.ones(3, 3))
