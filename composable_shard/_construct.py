"""From a module's original parameters to handles and a state: validate everything, then change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parameter import UninitializedParameter

from composable_shard import _collectives
from composable_shard._buffers import watch_meta_buffers
from composable_shard._contract import find_applied, read_state
from composable_shard._flat_param import FlatParamHandle, ParamEntry
from composable_shard._flat_shard import FlatShard
from composable_shard._layout import FlatLayout
from composable_shard._mesh import ShardGroup
from composable_shard._shard_spec import ParamLabel, ShardSpec
from composable_shard._state import ShardState
from composable_shard._storage import Slot, dense_stride, find_slots, swap_parameter
from composable_shard._traversal import iter_unmanaged_modules

__all__ = ["Plan", "build_state", "plan_unit", "sync_states"]


@dataclass
class _Original:
    """A parameter that the new unit will manage."""

    param: nn.Parameter
    fqn: str
    slots: list[Slot] = field(default_factory=list)

    @property
    def dense(self) -> Tensor:
        """The data to shard: the parameter's, or its local part for a DTensor."""
        return self.param.to_local() if isinstance(self.param, DTensor) else self.param.detach()

    @property
    def tensor_parallel(self) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        if not isinstance(self.param, DTensor):
            return None
        return self.param.device_mesh, tuple(self.param.placements)


@dataclass
class _Borrowed:
    """A parameter of another unit that the new unit shows too."""

    handle: FlatParamHandle
    entry: ParamEntry
    slots: list[Slot] = field(default_factory=list)


@dataclass
class Plan:
    """What one `fully_shard` call is going to change; nothing has been changed yet."""

    modules: list[nn.Module]
    originals: list[_Original]
    borrowed: list[_Borrowed]
    unmanaged_modules: list[nn.Module]


def plan_unit(
    modules: list[nn.Module], shard_group: ShardGroup, ignored_params: set[nn.Parameter]
) -> Plan:
    """Find what a new unit over `modules` will manage, and check that it can.

    Raises:
        ValueError: For modules and parameters that can't be sharded, naming them.
        NotImplementedError: For kinds of parameters that are not supported.
        RuntimeError: For parameters that a live autograd graph refers to.
    """
    _check_modules(modules)
    originals: dict[int, _Original] = {}
    borrowed: dict[int, _Borrowed] = {}
    seen: set[int] = set()
    unmanaged: list[nn.Module] = []
    ignored = {id(param) for param in ignored_params}
    for root in modules:
        for prefix, module in iter_unmanaged_modules(root, seen=seen):
            unmanaged.append(module)
            for name, param in module._parameters.items():
                if param is None or id(param) in ignored:
                    continue
                fqn = f"{prefix}.{name}".lstrip(".")
                slots = find_slots(module, name)
                if isinstance(param, FlatShard):
                    item = borrowed.get(id(param)) or _borrow(param, fqn)
                    _check_not_managed(item, slots, fqn)
                    borrowed.setdefault(id(param), item).slots += slots
                else:
                    original = originals.setdefault(id(param), _Original(param, fqn))
                    original.slots += slots
    _check_params(list(originals.values()), shard_group)
    return Plan(modules, list(originals.values()), list(borrowed.values()), unmanaged)


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("expected at least one module, got an empty list")
    for module in modules:
        kind = type(module).__name__
        if read_state(module) is not None:
            raise ValueError(
                f"fully_shard was already applied to this {kind}; it can be applied to a module "
                "only once. To change its options, build the model anew."
            )
        applied = find_applied(module)
        if applied is not None:
            raise ValueError(
                f"torch's composable '{applied}' was already applied to this {kind}; "
                "a module can have only one data-parallel API"
            )
        # torch.compile(module) has one as an attribute.
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            raise ValueError(
                f"{kind} has no forward, so its unit would never be gathered. Pass the modules in "
                "it: `for child in container: fully_shard(child)`, or "
                "`fully_shard(list(container))` to make them one unit."
            )
        for name, child in module.named_modules():
            if isinstance(child, (FSDPModule, FullyShardedDataParallel)):
                raise ValueError(
                    f"'{name or kind}' is sharded by torch's FSDP already; "
                    "shard a tree with one library only"
                )
            if name and find_applied(child) == "replicate":
                raise ValueError(
                    f"'{name}' is managed by torch's composable 'replicate' already, which would "
                    "reduce its gradients a second time. Apply only one of the two to it."
                )


