"""What a program keeps of its parameters stays true: objects that a forward kept, attributes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    is_sharded,
    reshard,
    unshard,
    unshard_params,
)
from composable_shard.flat_param import HIDDEN_ALIAS
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right
from tests.programs.models import average_gradients, rank_input, square_mean


class Collecting(nn.Module):
    """Keeps its weights when it is used first, and computes with what it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))
        self.weights: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is None:
            self.weights = [each.weight for each in self.layers] + [self.scale]
        for index, layer in enumerate(self.layers):
            x = torch.tanh(x @ self.weights[index].T) + layer.bias
            x = x * getattr(layer.weight, "mult", 1.0)
        return x * self.weights[2]


class CollectingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Collecting(), Collecting())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def _shard_collecting(model: nn.Module, **options: Any) -> None:
    fully_shard(model.body[0], **options)
    fully_shard(model, **options)


def _collecting_loss(model: nn.Module, number: int) -> Tensor:
    return square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64)))


def sets_kept_data(model: nn.Module, number: int) -> None:
    """`p.data = x` before each microbatch."""
    for param in model.parameters():
        param.data = param.data * 0.5
    _collecting_loss(model, number).backward()


def swaps_kept_averages(model: nn.Module, number: int) -> None:
    """Averages for an evaluation, and the weights back."""
    params = list(model.parameters())
    backup = [param.data for param in params]
    for param in params:
        param.data = param.data * 2
    with torch.no_grad():
        averaged = _collecting_loss(model, number)
    for param, value in zip(params, backup, strict=True):
        param.data = value
    (averaged * _collecting_loss(model, number)).backward()


def converts(model: nn.Module, number: int) -> None:
    """To other dtypes and back."""
    _collecting_loss(model, number)
    model.float()
    with torch.no_grad():
        model(rank_input(3, 5, step=number))
    model.double()
    _collecting_loss(model, number).backward()


def _set_mult(model: nn.Module, value: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mult = value


def sets_attributes(model: nn.Module, number: int) -> None:
    """A schedule sets an attribute that the forward reads."""
    _set_mult(model, 1.0 + number)
    _collecting_loss(model, number).backward()


def sets_attributes_of_full(model: nn.Module, number: int) -> None:
    """An attribute that is set between `unshard` and `reshard`."""
    _collecting_loss(model, number)
    if is_sharded(model):
        unshard(model, recurse=True)
    _set_mult(model, 1.0 + number)
    if is_sharded(model):
        reshard(model, recurse=True)
    _collecting_loss(model, number).backward()


def sets_attributes_in_a_scope(model: nn.Module, number: int) -> None:
    """An attribute that is set inside `unshard_params`."""
    _collecting_loss(model, number)
    with _scope(model):
        _set_mult(model, 1.0 + number)
    _collecting_loss(model, number).backward()


def _scope(model: nn.Module, **options: Any) -> Any:
    return unshard_params(model, **options) if is_sharded(model) else nullcontext()


def _kept(model: nn.Module) -> list[Tensor]:
    return [weight for module in model.body for weight in module.weights]


def edits_kept_in_a_scope(model: nn.Module, number: int) -> None:
    """What a forward has kept is edited inside `unshard_params`, in every form."""
    _collecting_loss(model, number)
    with _scope(model), torch.no_grad():
        for weight in _kept(model):
            weight.mul_(0.5)
            weight.data.add_(0.25)
            weight.data = weight * 2
            weight[0] = weight.detach()[1]
            weight.copy_(torch.stack([weight, weight.data]).sum(0))
        for module in model.body:
            module.weights[0] *= 0.5
            module.weights[0].mult = 2.0 + getattr(module.layers[0].weight, "mult", 1.0)
    _collecting_loss(model, number).backward()


def reads_kept_in_a_scope(model: nn.Module, number: int) -> None:
    """A forward inside `unshard_params` computes with what a forward has kept."""
    _collecting_loss(model, number)
    with _scope(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        _set_mult(model, 1.0 + number)
        found = _collecting_loss(model, number)
    (found * _collecting_loss(model, number)).backward()


def goes_on_after_a_scope(model: nn.Module, number: int) -> None:
    """A backward after a scope reads what its forward has saved before."""
    loss = _collecting_loss(model, number)
    with _scope(model, writeback=False):
        names = [str(weight.dtype) + str(weight.requires_grad) for weight in _kept(model)]
    assert set(names) == {"torch.float64True"}
    loss.backward()


def freezes_kept_in_a_scope(model: nn.Module, number: int) -> None:
    """Flags that are set of what a forward has kept."""
    _collecting_loss(model, number).backward()
    with _scope(model):
        for weight in _kept(model):
            weight.requires_grad_(False).requires_grad = True
    model.zero_grad()
    _collecting_loss(model, number).backward()


def assigns_own_data(model: nn.Module, number: int) -> None:
    """Conversions in a forward that change nothing."""

    def convert(module: nn.Module, *_: object) -> None:
        module.to(torch.float64)
        for layer in module.layers:
            layer.weight.data = layer.weight.data.to("cpu")
            with torch.no_grad():
                layer.weight.set_(layer.weight)
                layer.weight.set_(layer.weight.data)

    hooks = [each.register_forward_pre_hook(convert) for each in model.body]
    _collecting_loss(model, number).backward()
    for hook in hooks:
        hook.remove()


class _Plus(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1


def parametrizes(model: nn.Module, number: int) -> None:
    """A parametrization that is registered and removed inside a forward."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        module.weights = None
        layer = module.layers[1]
        parametrize.register_parametrization(layer, "weight", _Plus())
        result: Tensor = type(module).forward(module, x)
        module.weights = None
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return result

    for module in model.body:
        module.forward = partial(forward, module)
    _collecting_loss(model, number).backward()
    for module in model.body:
        del module.forward


PROGRAMS = [
    sets_kept_data,
    swaps_kept_averages,
    converts,
    sets_attributes,
    sets_attributes_of_full,
    sets_attributes_in_a_scope,
    edits_kept_in_a_scope,
    reads_kept_in_a_scope,
    goes_on_after_a_scope,
    freezes_kept_in_a_scope,
    assigns_own_data,
    parametrizes,
]


@pytest.mark.parametrize(
    *pairwise(
        program=PROGRAMS,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        world_size=[1, 2, 3],
    )
)
@distributed()
def test_what_a_forward_has_kept_is_the_parameter(
    program: Callable[[nn.Module, int], None], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Gradients and values are those of the plain model, whatever builds the parameters anew."""
    assert_right(
        CollectingModel,
        program,
        shard=_shard_collecting,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2, 3)
def test_a_copy_computes_with_its_own_parameters(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Also a copy of a copy, and after the first model has been trained further."""
    torch.manual_seed(0)
    plain = CollectingModel().double()
    model = copy.deepcopy(plain)
    _shard_collecting(model, strategy=strategy, use_orig_params=use_orig_params)
    for each in (plain, model):
        _collecting_loss(each, 0)
        _set_mult(each, 3.0)
    twins = [copy.deepcopy(copy.deepcopy(each)) for each in (plain, model)]
    _set_mult(twins[0], 3.0)  # torch's own copy of a parameter has no attributes
    for each in (plain, model):
        for param in each.parameters():
            param.data = param.data * 0
    for each in twins:
        _collecting_loss(each, 1).backward()
    average_gradients(twins[0].parameters())
    with unshard_params(twins[1], writeback=False, with_grads=True):
        for name, param in twins[1].named_parameters():
            torch.testing.assert_close(param.grad, twins[0].get_parameter(name).grad)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@distributed(2)
def test_first_rank_edits_what_it_has_kept(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """`rank0_only` writes its edits on all ranks; elsewhere a kept object is the shard."""
    model = CollectingModel().double()
    _shard_collecting(model, strategy=strategy, use_orig_params=use_orig_params)
    _collecting_loss(model, 0)
    before = [weight.clone() for weight in _whole_kept(model)]
    with unshard_params(model, rank0_only=True), torch.no_grad():
        assert [weight.requires_grad for weight in _kept(model)] == [True] * 6
        for weight in _kept(model) if dist.get_rank() == 0 else ():
            weight.mul_(3)
    torch.testing.assert_close(_whole_kept(model), [weight * 3 for weight in before])


def _whole_kept(model: nn.Module) -> list[Tensor]:
    with unshard_params(model, writeback=False):
        return [weight.detach().clone() for weight in _kept(model)]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@distributed(2)
def test_kept_tensor_parallel_parameters_follow_a_scope(strategy: ShardingStrategy) -> None:
    """A DTensor that a forward has kept is edited inside a scope."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plain = nn.Linear(6, 4, bias=False)
    for param in plain.parameters():
        dist.broadcast(param.data, 0)
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"], strategy=strategy)
    kept: list[nn.Parameter] = []
    model.register_forward_pre_hook(lambda module, _: kept.append(module.weight))
    x = torch.ones(2, 6)
    with torch.no_grad():
        model(x)
        with unshard_params(model):
            kept[0].mul_(2)
            torch.testing.assert_close(model(x), 2 * plain(x))
        torch.testing.assert_close(model(x), 2 * plain(x))


def _pickled(param: Any) -> Any:
    return pickle.loads(pickle.dumps(param))


def _saved_by_torch(param: Any) -> Any:
    file = io.BytesIO()
    torch.save({"kept": param}, file)
    file.seek(0)
    return torch.load(file)["kept"]


def _copied_in_a_list(param: Any) -> Any:
    return copy.deepcopy([param, param])[1]


COPIES = [_pickled, _saved_by_torch, copy.copy, copy.deepcopy, _copied_in_a_list]


def _values_now(model: nn.Module) -> Tensor:
    weight = model.body[0].layers[0].weight
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()


@pytest.mark.parametrize(
    *pairwise(make=COPIES, strategy=list(ShardingStrategy), use_orig_params=[True, False])
)
@distributed(1, 2, 3)
def test_copies_of_kept_parameters_are_plain_ones(
    make: Callable[[Any], Any], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Where the values are there, in a scope too: they stay, and an optimizer steps them."""
    torch.manual_seed(0)
    model = CollectingModel().double()
    expected = model.body[0].layers[0].weight.detach().clone()
    _shard_collecting(model, strategy=strategy, use_orig_params=use_orig_params)
    _collecting_loss(model, 0).backward()
    unshard(model, recurse=True)
    twins = [make(model.body[0].weights[0])]
    reshard(model, recurse=True)
    with unshard_params(model), torch.no_grad():
        model.body[0].weights[0].mul_(2)
        twins.append(make(model.body[0].weights[0]))
    for twin, value in zip(twins, [expected, expected * 2], strict=True):
        assert type(twin) is nn.Parameter
        torch.testing.assert_close(twin.detach(), value, rtol=0, atol=0)
        twin.grad = torch.ones_like(twin)
        torch.optim.SGD([twin], lr=1.0).step()
        torch.testing.assert_close(twin.detach(), value - 1, rtol=0, atol=0)


@pytest.mark.parametrize(
    *pairwise(make=COPIES, strategy=list(ShardingStrategy), is_written=[True, False])
)
@distributed(2)
def test_copies_of_kept_parameters_are_never_of_old_values(
    make: Callable[[Any], Any], strategy: ShardingStrategy, is_written: bool
) -> None:
    """They are those of the parameter now: where the unit has freed them, of its shard."""
    model = CollectingModel().double()
    _shard_collecting(model, strategy=strategy)
    _collecting_loss(model, 0).backward()
    if is_written:
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    keeps = strategy is ShardingStrategy.NO_SHARD or not (
        is_written or strategy is ShardingStrategy.FULL_SHARD
    )
    if not keeps and make is _saved_by_torch:
        with pytest.raises(RuntimeError, match="would write the shards of this rank"):
            make(model.body[0].weights[0])
    else:
        found, expected = make(model.body[0].weights[0]).detach(), _values_now(model)
        found = found if keeps else found.full_tensor()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    _collecting_loss(model, 1).backward()


@distributed(1, 2, 3)
def test_copying_kept_parameters_leaves_gradients_in_place() -> None:
    """A pickle shares no memory: gradients may still take the place of values."""
    model = CollectingModel().double()
    _shard_collecting(model)
    _collecting_loss(model, 0).backward()
    unshard(model, recurse=True)
    kept = model.body[0].weights[0]
    for make in COPIES:
        make(kept)
    assert not kept.shard_aliases.readers.bits & HIDDEN_ALIAS
    reshard(model, recurse=True)
