"""Models that a program splits by hand over a second axis, annotated by the library spmd_types."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from composable_shard import (
    ShardingStrategy,
    clip_grad_norm_,
    fsdp2,
    get_handles,
    get_model_state_dict,
    load_checkpoint,
    save_checkpoint,
    unshard_params,
)
from composable_shard.tensor import FlatShard
from tests.harness.ranks import distributed, run_ranks
from tests.harness.versions import needs_torch

needs_axes = needs_torch("2.13", "before, FSDP2 has no DataParallelMeshDims")
_SIZE = 6


class _SumGradients(torch.autograd.Function):
    """The same on all ranks, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dist.all_reduce(total := gradients[0].clone(), group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, which is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(total := value.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Block(nn.Module):
    """Two products with a scale before and an offset after them; whole, or this rank's part."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(2 * _SIZE, _SIZE))
        self.down = nn.Parameter(torch.randn(_SIZE, 2 * _SIZE))
        self.scale = nn.Parameter(torch.rand(_SIZE))
        self.offset = nn.Parameter(torch.rand(_SIZE))
        self.group = None if mesh is None else mesh.get_group("tp")
        if mesh is not None:
            rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
            self.up = nn.Parameter(self.up.detach().chunk(size)[rank].clone())
            self.down = nn.Parameter(self.down.detach().chunk(size, dim=1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Compute; gradients of the scale are each rank's own term."""
        if self.group is not None:
            x = _SumGradients.apply(x, self.group)
        x = (x * self.scale @ self.up.T).tanh() @ self.down.T
        return (x if self.group is None else _Sum.apply(x, self.group)) + self.offset


def annotate(block: Block, mesh: DeviceMesh) -> None:
    """Say how the parameters lie on the axis "tp"."""
    kinds = {"up": spmd.S(0), "down": spmd.S(1), "scale": spmd.R, "offset": spmd.I}
    with spmd.set_current_mesh(mesh):
        for name, param in block.named_parameters():
            spmd.assert_type(param, {"dp": spmd.R, "tp": kinds[name]})


def _batch_of_rank(step: int, rank: int) -> Tensor:
    return torch.randn(4, _SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


def _plain_steps(num_ranks: int) -> tuple[Block, list[float]]:
    """Train the whole model on the batches of all ranks of data parallelism."""
    model, norms = Block(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        losses = [model(_batch_of_rank(step, rank)).square().mean() for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def _whole_values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in get_model_state_dict(model).items()}


def _sharded(mesh: DeviceMesh, **options: Any) -> Block:
    model = Block(mesh)
    annotate(model, mesh)
    dims = fsdp2.DataParallelMeshDims(shard="dp")
    return fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)


@needs_axes
@pytest.mark.parametrize("granularity", ["element", "row"])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(4)
def test_parts_train_as_the_whole_model_does(strategy: ShardingStrategy, granularity: str) -> None:
    """Three steps, norms and state dicts; modules see plain parts, at rest there are wholes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected, expected_norms = _plain_steps(2)
    model = _sharded(mesh, strategy=strategy, granularity=granularity)
    assert model.up.shape == (2 * _SIZE, _SIZE)
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(3):
        model(_batch_of_rank(step, mesh.get_local_rank("dp"))).square().mean().backward()
        assert isinstance(model.up.grad, FlatShard)
        norms.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(norms, expected_norms, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        _whole_values(model), dict(expected.state_dict()), rtol=1e-5, atol=1e-5
    )
    with unshard_params(model):
        assert type(model.up.detach()) is Tensor
        assert model.up.shape == (_SIZE, _SIZE)
        part = expected.up.detach().chunk(2)[mesh.get_local_rank("tp")]
        torch.testing.assert_close(model.up.detach(), part, rtol=1e-5, atol=1e-5)
        model.up.detach().mul_(2)
    torch.testing.assert_close(
        _whole_values(model)["up"], 2 * expected.up.detach(), rtol=1e-5, atol=1e-5
    )


@needs_axes
@distributed(4)
def test_gradients_add_up_over_backwards() -> None:
    """Of one step in two halves, the first of which reduces nothing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, expected = _sharded(mesh), Block()
    for half in range(2):
        model.set_requires_gradient_sync(half == 1)
        model(_batch_of_rank(half, mesh.get_local_rank("dp"))).square().mean().backward()
        torch.stack(
            [expected(_batch_of_rank(half, rank)).square().mean() for rank in (0, 1)]
        ).mean().backward()
    for name, param in model.named_parameters():
        found = param.grad.full_tensor()
        torch.testing.assert_close(found, expected.get_parameter(name).grad, rtol=1e-5, atol=1e-5)


def save_parts(path: Path) -> None:
    """Save one step of a model of parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(_batch_of_rank(0, mesh.get_local_rank("dp"))).square().mean().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, step=1)


def load_whole(path: Path) -> dict[str, Tensor]:
    """Load it into a model that is sharded over one axis, of two ranks; return two more steps."""
    model = fsdp2.fully_shard(Block())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_checkpoint(path, model, optimizer)
    for step in (1, 2):
        optimizer.zero_grad()
        model(_batch_of_rank(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
    return _whole_values(model)


@needs_axes
def test_checkpoint_of_parts_is_that_of_the_whole(tmp_path: Path) -> None:
    """Four ranks save in parts, two go on with the whole model."""
    run_ranks(4, save_parts, tmp_path)
    found = run_ranks(2, load_whole, tmp_path)[0]
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        torch.stack(
            [model(_batch_of_rank(step, rank)).square().mean() for rank in (0, 1)]
        ).mean().backward()
        optimizer.step()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-5)


@needs_axes
@distributed(4)
def test_annotations_that_say_too_little_are_refused() -> None:
    """Before anything is changed; then the model is annotated, and is sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = fsdp2.DataParallelMeshDims(shard="dp")
    model = Block(mesh)
    with pytest.raises(NotImplementedError, match=r"'up' is a plain tensor.*axes \['tp'\]"):
        fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(model.up, {"dp": spmd.R})
    with pytest.raises(ValueError, match=r"'up' is annotated on \[\] and not on \['tp'\]"):
        fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    other = Block(mesh)
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(other.up, {"dp": spmd.S(0), "tp": spmd.S(1)})
    with pytest.raises(ValueError, match=r"'up' is annotated with .* axes of data parallelism"):
        fsdp2.fully_shard(other, mesh=mesh, dp_mesh_dims=dims)
    assert all(type(param) is nn.Parameter for param in (*model.parameters(), *other.parameters()))
    last = Block(mesh)
    annotate(last, mesh)
    fsdp2.fully_shard(last, mesh=mesh, dp_mesh_dims=dims)
    assert get_handles(last)


class ExpertsOfRanks(nn.Module):
    """A layer that all ranks share, and one that each rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(_SIZE, _SIZE)
        torch.manual_seed(1 + dist.get_rank())
        self.own = nn.Linear(_SIZE, _SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Compute, with this rank's layer last."""
        return self.own(self.shared(x).tanh())


@distributed(2)
def test_parameters_with_a_mesh_of_their_own() -> None:
    """Gradients of what all share are averaged, those of a rank's own layer are its own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("own", "all"))
    model, expected = ExpertsOfRanks(), ExpertsOfRanks()
    own = set(model.own.parameters())

    def place(param: nn.Parameter) -> Any:
        info = SimpleNamespace(mesh=mesh["own"] if param in own else mesh["all"])
        return SimpleNamespace(placement=Shard(0), mesh_info=info)

    fsdp2.fully_shard(model, mesh=mesh["all"], shard_placement_fn=place)
    assert {handle.shard_group.size for handle in get_handles(model.own)} == {1}
    for each in (model, expected):
        each(_batch_of_rank(0, dist.get_rank())).square().mean().backward()
    for name, param in expected.named_parameters():
        if name.startswith("shared"):
            dist.all_reduce(param.grad)
            param.grad /= 2
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, param.grad, rtol=1e-6, atol=1e-6)
    one = nn.Linear(3, 5)
    other = SimpleNamespace(placement=Shard(0), mesh_info=SimpleNamespace(mesh=mesh["own"]))
    with pytest.raises(NotImplementedError, match=r"a mesh for parameter 'weight' of a Linear"):
        fsdp2.fully_shard(
            one,
            mesh=mesh["all"],
            shard_placement_fn=lambda param: other if param is one.weight else None,
        )
    assert type(one.weight) is nn.Parameter


class WithExperts(nn.Module):
    """A block in parts on one mesh, and a layer that lies on another, of other axes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block = Block(mesh)
        torch.manual_seed(1 + dist.get_rank())
        self.own = nn.Linear(_SIZE, _SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute, with this rank's layer last."""
        return self.own(self.block(x))


@needs_axes
@distributed(4)
def test_parts_on_a_mesh_whose_axes_are_others() -> None:
    """Experts over all four ranks, beside parts over two: each is annotated on its own axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))
    model = WithExperts(mesh)
    annotate(model.block, mesh)
    with spmd.set_current_mesh(sparse):
        spmd.assert_type(model.own.weight, {"edp": spmd.R, "ep": spmd.S(0)})
    dims, of_experts = (fsdp2.DataParallelMeshDims(shard=name) for name in ("dp", "edp"))
    infos = {
        True: SimpleNamespace(mesh=sparse["edp"], spmd_mesh=sparse, dp_mesh_dims=of_experts),
        False: SimpleNamespace(mesh=mesh["dp"], spmd_mesh=mesh, dp_mesh_dims=dims),
    }
    own = model.own.weight

    def place(param: nn.Parameter) -> Any:
        return SimpleNamespace(placement=Shard(0), mesh_info=infos[param is own])

    fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=place)
    assert model.own.weight.shape == (4 * _SIZE, _SIZE)
    assert model.block.up.shape == (2 * _SIZE, _SIZE)
    batch = _batch_of_rank(0, mesh.get_local_rank("dp"))
    model(batch).square().mean().backward()
    torch.manual_seed(1 + dist.get_rank())
    layer = nn.Linear(_SIZE, _SIZE, bias=False)
    layer(Block()(batch)).square().mean().backward()
    found = model.own.weight.grad.full_tensor().chunk(4)[dist.get_rank()]
    torch.testing.assert_close(found, layer.weight.grad, rtol=1e-5, atol=1e-5)
