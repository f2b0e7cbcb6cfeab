"""What a rank tells, is told and reads in a save and a load: a share of the model, on any number.

All ranks are threads of one process here; each has described the model as one of so many.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import draft, loading, reader, saving
from composable_shard.checkpoint.draft import SaveArguments
from composable_shard.checkpoint.reader import CheckpointReader
from composable_shard.checkpoint.writer import SavePlan, plan_save, write_checkpoint
from composable_shard.comm import HostGroup
from tests.common.free_group import free_world
from tests.harness.assertions import assert_equal

_Mail = defaultdict[tuple[int, int], "queue.Queue[Tensor]"]  # by sender and receiver


class _Threads(HostGroup):
    """One rank of a group whose ranks are threads; counts the bytes and messages of each."""

    def __init__(self, rank: int, size: int, mail: _Mail, counts: dict[str, Counter[int]]) -> None:
        super().__init__(None)
        self._group = object()  # type: ignore[assignment] # there is one
        self.rank, self.size = rank, size
        self._mail, self._counts = mail, counts

    def _send(self, tensor: Tensor, rank: int) -> None:
        self._counts["sent"][self.rank] += tensor.nbytes
        self._counts["received"][rank] += tensor.nbytes
        self._counts["messages"][self.rank] += 1
        self._mail[self.rank, rank].put(tensor.clone())

    def _take(self, tensor: Tensor, rank: int) -> None:
        tensor.copy_(self._mail[rank, self.rank].get(timeout=30))

    def _collect(self, tensor: Tensor, parts: list[Tensor]) -> None:
        if not self.is_first:
            self._send(tensor, 0)
        for rank, part in enumerate(parts):
            part.copy_(tensor) if rank == 0 else self._take(part, rank)

    def _distribute(self, tensor: Tensor, parts: list[Tensor]) -> None:
        for rank, part in enumerate(parts):
            tensor.copy_(part) if rank == 0 else self._send(part, rank)
        if not self.is_first:
            self._take(tensor, 0)

    def _broadcast(self, tensor: Tensor) -> None:
        for rank in range(1, self.size) if self.is_first else ():
            self._send(tensor, rank)
        if not self.is_first:
            self._take(tensor, 0)


class _Described(Exception):
    """Ends a save when it has described what the rank holds."""


def _make_own(num_params: int, numel: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of one unit, with other values for each parameter and its state."""
    model = nn.Sequential()
    model.forward = lambda x: x  # type: ignore[method-assign]
    for number in range(num_params):
        values = torch.arange(numel) + 1000.0 * number
        model.register_parameter(f"weight{number}", nn.Parameter(values))
    fully_shard(model, check_initial_values=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = -param.detach()
    return model, optimizer


def _describe(
    rank: int, num_ranks: int, num_params: int, numel: int, path: Path
) -> tuple[Any, ...]:
    """Return what `plan_save` gets, after the group, and describes on one of so many ranks."""
    found: list[tuple[Any, ...]] = []
    group = HostGroup(None)
    group.rank, group.size = rank, num_ranks

    def note(_: HostGroup, arguments: SaveArguments, describe: Callable[[], Any]) -> None:
        found.append((arguments, describe()))
        raise _Described

    with free_world(num_ranks, rank), pytest.MonkeyPatch.context() as patch:
        model, optimizer = _make_own(num_params, numel)
        patch.setattr(saving, "plan_save", note)
        patch.setattr(saving, "quiet_group", lambda: group)
        extra = {"tensor": torch.ones(3), "rank": rank}  # rank 0's is saved
        with pytest.raises(_Described):
            save_checkpoint(path, model, optimizer, step=1, extra=extra)
    return found[0]


def _plan(
    num_ranks: int,
    num_params: int,
    numel: int,
    path: Path,
    *,
    writes: bool = False,
    is_second: bool = False,
) -> tuple[list[SavePlan], Any, int]:
    """Return each rank's plan, what was counted, and the bytes of the tree.

    Args:
        is_second: Plan twice, and return what the second time took.
    """
    described = [_describe(rank, num_ranks, num_params, numel, path) for rank in range(num_ranks)]
    mail: _Mail = defaultdict(queue.Queue)
    for sender in range(num_ranks):
        for receiver in {0, sender} if sender else range(num_ranks):
            mail[sender, receiver]
    counts: dict[str, Counter[int]] = {n: Counter() for n in ("sent", "received", "messages")}
    plans: dict[int, SavePlan] = {}

    def run(rank: int) -> None:
        group = _Threads(rank, num_ranks, mail, counts)
        arguments, found = described[rank]
        plan = plan_save(group, arguments, lambda: found)
        if is_second:
            counted = {kind: counter[rank] for kind, counter in counts.items()}
            again = plan_save(group, arguments, lambda: found)
            for kind, counter in counts.items():
                counter[rank] -= counted[kind]
            assert again == plan  # on rank 0 with the metadata's tree and tensors
        plans[rank] = plan
        if writes:
            write_checkpoint(group, plan, None, None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [plans[rank] for rank in range(num_ranks)], counts, len(json.dumps(described[0][1][0]))


def test_what_a_rank_tells_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """Nor what it is told: eight times as many ranks hold an eighth each, of as many parameters."""
    found = {}
    for num_ranks in (4, 32):
        plans, counts, tree = _plan(num_ranks, 3, 64 * num_ranks, tmp_path)
        assert sum(item.region.numel for plan in plans for item in plan.items if item.owners) == (
            2 * 3 * 64 * num_ranks
        )
        ranks = range(1, num_ranks)
        found[num_ranks] = [max(counts[kind][rank] for rank in ranks) for kind in counts]
        # The first one hears of each rank's share, not of the whole from each.
        assert counts["received"][0] == sum(counts["sent"][rank] for rank in ranks)
        assert counts["sent"][1] < tree
    (few_sent, few_received, few_messages), (sent, received, messages) = found.values()
    assert few_messages == messages == 3  # a digest; size and content of what it holds
    assert sent <= few_sent + 30  # digits of places
    assert received <= few_received + 30


def test_a_plan_is_kept_for_the_next_save(tmp_path: Path) -> None:
    """On any number of ranks a rank sends a digest, and learns that all ranks know the plan."""
    for num_ranks in (4, 32):
        _, counts, _ = _plan(num_ranks, 3, 64 * num_ranks, tmp_path, is_second=True)
        assert counts["sent"][1] == counts["sent"][num_ranks - 1] == 32
        assert counts["received"][1] == counts["received"][num_ranks - 1] == 1
        assert counts["messages"][1] == counts["messages"][num_ranks - 1] == 1


def test_what_a_rank_tells_grows_with_what_it_holds(tmp_path: Path) -> None:
    """Of 64 parameters as many bytes as of 8, if it holds elements of as many."""
    sent = {}
    for num_params in (8, 64):
        _, counts, tree = _plan(8, num_params, 32 * 8 * 8 // num_params, tmp_path)
        sent[num_params] = counts["sent"][3], tree
    (few, small_tree), (many, large_tree) = sent.values()
    assert large_tree > 5 * small_tree
    assert many < 4 * few


class _Middle(HostGroup):
    """A rank whose peers say what it says; counts bytes and messages."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self._group = object()  # type: ignore[assignment] # there is one
        self.rank, self.size = rank, size
        self.counts: Counter[str] = Counter()

    def _collect(self, tensor: Tensor, parts: list[Tensor]) -> None:
        self.counts.update(sent=tensor.nbytes, messages=1)

    def _broadcast(self, tensor: Tensor) -> None:
        assert tensor.dtype is torch.bool
        self.counts.update(received=tensor.nbytes, messages=1)
        tensor.fill_(True)

    def on_first(self, function: Any) -> Any:
        value = function()
        self.counts.update(received=len(json.dumps([value, None])), messages=1)
        return value


def _load_as(
    rank: int, num_ranks: int, num_params: int, numel: int, path: Path
) -> tuple[Counter[str], set[str]]:
    """Load on one of so many ranks; return its counts, and the data files that it opened."""
    group, opened, open_to_read = _Middle(rank, num_ranks), set[str](), reader.open_to_read

    def note(path: Path) -> int:
        opened.add(path.name)
        return open_to_read(path)

    with free_world(num_ranks, rank), pytest.MonkeyPatch.context() as patch:
        expected = [p._local.clone() for p in _make_own(num_params, numel)[0].parameters()]
        model, optimizer = _make_own(num_params, numel)
        params = [param.detach() for param in model.parameters()]
        states = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
        for each in params + states:
            each.zero_()
        patch.setattr(loading, "quiet_group", lambda: group)
        patch.setattr(reader, "open_to_read", note)
        loaded = load_checkpoint(path, model, optimizer)
        for param, state, values in zip(params, states, expected, strict=True):
            assert_equal(param._local, values)
            assert_equal(state._local, -values)
    assert loaded.extra["rank"] == 0
    assert_equal(loaded.extra["tensor"], torch.ones(3))
    return group.counts, {name for name in opened if name.startswith("rank")}


def test_a_load_at_another_world_size_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """What a rank tells, is told and opens, and the lines of a parameter's pieces."""
    found = {}
    for num_ranks in (8, 64):
        path, numel = tmp_path / str(num_ranks), 32 * num_ranks
        _plan(num_ranks, 5, numel, path, writes=True)
        with CheckpointReader(path / "step_00000001") as opened:
            tensors = opened.metadata.tensors.values()
            lines = [len(each.lines) for each in tensors if each.name.partition("/")[0] != "rng"]
            assert sum(map(opened.metadata.num_pieces, opened.metadata.tensors)) >= 3 * num_ranks
        for fewer in (num_ranks // 4 * 3, num_ranks * 2):
            for rank in (0, fewer // 2, fewer - 1):
                counts, files = _load_as(rank, fewer, 5, numel, path)
                # Of its share at most three, of the shares to check one or two, and rank 0's.
                assert len(files) <= 6
                found.setdefault(num_ranks, []).append([counts, lines])
    few, many = found.values()
    for (few_counts, few_lines), (counts, many_lines) in zip(few, many, strict=True):
        assert counts["sent"] == few_counts["sent"] == 32 * 13
        assert counts["received"] <= few_counts["received"] + 8  # digits
        assert counts["messages"] == few_counts["messages"]
        assert max(few_lines) == max(many_lines) == 3


def test_few_of_many_files_are_open(tmp_path: Path) -> None:
    """One rank reads what more ranks wrote than it may have files open, twice."""
    _plan(32, 3, 64 * 32, tmp_path, writes=True)
    numbers = []
    open_to_read = reader.open_to_read

    def note(path: Path) -> int:
        numbers.append(len(os.listdir("/dev/fd")))
        return open_to_read(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_MAX_FILES", 8)
        patch.setattr(reader, "open_to_read", note)
        with CheckpointReader(tmp_path / "step_00000001") as opened:
            for number in (0, 1, 2, 0):
                values = opened.read_whole(f"model/weight{number}")
                assert_equal(values, torch.arange(64.0 * 32) + 1000 * number)
    assert len(numbers) > 1 + 32  # some again
    assert max(numbers) - numbers[0] <= 8


def test_groups_are_named_once_for_each_handle(tmp_path: Path) -> None:
    """A name takes the numbers of all ranks, so it was most of a plan on thousands of them."""
    names = []
    name_groups = draft._name_groups

    def note(groups: Any) -> Any:
        names.append(name_groups(groups))
        return names[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "_name_groups", note)
        _describe(3, 8, 20, 64, tmp_path)
    assert len(names) == 1
    assert len(names[0]) == 1
