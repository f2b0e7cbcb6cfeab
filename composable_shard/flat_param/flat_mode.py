"""Switch a handle between its two forms at rest: original parameters, or one flat parameter.

Gradients that wait for a reduction between two backwards are shown in either form.

[Note: Pending gradients] says what users see of them. A backward begins with `settle_pending`,
which drops gradients set to None since, and ends with `mark_pending`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, count
from typing import cast

import torch
from torch import Tensor, nn

from composable_shard.flat_param.entries import FlatEntry
from composable_shard.flat_param.grad_pieces import (
    checked_gradient,
    local_gradient,
    move_shard,
    note_used,
    wrap_all,
)
from composable_shard.flat_param.grad_pieces import set_gradients as add_gradients
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.kept_params import ALL
from composable_shard.flat_param.param_classes import UnshardedParameter
from composable_shard.flat_param.shown import check_flags, take_flags
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
    flat_spec,
    hide_pending,
    own_gradient,
    reduced_gradient,
    set_gradient,
    show_pending,
    wrap,
)
from composable_shard.torch_private import post_accumulate_hooks_of


def needs_reduction(handle: FlatParamHandle) -> bool:
    """Return whether gradients of the handle wait for a reduction.

    The same on all ranks that ran the same backwards, even if some have dropped gradients since.
    """
    return handle.grads.is_unsynced or handle.grads.reduction.partial is not None


def mark_pending(handle: FlatParamHandle) -> None:
    """Make `.grad` a PendingGradient for each parameter at rest with a waiting gradient."""
    grads, shown = handle.grads, handle.shown
    used = [index for index, is_used in enumerate(grads.used) if is_used]
    if grads.marks or not used:
        return
    if shown.shows_flat and shown.flat is not None:
        flat = shown.flat.sharded
        show_pending(flat)
        grads.marks.append((flat, used))
        return
    for index in used:
        param = handle.entries[index].sharded
        show_pending(param)
        grads.marks.append((param, [index]))


def keep_left_gradients(handle: FlatParamHandle) -> None:
    """Keep gradients that users set on the full parameters, to wait for a reduction."""
    grads = handle.grads
    params = enumerate(entry.unsharded for entry in handle.entries)
    left = [index for index, each in params if each is not None and own_gradient(each) is not None]
    if grads.packing is not None and (left or (True in grads.arrived and not grads.is_unsynced)):
        with torch.inference_mode(False), torch.no_grad():
            settle_pending(handle)
            for index in left:
                grads.pack(index, may_overwrite=False)
            grads.postpone()
            mark_pending(handle)
    handle.full.params.aliases.left.clear()


def settle_pending(handle: FlatParamHandle) -> None:
    """Undo `mark_pending`; drop waiting gradients whose `.grad` users set or deleted since."""
    with torch.no_grad():
        while handle.grads.marks:
            param, indices = handle.grads.marks.pop()
            if not hide_pending(param):
                _drop(handle, indices)


def forget_pending(handle: FlatParamHandle) -> None:
    """Remove all PendingGradients at rest, even after an interrupted `mark_pending`."""
    for each in handle.shown.at_rest:
        hide_pending(each.sharded)
    handle.grads.marks.clear()


def _drop(handle: FlatParamHandle, indices: Iterable[int]) -> None:
    """Drop the waiting gradients of some parameters."""
    grads, partial = handle.grads, handle.grads.reduction.partial
    for index in indices:
        grads.arrived[index] = grads.was_used[index] = False
        if partial is not None:
            start, end = grads.layout.local_range(index, handle.shard_group.rank)
            partial[start:end].zero_()
    if grads.views is not None and True not in grads.arrived:
        grads.close()
        grads.free_buffers()


def drop_gradient(handle: FlatParamHandle, index: int) -> None:
    """Drop the gradient at rest of one parameter, or of `ALL`, also one that waits."""
    flat = handle.shown.flat
    if not handle.shown.shows_flat or flat is None:
        handle.entries[index].sharded.grad = None
        return
    indices = range(len(handle.entries)) if index == ALL else [index]
    with torch.inference_mode(False), torch.no_grad(), settled(handle):
        _drop(handle, indices)
        grad, used = flat.sharded.grad, has_gradients(handle)
        for each in indices:
            used[each] = False
            if isinstance(grad, FlatShard):
                handle.entries[each].slice_of(grad._local).zero_()
        flat.used, flat.sharded.grad = used, None
        if isinstance(grad, FlatShard) and any(used):
            flat.sharded.grad = wrap(grad._local, flat.spec)  # stand-ins know it by its identity


@contextmanager
def settled(handle: FlatParamHandle) -> Iterator[None]:
    """Make `.grad` the reduced part inside the block; PendingGradients are back after it."""
    is_shown = bool(handle.grads.marks)
    try:
        settle_pending(handle)
        yield
    finally:
        if is_shown:
            mark_pending(handle)


def drop_pending(handle: FlatParamHandle) -> None:
    """Drop all waiting gradients; `.grad` keeps the part that was reduced before."""
    settle_pending(handle)
    with torch.no_grad():
        _drop(handle, range(len(handle.entries)))


def pending_values(handle: FlatParamHandle) -> Sequence[Tensor | None]:
    """Return this rank's waiting gradients, for each parameter in its dense shape.

    Each is the sum of the rank's own gradients; for gradients whose all-reduce was postponed, the
    mean over the shard group, which costs one all-gather.
    """
    grads, group = handle.grads, handle.shard_group
    found: list[Tensor | None] = []
    for index, has_arrived in enumerate(grads.arrived):
        value = None
        if grads.views is not None and grads.packing is not None and has_arrived:
            value = (grads.views[index] / grads.packing.scale).to(handle.local_shard.dtype)
        found.append(value)
    partial = grads.reduction.partial
    if partial is None:
        return found
    partial = move_shard(partial, grads.layout, handle.layout, group.rank)
    full = handle.shard.new_full()
    handle.shard.gather_into(full, partial)
    full.mul_((grads.reduction.divide_factor or group.num_ranks) / group.size)
    for index, (entry, is_used) in enumerate(zip(handle.entries, grads.used, strict=True)):
        if is_used:
            spec, start = entry.spec, handle.layout.offsets[index]
            part = full.as_strided(spec.dense_shape, spec.dense_stride, start)
            own = found[index]
            found[index] = part if own is None else own.add_(part)
    return found


def make_flat_entry(handle: FlatParamHandle) -> FlatEntry:
    """Return the flat parameter as one parameter, made at the first call; shows nothing."""
    shown = handle.shown
    if shown.flat is None:
        spec = _flat_spec(handle)
        start, end = spec.local_range
        view = handle.local_shard[: end - start]
        param = nn.Parameter(FlatShard(view, spec, guard=handle.guard), handle.requires_grad)
        used = [False] * len(handle.entries)
        flat = FlatEntry(cast(FlatShard, param), spec, shard_view=view, used=used)
        shown.set_flat(flat, shows_flat=shown.shows_flat)
        return flat
    return shown.flat


def _flat_spec(handle: FlatParamHandle) -> ShardSpec:
    return flat_spec([entry.spec for entry in handle.entries], handle.shown.flat_slot.name)


def check_can_show_flat(handle: FlatParamHandle) -> None:
    """Check that one flat parameter can replace the originals; changes nothing."""
    _flat_spec(handle)
    frozen = [str(e.label) for e in handle.entries if not e.sharded.requires_grad]
    if frozen and len(frozen) < len(handle.entries):
        raise RuntimeError(
            f"the parameters {frozen} of unit '{handle.name}' are frozen and others are not, so "
            "they can't be one flat parameter. Freeze or unfreeze all of them, or shard the frozen "
            "ones as a unit of their own."
        )
    hooked = [str(e.label) for e in handle.entries if post_accumulate_hooks_of(e.sharded)]
    if hooked:
        raise RuntimeError(
            f"the hooks on the parameters {hooked} (register_post_accumulate_grad_hook) would "
            f"never run while unit '{handle.name}' shows one flat parameter. Remove them, and "
            "register them on the flat parameter."
        )
    if not handle.shown.flat_slot.is_free(
        None if handle.shown.flat is None else handle.shown.flat.sharded
    ):
        raise RuntimeError(
            f"the module of unit '{handle.name}' has an attribute "
            f"'{handle.shown.flat_slot.name}', the name of its flat parameter. Rename it."
        )
    if handle.precision.extension is not None and handle.shown.is_unsharded:
        raise RuntimeError(
            f"unit '{handle.name}' shows the full values of a parameter of a class of its own "
            "(fsdp_pre_all_gather), which no flat parameter can stand for. Call reshard(module) "
            "first."
        )
    has_gradients(handle)


def check_can_show_originals(handle: FlatParamHandle) -> None:
    """Check that no hook is lost; changes nothing."""
    handle.shown.adopt_hooks()
    has_gradients(handle)
    if handle.shown.flat is not None and post_accumulate_hooks_of(handle.shown.flat.sharded):
        raise RuntimeError(
            f"the hooks on '{handle.shown.flat.label}' (register_post_accumulate_grad_hook) would "
            f"never run while unit '{handle.name}' shows its original parameters. Remove them, and "
            "register them on the original parameters."
        )


def show_flat(handle: FlatParamHandle) -> None:
    """Show the flat parameter instead of the originals; gradients move. No communication.

    While the full values are registered, the flat parameter of the full values is shown.
    """
    shown, flat = handle.shown, make_flat_entry(handle)
    if not shown.shows_flat:
        shown.flat_slot.keep_reachable(flat.sharded)
        shown.unhide_all()
        flat.sharded.requires_grad = handle.entries[0].sharded.requires_grad
        with torch.no_grad(), settled(handle):
            _move_gradients_to_flat(handle, flat)
            shown.set_flat(flat, shows_flat=True)
        shown.hide_unshown()
        shown.index_slots()
    if shown.is_unsharded and flat.unsharded is None:
        params = handle.full.params
        # Under the version counter of the first parameter, which then shows edits.
        full = params.views[0].as_strided((handle.layout.end,), (1,), 0)
        noted = flat.label, params.aliases, ALL
        flat.unsharded = UnshardedParameter(full, handle.requires_grad, noted)
    shown.show_unsharded_as(flat.unsharded)


def show_originals(handle: FlatParamHandle) -> None:
    """Show the original parameters instead of the flat one; gradients move. No communication."""
    shown, flat = handle.shown, handle.shown.flat
    if not shown.shows_flat or flat is None:
        return  # before the first forward there is no list of slots to show them by
    shown.unhide_all()
    for entry in handle.entries:
        entry.sharded.requires_grad = flat.sharded.requires_grad
    with torch.no_grad(), settled(handle):
        _move_gradients_to_originals(handle, flat)
        shown.set_flat(flat, shows_flat=False)
    shown.hide_unshown()
    shown.index_slots()
    shown.show_unsharded_as(None)
    shown.flat_slot.remove()


def check_requires_grad(handle: FlatParamHandle) -> None:
    """Check that flags set in a scope's body still allow one flat parameter."""
    if handle.shown.scope is not None:
        flags = [param.requires_grad for param in handle.shown.scope.params]
        check_flags(handle.shown, flags, handle.name, "inside unshard_params")


