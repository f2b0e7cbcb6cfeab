"""Ranks that own different parameters save one checkpoint, which loads on another split."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_shard import (
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import EVERYWHERE, Layer

_NUM_LAYERS = 4


class _PipelineStage(nn.Module):
    """Consecutive layers of a model, under the whole model's names."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = Layer(15, 8)
            self.layers[str(number)].register_buffer("scale", torch.full((2,), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _make_stage(
    shape: tuple[int, int, int], seed: int = 0
) -> tuple[_PipelineStage, torch.optim.AdamW]:
    """Return this rank's stage of a mesh (stages, data parallel, tensor parallel)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    number, size = mesh.get_local_rank("pp"), _NUM_LAYERS // shape[0]
    model = _PipelineStage(range(number * size, (number + 1) * size))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    for layer in model.layers.values():
        if shape[2] > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01 * (1 + seed))


def _values_of_stage(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all full values of this rank's stage by name."""
    found = get_model_state_dict(model, options=EVERYWHERE)
    state = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)
    for fqn, each in state["state"].items():
        found |= {f"{fqn}: {key}": value for key, value in each.items()}
    for group in state["param_groups"]:
        found |= {
            f"{fqn}: options": (group["lr"], group["weight_decay"]) for fqn in group["params"]
        }
    return found


def _save_stage(path: Path, shape: tuple[int, int, int]) -> dict[str, Any]:
    model, optimizer = _make_stage(shape)
    torch.manual_seed(0)
    model(torch.randn(3, 15)).square().mean().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, step=1)
    return _values_of_stage(model, optimizer)


def _load_stage(path: Path, shape: tuple[int, int, int]) -> dict[str, Any]:
    model, optimizer = _make_stage(shape, seed=1)
    load_checkpoint(path, model, optimizer)
    return _values_of_stage(model, optimizer)


