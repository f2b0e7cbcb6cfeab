"""The plan of a new unit: its parameters found and checked, nothing changed yet."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter

from composable_shard.comm import ShardGroup
from composable_shard.construct.split_by_hand import PlainPart, plain_part_of
from composable_shard.flat_param import (
    Extension,
    FlatParamHandle,
    ModuleItems,
    ParamEntry,
    Slot,
    UnshardedParameter,
    find_kept_items,
    find_slots,
    handle_of,
    is_shown_by_scope,
)
from composable_shard.layout import block_numel, is_owned
from composable_shard.options import (
    PRECISIONS,
    Granularity,
    ReshardAfterForward,
    UnitOptions,
    check_reshard_after_forward,
    granularity_of,
)
from composable_shard.runtime import (
    check_can_broadcast,
    class_without_hooks,
    find_applied,
    has_forward,
    iter_unmanaged_modules,
    managed_params,
    read_state,
)
from composable_shard.tensor import FlatShard, refuse_flat_dtensors
from composable_shard.torch_private import (
    buffers_of,
    parameters_of,
    post_accumulate_hooks_of,
    storage_of,
)

FLAT_PARAM_NAME = "_flat_param"


@dataclass(slots=True)  # a plan may have 100,000: slots save objects for the collector
class Original:
    """A parameter that the new unit will manage."""

    param: nn.Parameter
    fqn: str
    place: ModuleItems  # the module in which it was found first, as `name`
    name: str
    further_slots: tuple[Slot, ...] = ()  # places in other modules that share it
    is_kept: bool = False  # in a module that computes in the main dtype
    granularity: Granularity = "element"
    owner: int = 0  # the rank that gets it whole, if `is_owned`
    main_dtype: torch.dtype | None = None  # of the shard, if not the parameter's
    extension: Extension | None = None  # for its class, [Note: Extended gathers]
    plain_part: PlainPart | None = None  # how a plain parameter lies on a mesh, if it is a part

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every place that shows the parameter."""
        return find_slots(self.place, self.name) + self.further_slots

    @property
    def dense(self) -> Tensor:
        """The data to shard: the parameter's, or its local part for a DTensor."""
        values = self.sized
        return values.detach() if self.extension is None else self.extension.values_of(values)

    @property
    def sized(self) -> Tensor:
        """The parameter (of a DTensor its local part), before an extension is unwrapped."""
        return _values_of(self.param)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, in the dtype of the shard."""
        return self.sized.numel() * (self.main_dtype or self.param.dtype).itemsize

    @property
    def is_owned(self) -> bool:
        """Whether one rank gets the parameter whole."""
        return is_owned(self.granularity)

    def strip(self) -> None:
        """Remove attributes of the parameter's own class, which it is about to lose."""
        if self.extension is not None:
            for name in vars(self.extension.wrap(self.dense)):
                vars(self.param).pop(name, None)

    def give_to(self, owner: int) -> None:
        """Set the rank that gets the parameter whole."""
        self.owner = owner

    @property
    def block_numel(self) -> int:
        """Consecutive elements, in memory order, that stay together."""
        if self.granularity == "element":
            return 1
        return block_numel(self.dense, self.granularity)

    @property
    def tensor_parallel(self) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        """The mesh and placements of a DTensor or of a part of one; None for other parameters."""
        if (part := self.plain_part) is not None:
            return part.mesh, part.own_placements
        if type(self.param) is nn.Parameter or not isinstance(self.param, DTensor):
            return None
        return self.param.device_mesh, tuple(self.param.placements)

    @property
    def shape(self) -> torch.Size:
        """The logical shape: of a part, that of the whole."""
        part = self.plain_part
        return self.param.shape if part is None else part.whole_shape(self.param)


@dataclass
class Borrowed:
    """A parameter of another unit that the new unit shows too."""

    handle: FlatParamHandle
    entry: ParamEntry
    slots: tuple[Slot, ...] = ()


@dataclass
class Plan:
    """All that one `fully_shard` call is going to change; nothing has been changed yet."""

    modules: list[nn.Module]
    originals: list[Original]
    borrowed: list[Borrowed]
    unmanaged_modules: list[nn.Module]
    options: UnitOptions
    reshard_after_forward: ReshardAfterForward = None  # for the ranks that share the unit
    kept_modules: list[nn.Module] = field(default_factory=list)  # compute in the main dtype
    ignored: list[Slot] = field(default_factory=list)  # places of `ignored_params`


