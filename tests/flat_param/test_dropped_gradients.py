"""`param.grad = None` while modules show full parameters, whose gradients are at rest."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    get_handles,
    no_sync,
    register_flat_param,
    reshard,
    set_requires_all_reduce,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.tensor import set_gradient
from tests.harness.assertions import Planned
from tests.harness.ranks import distributed
from tests.interrupts import Interrupter, without_lost_interrupts
from tests.programs.claims import assert_close, strategies, unsharded_gradients, variants
from tests.programs.models import (
    Layer,
    Net,
    average_gradients,
    rank_input,
    replica_mesh,
    shard_blocks,
    square_mean,
)

_Drop = Callable[[nn.Module], None]
_Run = Callable[[int], None]


def _drop_each(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def _drop_all(model: nn.Module) -> None:
    model.zero_grad()


def _shard_layers_alone(model: Net, **options: Any) -> None:
    """Leave the root no unit: its methods are torch's own."""
    for layer in (model.inp, *model.blocks, model.out):
        fully_shard(layer, **options)


def _interrupt_block(model: nn.Module, run: _Run) -> None:
    """Interrupt a forward, which leaves full parameters."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(1)
    handle.remove()


def _after_an_interrupt(model: nn.Module, drop: _Drop, run: _Run) -> None:
    _interrupt_block(model, run)
    drop(model)
    run(2)


def _between_unshard_and_reshard(model: nn.Module, drop: _Drop, run: _Run) -> None:
    unshard(model, recurse=True)
    run(1)
    drop(model)
    run(2)
    reshard(model, recurse=True)


_Pair = tuple[Net, Net, Callable[[nn.Module, int], None]]


def _make_trained(
    shard: Callable[..., None] = shard_blocks, *, accumulates: bool = False, **options: Any
) -> _Pair:
    """Return a sharded model and a plain one after one microbatch, and what runs another."""
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)
    shard(model, **options)

    def run(net: nn.Module, number: int) -> None:
        x = rank_input(3, 5, step=number, dtype=torch.float64)
        square_mean(net(x)).backward()

    with no_sync(model) if accumulates else nullcontext():
        run(model, 0)
    run(plain, 0)
    return model, plain, run


def _check(sharded: nn.Module, plain: nn.Module) -> None:
    average_gradients(plain.parameters())
    found = unsharded_gradients(sharded)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.grad, f"gradient of {name}")


@pytest.mark.parametrize("drop", [_drop_each, _drop_all])
@pytest.mark.parametrize("shard", [shard_blocks, _shard_layers_alone])
@pytest.mark.parametrize("program", [_after_an_interrupt, _between_unshard_and_reshard])
@variants
@distributed(1, 2)
def test_what_a_full_parameter_drops_is_dropped_at_rest(
    program: Callable[[nn.Module, _Drop, _Run], None],
    shard: Callable[..., None],
    drop: _Drop,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    """Also what waits from a microbatch under no_sync; the gradient is the last call's alone."""
    model, plain, run = _make_trained(
        shard, strategy=strategy, use_orig_params=use_orig_params, accumulates=accumulates
    )
    program(model, drop, lambda number: run(model, number))
    plain.zero_grad()
    run(plain, 2)
    _check(model, plain)