def _borrow(param: FlatShard, fqn: str) -> _Borrowed:
    owner = None if param._guard is None or param._guard.owner is None else param._guard.owner()
    entries = owner.entries if isinstance(owner, FlatParamHandle) else []
    for entry in entries:
        if entry.sharded is param:
            assert isinstance(owner, FlatParamHandle)
            return _Borrowed(owner, entry)
    raise ValueError(
        f"parameter '{fqn}' is a FlatShard that no unit manages, a copy perhaps. "
        "Replace it by a plain parameter, for example nn.Parameter(param.full_tensor())."
    )


def _check_not_managed(item: _Borrowed, slots: list[Slot], fqn: str) -> None:
    managed = {(id(container), key) for container, key in item.entry.slots}
    if any((id(container), key) in managed for container, key in slots):
        raise ValueError(
            f"parameter '{fqn}' is already managed by the unit '{item.handle.name}' of an outer "
            "module. Call fully_shard on inner modules first, on outer ones last."
        )


def _check_params(originals: list[_Original], shard_group: ShardGroup) -> None:
    for original in originals:
        param, fqn = original.param, original.fqn
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"parameter '{fqn}' has no shape yet (a lazy module). Run one forward before "
                "fully_shard."
            )
        if not (param.is_floating_point() or param.is_complex()):
            raise ValueError(
                f"expected floating-point or complex parameters, got '{fqn}' of {param.dtype}. "
                "Register it as a buffer, or pass it in ignored_params."
            )
        if param.layout is not torch.strided or not _is_supported_type(param):
            raise NotImplementedError(
                f"parameter '{fqn}' is a {type(param).__name__} with layout {param.layout}; only "
                "dense tensors and DTensors can be sharded. Pass it in ignored_params."
            )
        if param._use_count() > 1:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"parameter '{fqn}' is part of a live autograd graph (an output of an earlier "
                "forward, an old-style weight_norm). Delete the outputs, or remove the "
                "parametrisation, before fully_shard."
            )
    _check_devices(originals, shard_group)


def _is_supported_type(param: nn.Parameter) -> bool:
    data_type = type(param.data) if type(param) is not nn.Parameter else Tensor
    return data_type is Tensor or issubclass(data_type, (nn.Parameter, DTensor))


def _check_devices(originals: list[_Original], shard_group: ShardGroup) -> None:
    by_device: dict[torch.device, list[str]] = {}
    for original in originals:
        by_device.setdefault(original.param.device, []).append(original.fqn)
    if len(by_device) > 1:
        detail = "; ".join(f"{device}: {names}" for device, names in by_device.items())
        raise ValueError(
            f"expected all parameters of a unit on one device, got {detail}. "
            "Move the module to one device before fully_shard."
        )
    for device, names in by_device.items():
        if device.type not in ("cpu", "meta", shard_group.device.type):
            raise ValueError(
                f"parameters {names} are on {device}, but the mesh is of device type "
                f"'{shard_group.device.type}'. Move them there, or to the CPU, before fully_shard."
            )


def sync_states(plan: Plan, shard_group: ShardGroup) -> None:
    """Give every rank the parameters and buffers of the group's rank 0: one broadcast each.

    Raises:
        ValueError: If something is on the meta device, on any rank alike.
    """
    tensors = [original.dense for original in plan.originals]
    tensors += [
        buffer
        for module in plan.unmanaged_modules
        for buffer in module._buffers.values()
        if buffer is not None
    ]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            "sync_module_states=True needs real parameters and buffers, got some on the meta "
            "device. Initialise or load them after fully_shard instead."
        )
    for tensor in tensors:
        staged = tensor.to(shard_group.device).contiguous()
        _collectives.broadcast(staged, 0, shard_group.group).wait()
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)


