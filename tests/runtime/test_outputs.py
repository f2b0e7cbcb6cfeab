"""What a forward returns: the model's own parts stay as they are, and so does what is kept."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from composable_shard import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import rank_input, shard_root

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


# --- containers that the model or the caller keeps ---


@dataclass(frozen=True)
class _FrozenInput:
    mean: Any


class _Pair(NamedTuple):
    mean: Any
    number: int


class _Dict(dict[str, Any]):
    """With an attribute of its own."""

    name = ""


def _named(mean: Tensor) -> _Dict:
    found = _Dict(mean=mean)
    found.name = "running"
    return found


STATES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda mean: {"mean": mean}, lambda state: state["mean"]),
    "dict of its own": (_named, lambda state: state["mean"]),
    "list": (lambda mean: [mean], lambda state: state[0]),
    "deque": (lambda mean: deque([mean], maxlen=1), lambda state: state[0]),
    "list in a tuple": (lambda mean: _Pair([mean], 1), lambda state: state.mean[0]),
    "dict in a list": (lambda mean: [{"mean": mean}], lambda state: state[0]["mean"]),
    "dataclass": (_FrozenInput, lambda state: state.mean),
    "list in a dataclass": (lambda mean: _FrozenInput([mean]), lambda state: state.mean[0]),
    "object": (lambda mean: SimpleNamespace(mean=mean), lambda state: state.mean),
    "list in an object": (lambda mean: SimpleNamespace(mean=[mean]), lambda state: state.mean[0]),
}


class _Running(nn.Module):
    """Returns a running state that it keeps, and adds to it what is too small for bf16."""

    def __init__(self, state: Any, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.state, self.read = state, read

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        self.read(self.state).add_(2.0**-10)
        return self.linear(x), self.state


@pytest.mark.parametrize("form", STATES)
@claims.strategies
@distributed(1, 2, 3)
def test_output_dtype_leaves_a_kept_state_as_it_is(
    form: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """It is returned as a copy of its kind in which the tensor is cast."""
    make, read = STATES[form]
    mean = torch.ones(2)
    model = _Running(make(mean), read)
    fully_shard(
        model,
        strategy=strategy,
        use_orig_params=use_orig_params,
        mp_policy=MixedPrecisionPolicy(output_dtype=BF16),
    )
    for step in range(3):
        output, returned = model(rank_input(2, 5, step=step))
        output.sum().backward()
        assert output.dtype == read(returned).dtype == BF16
        assert type(returned) is type(model.state)
        assert vars(returned).keys() == vars(model.state).keys() if form == "dict of its own" else 1
        assert read(model.state) is mean
    assert_equal(mean, torch.full((2,), 1 + 3 * 2.0**-10))


class _ReturnsBatch(nn.Module):
    """Returns the batch with its result in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["y"] = self.linear(batch["x"])
        return batch


