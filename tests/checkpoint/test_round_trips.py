"""Whatever a save takes, a load gives back, into a fresh and into a used run."""

from __future__ import annotations

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import (
    FlatShard,
    ShardedGradScaler,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from composable_shard.tensor import kind_of
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    EVERYWHERE,
    FROM_RANK0,
    Net,
    Tied,
    loss_of,
    make_net,
    shard_blocks,
)

_Make = Callable[[nn.Module], torch.optim.Optimizer]


def _adamw(**options: Any) -> _Make:
    return lambda model: torch.optim.AdamW(model.parameters(), **options)


_OPTIMIZERS: dict[str, _Make] = {
    "tensor lr": _adamw(lr=torch.tensor(0.01), foreach=False),
    "fused, tensor lr": _adamw(lr=torch.tensor(0.01), fused=True),
    "fused": _adamw(lr=0.01, fused=True),
    "amsgrad": _adamw(lr=0.01, amsgrad=True),
    "tensor betas": _adamw(
        lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.95)), foreach=False
    ),
    "sgd, tensor lr": lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.01)),
    "sgd, momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
}


def _take_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def _plain(value: Any) -> Any:
    """Return a value that == compares."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.tolist())
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def _assert_came_back(
    one: nn.Module, mine: torch.optim.Optimizer, other: nn.Module, theirs: torch.optim.Optimizer
) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert_equal(b.to_local(), a.to_local(), name)
        for key, value in mine.state[a].items():
            found = theirs.state[b][key]
            assert kind_of(found) is kind_of(value)  # one leads a list
            if isinstance(value, Tensor):
                value, found = getattr(value, "_local", value), getattr(found, "_local", found)
                if key == "step":  # torch 2.11 makes it on the default device, not the host
                    value = value.to(found.device)
                assert_equal(found, value, f"{name} {key}")
            else:
                assert found == value
    for a, b in zip(mine.param_groups, theirs.param_groups, strict=True):
        assert {k: _plain(v) for k, v in a.items() if k != "params"} == {
            k: _plain(v) for k, v in b.items() if k != "params"
        }


@pytest.mark.parametrize(
    ("kind", "is_used"), [(kind, index % 2 == 0) for index, kind in enumerate(_OPTIMIZERS)]
)
@distributed(2, on_device=True)
def test_optimizers_come_back_with_all_options(kind: str, is_used: bool, tmp_path: Path) -> None:
    """Options that are tensors too; the next step is bitwise that of the run that was saved."""
    model = make_net()
    optimizer = _OPTIMIZERS[kind](model)
    for number in range(2):
        _take_step(model, optimizer, number)
    save_checkpoint(tmp_path, model, optimizer, step=2)
    torch.manual_seed(1)
    other = make_net()
    resumed = _OPTIMIZERS[kind](other)
    if is_used:
        _take_step(other, resumed, 7)
        for group in resumed.param_groups:
            group["lr"] = group["lr"] * 3
    load_checkpoint(tmp_path, other, resumed)
    _assert_came_back(model, optimizer, other, resumed)
    for each, own in ((model, optimizer), (other, resumed)):
        _take_step(each, own, 3)
    _assert_came_back(model, optimizer, other, resumed)


@distributed(2)
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It was taken, and the next step ended in a KeyError; Adam's and AdamW's are one."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    _take_step(model, optimizer, 0)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    for make in (torch.optim.Adagrad, torch.optim.Adamax, torch.optim.SGD):
        other: Any = make(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=f"is of class AdamW, and {make.__name__} was passed"):
            load_checkpoint(tmp_path, model, other)
        assert other.param_groups[0]["lr"] == 0.1
    adam = torch.optim.Adam(model.parameters())
    load_checkpoint(tmp_path, model, adam)
    _take_step(model, adam, 1)
    load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()), strict=False)


@contextmanager
def _meta_by_default() -> Iterator[None]:
    """Make it an error to rely on the default device, which may be an accelerator."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("mode", [torch.inference_mode, _meta_by_default])
