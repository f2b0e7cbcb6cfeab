"""Modules whose class names or lists them in its own way: state dicts are those of plain torch.

Torch's `state_dict()` follows what modules have registered, whatever `named_modules` says. And
names that differ only in those of wrappers, which our state dicts leave out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    StateDictOptions,
    describe,
    estimate,
    fully_shard,
    get_model_state_dict,
    get_pending_gradients,
    load_checkpoint,
    no_sync,
    save_checkpoint,
    save_safetensors,
    set_model_state_dict,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import average_gradients, rank_input, seeded, square_mean

_Named = Iterator[tuple[str, nn.Module]]


class _Offset(nn.Linear):
    """Has extra state, and a buffer."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("offset", torch.ones(5))
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset

    def get_extra_state(self) -> Any:
        return torch.tensor(self.number)

    def set_extra_state(self, state: Any) -> None:
        self.number = int(state)


class _ShowsAll(nn.Module):
    """Shows its modules as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), _Offset())
        self.head = nn.Linear(5, 3)
        self.__dict__["other"] = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class _Hides(_ShowsAll):
    def named_modules(self, *args: Any, **kwargs: Any) -> _Named:
        found = super().named_modules(*args, **kwargs)
        return ((name, each) for name, each in found if "body" not in name)


class _Renames(_ShowsAll):
    def named_modules(self, *args: Any, **kwargs: Any) -> _Named:
        found = super().named_modules(*args, **kwargs)
        return ((name.replace("body", "trunk"), each) for name, each in found)


class _ShowsAnother(_ShowsAll):
    def named_modules(self, memo: Any = None, prefix: str = "", *_: Any, **kwargs: Any) -> _Named:
        yield from super().named_modules(memo, prefix, **kwargs)
        yield f"{prefix}.other".lstrip("."), self.__dict__["other"]


class _ShowsNothing(_ShowsAll):
    def named_modules(self, *_: Any, **__: Any) -> _Named:
        return iter(())


_CLASSES = [_Hides, _Renames, _ShowsAnother, _ShowsNothing]


def _assert_registered(found: dict[str, Any], plain: nn.Module) -> None:
    wanted = plain.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        each = found[name]
        assert_equal(each.full_tensor() if isinstance(each, FlatShard) else each, value, name)


def _tripled(model: nn.Module) -> dict[str, Tensor]:
    return {name: value * 3 for name, value in model.state_dict().items()}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("kind", _CLASSES)
@distributed(1, 2)
def test_state_dicts_have_what_is_registered(
    tmp_path: Path, kind: type[_ShowsAll], is_inside: bool
) -> None:
    """Of the model itself, and of a part of it; extra state and buffers too, by every way."""
    own: Any = seeded(kind)
    plain = nn.Sequential(own) if is_inside else own
    model = copy.deepcopy(plain)
    inner = model[0] if is_inside else model
    fully_shard(inner.body)
    fully_shard(model)
    for each in (model, plain):
        square_mean(each(rank_input(3, 4))).backward()
    average_gradients([*own.body.parameters(), *own.head.parameters()])
    for name in ("body", "head"):
        pairs = zip(getattr(inner, name).parameters(), getattr(own, name).parameters(), strict=True)
        for param, expected in pairs:
            assert_equal(param.grad.full_tensor(), expected.grad)
    own.body[1].number = inner.body[1].number = 5
    _assert_registered(model.state_dict(), plain)
    full = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=full)
    if dist.get_rank() == 0:  # which alone holds it
        _assert_registered(whole, plain)
    saved = save_checkpoint(tmp_path, model, step=1)
    state = _tripled(plain)
    plain.load_state_dict(state)
    model.load_state_dict(state)
    _assert_registered(model.state_dict(), plain)
    state = _tripled(plain)
    plain.load_state_dict(state)
    set_model_state_dict(model, state)
    _assert_registered(get_model_state_dict(model), plain)
    assert inner.body[1].number == 45
    load_checkpoint(str(saved), model)
    plain.load_state_dict({name: value / 9 for name, value in plain.state_dict().items()})
    assert inner.body[1].number == own.body[1].number == 5
    for name, value in get_model_state_dict(model, options=full).items():
        torch.testing.assert_close(value, plain.state_dict()[name])  # times 9 and back rounds


@pytest.mark.parametrize("kind", [_ShowsAll, *_CLASSES])
@distributed(2)
def test_whatever_walks_the_modules_finds_them(kind: type[_ShowsAll]) -> None:
    """Names of errors and tables, casts of what keeps its dtype, gradients that wait."""
    model: Any = seeded(kind)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_fp32_classes=(_Offset,))
    fully_shard(model.body[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    dtypes: list[torch.dtype] = []
    model.body[1].register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))
    with no_sync(model):
        model(rank_input(3, 4)).float().sum().backward()
    assert dtypes == [torch.float32]
    names = {"body.1.weight", "head.weight", "body.0.weight"}
    assert names <= set(get_pending_gradients(model))
    assert [unit.fqns for unit in describe(model).units] == [("",), ("body.0",)]


class _BesideWrapper(nn.Module):
    """Has something beside a module, under a wrapper's name, that has the same."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.kind, self.inside = kind, name
        self.net = _Offset()
        inner = nn.Module()
        self.add_module(name, inner)
        if kind == "parameter":
            inner.net = nn.Linear(5, 5)
        elif kind == "tied":
            inner.net = self.net
        elif kind == "hidden":
            self.register_buffer("scale", torch.ones(5), persistent=False)
            inner.register_buffer("scale", torch.ones(5), persistent=False)
        else:
            inner.net = nn.Module()
            if kind == "buffer":
                inner.net.register_buffer("offset", torch.ones(5))
            else:
                inner.net = _Extra()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return getattr(self, self.inside).net(x) if self.kind == "parameter" else x


