"""Gradients are the same objects in every step, unless somebody keeps one, [Note: Lent pieces]."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.free_group import free_world
from benchmarks.models import MatrixChain
from composable_shard import ShardedGradScaler, clip_grad_norm_, fully_shard
from composable_shard.optim import clipping

pytestmark = pytest.mark.fast  # so on each version of Python, which count references differently


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """One unit of three parameters, on one of two ranks whose collectives do nothing."""
    with free_world(2):
        model = fully_shard(MatrixChain(1, 3))
        for _ in range(3):
            _compute(model, 1.0)
            model.zero_grad()
        yield model


def _compute(model: nn.Module, value: float) -> None:
    """Run a backward; as the ranks send nothing, make a number of the gradients."""
    model(torch.ones(1, next(iter(model.parameters())).shape[1])).backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.grad.fill_(value)


def _gradient_refs(model: nn.Module) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(param.grad) for param in model.parameters()]


def _memory_of(grad: Any) -> int:
    return int(grad.to_local().untyped_storage().nbytes())


def _drop_by_none(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def _drop_by_del(model: nn.Module) -> None:
    for param in model.parameters():
        del param.grad


def _drop_in_another_order(model: nn.Module) -> None:
    """Than in the step before."""
    params, refs = list(model.parameters()), _gradient_refs(model)
    for order in (params[::-1], params[3:] + params[:3], params[1::2] + params[::2]):
        sizes = set()
        for param in order:
            sizes |= {_memory_of(ref()) for ref in refs}
            param.grad = None
        assert 0 not in sizes
        assert {_memory_of(ref()) for ref in refs} == {0}
        _compute(model, 1.0)
    model.zero_grad()


@pytest.mark.parametrize(
    "drop", [nn.Module.zero_grad, _drop_by_none, _drop_by_del, _drop_in_another_order]
)
def test_dropped_gradients_hold_no_memory_and_come_again(
    model: nn.Module, drop: Callable[[nn.Module], None]
) -> None:
    """Whichever way they were dropped."""
    _compute(model, 1.0)
    before = _gradient_refs(model)
    assert all(_memory_of(ref()) > 0 for ref in before)
    drop(model)
    assert [_memory_of(ref()) for ref in before] == [0] * len(before)
    _compute(model, 2.0)
    assert _gradient_refs(model) == before
    assert all(_memory_of(ref()) > 0 for ref in before)


@pytest.mark.parametrize(
    "keep",
    [
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad.to_local(),
        lambda grad: grad.to_local()[1:],
        lambda grad: grad.to_local().numpy(),
        lambda grad: torch.utils.dlpack.from_dlpack(grad.to_local()),
        lambda grad: grad.to_local().untyped_storage(),
        lambda grad: (grad.to_local() * torch.ones(1, requires_grad=True)).grad_fn,
    ],
)
def test_what_somebody_keeps_of_a_gradient_is_left_alone(
    model: nn.Module, keep: Callable[[Any], Any]
) -> None:
    """A tensor, an alias, a view, an array, a storage, and a node of a graph."""
    _compute(model, 1.0)
    param = next(iter(model.parameters()))
    kept = keep(param.grad)
    address = param.grad.to_local().data_ptr()
    model.zero_grad()
    for value in (2.0, 3.0):
        _compute(model, value)
        assert param.grad.to_local().data_ptr() != address
        model.zero_grad()
    values = getattr(kept, "_saved_self", kept)
    values = values.to_local() if hasattr(values, "to_local") else values
    if isinstance(values, torch.UntypedStorage):
        values = torch.empty(0).set_(values)
    assert len(values)
    assert all(value == 1.0 for value in values)


def test_what_a_user_does_to_a_gradient_ends_with_it(model: nn.Module) -> None:
    """An attribute, other data or memory, another gradient, and `requires_grad`."""
    changes: list[Callable[[Any], object]] = [
        lambda param: setattr(param.grad, "note", 1),
        lambda param: setattr(param.grad, "data", torch.ones_like(param)),
        lambda param: setattr(param, "grad", torch.ones_like(param)),
        lambda param: param.grad.requires_grad_(),
        lambda param: bool(param.grad.to_local().numpy().any()),
        lambda param: bool(param.grad.to_local().share_memory_().any()),
    ]
    for change in changes:
        _compute(model, 1.0)
        param = next(iter(model.parameters()))
        change(param)
        model.zero_grad()
        _compute(model, 2.0)
        assert not hasattr(param.grad, "note")
        assert not param.grad.requires_grad
        assert bool((param.grad.to_local() == 2.0).all())
        assert {_memory_of(each.grad) for each in model.parameters()} == {_memory_of(param.grad)}
        model.zero_grad()


def test_gradients_of_a_second_backward_are_added(model: nn.Module) -> None:
    """To the same objects, in memory that the second one does not get."""
    _compute(model, 1.0)
    before = _gradient_refs(model)
    pieces = [param.grad.to_local() for param in model.parameters()]
    addresses = [each.data_ptr() for each in pieces]
    model(torch.ones(1, 16)).backward()
    assert _gradient_refs(model) == before
    assert [param.grad.to_local().data_ptr() for param in model.parameters()] == addresses


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda params: params, 1),
        (lambda params: params[::-1], 1),
        (lambda params: params[:-1], 3),
        (lambda params: [*params, params[-1]], 5),
        (lambda params: setattr(params[-2], "grad", None), 3),
        (lambda params: setattr(params[-2], "grad", params[-1].grad), 4),
        (lambda params: setattr(params[-2], "grad", torch.ones_like(params[-2])), 4),
        (lambda params: setattr(params[-2].grad, "data", torch.ones_like(params[-2])), 4),
    ],
)
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_clipping_takes_pieces_as_one_while_they_are_the_gradients(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], Any], number: int, order: float
) -> None:
    """Each counts once for each time that it is given; padding does not."""
    with free_world(2, rank=1):  # which has the last four of nine parameters, and padding
        model = fully_shard(MatrixChain(2, 3, dim=2))
        for step in range(2):
            model.zero_grad()
            _compute(model, step + 1.0)
        params: list[Any] = list(model.parameters())
        memory = params[0].grad.to_local().untyped_storage()
        num_elements = sum(param.to_local().numel() for param in params)
        padding = torch.empty(0).set_(memory)[num_elements:]  # type: ignore[call-overload]
        assert len(padding)
        padding.fill_(float("nan"))
        given = change(params) or params
        slices = [param.grad.to_local() for param in given if param.grad is not None]
        expected = torch.linalg.vector_norm(torch.cat(slices), order)
        before = [local.clone() for local in slices]
        scaled: list[int] = []
        scale = clipping.foreach_mul_

        def note(tensors: list[Tensor], factor: Tensor) -> None:
            scaled.append(len(tensors))
            scale(tensors, factor)

        monkeypatch.setattr(clipping, "foreach_mul_", note)
        torch.testing.assert_close(clip_grad_norm_(given, 0.5, order), expected)
    assert scaled == [number]
    for local, old in zip(slices, before, strict=True):
        times = sum(local is each for each in slices)
        torch.testing.assert_close(local, old * (0.5 / expected) ** times)


@pytest.mark.parametrize("is_scaler", [False, True])
def test_write_of_gradients_that_autograd_saved_is_found(model: nn.Module, is_scaler: bool) -> None:
    """As where the model is plain: what they were is gone, also of those scaled as one."""
    _compute(model, 2.0)
    params: list[Any] = list(model.parameters())
    losses = [(param * param.grad).sum() for param in params]
    if is_scaler:
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(torch.optim.SGD(params, 0.1))
    else:
        clip_grad_norm_(model, 0.5)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