@distributed(2)
def test_neither_inference_mode_nor_the_default_device_counts(mode: Any, tmp_path: Path) -> None:
    """Of the caller: what comes back can be trained, and lies where it lay."""
    model = make_net(granularity="row")
    model.register_module("norm", nn.BatchNorm1d(3, affine=False))
    optimizer = _OPTIMIZERS["tensor lr"](model)
    _take_step(model, optimizer, 0)
    with mode():
        save_checkpoint(tmp_path, model, optimizer, step=1, extra=[1.5])
    other = make_net()
    other.register_module("norm", nn.BatchNorm1d(3, affine=False))
    resumed = _OPTIMIZERS["tensor lr"](other)
    with mode():
        load_checkpoint(tmp_path, other, resumed)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_equal(b.full_tensor(), a.full_tensor(), name)
        found, moment = resumed.state[b]["exp_avg"], optimizer.state[a]["exp_avg"]
        assert_equal(found.full_tensor(), moment.full_tensor(), name)
        assert not found.is_inference()
    _take_step(other, resumed, 1)


@distributed(2)
def test_parameters_in_another_order_on_one_rank_keep_their_state(tmp_path: Path) -> None:
    """`AdamW(set(params))` has an order of its own in each process."""
    model = make_net()
    params = list(model.parameters())
    if dist.get_rank() == 1:
        params.reverse()
    optimizer = torch.optim.AdamW(params, lr=0.01)
    _take_step(model, optimizer, 0)
    full = StateDictOptions(full_state_dict=True, rank0_only=False)
    whole = get_optimizer_state_dict(model, optimizer, options=full)["state"]
    for name, param in model.named_parameters():
        assert_equal(optimizer.state[param]["exp_avg"].full_tensor(), whole[name]["exp_avg"], name)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    for resumed in (model, make_net()):
        other = torch.optim.AdamW(resumed.parameters(), lr=0.01)
        load_checkpoint(tmp_path, resumed, other)
        found = get_optimizer_state_dict(resumed, other, options=full)["state"]
        for name, state in whole.items():
            assert_equal(found[name]["exp_avg"], state["exp_avg"], name)
            assert_equal(found[name]["exp_avg_sq"], state["exp_avg_sq"], name)
    other = torch.optim.AdamW(params, lr=0.01)
    first = dist.get_rank() == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    saved = {"state": whole, "param_groups": optimizer.state_dict()["param_groups"]}
    saved["param_groups"][0]["params"] = list(whole)
    set_optimizer_state_dict(model, other, saved if first else {}, options=options)
    for name, param in model.named_parameters():
        assert_equal(other.state[param]["exp_avg"].full_tensor(), whole[name]["exp_avg"], name)


class _HasExtra(Net):
    """A model with extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@distributed(2)
def test_views_that_stand_for_other_values_are_saved_by_value(tmp_path: Path) -> None:
    """A conjugated or negated view has other elements in memory; it is no copy of its base."""
    torch.manual_seed(0)
    base = torch.randn(4, dtype=torch.complex64)
    views = {"base": base, "conjugated": base.conj(), "negated": base.conj().imag}
    model = Net()
    for name, value in views.items():
        model.register_buffer(name, value)
    fully_shard(model)
    save_checkpoint(tmp_path, model, step=1, extra=views)
    other = Net()
    for name, value in views.items():
        other.register_buffer(name, torch.zeros_like(value.resolve_conj().resolve_neg()))
    fully_shard(other)
    loaded = load_checkpoint(tmp_path, other)
    for name, value in views.items():
        expected = value.resolve_conj().resolve_neg()
        assert_equal(other.get_buffer(name), expected, name)
        assert_equal(loaded.extra[name], expected, name)


class _Object:
    """A scheduler or scaler with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@distributed(2)