@pytest.mark.parametrize("output_dtype", [None, BF16])
@claims.strategies
@distributed(1, 2, 3)
def test_callers_batch_keeps_its_tensors(
    output_dtype: torch.dtype | None, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Those to cast, and a leaf that needs a gradient, which the output has under a new node."""
    plain = _ReturnsBatch()
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(output_dtype=output_dtype)
    fully_shard(model, strategy=strategy, use_orig_params=use_orig_params, mp_policy=policy)
    grads = []
    for each in (plain, model):
        x, mask = rank_input(2, 5).requires_grad_(), torch.ones(2, 1)
        batch = {"x": x, "mask": mask}
        output = each(batch)
        assert batch["x"] is x
        assert batch["mask"] is mask
        assert batch["y"].dtype == F32
        (output["y"].float() * output["mask"]).sum().backward()
        grads.append(x.grad)
    assert_equal(grads[1], grads[0])


class _Uncopied:
    def __init__(self, mean: Tensor) -> None:
        self.mean = mean

    def __copy__(self) -> Any:
        raise TypeError("there is one of these")


@distributed(2)
def test_object_that_refuses_a_copy_is_named() -> None:
    """To cast in it would change what the model keeps."""
    model = _Running(_Uncopied(torch.ones(2)), lambda state: state.mean)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
    with pytest.raises(RuntimeError, match=r"can't copy the _Uncopied .* there is one of these"):
        model(rank_input(2, 5))
    assert model.state.mean.dtype == F32


def _in_itself(kind: str, found: Tensor | None) -> Any:
    """Return a container, or an object, that contains itself, and a tensor."""
    made: Any
    if kind in ("list", "deque"):
        made = [found] if kind == "list" else deque([found])
        made.append(made)
    elif kind == "dict":
        made = {"found": found}
        made["itself"] = made
    elif kind == "list in a tuple":
        inner: list[Any] = []
        made = (found, inner)
        inner.append(made)
    else:
        made = SimpleNamespace(found=found)
        made.more = {"around": made}
    return made


def _found_in(made: Any) -> Any:
    if isinstance(made, SimpleNamespace):
        return made.found
    return made["found"] if isinstance(made, dict) else made[0]


class _InItself(nn.Module):
    """Takes and returns what contains itself; its body returns such a thing too."""

    def __init__(self, kind: str, *, is_empty: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.kind, self.is_empty = kind, is_empty
        self.output: Any = None

    def forward(self, batch: Any) -> Any:
        output = self.head(self.body(_found_in(batch)).tanh())
        if self.is_empty:  # of tensors; the loss is computed inside
            self.output = output
        return _in_itself(self.kind, None if self.is_empty else output)


_KINDS_IN_ITSELF = ("list", "deque", "dict", "list in a tuple", "object")


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("kind", _KINDS_IN_ITSELF)
@claims.strategies
@distributed(1, 2)
def test_containers_may_contain_themselves(
    kind: str, is_empty: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Inputs and outputs, also those without a tensor: nothing recurses without end."""

    def program(model: Any, number: int) -> None:
        batch = _in_itself(kind, rank_input(4, 6, step=number, dtype=F64))
        output = model(batch)
        found = model.output if is_empty else _found_in(output)
        found.square().mean().backward()

    claims.assert_right(
        lambda: _InItself(kind, is_empty=is_empty),
        program,
        shard=_shard_body_and_net,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize("kind", _KINDS_IN_ITSELF)
@distributed(2)
def test_a_container_in_itself_whose_tensors_are_cast_is_named(kind: str) -> None:
    """As an output and, but for objects, as an input; without a tensor to cast it is right."""
    for dtype, policy in (
        (F32, MixedPrecisionPolicy(output_dtype=BF16)),
        (F32, MixedPrecisionPolicy(param_dtype=BF16)),
    ):
        model = fully_shard(_InItself(kind), mp_policy=policy)
        batch = _in_itself(kind, rank_input(4, 6, dtype=dtype))
        if kind == "object" and policy.param_dtype is not None:
            batch.found = batch.found.bfloat16()
            model(batch)
            continue
        name = "tuple|list" if kind == "list in a tuple" else kind.replace("object", "Simple")
        with pytest.raises(RuntimeError, match=f"the ({name}).* contains itself.*reference"):
            model(batch)
        assert _found_in(batch).dtype == dtype
    model = fully_shard(
        _InItself(kind, is_empty=True), mp_policy=MixedPrecisionPolicy(output_dtype=BF16)
    )
    model(_in_itself(kind, rank_input(4, 6)))


class _Losses(nn.Module):
    """Returns nothing but a queue of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> deque[Tensor]:
        hidden = self.body(x).tanh()
        return deque([hidden.square().mean(), self.head(hidden).square().mean()])


@claims.strategies
@distributed(1, 2)
def test_losses_in_a_deque_train(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """The backward of what is in it gathers the units."""
    claims.assert_right(
        _Losses,
        lambda model, number: sum(model(rank_input(4, 6, step=number, dtype=F64))).backward(),
        shard=_shard_body_and_net,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


# --- the model's own parts ---


class _Net(nn.Module):
    """Returns something of itself beside its result."""

    def __init__(self, take: Callable[[_Net], Any]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(3))
        self.take = take

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.head(self.body(x).tanh()) * self.scale + self.shift, self.take(self)


PARTS: dict[str, Callable[[_Net], Any]] = {
    "itself": lambda net: net,
    "a layer": lambda net: net.head,
    "a unit": lambda net: net.body,
    "a list of modules": lambda net: list(net.modules()),
    "a dict of modules": lambda net: net._modules,
    "all parameters": lambda net: list(net.parameters()),
    "all parameters by name": lambda net: dict(net.named_parameters()),
    "its own parameters": lambda net: net._parameters,
    "a layer's parameters": lambda net: SimpleNamespace(found=net.head._parameters),
    "a unit's parameters": lambda net: tuple(net.body.parameters()),
    "buffers": lambda net: net._buffers,
}


def _shard_body_and_net(model: nn.Module, **options: Any) -> None:
    fully_shard(model.body, **options)
    fully_shard(model, **options)


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("output_dtype", [None, F32])
@claims.strategies
@distributed(1, 2, 3)
def test_forward_may_return_parts_of_the_model(
    form: str, output_dtype: torch.dtype | None, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """They stay parts of the model, which trains on."""

    def program(model: nn.Module, number: int) -> None:
        output, _ = model(rank_input(4, 6, step=number, dtype=F64))
        assert model.shift.dtype == F64
        output.double().square().mean().backward()

    if output_dtype is None:
        claims.assert_right(
            lambda: _Net(PARTS[form]),
            program,
            shard=_shard_body_and_net,
            strategy=strategy,
            use_orig_params=use_orig_params,
        )
        return
    model = _Net(PARTS[form]).double()
    fully_shard(model.body, strategy=strategy, use_orig_params=use_orig_params)
    policy = MixedPrecisionPolicy(output_dtype=output_dtype)
    fully_shard(model, strategy=strategy, use_orig_params=use_orig_params, mp_policy=policy)
    for step in range(2):
        program(model, step)
    assert {param.dtype for param in model.parameters()} == {F64}


def _penalise(model: nn.Module, number: int) -> None:
    output, found = model(rank_input(4, 6, step=number, dtype=F64))
    (output.square().mean() + found["scale"].square().sum()).backward()


@claims.variants
@distributed(1, 2, 3)
def test_returned_parameters_pass_their_gradient_on(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """A penalty outside of the forward reaches them, and the dict they came in is the model's."""
    claims.assert_right(
        lambda: _Net(lambda net: net._parameters),
        _penalise,
        shard=shard_root,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )
