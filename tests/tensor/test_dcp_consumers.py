"""What reads and writes by DCP's protocol gets the right values where cuts fall inside rows."""

from __future__ import annotations

import copy
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    get_optimizer_state_dict,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import assert_holds, seeded
from tests.tensor.test_dcp_boxes import directory


class Cut(nn.Module):
    """Parameters that cuts of two to five ranks fall into, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(7, 5)
        self.row = nn.Parameter(torch.randn(1, 1, 11))
        self.cube = nn.Parameter(torch.randn(3, 1, 5, 3))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(2, 33).bfloat16())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _each_alone(model: nn.Module) -> None:
    for child in (model.wide, model.conv):
        fully_shard(child)
    fully_shard(model)


_SHARDINGS: dict[str, Any] = {
    "one unit": fully_shard,
    "units": _each_alone,
    "kept": lambda model: fully_shard(model, strategy=ShardingStrategy.SHARD_OPTIM),
    "replicated": lambda model: fully_shard(model, strategy=ShardingStrategy.NO_SHARD),
    "rows": lambda model: fully_shard(model, granularity="row"),
    "owned": lambda model: fully_shard(model, granularity="param"),
}


def _writer(path: Path, **options: Any) -> HuggingFaceStorageWriter:
    options = {"save_distributed": True, "enable_consolidation": True, **options}
    return HuggingFaceStorageWriter(str(path), **options)


def _assert_file_holds(path: Path, model: nn.Module) -> None:
    """Read by safetensors alone, on the first rank, which has merged the ranks' files."""
    dist.barrier()
    if dist.get_rank() == 0:
        found = load_file(next(path.glob("model*.safetensors")))
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value.contiguous(), name)
    dist.barrier()


@pytest.mark.parametrize("sharding", list(_SHARDINGS))
@distributed(2)
def test_safetensors_of_two_ranks_hold_the_model(sharding: str) -> None:
    """Every kind of tensor, and read back by DCP into another sharding."""
    model, other = seeded(Cut), seeded(Cut, seed=1)
    _SHARDINGS[sharding](model)
    fully_shard(other)
    with directory() as path:
        dcp.save(model.state_dict(), storage_writer=_writer(path))
        _assert_file_holds(path, seeded(Cut))
        for where in (path, path / "sharded"):
            state = other.state_dict()
            for value in other.parameters():
                value.data.zero_()
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(where)))
            assert_holds(other.state_dict(), seeded(Cut))


@distributed(5)
def test_safetensors_of_rows_that_several_ranks_share() -> None:
    """More ranks than rows: a row lies on three ranks, and some ranks begin none."""
    model = seeded(Cut)
    fully_shard(model)
    with directory() as path:
        dcp.save(model.state_dict(), storage_writer=_writer(path, thread_count=2))
        _assert_file_holds(path, seeded(Cut))


@distributed(4)
def test_safetensors_of_replicas_and_of_tensor_parallel_parameters() -> None:
    """Two copies of halves; halves of halves, in logical coordinates."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid, split = seeded(Cut), seeded(Cut)
    fully_shard(hybrid, mesh=mesh)
    split.conv.to(memory_format=torch.contiguous_format)  # the writer takes no other plain ones
    parallelize_module(split.wide, mesh["tp"], ColwiseParallel())
    fully_shard(split.wide, mesh=mesh["dp"])
    for model in (hybrid, split):
        with directory() as path:
            dcp.save(model.state_dict(), storage_writer=_writer(path))
            _assert_file_holds(path, seeded(Cut))


@distributed(2)
def test_safetensors_of_optimizer_state_and_of_several_files() -> None:
    """State in the parameters' shapes; each parameter in the file that a map names."""
    model = seeded(Cut)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    moments = {
        fqn: value["exp_avg"]
        for fqn, value in get_optimizer_state_dict(model, optimizer)["state"].items()
    }
    expected = {fqn: value.full_tensor() for fqn, value in moments.items()}
    files = {fqn: 1 + index % 2 for index, fqn in enumerate(moments)}
    with directory() as path:
        dcp.save(moments, storage_writer=_writer(path, fqn_to_index_mapping=files))
        dist.barrier()
        found: dict[str, Any] = {}
        for file in path.glob("model*.safetensors"):
            found |= load_file(file)
        assert found.keys() == expected.keys()
        for fqn, value in expected.items():
            assert_equal(found[fqn], value.contiguous(), fqn)


