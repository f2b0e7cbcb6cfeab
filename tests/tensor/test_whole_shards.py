"""A parameter of granularity "param": a tensor like any other on its owner, nothing elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import FlatShard, ShardingStrategy, fully_shard, get_handles, unshard_params
from composable_shard.comm.trace import count_collectives
from composable_shard.layout.flat_layout import FlatLayout
from composable_shard.options import Granularity
from composable_shard.tensor.flat_shard import whole_of
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.tensor.test_flat_shard import make_spec

OWNER = 1


def whole(full: Tensor, name: str = "w", *, is_param: bool = False) -> FlatShard:
    """Return a shard that rank 1 holds whole, between two that rank 0 and the last rank hold."""
    numel, size = full.numel(), dist.get_world_size()
    owners = (0, OWNER, size - 1)
    layout = FlatLayout.plan([3, numel, 5], size, 16, owners=owners)  # torch's own alignment
    shard = FlatShard.from_full(full, make_spec(full, layout, 1, name))
    return nn.Parameter(shard) if is_param else shard  # type: ignore[return-value]


def is_owner() -> bool:
    """Return whether this rank holds what `whole` returns."""
    return dist.get_rank() == OWNER


def matrix() -> Tensor:
    """Return a 6 x 4 matrix."""
    return torch.arange(24.0).view(6, 4).sub(11.5).div(7)


OPS: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda x: x @ torch.ones(4, 3),
    "matmul_with_itself": lambda x: x @ x.T,
    "addmm": lambda x: torch.addmm(x, x, x.T @ x, beta=0.5, alpha=2.0),
    "transpose": lambda x: x.T + x.t(),
    "permute": lambda x: x.permute(1, 0),
    "row": lambda x: x[2] * 2,
    "column": lambda x: x[:, 1] * 2,
    "block": lambda x: x[1:5, ::2].sum(0),
    "gather": lambda x: x[torch.tensor([3, 0])],
    "mask": lambda x: x[x > 0],
    "norm": lambda x: x.norm(),
    "norm_of_rows": lambda x: torch.norm(x, dim=-1, keepdim=True),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "inf_norm": lambda x: x.norm(float("inf")),
    "sum": lambda x: x.sum(),
    "sum_of_rows": lambda x: x.sum(1),
    "mean_of_columns": lambda x: x.mean(0, keepdim=True),
    "max": lambda x: x.max(),
    "max_of_rows": lambda x: x.max(1),
    "var": lambda x: x.var(),
    "argmax": lambda x: x.argmax(),
    "item": lambda x: x[0, 0].item(),
    "cat": lambda x: torch.cat([x, torch.zeros(1, 4)]),
    "stack": lambda x: torch.stack([x, x]),
    "add_plain": lambda x: x + torch.ones(6, 4),
    "broadcast": lambda x: x * torch.arange(4.0),
    "broadcast_up": lambda x: x + torch.ones(2, 6, 4),
    "of_plain": lambda x: torch.ones(6, 4) / x,
    "where": lambda x: torch.where(torch.ones(6, 4) > x, x, 0.0),
    "into_plain": lambda x: torch.zeros(6, 4).add_(x),
    "out_plain": lambda x: torch.mul(x, 2, out=torch.zeros(6, 4)),
    "copy_to_plain": lambda x: torch.zeros(6, 4).copy_(x),
    "foreach_plain": lambda x: torch._foreach_add([x, x], [torch.ones(6, 4), x]),
    "foreach_into_plain": lambda x: _foreach_mul([torch.ones(6, 4)], [x]),
    "equal": lambda x: torch.equal(x, torch.ones(6, 4)),
    "allclose": lambda x: torch.allclose(x, x + torch.zeros(6, 4)),
    "nonzero": lambda x: x.nonzero(),
    "sort": lambda x: x.sort(0),
    "diagonal": lambda x: x.diagonal(),
    "split": lambda x: [part * 1 for part in x.split(2)],
    "new_zeros": lambda x: x.new_zeros(6, 1),
    "bfloat16": lambda x: (x.bfloat16().T @ x.bfloat16()).float(),
}


def _foreach_mul(targets: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    torch._foreach_mul_(targets, factors)
    return targets


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    if isinstance(value, Tensor) and type(value) is not Tensor:
        return value + torch.zeros(()) if not isinstance(value, FlatShard) else whole_of(value)
    return value


class _Stepping(torch.optim.Optimizer):
    """Runs functions as its steps."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, run: Callable[[], Any]) -> Any:  # type: ignore[override] # no closure
        return run()


