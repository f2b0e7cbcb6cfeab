"""Loads that verify first, and then read straight into place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    ShardingStrategy,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint.reader import CheckpointReader
from tests.helpers import assert_equal, distributed, peak_bytes
from tests.models import in_two_passes

_CHUNK = 1 << 18


def _trained(seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512))
    if options:
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _places(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors, in the memory of their owners."""
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [*model.state_dict().values(), *state]
    return [each._local if isinstance(each, FlatShard) else each for each in tensors]


_KINDS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"strategy": ShardingStrategy.FULL_SHARD},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "one flat parameter": {"use_orig_params": False},
    "whole parameters": {"granularity": "param"},
    "plain": {},
}


@pytest.mark.parametrize("kind", _KINDS)
@distributed(2)
def test_a_load_takes_no_memory_beyond_the_run(kind: str, tmp_path: Path) -> None:
    """Of the size of its values: what is verified is not held, and state keeps its memory."""
    model, optimizer = _trained(0, **_KINDS[kind])
    save_checkpoint(tmp_path, model, optimizer, step=1)
    expected = [each.clone() for each in _places(model, optimizer)]
    model, optimizer = _trained(1, **_KINDS[kind])
    model(torch.ones(1, 256))  # SHARD_GRAD_OP keeps full values
    places = [each.data_ptr() for each in _places(model, optimizer) if each.numel() > 1]
    with in_two_passes(), peak_bytes() as memory:
        loaded = load_checkpoint(tmp_path, model, optimizer)
    values = _places(model, optimizer)
    for value, other in zip(values, expected, strict=True):
        assert_equal(value, other)
    assert [each.data_ptr() for each in values if each.numel() > 1] == places
    assert memory.peak < 2 * _CHUNK, memory  # 600 kB are each rank's model alone
    nbytes = sum(each.nbytes for each in values)
    assert 2 * nbytes < loaded.nbytes_read < 2 * nbytes + (1 << 17)
    plain = _trained(0)[0]
    with torch.no_grad():
        assert_equal(model(torch.ones(1, 256)), plain(torch.ones(1, 256)))


@pytest.mark.parametrize("failing", [1, 5])
@distributed(2)
def test_a_second_read_that_fails_is_an_error_on_all_ranks(failing: int, tmp_path: Path) -> None:
    """It says what has changed; options and step counts are as before, and another load works."""
    model, optimizer = _trained(0, granularity="row")
    optimizer.param_groups[0]["lr"] = 0.5
    save_checkpoint(tmp_path, model, optimizer, step=1)
    saved = [each.clone() for each in _places(model, optimizer)]
    model, optimizer = _trained(1, granularity="row")
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    step = next(iter(optimizer.state.values()))["step"]
    read_into, calls = CheckpointReader.read_into, []

    def fail(reader: CheckpointReader, name: str, place: Tensor) -> None:
        calls.append(name)
        if len(calls) > failing:
            raise ValueError("a file is damaged: its bytes do not match their checksum")
        read_into(reader, name, place)

    with pytest.MonkeyPatch.context() as patch, in_two_passes():
        if dist.get_rank() == 1:
            patch.setattr(CheckpointReader, "read_into", fail)
        text = r"cut off in the middle: a file is damaged.* partly the checkpoint's now"
        with pytest.raises(RuntimeError, match=rf"on ranks \[1\]: the load .*{text}"):
            load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.state_dict()["param_groups"] == before
    assert next(iter(optimizer.state.values()))["step"] is step
    model(torch.ones(1, 256)).sum().backward()  # no rank waits for another
    optimizer.zero_grad()
    with in_two_passes():
        load_checkpoint(tmp_path, model, optimizer)
    for value, other in zip(_places(model, optimizer), saved, strict=True):
        assert_equal(value, other)
    assert optimizer.param_groups[0]["lr"] == 0.5
