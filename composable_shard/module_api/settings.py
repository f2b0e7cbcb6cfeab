"""Settings of units that may change between steps; each counts from the next pass on."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from composable_shard.comm import CommHook
from composable_shard.options import ReshardAfterForward, check_reshard_after_forward
from composable_shard.runtime import StateRef, apply_policy, check_is_idle, select_states


def set_requires_all_reduce(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether backwards reduce gradients over the ranks that hold copies of a shard.

    For 2-D meshes: while False, gradients are reduce-scattered inside the shard group and add up
    there, without being published; the first backward with `flag` True reduces the sum across.
    Under `SHARD_OPTIM` and `NO_SHARD` gradients are unsharded anyway and nothing is reduced before.

    Args:
        module: A module with sharded units.
        flag: Whether to reduce.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    for state in select_states(module, recurse):
        state.set_gradient_sync(requires_all_reduce=flag)


def set_is_last_backward(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Tell whether the next backward is the last one before the optimizer's step.

    While False, each strategy puts off what it can without holding more memory: the all-reduce of
    2-D meshes, and under `SHARD_OPTIM` and `NO_SHARD` the whole reduction.

    Args:
        module: A module with sharded units.
        flag: Whether it is the last one.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    for state in select_states(module, recurse):
        state.set_gradient_sync(is_last_backward=flag)


def set_gradient_divide_factor(
    module: nn.Module, factor: float | None, *, recurse: bool = True
) -> None:
    """Set what the sum of the gradients over all data-parallel ranks is divided by.

    Args:
        module: A module with sharded units.
        factor: The divisor; None for the number of data-parallel ranks, which gives the mean.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or the factor is not a positive number.
    """
    if factor is not None and not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"expected a positive, finite gradient divide factor, got {factor}")
    for state in select_states(module, recurse):
        for handle in state.handles:
            handle.grads.reduction.set_divide_factor(factor)


def set_reshard_after_forward(
    module: nn.Module, flag: ReshardAfterForward, *, recurse: bool = True
) -> None:
    """Choose what is kept of the full parameters between forward and backward.

    Units whose strategy keeps parameters unsharded are left as they are.

    Args:
        module: A module with sharded units.
        flag: As `reshard_after_forward` of `fully_shard`.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or the value is none of these; nothing is changed then.
    """
    states = select_states(module, recurse)
    sizes = {handle.shard_group.size for state in states for handle in state.handles}
    checked = {size: check_reshard_after_forward(flag, size) for size in sizes}
    for state in states:
        for handle in state.handles[:1]:  # all handles of a unit have one shard group
            apply_policy(state, checked[handle.shard_group.size])


def set_reshard_after_backward(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether the end of a backward frees the full parameters.

    Kept ones spare the next forward its gathers, unless a shard was written. A backward then needs
    a buffer of its own for gradients, which otherwise take the parameters' place.

    Args:
        module: A module with sharded units.
        flag: Whether to free them.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    for state in select_states(module, recurse):
        for handle in state.handles:
            handle.set_reshard_after_backward(flag)


def set_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Choose the units whose gathers are started when the forward of `module` begins.

    Args:
        module: A sharded module.
        modules: Sharded modules, in the order of their gathers. Empty: no gather is started ahead.
            None: that of the unit that came next in the last call, which is the default.

    Raises:
        ValueError: If one of them is not sharded.
    """
    (state,) = select_states(module, recurse=False)
    state.set_forward_prefetch(_refs(modules))


def set_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Choose the units whose gathers are started when the backward of `module` begins.

    Args:
        module: A sharded module.
        modules: Sharded modules, in the order of their gathers. Empty: no gather is started ahead.
            None: that of the unit whose forward ran before, which is the default.

    Raises:
        ValueError: If one of them is not sharded.
    """
    (state,) = select_states(module, recurse=False)
    state.set_backward_prefetch(_refs(modules))


def _refs(modules: Iterable[nn.Module] | None) -> tuple[StateRef, ...] | None:
    if modules is None:
        return None
    return tuple(select_states(module, recurse=False)[0].ref for module in modules)


def register_comm_hook(
    module: nn.Module, hook: CommHook | None, state: object = None, *, recurse: bool = True
) -> None:
    """Let a hook do the communication that turns unsharded gradients into shards of their mean.

    It is called `hook(state, stage)` in place of each collective of a reduction, with a
    `ReductionStage`: once for the reduce-scatter over the shard group, if there is one, and once
    for each group of ranks that hold copies (the second axis of a 2-D mesh, and all of `NO_SHARD`),
    whose stage may come in a later backward. It writes the sum over `stage.group` into
    `stage.output`; the library divides. It returns None, or an object with `wait()` for a sum that
    is there only then. `composable_shard.comm.hooks` has hooks that compress.

    Gradients that `no_sync` accumulates reach the hook once, as their sum. A rank that trains alone
    sends nothing, so the hook is not called. An error that it raises drops the gradients of the
    backward as a whole, as any other; it must be raised on all ranks alike. Copies and pickles of
    the module have no hook.

    Args:
        module: A module with sharded units.
        hook: What to call; the same on all ranks, which the first forward checks by name. None
            takes the hook away, if there is one: gradients are reduced as by default again.
        state: Its first argument, kept alive by the units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, the hook can't be called, or there is a state but no hook.
        RuntimeError: If a unit has a hook already, or in a forward or backward. Nothing is changed
            then.
    """
    if hook is not None and not callable(hook):
        raise ValueError(
            "expected hook to be a function hook(state, stage) or None, got "
            f"{hook!r}. The order of arguments is register_comm_hook(module, hook, state)."
        )
    if hook is None and state is not None:
        raise ValueError("expected no state where hook is None, which takes the hook away")
    states = select_states(module, recurse)
    for context in {each.context for each in states if each.context is not None}:
        check_is_idle(context, "a comm hook can't be registered or taken away")
    reductions = [(each, handle.grads.reduction) for each in states for handle in each.handles]
    for each, reduction in reductions if hook is not None else ():
        if reduction.hook_name is not None:
            raise RuntimeError(
                f"unit '{each.name}' has the comm hook {reduction.hook_name} already. Take it away "
                "with register_comm_hook(module, None) first, or pass recurse=False to leave inner "
                "units out."
            )
    for _, reduction in reductions:
        reduction.set_hook(hook, state)
