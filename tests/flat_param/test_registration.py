"""`register_flat_param` and `register_orig_params`: the form changes, and nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from composable_shard import (
    FlatShard,
    fully_shard,
    get_handles,
    get_states,
    is_sharded,
    no_sync,
    register_flat_param,
    register_orig_params,
    reshard,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm.trace import count_collectives
from tests.common.free_group import free_world
from tests.flat_param.test_flat_mode import (
    _FLAT_NAMES,
    _NET,
    _NET_NAMES,
    FlatTwins,
    assert_flat_at_rest,
    assert_same_values,
    full_values_and_gradients,
    make_flat,
    names,
)
from tests.harness.assertions import assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Twins,
    assert_at_rest,
    rank_input,
    shard_blocks,
    shard_root,
    square_mean,
)
from tests.programs.modules import OptionalStack, TiedLanguage, rank_tokens
from tests.runtime.test_random_trees import _RandomTree, _RandomUnit

Toggle = Callable[..., None]
_TOGGLES: list[Toggle] = [register_flat_param, register_orig_params]


def _make_original(make: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    model = make()
    shard_blocks(model)
    return model


def _sharded_gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


# --- at rest ---


@distributed(1, 2, 3)
def test_gradients_move_with_the_form() -> None:
    """And come back bitwise; the names are those of the form, in their order (S1.8)."""
    model = _make_original()
    _NET(model, 0).backward()
    before, grads = full_values_and_gradients(model), _sharded_gradients(model)
    states = [state.training_state for state in get_states(model)]
    with count_collectives() as log:
        register_flat_param(model)
        assert names(model) == _FLAT_NAMES
        assert all(isinstance(param.grad, FlatShard) for param in model.parameters())
        register_flat_param(model)
        register_orig_params(model)
        register_orig_params(model)
    assert not log.events
    assert names(model) == _NET_NAMES
    for grad, expected in zip(_sharded_gradients(model), grads, strict=True):
        assert_equal(grad, expected)
    assert_same_values(full_values_and_gradients(model), before)
    assert states == [state.training_state for state in get_states(model)]
    assert_at_rest(model)


def test_originals_stay_shown_before_the_first_forward() -> None:
    """Of a model that was just sharded, and of a copy, which makes buffers of its own as well."""
    with free_world(2):
        model = _make_original()
        register_orig_params(model)
        assert names(model) == _NET_NAMES
        twin = copy.deepcopy(model)
        twin(torch.ones(2, 5)).sum().backward()
        register_orig_params(twin)
        assert names(twin) == _NET_NAMES
        assert all(param.grad is not None for param in twin.parameters())


@distributed(1, 2)
def test_missing_gradients_stay_missing() -> None:
    """Of whole units, and of the single parameters that nobody used, in both directions."""
    twins = Twins(OptionalStack, shard_blocks)
    twins.step(lambda model: square_mean(model(rank_input(4, 5), (True, False, False))))
    model = twins.sharded
    register_flat_param(model)
    assert_same_values(full_values_and_gradients(model), full_values_and_gradients(twins.plain))
    register_orig_params(model)
    assert model.blocks[1].optional.weight.grad is None
    twins.assert_equal_gradients()
    for each in twins:
        each.zero_grad()
    register_flat_param(model)
    assert all(param.grad is None for param in model.parameters())
    register_orig_params(model)
    assert all(param.grad is None for param in model.parameters())


@distributed(2)
def test_gradient_set_by_hand_moves_to_all_originals() -> None:
    """No backward tells which of them it is meant for."""
    model = make_flat(Layer, shard_root)
    model._flat_param.grad = torch.ones_like(model._flat_param)
    register_orig_params(model)
    assert all(param.grad.full_tensor().eq(1).all() for param in model.parameters())


@pytest.mark.fast
@distributed(2)
def test_same_parameter_objects_come_back() -> None:
    """Whatever is toggled, so optimizers of either form stay valid; values are shared."""
    model = Net()
    originals = list(model.parameters())
    shard_blocks(model, use_orig_params=False)
    flats = list(model.parameters())
    for _ in range(2):
        register_orig_params(model)
        assert all(a is b for a, b in zip(originals, model.parameters(), strict=True))
        with torch.no_grad():
            model.inp.bias.mul_(0).add_(3)
        register_flat_param(model)
        assert all(a is b for a, b in zip(flats, model.parameters(), strict=True))
    assert full_values_and_gradients(model)["inp.bias"][0].eq(3).all()


@pytest.mark.parametrize("is_flat_first", [True, False])
@distributed(1, 2, 3)
def test_training_goes_on_with_an_optimizer_built_anew(is_flat_first: bool) -> None:
    """Bitwise, toggled after every step."""
    twins = FlatTwins(TiedLanguage, shard_blocks, against_originals=True)
    if not is_flat_first:
        register_orig_params(twins.sharded)
    for step in range(4):
        optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in twins]
        twins.step(lambda model, step=step: square_mean(model(rank_tokens(step))))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        is_flat = "_flat_param" in names(twins.sharded)
        (register_orig_params if is_flat else register_flat_param)(twins.sharded)
    twins.assert_equal_parameters()


@pytest.mark.fast
@distributed(1, 2)
def test_toggle_between_backward_and_step() -> None:
    """The optimizer of the other form finds the gradients, clipped or accumulated further."""
    twins = FlatTwins(Net, shard_blocks)
    register_orig_params(twins.sharded)
    optimizers = twins.optimizers(optim.SGD)
    register_flat_param(twins.sharded)
    for step in range(2):
        twins.step(lambda model, step=step: _NET(model, step))
    register_orig_params(twins.sharded)
    for optimizer in optimizers:
        optimizer.step()
    twins.assert_equal_parameters()


@pytest.mark.parametrize("toggle", _TOGGLES)
@distributed(1, 2)
def test_toggle_between_forward_and_backward(toggle: Toggle) -> None:
    """The backward gives its gradients to what is shown then; unsynced ones wait on."""
    is_flat = toggle is register_flat_param
    twins = FlatTwins(Net, shard_blocks, against_originals=True, reshard_after_forward=False)
    (register_orig_params if is_flat else register_flat_param)(twins.sharded)
    for model in twins:
        with no_sync(model):
            _NET(model, 0).backward()
    losses = [_NET(model, 1) for model in twins]
    toggle(twins.sharded)
    for loss in losses:
        loss.backward()
    assert names(twins.sharded) == (_FLAT_NAMES if is_flat else _NET_NAMES)
    twins.assert_equal_gradients()
    twins.step(lambda model: _NET(model, 2))


@distributed(2)
def test_recurse_reaches_the_units_below_or_not() -> None:
    """Also those below a module that is no unit itself (S1.2)."""
    model = _make_original()
    register_flat_param(model, recurse=False)
    assert [name for name in names(model) if "_flat_param" in name] == ["_flat_param"]
    register_flat_param(model.blocks)
    assert sorted(names(model)) == sorted(_FLAT_NAMES)
    register_orig_params(model.blocks[1], recurse=False)
    assert [name for name in names(model) if "blocks.1" in name] == [
        f"blocks.1.{name}" for name in names(Layer())
    ]
    _NET(model, 0).backward()


@distributed(1, 2)
def test_units_without_parameters_are_left_alone() -> None:
    """Toggling them is no error and shows nothing (S1.2)."""
    model = nn.Sequential(nn.Tanh(), nn.Tanh())
    fully_shard(model[0])
    fully_shard(model, use_orig_params=False)
    for toggle in _TOGGLES:
        toggle(model)
        assert names(model) == []
        assert not hasattr(model, "_flat_param")


@pytest.mark.parametrize("toggle", _TOGGLES)
@distributed(1)
def test_module_without_units_is_an_error(toggle: Toggle) -> None:
    """With what to do, which depends on `recurse`."""
    with pytest.raises(ValueError, match="expected a module with sharded units, got Layer"):
        toggle(Layer())
    model = nn.Sequential(fully_shard(Layer()))
    with pytest.raises(ValueError, match="or pass recurse=True for the units inside it"):
        toggle(model, recurse=False)
    toggle(model)


@distributed(2)
def test_copies_of_toggled_models_train_on() -> None:
    """In the form that they were copied in, without gradients."""
    for toggle in _TOGGLES:
        twins = FlatTwins(Net, shard_blocks)
        register_orig_params(twins.sharded)
        twins.step(lambda model: _NET(model, 0))
        register_flat_param(twins.sharded)
        toggle(twins.sharded)
        original, twins.sharded = twins.sharded, copy.deepcopy(twins.sharded)
        assert names(twins.sharded) == names(original)
        twins.plain.zero_grad()
        twins.step(lambda model: _NET(model, 1))
        if toggle is register_orig_params:
            register_flat_param(twins.sharded)
        twins.plain.zero_grad()
        twins.sharded.zero_grad()
        twins.train(_NET, optim.AdamW, lr=0.1)


@distributed(2)
def test_conversion_reaches_the_form_that_is_not_shown() -> None:
    """`double()` in one form, computed in the other."""
    twins = FlatTwins(Net, shard_blocks)
    for toggle in (register_orig_params, register_flat_param):
        toggle(twins.sharded)
        for model in twins:
            model.double() if toggle is register_orig_params else model.float()
        (register_flat_param if toggle is register_orig_params else register_orig_params)(
            twins.sharded
        )
        dtype = twins.plain.inp.weight.dtype
        assert {param.dtype for param in twins.sharded.parameters()} == {dtype}
        losses = [square_mean(model(rank_input(4, 5, dtype=dtype))).detach() for model in twins]
        assert_equal(*losses)


def _shard_at_random(model: nn.Module, *, use_orig_params: bool, random: Random) -> None:
    for module in reversed(list(model.modules())):
        if isinstance(module, _RandomUnit) and module.is_unit:
            is_flat = not use_orig_params and random.random() < 0.5
            fully_shard(module, use_orig_params=not is_flat, **module.options)
    fully_shard(model, use_orig_params=use_orig_params)


@pytest.mark.parametrize("seed", range(4))
@distributed(2, 3)
def test_random_trees_toggled_at_random(seed: int) -> None:
    """Units of both forms, parameters used on some ranks only, before and after backwards."""
    random, own_random = Random(seed), Random(100 * seed + dist.get_rank())
    shard = partial(_shard_at_random, random=random)
    twins = FlatTwins(lambda: _RandomTree(random), shard, against_originals=True)
    units = [module for module in twins.sharded.modules() if is_sharded(module)]
    for step in range(4):
        uses = own_random.choices([True, False], k=50)
        x = rank_input(3, 6, step=step)
        losses = [square_mean(model(x, uses)) for model in twins]
        random.choice(_TOGGLES)(random.choice(units), recurse=random.random() < 0.5)
        for loss in losses:
            loss.backward()
        random.choice(_TOGGLES)(random.choice(units), recurse=random.random() < 0.5)
        twins.assert_equal_gradients()
        if step % 2:
            for model in twins:
                model.zero_grad()
    assert_flat_at_rest(twins.sharded)


# --- while full values are shown ---


@distributed(1, 2, 3)
def test_held_unit_shows_its_full_values_in_either_form() -> None:
    """The flat full parameter, then the originals as its views (S1.8)."""
    model = fully_shard(Layer())
    expected = {name: value for name, (value, _) in full_values_and_gradients(model).items()}
    unshard(model)
    with count_collectives() as log:
        register_flat_param(model)
        full = model.get_parameter("_flat_param")
        register_flat_param(model)
        assert names(model) == ["_flat_param"]
        assert model.get_parameter("_flat_param") is full
        register_orig_params(model)
        assert names(model) == list(expected)
    assert not log.events
    assert not isinstance(full, FlatShard)
    for name, param in model.named_parameters():
        assert not isinstance(param, FlatShard)
        assert_equal(param.detach(), expected[name])
        assert param.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    reshard(model)
    assert names(model) == list(expected)
    assert_at_rest(model)


@distributed(1, 2)
def test_edit_of_the_full_flat_parameter_is_written_back() -> None:
    """By `writeback`, like that of any other; without it a warning names it."""
    model = make_flat(Layer, shard_root)
    unshard(model)
    register_flat_param(model)
    with torch.no_grad():
        model.get_parameter("_flat_param").fill_(2.0)
    writeback(model)
    reshard(model)
    assert names(model) == ["_flat_param"]
    assert all(value.eq(2).all() for value, _ in full_values_and_gradients(model).values())
    unshard(model)
    register_flat_param(model)
    with torch.no_grad():
        model.get_parameter("_flat_param").fill_(3.0)
    with pytest.warns(UserWarning, match=r"the edits of \['up.weight'\] between unshard"):
        reshard(model)
    assert_flat_at_rest(model)


@distributed(1, 2)
def test_forward_of_a_held_unit_shows_the_originals_again() -> None:
    """And trains right, whatever form was shown."""
    twins = FlatTwins(Net, shard_blocks)
    optimizers = twins.optimizers()
    for step in range(2):
        unshard(twins.sharded, recurse=True)
        register_flat_param(twins.sharded)
        losses = [_NET(model, step) for model in twins]
        for model, loss in zip(twins, losses, strict=True):
            twins.backward(model, loss)
        assert "inp.weight" in names(twins.sharded)
        reshard(twins.sharded, recurse=True)
        assert names(twins.sharded) == _FLAT_NAMES
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal_parameters()


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(1, 2)
def test_toggle_inside_a_scope_ends_with_it(use_orig_params: bool) -> None:
    """Full values in both forms in between; twice is a no-op (S1.3, S1.8)."""
    model = Net()
    shard_blocks(model, use_orig_params=use_orig_params)
    before = {key: list(module._parameters) for key, module in model.named_modules()}
    at_rest = list(model.parameters())
    with unshard_params(model):
        register_flat_param(model)
        full = model.get_parameter("_flat_param")
        register_flat_param(model)
        assert sorted(names(model)) == sorted(_FLAT_NAMES)
        assert model.get_parameter("_flat_param") is full
        assert not isinstance(full, FlatShard)
        with torch.no_grad():
            full.fill_(2.0)
        register_orig_params(model)
        register_orig_params(model)
        assert names(model) == _NET_NAMES
        assert model.out.weight.eq(2).all()
        register_flat_param(model, recurse=False)
    assert all(a is b for a, b in zip(at_rest, model.parameters(), strict=True))
    assert {key: list(module._parameters) for key, module in model.named_modules()} == before
    assert full_values_and_gradients(model)["inp.weight"][0].eq(2).all()
    assert not full_values_and_gradients(model)["blocks.0.up.weight"][0].eq(2).all()
    _NET(model, 0).backward()


def _fail_in_scope(model: nn.Module) -> None:
    with unshard_params(model):
        register_flat_param(model)
        raise KeyError("planned")


@distributed(1, 2)
def test_toggle_in_a_scope_that_fails_ends_with_it() -> None:
    """Also where the body raises."""
    model = make_flat()
    with pytest.raises(KeyError, match="planned"):
        _fail_in_scope(model)
    assert names(model) == _FLAT_NAMES
    assert_flat_at_rest(model)


@distributed(2)
def test_toggle_in_a_scope_for_the_first_rank() -> None:
    """The others show shards in either form, and what they showed before afterwards."""
    model = _make_original()
    _NET(model, 0).backward()
    before = full_values_and_gradients(model)
    with unshard_params(model, rank0_only=True, with_grads=True):
        register_flat_param(model)
        assert sorted(names(model)) == sorted(_FLAT_NAMES)
        register_orig_params(model)
        assert names(model) == _NET_NAMES
    assert names(model) == _NET_NAMES
    assert_same_values(full_values_and_gradients(model), before)
    assert_at_rest(model)


# --- where it is refused ---


class _Toggling(Net):
    """Toggles where it is told to, and keeps the error."""

    where = ""
    toggle: Any = None
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.where == "forward":
            self.try_to_toggle()
        if self.where == "backward":
            x.register_hook(lambda _: self.try_to_toggle())
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def try_to_toggle(self) -> None:
        try:
            self.toggle[0](self)
        except RuntimeError as error:
            self.error = error


_TEXTS = {
    "forward": (
        "register_flat_param and register_orig_params can't run inside the forward of unit "
        "'_Toggling', which shows its full parameters already. Do it before or after the call of "
        "the model."
    ),
    "backward": (
        "register_flat_param and register_orig_params can't run inside a backward pass. Do it "
        "after backward() has returned; gradients are complete only then."
    ),
}


@pytest.mark.parametrize(*pairwise(where=_TEXTS, toggle=_TOGGLES, world_size=(1, 2)))
@distributed()
def test_toggle_inside_a_pass_is_refused(toggle: Toggle, where: str) -> None:
    """And changes nothing: the pass goes on, and so does training."""
    twins = FlatTwins(_Toggling, shard_blocks)
    (register_orig_params if toggle is register_flat_param else register_flat_param)(twins.sharded)
    before = names(twins.sharded)
    twins.sharded.where, twins.sharded.toggle = where, (toggle,)
    optimizers = twins.optimizers()
    twins.step(lambda model: _NET(model, 0))
    assert str(twins.sharded.error) == _TEXTS[where]
    assert names(twins.sharded) == before
    for optimizer in optimizers:
        optimizer.step()
    twins.assert_equal_parameters()


@distributed(1, 2)
def test_partly_frozen_handle_is_refused() -> None:
    """One flag can't say both; nothing has been changed, in other units either."""
    model = _make_original()
    model.blocks[1].up.requires_grad_(False)
    with pytest.raises(RuntimeError) as caught:
        register_flat_param(model)
    assert str(caught.value) == (
        "the parameters ['blocks.1.up.weight', 'blocks.1.up.bias'] of unit 'blocks.1' are frozen "
        "and others are not, so they can't be one flat parameter. Freeze or unfreeze all of them, "
        "or shard the frozen ones as a unit of their own."
    )
    assert names(model) == _NET_NAMES
    _NET(model, 0).backward()
    model.blocks[1].requires_grad_(False)
    register_flat_param(model)
    assert not model.blocks[1]._flat_param.requires_grad
    register_orig_params(model)
    assert not model.blocks[1].down.weight.requires_grad


