"""Layers sharded without a `fully_shard` around them: as with a root."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard, get_handles, get_states, no_sync
from composable_shard.comm.trace import trace_events
from tests import claims
from tests.helpers import Planned, distributed, peak_bytes
from tests.models import Twins, assert_at_rest, average_gradients, rank_input, square_mean


class _Layers(nn.Module):
    def __init__(self, dim: int = 15, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _shard_alone(model: nn.Module, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, **options)


def _shard_with_root(model: nn.Module, **options: Any) -> None:
    _shard_alone(model, **options)
    fully_shard(model, **options)


def _train_layers(model: nn.Module, microbatch: int) -> None:
    square_mean(model(rank_input(3, 15, step=microbatch, dtype=torch.float64))).backward()


@claims.variants
@distributed(2)
def test_c11_layers_without_a_root(strategy: Any, use_orig_params: bool, accumulates: bool) -> None:
    """Case 11 of the claims: right by value."""
    claims.assert_right(
        _Layers,
        _train_layers,
        shard=_shard_alone,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


def _warm_step(shard: Callable[..., object]) -> tuple[int, list[str]]:
    """Return the peak of a warm step, and what the engine did in one, in order."""
    torch.manual_seed(0)
    model = _Layers(256, 6)
    shard(model, prefetch_nbytes=0)
    x = rank_input(2, 256)
    peaks = []
    for _ in range(4):
        with peak_bytes() as memory:
            square_mean(model(x)).backward()
        model.zero_grad()
        peaks.append(memory.peak)
    with trace_events() as log:
        square_mean(model(x)).backward()
    # With a root the first gather is issued before the root, which has no parameters, has run.
    kinds = [each.kind for each in log if each.kind not in ("compute", "compute_backward")]
    return min(peaks[1:]), kinds


@distributed(2)
def test_c11_a_warm_step_is_as_with_a_root() -> None:
    """The same peak; gathers, reductions and frees come in the same order."""
    (peak, events), (expected_peak, expected) = map(_warm_step, (_shard_alone, _shard_with_root))
    assert abs(peak - expected_peak) < 1024
    assert events == expected
    assert events.count("all_gather") == 2 * events.count("reduce_scatter") == 12


@distributed(2)
def test_c11_the_first_forward_frees_each_layer() -> None:
    """What the first layer kept goes when the second layer turns out to follow it."""
    model = _Layers()
    _shard_alone(model)
    model(rank_input(3, 15))
    assert_at_rest(model)


@distributed(2)
def test_c11_evaluations_between_steps() -> None:
    """They gather ahead too, and leave nothing behind."""
    twins = Twins(_Layers, _shard_alone)
    for step in range(3):
        twins.step(lambda model, step=step: square_mean(model(rank_input(3, 15, step=step))))
        for model in twins:
            model.zero_grad()
            with torch.no_grad():
                model(rank_input(3, 15))
        assert_at_rest(twins.sharded)
    with trace_events() as log, torch.no_grad():
        twins.sharded(rank_input(3, 15))
    kinds = [each.kind for each in log]
    assert kinds[: kinds.index("compute")].count("all_gather") == 4  # units this small


class _Branches(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(layer(x)) for layer in self.layers)


class _ByKeyword(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(input=x))
        return x


@pytest.mark.parametrize("make", [_Branches, _ByKeyword])
@distributed(2)
def test_c11_layers_that_only_the_backward_connects(make: type[nn.Module]) -> None:
    """The first backward tells; from the second step on it is as with a root."""
    twins = Twins(make, _shard_alone)
    for step in range(3):
        with trace_events() as log:
            twins.step(lambda model, step=step: square_mean(model(rank_input(3, 15, step=step))))
        for model in twins:
            model.zero_grad()
    kinds = [each.kind for each in log]
    assert "compute_backward" in kinds[kinds.index("issue_reduce") :]
    assert_at_rest(twins.sharded)


@distributed(2)
def test_c11_models_in_one_process_stay_apart() -> None:
    """An aborted backward of one model drops no gradient of another, whose calls lie between."""
    models = [_Layers().double() for _ in range(2)]
    plain = copy.deepcopy(models[0])
    for model in models:
        _shard_alone(model)
    x = rank_input(3, 15, dtype=torch.float64)
    for step in range(2):
        outputs = [x, x]
        for layers in zip(*(model.layers for model in models), strict=True):
            outputs = [torch.tanh(layer(x)) for layer, x in zip(layers, outputs, strict=True)]
        if step == 0:
            with no_sync(models[0]):
                square_mean(outputs[0]).backward()
            outputs[1].register_hook(_fail)
            with pytest.raises(Planned):
                square_mean(outputs[1]).backward()
        else:
            square_mean(outputs[0]).backward()
            square_mean(outputs[1]).backward()
    contexts = [{state.context for state in get_states(model)} for model in models]
    assert [len(each) for each in contexts] == [1, 1]
    assert contexts[0] != contexts[1]
    for _ in range(2):
        output = x
        for layer in plain.layers:
            output = torch.tanh(layer(output))
        square_mean(output).backward()
    average_gradients(plain.parameters())
    found = claims.unsharded_gradients(models[0])
    for name, param in plain.named_parameters():
        claims.assert_close(found[name], param.grad, name)


def _fail(_: Tensor) -> None:
    raise Planned


@distributed(2)
def test_c11_a_joined_tree_can_get_a_root_and_be_deleted() -> None:
    """A unit around some layers takes them out; without references nothing stays."""
    twins = Twins(_Layers, _shard_alone)
    twins.step(lambda model: square_mean(model(rank_input(3, 15))))
    for model in twins:
        model.zero_grad()
    fully_shard(twins.sharded)
    twins.step(lambda model: square_mean(model(rank_input(3, 15))))
    assert_at_rest(twins.sharded)
    model = _Layers()
    _shard_alone(model)
    square_mean(model(rank_input(3, 15))).backward()
    handle, context = map(weakref.ref, (get_handles(model)[0], get_states(model)[0].context))
    gc.disable()
    try:
        del model
        assert handle() is None
        assert context() is None
    finally:
        gc.enable()
