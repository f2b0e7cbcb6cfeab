"""What a step holds of the device's memory, by its allocator, beside formulas and FSDP2."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks.memory import device as device_memory
from benchmarks.memory.device import PEERS, PRECISIONS, deviations, measure, sizes_of, train
from tests.device.running import on_device

_MODEL = "slim"
_OURS = [peer for peer in PEERS if peer.startswith("ours")]


@pytest.mark.long
@pytest.mark.parametrize("precision", list(PRECISIONS))
@on_device(num_ranks=2, timeout_s=60)
def test_levels_are_those_of_the_formulas_and_below_fsdp2(precision: str) -> None:
    """Within 2 percent, for each strategy; the peak of FULL_SHARD is the lowest by the way."""
    found = measure(dist.get_rank(), _MODEL, [*_OURS, "fsdp2"], precision)
    sizes = sizes_of(_MODEL, precision, 2)
    off = {
        (peer, stage): f"{part:+.1%}"
        for peer in _OURS
        for stage, part in deviations(found[peer], peer, sizes).items()
        if abs(part) > 0.02
    }
    assert off == {}
    for stage in ("peak forward", "peak backward"):
        assert found["ours"][stage] < found["fsdp2"][stage], stage


@pytest.mark.long
@pytest.mark.parametrize("peer", ["ours", "ours_optim"])  # frees all, keeps all
@on_device(num_ranks=2, timeout_s=60)
def test_memory_does_not_grow_with_the_steps(peer: str) -> None:
    """Neither what is allocated between steps nor what the allocator reserves."""
    levels = train(dist.get_rank(), "mini", peer, "bf16, fp32 sums", [4, 8, 24])
    for stage in (*device_memory.STAGES, "reserved"):
        assert len({each[stage] for each in levels}) == 1, stage
