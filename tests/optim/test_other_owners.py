"""Norms, clipping and training where ranks own other parameters: experts, stages of a pipeline."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from composable_shard import (
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    count_collectives,
    fully_shard,
    get_model_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.experts import (
    MixtureNet,
    expert_mesh,
    mixture_batch,
    own_experts,
    shard_mixture,
    take_experts,
)
from tests.programs.models import (
    EVERYWHERE,
    Layer,
    assert_holds,
    full_tensor_of,
    seeded,
    shard_children,
    square_mean,
)


@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "as_dtensors", "norm_type"),
    [
        ("FULL_SHARD", True, False, 2.0),
        ("SHARD_GRAD_OP", False, False, math.inf),
        ("SHARD_OPTIM", True, True, 1.0),
        ("NO_SHARD", True, True, 2.0),
    ],
)
@distributed(4)
def test_experts_train_as_in_one_process(
    strategy: str, use_orig_params: bool, as_dtensors: bool, norm_type: float
) -> None:
    """Gradients, norm and clipped steps, with an auxiliary loss; one collective for each group."""
    mesh = expert_mesh()
    plain = seeded(MixtureNet).double()
    model = copy.deepcopy(plain)
    options = {"strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
    shard_mixture(model, mesh, as_dtensors=as_dtensors, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]

    def compare(found: dict[str, Any], expected: dict[str, Tensor | None]) -> None:
        for key, value in expected.items():
            if "experts" in key and not as_dtensors:
                value = own_experts(value, mesh)
            assert_close(full_tensor_of(found[key]), value, key)

    for step in range(2):
        sum(plain.loss(mixture_batch(rank, step)) / 4 for rank in range(4)).backward()
        model.loss(mixture_batch(dist.get_rank(), step)).backward()
        compare(unsharded_gradients(model), {k: p.grad for k, p in plain.named_parameters()})
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        # What tensor parallelism splits need not be given.
        groups = [] if as_dtensors else [(model.mixture.experts, mesh["ep"])]
        with count_collectives() as log:
            norm = clip_grad_norm_(model, 0.1, norm_type, groups=groups)
        assert_close(norm, expected, "norm")
        replicated = strategy == "NO_SHARD"  # every rank has all of what it shares
        assert log.count("all_reduce") == (1 if replicated else 3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(unsharded_values(model), {k: p.detach() for k, p in plain.named_parameters()})


@pytest.mark.parametrize("as_dtensors", [False, True])
@distributed(4)
def test_experts_train_as_with_fsdp2(as_dtensors: bool) -> None:
    """Gradients of two steps, and the whole state dict of experts that are DTensors."""
    mesh = expert_mesh()
    model, theirs = (seeded(MixtureNet).double() for _ in range(2))
    shard_mixture(model, mesh, as_dtensors=as_dtensors)
    take_experts(theirs, mesh, as_dtensors=as_dtensors)
    experts: Any = torch_fully_shard(theirs.mixture.experts, mesh=mesh["efsdp"])
    experts.set_gradient_divide_factor(4)
    experts.set_force_sum_reduction_for_comms(True)  # gloo can't divide while it adds
    for module in (theirs.mixture, theirs):
        torch_fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    for step in range(2):
        for each in (model, theirs):
            each.loss(mixture_batch(dist.get_rank(), step)).backward()
        for (name, param), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
            assert_close(full_tensor_of(param.grad), full_tensor_of(other.grad), name)
        for each in (model, theirs):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    if as_dtensors:
        whole = torch_state_dict.StateDictOptions(full_state_dict=True)
        expected = torch_state_dict.get_model_state_dict(theirs, options=whole)
        found = get_model_state_dict(model, options=EVERYWHERE)
        for name, value in expected.items():  # rank 0 has it
            assert_close(found[name], value, name)


@distributed(4)
def test_norm_without_the_group_of_experts_is_refused() -> None:
    """Each rank would scale the dense shards by another factor."""
    mesh = expert_mesh()
    model = seeded(MixtureNet)
    shard_mixture(model, mesh)
    model.loss(mixture_batch(dist.get_rank(), 0, torch.float32)).backward()  # grouped products
    with pytest.raises(RuntimeError, match="is shared by 2 ranks") as caught:
        clip_grad_norm_(model, 1.0)
    assert str(caught.value) == (
        "parameter 'mixture.experts.up' is shared by 2 ranks, and other units of the model by 4: "
        "the ranks beside own other parameters in its place, such as experts, and each rank would "
        "clip by another norm. Pass clip_grad_norm_ groups=[(module, group)], with the module that "
        "holds the parameter and the process group, or axis of a mesh, over whose ranks others own "
        "others. If they hold copies, shard all units over the same ranks."
    )
    norm = clip_grad_norm_(model, 1.0, groups=[(model.mixture.experts, mesh["ep"].get_group())])
    norms = [torch.empty_like(norm) for _ in range(4)]
    dist.all_gather(norms, norm)
    assert len(set(map(float, norms))) == 1


@distributed(4)
def test_checkpoint_of_split_experts(tmp_path: Path) -> None:
    """Experts that are DTensors have whole state dicts, and load without expert parallelism."""
    plain = seeded(MixtureNet)
    model = copy.deepcopy(plain)
    shard_mixture(model, expert_mesh(), as_dtensors=True)
    assert_holds(get_model_state_dict(model, options=EVERYWHERE), plain)
    save_checkpoint(tmp_path / "run", model, step=1)
    other = seeded(MixtureNet, 1)
    shard_children(other)
    load_checkpoint(tmp_path / "run", other)
    assert_holds(get_model_state_dict(other, options=EVERYWHERE), plain)


@pytest.mark.parametrize("axis", ["pp", "stage"])
@distributed(4)
def test_norm_over_stages(axis: str) -> None:
    """Found where the mesh has an axis "pp", or given; stages without gradients count as zero."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(axis, "dp"))
    stage = mesh[axis].get_local_rank()
    layers = seeded(lambda: nn.Sequential(Layer(), Layer(15, 9))).double()
    model = fully_shard(copy.deepcopy(layers[stage]), mesh=mesh["dp"])
    groups = [] if axis == "pp" else [mesh[axis]]
    for has_gradients in ([True, True], [True, False]):
        for layer, flag in zip(layers, has_gradients, strict=True):
            layer.zero_grad()
            if flag:
                square_mean(layer(torch.ones(2, 15).double())).backward()
        model.zero_grad()
        if has_gradients[stage]:
            square_mean(model(torch.ones(2, 15).double())).backward()
        expected = nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        with count_collectives() as log:
            assert_close(clip_grad_norm_(model, 0.1, groups=groups), expected, "norm")
        assert log.count("all_reduce") == (2 if has_gradients[stage] else 1)
        if has_gradients[stage]:
            for param, other in zip(model.parameters(), layers[stage].parameters(), strict=True):
                assert_close(param.grad.full_tensor(), other.grad, "clipped")


