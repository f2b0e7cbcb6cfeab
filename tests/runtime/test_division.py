"""One rule divides gradients: the sum over all data-parallel ranks, by their number or the factor.

Whatever the mesh, the strategy and the world size, and mixed in one tree.
"""

from __future__ import annotations

import copy
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    no_sync,
    set_gradient_divide_factor,
    set_is_last_backward,
)
from tests.harness.ranks import distributed
from tests.programs.models import Net, rank_input

_FACTORS = (None, 1.0, 0.5, 3.0, 7.0)


def _meshes() -> list[tuple[DeviceMesh, dist.ProcessGroup]]:
    """Return meshes with a group of the ranks whose gradients each of them averages."""
    size = dist.get_world_size()
    world = dist.group.WORLD
    shapes = [(n, size // n) for n in range(1, size + 1) if size % n == 0]
    meshes = [(init_device_mesh("cpu", (size,)), world)]
    meshes += [(init_device_mesh("cpu", shape), world) for shape in shapes]
    if size == 4:  # halves of the world, as an expert-parallel model has them
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        meshes += [(mesh[axis], mesh.get_group(axis)) for axis in ("outer", "inner")]
    assert all(group is not None for _, group in meshes)
    return meshes  # type: ignore[return-value]


def _check_random_division(seed: int, meshes: list[tuple[DeviceMesh, dist.ProcessGroup]]) -> None:
    """Shard each unit in a random way, and compare one gradient with the replicated one."""
    choose = random.Random(seed)  # the same on all ranks
    torch.manual_seed(seed)
    plain = Net(2)
    model = copy.deepcopy(plain)
    units: list[nn.Module] = [*model.blocks, model]
    rules: dict[nn.Module, tuple[float | None, dist.ProcessGroup]] = {}
    described = []
    for unit in units:
        (mesh, group), factor = choose.choice(meshes), choose.choice(_FACTORS)
        strategy = choose.choice(list(ShardingStrategy))
        fully_shard(unit, mesh=mesh, strategy=strategy)
        set_gradient_divide_factor(unit, factor, recurse=False)
        rules[unit] = factor, group
        described.append((mesh.mesh.tolist(), strategy.name, factor))
    num_micro, puts_off = choose.randint(1, 3), choose.choice([None, "no_sync", "last"])
    for micro in range(num_micro):
        is_last = micro == num_micro - 1
        if puts_off == "last":
            set_is_last_backward(model, is_last)
        x = rank_input(4, 5, step=micro)
        plain(x).square().mean().backward()
        if puts_off == "no_sync" and not is_last:
            with no_sync(model):
                model(x).square().mean().backward()
        else:
            model(x).square().mean().backward()
    for name, param in plain.named_parameters():
        unit = model.get_submodule(".".join(name.split(".")[:2])) if "blocks" in name else model
        factor, group = rules[unit]
        dist.all_reduce(param.grad, group=group)
        expected = param.grad / (factor or group.size())
        actual = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(
            actual,
            expected,
            rtol=1e-5,
            atol=1e-7,
            msg=lambda text, name=name: f"seed {seed}, {name}, {described}, {puts_off}: {text}",
        )


@distributed(2, 3, 4)
def test_any_tree_divides_by_the_one_rule(world_size: int) -> None:
    """Random meshes, strategies, factors and ways of accumulating."""
    meshes = _meshes()
    for seed in range(12 * world_size, 12 * world_size + (12 if world_size == 4 else 8)):
        _check_random_division(seed, meshes)
