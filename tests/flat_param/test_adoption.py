"""What users change at rest, or while full values are shown, counts: `requires_grad`, data, hooks.

Case 6 of the claims: `requires_grad` at any moment. A program changes it as a user would; the plain
model that runs the same program says what must come out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    ShardingStrategy,
    get_handles,
    is_sharded,
    reshard,
    unshard,
    unshard_params,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right
from tests.programs.models import (
    Net,
    rank_input,
    seeded,
    shard_blocks,
    shard_root,
    square_mean,
)


def _loss(model: nn.Module, number: int) -> Tensor:
    return square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64)))


def _freeze(module: nn.Module, flag: bool = False) -> None:
    for param in module.parameters():
        param.requires_grad_(flag)


def _replace_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data.clone()


def _is_due(model: nn.Module, number: int, step: int) -> bool:
    """Return whether this is the first microbatch of a step: of some only the second is run."""
    seen = model.__dict__.setdefault("_seen", set())
    is_first = number // 2 == step and step not in seen
    if is_first:
        seen.add(step)
    return is_first


# Programs: one microbatch each. Block 0 is frozen in step 1 and trained again in step 2.


def freezes_then_sets_data(model: nn.Module, number: int) -> None:
    """Freeze, then `p.data = x` on the parameters of the same handle."""
    for step in (1, 2):
        if _is_due(model, number, step):
            _freeze(model.blocks[0], step == 2)
            _replace_data(model.blocks[0])
    _loss(model, number).backward()


def sets_data_then_freezes(model: nn.Module, number: int) -> None:
    """The same in the other order, with the data of the root's parameters too."""
    for step in (1, 2):
        if _is_due(model, number, step):
            _replace_data(model)
            _freeze(model.blocks[0], step == 2)
    _loss(model, number).backward()


def is_frozen_before_the_first_forward(model: nn.Module, number: int) -> None:
    """Flags and data that were changed before there are full parameters."""
    if _is_due(model, number, 0):
        _freeze(model.blocks[0])
        _replace_data(model.blocks[1])
        _freeze(model.blocks[1])
    if _is_due(model, number, 2):
        _freeze(model.blocks[0], True)
    _loss(model, number).backward()


def converts_frozen(model: nn.Module, number: int) -> None:
    """`.float()` and back; `.double()` that changes nothing."""
    if _is_due(model, number, 1):
        _freeze(model.blocks[0])
        model.float()
        model.double()
    if _is_due(model, number, 2):
        _freeze(model.blocks[0], True)
        model.double()
    _loss(model, number).backward()


def loads_a_vector(model: nn.Module, number: int) -> None:
    """`vector_to_parameters`, on shards as on plain parameters."""
    if _is_due(model, number, 1):
        _freeze(model.blocks[0])
        params = [param.data for param in model.parameters()]
        for param, value in zip(model.parameters(), params, strict=True):
            param.data = value * 1.5
    if _is_due(model, number, 2):
        _freeze(model.blocks[0], True)
        with unshard_params(model) if is_sharded(model) else nullcontext():
            params = list(model.parameters())
            vector_to_parameters(parameters_to_vector(params) * 0.5, params)
    _loss(model, number).backward()


def swaps_averages(model: nn.Module, number: int) -> None:
    """Averages for an evaluation between steps, and the weights back."""
    if _is_due(model, number, 1):
        _freeze(model.blocks[0])
    if _is_due(model, number, 2):
        params = list(model.parameters())
        backup = [param.data for param in params]
        for param in params:
            param.data = param.data * 0.5
        _freeze(model.blocks[0], True)
        with torch.no_grad():
            _loss(model, number)
        for param, value in zip(params, backup, strict=True):
            param.data = value
    _loss(model, number).backward()


def freezes_before_the_backward(model: nn.Module, number: int) -> None:
    """Between forward and backward: autograd asks again before it accumulates."""
    _freeze(model.blocks[0], True)
    loss = _loss(model, number)
    _freeze(model.blocks[0])
    loss.backward()


def unfreezes_before_the_backward(model: nn.Module, number: int) -> None:
    """The graph knows nothing of it."""
    _freeze(model.blocks[0])
    loss = _loss(model, number)
    _freeze(model.blocks[0], True)
    loss.backward()


def freezes_all_but_one(model: nn.Module, number: int) -> None:
    """Every unit but one, the root too."""
    _freeze(model, True)
    loss = _loss(model, number)
    _freeze(model)
    _freeze(model.blocks[2], True)
    loss.backward()


