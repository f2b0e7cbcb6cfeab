"""Numbers of parameters that one rank owns: right for one parameter, refused for several."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard import fully_shard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed

Params = list[nn.Parameter]
Step = Callable[[Params, dict[Any, Any]], None]


class _RunsFunction(Optimizer):
    """Runs a function on the parameters that have gradients, and its state."""

    def __init__(self, params: Any, run: Step) -> None:
        super().__init__(params, {})
        self._run = run

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters."""
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        self._run(params, self.state)


def _grads(params: Params) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


# Steps in which the numbers of a parameter change that parameter alone


def _trust_ratio(params: Params, state: dict[Any, Any]) -> None:
    for param, grad in zip(params, _grads(params), strict=True):
        sizes = param.norm(), grad.norm()
        ratio = torch.where(sizes[1] > 0, sizes[0] / sizes[1], torch.ones(()))
        scale = max(0.01, torch.stack([ratio, ratio.clamp(max=2.0)]).min())
        param.sub_(grad * scale, alpha=0.1)
        param.addcmul_(grad, sizes[1] * torch.ones(1), value=-0.1)


def _lists(params: Params, state: dict[Any, Any]) -> None:
    numbers = [grad.square().mean() for grad in _grads(params)]
    torch._foreach_add_(numbers, 1.0)
    updates = torch._foreach_div(_grads(params), torch._foreach_sqrt(numbers))
    torch._foreach_div_(updates, numbers)
    torch._foreach_sub_(params, torch._foreach_mul(updates, 0.1))


def _keeps_numbers(params: Params, state: dict[Any, Any]) -> None:
    for param, grad in zip(params, _grads(params), strict=True):
        own = state[param]
        if not own:
            own.update(mean=torch.zeros(()), kept=torch.zeros(2), last=None)
        own["mean"].mul_(0.9).add_(grad.abs().max())
        own["kept"][1] = grad.sum()
        own["last"] = 0.5 * grad.norm() + own["kept"].sum()
        param.sub_(own["mean"]).sub_(own["last"] * 0.01)


def _stacked_by_shape(params: Params, state: dict[Any, Any]) -> None:
    for shape in {param.shape for param in params}:
        same = [param for param in params if param.shape == shape]
        joined = torch.stack(_grads(same))
        joined = joined / joined.flatten(1).norm(dim=1).view(-1, *[1] * len(shape))
        for param, update in zip(same, joined, strict=True):
            param.sub_(update)


@pytest.mark.parametrize("step", [_trust_ratio, _lists, _keeps_numbers, _stacked_by_shape])
@distributed(2, 3)
def test_numbers_of_one_parameter_change_it(step: Step) -> None:
    """As on the plain model; and what a step keeps is a plain tensor."""
    plain, model = _nets()
    optimizers = [_RunsFunction(each.parameters(), step) for each in (plain, model)]
    for _ in range(3):
        _step_both((plain, model), optimizers)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), expected.detach())
    for state in optimizers[1].state.values():
        assert [type(value) for value in state.values()] == [Tensor] * len(state)
        assert_equal(pickle.loads(pickle.dumps(state["mean"])), state["mean"])


# Steps in which numbers of several parameters meet


def _mean_of_all(params: Params, state: dict[Any, Any]) -> None:
    total, numel = 0.0, 0
    for grad in _grads(params):
        total = total + grad.square().sum()
        numel += grad.numel()
    _apply(params, (total / numel).sqrt())


def _stacked(params: Params, state: dict[Any, Any]) -> None:
    factor = torch.stack([grad.norm() for grad in _grads(params)]).norm()
    torch._foreach_mul_(params, 1.0 / factor)


def _of_lists(params: Params, state: dict[Any, Any]) -> None:
    factor = torch.stack(torch._foreach_mul([x.norm() for x in _grads(params)], 2.0)).sum()
    updates = torch._foreach_mul(_grads(params), 0.5)
    torch._foreach_mul_(updates, factor)
    torch._foreach_sub_(params, updates)


def _in_memory(params: Params, state: dict[Any, Any]) -> None:
    found = torch.zeros(len(params))
    for index, grad in enumerate(_grads(params)):
        found[index] = grad.norm()
    _apply(params, found.max())


def _read(params: Params, state: dict[Any, Any]) -> None:
    total = torch.zeros(1)
    for grad in _grads(params):
        total += grad.norm()
    if total > 0:
        _apply(params, total)


def _of_neighbours(params: Params, state: dict[Any, Any]) -> None:
    norms = [grad.norm() for grad in _grads(params)]
    for param, norm in zip(params, reversed(norms), strict=True):
        param.mul_(norm)


def _apply(params: Params, number: Tensor) -> None:
    for param in params:
        param.addcdiv_(param.grad, 1.0 + number, value=-0.1)


_JOINING = [_mean_of_all, _stacked, _of_lists, _in_memory, _read, _of_neighbours]


@pytest.mark.parametrize("step", _JOINING)
@distributed(2)
def test_numbers_of_several_parameters_are_refused(step: Step) -> None:
    """On every rank, before any parameter has changed; by default they are right."""
    plain, model = _nets(granularity="element")
    _step_both((plain, model), [_RunsFunction(each.parameters(), step) for each in (plain, model)])
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), expected.detach())
    _, model = _nets()
    _backward_of(model)
    with pytest.raises(
        RuntimeError, match=r"a step of _RunsFunction combines numbers of .* and '"
    ) as caught:
        _RunsFunction(model.parameters(), step).step()
    assert "default granularity" in str(caught.value)
    for param, expected in zip(model.parameters(), _nets()[0].parameters(), strict=True):
        assert_equal(param.detach().full_tensor(), expected.detach())


@distributed(2)
def test_a_step_that_failed_leaves_no_numbers() -> None:
    """The next step makes plain tensors of what it has kept."""
    _, model = _nets()
    kept: list[Tensor] = []

    def fail(params: Params, state: dict[Any, Any]) -> None:
        kept.append(params[0].norm())
        raise KeyError(0)

    _backward_of(model)
    with pytest.raises(KeyError):
        _RunsFunction(model.parameters(), fail).step()
    _RunsFunction(model.parameters(), lambda *_: None).step()
    assert type(kept[0]) is Tensor


def _nets(granularity: Any = "param") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain, model = (nn.Sequential(*(nn.Linear(5, 6) for _ in range(6))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for layer in model:
        fully_shard(layer, granularity=granularity)
    return plain, fully_shard(model, granularity=granularity)


def _backward_of(model: nn.Module) -> None:
    sum(layer(torch.arange(10.0).view(2, 5)).sin().sum() * 0.1 for layer in model).backward()


def _step_both(models: tuple[nn.Module, nn.Module], optimizers: list[_RunsFunction]) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        _backward_of(model)
        optimizer.step()
        optimizer.zero_grad()