def plan_unit(
    modules: list[nn.Module],
    options: UnitOptions,
    shard_size: int,
    shard_group: ShardGroup | None,
    inner: Container[nn.Module] = (),
    managed: Container[int] = (),
) -> Plan:
    """Find the parameters that a new unit over `modules` will manage; check them in advance.

    Args:
        shard_group: The ranks that will share the unit; None skips the checks against them.
        inner: Modules to treat as if they were sharded already.
        managed: Ids of parameters to treat as if units of `inner` managed them already.
    """
    _check_modules(modules)
    plan = _find_params(modules, options, inner, managed)
    _find_kept(plan)
    _check_scripted(plan)
    _check_params(plan.originals, shard_group)
    _check_forwards_write_nothing(plan.unmanaged_modules)
    plan.reshard_after_forward = check_reshard_after_forward(
        options.reshard_after_forward, shard_size
    )
    _apply_precision(plan)
    for each in plan.originals:
        each.granularity = granularity_of(each.param, each.fqn, options.granularity)
        if each.extension is not None:
            _give_rows(each)
    if shard_group is not None and options.offload_policy.is_active:
        shard_group.check_host_collectives()
    if not options.use_orig_params:
        _check_can_be_flat(plan)
    if options.sync_module_states and _has_meta_states(plan):
        raise ValueError(
            "sync_module_states=True needs real parameters and buffers, got some on the meta "
            "device. Initialise or load them after fully_shard instead."
        )
    if options.broadcast_buffers:
        check_can_broadcast(plan.unmanaged_modules)
    return plan


def _find_params(
    modules: list[nn.Module],
    options: UnitOptions,
    inner: Container[nn.Module],
    managed: Container[int],
) -> Plan:
    originals: dict[int, Original] = {}
    borrowed: dict[int, Borrowed] = {}
    seen: set[int] = set()
    unmanaged: list[nn.Module] = []
    left_out: list[Slot] = []
    ignored = {id(param) for param in options.ignored_params or ()}
    for root in modules:
        for prefix, module in iter_unmanaged_modules(root, seen=seen, inner=inner):
            others, place = managed_params(module), ModuleItems(module)
            if not others:
                unmanaged.append(module)
            for name, param in parameters_of(module).items():
                fqn = f"{prefix}.{name}".lstrip(".")
                if name in others and (param is None or isinstance(param, FlatShard)):
                    # A module that several parents share: it shows the parameter already.
                    handle, entry = others[name]
                    _check_is_not_inside(root, handle, fqn)
                    if id(entry.sharded) not in ignored:
                        borrowed.setdefault(id(entry.sharded), Borrowed(handle, entry))
                    continue
                if param is None or id(param) in managed:
                    continue
                if id(param) in ignored:
                    left_out += find_slots(place, name)
                elif isinstance(param, FlatShard):
                    item = borrowed.get(id(param)) or _borrow(param, fqn)
                    borrowed.setdefault(id(param), item).slots += find_slots(place, name)
                else:
                    new = Original(param, fqn, place, name, plain_part=plain_part_of(param))
                    known = originals.setdefault(id(param), new)
                    known.further_slots += () if known is new else find_slots(place, name)
    return Plan(
        modules,
        list(originals.values()),
        list(borrowed.values()),
        unmanaged,
        options,
        ignored=left_out,
    )


def _find_kept(plan: Plan) -> None:
    """Find the lists and dicts in which modules of the unit keep its parameters."""
    originals = {id(original.param): original for original in plan.originals}
    for module in plan.unmanaged_modules:
        for param, slot in find_kept_items(module):
            if id(param) in originals:
                originals[id(param)].further_slots += (slot,)


def _check_scripted(plan: Plan) -> None:
    """Check that scripted and traced modules have nothing to shard.

    Their compiled forward reads parameters from a C++ object, whatever Python's attributes show.
    """
    ignored = {id(param) for param in plan.options.ignored_params or ()}
    for module in plan.unmanaged_modules:
        if not isinstance(module, ScriptModule):
            continue
        names = [name for name, param in module.named_parameters() if id(param) not in ignored]
        if names:
            found = [n for root in plan.modules for n, m in root.named_modules() if m is module]
            raise NotImplementedError(
                f"'{found[0]}' is a {type(module).__name__} (torch.jit.script or trace) with the "
                f"parameters {names}, which can't be sharded: its compiled forward reads its own. "
                "Shard the module that it was made from, and torch.compile that, or pass its "
                "parameters in ignored_params and reduce their gradients yourself."
            )


