"""The parity table: every strategy x accumulation x precision against a replicated reference.

| precision | reference |
|---|---|
| fp32; autocast to fp16 with GradScaler | DistributedDataParallel |
| parameters cast by a policy: bf16, or fp16 with GradScaler | the same casts, written out |

Losses, gradients and parameters are bitwise those of the reference on two ranks. On three ranks
sums have three terms, which are added up in another order: within 1e-6 in fp32, within eight times
the rounding of the low-precision dtype elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable_shard import MixedPrecisionPolicy, ShardingStrategy, no_sync
from tests.flat_param.test_mixed_precision import MixedReference, _assert_close_in_policy
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    assert_at_rest,
    assert_is_slice,
    loss_of,
    shard_blocks,
    shard_mixed,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NUM_STEPS = 3
_NO_POLICY = MixedPrecisionPolicy()


@dataclass(frozen=True)
class _Precision:
    policy: MixedPrecisionPolicy = _NO_POLICY
    model_dtype: torch.dtype = F32
    autocast_dtype: torch.dtype | None = None
    scale: float | None = None  # the first of a GradScaler, too large: steps are skipped

    def autocast(self) -> Any:
        dtype = self.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


PRECISIONS = {
    "fp32": _Precision(),
    "autocast fp16, GradScaler": _Precision(autocast_dtype=F16, scale=2.0**20),
    "bf16 params, fp32 reduce": _Precision(
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, main_dtype=F32)
    ),
    "bf16 model, main fp32": _Precision(MixedPrecisionPolicy(main_dtype=F32), model_dtype=BF16),
    "fp16 params, GradScaler": _Precision(
        MixedPrecisionPolicy(param_dtype=F16, main_dtype=F32), scale=2.0**20
    ),
}

# Microbatches, and whether the reduction of all but the last is left out.
ACCUMULATIONS = {"none": (1, False), "no_sync": (3, True), "synchronised": (3, False)}


SHARDINGS: dict[str, Callable[..., None]] = {
    **{each.name: partial(shard_blocks, strategy=each) for each in ShardingStrategy},
    "mixed": shard_mixed,
}
# What is added up where, under the "mixed" strategies too, if each term is of the reduce dtype.
STRATEGY_OF = {each.name: each for each in ShardingStrategy} | {"mixed": FULL_SHARD}


class _Ours:
    """The sharded model, with the reference's interface."""

    def __init__(self, model: nn.Module, precision: _Precision) -> None:
        self.main, self._precision = model, precision

    def backward(self, step: int, *, is_reduced: bool, factor: float) -> Tensor:
        with nullcontext() if is_reduced else no_sync(self.main):
            with self._precision.autocast():
                loss = loss_of(self.main, step)
            (loss * factor).backward()
        return loss.detach()


class _Ddp:
    """DistributedDataParallel.

    It would add an unreduced gradient to a reduced one and average the sum: reduced microbatches
    are added up here.
    """

    def __init__(self, model: nn.Module, precision: _Precision) -> None:
        self.main, self._precision = model, precision
        self._ddp = DistributedDataParallel(model)
        self._has_unreduced = False

    def backward(self, step: int, *, is_reduced: bool, factor: float) -> Tensor:
        before = [] if self._has_unreduced else [param.grad for param in self.main.parameters()]
        if before:
            self.main.zero_grad()
        with nullcontext() if is_reduced else self._ddp.no_sync():
            with self._precision.autocast():
                loss = loss_of(self._ddp, step)
            (loss * factor).backward()
        for param, grad in zip(self.main.parameters(), before, strict=False):
            if grad is not None:
                param.grad = grad.add_(param.grad)
        self._has_unreduced = not is_reduced
        return loss.detach()


def _make_pair(sharding: str, precision: _Precision) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net().to(precision.model_dtype)
    model = copy.deepcopy(plain)
    SHARDINGS[sharding](model, mp_policy=precision.policy)
    if precision.policy == _NO_POLICY:
        return _Ours(model, precision), _Ddp(plain, precision)
    if precision.model_dtype is not F32:
        # The reference computes in the model's own dtype.
        policy = MixedPrecisionPolicy(param_dtype=precision.model_dtype, main_dtype=F32)
        return _OursCast(model, precision), MixedReference(plain, policy, STRATEGY_OF[sharding])
    return _Ours(model, precision), MixedReference(plain, precision.policy, STRATEGY_OF[sharding])


