"""Setters for reductions, for freeing and prefetching full parameters, and for comm hooks.

Each takes a module with sharded units; `recurse` includes the units below it. Raises ValueError,
with nothing changed, if there is no unit or the value is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from composable_shard.comm import CommHook, HookCall
from composable_shard.options import (
    ReshardAfterForward,
    check_bool,
    check_reshard_after_forward,
)
from composable_shard.runtime import (
    ReshardPolicy,
    ShardState,
    check_is_idle,
    compare_setting,
    select_states,
)


def set_requires_gradient_sync(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether backwards reduce gradients, or accumulate them unsharded on each rank.

    The first backward with `flag` True reduces the accumulated gradients.
    """
    _set_flag(select_states(module, recurse), "requires_gradient_sync", flag)


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication in the enclosed block.

    As in DistributedDataParallel, the next backward outside reduces the sum;
    `reduce_pending_gradients` does it without one. Each rank holds unsharded gradients meanwhile,
    which `zero_grad` drops. The earlier setting of each unit comes back, also after an exception.

    Raises:
        ValueError: If there is no unit in `module`.
    """
    states = select_states(module, recurse=True)
    before = [state.settings.requires_gradient_sync for state in states]
    compare_setting(states, "no_sync()", any(before))
    try:
        try:
            for state in states:
                state.change(requires_gradient_sync=False)
            yield
        finally:
            _set_syncs(states, before)
    finally:
        # Again: if an interrupt had cut it off, backwards would never reduce.
        _set_syncs(states, before)
        compare_setting(states, "the end of no_sync()", any(before))


def _set_syncs(states: list[ShardState], flags: list[bool]) -> None:
    for state, flag in zip(states, flags, strict=True):
        state.change(requires_gradient_sync=flag)


def set_requires_all_reduce(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether backwards reduce gradients over the ranks that hold copies of a shard.

    For 2-D meshes: while False, gradients are reduce-scattered inside the shard group and add up
    there, without being published; the first backward with `flag` True reduces the sum across.
    Under `SHARD_OPTIM` and `NO_SHARD` gradients are unsharded anyway and nothing is reduced before.
    """
    _set_flag(select_states(module, recurse), "requires_all_reduce", flag)