def as_modules(module: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules of one unit: the given ones, without any that is inside another."""
    if isinstance(module, nn.Module):
        return [module]
    modules = list(dict.fromkeys(module if isinstance(module, Iterable) else [module]))
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"expected an nn.Module, got {type(each).__name__}")
    if not modules:
        raise ValueError("expected at least one module, got an empty list")
    inner = {id(child) for root in modules for child in root.modules() if child is not root}
    return [root for root in modules if id(root) not in inner]


def _check_modules(modules: list[nn.Module]) -> None:
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
        if isinstance(module, ScriptModule):
            raise NotImplementedError(
                f"a {kind} (torch.jit.script or trace) can't be a unit: its calls run no hooks in "
                "compiled code. Shard the module that it was made from, or a module around it."
            )
        if not has_forward(module):
            raise ValueError(
                f"{kind} has no forward, so its unit would never be gathered. Pass the modules in "
                "it: `for child in container: fully_shard(child)`, or "
                "`fully_shard(list(container))` to make them one unit."
            )
        if (owner := class_without_hooks(module)) is not None:
            raise NotImplementedError(
                f"{kind} can't be a unit: {owner.__qualname__}.__call__ does not call "
                "nn.Module's, so its calls run no hooks and would never gather the unit. Call "
                "fully_shard on a module around it, whose forward calls it, or call "
                "super().__call__ there."
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


def _borrow(param: FlatShard, fqn: str) -> Borrowed:
    owner = handle_of(param)
    if owner is not None:
        for entry in owner.entries:
            if entry.sharded is param:
                return Borrowed(owner, entry)
    raise ValueError(
        f"parameter '{fqn}' is a FlatShard that no unit manages, a copy perhaps. "
        "Replace it by a plain parameter, for example nn.Parameter(param.full_tensor())."
    )


def _check_is_not_inside(root: nn.Module, handle: FlatParamHandle, fqn: str) -> None:
    if handle.shown.flat_slot.is_around(root):
        raise ValueError(
            f"parameter '{fqn}' is already managed by the unit '{handle.name}' of an outer "
            "module. Call fully_shard on inner modules first, on outer ones last."
        )


def _check_params(originals: list[Original], shard_group: ShardGroup | None) -> None:
    for original in originals:
        param, fqn = original.param, original.fqn
        is_plain = type(param) is nn.Parameter
        if is_shown_by_scope(param) or (not is_plain and isinstance(param, UnshardedParameter)):
            raise ValueError(
                f"parameter '{fqn}' is the full form of one that a unit manages already, shown by "
                "unshard, unshard_params or a forward. Shard before that, inner modules first."
            )
        if not is_plain and isinstance(param, UninitializedParameter):
            raise ValueError(
                f"parameter '{fqn}' has no shape yet (a lazy module). Run one forward before "
                "fully_shard."
            )
        if not is_plain and hasattr(values := _values_of(param), "fsdp_pre_all_gather"):
            original.extension = Extension.of(values)
        is_supported = is_plain or original.extension is not None or _is_supported_type(param)
        if param.layout is not torch.strided or not is_supported:
            own = ", and classes around one dense tensor that have fsdp_pre_all_gather"
            raise NotImplementedError(
                f"parameter '{fqn}' is a {_kind_of(param).__name__} with layout {param.layout}; "
                "only dense tensors and DTensors can be sharded"
                f"{own * (param.layout is torch.strided)}. Pass it in ignored_params."
            )
        if not is_plain and (name := _second_name_of(param)):
            raise NotImplementedError(
                f"parameter '{fqn}', a {type(param).__name__}, has its values a second time as its "
                f"attribute {name!r}, which stays whole. Pass it in ignored_params."
            )
    _check_devices(originals, shard_group)


def _check_forwards_write_nothing(modules: Iterable[nn.Module]) -> None:
    """Refuse modules of torch whose forward writes their own parameters."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise NotImplementedError(
                f"{type(module).__name__}({module.num_embeddings}, {module.embedding_dim}, "
                f"max_norm={module.max_norm}) writes its weight in forward, and such edits of full "
                "parameters are lost. Pass its weight in ignored_params, or set max_norm to None "
                "and limit the norms after each step, inside unshard_params(module)."
            )


def _check_can_be_flat(plan: Plan) -> None:
    """Check that the unit can show a flat parameter instead of its originals."""
    module = plan.modules[0]
    taken = [name for name in dir(module) if name.startswith(FLAT_PARAM_NAME)]
    if taken:
        raise ValueError(
            f"{type(module).__name__} has the attributes {taken}, the names of flat parameters. "
            "Rename them, or pass use_orig_params=True."
        )
    hooked = [o.fqn for o in plan.originals if post_accumulate_hooks_of(o.param)]
    if hooked:
        raise ValueError(
            f"the hooks on the parameters {hooked} (register_post_accumulate_grad_hook) would "
            "never run with use_orig_params=False: only the flat parameter gets a gradient. "
            "Register them on it after fully_shard, or pass use_orig_params=True."
        )
    refuse_flat_dtensors([original.fqn for original in plan.originals if original.tensor_parallel])


