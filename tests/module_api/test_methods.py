"""Methods other than forward, and weights that are used outside of their unit."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from composable_shard import (
    ShardingStrategy,
    count_collectives,
    fully_shard,
    is_sharded,
    register_forward_method,
    reshard,
    unshard,
)
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import (
    Layer,
    assert_at_rest,
    rank_input,
    seeded,
    shard_children,
    square_mean,
)


class _WaysIn(nn.Module):
    """Has three ways in; `generate` calls forward several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = Layer(), nn.Parameter(torch.ones(15))

    def encode(self, x: Tensor, *, times: int = 1) -> Tensor:
        """Encode."""
        return self.layer(x * self.scale) * times

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.scale

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self(x) @ torch.diag(self.scale))
        return x


def _shard_with_methods(model: nn.Module, **options: Any) -> None:
    shard_children(model, **options)
    register_forward_method(model, "encode")
    register_forward_method(model, "generate")


@claims.variants
@distributed(2)
def test_registered_methods_train_as_forward(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """By turns with forward, nested in it and around it."""

    def program(model: Any, number: int) -> None:
        x = rank_input(4, 15, step=number, dtype=torch.float64)
        way = (lambda x: model.encode(x, times=2), model, model.generate)[number % 3]
        square_mean(way(x)).backward()

    claims.assert_right(
        _WaysIn,
        program,
        shard=_shard_with_methods,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(2)
def test_methods_of_copies_are_theirs() -> None:
    """And nothing keeps a deleted module."""
    model = seeded(_WaysIn)
    _shard_with_methods(model)
    x = torch.ones(2, 15)
    assert model.encode.__doc__ == "Encode."
    with torch.no_grad():
        expected = model.encode(x)
        twin = copy.deepcopy(model)
        twin.scale.zero_()
        assert not torch.equal(twin.encode(x), expected)
        assert torch.equal(model.encode(x), expected)
        assert_at_rest(twin)
    reference = weakref.ref(model)
    gc.disable()
    del model
    assert reference() is None
    gc.enable()


@pytest.mark.fast
@distributed(2)
def test_method_that_is_not_registered_is_named() -> None:
    """The error says what to call; a method that fails leaves the unit at rest."""
    model = seeded(_WaysIn)
    shard_children(model)
    with pytest.raises(RuntimeError, match=r"only the forward of its unit gives"):
        model.encode(torch.ones(2, 15))
    with pytest.raises(RuntimeError, match=r"'scale'.*register_forward_method\(module, name\)"):
        model.generate(torch.ones(2, 15)).sum().backward()
    register_forward_method(model, "encode")
    register_forward_method(model, "encode")
    with pytest.raises(TypeError, match="unexpected keyword"):
        model.encode(torch.ones(2, 15), wrong=1)
    assert "forward" not in vars(model)
    assert_at_rest(model)
    assert model(torch.ones(2, 15)).shape == (2, 15)
    with pytest.raises(ValueError, match="_WaysIn has no method 'decode'"):
        register_forward_method(model, "decode")
    with pytest.raises(ValueError, match="belong to the unit of a module around it"):
        register_forward_method(model.layer.up, "extra_repr")
    plain = _WaysIn()
    register_forward_method(plain, "encode")
    assert "encode" not in vars(plain)


class _Encodes(nn.Module):
    """Its forward calls the method, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(15, 3)

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.encode(x)


@pytest.mark.long
@pytest.mark.parametrize("compiled", ["layers", "method", "model", "wrapper"])
@distributed(2)
def test_registered_methods_of_compiled_modules(compiled: str) -> None:
    """By themselves and in a forward: gradients of the plain model."""
    torch.compiler.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model, plain = seeded(_Encodes), seeded(_Encodes)
    layers = model.layers
    if compiled == "wrapper":  # whose class has no such method: it passes on the model's
        model = torch.compile(model, backend="aot_eager")
    for part in (*layers, model):
        fully_shard(part)
    register_forward_method(model, "encode")
    if compiled == "method":
        model.encode = torch.compile(model.encode, backend="aot_eager")
    for part in {"layers": layers, "model": [model]}.get(compiled, []):
        part.compile(backend="aot_eager")
    x = rank_input(4, 15)
    for is_method in (True, False, True, False):
        for each in (model, plain):
            square_mean(each.encode(x) if is_method else each(x)).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        expected = other.grad.clone()
        dist.all_reduce(expected)
        torch.testing.assert_close(param.grad.full_tensor(), expected / 2)


class _TiedHead(nn.Module):
    """An embedding whose matrix is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 15)
        self.layer = Layer()
        self.head = nn.Linear(15, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens))


def _chunked_loss(model: Any, number: int) -> Tensor:
    tokens = torch.arange(8).reshape(2, 4) * (number + 3) % 11
    hidden = model(tokens).flatten(0, 1)
    losses = [
        F.cross_entropy(part @ model.head.weight.t(), target, reduction="sum")
        for part, target in zip(hidden.chunk(3), tokens.flatten().chunk(3), strict=True)
    ]
    return torch.stack(losses).sum() / tokens.numel()


def _shard_tied_head(model: Any, **options: Any) -> None:
    fully_shard(model.layer, **options)
    fully_shard(model, **options)


@claims.variants
@distributed(2)
def test_weight_of_a_loss_outside_of_its_unit(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Right after unshard, of the unit alone whose weight it is; one gather."""

    def program(model: nn.Module, number: int) -> None:
        if is_sharded(model):
            unshard(model)
        _chunked_loss(model, number).backward()
        if is_sharded(model):
            reshard(model)

    claims.assert_right(
        _TiedHead,
        program,
        shard=_shard_tied_head,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(2)
def test_weight_of_a_loss_without_unshard_is_refused() -> None:
    """The error names unshard."""
    model = seeded(_TiedHead)
    _shard_tied_head(model)
    with pytest.raises(RuntimeError, match=r"'embedding.weight'.*unshard\(model, recurse=True\)"):
        _chunked_loss(model, 0)
    unshard(model)
    with count_collectives() as log:
        _chunked_loss(model, 0).backward()
    assert log.count("all_gather") == 2  # of the layer, for forward and backward
    reshard(model)
    assert_at_rest(model)
