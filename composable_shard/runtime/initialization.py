"""Lazy initialization: buffers, hooks, and a comparison with the other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard.comm import (
    FlagReduction,
    Ranks,
    ShardGroup,
    compare_units,
    exchange_always,
)
from composable_shard.flat_param import (
    FlatParamHandle,
    drop_gradient,
    has_gradient_hooks,
    settle_owners,
)
from composable_shard.runtime.aborted import next_backward_id
from composable_shard.runtime.backward import on_gradient
from composable_shard.runtime.membership import has_other_units, renew_context, share_context
from composable_shard.runtime.open_graphs import alive
from composable_shard.runtime.reduction_order import ReductionOrder
from composable_shard.runtime.tree import (
    find_reader,
    find_unmanaged,
    get_states,
    note_contents,
    raise_unmanaged,
    read_state,
)
from composable_shard.runtime.unit import ShardState, StateRef, TreeContext
from composable_shard.torch_private import DisableTorchFunctionSubclass, buffers_of, version_of


def attach_or_refresh(state: ShardState) -> None:
    """Give a unit's handles buffers and hooks, and adopt changes of their sharded parameters.

    Local and idempotent: touches no tensor if nothing has changed.
    """
    for handle in state.handles:
        if not handle.is_attached:
            handle.guard.let_find_reader(partial(find_reader, weakref.ref(handle)))
            handle.attach(partial(on_gradient, state.ref), drop_gradient)
        handle.adopt_changes()
    for handle in state.borrowed:
        handle.adopt_changes()


def lazy_init(module: nn.Module) -> None:
    """Do now what otherwise happens at the first forward of `module`.

    Allocates buffers, adopts parameters that `.to()` or `to_empty()` gave new data, and checks that
    all ranks shard the same model in the same way. The first call issues one small all-gather for
    each process group, and a broadcast of each shard to the ranks that hold copies of it, so that
    replicas start equal. A second call touches no tensor.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, parameters are still on the meta device, no unit
            manages a trainable parameter of `module` that is not in any unit's `ignored_params`,
            or buffers have not been initialised after `to_empty()`.
    """
    initialize(module)


def initialize(module: nn.Module, callers: Sequence[nn.Module] = ()) -> None:
    """Do what `lazy_init` does, for a call of `module` inside calls of `callers`."""
    lazy_init_params(module, callers, has_values=True)
    contexts = [state.context for state in get_states(module) if state.context is not None]
    unchecked = list(dict.fromkeys(context for context in contexts if not context.is_checked))
    if unchecked:
        modules = [*callers, *_outermost(unchecked, module)]
        _check_buffers(modules)
        if unmanaged := find_unmanaged(modules):  # a scope may have compared the ranks before
            raise_unmanaged(unmanaged, get_states(module))
        for context in unchecked:
            _place_buffers(context)
            context.graphs.last_backward_id = next_backward_id()
            _watch(context, [*callers, module][0])
            context.is_checked = True  # last: an interrupt before leaves all to the next call


def _watch(context: TreeContext, outermost: nn.Module) -> None:
    """Note what is in a tree, and what is in an unsharded module around it."""
    modules = alive(context.modules)
    around = modules if read_state(outermost) is not None else [outermost]
    context.around = dict.fromkeys(map(weakref.ref, around))
    for module in dict.fromkeys([*modules, *around]):
        note_contents(module)


def lazy_init_params(
    module: nn.Module, callers: Sequence[nn.Module] = (), *, has_values: bool = False
) -> None:
    """Do what `lazy_init` does, except for buffers, which a scope may be about to initialise.

    Args:
        module: As for `lazy_init`.
        callers: Modules around it whose calls are running, outermost first.
        has_values: Whether all parameters have their values; a scope may be about to shard some.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, parameters are still on the meta device, or with
            `has_values` no unit manages a trainable parameter, see [Note: Whole model].
    """
    states = get_states(module)
    if not states:
        raise ValueError(
            f"expected a module with sharded units, got {type(module).__name__}: "
            "call fully_shard on it or on modules inside it first"
        )
    if any(state.context is None for state in states):
        share_context([module])
    contexts = list(dict.fromkeys(state.context for state in states if state.context))
    for context in contexts:
        is_idle = context.call is None and context.backward is None
        if is_idle and not context.has_agreed and has_other_units(context):
            renew_context(context)
    contexts = list(dict.fromkeys(state.context for state in states if state.context))
    _fix_owners([context for context in contexts if not context.has_agreed])
    # Whole trees: a unit may borrow parameters of one that is not in `module`.
    for state in [state for context in contexts for state in context.live_states()]:
        attach_or_refresh(state)
    unchecked = [context for context in contexts if not context.has_agreed]
    if unchecked:
        _check_trees(unchecked, [*callers, *_outermost(unchecked, module)], has_values)


def _fix_owners(contexts: list[TreeContext]) -> None:
    """Fix the owner of each whole parameter, see [Note: Owners of whole parameters]."""
    states = [state for context in contexts for state in context.live_states()]
    handles = [handle for state in states for handle in state.handles]
    if not all(handle.has_fixed_owners for handle in handles):
        # The ranks compare everything soon, which finds a rank with a different plan.
        if any(handle.layout.owners for handle in handles):
            settle_owners(handles, always_compare=False)
        for handle in handles:
            handle.fix_owners()


def _outermost(contexts: list[TreeContext], module: nn.Module) -> list[nn.Module]:
    # Outermost modules first, for the longest names.
    return [root for context in contexts for root in alive(context.modules)] + [module]


def _check_trees(contexts: list[TreeContext], modules: list[nn.Module], has_values: bool) -> None:
    """Check whole trees, and all of `modules`, whichever was called first."""
    for context in contexts:
        for state in context.live_states():
            for handle in state.handles:
                handle.check_ready()
                handle.shown.check_registered()
    unmanaged = find_unmanaged(modules) if has_values else []  # a scope shows sharded ones only
    for context in contexts:
        _check_agreement(context.live_states(), unmanaged)
        # Ranks that initialised copies of a shard differently would train different models.
        for state in context.live_states():
            for handle in state.handles:
                handle.shard.copy_to_replicas()
    for context in contexts:
        context.has_agreed = True
        exchange_always(_always_checked(context.live_states()))
        for handle in context.live_handles():
            handle.shown.note_agreement()
            handle.guard.take_new()  # ranks may have initialised by themselves
        if any(handle.grads.is_persistent for handle in context.live_handles()):
            context.reduction_order = ReductionOrder()


def _always_checked(states: list[ShardState]) -> list[dist.ProcessGroup]:
    """Return the groups of units with `check_order="always"`."""
    checked = [state for state in states if state.options.check_order == "always"]
    groups = [handle.shard_group for state in checked for handle in state.handles]
    return [each for one in groups for each in (*one.groups, *one.joint_groups)]


def _check_buffers(modules: list[nn.Module]) -> None:
    names = {
        id(buffer): name
        for module in reversed(modules)
        for name, buffer in module.named_buffers()
        if is_never_written(buffer)
    }
    if names:
        raise RuntimeError(
            f"buffers {list(names.values())} were never initialised after to_empty(): they hold "
            "arbitrary values. Compute them again (reset_parameters() or the code that made them) "
            "or load them."
        )


def _place_buffers(context: TreeContext) -> None:
    """Move buffers to the device: `to_empty(device="cpu")` for offloaded shards moved them too."""
    handles = [handle for state in context.live_states() for handle in state.handles]
    if any(handle.offload.is_active for handle in handles):
        for root in alive(context.modules):
            for module in root.modules():
                place_buffers(module, handles[0].shard_group.device)


_Groups = tuple[dist.ProcessGroup, ...]


def _check_agreement(states: list[ShardState], unmanaged: list[str]) -> None:
    """Compare names, shapes, dtypes and options of all units over their data-parallel ranks.

    Also compares the buffers that are broadcast, the trainable parameters that no unit manages, and
    the initial values.

    Issues one all-gather of 32 bytes for each process group. If it finds a difference, the
    descriptions themselves are exchanged, as JSON. If any rank has hooks on gradients, one
    all-reduce of a byte for each handle informs all ranks. [Note: Early gradients]

    Raises:
        RuntimeError: The same on all ranks of the mesh, naming the first difference and the ranks,
            or the parameters that no unit manages.
    """
    meshes: dict[_Groups, _Mesh] = {}

    def mesh_of(shard_group: ShardGroup) -> _Mesh:
        return meshes.setdefault(shard_group.joint_groups, _Mesh(shard_group.ranks))

    for state in states:
        if state.buffers is not None:
            lines = mesh_of(state.buffers.shard_group).lines
            lines.extend(f"{line} {describe_options(state)}" for line in state.buffers.describe())
        for handle in state.handles:
            mesh = mesh_of(handle.shard_group)
            mesh.handles.append(handle)
            mesh.lines.extend(handle.describe_entries(describe_options(state)))
            mesh.initial.extend(handle.initial.take())
    for mesh in meshes.values():
        mesh.lines.extend(f"'{name}' is managed by no unit" for name in unmanaged)
        # Last: a difference in what the ranks have built says more.
        mesh.lines.extend(f"{h.label.text} of the units over these ranks" for h in mesh.handles)
        has_hooks = [has_gradient_hooks(handle.shown) for handle in mesh.handles]
        any_hooks = compare_units(mesh.ranks, mesh.lines, any(has_hooks), mesh.initial)
        mesh.note_number()
        if any_hooks:
            flags = FlagReduction(
                [
                    (handle.shard_group, [int(flag)])
                    for handle, flag in zip(mesh.handles, has_hooks, strict=True)
                ],
                highest=1,
            )
            for handle, (flag,) in zip(mesh.handles, flags.finish(), strict=True):
                handle.shown.note_early_hooks(bool(flag))
    if unmanaged:
        raise_unmanaged(unmanaged, states)


def describe_options(state: ShardState) -> str:
    """Return the options that all ranks must agree on."""
    text = (
        f"in unit '{state.name}' strategy={state.options.strategy.name} "
        f"reshard_after_forward={state.settings.reshard_after_forward}{state.options.describe()}"
    )
    settings: dict[str, object] = {
        "comm_hook": state.handles and state.handles[0].grads.reduction.hook_name,
        "gradient_divide_factor": state.handles and state.handles[0].grads.reduction.divide_factor,
        "keeps_after_backward": [
            handle.name for handle in state.handles if not handle.reshards_after_backward
        ],
        "changed_registration": [
            handle.name
            for handle in state.handles
            if handle.shown.shows_flat is state.options.use_orig_params
        ],
        "no_gradient_sync": not state.settings.requires_gradient_sync,
        "no_all_reduce": not state.settings.requires_all_reduce,
        "is_not_last_backward": not state.settings.is_last_backward,
        "no_unshard_in_backward": not state.settings.unshard_in_backward,
        "forward_prefetch": _names_of(state, state.settings.forward_prefetch),
        "backward_prefetch": _names_of(state, state.settings.backward_prefetch),
    }
    return text + "".join(f" {name}={value}" for name, value in settings.items() if value)


def _names_of(state: ShardState, chosen: tuple[StateRef, ...] | None) -> str:
    """Return the names of units, "" where the user has chosen none."""
    return "" if chosen is None else str([each.name for each in state.in_tree(chosen)])


@dataclass
class _Mesh:
    """Descriptions of units that must be equal on all ranks of some process groups."""

    ranks: Ranks
    handles: list[FlatParamHandle] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    initial: list[tuple[str, int | None]] = field(default_factory=list)

    def note_number(self) -> None:
        """Note the number of the collective in which the ranks have just compared the handles."""
        number = self.ranks.num_collectives
        for handle in self.handles:
            handle.label.note_call(number)


_MARK = "_composable_shard_empty_version"


class _MetaBuffer(Tensor):
    """A meta tensor that marks results of `empty_like`, which `to_empty()` calls."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; fill and mark the result of `torch.empty_like`."""
        if func is not torch.empty_like:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not result.is_meta:
                _fill(result)
                setattr(result, _MARK, _version_of(result))
        return result