class _OursCast(_Ours):
    """Of a low-precision model, which does not cast what it gets."""

    def backward(self, step: int, *, is_reduced: bool, factor: float) -> Tensor:
        hook = self.main.register_forward_pre_hook(
            lambda module, args: tuple(arg.to(self._precision.model_dtype) for arg in args)
        )
        loss = super().backward(step, is_reduced=is_reduced, factor=factor)
        hook.remove()
        return loss


def _train_both(sharding: str, precision: _Precision, accumulation: str) -> None:
    both = _make_pair(sharding, precision)
    num_microbatches, uses_no_sync = ACCUMULATIONS[accumulation]
    optimizers = [torch.optim.AdamW(e.main.parameters(), lr=0.01, foreach=True) for e in both]
    is_scaled = precision.scale is not None
    options = {"init_scale": precision.scale or 1.0, "backoff_factor": 2.0**-4}
    scalers = [torch.amp.GradScaler("cpu", enabled=is_scaled, **options) for _ in both]
    moved = []
    for step in range(NUM_STEPS):
        for micro in range(num_microbatches):
            is_reduced = not uses_no_sync or micro == num_microbatches - 1
            losses = []
            for each, scaler in zip(both, scalers, strict=True):
                factor = scaler.scale(torch.ones(())).item()
                number = 10 * step + micro
                losses.append(each.backward(number, is_reduced=is_reduced, factor=factor))
            _same(*losses, "loss", precision)
        _compare_twins(both, "grad", precision)
        before = both[1].main.inp.bias.detach().clone()
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        moved.append(not torch.equal(both[1].main.inp.bias, before))
        assert scalers[0].get_scale() == scalers[1].get_scale()
        _compare_twins(both, "data", precision)
    assert_at_rest(both[0].main)
    assert moved[0] is not is_scaled
    assert moved[-1]


def _same(actual: Tensor, expected: Tensor, what: str, precision: _Precision) -> None:
    low = precision.autocast_dtype or precision.policy.param_dtype
    low = low or (None if precision.model_dtype is F32 else precision.model_dtype)
    _assert_close_in_policy(actual, expected, what, MixedPrecisionPolicy(param_dtype=low))


def _compare_twins(both: tuple[Any, Any], kind: str, precision: _Precision) -> None:
    pairs = zip(both[0].main.named_parameters(), both[1].main.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert ours.dtype == F32
        value, expected = getattr(ours, kind), getattr(theirs, kind)
        assert_is_slice(value, expected, f"{kind} of {name}", partial(_same, precision=precision))


def _table_rows() -> list[Any]:
    names = ("sharding", "precision", "accumulation")
    rows = pairwise(**dict(zip(names, (SHARDINGS, PRECISIONS, ACCUMULATIONS), strict=True)))[1]
    # There is no one reference where units add up in different dtypes.
    low = ("bf16 model, main fp32", "fp16 params, GradScaler")
    rows = [row for row in rows if row[0] != "mixed" or row[1] not in low]
    return [pytest.param(*rows[0], marks=pytest.mark.fast), *rows[1:]]


@pytest.mark.parametrize(("sharding", "precision", "accumulation"), _table_rows())
@distributed(2)
def test_parity(sharding: str, precision: str, accumulation: str) -> None:
    """S2.4, S2.14, S2.17, S3.7: bitwise, with every kind of accumulation."""
    _train_both(sharding, PRECISIONS[precision], accumulation)


@pytest.mark.parametrize(
    ("precision", "sharding", "accumulation"),
    list(
        zip(
            [name for name in PRECISIONS if "Scaler" not in name],
            ("FULL_SHARD", "SHARD_OPTIM", "FULL_SHARD"),
            ACCUMULATIONS,
            strict=True,
        )
    ),
)
@distributed(3)
def test_parity_to_rounding(sharding: str, precision: str, accumulation: str) -> None:
    """S2.4, S2.14, S3.7: on three ranks, without the infinities of a scale that is too large."""
    _train_both(sharding, PRECISIONS[precision], accumulation)