@pytest.mark.parametrize("is_interrupted", [False, True])
@variants
@distributed(1, 2)
def test_one_full_parameter_drops_replaces_or_adds_to_its_own_gradient_alone(
    is_interrupted: bool, strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Between unshard and reshard; the others of its unit, and of one flat parameter, stay."""
    model, plain, run = _make_trained(
        strategy=strategy, use_orig_params=use_orig_params, accumulates=accumulates
    )
    if is_interrupted:
        _interrupt_block(model, lambda number: run(model, number))
    else:
        unshard(model, recurse=True)
    for each in (model, plain):
        layer = each.blocks[1]
        layer.up.weight.grad = None
        layer.up.bias.grad = torch.full((7,), 2.0, dtype=torch.float64)
        for _ in range(2):
            layer.down.bias.grad += torch.ones(15, dtype=torch.float64)
    if not is_interrupted:
        reshard(model, recurse=True)
    for each in (model, plain):
        run(each, 1)
    _check(model, plain)


def _before_a_backward(model: nn.Module, change: _Drop, run: _Run) -> None:
    unshard(model, recurse=True)
    change(model)
    run(1)
    reshard(model, recurse=True)


def _in_a_forward(model: nn.Module, change: _Drop, run: _Run) -> None:
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: change(model))
    run(1)
    hook.remove()


def _change_some(model: nn.Module) -> None:
    layer, ones = model.blocks[1], torch.ones(15, dtype=torch.float64)
    layer.up.weight.grad = None
    assert layer.up.weight.grad is None
    layer.up.bias.grad = torch.full((7,), 2.0, dtype=torch.float64)
    gradient = layer.down.bias.grad
    for _ in range(3):
        gradient += ones
    layer.down.weight.grad += 1
    assert ones.sum() == 15  # the user's is not written to


@pytest.mark.parametrize("program", [_before_a_backward, _in_a_forward])
@variants
@distributed(1, 2)
def test_a_backward_adds_to_what_full_parameters_were_given(
    program: Callable[[nn.Module, _Drop, _Run], None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    """Not to the gradient that it replaced."""
    model, plain, run = _make_trained(
        strategy=strategy, use_orig_params=use_orig_params, accumulates=accumulates
    )
    program(model, _change_some, lambda number: run(model, number))
    _change_some(plain)
    run(plain, 1)
    _check(model, plain)


@strategies
@distributed(1, 2)
def test_what_was_given_after_a_failed_backward_stays(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Its own gradients are dropped by the next call."""
    model, plain, run = _make_trained(strategy=strategy, use_orig_params=use_orig_params)
    unshard(model, recurse=True)

    def fail(*_: object) -> None:
        raise Planned

    hook = model.blocks[1].register_full_backward_hook(fail)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the backward did not reach the first block
        with pytest.raises(Planned):
            run(model, 1)
    hook.remove()
    for each in (model, plain):
        _change_some(each)
        run(each, 2)
    reshard(model, recurse=True)
    _check(model, plain)


@strategies
@distributed(1, 2)
def test_zero_grad_drops_what_a_forward_gave(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Between a forward and its backward."""
    model, plain, run = _make_trained(strategy=strategy, use_orig_params=use_orig_params)
    model.blocks[1].register_forward_pre_hook(lambda *_: _change_some(model))
    loss = square_mean(model(rank_input(3, 5, step=1, dtype=torch.float64)))
    model.zero_grad()
    plain.zero_grad()
    loss.backward()
    run(plain, 1)
    _check(model, plain)


@strategies
@distributed(1, 2)
def test_writeback_adds_to_the_gradient_at_rest(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """`p.grad += x` keeps what was there; the same on all ranks."""
    model, plain, _ = _make_trained(strategy=strategy, use_orig_params=use_orig_params)
    unshard(model, recurse=True)
    for each in (model, plain):
        _change_some(each)
    writeback(model, recurse=True, with_grads=True)
    reshard(model, recurse=True)
    _check(model, plain)


@strategies
@distributed(1, 2)
def test_a_stand_in_stands_for_the_gradient_that_is_there(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """S1.1: not for one that was dropped, nor for another parameter's, nor for what was added."""
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
    square_mean(model(rank_input(3, 5))).backward()
    unshard(model, recurse=True)
    up, down = model.blocks[1].up.weight, model.blocks[1].down.weight
    error = r"the gradient of parameter 'blocks.1.up.weight' is not shown"
    before = up.grad
    up.grad = before
    with pytest.raises(RuntimeError, match=error):
        down.grad = before
    with pytest.raises(RuntimeError, match=error):
        up.grad = before.to(torch.float64)
    up.grad += 1
    with pytest.raises(RuntimeError, match=error):
        up.grad *= 2
    up.grad = None
    with pytest.raises(RuntimeError, match=error):
        up.grad = before
    with pytest.raises(RuntimeError, match=error):
        before += 1
    reshard(model, recurse=True)


@strategies
@distributed(1, 2)
def test_gradients_of_full_parameters_are_not_changed_in_a_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """S1.1: a backward may have taken them; of frozen ones nothing would be kept."""
    torch.manual_seed(0)
    model = Net()
    model.blocks[0].requires_grad_(False)
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
    hook = model.blocks[1].register_full_backward_hook(lambda *_: _drop_each(model.blocks[1]))
    with pytest.raises(RuntimeError, match="was set or dropped inside a backward"):
        square_mean(model(rank_input(3, 5))).backward()
    hook.remove()
    unshard(model, recurse=True)
    with pytest.raises(RuntimeError, match="which is frozen or stands for others"):
        model.blocks[0].up.weight.grad = torch.ones(7, 15)
    if not use_orig_params:
        register_flat_param(model)
        with pytest.raises(RuntimeError, match="which is frozen or stands for others"):
            model._flat_param.grad = torch.ones_like(model._flat_param)
    reshard(model, recurse=True)


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(4)
def test_zero_grad_drops_what_waits_for_an_all_reduce(use_orig_params: bool) -> None:
    """Of all parameters of a flat one, and of one alone."""

    def shard(model: nn.Module, **options: Any) -> None:
        shard_blocks(model, mesh=replica_mesh(), **options)
        set_requires_all_reduce(model, False)

    model, plain, run = _make_trained(shard, use_orig_params=use_orig_params)
    for each in (model, plain):
        each.blocks[0].zero_grad()
    unshard(model, recurse=True)
    for each in (model, plain):
        each.blocks[1].up.weight.grad = None
    reshard(model, recurse=True)
    set_requires_all_reduce(model, True)
    for each in (model, plain):
        run(each, 1)
    _check(model, plain)


@variants
@distributed(1, 2)
def test_one_parameter_of_a_scope_drops_its_own_gradient_alone(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """S1.1: where `unshard_params` shows no gradients; the others of one flat parameter stay."""
    model, plain, run = _make_trained(
        strategy=strategy, use_orig_params=use_orig_params, accumulates=accumulates
    )
    with unshard_params(model, writeback=False):
        model.blocks[0].up.weight.grad = None
    plain.blocks[0].up.weight.grad = None
    for each in (model, plain):
        run(each, 1)
    _check(model, plain)


@strategies
@distributed(1, 2)
def test_one_parameter_of_a_scope_with_gradients_drops_what_waits_too(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """S1.1: a gradient of which one part is reduced, and one waits after `no_sync`."""
    model, plain, run = _make_trained(strategy=strategy, use_orig_params=use_orig_params)
    with no_sync(model):
        run(model, 1)
    run(plain, 1)
    with unshard_params(model, with_grads=True):
        model.blocks[0].up.weight.grad = None
    plain.blocks[0].up.weight.grad = None
    for each in (model, plain):
        run(each, 2)
    _check(model, plain)


@pytest.mark.parametrize("with_grads", [False, True])
@strategies
@distributed(1, 2)
def test_a_scope_drops_gradients_that_wait(
    with_grads: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """S1.1: no part is reduced, so none is shown; the values of one raise."""
    model, plain, run = _make_trained(
        strategy=strategy, use_orig_params=use_orig_params, accumulates=True
    )
    with unshard_params(model, with_grads=with_grads):
        with pytest.raises(RuntimeError, match=r"'out.weight' is not shown"):
            model.out.weight.grad.sum()
        model.zero_grad()
    plain.zero_grad()
    for each in (model, plain):
        run(each, 1)
    _check(model, plain)


def _dtensor_models() -> tuple[nn.Module, nn.Module, Callable[[nn.Module, int], None]]:
    """Return a tensor-parallel model whose root is no unit, a plain one, and what runs either."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net(num_blocks=0).double()
    model.blocks.extend(Layer(hidden=8).double() for _ in range(3))
    for layer in (model.inp, model.out):
        layer.requires_grad_(False)
    plain = copy.deepcopy(model)
    for layer in model.blocks:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])

    def run(net: nn.Module, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * mesh["dp"].get_local_rank() + number)
        square_mean(net(torch.randn(3, 5, generator=generator, dtype=torch.float64))).backward()

    return model, plain, run


def _check_dtensors(model: nn.Module, plain: nn.Module) -> None:
    found = unsharded_gradients(model.blocks)
    for name, param in plain.blocks.named_parameters():
        dist.all_reduce(param.grad)
        assert_close(found[name].full_tensor(), param.grad / dist.get_world_size(), name)


@pytest.mark.parametrize("drop", [_drop_each, _drop_all])
@pytest.mark.parametrize("program", [_after_an_interrupt, _between_unshard_and_reshard])
@distributed(4)
def test_what_a_full_dtensor_drops_is_dropped_at_rest(
    program: Callable[[nn.Module, _Drop, _Run], None], drop: _Drop
) -> None:
    """S3.8: parameters of a tensor-parallel model; its root is no unit."""
    model, plain, run = _dtensor_models()
    run(model, 0)
    program(model, drop, lambda number: run(model, number))
    run(plain, 2)
    _check_dtensors(model, plain)


@pytest.mark.parametrize("is_held", [False, True])
@distributed(4)
def test_a_layer_with_full_dtensors_can_be_compiled(is_held: bool) -> None:
    """S3.8: compiled code asks for the class that was traced."""
    model, plain, run = _dtensor_models()
    model.blocks[0].compile(backend="aot_eager")
    if is_held:
        unshard(model, recurse=True)
    for number in range(2):
        run(model, number)
        run(plain, number)
    if is_held:
        reshard(model, recurse=True)
    _check_dtensors(model, plain)


@distributed(4)
def test_a_full_dtensor_is_not_converted() -> None:
    """As other full parameters, which would no longer be views of the buffer."""
    model, _, _ = _dtensor_models()
    unshard(model, recurse=True)
    with pytest.raises(RuntimeError, match="Couldn't swap") as caught:
        model.blocks.to(torch.float32)
    assert "'up.weight' can't be given other data" in str(caught.value.__cause__)
    reshard(model, recurse=True)


@strategies
@distributed(1, 2)
def test_the_flat_parameter_of_a_scope_drops_all_gradients(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Where `unshard_params` shows no gradients."""
    model, plain, run = _make_trained(strategy=strategy, use_orig_params=use_orig_params)
    with unshard_params(model, writeback=False):
        register_flat_param(model)
        assert model._flat_param.grad is not None
        for param in model.parameters():
            param.grad = None
    plain.zero_grad()
    for each in (model, plain):
        run(each, 1)
    _check(model, plain)


@strategies
@distributed(1, 2)
def test_a_full_parameter_has_a_stand_in_for_its_gradient(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Whoever asks for None finds it; whoever reads values gets an error with the name."""
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
    unshard(model, recurse=True)
    assert all(param.grad is None for param in model.parameters())
    square_mean(model(rank_input(3, 5))).backward()
    param = model.out.weight
    assert param.grad is not None
    assert param.grad.shape == param.shape
    error = r"the gradient of parameter 'out.weight' is not shown while its full value is"
    with pytest.raises(RuntimeError, match=error):
        nn.utils.clip_grad_norm_([param], 1.0)
    reshard(model, recurse=True)


@distributed(2)
def test_a_late_hook_on_a_full_parameter_is_refused() -> None:
    """It would find no gradient; an early one sees this rank's."""
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model)
    unshard(model, recurse=True)
    seen: list[torch.Size] = []
    model.out.weight.register_hook(lambda grad: seen.append(grad.shape))
    with pytest.raises(RuntimeError, match=r"of the full parameter 'out.weight' would find none"):
        model.out.weight.register_post_accumulate_grad_hook(print)
    square_mean(model(rank_input(3, 5))).backward()
    reshard(model, recurse=True)
    assert seen == [(3, 15)]


@distributed(1, 2)
def test_an_interrupt_while_a_flat_parameter_comes_back_hides_no_gradient() -> None:
    """Modules then show a mixture: originals, the flat parameter, or both."""
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, use_orig_params=False)
    x = rank_input(3, 5)

    def forward(moment: int) -> Interrupter:
        interrupter = Interrupter(moment)
        with without_lost_interrupts(), suppress(KeyboardInterrupt), interrupter.watching():
            model(x)
        return interrupter

    for _ in range(2):
        square_mean(model(x)).backward()
    found = forward(0).moments
    moments = [each for place in found if "show_sharded" in place for each in found[place]]
    assert len(moments) > 20
    for moment in moments:
        square_mean(model(x)).backward()
        assert "show_sharded" in forward(moment).place
        _drop_each(model)
        assert not any(grad is not None for grad in unsharded_gradients(model).values())


@strategies
@distributed(1, 2)
def test_a_gradient_that_an_interrupt_left_unseen_is_dropped(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """It comes where autograd has accumulated it, and no unit has heard of the backward."""
    model, plain, run = _make_trained(strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    param = get_handles(model)[0].entries[0].unsharded
    set_gradient(param, torch.ones_like(param))
    loss = square_mean(model(rank_input(3, 5, dtype=torch.float64)))
    del loss
    optimizer.zero_grad()
    plain.zero_grad()
    for each in (model, plain):
        run(each, 1)
    _check(model, plain)