def _values_of(param: nn.Parameter) -> Tensor:
    """Return a parameter's values; for a DTensor the local values."""
    if type(param) is nn.Parameter:
        return param
    values = param.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _kind_of(param: nn.Parameter) -> type:
    """Return the class of a parameter's values; for a DTensor the class of the local values."""
    values = _values_of(param) if isinstance(param, DTensor) else param
    is_own = type(values) is nn.Parameter or hasattr(values, "fsdp_pre_all_gather")
    return type(values if is_own else values.data)


def _is_supported_type(param: nn.Parameter) -> bool:
    kind = _kind_of(param)
    is_plain = kind is Tensor or issubclass(kind, nn.Parameter)
    return is_plain and not hasattr(kind, "fsdp_pre_all_gather")


def _second_name_of(param: nn.Parameter) -> str | None:
    """Return the attribute that shares a parameter's memory, as bitsandbytes' `Int8Params` has."""
    if not issubclass(type(param), nn.Parameter):
        return None
    tensors = {name: each for name, each in vars(param).items() if isinstance(each, Tensor)}
    own = storage_of(param)
    return next((name for name, each in tensors.items() if storage_of(each) == own), None)


def _give_rows(original: Original) -> None:
    """Cut a parameter between rows, because its class can encode only whole rows."""
    if original.granularity not in ("element", "row"):
        raise ValueError(
            f"parameter '{original.fqn}' is a {type(original.param).__name__}, whose "
            "fsdp_pre_all_gather takes rows that are divided evenly, got granularity="
            f'{original.granularity!r}. Pass a function that returns "row" for it.'
        )
    original.granularity = "row"


def _check_devices(originals: list[Original], shard_group: ShardGroup | None) -> None:
    by_device: dict[torch.device, list[str]] = {}
    for original in originals:
        by_device.setdefault(original.param.device, []).append(original.fqn)
    if len(by_device) > 1:
        detail = "; ".join(f"{device}: {names}" for device, names in by_device.items())
        raise ValueError(
            f"expected all parameters of a unit on one device, got {detail}. "
            "Move the module to one device before fully_shard."
        )
    if shard_group is None:
        return
    for device, names in by_device.items():
        if device.type not in ("cpu", "meta", shard_group.device.type):
            raise ValueError(
                f"parameters {names} are on {device}, but the mesh is of device type "
                f"'{shard_group.device.type}'. Move them there, or to the CPU, before fully_shard."
            )


def buffers_to_sync(plan: Plan) -> list[Tensor]:
    """Return the buffers that `sync_module_states` broadcasts, beside all parameters."""
    return [
        buffer
        for module in plan.unmanaged_modules
        for buffer in buffers_of(module).values()
        if buffer is not None
    ]


def _has_meta_states(plan: Plan) -> bool:
    states = [*(original.dense for original in plan.originals), *buffers_to_sync(plan)]
    return any(tensor.is_meta for tensor in states)


def _apply_precision(plan: Plan) -> None:
    """Enter into the plan which modules and parameters compute in the main dtype."""
    policy = plan.options.mp_policy
    if policy.main_dtype is not None:
        for original in plan.originals:
            if original.param.dtype not in PRECISIONS:
                allowed = ", ".join(map(str, PRECISIONS))
                raise ValueError(
                    f"expected parameters of {allowed} where main_dtype is given, got "
                    f"'{original.fqn}' of {original.param.dtype}. Pass it in ignored_params, or "
                    "leave main_dtype out for its unit."
                )
            original.main_dtype = policy.main_dtype
    if not policy.changes_compute:
        return
    roots = [each for each in plan.unmanaged_modules if isinstance(each, policy.keep_fp32_classes)]
    inside = {id(module) for root in roots for module in root.modules()}
    inside.intersection_update(map(id, plan.unmanaged_modules))
    below = {id(child) for root in roots for child in root.modules() if child is not root}
    plan.kept_modules = [root for root in roots if id(root) not in below]
    kept = {
        id(param)
        for module in plan.unmanaged_modules
        if id(module) in inside
        for param in parameters_of(module).values()
    }
    for original in plan.originals:
        original.is_kept = id(original.param) in kept
