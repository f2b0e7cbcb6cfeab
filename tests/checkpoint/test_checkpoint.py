"""Checkpoints: from any sharding to any other, bitwise, and each rank reads its own part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable_shard import (
    FlatShard,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
    fully_shard,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint.file_format import Piece, checksums
from composable_shard.checkpoint.reader import CheckpointReader
from composable_shard.layout import whole
from tests.harness.assertions import assert_equal
from tests.harness.ranks import run_ranks
from tests.programs.models import every_granularity, full_tensor_of

# --- from any layout to any other ---


class _Zoo(nn.Module):
    """Parameters and buffers of all kinds; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(15, 7)
        self.down = nn.Linear(7, 15)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(7)
        self.half = nn.Linear(9, 3, dtype=torch.bfloat16)
        self.phase = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.plain = nn.Linear(4, 3)
        self.frozen = nn.Linear(5, 4).requires_grad_(False)
        self.tied = nn.Linear(15, 7)
        self.tied.weight = self.up.weight
        self.register_buffer("count", torch.tensor([3, 4, 5], dtype=torch.uint8))

    def forward(self) -> None:
        raise NotImplementedError


def _shard_zoo(model: _Zoo, inner: Any = None, **options: Any) -> None:
    ignored = set(model.plain.parameters())
    for module in (model.down, model.conv):
        fully_shard(module, **options)
    fully_shard(model, ignored_params=ignored, **options)


def _shard_zoo_tensor_parallel(model: _Zoo) -> None:
    """Two ranks share `up` and `down` along different dims, unevenly; two share those shares."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    del model.tied.weight
    for module, dim in ((model.up, 0), (model.down, 1)):
        full = module.weight.detach()
        module.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(dim)]))
    model.tied.weight = model.up.weight
    _shard_zoo(model, mesh=mesh["dp"])


def _row_major(model: _Zoo) -> None:
    """Row-major memory where the others have channels_last."""
    model.conv.to(memory_format=torch.contiguous_format)
    _shard_zoo(model)


def _shard_zoo_hybrid(model: _Zoo) -> None:
    _shard_zoo(model, mesh=init_device_mesh("cpu", (2, 2)))


def _owned_hybrid(model: _Zoo) -> None:
    _shard_zoo(model, mesh=init_device_mesh("cpu", (2, 2)), granularity="param")


_, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy

_LAYOUTS: dict[str, tuple[int, Callable[[_Zoo], object]]] = {
    "plain": (1, lambda model: None),
    "full 2": (2, _shard_zoo),
    "rows 3": (3, _row_major),
    "whole 2": (2, lambda model: _shard_zoo(model, strategy=NO_SHARD)),
    "by rows 2": (2, lambda m: _shard_zoo(m, granularity="row", strategy=SHARD_GRAD_OP)),
    "owned 2": (2, lambda model: _shard_zoo(model, granularity="param")),
    "offload 2": (2, lambda model: _shard_zoo(model, offload_policy=OffloadPolicy(params=True))),
    "mixed 3": (
        3,
        lambda m: _shard_zoo(m, granularity=every_granularity, strategy=SHARD_OPTIM),
    ),
    "hybrid": (4, _shard_zoo_hybrid),
    "owned hybrid": (4, _owned_hybrid),
    "tensor parallel": (4, _shard_zoo_tensor_parallel),
}


_Optimizers = dict[str, torch.optim.Optimizer]


def _make_zoo(layout: str, seed: int) -> tuple[_Zoo, _Optimizers]:
    torch.manual_seed(seed)
    model = _Zoo()
    _LAYOUTS[layout][1](model)
    matrices = [model.up.weight, model.down.weight]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim < 2]},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    return model, {"adamw": adamw, "muon": torch.optim.Muon(matrices, lr=0.1)}


def _step_zoo(model: _Zoo, optimizers: _Optimizers) -> None:
    """Take a step whose gradients are the same under every layout.

    Muon, which steps whole matrices only, is given what its step would leave.
    """
    matrices = optimizers["muon"].param_groups[0]["params"]
    for number, param in enumerate(model.parameters()):
        if not param.requires_grad or _is_owned_by_other_rank(param):
            continue
        generator = torch.Generator().manual_seed(number)
        grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        if any(param is matrix for matrix in matrices):
            optimizers["muon"].state[param] = {"momentum_buffer": _distribute(grad, param)}
        else:
            param.grad = _distribute(grad, param)
    optimizers["adamw"].step()
    with torch.no_grad():
        model.norm.running_mean.fill_(0.25)


def _is_owned_by_other_rank(param: Tensor) -> bool:
    """Return whether another rank holds the whole parameter, and alone has optimizer state."""
    return isinstance(param, FlatShard) and param._shard_spec.is_owned_by_other_rank


def _distribute(full: Tensor, param: Tensor) -> Tensor:
    if isinstance(param, FlatShard):
        tensor_parallel = param._shard_spec.tensor_parallel
        if tensor_parallel is not None:
            full = distribute_tensor(full, *tensor_parallel, src_data_rank=None)
        return FlatShard.from_full(full, param._shard_spec)
    return full


def _zoo_values(model: _Zoo, optimizers: _Optimizers) -> dict[str, Tensor]:
    """Return everything in full; what one rank alone has is not on the others."""
    state = get_optimizer_state_dict(
        model, optimizers.values(), options=StateDictOptions(full_state_dict=True, rank0_only=False)
    )["state"]
    values = {name: full_tensor_of(value) for name, value in model.state_dict().items()}
    return values | {
        f"{n} {key}": full_tensor_of(v) for n, each in state.items() for key, v in each.items()
    }


def _save_zoo(layout: str, folder: Path) -> None:
    model, optimizers = _make_zoo(layout, seed=0)
    _step_zoo(model, optimizers)
    save_checkpoint(folder, model, optimizers, step=1)


def _load_zoos(layout: str, folders: list[Path]) -> None:
    on_meta: list[Any] = [nullcontext() for _ in folders]
    if layout not in ("plain", "plain on two", "tensor parallel"):
        on_meta[0] = torch.device("meta")
    reference = _make_zoo("plain", seed=0)
    _step_zoo(*reference)
    expected = _zoo_values(*reference)
    for number, (folder, place) in enumerate(zip(folders, on_meta, strict=True)):
        with place:
            model, optimizers = _make_zoo(layout, seed=1)
        if number % 2:  # has state to read into
            _step_zoo(model, optimizers)
        options = optimizers["adamw"].param_groups[0]
        options["weight_decay"] = 0.7
        objects = list(model.parameters())
        load_checkpoint(folder, model, optimizers)
        assert [id(param) for param in model.parameters()] == [id(param) for param in objects]
        assert optimizers["adamw"].param_groups[0]["weight_decay"] == 0.1
        with_state = {id(param) for each in optimizers.values() for param in each.state}
        assert not with_state & {id(param) for param in objects if _is_owned_by_other_rank(param)}
        values = _zoo_values(model, optimizers)
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert_equal(value, expected[name], f"{folder.name} {name}")
        assert model.conv.weight.stride() == _make_zoo(layout, seed=1)[0].conv.weight.stride()
        _step_zoo(model, optimizers)


@pytest.fixture(scope="module")
def saved_zoos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save one checkpoint for each layout."""
    folder = tmp_path_factory.mktemp("zoos")
    for layout, (world_size, _) in _LAYOUTS.items():
        run_ranks(world_size, _save_zoo, layout, folder / layout)
    return [folder / layout for layout in _LAYOUTS]


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_any_layout_loads_what_any_other_saved(layout: str, saved_zoos: list[Path]) -> None:
    """Parameters, buffers and optimizer state, bitwise, into the objects that are there.

    Each loads what a fifth of the others saved, the first of it from the meta device.
    """
    number = list(_LAYOUTS).index(layout)
    run_ranks(_LAYOUTS[layout][0], _load_zoos, layout, saved_zoos[number % 5 :: 5])


