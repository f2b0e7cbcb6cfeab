"""Loads that verify first, and then read straight into place."""

from __future__ import annotations

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
    reshard,
    save_checkpoint,
    unshard,
)
from composable_shard.checkpoint.reader import CheckpointReader
from composable_shard.state_dict import prepare_load
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import distributed

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
    with peak_bytes() as memory:
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


class _Odd(nn.Module):
    """Tensors that can't be read into as they lie in memory."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(4, 6, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.lin = nn.Linear(40, 30, dtype=dtype)
        self.register_buffer("turned", torch.randn(30, 20, dtype=dtype).t())
        self.register_buffer("conjugate", torch.randn(30, dtype=torch.complex64).conj())
        self.register_buffer("scalar", torch.randn((), dtype=dtype))


@pytest.mark.parametrize("is_sharded", [False, True])
@distributed(2)
def test_values_are_read_into_any_memory(is_sharded: bool, tmp_path: Path) -> None:
    """Of another dtype, block by block; transposed, channels last, conjugated, of no dims."""
    saved = _Odd(0, torch.float32)
    save_checkpoint(tmp_path, saved, step=1)
    model = _Odd(1, torch.float64)
    if is_sharded:
        fully_shard(model.lin, granularity="row")
        fully_shard(model.conv)
    strides = [each.stride() for each in model.state_dict().values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composable_shard.checkpoint.reader._BLOCK_NUMEL", 101)
        load_checkpoint(tmp_path, model)
    assert [each.stride() for each in model.state_dict().values()] == strides
    for name, value in model.state_dict().items():
        found = value.full_tensor() if isinstance(value, FlatShard) else value
        assert_equal(found.to(torch.complex64), saved.state_dict()[name].to(torch.complex64), name)


@distributed(2)
def test_a_model_that_shows_full_parameters_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    """What the last step of a load would refuse is known before the first."""
    model, optimizer = _trained(0, granularity="row")
    save_checkpoint(tmp_path, model, optimizer, step=1)
    model, optimizer = _trained(1, granularity="row")
    before = [each.clone() for each in _places(model, optimizer)]
    unshard(model)
    with pytest.raises(RuntimeError, match=r"shows its full .* Call reshard"):
        load_checkpoint(tmp_path, model, optimizer)
    reshard(model)
    for value, other in zip(_places(model, optimizer), before, strict=True):
        assert_equal(value, other)


@distributed(2)
def test_the_second_pass_is_verified_too(tmp_path: Path) -> None:
    """Damage between the passes is found."""
    model, optimizer = _trained(0, granularity="row")
    folder = save_checkpoint(tmp_path, model, optimizer, step=1)
    model, optimizer = _trained(1, granularity="row")
    assert isinstance(folder, Path)
    file = folder / f"rank_{dist.get_rank()}_of_2.safetensors"

    def damage(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            data = bytearray(file.read_bytes())
            data[8 + int.from_bytes(data[:8], "little")] ^= 1
            file.write_bytes(data)
        return prepare_load(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composable_shard.checkpoint.loading.prepare_load", damage)
        with pytest.raises(RuntimeError, match=r"cut off in the middle: .*their checksum"):
            load_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize("failing", [1, 5])
@distributed(2)
def test_a_second_read_that_fails_is_an_error_on_all_ranks(failing: int, tmp_path: Path) -> None:
    """It says what may have changed, and another load works."""
    model, optimizer = _trained(0, granularity="row")
    optimizer.param_groups[0]["lr"] = 0.5
    save_checkpoint(tmp_path, model, optimizer, step=1)
    saved = [each.clone() for each in _places(model, optimizer)]
    model, optimizer = _trained(1, granularity="row")
    read_into, calls = CheckpointReader.read_into, []

    def fail(reader: CheckpointReader, name: str, place: Tensor) -> None:
        calls.append(name)
        if len(calls) > failing:
            raise ValueError("a file is damaged: its bytes do not match their checksum")
        read_into(reader, name, place)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(CheckpointReader, "read_into", fail)
        text = r"cut off in the middle: a file is damaged.* may have the checkpoint's state now"
        with pytest.raises(RuntimeError, match=rf"on ranks \[1\]: the load .*{text}"):
            load_checkpoint(tmp_path, model, optimizer)
    model(torch.ones(1, 256)).sum().backward()  # no rank waits for another
    optimizer.zero_grad()
    load_checkpoint(tmp_path, model, optimizer)
    for value, other in zip(_places(model, optimizer), saved, strict=True):
        assert_equal(value, other)
    assert optimizer.param_groups[0]["lr"] == 0.5