@distributed(1, 2)
def test_hooks_of_the_form_that_goes_are_refused() -> None:
    """They would never run; removed, the toggle works."""
    model = _make_original()
    removable = model.out.bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(RuntimeError) as caught:
        register_flat_param(model)
    assert str(caught.value) == (
        "the hooks on the parameters ['out.bias'] (register_post_accumulate_grad_hook) would never "
        "run while unit 'Net' shows one flat parameter. Remove them, and register them on the "
        "flat parameter."
    )
    removable.remove()
    register_flat_param(model)
    for register in ("register_post_accumulate_grad_hook", "register_hook"):
        removable = getattr(model.blocks[2]._flat_param, register)(print)
        with pytest.raises(RuntimeError, match=rf"'\S*_flat_param' \({register}\)"):
            register_orig_params(model)
        assert names(model) == _FLAT_NAMES
        removable.remove()
    register_orig_params(model)
    _NET(model, 0).backward()


@distributed(1, 2)
def test_tensor_hooks_on_originals_run_in_both_forms() -> None:
    """They see the full gradient of their parameter, as before."""
    model = _make_original()
    seen: list[torch.Size] = []
    model.out.weight.register_hook(lambda grad: seen.append(grad.shape))
    for toggle in _TOGGLES:
        toggle(model)
        _NET(model, 0).backward()
    assert seen == [(3, 15), (3, 15)]


@distributed(1, 2)
def test_optimizer_over_the_hidden_flat_parameter_is_told() -> None:
    """It would step nothing, silently; shown again, it steps."""
    model = make_flat(Layer, shard_root)
    flat = model._flat_param
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    register_orig_params(model)
    assert model._flat_param is flat
    model(rank_input(4, 15)).sum().backward()
    for method in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(RuntimeError) as caught:
            method()
        assert str(caught.value) == (
            "parameter '_flat_param' has no gradient of its own: its unit shows its original "
            "parameters. Build the optimizer anew from model.parameters(), or call "
            "register_flat_param(module) first."
        )
    before = full_values_and_gradients(model)
    register_flat_param(model)
    optimizer.step()
    for name, (value, grad) in full_values_and_gradients(model).items():
        torch.testing.assert_close(value, before[name][0] - 0.1 * grad)


class _Class(Layer):
    _flat_param = "mine"


@pytest.mark.parametrize("kind", ["attribute", "buffer", "module", "parameter", "class"])
@distributed(1, 2)
def test_attribute_of_that_name_is_refused(kind: str) -> None:
    """It would be overwritten, or hide the flat parameter."""
    model = _Class() if kind == "class" else Layer()
    if kind == "attribute":
        model._flat_param = 3
    elif kind == "buffer":
        model.register_buffer("_flat_param", torch.zeros(2))
    elif kind == "module":
        model._flat_param = nn.Tanh()
    elif kind == "parameter":
        model._flat_param = nn.Parameter(torch.zeros(2))
    shown = names(model)
    fully_shard(model)
    with pytest.raises(RuntimeError) as caught:
        register_flat_param(model)
    assert str(caught.value) == (
        f"the module of unit '{type(model).__name__}' has an attribute '_flat_param', the name of "
        "its flat parameter. Rename it."
    )
    assert names(model) == shown
    with unshard_params(model), pytest.raises(RuntimeError, match="has an attribute"):
        register_flat_param(model)
    register_orig_params(model)
    assert names(model) == shown


@distributed(2)
def test_gradient_that_is_no_shard_is_refused() -> None:
    """Before the first unit has changed its form."""
    model = make_flat()
    model._flat_param.grad = torch.ones(model._flat_param.shape)
    with pytest.raises(RuntimeError) as caught:
        register_orig_params(model)
    assert str(caught.value) == (
        "expected .grad of parameter '_flat_param' to be None or a FlatShard, got Tensor. Let "
        "backward() set it, or assign a FlatShard."
    )
    assert names(model) == _FLAT_NAMES
    model._flat_param.grad = None
    register_orig_params(model)
    assert len(get_handles(model)) == 4