def _pieces(reader: CheckpointReader, name: str) -> list[Piece]:
    return list(reader.pieces_of(name, whole(reader.metadata.tensors[name].shape)))


def test_every_element_is_written_once(saved_zoos: list[Path]) -> None:
    """Whatever is replicated, and how often; the header is small."""
    counts = set()
    for folder in saved_zoos:
        with CheckpointReader(folder / "step_00000001") as reader:
            names = [name for name in reader.metadata.tensors if not name.startswith("rng")]
            counts.add(sum(piece.nbytes for name in names for piece in _pieces(reader, name)))
    assert len(counts) == 1


def test_data_files_are_safetensors_files(saved_zoos: list[Path]) -> None:
    """Each entry has the bytes of one piece."""
    for folder in saved_zoos:
        files = list((folder / "step_00000001").glob("*.safetensors"))
        with CheckpointReader(folder / "step_00000001") as reader:
            named = [(n, piece) for n in reader.metadata.tensors for piece in _pieces(reader, n)]
        assert {file.name for file in files} == {file.name for file in reader.metadata.files}
        entries = {}
        for file in files:
            entries.update({(file.name, key): value for key, value in load_file(file).items()})
        pieces = [
            (piece.file, f"{name}[{piece.region.start}:{piece.region.end}]", piece)
            for name, piece in named
        ]
        tables = {(file.name, "checksums") for file in files}
        assert {(file, key) for file, key, _ in pieces} | tables == entries.keys()
        for file, key, piece in pieces:
            data = entries[file, key].view(torch.uint8).numpy().tobytes()
            assert len(data) == piece.nbytes
            assert tuple(checksums(memoryview(bytearray(data)))) == piece.checksums
