"""Full parameters for the length of a scope.

One `unshard_params` block gathers, shows, writes back, and shows again what was shown before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from composable_shard.flat_param import (
    check_can_show_flat,
    check_can_show_originals,
    show_flat,
    show_originals,
    write_unsharded_gradients,
)
from composable_shard.module_api.scope import FullParamsScope, ScopeOptions
from composable_shard.runtime import (
    ShardState,
    check_is_idle,
    select_states,
)


@contextmanager
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show full parameters in the enclosed block, to read and to edit.

    The modules show ordinary `nn.Parameter`s under the original names, also where they show a flat
    parameter at rest. Whatever happens in the block, they show afterwards what they showed before.
    Forwards under `torch.no_grad()` work and need no communication; forwards that record a graph,
    and backwards, are refused. Call it on all ranks of the units' meshes. The parameters end with
    the scope (a use of them raises, and a graph made from them can't run backward any more), with
    hooks and attributes that were set on them; tensors taken from them, as by `state_dict()`, stay
    readable and keep the memory of their unit as long as they are kept. `requires_grad_()` has the
    same effect inside as outside. A module that is replaced inside is left out from then on; the
    units of one tree can't be copied inside.

    The values take new memory, the bytes of the unsharded parameters in the main dtype, even if a
    strategy keeps full parameters. They are the main values: where a unit computes in another
    dtype, a forward inside computes in the main one.

    All ranks must pass the same flags. One all-gather for each handle, none for a handle that
    is unsharded already; `with_grads` takes one more, and one small all-reduce. With `rank0_only`
    the other ranks free each handle's values at once. On exit `writeback` takes one all-reduce of a
    few bytes for each process group, and nothing else; with `rank0_only` one broadcast for each
    handle and process group.

    Args:
        module: A sharded module, or one with sharded modules below it.
        recurse: Also the units below `module`, which need not be sharded itself.
        writeback: Keep the edits: each rank writes its own slice of its values, so edits must be
            the same on all ranks, or `rank0_only`. If the block raises on any rank, nothing is
            written on any rank, and all ranks raise. False discards edits.
        rank0_only: Only the first rank of each mesh gets full values; with `writeback` its edits
            reach all ranks. The other ranks show sharded parameters.
        offload_to_cpu: Show the values in host memory, on every rank unless `rank0_only`; the
            device holds at most one unit of them at a time.
        with_grads: Show full gradients in `.grad`, and treat them like values. A gradient set to
            None is dropped by `writeback`. Without it a gradient can only be dropped: reading it
            raises. So it is with it for gradients of which no part is reduced, as under `no_sync`.

    Raises:
        ValueError: If there is no unit to show.
        RuntimeError: Inside forward or backward (a post-accumulate hook of a sharded parameter
            runs after both); for a unit that a scope shows already; if a
            gradient exists on some ranks only. On exit: if a parameter was replaced by another
            object, or the block failed on another rank. Nothing has been written then; but if a
            collective of the write-back itself fails, the units before it have been.
    """
    options = ScopeOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    scope = FullParamsScope(module, select_states(module, recurse), options)
    scope.open()
    try:
        yield
    except BaseException as error:
        scope.close(error)
        raise
    scope.close(None)


def writeback(module: nn.Module, *, recurse: bool = False, with_grads: bool = False) -> None:
    """Write the full parameters that `unshard` shows back to the shards; no communication.

    Each rank writes its own slice of its own values, so edits must be the same on all ranks. The
    full values stay as they are until `reshard`; the next forward gathers them again.

    Args:
        module: A module that `unshard` was called on.
        recurse: Also the units below `module`.
        with_grads: Also write `.grad` of the full parameters, where the sharded parameter has a
            gradient, and drop it from all full ones.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: If a unit is not unsharded by hand, if a parameter was replaced, if shards
            were written since, inside forward or backward, or with `with_grads` while `no_sync`
            keeps unreduced gradients.
    """
    states = select_states(module, recurse)
    for state in states:
        _check_can_write_back(state, with_grads)
    with torch.no_grad():
        for handle in dict.fromkeys(h for state in states for h in state.needed_handles):
            handle.full.write_back()
            if with_grads:
                write_unsharded_gradients(handle)


def _check_can_write_back(state: ShardState, with_grads: bool) -> None:
    if any(handle.shown.scope for handle in state.needed_handles):
        raise RuntimeError(
            f"unit '{state.name}' is shown by unshard_params, which writes edits back itself when "
            "its block ends. Pass writeback=True to it."
        )
    if not state.is_held or state.context is None:
        raise RuntimeError(
            f"unit '{state.name}' shows no full parameters to write back. Call unshard(module) "
            "first, and writeback(module) before reshard(module)."
        )
    check_is_idle(state.context, "writeback can't run")
    for handle in state.needed_handles:
        handle.shown.check_registered()
        handle.full.params.check_can_write_back()
        if not handle.full.can_write_back:
            raise RuntimeError(
                f"parameters of unit '{state.name}' were written in their sharded form, as by "
                "optimizer.step(), after unshard(module): writeback would overwrite that. Call "
                "reshard(module) and unshard(module) before editing."
            )
        if with_grads and handle.grads.waits_for_reduction and any(handle.grads.used):
            raise RuntimeError(
                f"gradients of unit '{state.name}' are those that no_sync keeps until "
                "they are reduced. Run a backward that reduces them before writeback, or call "
                "reduce_pending_gradients(module) or drop_pending_gradients(module)."
            )


def register_flat_param(module: nn.Module, *, recurse: bool = True) -> None:
    """Show one flat parameter for each handle instead of the original parameters.

    `.grad` moves with the parameters, so an optimizer must be built over what is shown. Where the
    full values are shown (`unshard`, `unshard_params`), their flat parameter is shown; a forward
    shows the originals again, and so does the end of a scope if they were shown before. No-op on
    units without parameters and on those that show it already. No communication.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward; if some parameters of a handle are frozen and
            some not; if hooks wait for the gradients of some. Nothing has been changed then.
    """
    states = select_states(module, recurse)
    _check_can_toggle(states, module)
    handles = [handle for state in states for handle in state.handles]
    for handle in handles:
        check_can_show_flat(handle)
    for state in states:
        for handle in state.handles:
            show_flat(handle)


def register_orig_params(module: nn.Module, *, recurse: bool = True) -> None:
    """Show the original parameters instead of the flat parameter.

    Shows the sharded originals with sharded gradients, or where full values are shown, the full
    ones. No-op where they are shown already. No communication.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward, or if hooks wait for the flat parameter's
            gradient. Nothing has been changed then.
    """
    states = select_states(module, recurse)
    _check_can_toggle(states, module)
    for state in states:
        for handle in state.handles:
            check_can_show_originals(handle)
    for state in states:
        for handle in state.handles:
            show_originals(handle)


def _check_can_toggle(states: list[ShardState], module: nn.Module) -> None:
    for context in dict.fromkeys(state.context for state in states):
        if context is not None:
            check_is_idle(context, "register_flat_param and register_orig_params can't run")
    for state in states:
        for handle in state.handles:
            handle.adopt_changes()
            handle.shown.check_registered()
