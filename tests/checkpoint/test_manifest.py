"""Where a checkpoint says its pieces are: in runs, and in the files themselves."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from composable_shard import FlatShard, fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import reader
from composable_shard.checkpoint.file_format import (
    CHUNK_NBYTES,
    StoredTensor,
    join_pieces,
    split_run,
)
from composable_shard.conversion import describe_checkpoint
from composable_shard.layout import Region, intersect, whole_box
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks

_VERSION_2 = Path(__file__).parent / "fixtures" / "version_2"
_NUM_FILES = 40


def _split_lines(stored: StoredTensor, target: Region) -> list[tuple[Any, int, int, int]]:
    return [
        (region.box, region.start, region.end, file)
        for line in stored.lines
        for file, region in split_run(stored, line, _NUM_FILES, target)
    ]


def test_lines_give_the_pieces_back() -> None:
    """Random cuts of a vector, of equal lengths or not, in files in any order; and boxes."""
    told = random.Random(0)
    for _ in range(300):
        length, first, number = told.randint(1, 5), told.randint(0, 5), told.randint(1, 12)
        cuts = [0, first, *(first + length * each for each in range(1, number))]
        if told.random() < 0.3:
            cuts += [cuts[-1] + told.randint(1, 9) for _ in range(2)]
        cuts = sorted(set(cuts))
        numbers = list(range(told.randint(0, 9), _NUM_FILES, told.choice([1, 1, 2])))
        if told.random() < 0.3:
            told.shuffle(numbers)
        shape = torch.Size([max(cuts[-1], 1)])
        box = whole_box(shape)
        ends = zip(cuts, cuts[1:], numbers, strict=False)
        pieces = [(box, start, end, file) for start, end, file in ends]
        lines = join_pieces(shape, told.sample(pieces, len(pieces)))
        stored = StoredTensor("x", shape, torch.float32, (0,), lines)
        assert _split_lines(stored, Region(box, (0,), 0, shape[0])) == pieces
        start = told.randint(0, shape[0] - 1)
        target = Region(box, (0,), start, told.randint(start + 1, shape[0]))
        wanted = [p for p in pieces if len(range(*intersect((p[1], p[2]), (start, target.end))))]
        assert [piece for piece in _split_lines(stored, target) if piece in wanted] == wanted
        assert len(_split_lines(stored, target)) <= len(wanted) + len(lines)
    rows = [(((row, row + 1), (0, 4)), 0, 4, row) for row in range(3)]
    stored = StoredTensor(
        "x", torch.Size([3, 4]), torch.float32, (0, 1), join_pieces(torch.Size([3, 4]), rows)
    )
    assert _split_lines(stored, Region(((1, 2), (0, 4)), (0, 1), 0, 4)) == rows


def test_equal_shards_of_any_number_are_three_lines() -> None:
    """The first and the last piece of a parameter are shorter."""
    shape = torch.Size([64, 1000])
    for num_ranks in (16, 640):
        size = 64_000 // num_ranks
        cuts = [0, *range(size // 2, 64_000, size), 64_000]
        ends = enumerate(itertools.pairwise(cuts))
        pieces = [(whole_box(shape), *each, 5 + file) for file, each in ends]
        assert join_pieces(shape, pieces) == [
            [5, 0, size // 2, 1, 0],
            [6, size // 2, size // 2 + size, num_ranks - 1, 1],
            [5 + num_ranks, 64_000 - size // 2, 64_000, 1, 0],
        ]


def _old_model(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return what the fixture was saved of."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    model[1].weight = nn.Parameter(torch.empty_strided((7, 3), (1, 7)))
    model.register_buffer("seen", torch.tensor(int(3 * scale)))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            values = torch.arange(param.numel()).view(param.shape) + 100 * number
            param.copy_(scale * values)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for param in model.parameters():
        moments = {"exp_avg": param.detach() * 2, "exp_avg_sq": param.detach() * 3}
        optimizer.state[param] = {"step": torch.tensor(4.0 * scale), **moments}
    return model, optimizer


def _all_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [*model.state_dict().values(), *state]
    return [each.full_tensor() if isinstance(each, FlatShard) else each for each in tensors]


def _load_old(path: Path) -> None:
    model, optimizer = _old_model(0.0)
    loaded = load_checkpoint(path, model, optimizer)
    assert (loaded.step, loaded.world_size) == (4, 2)
    assert loaded.extra["note"] == [1, "x"]
    assert_equal(loaded.extra["tensor"], torch.arange(3))
    expected = _all_values(*_old_model(1.0))
    for value, other in zip(_all_values(model, optimizer), expected, strict=True):
        assert_equal(value, other)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_checkpoint_of_version_2_loads(num_ranks: int, tmp_path: Path) -> None:
    """A directory that the version before wrote; `inspect` verifies it."""
    folder = tmp_path / "step_00000004"
    shutil.copytree(_VERSION_2, folder)
    run_ranks(num_ranks, _load_old, tmp_path)
    text = describe_checkpoint(folder, lists_tensors=True)
    assert "2 files, 46,068 bytes; all checksums match" in text
    assert "model/1.weight: 7x3 float32, 2 pieces" in text


@pytest.mark.parametrize("damage", ["flip", "cut"])
@distributed(2)
def test_damage_of_version_2_is_named(damage: str, tmp_path: Path) -> None:
    """Its checksums are in `metadata.json`."""
    folder = tmp_path / str(dist.get_rank())
    shutil.copytree(_VERSION_2, folder)
    file = folder / "rank_1_of_2.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if damage == "flip" else data[:-1])
    model, optimizer = _old_model(0.0)
    with pytest.raises(ValueError, match=r"rank_1_of_2.safetensors is damaged: "):
        load_checkpoint(tmp_path / "0", model, optimizer)
    assert not any(value.any() for value in _all_values(model, optimizer))


@distributed(4)
def test_a_rank_opens_only_files_that_it_reads(tmp_path: Path) -> None:
    """Also where its part of a parameter is a box, and others' are ranges."""
    mesh = init_device_mesh("cpu", (4,))
    model = fully_shard(nn.Linear(16, 64, bias=False), mesh=mesh)
    values = model.weight.full_tensor()
    path = save_checkpoint(tmp_path, model, step=1)
    rows = distribute_tensor(torch.zeros(64, 16), mesh, [Shard(0)])
    other = nn.Linear(16, 64, bias=False)
    other.weight = nn.Parameter(rows)
    opened = list[str]()
    work = reader.open_to_read

    def note(path: Path) -> int:
        opened.append(path.name)
        return work(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "open_to_read", note)
        load_checkpoint(path, other)
    assert_equal(other.weight.detach().full_tensor(), values)
    assert {name for name in opened if "rank" in name} == {
        f"rank_{dist.get_rank()}_of_4.safetensors"
    }


@distributed(2)
def test_another_order_in_memory_is_read_once(tmp_path: Path) -> None:
    """However many elements; and of part of them no more chunks than hold some."""
    model = nn.Linear(1024, 2100, bias=False, dtype=torch.bfloat16)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    path = save_checkpoint(tmp_path, fully_shard(model, check_initial_values=False), step=1)
    values = model.weight.full_tensor().detach()
    with reader.CheckpointReader(path) as opened:
        assert_equal(opened.read_whole("model/weight"), values.contiguous())
        assert opened.nbytes_read == values.nbytes
        columns = Region(((0, 2100), (3, 5)), (0, 1), 0, 4200)
        assert_equal(opened.read("model/weight", columns), values[:, 3:5].reshape(-1))
        assert opened.nbytes_read - values.nbytes <= 2 * CHUNK_NBYTES
