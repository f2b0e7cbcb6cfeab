"""Two ranks that set a model up differently: the same error on both, which names both sides.

Each case is what the first rank does to the model, or with which options it shards it; the other
one leaves it as it is. The models run one forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import (
    Block,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    register_comm_hook,
    register_flat_param,
    set_backward_prefetch,
    set_forward_prefetch,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
    set_unshard_in_backward,
)
from composable_shard.comm import ReductionStage
from tests.harness.ranks import distributed
from tests.programs.models import Layer, Net

Change = Callable[[Net], Any]


def _cast_hook(stage: ReductionStage) -> None:
    stage.reduce()


# What the first rank does before it shards.
BEFORE: dict[str, Change] = {
    "shape": lambda net: net.blocks.__setitem__(1, Layer(15, 8)),
    "same numel": lambda net: setattr(net.blocks[1], "up", nn.Linear(7, 15)),
    "dtype of a parameter": lambda net: net.blocks[1].up.to(torch.bfloat16),
    "dtype of the model": lambda net: net.double(),
    "frozen parameter": lambda net: net.blocks[1].up.weight.requires_grad_(False),
    "frozen unit": lambda net: net.blocks[1].requires_grad_(False),
    "no bias": lambda net: net.blocks[1].up.register_parameter("bias", None),
    "further parameter": lambda net: net.register_parameter("scale", nn.Parameter(torch.ones(3))),
    "further block": lambda net: net.blocks.append(Layer()),
    "fewer blocks": lambda net: net.blocks.__delitem__(2),
    "renamed": lambda net: net.add_module("last", net._modules.pop("out")),
    "other order": lambda net: net.add_module("inp", net._modules.pop("inp")),
    "tied": lambda net: setattr(net.blocks[1].up, "weight", net.blocks[0].up.weight),
    "tied inside a unit": lambda net: setattr(net.out, "weight", nn.Parameter(net.inp.weight.t())),
    "initial values": lambda net: net.inp.weight.data.mul_(2),
    "initial values of one element": lambda net: net.blocks[2].down.bias.data[1].add_(1),
    "inner unit": lambda net: fully_shard(net.blocks[1].up),
    "unit of two blocks": lambda net: fully_shard([net.blocks[0], net.blocks[1]]),
}
UNITS = {"inner unit", "unit of two blocks"}  # they shard
# With which options the first rank shards all units.
OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "not sharded": {"strategy": ShardingStrategy.NO_SHARD},
    "reshard_after_forward": {"reshard_after_forward": False},
    "granularity row": {"granularity": "row"},
    "granularity block": {"granularity": Block(5)},
    "granularity param": {"granularity": "param"},
    "granularity of one": {"granularity": lambda p: "row" if p.shape == (7, 15) else "element"},
    "param_dtype": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "reduce_dtype": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "gather_dtype": {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.bfloat16)},
    "main_dtype": {"mp_policy": MixedPrecisionPolicy(main_dtype=torch.float64)},
    "output_dtype": {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)},
    "offload_policy": {"offload_policy": OffloadPolicy(params=True)},
    "use_orig_params": {"use_orig_params": False},
    "bucket_cap_mb": {"bucket_cap_mb": 0.0001},
    "prefetch_nbytes": {"prefetch_nbytes": 0},
    "broadcast_buffers": {"broadcast_buffers": True},
    "sync_module_states": {"sync_module_states": True},
    "check_order": {"check_order": "always"},
    "check_initial_values": {"check_initial_values": False},
}
# What the first rank does after it has sharded.
AFTER: dict[str, Change] = {
    "forward prefetch": lambda net: set_forward_prefetch(net.blocks[0], [net.blocks[2]]),
    "backward prefetch": lambda net: set_backward_prefetch(net.blocks[2], [net.blocks[0]]),
    "divide factor": lambda net: set_gradient_divide_factor(net, 3.0),
    "reshard after forward": lambda net: set_reshard_after_forward(net.blocks[0], False),
    "reshard after backward": lambda net: set_reshard_after_backward(net, False),
    "unshard in backward": lambda net: set_unshard_in_backward(net.blocks[0], False),
    "gradient sync": lambda net: set_requires_gradient_sync(net.blocks[1], False),
    "all-reduce": lambda net: set_requires_all_reduce(net, False),
    "last backward": lambda net: set_is_last_backward(net, False),
    "comm hook": lambda net: register_comm_hook(net, _cast_hook),
    "requires_grad": lambda net: net.blocks[1].up.weight.requires_grad_(False),
    "flat parameter": lambda net: register_flat_param(net.blocks[0]),
    "unmanaged module": lambda net: setattr(net, "extra", nn.Linear(2, 2)),
    "to": lambda net: net.blocks[1].to(torch.float64),
    "edit": lambda net: net.blocks[2].down.bias.data.mul_(0.5),
    "average of weights": lambda net: torch._foreach_lerp_(
        [param.data for param in net.parameters()], [p.detach() for p in net.parameters()], 0.1
    ),
}


def _assert_told(call: Callable[[], object]) -> None:
    """Assert that `call` raises the same RuntimeError on both ranks, naming both."""
    with pytest.raises(RuntimeError) as caught:
        call()
    messages: list[Any] = [None, None]
    dist.all_gather_object(messages, str(caught.value))
    assert messages[0] == messages[1]
    text = messages[0]
    assert ("ranks [0]: " in text and "ranks [1]: " in text) or "ranks 0 and 1 had" in text, text


def _shard(net: Net, **options: Any) -> None:
    for block in net.blocks:
        if not get_handles(block):
            fully_shard(block, **options)
    fully_shard(net, **options)


@pytest.mark.parametrize("case", [*BEFORE, *OPTIONS, *AFTER])
@distributed(2)
def test_setup_difference_is_named(case: str) -> None:
    """Before anything is sent that differs."""
    net = Net()
    is_odd = dist.get_rank() == 0
    if is_odd and case in BEFORE:
        BEFORE[case](net)

    def run() -> None:
        _shard(net, **(OPTIONS.get(case, {}) if is_odd else {}))
        if is_odd and case in AFTER:
            AFTER[case](net)
        net(torch.ones(2, 5))

    _assert_told(run)


@distributed(2)
def test_setting_of_a_second_handle_is_compared() -> None:
    """A setter that Ctrl-C ends on one rank may have reached some handles of a unit alone."""
    net = Net()
    _shard(net, bucket_cap_mb=0.0001)
    first, second, *_ = fully_shard.state(net).handles
    if dist.get_rank() == 0:
        second.take_settings(replace(first.settings, gradient_divide_factor=3.0))
    _assert_told(lambda: net(torch.ones(2, 5)))


@distributed(2)
def test_setup_sync_of_other_shapes_is_named() -> None:
    """The broadcast would be refused by gloo, which ends the process."""
    net = Net()
    if dist.get_rank() == 0:
        net.inp = nn.Linear(6, 15)
    _assert_told(lambda: _shard(net, sync_module_states=True))