def test_values_that_differ_between_ranks_are_the_first_ones(tmp_path: Path) -> None:
    """Whole: dicts of two ranks with different keys are not joined, nor need tensors fit."""
    rank = dist.get_rank()
    value = {f"of {rank}": rank, "both": {f"inner {rank}": 1}}
    model = _HasExtra(value)
    fully_shard(model)
    objects = {"scheduler": _Object(value), "scaler": _Object({} if rank == 0 else {"scale": 1.0})}
    extra = {**value, "data": torch.full((2 + rank,), float(rank))}
    save_checkpoint(tmp_path, model, step=1, extra=extra, **objects)
    model.extra = objects["scheduler"].state = objects["scaler"].state = None
    loaded = load_checkpoint(tmp_path, model, **objects)
    assert_equal(loaded.extra.pop("data"), torch.zeros(2), "data")
    first = {"of 0": 0, "both": {"inner 0": 1}}
    assert model.extra == objects["scheduler"].state == loaded.extra == first
    assert objects["scaler"].state == {}


@distributed(2)
def test_options_of_one_name_may_have_other_types_in_other_groups(tmp_path: Path) -> None:
    """Each is compared with that of its own group."""
    model = make_net()
    params = list(model.parameters())
    tags: list[dict[str, Any]] = [{"tag": "decay", "lr": torch.tensor(0.1)}, {"tag": 3, "lr": 0.2}]
    parts = params[:2], params[2:]
    groups = [{"params": part, **tag} for part, tag in zip(parts, tags, strict=True)]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 3
    load_checkpoint(tmp_path, model, optimizer)
    for group, tag in zip(optimizer.param_groups, tags, strict=True):
        assert _plain(group["lr"]) == _plain(tag["lr"])


@distributed(2)
def test_tied_tensors_take_one_value(tmp_path: Path) -> None:
    """Equal ones of an untied checkpoint; different ones are refused, as one would be lost."""
    models: list[nn.Module] = [Net(), Tied()]
    for model in models:
        shard_blocks(model)
    with torch.no_grad():
        models[0].blocks[1].up.weight.copy_(models[0].blocks[0].up.weight)
    expected = models[0].blocks[0].up.weight.full_tensor()
    save_checkpoint(tmp_path, models[0], step=1)
    load_checkpoint(tmp_path, models[1])
    assert_equal(models[1].blocks[1].up.weight.full_tensor(), expected)
    with torch.no_grad():
        models[0].blocks[1].up.weight.zero_()
    save_checkpoint(tmp_path, models[0], step=2)
    text = "'blocks.1.up.weight' and 'blocks.0.up.weight' are one tensor in the model"
    with pytest.raises(ValueError, match=text):
        load_checkpoint(tmp_path, models[1])
    assert_equal(models[1].blocks[1].up.weight.full_tensor(), expected)


class _NamesMore(Net):
    """Shows a parameter that no module has registered, and has it in its state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Parameter(torch.ones(3))]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(*args, **kwargs)
        yield "more", self.more[0]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}more"] = self.more[0].detach()


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(2)
def test_parameters_that_a_model_names_itself_keep_their_state(
    is_sharded: bool, tmp_path: Path
) -> None:
    """Its `named_parameters` says what its optimizers step."""
    runs = []
    for momentum in (2.0, 0.0):
        model = _NamesMore()
        if is_sharded:
            shard_blocks(model, check_initial_values=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model.more[0]]["momentum_buffer"] = torch.full((3,), momentum)
        runs.append((model, optimizer))
    save_checkpoint(tmp_path, *runs[0], step=1)
    model, optimizer = runs[1]
    load_checkpoint(tmp_path, model, optimizer, strict=False)
    assert_equal(optimizer.state[model.more[0]]["momentum_buffer"], torch.full((3,), 2.0))
    state = get_optimizer_state_dict(model, optimizer)
    assert_equal(state["state"]["more"]["momentum_buffer"], torch.full((3,), 2.0))


def test_parameters_that_a_hook_of_the_state_dict_makes_are_saved(tmp_path: Path) -> None:
    """With their optimizer's state: the names are those of what the hook has left."""

    def replace(module: nn.Module, *_: object) -> None:
        old = module.bias
        module.bias = nn.Parameter(torch.full((3,), 5.0))
        optimizer.param_groups[0]["params"] = list(module.parameters())
        optimizer.state[module.bias] = optimizer.state.pop(old)

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hook = model.register_state_dict_pre_hook(replace)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    hook.remove()
    other = nn.Linear(3, 3)
    loaded = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    load_checkpoint(tmp_path, other, loaded)
    assert_equal(other.bias.detach(), torch.full((3,), 5.0))
    assert_equal(loaded.state[other.bias]["momentum_buffer"], torch.ones(3))


