"""Steps that find no gradient, because a backward reached no unit, or rightly so."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from composable_shard import is_sharded
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import average_gradients, rank_input, shard_children, square_mean

LR = 0.05
REFUSAL = r"the step of an optimizer found no gradient: a backward has run .* reached none of them"


def _plain_and_sharded(width: int = 3, **options: object) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and its sharded copy."""
    torch.manual_seed(width)
    plain = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)).double()
    sharded = copy.deepcopy(plain)
    shard_children(sharded, **options)
    return plain, sharded


def _batch_loss(model: nn.Module, number: int = 0) -> Tensor:
    return square_mean(model(rank_input(5, 4, step=number, dtype=torch.float64)))


def _backward_averaged(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    if not is_sharded(model):
        average_gradients(model.parameters())


def _assert_equal(plain: nn.Module, sharded: nn.Module) -> None:
    found = claims.unsharded_values(sharded)
    for name, param in plain.named_parameters():
        claims.assert_close(found[name], param.detach(), name)


# Programs that miss their parameters


def _step_of_inputs(model: nn.Module, optimizer: Optimizer) -> None:
    _batch_loss(model).backward(inputs=list(model.parameters()))
    optimizer.step()


def _step_of_grad(model: nn.Module, optimizer: Optimizer) -> None:
    params = list(model.parameters())
    for param, grad in zip(
        params, torch.autograd.grad(_batch_loss(model), params, allow_unused=True), strict=True
    ):
        param.grad = grad
    optimizer.step()


def _step_of_closure(model: nn.Module, optimizer: Optimizer) -> None:
    def closure() -> float:
        loss = _batch_loss(model)
        loss.backward(inputs=list(model.parameters()))
        return loss.item()

    optimizer.step(closure)


def _step_of_penalty(model: nn.Module, optimizer: Optimizer) -> None:
    """A backward to the model's input comes first, and is right."""
    x = rank_input(5, 4, dtype=torch.float64).requires_grad_()
    loss = square_mean(model(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward(inputs=list(model.parameters()))
    optimizer.step()


def _step_beside_another_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Another sharded model has run its own backward in between."""
    _, other = _plain_and_sharded(5)
    loss = _batch_loss(model)
    _batch_loss(other).backward()
    loss.backward(inputs=list(model.parameters()))
    optimizer.step()


MISSING: list[Callable[[nn.Module, Optimizer], None]] = [
    _step_of_inputs,
    _step_of_grad,
    _step_of_closure,
    _step_of_penalty,
    _step_beside_another_model,
]


def _check_missing(program: Callable[[nn.Module, Optimizer], None], **options: object) -> None:
    with warnings.catch_warnings():
        # Each forward after such a backward.
        warnings.filterwarnings("ignore", "a backward has run since the last forward")
        _check_missing_steps(program, **options)


def _check_missing_steps(
    program: Callable[[nn.Module, Optimizer], None], **options: object
) -> None:
    plain, sharded = _plain_and_sharded(**options)
    optimizers = [SGD(model.parameters(), lr=LR) for model in (plain, sharded)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSAL):
            program(sharded, optimizers[1])
    with pytest.raises(RuntimeError, match=REFUSAL):
        optimizers[1].step()  # without a further backward too
    for model, optimizer in zip((plain, sharded), optimizers, strict=True):
        _backward_averaged(model, _batch_loss(model))
        optimizer.step()
        optimizer.zero_grad()
    _assert_equal(plain, sharded)
    with pytest.raises(RuntimeError, match=REFUSAL):
        program(sharded, optimizers[1])
    _assert_equal(plain, sharded)


@pytest.mark.parametrize("program", MISSING)
@distributed(2)
def test_a_step_after_a_backward_that_missed_is_refused(
    program: Callable[[nn.Module, Optimizer], None],
) -> None:
    """Each time, before and after a right step."""
    _check_missing(program)


@claims.strategies
@distributed(1)
def test_a_step_on_one_rank_is_refused(strategy: object, use_orig_params: bool) -> None:
    """As on two."""
    _check_missing(_step_of_inputs, strategy=strategy, use_orig_params=use_orig_params)


@claims.strategies
@distributed(2)
def test_a_step_of_each_strategy_is_refused(strategy: object, use_orig_params: bool) -> None:
    """Also where an optimizer steps one flat parameter."""
    _check_missing(_step_of_inputs, strategy=strategy, use_orig_params=use_orig_params)


@distributed(2)
def test_a_step_of_owned_parameters_is_refused() -> None:
    """On each rank, whatever it owns."""
    _check_missing(_step_of_inputs, granularity="param")


# Programs whose steps rightly find no gradient


def _warms_up(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Steps before any forward, and after one that no backward follows."""
    optimizer.zero_grad()
    optimizer.step()
    _batch_loss(model, number)
    optimizer.step()
    _backward_averaged(model, _batch_loss(model, number))
    optimizer.step()


def _evaluates(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """A forward with grad after the backward, another model's backward before it, two steps."""
    plain = nn.Linear(2, 2)
    plain(torch.ones(2)).sum().backward()
    _backward_averaged(model, _batch_loss(model, number))
    _batch_loss(model, number + 1)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def _scales(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """The scaler leaves out a step, and the gradients of the next are set to None by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    _backward_averaged(
        model, scaler.scale(_batch_loss(model, number)) * (float("inf") if number == 0 else 1.0)
    )
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    _batch_loss(model, number)
    optimizer.step()


def _runs_closures(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """A closure that clears its gradients at the end, as some second steps of SAM do."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _batch_loss(model, number)
        _backward_averaged(model, loss)
        return loss

    _batch_loss(model, number)
    optimizer.step(closure)
    loss = closure()
    optimizer.zero_grad()
    optimizer.step(lambda: loss.item())


def _trains_inputs(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """A backward to the input alone, and a step that changes nothing."""
    x = rank_input(5, 4, step=number, dtype=torch.float64).requires_grad_()
    square_mean(model(x)).backward(inputs=[x])
    optimizer.step()
    _backward_averaged(model, square_mean(model(x.detach() + 0.1 * x.grad)))
    optimizer.step()


@pytest.mark.parametrize(
    "program", [_warms_up, _evaluates, _scales, _runs_closures, _trains_inputs]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPTIM"])
@distributed(2)
def test_a_step_without_gradients_may_be_right(
    program: Callable[[nn.Module, Optimizer, int], None], strategy: str
) -> None:
    """No error, no warning, and the values of a plain model."""
    plain, sharded = _plain_and_sharded(strategy=strategy)
    for model in (plain, sharded):
        optimizer = SGD(model.parameters(), lr=LR)
        for number in range(3):
            program(model, optimizer, number)
            optimizer.zero_grad()
    _assert_equal(plain, sharded)


@pytest.mark.parametrize("is_critic_sharded", [True, False])
@distributed(2)
def test_adversaries_step_in_turns(is_critic_sharded: bool) -> None:
    """In the critic's turns the generator's graph waits; if both are sharded, all may step."""
    pairs = _plain_and_sharded(3), _plain_and_sharded(5)
    for index in range(2):
        makes, judges = (pair[index] for pair in pairs)
        if not is_critic_sharded:
            judges = copy.deepcopy(pairs[1][0])
        optimizers = [Adam(model.parameters(), lr=LR) for model in (makes, judges)]
        for number in range(3):
            made = makes(rank_input(5, 4, step=number, dtype=torch.float64))
            _backward_averaged(judges, _batch_loss(judges, number))
            _backward_averaged(judges, -square_mean(judges(made.detach())))
            for optimizer in optimizers if is_critic_sharded else optimizers[1:]:
                optimizer.step()
                optimizer.zero_grad()
            _backward_averaged(makes, square_mean(judges(made)))
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    for pair in pairs[: 1 + is_critic_sharded]:
        _assert_equal(*pair)
