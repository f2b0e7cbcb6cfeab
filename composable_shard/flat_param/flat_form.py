"""Switch a handle between its two forms at rest: original parameters, or one flat parameter."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from composable_shard.flat_param.entries import FlatEntry
from composable_shard.flat_param.gradients_at_rest import gradient_shard, has_gradients
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.kept_params import ALL
from composable_shard.flat_param.param_classes import UnshardedParameter
from composable_shard.flat_param.pending_gradients import unmarked
from composable_shard.flat_param.user_hooks import adopt_hooks
from composable_shard.tensor import FlatShard, ShardSpec, flat_spec, wrap
from composable_shard.torch_private import post_accumulate_hooks_of


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
    adopt_hooks(handle.shown)
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
        with torch.no_grad(), unmarked(handle):
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
    with torch.no_grad(), unmarked(handle):
        _move_gradients_to_originals(handle, flat)
        shown.set_flat(flat, shows_flat=False)
    shown.hide_unshown()
    shown.index_slots()
    shown.show_unsharded_as(None)
    shown.flat_slot.remove()


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