def freezes_between_two_forwards(model: nn.Module, number: int) -> None:
    """One graph was recorded before, one after, and all is trained again when they run."""
    _freeze(model.blocks[0], True)
    first = _loss(model, number)
    _freeze(model.blocks[0])
    second = _loss(model, number + 100)
    _freeze(model.blocks[0], True)
    (first + second).backward()


def stays_frozen_after_two_forwards(model: nn.Module, number: int) -> None:
    """One graph was recorded before, one after."""
    _freeze(model.blocks[0], True)
    first = _loss(model, number)
    _freeze(model.blocks[0])
    (first + _loss(model, number + 100)).backward()


def unfreezes_between_two_forwards(model: nn.Module, number: int) -> None:
    """The first graph reads full parameters whose gradients have no buffers yet."""
    _freeze(model)
    _freeze(model.blocks[1], True)
    first = _loss(model, number)
    _freeze(model, True)
    (first + _loss(model, number + 100)).backward()


def runs_a_graph_twice(model: nn.Module, number: int) -> None:
    """Frozen for one of two backwards of a graph."""
    _freeze(model.blocks[0], True)
    loss = _loss(model, number)
    _freeze(model.blocks[0])
    loss.backward(retain_graph=True)
    _freeze(model.blocks[0], True)
    loss.backward()