def _assert_same_stages(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_equal(found[name], value, name)
        else:
            assert found[name] == value


# The same names in each stage; what differs between them is the value.
def _make_alike(number: int, mesh: DeviceMesh, value: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight += value * number
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_different_tensors_of_one_name_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    """On all ranks, by name, before anything is written; equal ones are one tensor."""
    run_ranks(shape[0] * shape[1], _save_alike, tmp_path, shape)


def _save_alike(path: Path, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    ranks = [list(range(shape[1])), list(range(shape[1], 2 * shape[1]))]
    text = rf"one name: '0.weight' of ranks {ranks[0]} and of ranks {ranks[1]}\. .*ModuleDict"
    text = text.replace("[", r"\[").replace("]", r"\]")
    model = _make_alike(number, mesh["dp"], value=1.0)
    with pytest.raises(ValueError, match=text):
        save_checkpoint(path, model, step=1)
    assert not list(path.iterdir())
    holder = nn.ModuleDict({f"stage{number}": model})
    save_checkpoint(path, holder, step=1)
    expected = model[0].weight.full_tensor()
    model = _make_alike(number, mesh["dp"], value=5.0)
    load_checkpoint(path, nn.ModuleDict({f"stage{number}": model}))
    assert_equal(model[0].weight.full_tensor(), expected)
    save_checkpoint(path, _make_alike(number, mesh["dp"], value=0.0), step=2)  # as tied weights


@distributed(2)
def test_parameters_that_no_unit_shares_are_compared(tmp_path: Path) -> None:
    """Local experts in `ignored_params` have other values on each rank; buffers may differ."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    model["experts"] = nn.Linear(3, 3)
    fully_shard([model["dense"], model["norm"]], ignored_params=set(model["experts"].parameters()))
    model["norm"].running_mean.fill_(dist.get_rank())
    save_checkpoint(tmp_path, model, step=1)
    with torch.no_grad():
        model["experts"].bias += dist.get_rank()
    with pytest.raises(ValueError, match=r"'experts.bias' of ranks \[0\] and of ranks \[1\]"):
        save_checkpoint(tmp_path, model, step=2)
    model["experts"] = nn.ModuleDict({str(dist.get_rank()): model["experts"]})
    save_checkpoint(tmp_path, model, step=3)
    expected = model["experts"][str(dist.get_rank())].bias.detach().clone()
    with torch.no_grad():
        model["experts"][str(dist.get_rank())].bias.zero_()
    load_checkpoint(tmp_path, model)
    assert_equal(model["experts"][str(dist.get_rank())].bias.detach(), expected)


@distributed(2)
def test_a_name_that_no_rank_has_is_unexpected(tmp_path: Path) -> None:
    """And one that the checkpoint lacks is missing, on whichever rank."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    fully_shard(list(model.values()))
    save_checkpoint(tmp_path, model, step=1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    own = nn.ModuleDict({"a": nn.Linear(2, 2)})
    fully_shard(list(own.values()), mesh=mesh)
    with pytest.raises(ValueError, match=r"unexpected: b\.bias, b\.weight"):
        load_checkpoint(tmp_path, own)
    own = nn.ModuleDict({"ac"[dist.get_rank()]: nn.Linear(2, 2)})
    fully_shard(list(own.values()), mesh=mesh)
    with pytest.raises(ValueError, match=r"missing: c\.bias, c\.weight; unexpected: b\.bias"):
        load_checkpoint(tmp_path, own)
    load_checkpoint(tmp_path, own, strict=False)


def _make_own_stage(
    rank: int, mesh: DeviceMesh
) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """Return a stage, with optimizers and schedulers of its own beside those that all have."""
    model = nn.ModuleDict({str(rank): nn.Linear(3, 3)})
    if rank == 0:
        model["first"] = nn.Linear(3, 3)
    fully_shard(list(model.values()), mesh=mesh)
    optimizers: dict[str, Any] = {"all": torch.optim.SGD(model[str(rank)].parameters(), lr=0.1)}
    if rank == 0:
        optimizers["first"] = torch.optim.Adam(model["first"].parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    schedulers = {}
    for name, optimizer in optimizers.items():
        optimizer.step()
        schedulers[name] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizers, schedulers


@distributed(2)
def test_stages_may_have_optimizers_of_their_own(tmp_path: Path) -> None:
    """The checkpoint has all of them; what no rank wants is named."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    model, optimizers, schedulers = _make_own_stage(dist.get_rank(), mesh)
    save_checkpoint(tmp_path, model, optimizers, scheduler=schedulers, step=1)
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["lr"] = 7.0
    load_checkpoint(tmp_path, model, optimizers, scheduler=schedulers)
    assert {n: o.param_groups[0]["lr"] for n, o in optimizers.items()} == {
        name: {"all": 0.1, "first": 0.001}[name] for name in optimizers
    }
    whole = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("0", "first", "1")})
    fully_shard(list(whole.values()))
    every = {"all": torch.optim.SGD([*whole["0"].parameters(), *whole["1"].parameters()], lr=3.0)}
    with pytest.raises(
        ValueError, match=r"has 2 optimizers called 'all', 'first'; got 1 optimizer called 'all'"
    ):
        load_checkpoint(tmp_path, whole, every)
    every["first"] = torch.optim.Adam(whole["first"].parameters())
    load_checkpoint(tmp_path, whole, every)
    assert every["all"].param_groups[0]["lr"] == 0.1


_SPLITS = {
    (2, 2, 1): [(1, 2, 1), (4, 1, 1), (2, 1, 2)],
    (2, 1, 2): [(2, 2, 1)],
}


@pytest.mark.parametrize("saved", _SPLITS, ids=str)
def test_pipeline_stages_save_one_checkpoint_for_any_split(
    saved: tuple[int, int, int], tmp_path: Path
) -> None:
    """(stages, data parallel, tensor parallel): model, optimizer and options of groups."""
    expected: dict[str, Any] = {}
    for values in run_ranks(math.prod(saved), _save_stage, tmp_path, saved):
        expected |= values
    assert len(expected) == _NUM_LAYERS * (4 * 5 + 1)
    for shape in _SPLITS[saved]:
        found: dict[str, Any] = {}
        for values in run_ranks(math.prod(shape), _load_stage, tmp_path, shape):
            found |= values
        _assert_same_stages(found, expected)
