"""What torch does to a sharded model gives on the device what it gives on the CPU.

An operator that torch composes on the CPU and on CUDA may have a kernel on another accelerator;
then it reaches a `FlatShard` there alone. Others run there alone, for copies between devices.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composable_shard import FlatShard, get_model_state_dict
from tests.common import device
from tests.device.running import on_device
from tests.programs.models import Net, shard_blocks

Values = Iterable[Tensor | None]
Run = Callable[[nn.Module, str], Values]


def _trained_at_rest(model: nn.Module, where: str) -> Values:
    """Return values, and gradients of one step more."""
    dtype = next(model.parameters()).dtype
    output = model(torch.ones(3, 5, device=where, dtype=dtype))
    output.float().square().mean().backward()
    return [output, *model.parameters(), *(param.grad for param in model.parameters())]


def _converted_at_rest(*to: Any, grads: bool = False) -> Run:
    def run(model: nn.Module, where: str) -> Values:
        before = _trained_at_rest(model, where) if grads else ()
        for each in to:
            model.to(where if each == "here" else each)
        return [*before, *_trained_at_rest(model, where)]

    return run


def _under_at_rest(context: Callable[[], AbstractContextManager[None]], run: Run) -> Run:
    def run_under(model: nn.Module, where: str) -> Values:
        with context():
            return run(model, where)

    return run_under


@contextmanager
def _swapping_at_rest() -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _by_name_at_rest(model: nn.Module, where: str) -> Values:
    model.cpu() if where == "cpu" else model.lag()
    return _trained_at_rest(model, where)


def _to_empty_at_rest(model: nn.Module, where: str) -> Values:
    model.to_empty(device=where)
    for param in model.parameters():
        nn.init.ones_(param)
    return _trained_at_rest(model, where)


def _data_at_rest(model: nn.Module, where: str) -> Values:
    for param in model.parameters():
        param.data = torch.full(param.shape, 0.1, device=where)
    return _trained_at_rest(model, where)


def _copied_from_host(model: nn.Module, where: str) -> Values:
    for param in model.parameters():
        param.detach().copy_(torch.full(param.shape, 0.1))
    return _trained_at_rest(model, where)


def _assigned_at_rest(model: nn.Module, where: str) -> Values:
    model.load_state_dict(model.state_dict(), assign=True)
    return _trained_at_rest(model, where)


def _on_host_at_rest(model: nn.Module, where: str) -> Values:
    found = [param.to("cpu", non_blocking=True) for param in model.parameters()]
    torch.accelerator.synchronize()
    return found


def _pickled_at_rest(model: nn.Module, where: str) -> Values:
    return [pickle.loads(pickle.dumps(param)) for param in model.parameters()]


def _saved_at_rest(**options: Any) -> Run:
    def run(model: nn.Module, where: str) -> Values:
        file = io.BytesIO()
        torch.save({name: param.to_local() for name, param in model.named_parameters()}, file)
        file.seek(0)
        return list(torch.load(file, **options).values())

    return run


def _stepped_at_rest(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Run:
    def run(model: nn.Module, where: str) -> Values:
        optimizer = make(model.parameters(), lr=0.1, **options)
        for _ in range(2):
            _trained_at_rest(model, where)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=options.get("foreach"))
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        return model.parameters()

    return run


def _averaged_at_rest(model: nn.Module, where: str) -> Values:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
        _data_at_rest(model, where)
    return averaged.parameters()


def _saved_while_training(model: nn.Module, where: str) -> Values:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0, device=torch.device("cpu"))
    state = get_model_state_dict(model)
    group = dist.new_group(backend="gloo")
    saved: Any = dcp.async_save(state, checkpoint_id=folder[0], process_group=group)
    saved.result()
    before = [value.clone() for value in state.values()]
    _data_at_rest(model, where)
    dcp.load(state, checkpoint_id=folder[0])
    for found, expected in zip(state.values(), before, strict=True):
        assert torch.equal(found.to_local(), expected.to_local())
    return state.values()


FUNCTIONS: dict[str, Run] = {
    "to float64": _converted_at_rest(torch.float64),
    "to bfloat16, with gradients": _converted_at_rest(torch.bfloat16, torch.float32, grads=True),
    "to the device": _converted_at_rest("here"),
    "to the host and back, with gradients": _converted_at_rest("cpu", "here", grads=True),
    "to float64, swapping": _under_at_rest(_swapping_at_rest, _converted_at_rest(torch.float64)),
    "back, swapping": _under_at_rest(
        _swapping_at_rest, _converted_at_rest("cpu", "here", grads=True)
    ),
    "by the device's name": _by_name_at_rest,
    "to_empty": _to_empty_at_rest,
    "data": _data_at_rest,
    "copy_ from the host": _copied_from_host,
    "load, assigning": _assigned_at_rest,
    "to the host, not blocking": _on_host_at_rest,
    "deepcopy": lambda model, where: _trained_at_rest(copy.deepcopy(model), where),
    "pickle": _pickled_at_rest,
    "save": _saved_at_rest(),
    "save, then to the host": _saved_at_rest(map_location="cpu"),
    "AdamW in one kernel": _stepped_at_rest(torch.optim.AdamW, fused=True),
    "AdamW over lists": _stepped_at_rest(torch.optim.AdamW, foreach=True, amsgrad=True),
    "AdamW": _stepped_at_rest(torch.optim.AdamW, foreach=False),
    "SGD": _stepped_at_rest(torch.optim.SGD, momentum=0.9),
    "averages": _averaged_at_rest,
    "dcp.async_save": _saved_while_training,
}


@on_device(num_ranks=2)
def test_torch_treats_shards_as_on_the_cpu() -> None:
    """By value, each function of the table."""
    wrong = []
    for name, run in FUNCTIONS.items():
        on_cpu, there = (_values_at_rest(run, where) for where in ("cpu", device.NAME))
        for one, other in zip(on_cpu, there, strict=True):
            if one.dtype != other.dtype or not torch.allclose(one, other, atol=1e-6):
                wrong.append(name)
                break
        device.check_races()
    assert not wrong


def _values_at_rest(run: Run, where: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(1).to(where)
    shard_blocks(model, mesh=init_device_mesh(where, (dist.get_world_size(),)))
    found = list(run(model, where))
    plain = [value.to_local() if isinstance(value, FlatShard) else value for value in found]
    return [value.detach().cpu() for value in plain if value is not None]
