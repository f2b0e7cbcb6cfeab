"""The plan of a new unit: its parameters found and checked, nothing changed yet."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor, nn

from composable_shard.comm import ShardGroup
from composable_shard.construct.checks import (
    check_forwards_write_nothing,
    check_modules,
    check_params,
    check_scripted,
)
from composable_shard.construct.originals import Borrowed, Original, Plan
from composable_shard.construct.split_by_hand import plain_part_of
from composable_shard.flat_param import (
    FlatParamHandle,
    ModuleItems,
    Slot,
    balance_owners,
    find_kept_items,
    find_slots,
    handle_of,
)
from composable_shard.options import (
    PRECISIONS,
    UnitOptions,
    check_reshard_after_forward,
    granularity_of,
)
from composable_shard.runtime import (
    check_can_broadcast,
    iter_unmanaged_modules,
    managed_params,
)
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    buffers_of,
    modules_in,
    named_modules_in,
    parameters_of,
)


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
    walks = [named_modules_in(module) for module in modules]
    check_modules(walks)
    plan = _find_params(modules, walks, options, inner, managed)
    _find_kept(plan)
    check_scripted(plan)
    # First of what reads values: it finds the extensions, without which `dense` is the wrapper.
    check_params(plan.originals, shard_group)
    check_forwards_write_nothing(plan.unmanaged_modules)
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
    plan.form.check(
        modules[0],
        [(each.fqn, each.param) for each in plan.originals],
        [each.fqn for each in plan.originals if each.tensor_parallel],
    )
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
    walks: list[list[tuple[str, nn.Module]]],
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
        walks,
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


def set_owners(
    plan: Plan,
    inner: Sequence[FlatParamHandle],
    shard_group: ShardGroup,
    owners: Mapping[nn.Parameter, int] | None,
    undo: ExitStack,
) -> None:
    """Enter the owners of whole parameters into the plan, before anything is built.

    Without `owners` they are balanced together with those of `inner`, the handles of all units
    inside, which may move: `undo` gets what moves them back.
    """
    whole = [original for original in plan.originals if original.is_owned]
    if owners is None:
        if not whole and not any(handle.layout.owners for handle in inner):
            return
        sizes = [original.nbytes for original in whole]
        found = balance_owners(inner, shard_group, sizes, undo=undo)
    else:
        found = [owners[original.param] for original in whole]
    for original, owner in zip(whole, found, strict=True):
        original.give_to(owner)


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
    inner = {id(child) for root in modules for child in modules_in(root) if child is not root}
    return [root for root in modules if id(root) not in inner]


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
    if handle.shown.is_around(root):
        raise ValueError(
            f"parameter '{fqn}' is already managed by the unit '{handle.name}' of an outer "
            "module. Call fully_shard on inner modules first, on outer ones last."
        )


def _give_rows(original: Original) -> None:
    """Cut a parameter between rows, because its class can encode only whole rows."""
    if original.granularity not in ("element", "row"):
        raise ValueError(
            f"parameter '{original.fqn}' is a {type(original.param).__name__}, whose "
            "fsdp_pre_all_gather takes rows that are divided evenly, got granularity="
            f'{original.granularity!r}. Pass a function that returns "row" for it.'
        )
    original.granularity = "row"


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
    inside = {id(module) for root in roots for module in modules_in(root)}
    inside.intersection_update(map(id, plan.unmanaged_modules))
    below = {id(child) for root in roots for child in modules_in(root) if child is not root}
    plan.kept_modules = [root for root in roots if id(root) not in below]
    kept = {
        id(param)
        for module in plan.unmanaged_modules
        if id(module) in inside
        for param in parameters_of(module).values()
    }
    for original in plan.originals:
        original.is_kept = id(original.param) in kept
