"""Direct ops do what the op rules do, and leave to them whatever is not plain and simple."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.write_guard import WriteGuard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.tensor.test_flat_shard import OddShapes, full, guard_of, shard, shard_module

pytestmark = pytest.mark.fast

DIRECT: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x.add(y, alpha=2),
    "sqrt": lambda x, y: x.sqrt(),
    "truediv": lambda x, y: x / 3,
    "truediv_shard": lambda x, y: x / y,
    "add_": lambda x, y: x.add_(y, alpha=0.5),
    "add_number": lambda x, y: x.add_(1),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y, value=-0.1),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.1),
    "div_": lambda x, y: x.div_(y),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "mul_": lambda x, y: x.mul_(0.9),
    "sub_": lambda x, y: x.sub_(y),
}


class _Seen(TorchDispatchMode):
    """Notes the classes of the tensors that ops are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: set[type] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.classes |= {type(arg) for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


class _SeenCalls(TorchFunctionMode):
    """Notes the classes of the tensors that functions are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: set[type] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.classes |= {type(arg) for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


def _slices(model: nn.Module) -> list[Tensor]:
    return [param._local.clone() for param in model.parameters()]


@distributed(2)
def test_direct_op_equals_the_op_on_slices() -> None:
    """Without dispatch, for empty slices too; in place it returns the very shard it wrote."""
    model, other = OddShapes(), OddShapes()
    shard_module(model)
    shard_module(other)
    pairs = [(param, param.detach() + 2) for param in model.parameters()]
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatShard, "__torch_dispatch__", None)  # a call raises
        for name, compute in DIRECT.items():
            for x, y in pairs:
                expected = compute(x._local.clone(), y._local)
                version = x._version
                result = compute(x, y)
                assert isinstance(result, FlatShard)
                assert result._shard_spec is x._shard_spec
                assert_equal(result._local, expected, name)
                is_in_place = name == "add_number" or name.endswith("_")
                assert (result is x) == is_in_place, name
                assert x._version == version + is_in_place, name


@distributed(2)
def test_direct_write_is_counted_and_can_be_refused() -> None:
    """Before the first element has changed."""
    model = OddShapes()
    shard_module(model)
    guard = guard_of(model.weight)
    with torch.no_grad():
        before = guard.num_writes
        model.weight.mul_(2).add_(1)
        assert guard.num_writes == before + 2
        slices = _slices(model)
        guard.refuse_writes("here.")
        with pytest.raises(RuntimeError, match=r"'weight' was written in its sharded form here\."):
            model.weight.mul_(2)
    assert_equal(_slices(model), slices, "slices")


@distributed(2)
def test_write_between_forward_and_backward_is_found() -> None:
    """Autograd saved the shard: a gradient of other values would be wrong."""
    param = nn.Parameter(shard(torch.ones(7, 15), "fc.weight"))
    param._guard = WriteGuard()
    loss = (param * param).sum()
    with torch.no_grad():
        param.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@distributed(2)
def test_other_operands_and_modes_take_the_dispatcher() -> None:
    """Wrong operands raise as ever and change nothing; a mode sees the shards, not their slices."""
    model = OddShapes()
    shard_module(model)
    weight, slices = model.weight, _slices(model)
    with torch.no_grad():
        for wrong in (torch.ones(7, 3), model.bias.detach(), shard(torch.ones(7), "other")):
            for call in (weight.add_, weight.div_, weight.add, lambda y: weight.addcmul_(y, y)):
                with pytest.raises(RuntimeError):
                    call(wrong)
        assert_equal(_slices(model), slices, "slices")
        assert isinstance(weight.add_(torch.tensor(1.0)), FlatShard)
        num_writes = guard_of(weight).num_writes
        with pytest.raises(TypeError, match="add_"):
            weight.add_(None)
        for absent in (None, ...):
            with pytest.raises(TypeError, match="add_"):
                weight.add_(absent, 1.5)
            with pytest.raises(TypeError, match="lerp_"):
                weight.lerp_(absent, weight.detach(), weight=0.3)
            with pytest.raises(TypeError, match="sqrt"):
                weight.sqrt(absent)
        assert guard_of(weight).num_writes == num_writes
        assert_equal(weight._local, slices[0] + 1, "None")
        with pytest.warns(UserWarning, match="deprecated"):  # of torch, once in a process
            expected = weight._local.addcmul(0.5, weight._local, weight._local)
        weight.addcmul_(0.5, weight.detach(), weight.detach())
        assert_equal(weight._local, expected, "three operands")
        with _Seen() as seen:
            weight.mul_(2)
        with _SeenCalls() as calls:
            weight.mul_(2)
        assert seen.classes == calls.classes == {FlatShard}
    with torch.inference_mode():  # whose tensors have no version
        assert_equal((weight / 2).add_(1)._local, weight._local / 2 + 1, "in inference mode")
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.add_(1)
    assert weight.sqrt().grad_fn is not None


STEPS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw_fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True, weight_decay=0.0),
    "adam_maximize": lambda params: torch.optim.Adam(params, foreach=True, maximize=True),
    "nadam": lambda params: torch.optim.NAdam(params, foreach=True),
    "radam": lambda params: torch.optim.RAdam(params, foreach=True),
    "adadelta": lambda params: torch.optim.Adadelta(params, foreach=True),
    "rprop": lambda params: torch.optim.Rprop(params, foreach=True),  # takes lists apart
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@distributed(2)
def test_steps_on_lists_equal_those_on_slices() -> None:
    """Without dispatch from the second one on, and each counts as a write of the parameters."""
    for name, make in STEPS.items():
        model = OddShapes()
        shard_module(model)
        params: list[Any] = list(model.parameters())
        plain = [nn.Parameter(each) for each in _slices(model)]
        optimizers = [make(params), make(plain)]
        with pytest.MonkeyPatch.context() as patch:
            for step in range(3):
                for param, local in zip(params, plain, strict=True):
                    local.grad = torch.full_like(local, step - 0.5)
                    param.grad = FlatShard(local.grad.clone(), param._shard_spec)
                before = [guard_of(param).num_writes for param in params]
                if step and name not in ("adam_maximize", "rprop"):  # lists of gradients alone
                    patch.setattr(FlatShard, "__torch_dispatch__", None)  # a call raises
                for optimizer in optimizers:
                    optimizer.step()
                patch.undo()
                after = [guard_of(param).num_writes for param in params]
                assert all(more > less for more, less in zip(after, before, strict=True)), name
                assert_equal(_slices(model), [each.detach() for each in plain], name)


@distributed(2)
def test_a_shard_that_leads_lists_is_like_any_other() -> None:
    """For functions of one tensor, modes, errors and copies; results are shards for everyone."""
    model, other = OddShapes(), OddShapes()
    shard_module(model)
    shard_module(other)
    leads: list[Any] = [torch.zeros_like(param) for param in model.parameters()]
    first = leads[0]
    torch._foreach_add_(leads, 3.0)
    assert type(first) is not FlatShard
    assert repr(first).startswith("FlatShard(")
    assert type(torch.zeros_like(first)) is type(copy.deepcopy(first).clone()) is FlatShard
    assert torch.norm(first).item() == pytest.approx(3 * first.numel() ** 0.5)
    roots = torch._foreach_sqrt(leads)
    assert all(isinstance(root, FlatShard) for root in roots)
    assert type(roots) is tuple
    with torch.no_grad():
        with _Seen() as seen:
            torch._foreach_mul_(leads, 2.0)
        assert seen.classes == set()  # lists
        others = [param.detach() for param in other.parameters()]
        with pytest.raises(RuntimeError, match="must match the size"):
            torch._foreach_add_(leads, others[::-1])
        torch._foreach_add_([first], [torch.ones(7, 15)])
    assert_equal(first._local, torch.full_like(first._local, 7.0), "values")


@distributed(2)
def test_ops_that_autograd_does_not_record_are_direct() -> None:
    """In a step without no_grad, as Prodigy's; those of a trainable shard are torch's."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    state, grad = shard(torch.ones(7, 15)), shard(torch.full((7, 15), 2.0))
    grad._shard_spec = state._shard_spec
    sys.setprofile(note)
    state.mul_(0.5).add_(grad, alpha=0.25)
    sys.setprofile(None)
    assert "__torch_dispatch__" not in found
    assert_equal(full(state), torch.ones(7, 15))
    param = nn.Parameter(state)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        param.mul_(0.5)
    assert (state + 0).grad_fn is None
    assert param.add(1.0).grad_fn is not None
