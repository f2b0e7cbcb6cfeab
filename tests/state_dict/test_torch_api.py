"""torch's functions on sharded models, and torch's options in ours."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn

from composable_shard import (
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    register_orig_params,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tests.harness.ranks import distributed
from tests.programs.models import (
    EVERYWHERE,
    Net,
    assert_holds,
    make_net,
    seeded,
    shard_blocks,
)


def _train_in_two_groups(model: nn.Module, seed: int) -> torch.optim.AdamW:
    """Return an optimizer of two groups after a step on values that are the same on all ranks."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == kind], "weight_decay": 0.1 * kind}
        for kind in (1, 2)
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01 * (1 + seed))
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _assert_same_form(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested values, of which FlatShards are made whole."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_same_form(found[key], value, f"{where}.{key}")
    elif isinstance(expected, Tensor):
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6, msg=where)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            _assert_same_form(found[number], value, f"{where}.{number}")
    else:
        assert found == expected, where


_FLAGS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "on the host": {"cpu_offload": True},
    "whole": {"full_state_dict": True},
    "whole on the host": {"full_state_dict": True, "cpu_offload": True},
    "without frozen": {"ignore_frozen_params": True},
    "without frozen, whole": {"ignore_frozen_params": True, "full_state_dict": True},
}


@pytest.mark.parametrize("flags", _FLAGS)
@distributed(2)
def test_torchs_options_mean_in_our_functions_what_they_mean_in_torchs(flags: str) -> None:
    """The dicts are those that torch's functions make of a plain model, on the same ranks."""
    options = torch_state_dict.StateDictOptions(**_FLAGS[flags])
    torch.manual_seed(0)
    plain = Net(num_blocks=1)
    plain.out.weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    shard_blocks(model)
    optimizers = [_train_in_two_groups(each, 0) for each in (plain, model)]
    expected = (
        torch_state_dict.get_model_state_dict(plain, options=options),
        torch_state_dict.get_optimizer_state_dict(plain, optimizers[0], options=options),
    )
    found = (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizers[1], options=options),
    )
    _assert_same_form(found[0], expected[0])
    _assert_same_form(found[1], expected[1])
    if "whole" in flags and found[0]:
        assert {type(value) for value in found[0].values()} == {Tensor}


@distributed(2)
def test_torchs_options_mean_the_same_in_the_rest_of_our_functions() -> None:
    """`strict`, and the fields that are refused by name."""
    torch_options: Any = torch_state_dict.StateDictOptions
    plain, model = seeded(Net, seed=1), make_net()
    values = dict(plain.state_dict(), other=torch.ones(1))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        set_model_state_dict(model, values, options=torch_options())
    set_model_state_dict(model, values, options=torch_options(strict=False))
    assert_holds(model.state_dict(), plain)
    odd = torch_options(dsd_fqn_modifiers="names")
    flat = torch_options(flatten_optimizer_state_dict=True)
    for call in (
        get_model_state_dict,
        functools.partial(set_model_state_dict, model_state_dict={}),
    ):
        with pytest.raises(ValueError, match=r"dsd_fqn_modifiers.*rename the keys"):
            call(model, options=odd)
        with pytest.raises(ValueError, match=r"flatten_optimizer_state_dict.*Nested dicts"):
            call(model, options=flat)


_TORCHS = {
    "get_model": lambda model, _: torch_state_dict.get_model_state_dict(model),
    "set_model": lambda model, _: torch_state_dict.set_model_state_dict(
        model,
        seeded(Net).state_dict() if dist.get_rank() == 0 else {},
        options=torch_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    "get_optimizer": torch_state_dict.get_optimizer_state_dict,
    "set_optimizer": lambda model, optimizer: torch_state_dict.set_optimizer_state_dict(
        model,
        optimizer,
        {},
        options=torch_state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
}


@pytest.mark.parametrize("name", _TORCHS)
@distributed(2)
def test_torchs_functions_refuse_flat_parameters_on_all_ranks(name: str) -> None:
    """They would use the flat parameters' names, or wait for ever; with originals they work."""
    model = make_net(use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"show flat parameters.*register_orig_params"):
            _TORCHS[name](each, optimizer)
    register_orig_params(model)
    assert torch_state_dict.get_model_state_dict(model).keys() == seeded(Net).state_dict().keys()


@pytest.mark.parametrize("name", _TORCHS)
@distributed(2)
def test_torchs_functions_see_a_unit_without_child_modules(name: str) -> None:
    """They ask it for nothing but whether a parameter's name is that of a hidden buffer."""
    model = nn.Linear(6, 5)
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    fully_shard(model, use_orig_params=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for each in (model, copy.deepcopy(model)):
        each.register_buffer("late", torch.ones(3), persistent=False)
        with pytest.raises(RuntimeError, match=r"show flat parameters.*register_orig_params"):
            _TORCHS[name](each, optimizer)
    register_orig_params(model)
    whole: Any = torch_state_dict.StateDictOptions(full_state_dict=True)
    values = torch_state_dict.get_model_state_dict(model, options=whole)
    assert {key: type(value) for key, value in values.items()} == dict.fromkeys(values, Tensor)
    optimizer = torch.optim.AdamW(model.parameters())
    state = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    assert {type(value) for each in state.values() for value in each.values()} == {Tensor}


@pytest.mark.parametrize("way", ["everywhere", "on the host", "from the first rank", "together"])
@distributed(2)
def test_torchs_full_optimizer_state_goes_out_and_in(way: str) -> None:
    """As of a plain model, after which a further step trains as the plain model's."""
    plain, model = seeded(Net, seed=1), make_net()
    optimizers = [_train_in_two_groups(each, seed) for seed, each in ((1, plain), (0, model))]
    whole = functools.partial(torch_state_dict.StateDictOptions, full_state_dict=True)
    states: list[Any] = [
        torch_state_dict.get_optimizer_state_dict(each, optimizer)
        for each, optimizer in zip((plain, model), optimizers, strict=True)
    ]
    options: Any = whole(cpu_offload=way == "on the host")
    if way == "together":
        _, found = torch_state_dict.get_state_dict(model, optimizers[1], options=options)
    else:
        found = torch_state_dict.get_optimizer_state_dict(model, optimizers[1], options=options)
    expected = get_optimizer_state_dict(model, optimizers[1], options=EVERYWHERE)
    if way != "on the host" or dist.get_rank() == 0:
        _assert_same_form(found, expected)
    else:
        assert not found.get("state")
    given = copy.deepcopy((plain.state_dict(), states[0]))
    options = whole(broadcast_from_rank0=way == "from the first rank")
    if way == "from the first rank" and dist.get_rank() > 0:
        given = {}, {}
    if way == "together":
        torch_state_dict.set_state_dict(
            model,
            optimizers[1],
            model_state_dict=given[0],
            optim_state_dict=given[1],
            options=options,
        )
    else:
        torch_state_dict.set_model_state_dict(model, given[0], options=options)
        torch_state_dict.set_optimizer_state_dict(model, optimizers[1], given[1], options=options)
    found = get_optimizer_state_dict(model, optimizers[1], options=EVERYWHERE)
    _assert_same_form(found["state"], states[0]["state"])
    lrs = [[group["lr"] for group in each.param_groups] for each in optimizers]
    assert lrs[0] == lrs[1]
    assert not optimizers[1]._optimizer_load_state_dict_pre_hooks
    assert not optimizers[1]._optimizer_state_dict_post_hooks
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        each(torch.ones(4, 5)).sum().backward()
        optimizer.step()
    assert_holds(model.state_dict(), plain)


@distributed(2)
def test_torchs_optimizer_load_refuses_whole_parameters() -> None:
    """It wants each rank to have all state, and ended in a KeyError; the flat form works."""
    model = make_net(granularity="param")
    optimizer = _train_in_two_groups(model, 0)
    expected = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    state = torch_state_dict.get_optimizer_state_dict(model, optimizer)
    with pytest.raises(NotImplementedError, match=r"misses the state.* own whole .*Call the fun"):
        torch_state_dict.set_optimizer_state_dict(model, optimizer, state)
    flat: Any = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    state = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=flat)
    other = make_net(granularity="param")
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(NotImplementedError, match=r"misses the state.* own whole .*Call the fun"):
        torch_state_dict.set_optimizer_state_dict(other, fresh, state, options=flat)
    assert not fresh.state
    used = _train_in_two_groups(other, 1)
    torch_state_dict.set_optimizer_state_dict(other, used, state, options=flat)
    _assert_same_form(get_optimizer_state_dict(other, used, options=EVERYWHERE), expected)


@pytest.mark.parametrize("granularity", ["element", "param"])
@pytest.mark.parametrize("from_first", [False, True])
@distributed(2)
def test_torchs_optimizer_load_of_whole_flat_state_is_refused(
    from_first: bool, granularity: Any
) -> None:
    """With FSDP2 it ends in a KeyError on each rank; with whole parameters one rank waited."""
    model = make_net(granularity=granularity)
    optimizer = _train_in_two_groups(model, 0)
    expected = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    options: Any = torch_state_dict.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=from_first, flatten_optimizer_state_dict=True
    )
    with pytest.raises(NotImplementedError, match=r"(flat form|misses the state).*Call the fun"):
        torch_state_dict.set_optimizer_state_dict(model, optimizer, expected, options=options)
    _assert_same_form(get_optimizer_state_dict(model, optimizer, options=EVERYWHERE), expected)


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("way", ["of the model", "ours"])
@distributed(2)
def test_values_that_only_the_first_rank_has_are_refused(way: str, is_strict: bool) -> None:
    """On all ranks, with the right call to make; each would keep other values of a parameter."""
    model = make_net()
    values = seeded(Net, seed=1).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(strict=is_strict)
    load = {
        "of the model": functools.partial(model.load_state_dict, strict=is_strict),
        "ours": functools.partial(set_model_state_dict, model, options=options),
    }[way]
    with pytest.raises(RuntimeError, match=r"broadcast_from_rank0=True\)\) on all ranks"):
        load(values)
    assert_holds(model.state_dict(), seeded(Net))
    set_model_state_dict(model, values, options=StateDictOptions(broadcast_from_rank0=True))
    assert_holds(model.state_dict(), seeded(Net, seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    state = state if dist.get_rank() == 0 else {}
    with pytest.raises(ValueError, match=r"broadcast_from_rank0=True\) on all ranks"):
        set_optimizer_state_dict(model, optimizer, state)


@distributed(2)
def test_ranks_that_give_values_of_different_parameters_are_refused() -> None:
    """By name, without `strict` too."""
    model = make_net()
    values = seeded(Net, seed=1).state_dict()
    if dist.get_rank() == 1:
        del values["out.bias"]
    with pytest.raises(RuntimeError, match=r'different parameters: some have "out\.bias", others'):
        model.load_state_dict(values, strict=False)
    assert_holds(model.state_dict(), seeded(Net))