def keep_requires_grad(handle: FlatParamHandle) -> None:
    """Adopt the `requires_grad` flags that a scope's body set, as if set outside."""
    shown = handle.shown
    flags = () if shown.scope is None else [p.requires_grad for p in shown.scope.params]
    if not shown.shows_flat or len(set(flags)) == 1:
        take_flags(shown, flags)


def has_gradients(handle: FlatParamHandle) -> list[bool]:
    """Return which parameters have a sharded gradient, in either form, on this rank."""
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if grad is not None:
            checked_gradient(shown.sharded, grad)
    if handle.shown.shows_flat and handle.shown.flat is not None:
        flat = handle.shown.flat
        is_there, used = reduced_gradient(flat.sharded) is not None, flat.used
        # If no backward set it, the user did, and it counts for all parameters.
        return [is_there and (is_used or not any(used)) for is_used in used]
    return [reduced_gradient(entry.sharded) is not None for entry in handle.entries]


def gradient_shard(handle: FlatParamHandle) -> Tensor:
    """Return a copy of all sharded gradients, shape `(layout.shard_numel,)`, zero where none is."""
    whole = torch.zeros_like(handle.local_shard)
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if isinstance(grad, FlatShard):
            shown.slice_of(whole).copy_(grad._local)
    return whole