@pytest.mark.parametrize("on_every_rank", [False, True])
@distributed(2)
def test_files_of_ranks_are_merged_later(on_every_rank: bool) -> None:
    """By torch's functions alone, as torchtitan calls them after a save."""
    model = seeded(Cut)
    fully_shard(model)
    files = {fqn: 1 + index % 2 for index, fqn in enumerate(model.state_dict())}
    with directory() as path:
        dcp.save(model.state_dict(), storage_writer=_writer(path, enable_consolidation=False))
        (path / "merged").mkdir(exist_ok=True)
        if on_every_rank:
            consolidate_safetensors_files_on_every_rank(str(path), str(path / "merged"), files)
        elif dist.get_rank() == 0:
            consolidate_safetensors_files(str(path), str(path / "merged"), files, num_threads=2)
        dist.barrier()
        found: dict[str, Any] = {}
        for file in (path / "merged").glob("model*.safetensors"):
            found |= load_file(file)
        expected = seeded(Cut).state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value.contiguous(), name)


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
@distributed(2)
def test_saves_with_a_cached_plan_hold_the_values_of_their_time(kind: str) -> None:
    """The second save sends no plan, and writes the second values."""
    model, plain = seeded(Cut), seeded(Cut, seed=1)
    fully_shard(model)
    with directory() as path:
        for seed in (2, 3):
            model.load_state_dict(seeded(Cut, seed=seed).state_dict())
            planner = DefaultSavePlanner(enable_plan_caching=True)
            where = path / str(seed)
            if kind == "safetensors":
                dcp.save(model.state_dict(), storage_writer=_writer(where), planner=planner)
                _assert_file_holds(where, seeded(Cut, seed=seed))
            else:
                dcp.save(model.state_dict(), checkpoint_id=where, planner=planner)
                dcp.load(plain.state_dict(), checkpoint_id=where)
                assert_holds(plain.state_dict(), seeded(Cut, seed=seed))


@distributed(2)
def test_a_file_for_each_item_holds_the_model() -> None:
    """Threads that write, and a file for each item."""
    model, plain = seeded(Cut), seeded(Cut, seed=1)
    fully_shard(model)
    with directory() as path:
        writer = dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=2)
        dcp.save(model.state_dict(), storage_writer=writer)
        dcp.load(plain.state_dict(), checkpoint_id=path)
        assert_holds(plain.state_dict(), seeded(Cut))


@distributed(2)
def test_one_file_for_all_ranks_is_refused() -> None:
    """The writer's default: each rank would write over the others' parts."""
    model = seeded(Cut)
    fully_shard(model)
    with directory() as path:
        with pytest.raises(dcp.api.CheckpointException, match="save_distributed=True") as caught:
            dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(str(path)))
        assert len(caught.value.failures) == 2
        dcp.save(model.state_dict(), storage_writer=_writer(path))
        _assert_file_holds(path, seeded(Cut))


@distributed(2)
def test_a_scalar_is_refused_where_the_writer_would_make_it_zero() -> None:
    """Torch's consolidation leaves tensors without dims out; a rank's own files have them."""
    model, other = nn.PReLU(), nn.PReLU()
    model.weight = nn.Parameter(torch.tensor(2.0))
    other.weight = nn.Parameter(torch.tensor(3.0))
    fully_shard(model)
    fully_shard(other)
    with directory() as path:
        with pytest.raises(dcp.api.CheckpointException, match=r"enable_consolidation.*'weight'"):
            dcp.save(model.state_dict(), storage_writer=_writer(path))
        writer = _writer(path / "parts", enable_consolidation=False)
        dcp.save(model.state_dict(), storage_writer=writer)
        reader = HuggingFaceStorageReader(str(path / "parts"))
        dcp.load(other.state_dict(), storage_reader=reader)
        assert other.weight.full_tensor().item() == 2


def _finished(saving: Any) -> Any:
    return (saving if isinstance(saving, Future) else saving.upload_completion).result()


@distributed(2)
def test_a_thread_that_saves_cut_rows_is_refused() -> None:
    """On every rank, naming a parameter and what to call; of whole rows it is right."""
    cut, rows = seeded(Cut), seeded(Cut)
    fully_shard(cut)
    fully_shard(rows, granularity="row")
    group = dist.new_group(backend="gloo")
    with directory() as path:
        writer = _writer(path)
        saving = dcp.async_save(cut.state_dict(), storage_writer=writer, process_group=group)
        with pytest.raises(
            dcp.api.CheckpointException, match=r"'[a-z.]+' .* is cut inside a row.*save_safetensors"
        ) as caught:
            _finished(saving)
        assert len(caught.value.failures) == 2
        writer = _writer(path)
        _finished(dcp.async_save(rows.state_dict(), storage_writer=writer, process_group=group))
        _assert_file_holds(path, seeded(Cut))


def _save_in_process(model: nn.Module, path: Path) -> None:
    saving = dcp.async_save(
        model.state_dict(),
        storage_writer=_writer(path),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        process_group=dist.new_group(backend="gloo"),
    )
    _finished(saving)


@distributed(2)
def test_processes_that_save_cut_rows_exchange_them() -> None:
    """In the processes' group of all ranks, which is that of the model."""
    model = seeded(Cut)
    fully_shard(model)
    with directory() as path:
        _save_in_process(model, path)
        _assert_file_holds(path, seeded(Cut))


