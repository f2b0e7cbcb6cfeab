"""Programs that are refused for how they reach parameters: the remedies that errors name work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    is_sharded,
    register_forward_method,
    reshard,
    shard_model,
    unshard,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right
from tests.programs.models import rank_input, shard_children, square_mean

DIM = 4


def _batch(number: int) -> Tensor:
    return rank_input(3, DIM, step=number, dtype=torch.float64)


def steps(model: nn.Module, number: int) -> None:
    """A plain microbatch."""
    square_mean(model(_batch(number))).backward()


# --- classes with a `__call__` of their own ---


class OwnCall(nn.Module):
    """Calls its forward itself, as gpytorch's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class ExactOwnCall(OwnCall):
    """Passes calls on to a class that does not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class HelperOwnCall(OwnCall):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class PassingCall(nn.Module):
    """Passes calls on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class PassingByName(PassingCall):
    def __call__(self, x: Tensor) -> Any:
        return nn.Module.__call__(self, x * 2)


class PassingByHelper(PassingCall):
    def __call__(self, x: Tensor) -> Any:
        return self.run(x)

    def run(self, x: Tensor) -> Any:
        return nn.Module.__call__(self, x * 2)


def make_traced() -> nn.Module:
    """Return a `GraphModule`, whose `__call__` leaves to an object of its class."""
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(x))
        return result


@pytest.mark.parametrize("kind", [OwnCall, ExactOwnCall, HelperOwnCall])
@distributed(1, 2, 3)
def test_unit_whose_calls_run_no_hooks_is_refused(kind: type[nn.Module]) -> None:
    """Before anything changes, naming the class; in a unit around it all is right."""
    model = Around(kind())
    for call in (
        lambda: fully_shard(model.inner),
        lambda: fully_shard([nn.Linear(2, 2), model.inner]),
        lambda: shard_model(model, {"inner": {}}),
    ):
        with pytest.raises(NotImplementedError, match=r"OwnCall\.__call__ does not call nn"):
            call()
        assert not is_sharded(model)
    assert_right(lambda: Around(kind()), steps, shard=fully_shard)


@pytest.mark.parametrize("kind", [PassingCall, PassingByName, PassingByHelper, make_traced])
@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(1, 2, 3)
def test_unit_whose_calls_are_passed_on_is_right(
    kind: Callable[[], nn.Module], strategy: ShardingStrategy
) -> None:
    """As a unit of its own, and inside one."""
    assert_right(lambda: Around(kind()), steps, strategy=strategy)


# --- further references to a parameter ---


class Store:
    """Keeps the parameters of a module, as tensordict's and pyro's stores do."""

    def __init__(self, module: nn.Module) -> None:
        self.params = {name: param for name, param in module.named_parameters()}


