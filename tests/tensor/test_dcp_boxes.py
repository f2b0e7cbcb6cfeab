"""torch.distributed.checkpoint writes and reads FlatShards as they are."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_shard import (
    FlatShard,
    ShardingStrategy,
    fully_shard,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import Net, assert_holds, rank_input, seeded, shard_blocks


class Odd(Net):
    """Parameters of every kind beside ordinary ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.waves = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.register_buffer("count", torch.arange(3.0))


@contextmanager
def directory() -> Any:
    """Give all ranks the name of one empty directory."""
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names, src=0)
        yield Path(names[0]) / "checkpoint"
        dist.barrier()


def _dcp_save(model: nn.Module, path: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def _dcp_load(model: nn.Module, path: Path) -> nn.Module:
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return model


def _unsharded(model: nn.Module) -> nn.Module:
    return model


def _shard_fsdp2(model: nn.Module) -> nn.Module:
    return fsdp2(model)


_OURS: dict[str, Callable[[nn.Module], object]] = {
    "plain": _unsharded,
    "blocks": shard_blocks,
    "kept": lambda model: fully_shard(model, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "zero1": lambda model: fully_shard(model, strategy=ShardingStrategy.SHARD_OPTIM),
    "replicated": lambda model: fully_shard(model, strategy=ShardingStrategy.NO_SHARD),
}


@pytest.mark.parametrize("written", ["plain", "blocks", "replicated"])
@distributed(2)
def test_any_layout_reads_what_any_wrote(written: str) -> None:
    """Plain, in units, with kept parameters, replicated: by value, every kind of tensor."""
    source = seeded(Odd)
    _OURS[written](source)
    with directory() as path:
        _dcp_save(source, path)
        for name, shard in _OURS.items():
            target = seeded(Odd, seed=1)
            shard(target)
            assert_holds(_dcp_load(target, path).state_dict(), seeded(Odd)), name


@pytest.mark.fast
@distributed(2)
def test_checkpoints_are_those_of_fsdp2() -> None:
    """Both ways."""
    ours, theirs = seeded(Net), seeded(Net)
    shard_blocks(ours)
    with directory() as path:
        _dcp_save(_shard_fsdp2(theirs), path)
        other = seeded(Net, seed=1)
        fully_shard(other)
        assert_holds(_dcp_load(other, path).state_dict(), seeded(Net))
    with directory() as path:
        _dcp_save(ours, path)
        assert_holds(_dcp_load(_shard_fsdp2(seeded(Net, seed=1)), path).state_dict(), seeded(Net))


@distributed(3)
def test_empty_slices_are_legal() -> None:
    """More ranks than some parameters have elements."""
    source, target = seeded(Odd), seeded(Odd, seed=1)
    shard_blocks(source)
    fully_shard(target)
    assert any(not p.to_local().numel() for p in source.parameters())
    with directory() as path:
        _dcp_save(source, path)
        assert_holds(_dcp_load(target, path).state_dict(), seeded(Odd))


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_a_load_in_place_is_seen_by_the_next_forward(strategy: ShardingStrategy) -> None:
    """Without load_state_dict: DCP writes into the parameters themselves."""
    source, target = seeded(Net), seeded(Net, seed=1)
    fully_shard(target, strategy=strategy)
    x = rank_input(4, 5)
    with torch.no_grad():
        target(x)
    with directory() as path:
        _dcp_save(source, path)
        dcp.load({"model": target.state_dict()}, checkpoint_id=path)
    with torch.no_grad():
        assert_equal(target(x), source(x))


@distributed(2)
def test_async_save_keeps_the_values_of_the_call() -> None:
    """Training goes on while it writes, in a group of its own."""
    model = seeded(Odd)
    shard_blocks(model)
    with directory() as path:
        group = dist.new_group(backend="gloo")
        state = {"model": model.state_dict()}
        saving = dcp.async_save(state, checkpoint_id=path, process_group=group)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        for _ in range(3):
            model(rank_input(4, 5)).sum().backward()
        saving.result()
        assert_holds(_dcp_load(seeded(Odd, seed=1), path).state_dict(), seeded(Odd))


def _tensor_parallel(model: nn.Module, mesh: Any, *, sharded: bool = True) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], plan)
    if sharded:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model)
    return model


@distributed(4)
def test_tensor_parallel_parameters_are_saved_in_logical_coordinates() -> None:
    """2 x 2 to one process, to 4 ranks, to two copies of halves, and back; the optimizer too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source = _tensor_parallel(seeded(Net), mesh)
    optimizer = torch.optim.AdamW(source.parameters())
    for param in source.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    plain = seeded(Net)
    other = torch.optim.AdamW(plain.parameters())
    for param in plain.parameters():
        param.grad = torch.ones_like(param)
    other.step()
    assert_holds(source.state_dict(), plain)
    with directory() as path:
        state = {
            "model": source.state_dict(),
            "optimizer": get_optimizer_state_dict(source, optimizer),
        }
        dcp.save(state, checkpoint_id=path)
        assert_holds(_dcp_load(seeded(Net, seed=1), path).state_dict(), plain)
        target = _tensor_parallel(seeded(Net, seed=1), mesh)
        assert_holds(_dcp_load(target, path).state_dict(), plain)
        hybrid = seeded(Net, seed=1)
        fully_shard(hybrid, mesh=mesh)
        assert_holds(_dcp_load(hybrid, path).state_dict(), plain)
        fresh = torch.optim.AdamW(hybrid.parameters())
        for param in hybrid.parameters():
            fresh.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        state = {"optimizer": get_optimizer_state_dict(hybrid, fresh)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(hybrid, fresh, state["optimizer"])
        for param, expected in zip(hybrid.parameters(), plain.parameters(), strict=True):
            for name, value in other.state[expected].items():
                found = fresh.state[param][name]
                found = found.full_tensor() if isinstance(found, FlatShard) else found
                assert_equal(found, value, name)
    with directory() as path:
        _dcp_save(hybrid, path)
        assert_holds(
            _dcp_load(_tensor_parallel(seeded(Net, seed=1), mesh), path).state_dict(), plain
        )


@distributed(2)
def test_replicas_write_each_byte_once() -> None:
    """Copies offer the same boxes, of which one is written."""
    model = seeded(Net)
    fully_shard(model, strategy=ShardingStrategy.NO_SHARD)
    with directory() as path:
        _dcp_save(model, path)
        chunks = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        assert all(len(entry.chunks) == 1 for entry in chunks.values())


@distributed(2)
def test_partial_placements_are_refused_by_name() -> None:
    """A sum that is spread over ranks is no set of boxes."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    spec = copy.copy(model.weight._shard_spec)
    object.__setattr__(spec, "tensor_parallel", (mesh, (Partial(),)))
    local: Tensor = model.weight.to_local()
    with pytest.raises(NotImplementedError, match=r"parameter 'weight' has placements"):
        FlatShard(local, spec).__create_write_items__("weight", None)