def set_is_last_backward(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Set whether the next backward is the last one before the optimizer's step.

    While False, each strategy postpones every collective that it can postpone without extra memory:
    the all-reduce of 2-D meshes, and under `SHARD_OPTIM` and `NO_SHARD` the whole reduction.
    """
    _set_flag(select_states(module, recurse), "is_last_backward", flag)


def set_gradient_divide_factor(
    module: nn.Module, factor: float | None, *, recurse: bool = True
) -> None:
    """Set the divisor of the gradients' sum over all data-parallel ranks.

    Args:
        module: A module with sharded units.
        factor: The divisor; None for the number of data-parallel ranks, which gives the mean.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or the factor is not a positive number.
    """
    if factor is not None and not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"expected a positive, finite gradient divide factor, got {factor}")
    states = select_states(module, recurse)
    _set(states, "gradient_divide_factor", factor)


def set_gathers_at_rest(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether operations on parameters at rest may gather whole tensors; no communication.

    Args:
        module: A module with sharded units.
        flag: True, the default, runs any operation, and warns once where it gathers. False makes
            an operation that would gather raise RuntimeError on every rank, with nothing changed.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or `flag` is no bool.
    """
    states = select_states(module, recurse)
    _set_flag(states, "gathers_at_rest", flag)
    for state in states:
        for handle in state.handles:
            for entry in (*handle.entries, *handle.shown.at_rest):
                entry.spec.label.refuse_gathers(not flag)


def set_reshard_after_forward(
    module: nn.Module, flag: ReshardAfterForward, *, recurse: bool = True
) -> None:
    """Choose how much of the full parameters is kept between forward and backward.

    Units whose strategy keeps parameters unsharded are left as they are.

    Args:
        module: A module with sharded units.
        flag: As `reshard_after_forward` of `fully_shard`.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit, or the value is invalid; nothing is changed then.
    """
    states = select_states(module, recurse)
    sizes = {handle.shard_group.size for state in states for handle in state.handles}
    checked = {size: check_reshard_after_forward(flag, size) for size in sizes}
    freeing = [state for state in states if state.options.strategy.facts.frees_params]
    is_new = any(state.settings.reshard_after_forward != flag for state in freeing)
    compare_setting(states, f"set_reshard_after_forward({flag})", is_new)
    for state in freeing:
        for handle in state.handles[:1]:  # all handles of a unit have one shard group
            ReshardPolicy(checked[handle.shard_group.size], handle.shard_group).apply(state)


def set_reshard_after_backward(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether the end of a backward frees the full parameters.

    Kept parameters save the next forward's gathers, unless a shard was written. A backward then
    needs a separate buffer for gradients, which otherwise overwrite the parameters.
    """
    _set_flag(select_states(module, recurse), "reshard_after_backward", flag)


def set_unshard_in_backward(module: nn.Module, flag: bool) -> None:
    """Choose whether the backward of a unit gathers its full parameters.

    A backward that reads no parameter, for example of embeddings alone, needs no gather, which
    saves one all-gather. Modules then show the shards while it runs.

    Args:
        module: A sharded module.
        flag: Whether to gather. Where False is wrong, autograd raises in the backward: a tensor "is
            at version 1000000000".

    Raises:
        ValueError: If the module is not sharded.
    """
    _set_flag(select_states(module, recurse=False), "unshard_in_backward", flag)


def set_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Choose the units whose gathers are started when the forward of `module` begins.

    Args:
        module: A sharded module.
        modules: Sharded modules, in the order of their gathers. Empty: no gather is started ahead.
            None: the gather of the unit that came next in the last call, which is the default.

    Raises:
        ValueError: If one of them is not sharded.
    """
    _set_prefetch(module, "forward_prefetch", modules)


def set_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Choose the units whose gathers are started when the backward of `module` begins.

    Args:
        module: A sharded module.
        modules: Sharded modules, in the order of their gathers. Empty: no gather is started ahead.
            None: the gather of the unit whose forward ran before, which is the default.

    Raises:
        ValueError: If one of them is not sharded.
    """
    _set_prefetch(module, "backward_prefetch", modules)


def _set_prefetch(module: nn.Module, name: str, modules: Iterable[nn.Module] | None) -> None:
    targets = None
    if modules is not None:
        targets = tuple(select_states(each, recurse=False)[0].ref for each in modules)
    names = targets and [state.name for each in targets if (state := each()) is not None]
    _set(select_states(module, recurse=False), name, targets, f"() to {names}")


def _set_flag(states: Sequence[ShardState], name: str, value: object) -> None:
    check_bool("flag", value)
    _set(states, name, value)


def _set(states: Sequence[ShardState], name: str, value: object, shown: str = "") -> None:
    """Change a setting of units; if only some ranks change it, the ranks' comparison raises."""
    is_new = any(getattr(state.settings, name) != value for state in states)
    compare_setting(states, f"set_{name}{shown or f'({value})'}", is_new)
    for state in states:
        state.change(**{name: value})


def register_comm_hook(
    module: nn.Module, hook: CommHook | None, state: object = None, *, recurse: bool = True
) -> None:
    """Make a hook replace the collectives that reduce gradients to shards of their mean.

    It is called `hook(state, stage)` in place of each collective of a reduction, with a
    `ReductionStage`: once for the reduce-scatter over the shard group, if there is one, and once
    for each group of ranks that hold copies (the second axis of a 2-D mesh, and all of `NO_SHARD`),
    whose stage may come in a later backward. It writes the sum over `stage.group` into
    `stage.output`; the library divides. It returns None, or an object with `wait()` if the sum is
    complete only after that. `composable_shard.comm.hooks` has hooks that compress.

    Gradients that `no_sync` accumulates reach the hook once, as their sum. A rank that trains alone
    sends nothing, so the hook is not called. An error that it raises drops the gradients of the
    backward as a whole, as any other; all ranks must raise it. Copies of the module have no
    hook.

    Args:
        module: A module with sharded units.
        hook: The function to call; the same on all ranks, which the first forward checks by name.
            None removes the hook, if there is one: gradients are reduced as by default again.
        state: The hook's first argument, kept alive by the units.
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
    # All units are checked before the first gets the hook; the note names what the record then has.
    for each in states if hook is not None else ():
        if each.settings.comm_hook is not None:
            name = each.settings.hook_name
            raise RuntimeError(
                f"unit '{each.name}' has the comm hook {name} already. Take it away "
                "with register_comm_hook(module, None) first, or pass recurse=False to leave inner "
                "units out."
            )
    for each in states:
        each.change(comm_hook=None if hook is None else HookCall(hook, state))
    compare_setting(states, f"register_comm_hook() of {states[0].settings.hook_name}", is_new=True)
