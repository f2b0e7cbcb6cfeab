"""Ops on FlatShards compute what they compute on whole tensors, or raise on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from composable_shard.comm.trace import count_collectives
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.write_guard import WriteGuard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.tensor.test_flat_shard import OddShapes, full, shard, shard_module

# Elementwise ops

POINTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add_scalar": lambda x, y: 1 + x,
    "rsub": lambda x, y: 3 - x,
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "zero_dim": lambda x, y: x * torch.tensor(3.0),
    "zero_dim_first": lambda x, y: torch.tensor(3.0) * x,
    "expanded": lambda x, y: x + torch.ones(()).expand(x.shape),
    "comparison": lambda x, y: (x == y).logical_not(),
    "where": lambda x, y: torch.where(x == y, x, 0.0),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "addcmul": lambda x, y: x.addcmul(y, x, value=2),
    "addcdiv": lambda x, y: x.addcdiv(y, y + 1, value=2),
    "in_place": lambda x, y: x.clone().mul_(2).add_(y).sub_(1),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty_like(x)),
    "masked_fill": lambda x, y: x.clone().masked_fill_(x == y, 5),
    "fill_tensor": lambda x, y: x.clone().fill_(torch.tensor(5.0)),
    "conj": lambda x, y: x.conj() * y,
    "double": lambda x, y: x.double() if not x.is_complex() else x.to(torch.complex128),
    "bool": lambda x, y: x.bool() | y.bool(),
    "like": lambda x, y: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(y, 3),
    "clone": lambda x, y: x.clone(memory_format=torch.preserve_format),
    "detach": lambda x, y: x.detach().requires_grad_().data,
    "foreach": lambda x, y: torch._foreach_add(torch._foreach_mul([x, y], 2), [y, x])[0],
    "foreach_tensor": lambda x, y: torch._foreach_mul([x], torch.tensor(2.0))[0],
    "foreach_zero_dim": lambda x, y: torch._foreach_mul([x], [torch.tensor(2.0)])[0],
    "foreach_in_place": lambda x, y: _foreach_in_place(x.clone(), y),
    "foreach_copy": lambda x, y: _foreach_copy(torch.zeros_like(x), x),
}


def _foreach_in_place(x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_addcmul_([x], [y], [y], 2)
    torch._foreach_lerp_([x], [y], 0.5)
    return x


def _foreach_copy(target: Tensor, source: Tensor) -> Tensor:
    torch._foreach_copy_([target], [source])
    return target


@distributed(2, 3)
@pytest.mark.parametrize("name", POINTWISE)
def test_elementwise_op_equals_that_of_whole_tensors(name: str) -> None:
    """With the same dtype and stride, and without communication; exactly, for real numbers."""
    compute = POINTWISE[name]
    for dtype in (torch.float32, torch.complex64):
        plain, sharded = OddShapes(dtype), OddShapes(dtype)
        shard_module(sharded)
        for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
            x, y = one.detach(), other.detach()
            with count_collectives() as log:
                result = compute(y, y + 1)
            assert isinstance(result, FlatShard)
            assert not log.events
            expected = compute(x, x + 1)
            assert result.stride() == expected.stride()
            # Torch rounds products of complex numbers otherwise at the end of a tensor.
            tolerance = 1e-6 if dtype.is_complex else 0
            torch.testing.assert_close(full(result), expected, rtol=tolerance, atol=tolerance)


@distributed(2)
def test_zero_dim_parameters_promote_like_tensors_without_dims() -> None:
    """A slice has a dim where the parameter has none; the result dtype must not show it."""
    for dtype in (torch.bfloat16, torch.float32):
        plain = torch.ones((), dtype=dtype)
        other = torch.tensor(2.0, dtype=torch.float64)
        assert (shard(plain) * other).dtype is (plain * other).dtype
        assert (shard(plain) * 2.0).dtype is (plain * 2.0).dtype
        vector = torch.ones(5, dtype=dtype)
        assert (shard(vector) * other).dtype is (vector * other).dtype
        expanded = other.expand(5)
        assert (shard(vector) * expanded).dtype is (vector * expanded).dtype


@distributed(2)
def test_new_tensors_of_the_own_size_are_shards() -> None:
    """An optimizer's `grad.new_zeros(grad.shape)` fits its parameter."""
    sharded = shard(torch.ones(7, 15))
    for tensor in (sharded.new_zeros(7, 15), sharded.new_full((7, 15), 0.0)):
        assert_equal(full(tensor), torch.zeros(7, 15))
    assert_equal(full(sharded.new_ones(sharded.shape)), torch.ones(7, 15))


