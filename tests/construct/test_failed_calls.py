"""A call of `fully_shard` that raises, at any step, leaves the module as it was."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import composable_shard
from composable_shard import fully_shard, get_states
from composable_shard.construct import buffers
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.models import average_gradients, rank_input, square_mean

PACKAGE = str(Path(composable_shard.__file__).parent)
DIM = 4


class _HookedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM + 1), nn.Linear(DIM + 1, DIM)
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _HookedModel(nn.Module):
    """A model with all that a call changes: ties, buffers, hooks, attributes, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = _HookedBlock(), nn.Linear(DIM, DIM)
        self.tied = nn.Linear(DIM, DIM)
        self.tied.weight = self.head.weight
        self.norm = nn.LayerNorm(DIM)
        self.norm.requires_grad_(False)
        self.head.weight.note = "the user's"
        self.register_buffer("scale", torch.ones(DIM))
        self.register_buffer("offset", torch.zeros(DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.tied(self.head(self.block(x * self.scale) + self.offset)))


def _make() -> _HookedModel:
    torch.manual_seed(0)
    model = _HookedModel().double()
    square_mean(model(rank_input(3, DIM).double())).backward()
    model.hooked = []
    model.head.bias.register_hook(lambda grad: model.hooked.append(1))
    return model


class _Stop(Exception):
    """What the tests raise in place of a line of the package."""


class _Stopper:
    """Raises at the n-th line of the steps that change something; counts them with n = 0."""

    def __init__(self, moment: int) -> None:
        self.moment, self.num_lines, self.place = moment, 0, ""
        self.moments: dict[str, list[int]] = {}
        self.has_begun = False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        self.has_begun |= code.co_name == _FIRST_STEP
        is_own = self.has_begun and code.co_filename.startswith(PACKAGE)
        return self._count if is_own and code.co_name not in _LEFT_OUT else None

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.place:
            self.num_lines += 1
            name = frame.f_code.co_filename.removeprefix(PACKAGE + "/")
            place = f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}"
            self.moments.setdefault(place, []).append(self.num_lines)
            if self.num_lines == self.moment:
                self.place = place
                raise _Stop(place)
        return self._count

    @contextmanager
    def watching(self) -> Iterator[None]:
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)


_FIRST_STEP = "set_owners"
# What undoes a step may not fail; errors in a finalizer are printed. The last two end when nothing
# is left to do.
_LEFT_OUT = {"restore", "give_back", "_show_in", "_release", "form_unit", "fully_shard"}


def _facts_of_all(model: nn.Module) -> dict[str, Any]:
    """Return all that a program can see of a model: objects, values, hooks, attributes."""
    facts: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held: Any = id(value)
            if isinstance(value, dict):
                held = id(value), [(each, id(item)) for each, item in value.items()]
            elif isinstance(value, set | list):
                held = id(value), sorted(map(str, value))
            facts[f"{name}.{key}"] = held
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        facts[f"{name} is"] = (id(tensor), type(tensor), tensor.dtype, tensor.requires_grad)
        facts[f"{name} has"] = (sorted(vars(tensor)), tensor.stride())
        is_shard = hasattr(tensor, "to_local")
        facts[f"{name} values"] = (tensor.to_local() if is_shard else tensor).detach().tolist()
        facts[f"{name} grad"] = id(tensor.grad) if tensor.grad is not None else None
    for state in get_states(model):
        names = [(label.fqn, label.is_among_owned) for h in state.handles for label in h.labels()]
        facts[f"unit {id(state)}"] = (state.name, id(state.context), names)
        facts[f"layouts of {id(state)}"] = [handle.layout for handle in state.handles]
        facts[f"tree of {id(state)}"] = (state.context.states, state.context.modules)
    return facts


CASES: dict[str, tuple[dict[str, Any], bool]] = {  # options, whether an inner unit exists before
    "plain": ({}, False),
    "inner": ({}, True),
    "flat": ({"use_orig_params": False}, True),
    "owned": ({"granularity": "param"}, True),
    "sync": ({"sync_module_states": True}, False),
    "buffers": (
        {
            "mp_policy": composable_shard.MixedPrecisionPolicy(
                param_dtype=torch.float32,
                buffer_dtype=torch.float32,
                keep_fp32_classes=(nn.LayerNorm,),
                output_dtype=torch.float64,
            ),
            "broadcast_buffers": True,
        },
        False,
    ),
    "optim": ({"strategy": "shard_optim", "bucket_cap_mb": 0.0001}, False),
}


def _make_case(case: str) -> tuple[_HookedModel, dict[str, Any]]:
    options, has_inner = CASES[case]
    model = _make()
    if case == "flat":
        model.norm.requires_grad_(True)
    if has_inner:
        inner = {key: value for key, value in options.items() if key == "granularity"}
        fully_shard(model.block, **inner)
    return model, options


