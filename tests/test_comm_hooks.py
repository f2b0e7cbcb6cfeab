"""Hooks that replace a unit's reduction, ready-made ones, and sums of low-precision terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    _collectives,
)
from composable_shard._collectives import count_collectives
from tests.helpers import assert_equal, distributed
from tests.models import Net, rank_input, shard_blocks

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def _loss(model: nn.Module, step: int = 0) -> Tensor:
    return model(rank_input(4, 5, step=step)).float().square().mean()


def _make(**options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, **options)
    return model


# --- sums of low-precision terms ---


@contextmanager
def _sums_by(path: str) -> Iterator[None]:
    """Choose how a group of this size reduces: as small, as larger, and as very large ones do."""
    limits = {"exchange": (8, 64), "all-to-all": (0, 64), "backend": (0, 0)}[path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_collectives, "_MAX_EXCHANGE_SIZE", limits[0])
        patch.setattr(_collectives, "_MAX_ALL_TO_ALL_SIZE", limits[1])
        yield


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("path", ["exchange", "all-to-all"])
@distributed(3)
def test_low_precision_terms_are_sent_as_they_are_and_added_up_in_fp32(
    path: str, dtype: torch.dtype
) -> None:
    """1 + eps/4 + eps/4 is 1 where each addition is rounded; the output may be wide or narrow."""
    group = dist.group.WORLD
    assert group is not None
    eps = torch.finfo(dtype).eps
    value = 1.0 if dist.get_rank() == 0 else eps / 4
    input = torch.full((3 * 16,), value, dtype=dtype)
    with _sums_by(path), count_collectives() as log:
        for output_dtype in (F32, dtype):
            output = torch.empty(16, dtype=output_dtype)
            num_parts = _collectives.scratch_parts(group, input, in_place=True)
            assert num_parts == 3
            scratch = input.new_empty(num_parts * 16)
            _collectives.reduce_scatter(output, input, scratch, group, 2.0).finish()
            exact = torch.full((16,), 1 + eps / 2)
            assert_equal(output, exact.to(output_dtype) * 2)
    assert log.count("reduce_scatter") == 2
    assert log.nbytes("reduce_scatter") == 2 * input.nbytes


@distributed(3)
def test_a_backend_rounds_every_addition() -> None:
    """Which is what the other ways are for."""
    group = dist.group.WORLD
    assert group is not None
    value = 1.0 if dist.get_rank() == 0 else 2.0**-9
    input, output = torch.full((3 * 16,), value, dtype=BF16), torch.empty(16)
    with _sums_by("backend"):
        assert _collectives.scratch_parts(group, input, in_place=True) == 0
        _collectives.reduce_scatter(output, input, None, group).finish()
    assert bool((output == 1).all())


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "reduce only"])
@distributed(3)
def test_all_to_all_trains_as_the_exchange_does(strategy: ShardingStrategy, policy: str) -> None:
    """Bitwise: both add up the same terms in rank order."""
    mp_policy = {
        "bf16": MixedPrecisionPolicy(param_dtype=BF16, main_dtype=F32),
        "fp16": MixedPrecisionPolicy(param_dtype=F16, main_dtype=F32),
        "reduce only": MixedPrecisionPolicy(reduce_dtype=BF16),
    }[policy]
    seen = []
    for path in ("exchange", "all-to-all"):
        with _sums_by(path):
            model = _make(strategy=strategy, mp_policy=mp_policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(3):
                _loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append([param.full_tensor() for param in model.parameters()])
    for ours, expected in zip(*seen, strict=True):
        assert_equal(ours, expected)
