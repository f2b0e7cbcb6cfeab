"""Views of FlatShards are exact where a flat range can be one; other writes raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard
from composable_shard.comm.trace import count_collectives
from composable_shard.tensor.flat_shard import FlatShard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.tensor.test_flat_shard import full, shard

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(3, 5, 7),
    "reshape": lambda x: x.reshape(15, -1),
    "view_as": lambda x: x.view_as(torch.empty(1, 105)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(2).squeeze(),
    "row": lambda x: x[3],
    "last_row": lambda x: x[-1],
    "rows": lambda x: x[2:5],
    "no_rows": lambda x: x[2:2],
    "all": lambda x: x[:],
    "ellipsis": lambda x: x[...],
    "row_with_new_dim": lambda x: x[0, :, None],
    "element": lambda x: x[4, 3],
    "part_of_a_row": lambda x: x[6, 2:9],
    "rows_of_a_view": lambda x: x.view(3, 5, 7)[1][2:4],
    "narrow": lambda x: x.narrow(0, 1, 3),
}


@distributed(2, 3)
@pytest.mark.parametrize("name", VIEWS)
def test_view_that_is_one_run_of_elements_is_a_shard(name: str) -> None:
    """It has the elements, shape and stride of the same view of the whole, and shares memory."""
    view = VIEWS[name]
    whole = torch.arange(105.0).view(7, 15)
    sharded = shard(whole)
    result, expected = view(sharded), view(whole)
    assert isinstance(result, FlatShard)
    assert result.stride() == expected.stride()
    assert_equal(full(result), expected)
    result.add_(1000)
    expected.add_(1000)
    assert_equal(full(sharded), whole)


@pytest.mark.fast
@distributed(2)
def test_autograd_of_views_gives_sharded_gradients() -> None:
    """A gradient of a flattened parameter has the parameter's shape again."""
    param = nn.Parameter(shard(torch.arange(105.0).view(7, 15)))
    param.flatten().pow(2).sum().backward()
    assert isinstance(param.grad, FlatShard)
    assert_equal(full(param.grad), 2 * full(param))


@distributed(2, 3)
def test_complex_views_scale_the_range() -> None:
    """`view_as_real` and back; they share memory with the parameter."""
    whole = torch.randn(7, 5, dtype=torch.complex64)
    sharded = shard(whole)
    real = torch.view_as_real(sharded)
    assert_equal(full(real), torch.view_as_real(whole))
    assert_equal(full(torch.view_as_complex(real)), whole)
    real.zero_()
    assert full(sharded).eq(0).all()


@distributed(2)
def test_view_as_complex_of_other_ranges_raises() -> None:
    """A cut might lie between the two parts of a number, and a copy would lose writes."""
    with pytest.raises(RuntimeError, match="view_as_complex needs whole tensors"):
        torch.view_as_complex(shard(torch.randn(7, 2), offset=1))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda x: x.__setitem__(2, torch.arange(15.0)),
    "rows": lambda x: x.__setitem__(slice(1, 3), torch.arange(15.0)),
    "element": lambda x: x.__setitem__((6, 14), torch.tensor(5.0)),
    "fill_row": lambda x: x[0].fill_(3),
    "none": lambda x: x.__setitem__((None, slice(2, 4)), 5.0),
    "mask": lambda x: x.__setitem__(x > 50, 5.0),
    "dirac": lambda x: nn.init.dirac_(x.view(7, 5, 3)),
}


@pytest.mark.parametrize("name", WRITES)
@distributed(2, 3)
def test_assignment_to_a_run_writes_the_elements_of_the_whole(name: str) -> None:
    """Without communication."""
    whole = torch.arange(105.0).view(7, 15)
    sharded = shard(whole)
    with count_collectives() as log:
        WRITES[name](sharded)
    assert not log.events
    WRITES[name](whole)
    assert_equal(full(sharded), whole)


@distributed(2)
def test_assignment_by_index_respects_the_memory_layout() -> None:
    """A channels-last weight is written at the same logical places."""
    whole = torch.arange(48.0).view(4, 3, 2, 2).to(memory_format=torch.channels_last)
    sharded = shard(whole)
    for target in (sharded, whole):
        target[3] = torch.arange(12.0).view(3, 2, 2)
    assert_equal(full(sharded), whole)


@distributed(2)
def test_initialisations_that_write_columns_are_those_of_the_whole() -> None:
    """`sparse_`, `eye_`, and writes by index, of a parameter with autograd on."""
    for write in (
        lambda x: nn.init.sparse_(x, 0.3),
        nn.init.eye_,
        lambda x: x.detach().__setitem__(torch.tensor([1, 5]), 5.0),
        lambda x: x.detach().index_fill_(0, torch.tensor([1, 5]), 5.0),
        lambda x: x.detach().tril_(),
    ):
        whole = torch.ones(7, 15)
        param = nn.Parameter(shard(whole, "fc.weight"))
        for target in (param, whole):
            torch.manual_seed(4)
            write(target)
        assert_equal(full(param), whole)


@distributed(2)
def test_index_out_of_range_raises_like_a_whole_tensor() -> None:
    """The same error type on every rank."""
    with pytest.raises(IndexError):
        shard(torch.zeros(7, 15))[7]


@distributed(2)
def test_a_view_is_worked_out_once() -> None:
    """Equal calls share a spec, of other memory too; a loop over rows keeps few of them."""
    whole = torch.arange(1500.0).view(100, 15)
    one, other = shard(whole), shard(whole * 2)
    other._shard_spec = one._shard_spec
    assert one.view(-1)[::1]._shard_spec is one.view(-1)._shard_spec
    for _ in range(2):
        for x, expected in ((one, whole), (other, whole * 2)):
            assert x[3:70].view(-1)._shard_spec is one[3:70].view(-1)._shard_spec
            assert_equal(full(x[3:70].view(-1)), expected[3:70].view(-1))
            x[90].add_(1)
            expected[90] += 1
    for row in range(100):
        assert_equal(full(one[row]), whole[row])
    assert len(one._shard_spec.views) <= 64


@distributed(2)
def test_views_of_all_elements_share_the_slice_itself() -> None:
    """However often one is made: aliases are known by it, and have one address."""
    net = nn.Linear(4, 3)
    fully_shard(net)
    weight = net.weight.detach()
    for make in (torch.t, lambda x: x.view(-1), lambda x: x.view(2, 6)):
        for _ in range(3):
            view = make(weight)
            assert view._local is weight._local
            assert view.data_ptr() == weight.data_ptr()