@distributed(4)
def test_stages_of_two_meshes_count_once() -> None:
    """Units of one stage may be on meshes that were made twice; a group of equal ranks, too."""
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) for _ in range(2)]
    layers = seeded(lambda: nn.Sequential(Layer(), Layer(15, 9))).double()
    model = copy.deepcopy(layers[meshes[0]["pp"].get_local_rank()])
    fully_shard(model.up, mesh=meshes[0]["dp"])
    fully_shard(model, mesh=meshes[1]["dp"])
    same = [dist.new_group([rank, rank + 2]) for rank in range(2)][dist.get_rank() % 2]
    for layer in (*layers, model):
        square_mean(layer(torch.ones(2, 15).double())).backward()
    expected = nn.utils.get_total_norm([param.grad for param in layers.parameters()])
    for groups in ([], [same]):
        assert_close(clip_grad_norm_(model, 1e9, groups=groups), expected, "norm")


@distributed(2)
def test_groups_of_plain_parameters() -> None:
    """Parameters that no unit manages may be others' too; what is no group is refused."""
    model = seeded(lambda: nn.ModuleDict({"shared": Layer(), "own": Layer()})).double()
    fully_shard(model["shared"])
    square_mean(model["shared"](torch.ones(2, 15).double())).backward()
    scale = 1.0 + dist.get_rank()
    square_mean(model["own"](scale * torch.ones(2, 15).double())).backward()
    shared = [param.grad.full_tensor().flatten() for param in model["shared"].parameters()]
    own = torch.cat([param.grad.flatten() for param in model["own"].parameters()])
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    world = dist.group.WORLD
    norm = clip_grad_norm_(model, 1e9, groups=[(list(model["own"].parameters()), world)])
    assert_close(norm, torch.cat([*shared, *both]).norm(), "norm")
    with pytest.raises(ValueError, match="expected groups to hold process groups"):
        clip_grad_norm_(model, 1.0, groups=["ep"])
    with pytest.raises(ValueError, match="expected a positive norm_type"):
        clip_grad_norm_(model, 1.0, 0.0)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@distributed(4)
def test_overflow_of_one_expert_skips_the_step_of_all(kind: type[torch.amp.GradScaler]) -> None:
    """Else some ranks would step their part of the dense parameters, and some would not."""
    mesh = expert_mesh()
    model = seeded(MixtureNet).double()
    shard_mixture(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = kind("cpu", init_scale=2.0)
    scaler.scale(model.loss(mixture_batch(dist.get_rank(), 0))).backward()
    if dist.get_rank() == 3:
        model.mixture.experts.down.grad.to_local().fill_(math.inf)
    before = model.inp.weight.detach().full_tensor()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert_close(model.inp.weight.full_tensor(), before, "dense parameter")
