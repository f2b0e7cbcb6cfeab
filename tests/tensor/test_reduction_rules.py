"""Reductions of FlatShards are those of the whole tensors, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm.trace import count_collectives
from composable_shard.tensor.flat_shard import FlatShard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.tensor.test_flat_shard import shard


def _all_dims(x: Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim()))


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum_all_dims": lambda x: x.sum(dim=_all_dims(x), keepdim=True),
    "sum_double": lambda x: x.sum(dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "mean_keepdim": lambda x: x.mean(dim=_all_dims(x), keepdim=True),
    "prod": lambda x: x.abs().add(0.5).prod(),
    "var": lambda x: x.var(),
    "var_population": lambda x: x.var(correction=0),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "norm_all_dims": lambda x: torch.linalg.vector_norm(x, dim=_all_dims(x), keepdim=True),
    "norm_1": lambda x: x.norm(1),
    "norm_3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm_half": lambda x: torch.linalg.vector_norm(x, 0.5),
    "norm_minus_2": lambda x: torch.linalg.vector_norm(x, -2),
    "norm_double": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "foreach_norm": lambda x: torch._foreach_norm([x, x * 2], 2)[1],
}
EXACT: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin_all_dims": lambda x: x.amin(dim=_all_dims(x), keepdim=True),
    "norm_0": lambda x: torch.linalg.vector_norm(x, 0),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm_minus_inf": lambda x: torch.linalg.vector_norm(x, -math.inf),
    "foreach_norm_inf": lambda x: torch._foreach_norm([x, x * 2], math.inf)[1],
    "foreach_max": lambda x: torch._foreach_max([x, x * 2])[1],
    "any": lambda x: (x > 2).any(),
    "any_isnan": lambda x: x.isnan().any(),
    "all": lambda x: (x > -9).all(),
    "all_false": lambda x: (x > 0).all(),
    "all_dims": lambda x: (x > 0).all(dim=_all_dims(x), keepdim=True),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
    "sum_bool": lambda x: (x > 0).sum(),
    "sum_int": lambda x: x.to(torch.int32).sum(),
    "max_int": lambda x: (x * 100).to(torch.int16).max(),
    "min_int": lambda x: (x * 100).to(torch.int64).min(),
    "max_bool": lambda x: (x > 2).max(),
    "mean_of_ints": lambda x: x.to(torch.int32).float().mean(),
    "equal": lambda x: torch.equal(x, x + 0),
    "not_equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1e-9),
    "not_allclose": lambda x: torch.allclose(x, x + 1),
}
SHAPES = [(7, 15), (), (1,), (3,), (50,)]


def _operands(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, FlatShard]]:
    torch.manual_seed(4)
    wholes = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    wholes.append(torch.randn(4, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last))
    return [(whole, shard(whole)) for whole in wholes]


def _check_result(result: Any, expected: Any, *, tolerance: float) -> None:
    if isinstance(expected, Tensor):
        assert type(result) is Tensor
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert result == expected


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", EXACT)
def test_reduction_that_does_not_round_is_exact(name: str) -> None:
    """Same value, dtype and shape, plain, also where a rank's slice is empty."""
    for whole, sharded in _operands():
        _check_result(EXACT[name](sharded), EXACT[name](whole), tolerance=0)


@distributed(1, 2, 3)
@pytest.mark.parametrize("name", ROUNDED)
def test_reduction_that_rounds_is_close(name: str) -> None:
    """Equal up to the order of summation, and identical on all ranks."""
    for whole, sharded in _operands():
        if name in ("var", "std") and whole.numel() == 1:
            continue  # torch warns: no degrees of freedom
        result = ROUNDED[name](sharded)
        _check_result(result, ROUNDED[name](whole), tolerance=1e-5)
        gathered = [torch.zeros_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, result)
        assert all(torch.equal(other, result) for other in gathered)


@distributed(2, 3)
def test_half_precision_sums_accumulate_in_float32() -> None:
    """4096 times 1 is 4096; adding in bfloat16 would stop at 256."""
    for dtype in (torch.bfloat16, torch.float16):
        sharded = shard(torch.ones(4096, dtype=dtype))
        assert sharded.sum() == 4096
        assert sharded.sum().dtype is dtype
        assert sharded.mean() == 1
        assert sharded.norm() == 64
        assert torch._foreach_norm([sharded], 1)[0] == 4096


