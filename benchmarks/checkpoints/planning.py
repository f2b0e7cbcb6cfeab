"""What does it cost a rank to plan a save or a load, on few ranks and on thousands, beside DCP?

One process, as one rank of a group whose collectives do nothing: the rank in the middle. Units of
100 parameters of 64 x 64 with AdamW's state, of which a rank holds a piece of each unit.

*save*: process CPU time of `save_checkpoint` until the rank has told what it holds; of DCP's
`create_local_plan` for state dicts of the same shards. *sent*: the JSON that the rank sends, and
DCP's pickled local plan, which goes to one rank as well. Each rank is then told which of its pieces
to write; the first rank's own work has a line for each piece of each rank, as DCP's has, and is not
measured here.

*load*: of a checkpoint of twice as many ranks; process CPU time of `load_checkpoint` until all is
found and compared, without the values. *read*: `metadata.json`, and what the files that the rank
needs say about their pieces. *told*: what the rank sends and is sent. DCP's: reading `.metadata`
and `create_local_plan` of its `DefaultLoadPlanner`; the bytes of `.metadata`, which every rank
reads, and of the pickled local plan, which it sends to one rank. All units of the checkpoint are
alike: DCP's metadata is made, written and read of one, and its bytes and seconds are times the
number of units, so that it fits into memory.

    python -m benchmarks.checkpoints planning --output planning.md
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.optim import AdamW

from benchmarks import report
from composable_shard import (
    FlatShard,
    fully_shard,
    get_handles,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint.draft import Item
from composable_shard.checkpoint.file_format import (
    CHUNK_NBYTES,
    METADATA,
    data_file_name,
    join_pieces,
    write_metadata,
)
from composable_shard.checkpoint.reader import CheckpointReader
from composable_shard.checkpoint.writer import _write_data
from composable_shard.comm import HostGroup
from composable_shard.layout import FlatLayout, Region, whole, whole_box
from tests.common.free_group import free_world

NUM_PARAMS = 100  # of a unit
_UNIT = "0.params."  # in the names of the first unit's parameters


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        params = (nn.Parameter(torch.empty(64, 64)) for _ in range(NUM_PARAMS))
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor) -> Tensor:
        return x


class _ToldError(Exception):
    """Ends a save or load when all that is measured is done."""


class _OneOfMany(HostGroup):
    """A rank of a group whose other ranks say what this one says; counts what it tells."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self._group = object()  # type: ignore[assignment] # there is one
        self.rank, self.size = rank, size
        self.told = 0  # bytes sent and received

    def _collect(self, tensor: Tensor, parts: list[Tensor]) -> None:
        self.told += tensor.nbytes

    def _broadcast(self, tensor: Tensor) -> None:
        self.told += tensor.nbytes
        tensor.fill_(True)  # all ranks have one message


class _Saver(_OneOfMany):
    def gather(self, value: Any) -> list[Any]:
        self.told += len(json.dumps(value))
        raise _ToldError


class _Loader(_OneOfMany):
    def on_first(self, function: Any) -> Any:
        value = function()
        self.told += len(json.dumps([value, None]))
        return value


def _make(num_units: int) -> tuple[nn.Module, AdamW]:
    with torch.device("meta"):
        model = nn.Sequential(*(_Unit() for _ in range(num_units)))
    for unit in (*model, model):
        fully_shard(unit, check_initial_values=False)
    model.to_empty(device="cpu")
    optimizer = AdamW(model.parameters())
    for param in model.parameters():
        moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