@pytest.mark.parametrize("name", OPS)
@distributed(3)
def test_op_on_the_owner_is_that_of_the_whole_tensor(name: str) -> None:
    """In a step: exactly, without communication; elsewhere it raises, or gives an empty shard."""
    expected = OPS[name](matrix())
    shard = whole(matrix())
    with count_collectives() as log:
        if is_owner():
            torch.testing.assert_close(
                _as_plain(_Stepping().step(lambda: OPS[name](shard))),
                _as_plain(expected),
                rtol=0,
                atol=0,
            )
        else:
            try:
                result = _Stepping().step(lambda: OPS[name](shard))
            except RuntimeError as error:
                assert f"which rank {OWNER} of its shard group holds whole" in str(error)  # noqa: PT017
            else:
                results = result if isinstance(result, list | tuple) else [result]
                assert name == "new_zeros" or all(not x.to_local().numel() for x in results)
    assert not log.events
    assert_equal(shard.full_tensor(), matrix())


SCALARS = ["norm", "matrix_norm", "inf_norm", "sum", "max", "var", "equal", "allclose"]


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
@distributed(2)
def test_scope_of_a_reduction_is_all_ranks_or_it_raises(granularity: Granularity) -> None:
    """Scope: of parameters the same on all ranks, and of gradients that all ranks have."""
    model = nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        model.weight.copy_(matrix())
    fully_shard(model, granularity=granularity)
    model(torch.ones(1, 4)).sum().backward()
    param, grad = model.weight, model.weight.grad
    for name in SCALARS:
        if name in ("equal", "allclose"):
            other = param.detach().clone()
            expected = True
            found = getattr(torch, name)(param.detach(), other)
        else:
            expected, found = OPS[name](matrix()), OPS[name](param.detach())
        torch.testing.assert_close(found, expected, msg=name)
    if grad is None:
        return
    for name in SCALARS:
        if granularity == "param":
            with pytest.raises(RuntimeError, match="would be on that rank alone"):
                OPS[name](grad)
            _Stepping().step(lambda name=name: OPS[name](grad))
        elif name not in ("equal", "allclose"):
            torch.testing.assert_close(OPS[name](grad), OPS[name](torch.ones(6, 4)), msg=name)


READS = ["matmul", "column", "norm", "sum", "mean_of_columns", "max", "into_plain"]


def _errors(names: list[str]) -> list[str]:
    shard, errors = whole(matrix()), []
    for name in names:
        try:
            _Stepping().step(lambda name=name: OPS[name](shard))
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_other_ranks_raise_the_same_errors() -> None:
    """They name the parameter and the owner; a step could run on whole tensors by default."""
    first, second, third = run_ranks(3, _errors, READS)
    assert first == third
    assert len(first) == len(READS)
    assert second == []
    assert all("default granularity for this optimizer" in text for text in first)


