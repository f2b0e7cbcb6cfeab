"""Whole parameters train like cut ones under every other option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    no_sync,
    register_flat_param,
    register_orig_params,
    unshard_params,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    CheckpointsBlocks,
    Net,
    Tied,
    assert_at_rest,
    every_granularity,
    loss_of,
    rank_input,
    shard_blocks,
)

GRANULARITIES: dict[str, Any] = {"param": "param", "mixed": every_granularity}


class Checkpoints(CheckpointsBlocks, Net):
    """Recomputes its blocks."""


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MAIN = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_dtype=torch.float32)
OPTIONS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "plain": (Net, {}),
    "checkpointing": (Checkpoints, {}),
    "tied": (Tied, {}),
    "bf16": (Net, {"mp_policy": BF16}),
    "main_dtype": (Net, {"mp_policy": MAIN}),
    "offload": (Net, {"offload_policy": OffloadPolicy(params=True)}),
    "offload_state": (Net, {"offload_policy": OffloadPolicy(optim_state=True)}),
    "flat": (Net, {"use_orig_params": False}),
    "buckets": (Net, {"bucket_cap_mb": 0.001}),
    "kept": (Net, {"reshard_after_forward": False}),
    "int8": (Net, {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.int8)}),
}


def build(kind: str, **options: Any) -> nn.Module:
    """Return a sharded model."""
    make, own = OPTIONS[kind]
    torch.manual_seed(0)
    model = make()
    shard_blocks(model, **own, **options)
    return model


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters in full."""
    with unshard_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_accumulating(model: nn.Module, num_steps: int = 3) -> dict[str, Tensor]:
    """Train with microbatches, of which one accumulates unsharded; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(num_steps):
        with no_sync(model):
            loss_of(model, 3 * step).backward()
        loss_of(model, 3 * step + 1).backward()
        loss_of(model, 3 * step + 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return full_values(model)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that all parameters are equal, exactly."""
    assert list(actual) == list(expected)
    for name, value in actual.items():
        assert_equal(value, expected[name], name)


CASES = [("plain", ShardingStrategy.FULL_SHARD, "param")]
CASES += [(kind, ShardingStrategy.FULL_SHARD, "mixed") for kind in OPTIONS]
CASES += [
    (kind, strategy, "mixed")
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.SHARD_OPTIM)
    for kind in OPTIONS
    if kind in ("plain", "tied", "bf16", "offload", "flat")
]


@pytest.mark.parametrize(("kind", "strategy", "granularity"), CASES)
@distributed(2)
def test_training_is_that_of_cut_parameters(
    kind: str, strategy: ShardingStrategy, granularity: str
) -> None:
    """Three steps of three microbatches give the same parameters; int8 rounds other blocks."""
    models = [build(kind, strategy=strategy)]
    models.append(build(kind, strategy=strategy, granularity=GRANULARITIES[granularity]))
    expected, actual = (train_accumulating(model) for model in models)
    if kind == "int8":
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=0.1, atol=0.1)
    else:
        assert_same(actual, expected)
    if kind not in ("flat", "kept"):
        assert_at_rest(models[1])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@distributed(4)
def test_copies_of_whole_parameters_stay_equal(granularity: str) -> None:
    """On a 2-D mesh each parameter has an owner in every row, and all of them step alike."""
    mesh = init_device_mesh("cpu", (2, 2))
    options = {"mesh": mesh, "strategy": ShardingStrategy.FULL_SHARD}
    expected = train_accumulating(build("plain", **options))
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_OPTIM):
        options["strategy"] = strategy
        actual = train_accumulating(
            build("plain", **options, granularity=GRANULARITIES[granularity])
        )
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@distributed(2, 3)
def test_copied_model_trains_on() -> None:
    """Owners stay what they are; both go on alike."""
    model = build("plain", granularity="param")
    train_accumulating(model, 1)
    twin = copy.deepcopy(model)
    owners = [
        [entry.spec.owner for handle in get_handles(each) for entry in handle.entries]
        for each in (model, twin)
    ]
    assert owners[0] == owners[1]
    assert_same(train_accumulating(twin), train_accumulating(model))


@distributed(2)
def test_bf16_matrices_are_stepped_in_float32_on_the_host() -> None:
    """Muon with main parameters and offload: the optimizer sees fp32 matrices on the CPU."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    offload = OffloadPolicy(params=True)
    fully_shard(model, granularity="param", mp_policy=MAIN, offload_policy=offload)
    optimizer = torch.optim.Muon(model.parameters())
    model(rank_input(3, 6)).float().sum().backward()
    optimizer.step()
    assert isinstance(model.weight, FlatShard)
    is_owner = model.weight._shard_spec.is_whole
    assert (model.weight.grad is not None) == is_owner
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == torch.float32
        assert state["momentum_buffer"].to_local().shape == (4, 6)
    assert len(optimizer.state) == is_owner


@pytest.mark.fast
@distributed(2)
def test_gradients_survive_the_flat_form_and_back() -> None:
    """The flat parameter has one on every rank; originals have theirs on the owner alone."""
    model = build("plain", granularity="param")
    loss_of(model, 0).backward()
    before = {
        name: param.grad.to_local().clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    register_flat_param(model)
    loss_of(model, 1).backward()
    register_orig_params(model)
    after = {name for name, param in model.named_parameters() if param.grad is not None}
    assert after == before.keys()
    loss_of(model, 2).backward()
    assert {n for n, param in model.named_parameters() if param.grad is not None} == after


@pytest.mark.fast
@distributed(2)
def test_hooks_run_on_owners() -> None:
    """An optimizer in the backward steps each parameter once, where its gradient is."""
    model = build("plain", granularity="param")
    expected = build("plain", granularity="param")
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(3):
        loss_of(model, number).backward()
        loss_of(expected, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_values(model), full_values(expected))


@distributed(2)
def test_zeroed_gradients_stay_on_the_owner() -> None:
    """`set_to_none=False` keeps them, and gives the other rank none."""
    model = build("plain", granularity="param")
    loss_of(model, 0).backward()
    model.zero_grad(set_to_none=False)
    for param in model.parameters():
        assert isinstance(param, FlatShard)
        assert (param.grad is None) == param._shard_spec.is_owned_by_other_rank
        if param.grad is not None:
            assert not param.grad.to_local().count_nonzero()
