"""`iter_full_params`: full values one bucket after another."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composable_shard import (
    count_collectives,
    fully_shard,
    get_model_state_dict,
    iter_full_params,
    unshard_params,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import EVERYWHERE, loss_of, make_net


def _stepped(**options: Any) -> nn.Module:
    model = make_net(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("max_nbytes", [1 << 30, 1])
@pytest.mark.parametrize("granularity", ["element", "param"])
@distributed(2, on_device=True)
def test_values_after_a_step_are_those_of_the_whole_state_dict(
    granularity: str, max_nbytes: int
) -> None:
    """Bit by bit, on all ranks and on the first, cast and chosen by name."""
    model = _stepped(granularity=granularity)
    expected = get_model_state_dict(model, options=EVERYWHERE)
    found = dict(iter_full_params(model, max_nbytes=max_nbytes))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, value in found.items():
        assert type(value) is Tensor
        assert_equal(value, expected[name], name)
    names = ["out.bias", "inp.weight"]
    options: Any = {"dtype": torch.bfloat16, "rank0_only": True, "max_nbytes": max_nbytes}
    first = dict(iter_full_params(model, names, **options))
    assert first.keys() == (set(names) if dist.get_rank() == 0 else set())
    for name, value in first.items():
        assert_equal(value, expected[name].bfloat16(), name)
    loss_of(model).backward()  # and grad mode is as before


@distributed(2)
def test_one_gather_for_each_bucket_and_no_value_is_kept() -> None:
    """A unit is a bucket, or each parameter of a large one; values end with the caller."""
    model = _stepped()
    num_units, num_params = 1 + len(model.blocks), len(list(model.parameters()))
    for max_nbytes, expected in ((1 << 30, num_units), (1, num_params)):
        alive: list[weakref.ref[Tensor]] = []
        with count_collectives() as log:
            for _, value in iter_full_params(model, max_nbytes=max_nbytes):
                alive.append(weakref.ref(value))
                del value
                assert sum(each() is not None for each in alive) <= 1
        assert log.count("all_gather") == expected


@distributed(4)
def test_tensor_parallel_parameters_are_whole() -> None:
    """Over both axes of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for max_nbytes in (1 << 30, 1):
        for name, value in iter_full_params(model, max_nbytes=max_nbytes):
            assert_equal(value, expected[name], name)


@distributed(2)
def test_unknown_names_and_open_scopes_are_refused() -> None:
    """Before anything is gathered."""
    model = make_net()
    with pytest.raises(ValueError, match=r"names of the model's parameters, got \['none'\]"):
        iter_full_params(model, ["none"])
    with unshard_params(model), pytest.raises(RuntimeError, match="shows full parameters"):
        iter_full_params(model)