def _fill(tensor: Tensor) -> None:
    """Fill with a value that spoils results and that real buffers hardly ever hold everywhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _version_of(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else version_of(buffer)


def watch_meta_buffers(module: nn.Module) -> None:
    """Replace the meta-device buffers that `module` itself holds by ones that `to_empty` marks."""
    for name, buffer in buffers_of(module).items():
        if buffer is not None and buffer.is_meta and type(buffer) is Tensor:
            buffers_of(module)[name] = buffer.as_subclass(_MetaBuffer)


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers that `module` itself holds to a device; meta buffers stay.

    Those that were made under `torch.inference_mode` become ordinary ones, which can be written.
    """
    for name, buffer in buffers_of(module).items():
        if buffer is None or buffer.is_meta:
            continue
        if buffer.device != device:
            buffers_of(module)[name] = buffer.to(device)
        elif buffer.is_inference():
            buffers_of(module)[name] = buffer.clone()


def is_never_written(buffer: Tensor) -> bool:
    """Return whether a buffer came from `to_empty()` and was not written since.

    The version counter shows in-place writes, the values show writes through `.data`.
    """
    mark = getattr(buffer, _MARK, None)
    if mark is None or mark != _version_of(buffer) or buffer.numel() == 0:
        return False
    expected = torch.empty_like(buffer)
    _fill(expected)
    return (
        torch.equal(buffer.isnan(), expected.isnan())
        if (buffer.is_floating_point() or buffer.is_complex())
        else torch.equal(buffer, expected)
    )