@distributed(2)
def test_complex_reductions_are_those_of_the_whole() -> None:
    """Sums are complex, norms are real."""
    for whole, sharded in _operands(torch.complex64):
        _check_result(sharded.sum(), whole.sum(), tolerance=1e-5)
        _check_result(sharded.mean(), whole.mean(), tolerance=1e-5)
        _check_result(sharded.norm(), whole.norm(), tolerance=1e-5)
        _check_result(sharded.abs().max(), whole.abs().max(), tolerance=0)


@distributed(2, 3)
def test_nan_and_inf_on_one_rank_reach_all() -> None:
    """A maximum is NaN where torch's is, although backends lose it when they compare."""
    for position in (0, 104):
        whole = torch.randn(7, 15)
        whole.view(-1)[position] = math.nan
        sharded = shard(whole)
        for reduce in (Tensor.max, Tensor.min, Tensor.sum, Tensor.norm, Tensor.amax):
            assert reduce(sharded).isnan(), reduce
        assert torch.linalg.vector_norm(sharded, math.inf).isnan()
        assert torch._foreach_norm([sharded], math.inf)[0].isnan()
        assert sharded.isnan().any()
        assert not sharded.isfinite().all()


@pytest.mark.fast
@distributed(2)
def test_empty_tensors_reduce_like_empty_tensors() -> None:
    """A sum is 0, a norm is 0, and a maximum raises as torch's does."""
    sharded = shard(torch.zeros(0, 3))
    assert sharded.sum() == 0
    assert sharded.norm() == 0
    assert sharded.mean().isnan()
    assert list(torch._foreach_norm([sharded, shard(torch.ones(4))], 2)) == [0, 2]
    for reduce in (Tensor.max, Tensor.min):
        with pytest.raises(RuntimeError):
            reduce(sharded)


@distributed(2, 3)
def test_reductions_that_are_not_defined_raise_on_every_rank() -> None:
    """Before any collective: a rank with an empty slice must not wait for the others."""
    integers = shard(torch.zeros(1, dtype=torch.int64))
    for reduce in (Tensor.norm, Tensor.mean, lambda x: torch._foreach_norm([x], 2)):
        with pytest.raises(RuntimeError, match=r"floating[- ]point"):
            reduce(integers)
    with pytest.raises(RuntimeError, match="ComplexFloat"):
        shard(torch.zeros(1, dtype=torch.complex64)).amax()


@distributed(2, 3)
def test_list_of_norms_takes_one_collective() -> None:
    """Of any length, with slices that are empty on some ranks."""
    wholes = [torch.randn(size) for size in (1, 2, 50, 3)]
    with count_collectives() as log:
        norms = torch._foreach_norm([shard(whole) for whole in wholes], 2)
    assert [event.kind for event in log.events] == (["all_reduce"])
    for norm, whole in zip(norms, wholes, strict=True):
        torch.testing.assert_close(norm, whole.norm())


@distributed(2)
def test_list_of_norms_may_mix_in_plain_tensors() -> None:
    """A plain tensor counts as it is."""
    norms = torch._foreach_norm([shard(torch.ones(4)), torch.ones(9)], 2)
    assert list(norms) == [2, 3]


@distributed(2, 3)
def test_item_of_a_single_element_is_known_to_all() -> None:
    """Only one rank holds it."""
    for shape in ((), (1,), (1, 1)):
        sharded = shard(torch.full(shape, 3.5))
        assert sharded.item() == float(sharded) == 3.5
        assert bool(sharded > 3)


@distributed(2)
def test_item_of_several_elements_raises() -> None:
    """As for any tensor."""
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        shard(torch.zeros(3)).item()


@distributed(2)
def test_unscaling_finds_an_inf_of_another_rank() -> None:
    """The flag is reduced over the ranks, in one collective; the gradients are scaled."""
    for value, expected in ((1.0, 0.0), (math.inf, 1.0)):
        gradient = shard(torch.full((7, 15), 4.0))
        if dist.get_rank() == 1:
            gradient.to_local()[0] = value
        found = torch.zeros(1)
        with count_collectives() as log:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [gradient, shard(torch.ones(3))], found, torch.tensor(0.5)
            )
        assert found == expected
        assert len(log.events) == 1
    assert_equal(gradient.to_local()[-1], torch.tensor(2.0))