def test_modules_in_a_mapping_that_is_no_dict_are_saved(tmp_path: Path) -> None:
    """Its views go in one direction alone."""
    models = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(2)]
    for model in models:
        model.__dict__["_modules"] = UserDict(model._modules)
    save_checkpoint(tmp_path, models[0], step=1)
    load_checkpoint(tmp_path, models[1])
    assert_equal(models[1](torch.ones(1, 2)), models[0](torch.ones(1, 2)))


_EXTRA: dict[str, tuple[Any, Any]] = {
    "None": (None, 3),
    "number": (3, None),
    "longer tensor": (torch.arange(7.0), torch.zeros(3)),
    "large tensor": (torch.arange(100.0), torch.zeros(100)),
    "other dtype": (torch.arange(3), torch.zeros(3, dtype=torch.bfloat16)),
    "tensor for None": (torch.arange(7.0), None),
    "dict": ({"a": torch.arange(5.0), "b": [1, (2.5, None)], 3: {"x"}}, {}),
    "list of tensors": ([torch.eye(3), torch.arange(4)], [torch.zeros(1)]),
    "bytes": (b"abc", b""),
}


@pytest.mark.parametrize("kind", _EXTRA)
@distributed(2)
def test_extra_state_of_modules_comes_back(kind: str, tmp_path: Path) -> None:
    """Whatever `get_extra_state` returned, whatever the new model has."""
    saved, before = _EXTRA[kind]
    models = []
    for value in (saved, before):
        torch.manual_seed(0)
        model = _HasExtra(value)
        fully_shard(model)
        models.append(model)
    save_checkpoint(tmp_path, models[0], step=1)
    load_checkpoint(tmp_path, models[1])
    assert repr(models[1].extra) == repr(saved)
    assert type(models[1].extra) is type(saved)