def build_state(
    plan: Plan, shard_group: ShardGroup, name: str, reshard_after_forward: bool | None
) -> ShardState:
    """Carry out the plan: build handles, and put FlatShards into the original parameters.

    All memory is allocated before the first parameter is changed.
    """
    groups: dict[object, list[_Original]] = {}
    for original in plan.originals:
        param, tensor_parallel = original.param, original.tensor_parallel
        mesh = None if tensor_parallel is None else tensor_parallel[0]
        kind = (param.dtype, param.requires_grad, mesh)
        groups.setdefault(kind, []).append(original)
    state = ShardState(name, reshard_after_forward, len(plan.modules))
    built = [(members, _build_handle(members, shard_group)) for members in groups.values()]
    for members, handle in built:
        for original, entry in zip(members, handle.entries, strict=True):
            entry.slots = original.slots
            _replace_parameter(original.param, entry)
        state.handles.append(handle)
    for item in plan.borrowed:
        item.entry.slots = item.entry.slots + item.slots
        item.handle.index_slots()
        if item.handle not in state.borrowed:
            state.borrowed.append(item.handle)
    for module in plan.unmanaged_modules:
        _place_buffers(module, shard_group.device)
        if isinstance(module, nn.RNNBase) and shard_group.device.type != "cpu":
            # cuDNN's flattening would move our views into a buffer of its own.
            module.flatten_parameters = _keep_parameters  # type: ignore[method-assign]
    return state


def _keep_parameters() -> None:
    """Stand in for `flatten_parameters` of an RNN whose weights live in a flat parameter."""


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    watch_meta_buffers(module)
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def _build_handle(members: list[_Original], shard_group: ShardGroup) -> FlatParamHandle:
    labels = [ParamLabel(original.fqn) for original in members]
    dense = [original.dense for original in members]

    def specs(layout: FlatLayout) -> list[ShardSpec]:
        return [
            ShardSpec(
                shape=original.param.shape,
                dense_shape=tensor.shape,
                dense_stride=dense_stride(tensor),
                offset=offset,
                shard_numel=layout.shard_numel,
                world_size=shard_group.size,
                rank=shard_group.rank,
                group_name=shard_group.name,
                tensor_parallel=original.tensor_parallel,
                label=label,
            )
            for original, tensor, offset, label in zip(
                members, dense, layout.offsets, labels, strict=True
            )
        ]

    return FlatParamHandle(
        dense, labels, shard_group, specs, requires_grad=members[0].param.requires_grad
    )


def _replace_parameter(param: nn.Parameter, entry: ParamEntry) -> None:
    """Turn the original Parameter object into the FlatShard; attributes and `.grad` carry over."""
    grad, hooks = param.grad, param._backward_hooks
    late_hooks = param._post_accumulate_grad_hooks
    param.grad = None
    replacement = entry.sharded
    replacement.__dict__.update(
        {key: value for key, value in param.__dict__.items() if key not in replacement.__dict__}
    )
    swap_parameter(param, replacement)
    entry.sharded = param  # type: ignore[assignment]
    if hooks:
        param._backward_hooks = hooks
    if late_hooks:
        param._post_accumulate_grad_hooks = late_hooks
    if grad is not None:
        param.grad = FlatShard.from_full(grad, entry.spec)


def as_modules(module: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of one unit: those given, less those inside another one given.

    Raises:
        ValueError: If something given is not a module.
    """
    if isinstance(module, nn.Module):
        return [module]
    modules = list(dict.fromkeys(module))
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"expected an nn.Module, got {type(each).__name__}")
    inner = {id(child) for root in modules for child in root.modules() if child is not root}
    return [root for root in modules if id(root) not in inner]