def set_gradients(handle: FlatParamHandle, shard: Tensor, dropped: list[bool]) -> None:
    """Overwrite the sharded gradients that exist, from shape `(layout.shard_numel,)`.

    Works in either form; gradients that are `dropped` are set to None instead.
    """
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if isinstance(grad, FlatShard):
            grad._local.copy_(shown.slice_of(shard))
    for index in compress(count(), dropped):
        drop_gradient(handle, index)


def write_unsharded_gradients(handle: FlatParamHandle) -> None:
    """Add `.grad` of full parameters to the gradients at rest; drop those where there was none."""
    whole, used = torch.zeros_like(handle.local_shard), has_gradients(handle)
    at_rest, left, flat = handle.shown.at_rest, handle.full.params.aliases.left, handle.shown.flat
    for index, entry in enumerate(handle.entries):
        gradient = None if entry.unsharded is None else own_gradient(entry.unsharded)
        used[index] = gradient is not None and (used[index] or left.pop(index, False))
        if gradient is None or entry.unsharded is None:
            continue
        set_gradient(entry.unsharded, None)
        if used[index] and not entry.spec.is_owned_by_other_rank:  # its owner has the same
            piece = entry.spec.slice(local_gradient(gradient, entry.spec))
            entry.slice_of(whole).copy_(piece)
    if handle.shown.shows_flat and flat is not None:
        used = note_used(flat, used)
    add_gradients(at_rest, wrap_all([each.slice_of(whole) for each in at_rest], at_rest), used)


def _move_gradients_to_flat(handle: FlatParamHandle, flat: FlatEntry) -> None:
    flat.used = has_gradients(handle)
    if not any(flat.used):
        return
    whole = gradient_shard(handle)
    for entry in handle.entries:
        entry.sharded.grad = None
    flat.sharded.grad = wrap(flat.slice_of(whole), flat.spec)


def _move_gradients_to_originals(handle: FlatParamHandle, flat: FlatEntry) -> None:
    has_gradient = has_gradients(handle)
    if not any(has_gradient):
        return
    whole = gradient_shard(handle)
    flat.sharded.grad = None
    for entry, is_there in zip(handle.entries, has_gradient, strict=True):
        if is_there and not entry.spec.is_owned_by_other_rank:
            entry.sharded.grad = wrap(entry.slice_of(whole), entry.spec)