def _state_of(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    own = get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": own}


def measure_save(num_ranks: int, num_units: int) -> list[float]:
    """Return seconds and bytes of ours, and of DCP's local plan."""
    with free_world(num_ranks, num_ranks // 2):
        model, optimizer = _make(num_units)
        group = _Saver(num_ranks // 2, num_ranks)
        start = time.process_time()
        replaced = patch("composable_shard.checkpoint.saving.quiet_group", lambda: group)
        with replaced, suppress(_ToldError):
            save_checkpoint("unused", model, optimizer, step=1)
        own = time.process_time() - start
        state = _state_of(model, optimizer)
        start = time.process_time()
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=False)
        plan = pickle.dumps(planner.create_local_plan())
        return [own, group.told, time.process_time() - start, len(plan)]


def _renamed(value: Any, unit: int) -> Any:
    """Return a JSON value of the first unit as one of another."""
    return json.loads(json.dumps(value).replace(_UNIT, f"{unit}.params."))


def _describe(rank: int, num_ranks: int) -> tuple[dict[str, Any], list[Item]]:
    """Return the tree and items that a rank saves of one unit."""
    found: list[Any] = []

    def note(group: HostGroup, arguments: Any, describe: Callable[[], Any]) -> None:
        found.extend(describe())
        raise _ToldError

    group = HostGroup(None)
    group.rank, group.size = rank, num_ranks
    with free_world(num_ranks, rank), ExitStack() as stack:
        model, optimizer = _make(1)
        stack.enter_context(patch("composable_shard.checkpoint.saving.plan_save", note))
        stack.enter_context(patch("composable_shard.checkpoint.saving.quiet_group", lambda: group))
        stack.enter_context(suppress(_ToldError))
        save_checkpoint("unused", model, optimizer, step=1)
    return found[0], found[1]


def _layout(num_ranks: int) -> FlatLayout:
    with free_world(num_ranks):
        return get_handles(_make(1)[0])[0].layout


class SavedByMany:
    """A checkpoint of alike units by so many ranks, without the files that nobody looks at."""

    def __init__(self, folder: Path, num_ranks: int, num_units: int) -> None:
        self.folder, self.num_ranks, self.num_units = folder, num_ranks, num_units
        self.tree, items = _describe(0, num_ranks)
        self.items = [item for item in items if not item.is_own]
        layout = _layout(num_ranks)
        # The pieces of each of the unit's parameters, and so of its state
        self.pieces: list[list[tuple[int, int, int]]] = []
        for index in range(NUM_PARAMS):
            ends = enumerate(layout.param_range(index, rank) for rank in range(num_ranks))
            self.pieces.append([(start, end, rank) for rank, (start, end) in ends if start < end])

    def ranks_for(self, rank: int, num_ranks: int) -> list[int]:
        """Return the ranks whose files one of so many ranks reads."""
        layout, found = _layout(num_ranks), {0}
        for index, pieces in enumerate(self.pieces):
            low, high = layout.param_range(index, rank)
            found |= {holder for start, end, holder in pieces if max(low, start) < min(high, end)}
        return sorted(found)

    def pieces_of(self, item: Item) -> list[tuple[int, int, int]]:
        """Return start, end and rank of the pieces of an item."""
        if not item.is_shard:
            return [(0, item.shape.numel(), 0)]
        return self.pieces[int(item.name.partition(_UNIT)[2].partition("/")[0])]

    def write(self, ranks: Sequence[int], checked: Sequence[int]) -> None:
        """Write the metadata, and the files of some ranks; of those checked the length is right."""
        lines = [[data_file_name(r, self.num_ranks), 8, 0, 0, "0"] for r in range(self.num_ranks)]
        for rank in set(checked) - set(ranks):
            (self.folder / lines[rank][0]).write_bytes(bytes(8))
        for rank in ranks:
            lines[rank] = _write_data(self.folder / lines[rank][0], self._items_of(rank))
        tensors = {}
        tree: dict[str, Any] = {**self.tree, "model": {}}
        state: dict[str, Any] = {"state": {}, "param_groups": []}
        tree["optimizer"] = {"": state}
        for item in self.items:
            box = whole_box(item.shape)
            pieces = join_pieces(item.shape, [(box, *each) for each in self.pieces_of(item)])
            line = {"shape": list(item.shape), "dtype": "float32", "pieces": pieces}
            for unit in range(self.num_units):
                tensors[item.name.replace(_UNIT, f"{unit}.params.")] = line
        first = self.tree["optimizer"][""]
        for unit in range(self.num_units):
            tree["model"] |= _renamed(self.tree["model"], unit)
            state["state"] |= _renamed(first["state"], unit)
        group = first["param_groups"][0]
        names = [fqn for unit in range(self.num_units) for fqn in _renamed(group["params"], unit)]
        state["param_groups"] = [{**group, "params": names}]
        content = {"step": 1, "world_size": self.num_ranks, "chunk_nbytes": CHUNK_NBYTES}
        text = write_metadata({**content, "files": lines, "tensors": tensors, "tree": tree})
        (self.folder / METADATA).write_bytes(text)

    def _items_of(self, rank: int) -> list[Item]:
        _, described = _describe(rank, self.num_ranks)
        held = [
            i for i in described if not i.is_own and (rank == 0 or i.is_shard) and i.region.numel
        ]
        return [
            replace(i, name=i.name.replace(_UNIT, f"{unit}.params."), owners=None)
            for unit in range(self.num_units)
            for i in held
        ]

    def dcp_metadata(self, flat: dict[str, Any]) -> Metadata:
        """Return DCP's metadata of one unit, or with lists of chunks that all units share."""
        chunks: dict[int, list[ChunkStorageMetadata]] = {}
        for index, pieces in enumerate(self.pieces):
            whole_one = whole((64, 64))
            boxes = [
                box
                for start, end, _ in pieces
                for box in Region(whole_one.box, whole_one.order, start, end).boxes()
            ]
            chunks[index] = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in boxes
            ]
        alone = [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
        found: dict[str, Any] = {}
        for key, value in flat.items():
            found[key] = BytesStorageMetadata()
            if isinstance(value, Tensor):
                number = key.partition(".params.")[2].partition(".")[0]
                own = chunks[int(number)] if isinstance(value, FlatShard) else alone
                properties = TensorProperties(dtype=value.dtype)
                found[key] = TensorStorageMetadata(properties, torch.Size(value.shape), own)
        return Metadata(found)


def _read_by_dcp(saved: SavedByMany, flat: dict[str, Any]) -> tuple[float, float]:
    """Return seconds and bytes of reading what DCP's metadata has of one unit."""
    metadata = saved.dcp_metadata({k: v for k, v in flat.items() if f".{_UNIT}" in k})
    storage = {
        MetadataIndex(key, chunk.offsets, number): _StorageInfo("__0_0.distcp", number, 400)
        for key, entry in metadata.state_dict_metadata.items()
        for number, chunk in enumerate(getattr(entry, "chunks", ()))
    }
    text = pickle.dumps(Metadata(metadata.state_dict_metadata, storage_data=storage))
    start = time.process_time()
    pickle.loads(text)
    return time.process_time() - start, len(text)


@contextmanager
def _without_values(done: Callable[[CheckpointReader], None]) -> Iterator[None]:
    """Let loads read no values, and end before they change anything."""

    def stop(group: HostGroup, reader: Any, *_: object) -> None:
        done(reader)
        raise _ToldError

    with (
        patch("composable_shard.checkpoint.loading._change", stop),
        patch.object(CheckpointReader, "_read_bytes", lambda *_: None),
        suppress(_ToldError),
    ):
        yield


def measure_load(num_ranks: int, num_units: int) -> list[float]:
    """Return seconds, bytes read and bytes told of ours; seconds and bytes of DCP's."""
    rank, read = num_ranks // 2, list[int]()

    def note(reader: CheckpointReader) -> None:
        files = reader.indexed_files
        read.append(sum(file.header_nbytes + file.table_nbytes for file in files))

    with TemporaryDirectory() as name:
        folder = Path(name)
        saved = SavedByMany(folder, 2 * num_ranks, num_units)
        saved.write(saved.ranks_for(rank, num_ranks), [rank, rank + num_ranks])
        with free_world(num_ranks, rank):
            model, optimizer = _make(num_units)
            group = _Loader(rank, num_ranks)
            start = time.process_time()
            replaced = patch("composable_shard.checkpoint.loading.quiet_group", lambda: group)
            with replaced, _without_values(note):
                load_checkpoint(folder, model, optimizer)
            own = time.process_time() - start
            read.append((folder / METADATA).stat().st_size)
            state = _state_of(model, optimizer)
            flat, _ = flatten_state_dict(state)
            seconds, nbytes = _read_by_dcp(saved, flat)
            metadata = saved.dcp_metadata(flat)
            start = time.process_time()
            planner = DefaultLoadPlanner()
            planner.set_up_planner(state, metadata, is_coordinator=False)
            plan = pickle.dumps(planner.create_local_plan())
            planned = time.process_time() - start
    theirs = [seconds * num_units + planned, nbytes * num_units, len(plan)]
    return [own, sum(read), group.told, *theirs]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--ranks", default="64,512,4096", help="comma-separated")
    parser.add_argument("--units", type=int, default=1000, help="of 100 parameters each")
    args = parser.parse_args(argv)
    measure_save(2, 2)  # what is done once
    measure_load(2, 2)
    saves, loads = [], []
    for num_ranks in map(int, args.ranks.split(",")):
        own, sent, theirs, planned = measure_save(num_ranks, args.units)
        figures = [f"{own:.1f}", f"{sent / 1e3:,.0f}", f"{theirs:.1f}", f"{planned / 1e3:,.0f}"]
        saves.append([f"{num_ranks:,}", *figures])
        own, read, told, theirs, dcp_read, planned = measure_load(num_ranks, args.units)
        figures = [f"{own:.1f}", f"{read / 1e6:,.1f}", f"{told:,.0f}"]
        figures += [f"{theirs:.1f}", f"{dcp_read / 1e6:,.0f}", f"{planned / 1e3:,.0f}"]
        loads.append([f"{num_ranks:,}", *figures])
    title = f"Planning a save and a load of {args.units * NUM_PARAMS:,} parameters with AdamW"
    markdown = report.header(title, "the rank in the middle; collectives do nothing")
    columns = ["ranks", "`save_checkpoint`, s", "sent kB", "DCP's local plan, s", "its kB"]
    markdown += "\n" + report.table(columns, saves)
    columns = ["ranks", "`load_checkpoint`, s", "read MB", "told bytes"]
    columns += ["DCP's metadata and plan, s", "`.metadata` MB", "plan kB"]
    report.emit(markdown + "\n" + report.table(columns, loads), args.output)


if __name__ == "__main__":
    main()