def _moments(case: str) -> list[int]:
    """Return when each line of the call's steps runs, the first time or the last."""
    for _ in range(2):  # the second one meets full caches, as those that are stopped do
        model, options = _make_case(case)
        stopper = _Stopper(0)
        with stopper.watching():
            fully_shard(model, **options)
    return [found[-(number % 2)] for number, found in enumerate(stopper.moments.values())]


@pytest.mark.parametrize("case", CASES)
@distributed(1, timeout=240)
def test_call_that_raises_at_any_line_leaves_the_module_as_it_was(case: str) -> None:
    """An error in place of each line of the call changes nothing; the next call succeeds."""
    moments, reached = _moments(case), 0
    for moment in moments:
        model, options = _make_case(case)
        before, stopper = _facts_of_all(model), _Stopper(moment)
        with suppress(_Stop), stopper.watching():
            fully_shard(model, **options)
        if not stopper.place:
            continue  # a finalizer ran fewer lines this time
        reached += 1
        after = _facts_of_all(model)
        names = [key for key in before | after if before.get(key) != after.get(key)]
        assert not names, f"{stopper.place}: {[(k, before.get(k), after.get(k)) for k in names]}"
        if moment % 7 == 0:
            _check_step(fully_shard(model, **options), case)
    assert reached > 0.95 * len(moments) > 200


def _check_step(model: nn.Module, case: str) -> None:
    """Compare the gradients of a step with those of a plain model."""
    plain, batch = _make(), rank_input(3, DIM, step=1).double()
    if case == "flat":
        plain.norm.requires_grad_(True)
    for each in (model, plain):
        each.zero_grad()
        square_mean(each(batch)).backward()
    average_gradients(plain.parameters())
    found = unsharded_gradients(model)
    for name, param in plain.named_parameters():
        tolerance = 1e-5 if case == "buffers" else 1e-9
        torch.testing.assert_close(
            found.get(name), param.grad, rtol=0, atol=tolerance, check_dtype=False
        )


class _Refusing(nn.Linear):
    """A module that refuses one of the steps of `fully_shard` while `refuses` says so."""

    refuses = "nothing"

    def _check(self, what: str) -> None:
        if self.refuses == what:
            raise LookupError(f"no {what}")

    def register_state_dict_post_hook(self, hook: Any) -> Any:
        self._check("hooks")
        return super().register_state_dict_post_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        self._check("late hooks")
        return super().register_load_state_dict_pre_hook(hook)

    @property
    def _fqn_modifiers(self) -> Any:
        self._check("property")
        raise AttributeError("_fqn_modifiers")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_non_persistent_buffers_set" and name in vars(self):
            self._check("attribute")
        super().__setattr__(name, value)


def _with_refusing(at_root: bool) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    last = _Refusing(DIM, DIM)
    model = last if at_root else nn.Sequential(inner, nn.Tanh(), last)
    return model.double()


REFUSALS = {  # what is refused: whether the unit's own module refuses it
    "hooks": False,
    "late hooks": False,
    "property": True,
    "attribute": True,
    "memory": False,
}


@pytest.mark.parametrize("options", [{}, {"granularity": "param"}, {"sync_module_states": True}])
@pytest.mark.parametrize("what", REFUSALS)
@distributed(1, 2, 3)
def test_module_that_refuses_a_step_is_left_as_it_was_and_can_be_sharded_later(
    what: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks: objects, values, hooks, units inside; the corrected call trains."""
    model = _with_refusing(REFUSALS[what])
    if not options.get("sync_module_states") and isinstance(model, nn.Sequential):
        fully_shard(model[0], **options)
    before = _facts_of_all(model)
    refused: type[Exception] = LookupError
    if what == "memory":
        refused = torch.OutOfMemoryError
        monkeypatch.setattr(buffers, "place_buffers", _run_out_of_memory)
    else:
        next(m for m in model.modules() if isinstance(m, _Refusing)).refuses = what
        before = _facts_of_all(model)
    for _ in range(2):
        with pytest.raises(refused):
            fully_shard(model, **options)
        assert _facts_of_all(model) == before
    monkeypatch.undo()
    for module in model.modules():
        vars(module).pop("refuses", None)
    fully_shard(model, **options)
    plain = _with_refusing(REFUSALS[what])
    batch = rank_input(6, DIM, step=1).double()
    for each in (model, plain):
        square_mean(each(batch)).backward()
    average_gradients(plain.parameters())
    found = unsharded_gradients(model)
    for name, param in plain.named_parameters():
        assert_close(found.get(name), param.grad, name)


def _run_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory for a buffer")


@distributed(2, 3)
def test_refused_call_has_not_broadcast_the_first_ranks_values() -> None:
    """With `sync_module_states` each rank still has its own parameters and buffers."""
    model = _with_refusing(False)
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(rank)
    before = copy.deepcopy(model.state_dict())
    model[2].refuses = "hooks"
    with pytest.raises(LookupError):
        fully_shard(model, sync_module_states=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    model[2].refuses = "nothing"
    fully_shard(model, sync_module_states=True)
    plain = _with_refusing(False)
    for name, value in unsharded_values(model).items():
        assert torch.equal(value, plain.get_parameter(name).detach()), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