@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, functools.partial(torch.compile, backend="eager")]
)
@distributed(2)
def test_extra_state_inside_a_wrapper_comes_back(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    """A wrapper has the name of the module in it, and takes no extra state."""
    inner = [_HasExtra(value) for value in ("saved", "before")]
    models = [nn.Sequential(wrap(each)) for each in inner]
    for model in models:
        fully_shard(model, check_initial_values=False)
    save_checkpoint(tmp_path, models[0], step=1)
    load_checkpoint(tmp_path, models[1])
    assert inner[1].extra == "saved"


@pytest.mark.parametrize("kind", _EXTRA)
@distributed(2)
def test_extra_state_comes_from_the_first_rank(kind: str) -> None:
    """With `broadcast_from_rank0` too, tensors of any size among it."""
    saved, before = _EXTRA[kind]
    is_first = dist.get_rank() == 0
    model = _HasExtra(saved if is_first else before)
    full = StateDictOptions(full_state_dict=True)
    values = get_model_state_dict(model, options=full) if is_first else {}
    other = _HasExtra(before)
    fully_shard(other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, values, options=options)
    assert repr(other.extra) == repr(saved)


def _run(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return a model, its optimizer, and the scheduler or scaler of that kind."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedulers = torch.optim.lr_scheduler
    objects: dict[str, dict[str, Any]] = {
        "step": {"scheduler": schedulers.StepLR(optimizer, 3)},
        "cosine": {"scheduler": schedulers.CosineAnnealingLR(optimizer, 10)},
        "scaler": {"scaler": ShardedGradScaler("cpu", init_scale=8.0)},
        "raising": {"scheduler": [schedulers.StepLR(optimizer, 3), _Raises()]},
        "lambda": {"scheduler": schedulers.LambdaLR(optimizer, lambda step: 0.9**step)},
        "factor": {"scheduler": schedulers.MultiplicativeLR(optimizer, lambda step: 0.9)},
        "in turn": {"scheduler": _in_sequence(optimizer, is_reversed=False)},
        "in other turn": {"scheduler": _in_sequence(optimizer, is_reversed=True)},
        "none": {},
    }
    _take_step(model, optimizer, 0)
    return model, optimizer, objects[kind]


def _in_sequence(optimizer: torch.optim.Optimizer, *, is_reversed: bool) -> Any:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.StepLR(optimizer, 3), schedulers.ConstantLR(optimizer)]
    return schedulers.SequentialLR(optimizer, parts[::-1] if is_reversed else parts, [2])


class _Raises:
    """Saves anything, and takes nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("takes nothing")


_REFUSED = [
    ("step", "cosine", "is not that of a CosineAnnealingLR"),
    ("cosine", "step", "is not that of a StepLR"),
    ("lambda", "factor", "is not that of a MultiplicativeLR but of a LambdaLR"),
    (
        "in turn",
        "in other turn",
        r"of \(ConstantLR, StepLR\) but of a .* of \(StepLR, ConstantLR\)",
    ),
    ("none", "step", "which has no schedulers; got 1 scheduler$"),
    ("raising", "step", r"which has 2 schedulers called '0', '1'; got 1 scheduler$"),
]


@pytest.mark.parametrize(("saved", "loading", "text"), _REFUSED)
@distributed(2)
def test_a_load_that_is_refused_changes_nothing(
    saved: str, loading: str, text: str, tmp_path: Path
) -> None:
    """Neither model nor optimizer nor the schedulers that could be loaded."""
    model, optimizer, objects = _run(saved)
    save_checkpoint(tmp_path, model, optimizer, step=1, **objects)
    torch.manual_seed(1)
    model, optimizer, objects = _run(loading)
    parts = [model, optimizer, *[o for o in objects.values() if not isinstance(o, list)]]
    parts += [each for o in objects.values() if isinstance(o, list) for each in o]
    before = [copy.deepcopy(each.state_dict()) for each in parts]
    with pytest.raises((ValueError, RuntimeError), match=text):
        load_checkpoint(tmp_path, model, optimizer, **objects)
    assert repr([each.state_dict() for each in parts]) == repr(before)


@distributed(2)
def test_a_scheduler_for_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    """Its next step would fail, after everything has been loaded."""
    model = make_net()
    params = list(model.parameters())
    make_optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    runs = []
    for groups in ([{"params": params}], [{"params": params[:2]}, {"params": params[2:]}]):
        optimizer = make_optimizer(groups)
        runs.append((optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)))
    save_checkpoint(tmp_path, model, runs[0][0], scheduler=runs[0][1], step=1)
    text = r"is for \[1\] parameter groups, and the optimizer here has \[2\]"
    with pytest.raises(ValueError, match=text):
        load_checkpoint(tmp_path, model, runs[1][0], scheduler=runs[1][1])


class _MayRefuse(_HasExtra):
    is_refusing = False

    def set_extra_state(self, state: Any) -> None:
        if self.is_refusing:
            raise RuntimeError("takes nothing")
        super().set_extra_state(state)


@pytest.mark.parametrize("who", ["the model", "the optimizer"])
@distributed(2)
def test_code_of_users_that_raises_on_one_rank_raises_on_all(who: str, tmp_path: Path) -> None:
    """A module's `set_extra_state`, an optimizer's hook: the error says to load again."""
    torch.manual_seed(0)
    is_odd = dist.get_rank() == 1
    model = _MayRefuse(3)
    fully_shard(model)
    optimizers = [_adamw(lr=rate)(part) for part, rate in ((model.inp, 0.1), (model.out, 0.2))]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3)
    _take_step(model, optimizers[0], 0)
    save_checkpoint(tmp_path, model, optimizers, scheduler=scheduler, step=1)
    model.is_refusing = is_odd and who == "the model"
    if is_odd and who == "the optimizer":
        hook = optimizers[1].register_load_state_dict_post_hook(_Raises().load_state_dict)
    with pytest.raises(RuntimeError, match=r"takes nothing.* Call load_checkpoint again"):
        load_checkpoint(tmp_path, model, optimizers, scheduler=scheduler)
    model.is_refusing = False
    if is_odd and who == "the optimizer":
        hook.remove()
    load_checkpoint(tmp_path, model, optimizers, scheduler=scheduler)


@distributed(2)
def test_state_that_wraps_other_tensors_is_refused_at_save(tmp_path: Path) -> None:
    """By name, as torchao's quantised state; state dicts keep its form, also from whole values."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters())
    _take_step(model, optimizer, 0)
    param = model.out.weight
    values = optimizer.state[param]["exp_avg"].to_local()
    wrapped = FlatShard(TwoTensor(values, values.clone()), param._shard_spec)
    optimizer.state[param]["exp_avg"] = wrapped
    text = r"can't save 'optimizer/state/out.weight/exp_avg', a TwoTensor .* quantised"
    with pytest.raises(ValueError, match=text):
        save_checkpoint(tmp_path, model, optimizer, step=1)
    assert list(tmp_path.iterdir()) == []
    whole = get_optimizer_state_dict(model, optimizer)
    whole["state"]["out.weight"]["exp_avg"] = FlatShard(values, param._shard_spec)
    for state in (get_optimizer_state_dict(model, optimizer), whole):
        set_optimizer_state_dict(model, optimizer, state)
        found = optimizer.state[param]["exp_avg"].to_local()
        assert type(found) is TwoTensor
        assert_equal(found.a, values)


def _refuse(*_: Any) -> None:
    raise RuntimeError("takes nothing")


class _Translates(nn.Linear):
    """Loads by code of its own, after the layer before it."""

    is_refusing = False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.seen.add_(1.0)
        if self.is_refusing:
            raise KeyError("takes nothing")


_LOADS: dict[str, Callable[..., object]] = {
    "set_model_state_dict": set_model_state_dict,
    "from rank 0": functools.partial(set_model_state_dict, options=FROM_RANK0),
    "load_checkpoint": lambda model, state: load_checkpoint(*state),
}


@pytest.mark.parametrize("way", _LOADS)
@distributed(2)
def test_a_module_that_raises_while_it_is_loaded_says_what_was_loaded(
    way: str, tmp_path: Path
) -> None:
    """On one rank, in its `_load_from_state_dict` or in a hook after that: all ranks raise."""
    torch.manual_seed(dist.get_rank())  # values that a broadcast would change
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), _Translates(4, 2))
    model[2].register_buffer("seen", torch.zeros(()))
    fully_shard(model[2], check_initial_values=False)
    fully_shard(model, check_initial_values=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    saved = get_model_state_dict(model, options=EVERYWHERE)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state: Any = (tmp_path, model, optimizer) if way == "load_checkpoint" else saved
    if way == "from rank 0" and dist.get_rank() > 0:
        state = {}
    handle = None
    for hooked in (False, True):
        model[2].is_refusing = dist.get_rank() == 1 and not hooked
        if hooked and dist.get_rank() == 1:
            handle = model[2].register_load_state_dict_post_hook(_refuse)
        text = r"takes nothing.*Some values are new, others are not\. Load again"
        with pytest.raises(RuntimeError, match=text):
            _LOADS[way](model, state)
    if handle is not None:
        handle.remove()
    _LOADS[way](model, state)
    found = get_model_state_dict(model, options=EVERYWHERE)
    assert_equal(found["2.weight"], saved["2.weight"])
    assert_equal(found["1.weight"], saved["1.weight"])


@distributed(2)
def test_a_scaler_that_was_saved_and_is_not_wanted_is_warned_of(tmp_path: Path) -> None:
    """Training would go on without its scale."""
    model, optimizer, objects = _run("scaler")
    save_checkpoint(tmp_path, model, optimizer, step=1, **objects)
    with pytest.warns(UserWarning, match="none was passed"):
        load_checkpoint(tmp_path, model, optimizer)
    model, optimizer, objects = _run("scaler")
    load_checkpoint(tmp_path, model, optimizer, **objects)
