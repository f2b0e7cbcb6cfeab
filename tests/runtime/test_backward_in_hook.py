"""Models that run inside the backward of another graph: cached gradients, critics in hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    is_sharded,
    no_sync,
    set_is_last_backward,
    set_requires_gradient_sync,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import rank_input, shard_root

NUM_CHUNKS = 3


class _Heads(nn.Module):
    """Chooses one of two heads, and checkpoints its body if it `recomputes`."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.norm = nn.LayerNorm(3)
        self.recomputes = recomputes

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        """Choose the head by `number`."""
        x = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return self.norm(self.heads[number % 2](x.tanh()))


def _shard_heads(model: nn.Module, **options: Any) -> None:
    for child in (model.body, *model.heads):
        fully_shard(child, **options)
    fully_shard(model, **options)


def _shard_body(model: nn.Module, **options: Any) -> None:
    fully_shard(model.body, **options)
    fully_shard(model, **options)


# --- with and without a reduction ---


def _no_sync_but_last(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    return no_sync(model) if is_sharded(model) and not is_last else nullcontext()


def _set(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    if is_sharded(model):
        set_requires_gradient_sync(model, is_last)
    return nullcontext()


def _set_last(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    if is_sharded(model):
        set_requires_gradient_sync(model, is_last)
        set_is_last_backward(model, is_last)
    return nullcontext()


SETTINGS: dict[str, Callable[[nn.Module, bool], AbstractContextManager[Any]]] = {
    "no_sync": _no_sync_but_last,
    "set_requires_gradient_sync": _set,
    "set_is_last_backward": _set_last,
}


class _Cached:
    """Gradients of representations first; then chunk by chunk those of the model, in a hook.

    Args:
        setting: Tells the model in each chunk whether it is the last.
        head: Of each chunk's number.
        is_around: Whether the graph that has the hook is one of the model.
        order: Numbers of the chunks; the last one reduces.
    """

    def __init__(
        self,
        setting: str,
        *,
        head: Callable[[int], int] = lambda number: number,
        is_around: bool = False,
        order: tuple[int, ...] = tuple(range(NUM_CHUNKS)),
    ) -> None:
        self.setting, self.head = SETTINGS[setting], head
        self.is_around, self.order = is_around, order

    def __call__(self, model: nn.Module, number: int) -> None:
        """Run a microbatch."""
        chunks = [
            rank_input(4, 6, step=10 * number + chunk, dtype=torch.float64)
            for chunk in range(NUM_CHUNKS)
        ]
        with torch.no_grad():
            found = [model(x, self.head(i)) for i, x in enumerate(chunks)]
        found = [each.requires_grad_() for each in found]
        torch.cat(found).softmax(0).square().sum().backward()

        def train(_: Tensor) -> None:
            for chunk in self.order:
                with torch.enable_grad(), self.setting(model, chunk == self.order[-1]):
                    output = model(chunks[chunk], self.head(chunk))
                    (output * found[chunk].grad).sum().backward()

        if self.is_around:
            output = model(chunks[0], self.head(0))
            output.register_hook(train)
            output.sum().backward()
        else:
            loss = torch.ones((), requires_grad=True)
            loss.register_hook(train)
            loss.backward()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("is_around", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("shard", [shard_root, _shard_body, _shard_heads])
@claims.strategies
@distributed(1, 2, 3)
def test_last_backward_of_a_hook_reduces(
    setting: str,
    is_around: bool,
    recomputes: bool,
    shard: Callable[..., None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    """It reduces what the ones before have left, with the model's own graph around it or not."""
    claims.assert_right(
        lambda: _Heads(recomputes=recomputes),
        _Cached(setting, is_around=is_around),
        shard=shard,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@claims.strategies
@distributed(2, 3)
def test_ranks_may_use_other_layers_in_a_hook(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """A rank that has no gradient of a unit takes part in its reduction."""
    claims.assert_right(
        _Heads,
        _Cached("no_sync", head=lambda _: min(dist.get_rank(), 1)),
        shard=_shard_body,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _Asks(torch.autograd.Function):
    """A user's function that asks a model in its backward, as guided sampling does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ask: Callable[[Tensor], None]) -> Tensor:
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.ask(grad)
        return grad, None


def _ask_in_tensor_hook(x: Tensor, ask: Callable[[Tensor], None]) -> None:
    y = x * 2
    y.register_hook(ask)
    y.sum().backward()


def _ask_in_function(x: Tensor, ask: Callable[[Tensor], None]) -> None:
    _Asks.apply(x, ask).sum().backward()


def _ask_in_module_hook(x: Tensor, ask: Callable[[Tensor], None]) -> None:
    layer = nn.LayerNorm(x.shape[-1]).double()
    layer.register_full_backward_hook(lambda _module, grads, _: ask(grads[0]))
    layer(x).sum().backward()


class _FirstInBackward:
    """No forward of the model runs but inside the backward of another graph.

    Args:
        ask: Runs such a backward.
        trains: Whether the gradients come from there too.
        change: What is done to the model at rest before.
    """

    def __init__(
        self,
        ask: Callable[[Tensor, Callable[[Tensor], None]], None],
        *,
        trains: bool,
        change: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        self.ask, self.trains, self.change = ask, trains, change

    def __call__(self, model: nn.Module, number: int) -> None:
        """Run a microbatch."""
        x = rank_input(4, 6, step=number, dtype=torch.float64)
        weights: list[Tensor] = []

        def run(_: Tensor) -> None:
            with torch.no_grad():
                weights.append(model(x, number).square())
                weights.append(model(x, number + 1))
            if self.trains:
                with torch.enable_grad():
                    (model(x, number) * weights[0]).sum().backward()

        self.change(model)
        self.ask(x.clone().requires_grad_(), run)
        if not self.trains:
            (model(x, number) * weights[0] * weights[1]).sum().backward()


def _halve_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def _pass_float(model: nn.Module) -> None:
    model.float()
    model.double()


@pytest.mark.parametrize(
    *pairwise(
        ask=[_ask_in_tensor_hook, _ask_in_function, _ask_in_module_hook],
        trains=[False, True],
        change=[nn.Module.train, _halve_data, _pass_float],
        shard=[shard_root, _shard_body, _shard_heads],
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        world_size=[1, 2, 3],
    )
)
@distributed()
def test_first_forward_may_run_in_a_backward(
    ask: Callable[[Tensor, Callable[[Tensor], None]], None],
    trains: bool,
    change: Callable[[nn.Module], object],
    shard: Callable[..., None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    """It makes the model ready, and each later one adopts what was changed at rest."""
    claims.assert_right(
        _Heads,
        _FirstInBackward(ask, trains=trains, change=change),
        shard=shard,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