@distributed(2)
def test_remedies_of_what_one_rank_owns_are_right() -> None:
    """With autograd and without, for parameters: on the owner, and on all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6, bias=False)
    expected = model.weight.detach() @ torch.ones(4)
    fully_shard(model, granularity="param")
    with pytest.raises(RuntimeError) as caught:
        model.weight @ torch.ones(4)
    assert "Under torch.no_grad() it runs on that rank's p.to_local(), or on p.full_" in str(
        caught.value
    )
    with torch.no_grad():
        is_own = model.weight.to_local().numel() > 0
        if is_own:
            assert_equal(model.weight.to_local() @ torch.ones(4), expected)
        else:
            with pytest.raises(RuntimeError, match="Run it on that rank alone, on p"):
                model.weight @ torch.ones(4)
        assert_equal(model.weight.full_tensor() @ torch.ones(4), expected)


@distributed(2, 3)
def test_local_tensor_is_the_matrix_on_the_owner() -> None:
    """It shares memory; elsewhere it is empty. Gathering is one broadcast."""
    full = matrix().t()
    shard = whole(full)
    local = shard.to_local()
    if is_owner():
        assert_equal(local, full)
        assert local.stride() == full.stride()
        local.zero_()
        assert shard.to_local().sum() == 0
    else:
        assert local.shape == (0,)
    with count_collectives() as log:
        assert_equal(shard.full_tensor(), torch.zeros(4, 6))
    assert [event.kind for event in log.events] == ["broadcast"]


SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "clone": torch.clone,
    "elementwise": lambda x: x * 2 + 1,
    "with_a_plain_tensor": lambda x: x.lerp(torch.ones(6, 4), 0.5),
    "bfloat16": lambda x: x.bfloat16(),
    "new_zeros": lambda x: x.new_zeros(6, 4),
}


@pytest.mark.parametrize("name", SHAPED)
@distributed(2)
def test_result_of_the_same_shape_is_a_shard_of_the_same_spec(name: str) -> None:
    """So that optimizer state is what it is with every other granularity."""
    shard = whole(matrix())
    if is_owner() or name != "with_a_plain_tensor":
        result = SHAPED[name](shard)
        assert isinstance(result, FlatShard)
        assert result._shard_spec is shard._shard_spec


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x.add_(torch.ones(6, 4), alpha=2),
    "transposed": lambda x: x.T.add_(torch.ones(4, 6)),
    "row": lambda x: x[2].zero_(),
    "column": lambda x: x[:, 1].fill_(5),
    "assigned": lambda x: x.__setitem__((slice(1, 4), 2), torch.arange(3.0)),
    "diagonal": lambda x: x.diagonal().add_(1),
    "out": lambda x: torch.mul(torch.ones(6, 4), 3, out=x),
    "mm_out": lambda x: torch.mm(torch.ones(6, 2), torch.ones(2, 4), out=x),
    "copy": lambda x: x.copy_(torch.ones(4, 6).t()),
    "index_add": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones(1, 4)),
    "foreach": lambda x: torch._foreach_add_([x], [torch.ones(6, 4)]),
    "data": lambda x: x.data.mul_(torch.full((6, 4), 2.0)),
}


@pytest.mark.parametrize("name", WRITES)
@distributed(2)
def test_write_on_the_owner_is_noted(name: str) -> None:
    """A forward of a kept unit would else compute with the old values."""
    model = nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        model.weight.copy_(matrix())
    fully_shard(model, granularity="param", strategy=ShardingStrategy.SHARD_GRAD_OP)
    weight = model.weight
    assert isinstance(weight, FlatShard)
    expected = matrix()
    WRITES[name](expected)
    model(torch.ones(1, 4))
    (handle,) = get_handles(model)
    with torch.no_grad():
        if weight._shard_spec.is_whole:
            before = handle.guard.num_writes
            WRITES[name](weight)
            assert handle.guard.num_writes > before
        else:
            weight.mul_(1)  # a write by hand, on all ranks
        assert_equal(model(torch.eye(4)), torch.eye(4) @ expected.t())


@distributed(1)
def test_one_rank_holds_everything_whole() -> None:
    """Every op runs under `NO_SHARD`; the rest as on many ranks, so "param" gives the matrix."""
    for granularity in ("element", "row", "param"):
        model = nn.Linear(4, 6)
        plain = copy.deepcopy(model)
        is_row = granularity == "row"
        strategy = ShardingStrategy.NO_SHARD if is_row else ShardingStrategy.FULL_SHARD
        fully_shard(model, granularity=granularity, strategy=strategy)
        weight = model.weight.detach()
        assert_equal(weight @ weight.T, (plain.weight @ plain.weight.T).detach())
        assert_equal(weight.norm(dim=0), plain.weight.detach().norm(dim=0))
        shape = (6, 4) if granularity == "param" else (24,)
        assert model.weight.to_local().shape == shape


@distributed(2, 3)
def test_copies_and_saved_shards_stay_whole() -> None:
    """deepcopy, pickle, and, on the rank that has all of it, torch.save with weights_only."""
    param = whole(matrix(), is_param=True)
    twins = [copy.deepcopy(param), pickle.loads(pickle.dumps(param))]
    if is_owner():
        file = io.BytesIO()
        torch.save(param, file)
        file.seek(0)
        twins[1] = torch.load(file, weights_only=True)
    for twin in twins:
        assert twin._shard_spec == param._shard_spec
        assert_equal(twin.to_local(), param.detach().to_local())
        assert_equal(twin.full_tensor(), matrix())


@pytest.mark.fast
@distributed(2)
def test_gradients_are_shown_in_a_scope_and_written_back() -> None:
    """On all ranks, though only the owner has them at rest."""
    model = nn.Linear(4, 6)
    fully_shard(model, granularity="param")
    model(torch.ones(2, 4)).sum().backward()
    held = {name for name, param in model.named_parameters() if param.grad is not None}
    for rank0_only in (False, True):
        with unshard_params(model, with_grads=True, rank0_only=rank0_only):
            if not rank0_only or dist.get_rank() == 0:
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(2)
    assert held == {name for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        grad = torch.empty_like(param) if param.grad is None else param.grad
        assert isinstance(grad, FlatShard)
        assert grad.full_tensor().eq(8).all()