class _Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return torch.tensor(7)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("never saved")


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@pytest.mark.parametrize("kind", ["parameter", "buffer", "extra state"])
@pytest.mark.parametrize("name", _WRAPPERS)
@distributed(2)
def test_two_that_would_have_one_name_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Before anything is written; torch's own state dict has both, and is right."""
    model = seeded(lambda: _BesideWrapper(name, kind))
    plain = copy.deepcopy(model)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(rank_input(3, 5)).sum().backward()
    state = plain.state_dict()
    acts = {
        "get": lambda: get_model_state_dict(model),
        "set": lambda: set_model_state_dict(model, state),
        "save": lambda: save_checkpoint(tmp_path / "new", model, optimizer, step=1),
        "save_safetensors": lambda: save_safetensors(model, tmp_path / "tensors"),
    }
    key = {"parameter": "weight", "buffer": "offset", "extra state": "_extra_state"}[kind]
    for act in acts.values():
        with pytest.raises(ValueError, match=f"'net.{key}' and '{name}.net.{key}'.*attribute name"):
            act()
    assert not list(tmp_path.glob("**/*.safetensors"))
    _assert_registered(model.state_dict(), plain)


@pytest.mark.parametrize("kind", ["tied", "hidden"])
@pytest.mark.parametrize("name", _WRAPPERS)
@distributed(2)
def test_one_under_two_such_names_is_saved(tmp_path: Path, name: str, kind: str) -> None:
    """It is one tensor, or in no state dict."""
    model = seeded(lambda: _BesideWrapper(name, kind))
    fully_shard(model)
    before = model.net.weight.full_tensor()
    saved = save_checkpoint(tmp_path, model, step=1)
    with torch.no_grad():
        model.net.weight.mul_(3)
    load_checkpoint(str(saved), model)
    assert_equal(model.net.weight.full_tensor(), before)


@distributed(2)
def test_a_load_into_names_that_are_one_is_refused(tmp_path: Path) -> None:
    """Of a checkpoint that has one of the two."""
    model = seeded(lambda: _BesideWrapper("_orig_mod", "tied"))
    fully_shard(model)
    saved = save_checkpoint(tmp_path, model, step=1)
    other = seeded(lambda: _BesideWrapper("_orig_mod", "parameter"))
    fully_shard(other)
    before = other.net.weight.full_tensor()
    with torch.no_grad():
        other.net.weight.mul_(3)
    with pytest.raises(ValueError, match="have one name in state dicts"):
        load_checkpoint(str(saved), other)
    assert_equal(other.net.weight.full_tensor(), before * 3)


def test_an_estimate_counts_hidden_modules() -> None:
    """With a forward of fake values, which stand in the modules that nobody shows, too."""
    hiding, showing = (
        estimate(kind(), batch=(torch.ones(2, 4),), world_size=2, rules=[("body", None)])
        for kind in (_Hides, _ShowsAll)
    )
    assert hiding.parameter_nbytes == showing.parameter_nbytes
    assert hiding.activation_nbytes == showing.activation_nbytes > 0