def freezes_what_unshard_shows(model: nn.Module, number: int) -> None:
    """The full parameters that `unshard` shows."""
    if is_sharded(model):
        unshard(model, recurse=True)
    _freeze(model.blocks[0], number // 2 != 1)
    if is_sharded(model):
        reshard(model, recurse=True)
    _loss(model, number).backward()


def freezes_what_unshard_keeps(model: nn.Module, number: int) -> None:
    """The same, and they stay shown during the microbatch."""
    if is_sharded(model):
        unshard(model, recurse=True)
    _freeze(model, number // 2 == 1)
    _freeze(model.blocks[1], True)
    _loss(model, number).backward()
    if is_sharded(model):
        reshard(model, recurse=True)


def freezes_what_a_scope_shows(model: nn.Module, number: int) -> None:
    """The full parameters that `unshard_params` shows."""
    with unshard_params(model) if is_sharded(model) else nullcontext():
        _freeze(model.blocks[0], number // 2 != 1)
    _loss(model, number).backward()


def opens_a_scope_when_frozen(model: nn.Module, number: int) -> None:
    """A scope that changes no flag leaves those that no forward has seen yet."""
    _freeze(model.blocks[0], number // 2 != 1)
    if is_sharded(model):
        with unshard_params(model):
            pass
    _loss(model, number).backward()


def freezes_in_a_pre_hook(model: nn.Module, number: int) -> None:
    """A forward freezes the unit that it has begun to run."""
    _run_with_hook(model.blocks[0].register_forward_pre_hook, model, number)


def freezes_in_a_hook(model: nn.Module, number: int) -> None:
    """A forward freezes a unit after it has computed with its parameters."""
    _run_with_hook(model.blocks[0].up.register_forward_hook, model, number)


def _run_with_hook(register: Callable[..., object], model: nn.Module, number: int) -> None:
    removable = register(lambda *_: _freeze(model.blocks[0], number // 2 != 1))
    _loss(model, number).backward()
    removable.remove()


def freezes_in_a_backward_hook(model: nn.Module, number: int) -> None:
    """A backward freezes a unit before it reaches it."""
    _freeze(model.blocks[0], True)
    hook = model.blocks[2].register_full_backward_hook(lambda *_: _freeze(model.blocks[0]))
    _loss(model, number).backward()
    hook.remove()


def recomputes(model: nn.Module, number: int) -> None:
    """Frozen between the forward and its recomputation, which records a graph without it."""
    _freeze(model, True)
    x = rank_input(3, 5, step=number, dtype=torch.float64).requires_grad_()
    loss = square_mean(checkpoint(model, x, use_reentrant=True))
    _freeze(model.blocks[0], number // 2 != 1)
    loss.backward()


PROGRAMS = [
    freezes_then_sets_data,
    sets_data_then_freezes,
    is_frozen_before_the_first_forward,
    converts_frozen,
    loads_a_vector,
    swaps_averages,
    freezes_before_the_backward,
    unfreezes_before_the_backward,
    freezes_all_but_one,
    freezes_between_two_forwards,
    stays_frozen_after_two_forwards,
    unfreezes_between_two_forwards,
    runs_a_graph_twice,
    freezes_what_unshard_shows,
    freezes_what_unshard_keeps,
    freezes_what_a_scope_shows,
    opens_a_scope_when_frozen,
    freezes_in_a_pre_hook,
    freezes_in_a_hook,
    freezes_in_a_backward_hook,
    recomputes,
]


@pytest.mark.parametrize(
    *pairwise(
        program=PROGRAMS,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[False, True],
    )
)
@distributed(2)
def test_c6_requires_grad_counts_whenever_it_is_set(
    program: Callable[[nn.Module, int], None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    """Case 6: gradients, values and flags are those of the plain model, whenever units freeze."""
    assert_right(
        Net,
        program,
        shard=shard_blocks,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


def _double(gradient: Tensor) -> Tensor:
    return 2 * gradient


def freezes_one_of_a_handle(model: nn.Module, number: int) -> None:
    """One of several parameters of a handle; `p.data = x` on another."""
    for step in (1, 2):
        if _is_due(model, number, step):
            model.blocks[0].up.weight.requires_grad_(step == 2)
            model.blocks[0].down.bias.data = model.blocks[0].down.bias.data.clone()
            model.inp.weight.data = model.inp.weight.data.clone()
            model.inp.bias.requires_grad_(step == 2)
    _loss(model, number).backward()


def has_hooks_when_data_is_set(model: nn.Module, number: int) -> None:
    """Hooks, and a frozen weight's, outlive `.to()` and `p.data = x`."""
    if _is_due(model, number, 0):
        for module in (model.inp, model.blocks[0].up, model.blocks[0].down):
            module.weight.register_hook(_double)
        model.blocks[0].up.weight.requires_grad_(False)
    if _is_due(model, number, 1):
        model.float()
        model.double()
        _replace_data(model.blocks[0])
    if _is_due(model, number, 2):
        model.blocks[0].up.weight.requires_grad_(True)
        _replace_data(model.blocks[0])
    _loss(model, number).backward()


def freezes_one_in_forward(model: nn.Module, number: int) -> None:
    """A forward freezes one parameter, a backward another one."""
    block, flag = model.blocks[0], number // 2 != 1

    def set_weight(*_: object) -> None:
        block.up.weight.requires_grad_(flag)

    def set_bias(*_: object) -> None:
        block.down.bias.requires_grad_(flag)

    pre_hook = block.register_forward_pre_hook(set_weight)
    hook = model.blocks[2].register_full_backward_hook(set_bias)
    _loss(model, number).backward()
    pre_hook.remove()
    hook.remove()


@pytest.mark.parametrize(
    *pairwise(
        program=[freezes_one_of_a_handle, has_hooks_when_data_is_set, freezes_one_in_forward],
        strategy=list(ShardingStrategy),
        accumulates=[False, True],
    )
)
@distributed(2)
def test_c6_one_parameter_of_a_handle_can_be_frozen(
    program: Callable[[nn.Module, int], None], strategy: ShardingStrategy, accumulates: bool
) -> None:
    """Case 6: where modules show originals, each has its own flag and hooks."""
    assert_right(Net, program, shard=shard_blocks, accumulates=accumulates, strategy=strategy)


@distributed(2)
def test_c6_part_of_a_flat_parameter_is_not_frozen() -> None:
    """Case 6: what one flat parameter can't say is refused, and does not count."""
    model = Net().double()
    shard_blocks(model, use_orig_params=False)
    unshard(model.blocks[0])
    model.blocks[0].up.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"\['blocks.0.up.weight'\] of unit 'blocks.0'"):
        reshard(model.blocks[0])
    _loss(model, 0).backward()
    (handle,) = get_handles(model.blocks[0])
    (flat,) = handle.shown.at_rest
    assert flat.sharded.grad is not None


@distributed(2)
def test_a_parametrized_weight_is_assigned_inside_unshard_params() -> None:
    """At rest torch exchanges the parameters for others, which is refused by name."""
    x, value = rank_input(3, 6), torch.full((4, 6), 0.5)
    model = seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4, bias=False)))
    shard_root(model)
    with unshard_params(model):
        model.weight = value
    torch.testing.assert_close(model(x), x @ value.T)
    with torch.no_grad():
        model.weight = 2 * value
    with pytest.raises(RuntimeError, match=r"was exchanged for another tensor at rest.*unshard_p"):
        model(x)