@distributed(2)
def test_new_tensors_of_another_size_are_plain() -> None:
    """They have no elements on the ranks to be slices of; `new_empty` is plain for any size."""
    sharded = shard(torch.ones(7, 15))
    assert type(sharded.new_zeros(3)) is Tensor
    assert type(sharded.new_empty(7, 15)) is Tensor


@pytest.mark.fast
@distributed(2)
def test_copy_takes_the_slice_of_a_plain_full_tensor() -> None:
    """Also one that broadcasts, of another layout or dtype, and a single number."""
    target = shard(torch.zeros(7, 15))
    whole = torch.randn(15, 7, dtype=torch.float64).t()
    assert_equal(full(target.copy_(whole)), whole.float())
    assert_equal(full(target.copy_(torch.arange(15.0))), torch.arange(15.0).expand(7, 15))
    assert_equal(full(target.copy_(torch.tensor(2.0))), torch.full((7, 15), 2.0))


@distributed(2)
def test_copy_takes_a_dtensor_of_any_layout() -> None:
    """One that lies otherwise is gathered, by all ranks."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(7, 15)
    for placement in (Shard(0), Shard(1), Replicate()):
        target = shard(torch.zeros(7, 15))
        target.copy_(distribute_tensor(whole, mesh, [placement]))
        assert_equal(full(target), whole)


@distributed(2)
def test_memory_format_is_that_of_the_call() -> None:
    """A clone may have another order of elements; a parameter keeps its own."""
    image = torch.randn(4, 3, 2, 2)
    sharded = shard(image.to(memory_format=torch.channels_last), "conv.weight")
    assert_equal(full(sharded.contiguous(memory_format=torch.channels_last)), full(sharded))
    clone = sharded.clone(memory_format=torch.contiguous_format)
    assert clone.stride() == image.stride()
    assert_equal(full(clone), image)
    param = nn.Parameter(shard(image, "conv.weight"))
    param.__dict__["_guard"] = WriteGuard()
    with pytest.raises(RuntimeError, match="Convert the module before sharding it"):
        param.detach().to(memory_format=torch.channels_last)


# Errors

# While autograd records an op that reaches a parameter at rest.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "functional.linear(x, p)": lambda p: functional.linear(torch.ones(2, 15), p),
    "x @ p": lambda p: torch.ones(2, 7) @ p,
    "p @ x": lambda p: p @ torch.ones(15, 2),
    "functional.embedding(i, p)": lambda p: functional.embedding(torch.tensor([1]), p),
    "functional.conv1d(x, p)": lambda p: functional.conv1d(torch.ones(1, 5, 9), p.view(7, 5, 3)),
    "einsum": lambda p: torch.einsum("ab,cb->ac", p, torch.ones(2, 15)),
    "p.detach().t_()": lambda p: p.detach().t_(),
    "p.item()": lambda p: p.item(),
}


def _refusals() -> dict[str, str]:
    model = nn.Module()
    model.fc = nn.Linear(15, 7)
    shard_module(model)
    messages = {}
    for text, attempt in REFUSED.items():
        with pytest.raises(RuntimeError) as caught:
            attempt(model.fc.weight)
        messages[text] = str(caught.value)
    return messages


def test_ops_that_would_be_wrong_on_a_slice_raise_alike_on_every_rank() -> None:
    """Each names the op, the parameter with its shape, and what to do instead."""
    ranks = run_ranks(3, _refusals)
    assert ranks[0] == ranks[1] == ranks[2]
    for text, message in ranks[0].items():
        if text not in ("p.item()",):  # torch itself refuses before dispatch
            assert "'fc.weight' (" in message, text
            assert "docs/shard_operations.md" in message, text


@pytest.mark.fast
def test_texts_of_the_errors() -> None:
    """One of each kind, in full."""
    messages = run_ranks(2, _refusals)[0]
    kinds = ["p @ x", "p.detach().t_()"]
    assert_expected_inline(
        "\n\n".join(_line_wrapped(messages[kind]) for kind in kinds),
        """\
aten.mm needs whole tensors, of which each rank holds a part: got 'fc.weight' (7, 15),
Tensor (15, 2). Autograd records it, and only the forward of its unit gives a parameter a
gradient. Call the layer in that forward (other methods after
register_forward_method(module, name)), or call unshard(model, recurse=True) before it and
reshard(model, recurse=True) after the backward. Under torch.no_grad() it runs on gathered
values. See docs/shard_operations.md.

aten.t_ needs whole tensors, of which each rank holds a part: got 'fc.weight' (7, 15). Run
it on p.full_tensor(), which all ranks must call, or inside unshard_params(module). See
docs/shard_operations.md.""",
    )


def _line_wrapped(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > 90:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n".join(line.strip() for line in lines)