class Stored(nn.Module):
    def __init__(self, reads_module: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.reads_module = reads_module
        self.store = Store(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        params = self.store.params
        if self.reads_module:
            params = dict(self.layer.named_parameters())
        return torch.tanh(F.linear(x, params["weight"], params["bias"]))


@pytest.mark.parametrize(
    *pairwise(strategy=list(ShardingStrategy), use_orig_params=[True, False], has_run=[True, False])
)
@distributed(1, 2, 3)
def test_parameters_in_a_store_are_refused_by_cause(
    strategy: ShardingStrategy, use_orig_params: bool, has_run: bool
) -> None:
    """The error says that it was kept from before, where the unit did run; its remedy is right."""
    options = {"strategy": strategy, "use_orig_params": use_orig_params}
    model = nn.Sequential(Stored(), nn.Linear(DIM, DIM)).double()
    shard_children(model, **options)
    if has_run:
        model[1](_batch(0))
    with pytest.raises(RuntimeError, match=r"'0\.layer\.\w+'.* an object from before the forward"):
        steps(model, 0)
    assert_right(lambda: nn.Sequential(Stored(True), nn.Linear(DIM, DIM)), steps, **options)


# --- units whose parent reads their parameters, or passes their call by ---


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def embed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(self.embed(x)))


class Parent(nn.Module):
    """Reaches into its first block in one of these ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        if self.way == "reads before":
            x = F.linear(x, first.out.weight)
        elif self.way == "calls a layer":
            x = first.norm(x)
        elif self.way == "calls a method":
            x = first.embed(x)
        elif self.way == "calls forward":
            x = first.forward(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, first.out.weight) if self.way == "reads after" else x


class Grandparent(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.parent, self.head = Parent(way), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.parent(x))
        return result


WAYS = ["reads before", "calls a layer", "calls a method", "calls forward", "reads after"]
UNITS = {"parent.blocks.1": {}, "parent.blocks.2": {}}


@pytest.mark.parametrize(
    *pairwise(
        way=WAYS,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        is_parent_unit=[True, False],
    )
)
@distributed(1, 2, 3)
def test_unit_that_its_parent_passes_by_is_named_with_the_remedy(
    way: str, strategy: ShardingStrategy, use_orig_params: bool, is_parent_unit: bool
) -> None:
    """The first forward or its backward names the unit and the reader; without it all is right."""
    options: dict[str, Any] = {"strategy": strategy, "use_orig_params": use_orig_params}
    around: dict[str, Any] = {"parent": {}} if is_parent_unit else {}
    model = Grandparent(way).double()
    shard_model(model, {"parent.blocks.0": {}, **UNITS, **around}, **options)
    reader = "parent" if is_parent_unit else "Grandparent"
    text = rf"'parent\.blocks\.0\..*forward of '{reader}' reads it.* rule 'parent\.blocks\.0': None"
    with pytest.raises(RuntimeError, match=text):
        steps(model, 0)
    rules = {"parent.blocks.0": None, **UNITS, **around}
    assert_right(
        lambda: Grandparent(way),
        steps,
        shard=lambda model, **options: shard_model(model, rules, **options),
        **options,
    )


@distributed(1, 2, 3)
def test_module_outside_of_all_units_is_not_blamed() -> None:
    """A loss module that reads a weight has no unit around both."""
    model = fully_shard(nn.Sequential(nn.Linear(DIM, DIM)).double())

    class _Penalty(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y.sum() + (model[0].weight @ torch.ones(DIM, 1, dtype=y.dtype)).sum()

    with pytest.raises(RuntimeError, match="only the forward of its unit gives") as error:
        _Penalty()(model(_batch(0)))
    assert "Leave" not in str(error.value)


# --- what is computed outside of the forward ---


class Adversarial(nn.Module):
    """A decoder whose losses are weighted by gradients of its last layer, as VQGAN's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(x)

    def decode(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.body(x)))
        return result

    def weighted(self, x: Tensor) -> Tensor:
        return weighted_loss(self, self.decode(x))


def weighted_loss(model: nn.Module, y: Tensor) -> Tensor:
    """Return a loss whose second term is weighted by the gradients of both."""
    first, second = y.square().mean(), torch.sin(y).mean()
    norms = [
        torch.autograd.grad(loss, model.last.weight, retain_graph=True)[0].norm()
        for loss in (first, second)
    ]
    return first + (norms[0] / (norms[1] + 1e-4)).detach() * second


def asks_between(model: nn.Module, number: int) -> None:
    """Between `unshard` and `reshard`."""
    if is_sharded(model):
        unshard(model, recurse=True)
    weighted_loss(model, model(_batch(number))).backward()
    if is_sharded(model):
        reshard(model, recurse=True)


def asks_in_a_forward(model: nn.Module, number: int) -> None:
    """In a method that runs as a forward."""
    if is_sharded(model):
        register_forward_method(model, "weighted")
    model.weighted(_batch(number)).backward()


def calls_a_layer(model: nn.Module, number: int) -> None:
    """A layer outside of its unit's forward."""
    if is_sharded(model):
        unshard(model, recurse=True)
    square_mean(model.last(torch.tanh(model(_batch(number))))).backward()
    if is_sharded(model):
        reshard(model, recurse=True)


def adds_a_penalty(model: nn.Module, number: int) -> None:
    """A parameter in a loss."""
    if is_sharded(model):
        unshard(model, recurse=True)
    penalty = sum(param.square().sum() for param in model.parameters())
    (square_mean(model(_batch(number))) + 0.1 * penalty).backward()
    if is_sharded(model):
        reshard(model, recurse=True)


REMEDIES = [asks_between, asks_in_a_forward, calls_a_layer, adds_a_penalty]


@pytest.mark.parametrize(
    *pairwise(
        remedy=REMEDIES,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[False, True],
        shard=[fully_shard, shard_children],
    )
)
@distributed(1, 2, 3)
def test_remedies_are_right(
    remedy: Callable[[nn.Module, int], None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
    shard: Any,
) -> None:
    """The remedies that errors name for calls outside of the forward, by value."""
    if remedy is asks_in_a_forward and shard is shard_children:
        return  # the last layer is another unit's there
    assert_right(
        Adversarial,
        remedy,
        shard=shard,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(1, 2, 3)
def test_gradient_of_a_parameter_at_rest_says_that_it_is_in_no_graph() -> None:
    """Torch's own text, which docs/troubleshooting.md explains; nothing is left behind."""
    model = fully_shard(Adversarial().double())
    twin = copy.deepcopy(model)
    y = model(_batch(0))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        weighted_loss(model, y)
    for each in (model, twin):
        steps(each, 0)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad.full_tensor())
