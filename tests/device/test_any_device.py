"""What asked for the CPU or for CUDA by name works on any accelerator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import fully_shard, get_handles, unshard_params
from composable_shard.comm.devices import is_capturing
from composable_shard.flat_param import storage
from composable_shard.torch_private import timeout_of
from tests.common import device
from tests.device.running import on_device


@on_device(num_ranks=2)
def test_unshard_params_ends() -> None:
    """Parameters of a scope that was left refuse use, and hold no memory of the device."""
    model = nn.Linear(3, 2).to(device.NAME)
    expected = model.weight.detach().clone()
    dist.broadcast(expected, 0)
    fully_shard(model, mesh=init_device_mesh(device.NAME, (2,)), sync_module_states=True)
    with unshard_params(model, writeback=True):
        shown = model.weight
        assert torch.equal(shown, expected)
        shown.data.mul_(2)
    assert torch.equal(model.weight.full_tensor(), 2 * expected)
    with torch._C.DisableTorchFunctionSubclass():
        assert (shown.device.type, shown.untyped_storage().nbytes()) == (device.NAME, 0)
    with pytest.raises(RuntimeError, match="kept beyond its unshard_params scope"):
        shown.sum()


@on_device(num_ranks=2)
def test_reads_of_freed_full_values_raise() -> None:
    """Of a view that a hook keeps, where torch can, as its builds with CUDA can."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))  # on the CPU, where reads would crash
    kept: list[torch.Tensor] = []

    def keep(layer: nn.Module, args: object, output: object) -> None:
        kept.append(layer.weight.detach().t())

    model[0].register_forward_hook(keep)
    mesh = init_device_mesh("cpu", (2,))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh, sync_module_states=True)
    for _ in range(2):
        output = model(torch.ones(2, 3))
        for tensor in kept if storage.refuse_reads else ():
            for read in (torch.clone, torch.sum, torch.Tensor.tolist):
                with pytest.raises(RuntimeError, match="after the unit has freed them"):
                    read(tensor)
        output.sum().backward()
    weight = model[0].weight.full_tensor()
    with unshard_params(model[0]):
        assert torch.equal(model[0].weight, weight)


@on_device
def test_default_group_decides_where_to_compute() -> None:
    """On the accelerator only if the group has a backend for it, other than gloo."""
    expected = {"cpu:gloo": "cpu", "gloo": "cpu", device.NAME: device.NAME}
    for backend, kind in {**expected, device.BACKENDS: device.NAME}.items():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        model = fully_shard(nn.Linear(2, 2))
        assert get_handles(model)[0].shard_group.device.type == kind, backend
        dist.destroy_process_group()


@on_device(num_ranks=2)
def test_a_mesh_takes_a_backend_that_can_not_change_timeouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of gloo and NCCL can; the group's own timeout stays where the backend can't."""
    group = dist.new_group([0, 1])
    backend = group._get_backend(torch.device(device.NAME))
    monkeypatch.delattr(type(backend), "_set_default_timeout", raising=False)
    mesh = DeviceMesh.from_group(group, device.NAME)
    model = fully_shard(nn.Linear(3, 2).to(device.NAME), mesh=mesh)
    model(torch.ones(1, 3, device=device.NAME)).sum().backward()


@on_device(num_ranks=2)
def test_a_mesh_takes_a_backend_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them raises RuntimeError since torch 2.14; another backend's timeout counts."""

    def raise_as_torch_does(backend: object) -> None:
        raise RuntimeError("Backend of a vendor does not implement getBackendOptions.")

    group = dist.new_group([0, 1])
    backend = group._get_backend(torch.device(device.NAME))
    monkeypatch.setattr(type(backend), "options", property(raise_as_torch_does), raising=False)
    mesh = DeviceMesh.from_group(group, device.NAME)
    model = fully_shard(nn.Linear(3, 2).to(device.NAME), mesh=mesh)
    model(torch.ones(1, 3, device=device.NAME)).sum().backward()
    assert timeout_of(group) == group._get_backend(torch.device("cpu")).options._timeout


@on_device
def test_capturing_is_asked_of_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the module of the device's type, which may not know captures at all."""
    here = torch.device(device.NAME)
    assert not is_capturing(here)
    monkeypatch.setattr(torch.lag, "is_current_stream_capturing", lambda: True, raising=False)
    assert is_capturing(here)
    assert not is_capturing(torch.device("cpu"))
