"""Pools of memory for collectives: what comes from them, when they are registered, who shares one.

A stand-in for torch's pool notes what is allocated in it; memory is the CPU's.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_shard import MixedPrecisionPolicy, ShardingStrategy, fully_shard, get_handles
from composable_shard.comm.devices import check_pool
from composable_shard.runtime.state import read_state
from tests.fake_group import fake_group
from tests.models import Net, shard_blocks, shard_root

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class _Pools:
    """Stands for `torch.cuda.MemPool` and `use_mem_pool`.

    Attributes:
        made: The allocator of each pool.
        entered: How often memory was allocated from a pool.
        registered: Names of the groups that a pool was registered with.
    """

    def __init__(self) -> None:
        self.made: list[object] = []
        self.entered = 0
        self.is_inside = False
        self.outside: list[int] = []  # bytes that storages got elsewhere
        self.registered: list[str] = []

    def make(self, allocator: object = None) -> object:
        self.made.append(allocator)
        return object()

    @contextmanager
    def use(self, pool: object, device: torch.device) -> Iterator[None]:
        assert device == CPU
        self.entered += 1
        self.is_inside = True
        yield
        self.is_inside = False


class _Backend:
    """A backend that calls itself NCCL's."""

    mem_allocator = "NCCL's"

    def __init__(self, pools: _Pools, group: dist.ProcessGroup) -> None:
        self.pools, self.group = pools, group

    def name(self) -> str:
        return "nccl"

    def register_mem_pool(self, pool: object) -> None:
        self.pools.registered.append(self.group.group_name)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Pools]:
    """Stand-ins on the CPU, in a group of four ranks."""
    pools, resize = _Pools(), torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes and not pools.is_inside:
            pools.outside.append(nbytes)
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.cuda, "MemPool", pools.make)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", pools.use)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_and_note)
    monkeypatch.setattr(
        sys.modules["composable_shard.construct.api"], "check_pool", lambda *_: None
    )
    with fake_group(4):
        yield pools


def _step(model: torch.nn.Module) -> None:
    model(torch.randn(4, 5)).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "policy", "num_allocations"),
    [
        # Gathers of three units in forward and two in backward, and three reduced gradients.
        (ShardingStrategy.FULL_SHARD, MixedPrecisionPolicy(), 8),
        # And a buffer for gradients of another dtype, for each unit.
        (ShardingStrategy.FULL_SHARD, MixedPrecisionPolicy(reduce_dtype=torch.float64), 11),
        (ShardingStrategy.SHARD_GRAD_OP, MixedPrecisionPolicy(), 6),
        (ShardingStrategy.SHARD_OPTIM, MixedPrecisionPolicy(), 0),
    ],
)
def test_what_collectives_use_comes_from_the_pool(
    strategy: ShardingStrategy, policy: MixedPrecisionPolicy, num_allocations: int, pools: _Pools
) -> None:
    """In every step the same, and nothing that comes and goes is elsewhere."""
    model = Net(2)
    shard_blocks(model, strategy=strategy, mp_policy=policy, buffer_pool="private")
    _step(model)
    for _ in range(2):
        pools.entered, pools.outside = 0, []
        _step(model)
        assert (pools.entered, pools.outside) == (num_allocations, [])
    assert pools.made == [None]


def test_a_model_without_the_option_has_no_pool(pools: _Pools) -> None:
    """Nothing of CUDA is touched."""
    model = Net(1)
    shard_blocks(model)
    _step(model)
    assert (pools.made, pools.entered) == ([], 0)


def test_nccl_knows_the_pool_before_the_first_gather(
    pools: _Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units share one, which each group is told of once, when it has communicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    monkeypatch.setattr(
        dist.ProcessGroup, "_get_backend", lambda group, _: _Backend(pools, group), raising=True
    )
    model = Net(2)
    shard_blocks(model, mesh=mesh, buffer_pool="nccl")
    assert (pools.made, pools.registered) == (["NCCL's"], [])
    for _ in range(2):
        _step(model)
    assert sorted(pools.registered) == sorted(mesh.get_group(axis).group_name for axis in (0, 1))


def test_ranks_compare_the_option(pools: _Pools) -> None:
    """It is among what they must agree on."""
    model = Net(1)
    shard_root(model, buffer_pool="private")
    state = read_state(model)
    assert state is not None
    assert "buffer_pool=private" in state.describe_options()


def test_a_copy_takes_the_same_pool_and_the_last_unit_takes_it_along(pools: _Pools) -> None:
    """A pool belongs to the units of the same groups."""
    model = Net(1)
    shard_root(model, buffer_pool="private")
    other = copy.deepcopy(model)
    (first,), (second,) = get_handles(model), get_handles(other)
    assert first.pool is second.pool is not None
    del model, other, first, second
    gc.collect()
    shard_root(Net(1), buffer_pool="private")
    assert pools.made == [None, None]


def test_a_new_group_of_the_same_name_has_a_pool_of_its_own(pools: _Pools) -> None:
    """A model of the destroyed group still holds the pool that NCCL knows there."""
    models = [Net(1), Net(1)]
    shard_root(models[0], buffer_pool="private")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    shard_root(models[1], buffer_pool="private")
    (first,), (second,) = (get_handles(model) for model in models)
    assert first.shard_group.name == second.shard_group.name
    assert first.pool is not second.pool


def test_a_mesh_without_cuda_is_refused() -> None:
    """With the remedy, which works."""
    with fake_group(4):
        model = Net(1)
        with pytest.raises(ValueError, match=r"'private' needs a CUDA device.*of cpu\. Leave"):
            fully_shard(model, buffer_pool="private")
        fully_shard(model)


def test_another_value_is_refused() -> None:
    """Naming those that there are."""
    with pytest.raises(ValueError, match=r"None, 'private' or 'nccl', got True"):
        check_pool(True)


def test_nccl_pools_need_nccl() -> None:
    """Of every group with more than one rank."""
    with fake_group(4):
        group = dist.group.WORLD
        assert group is not None
        check_pool("private", [group], CUDA)
        with pytest.raises(ValueError, match=r"that of group '0' is 'fake'\. Pass .*'private'"):
            check_pool("nccl", [group], CUDA)