@distributed(4)
def test_processes_that_save_cut_rows_of_another_group_are_refused() -> None:
    """They have no group of some of the ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    model = seeded(Cut)
    fully_shard(model, mesh=mesh)
    with directory() as path, pytest.raises(BaseException, match="is cut inside a row"):
        _save_in_process(model, path)


class _Full(HuggingFaceStorageWriter):
    """A disk without room."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        raise OSError("no space left")


@distributed(2)
def test_a_failed_save_leaves_nothing_to_later_calls() -> None:
    """The rows that it had planned: a load writes to the parameters, a DCP save reads them."""
    model = seeded(Cut)
    fully_shard(model)
    with directory() as path:
        dcp.save(seeded(Cut, seed=1).state_dict(), checkpoint_id=path / "one")
        for _ in range(2):
            with pytest.raises(dcp.api.CheckpointException, match="no space left"):
                dcp.save(
                    model.state_dict(),
                    storage_writer=_Full(str(path / "full"), save_distributed=True),
                )
            dcp.load(model.state_dict(), checkpoint_id=path / "one")
            assert_holds(model.state_dict(), seeded(Cut, seed=1))
        copied = copy.deepcopy(model.state_dict())
        dcp.save(copied, checkpoint_id=path / "two")
        plain = seeded(Cut)
        dcp.load(plain.state_dict(), checkpoint_id=path / "two")
        assert_holds(plain.state_dict(), seeded(Cut, seed=1))


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@distributed(2)
def test_background_saves_hold_the_model(kind: AsyncCheckpointerType) -> None:
    """DCP's own format, from a thread and from a process."""
    model, plain = seeded(Cut), seeded(Cut, seed=1)
    fully_shard(model)
    group = dist.new_group(backend="gloo")
    with directory() as path:
        saving = dcp.async_save(
            model.state_dict(),
            checkpoint_id=path,
            async_checkpointer_type=kind,
            process_group=group,
        )
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        _finished(saving)
        dcp.load(plain.state_dict(), checkpoint_id=path)
        assert_holds(plain.state_dict(), seeded(Cut))


@distributed(2)
def test_dcp_to_a_file_of_torch_save() -> None:
    """By torch's converter, on one rank."""
    model = seeded(Cut)
    fully_shard(model)
    with directory() as path:
        dcp.save(model.state_dict(), checkpoint_id=path / "dcp")
        if dist.get_rank() == 0:
            dcp_to_torch_save(path / "dcp", path / "model.pt")
            found = torch.load(path / "model.pt")
            assert_holds({name: found[name] for name in seeded(Cut).state_dict()}, seeded(Cut))
        dist.barrier()


@distributed(2)
def test_the_reader_of_torch_save_files_is_refused() -> None:
    """It reads the first rows for every rank; the error says what loads such a file."""
    model = seeded(Cut)
    fully_shard(model)
    with directory() as path:
        if dist.get_rank() == 0:
            torch.save(seeded(Cut, seed=1).state_dict(), path)
        dist.barrier()
        with pytest.raises(dcp.api.CheckpointException, match="broadcast_from_rank0") as caught:
            dcp.load(
                model.state_dict(),
                storage_reader=BroadcastingTorchSaveReader(),
                planner=DynamicMetaLoadPlanner(),
                checkpoint_id=path,
            )
        assert len(caught.value.failures) == 2
    assert_holds(model.state_dict(), seeded(Cut))


@distributed(2)
def test_a_file_of_torch_save_to_dcp() -> None:
    """And DCP into the parts of two."""
    model = seeded(Cut, seed=1)
    fully_shard(model)
    with directory() as path:
        if dist.get_rank() == 0:
            path.mkdir()
            torch.save(seeded(Cut).state_dict(), path / "model.pt")
            torch_save_to_dcp(path / "model.pt", path / "dcp")
        dist.barrier()
        dcp.load(model.state_dict(), checkpoint_id=path / "dcp")
        assert_holds(model.state_dict(), seeded(Cut))


@distributed(2)
def test_quantised_safetensors_are_read_into_parts() -> None:
    """Blocks of 4 x 4 with a scale each, which cuts fall into."""
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (9, 7)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    expected = codes.float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)[:9, :7]
    model = nn.Sequential(nn.Linear(7, 9, bias=False))
    fully_shard(model)
    with directory() as path:
        if dist.get_rank() == 0:
            path.mkdir()
            values = {"0.weight": codes, "0.weight_scale_inv": scales}
            save_file(values, path / "model.safetensors")
            index = {"weight_map": dict.fromkeys(values, "model.safetensors")}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        dist.barrier()
        reader = QuantizedHuggingFaceStorageReader(str(path), block_size=4)
        dcp.load(model.state_dict(), storage_reader=reader)
        assert_equal(model[0].weight.full_tensor(), expected)
