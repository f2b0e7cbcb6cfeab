"""Ranks that begin with other weights are told at the first forward, unless they were replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import (
    ShardingStrategy,
    lazy_init,
    set_model_state_dict,
    unshard_params,
)
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param.initial_values import checksum
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import FROM_RANK0, Net, shard_blocks

OTHER = (
    r"ranks 0 and 1 had different initial values of parameter 'blocks.1.up.weight'.*"
    r"sync_module_states=True"
)


def _different() -> Net:
    """Return a net of which one element differs between ranks."""
    net = Net()
    with torch.no_grad():
        net.blocks[1].up.weight[3, 2] += dist.get_rank()
    return net


def _run_once(net: nn.Module) -> None:
    net(torch.ones(2, 5)).sum().backward()


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_values_different_initial_weights_are_named(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """The first parameter, on both ranks; under NO_SHARD the first rank's are taken."""
    net = _different()
    shard_blocks(net, strategy=strategy, use_orig_params=use_orig_params)
    if strategy is ShardingStrategy.NO_SHARD:
        _run_once(net)
        return
    for call in (_run_once, lazy_init):
        net = _different()
        shard_blocks(net, strategy=strategy, use_orig_params=use_orig_params)
        with pytest.raises(RuntimeError, match=OTHER):
            call(net)


def _load(net: nn.Module) -> None:
    net.load_state_dict(Net().state_dict())


def _load_from_first(net: nn.Module) -> None:
    values = Net().state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(net, values, options=FROM_RANK0)


def _fill(net: nn.Module) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)


def _to_empty(net: nn.Module) -> None:
    net.to_empty(device="cpu")
    _fill(net)


@pytest.mark.parametrize("write", [_load, _load_from_first, _fill, _to_empty])
@distributed(2)
def test_values_written_before_the_first_forward_are_not_compared(
    write: Callable[[nn.Module], None],
) -> None:
    """Only the values with which training starts count."""
    net = _different()
    shard_blocks(net)
    write(net)
    _run_once(net)


@pytest.mark.parametrize("option", ["sync_module_states", "check_initial_values"])
@distributed(2)
def test_values_are_not_compared_on_request(option: str) -> None:
    """Nor where the first rank's were sent to all."""
    net = _different()
    shard_blocks(net, **{option: option == "sync_module_states"})
    _run_once(net)


@distributed(2)
def test_values_are_compared_by_a_scope() -> None:
    """Also by one that is there to initialise them: `check_initial_values` is for it."""
    net = _different()
    shard_blocks(net)
    with pytest.raises(RuntimeError, match=OTHER), unshard_params(net):
        pass
    net = _different()
    shard_blocks(net, check_initial_values=False)
    with unshard_params(net), torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)
    _run_once(net)


@distributed(2)
def test_values_ride_on_the_comparison_of_the_ranks() -> None:
    """One all-gather of 32 bytes in all, as without them; none later."""
    for check in (True, False):
        net = Net()
        shard_blocks(net, check_initial_values=check)
        with count_collectives() as log:
            lazy_init(net)
        assert [(event.kind, event.nbytes) for event in log.events] == [("all_gather", 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_checksum_sees_every_element_of_any_tensor(dtype: torch.dtype) -> None:
    """Of odd lengths, at odd offsets, of no elements, and in another memory format."""
    torch.manual_seed(0)  # sums of bits may be equal by chance
    buffer = torch.randn(64).to(dtype)
    for values in (
        buffer[1:4],
        buffer[:7],
        buffer[3:32].view(29),
        buffer[:0],
        buffer[:36].view(6, 6).t(),
    ):
        before = checksum(values)
        for index in range(values.numel()):
            changed = values.contiguous().clone()
            changed.view(-1)[index] += 1
            assert checksum(changed) != before
        assert_equal(checksum(values.clone()), before)
