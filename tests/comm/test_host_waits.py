"""The host issues a step without waiting for the device, as far as a CPU can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import composable_shard
from composable_shard import MixedPrecisionPolicy, ShardingStrategy, clip_grad_norm_
from composable_shard.comm.lockstep import GroupOrder
from composable_shard.tensor.flat_shard import FlatShard
from tests.models import Net, shard_blocks

pytestmark = pytest.mark.fast

aten = torch.ops.aten
_READS = {aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.nonzero, aten.equal}
_METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__")


class _NoWaits(TorchDispatchMode):
    """Raises where the host needs a value that the device computes, or gives it one to copy."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, FlatShard) for kind in types):
            return NotImplemented  # what it does with its local tensor comes here
        packet = func.overloadpacket
        if packet in _READS:
            raise AssertionError(f"the host waits for {func}")
        if packet is aten.lift_fresh:
            raise AssertionError("a tensor was made of Python numbers, for a copy to the device")
        if packet in (aten.index, aten.index_put_):
            masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
            assert not any(mask.dtype is torch.bool for mask in masks), "a mask is counted"
        return func(*args, **(kwargs or {}))


def _refuse_to_wait(*_: object, **__: object) -> NoReturn:
    raise AssertionError("the host waits for a value")


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)])
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_host_waits_for_nothing_in_a_step(
    strategy: ShardingStrategy, policy: MixedPrecisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second one on, clipping included.

    But for the digest of the step: the host reads it on a CPU, and a step late on an accelerator.
    """
    torch.manual_seed(0)
    model = Net(2)
    shard_blocks(model, strategy=strategy, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(4, 5)

    def step() -> None:
        model(x).square().mean().backward()
        clip_grad_norm_(model, 1.0)
        clip_grad_norm_(model, 1.0, norm_type=float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    step()
    monkeypatch.setattr(GroupOrder, "take_late", lambda *_: None)
    for name in _METHODS:
        monkeypatch.setattr(Tensor, name, _refuse_to_wait)
    with _NoWaits():
        step()
        step()


def test_nothing_is_told_to_the_allocator() -> None:
    """`record_stream` puts frees off; see [Note: Streams and memory]."""
    root = Path(composable_shard.__file__).parent
    found = [path.name for path in root.rglob("*.py") if ".record_stream(" in path.read_text()]
    assert found == []
